"""What all two-lane policies share: room in the KV cache, and whom to preempt when it runs out."""

from __future__ import annotations

from bullet.state import SystemState


def fits(state: SystemState, blocks: int, taken_blocks: int = 0) -> bool:
    """Whether a whole prompt that takes so many blocks fits now, after ``taken_blocks`` more, with room to grow for each running
    sequence.

    Without that headroom an admitted prompt would be preempted by the very next iterations. An idle system needs none:
    whatever fits at all is admitted, so nothing waits for ever.
    """
    kv = state.kv
    free = kv.free_blocks - taken_blocks
    running = state.decode_seqs
    if running == 0 and state.prefill is None and taken_blocks == 0:
        return blocks <= free
    return blocks + (running + 1) * kv.block_units <= free


def decode_victims(state: SystemState) -> tuple[int, ...]:
    """The fewest latest-admitted decodes to preempt so that the next iteration's blocks fit (usually none).

    In order of being preempted: each goes to the front of the queue, so the earliest admitted ends up first.
    """
    free = state.kv.free_blocks
    needed = state.decode_growth_blocks()
    if needed <= free:
        return ()
    victims: list[int] = []
    decode, kv = state.decode, state.kv
    for request in [*reversed(state.ready), *reversed(decode.requests.values())]:
        inside = request.id in decode.requests
        cached = decode.cached(request) if inside else request.known_tokens - 1
        free += kv.freed(request, cached)
        needed -= kv.growth(cached)
        victims.append(request.id)
        if needed <= free:
            break
    return tuple(victims)
