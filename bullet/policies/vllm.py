"""``vllm-N``: the vLLM V1 scheduler (0.8.5, the paper's rival; the same in these points in 0.19) with a budget of N tokens a
step. Checked against ``vllm/v1/core/sched/scheduler.py``; docs/policies.md lists what is left out.

Each step first serves ``running`` in order of admission, ``min(known - computed, budget left)`` tokens each: one for a
decode, a chunk for a prompt. A request that finds no KV block preempts the tail of ``running`` (recompute; to the front of
the queue) until it does or is itself the tail. If nothing was preempted, the queue is admitted from the front while tokens
and sequences last and there are blocks for its first chunk; the first that does not fit ends it.

Where ``running`` is. It is ``state.decode.requests`` (a dict in order of joining) followed by ``state.chunked``, because a
prompt computed in part is always the tail of ``running``:

1. At most one is in part. A prompt gets less than all of what it lacks only if it takes the whole budget that is left;
   after it nobody is admitted in that step, and everybody before it was complete.
2. It is the tail. It was admitted last in that step; while it stays in part it takes the whole budget again (or finds
   none, if decodes take it all), so nobody is admitted behind it.
3. Hence prompts complete in order of admission, those of one step in the order of its chunks, and join the decode batch in
   that order. A preempted request leaves ``running`` altogether and is admitted anew.

So all decodes come first and take one token each, and N >= ``max_num_seqs`` (the engine insists on it too) means that no
decode is ever left without a token. Blocks are taken as tokens come: a decode's, and those of the one prompt in part, whose next
chunk may find none; it is then the tail itself and goes back to the queue. All allocations succeed exactly if the decodes' growth
and that chunk's blocks are no more than the free ones: two comparisons, and nobody is walked.

That is the default. Options bring back what a replay of a 0.19 run needs (docs/validation.md shows what each is worth):

- ``prefix_cache``: prompts take over cached blocks (bullet/state/prefix.py).
- ``admission``: ``chunk`` (default, 0.8: only the first chunk must fit), ``check`` (0.19: the whole known length must fit, blocks
  are taken chunk by chunk), ``reserve`` (of no engine: a prompt's blocks are all taken when it is admitted).
- ``steps_in_flight``: 2 decides the next step while one still runs (the engine's asynchronous scheduling).
- ``resume``: ``front`` (the engine's way) or ``back`` of the queue for preempted requests.
- ``freed_uncached``: where freed blocks that hold nothing cached go in the queue of free ones, ``back`` (as all do, 0.8) or
  ``front`` (0.33: used again before anything cached is lost).

With any of them but ``chunk`` and ``reserve``, blocks have names and ``running`` is the engine's own list, walked request by
request (``_paged_step``).
The walk is a rehearsal: it makes the allocations on a plan of the cache, and the driver makes the same ones on the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bullet.errors import ConfigError
from bullet.policies.base import PolicyContext, read_options, require
from bullet.state import HYBRID, Chunk, Decision, HybridStep, Request, Step, SystemState, Wait
from bullet.state.prefix import PagedState, Paging, PrefixKvCache
from bullet.units import GIB

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 256,  # on devices of 70 GiB and more 1,024; no more than the budget
    "prefix_cache": False,
    "admission": "chunk",
    "steps_in_flight": 1,
    "resume": "front",
    "freed_uncached": "back",
}
LARGE_DEVICE_BYTES, SEQS_ON_LARGE = 70 * GIB, 1024
"""From so much memory on the engine's default is the larger one (``engine/arg_utils.py``)."""
CHOICES: Mapping[str, tuple[Any, ...]] = {"admission": ("reserve", "check", "chunk"), "steps_in_flight": (1, 2),
                                          "resume": ("front", "back"), "freed_uncached": ("back", "front")}


class Vllm:
    """One lane, running first, a token budget."""

    lanes: tuple[str, ...] = (HYBRID,)

    def __init__(self, context: PolicyContext, budget_tokens: int) -> None:
        # A budget below the engine's default lowers it, as its later versions have it (0.8.5 refuses).
        seqs = min(budget_tokens, SEQS_ON_LARGE if context.gpu.mem_bytes >= LARGE_DEVICE_BYTES else OPTIONS["max_num_seqs"])
        options = read_options(f"vllm-{budget_tokens}", context.options,
                               {**OPTIONS, "prefix_cache": context.prefix_cache, "max_num_seqs": seqs})
        self.max_num_seqs: int = options["max_num_seqs"]
        self.budget_tokens = budget_tokens
        self.sms = context.splits.num_sms
        require(options, "max_num_seqs", self.max_num_seqs >= 1, "1 or more")
        if budget_tokens < self.max_num_seqs:
            raise ConfigError(f"policy vllm-{budget_tokens}: the token budget must be at least max_num_seqs = "
                              f"{self.max_num_seqs}, or decodes could not all run")
        for name, allowed in CHOICES.items():
            require(options, name, options[name] in allowed, " or ".join(map(str, allowed)))
        self.admission: str = options["admission"]
        #: Blocks by name and the engine's own list, where an option asks for it; the driver reads this.
        self.paging: Paging | None = None
        named = options["prefix_cache"] or any(options[name] != OPTIONS[name] for name in ("steps_in_flight", "resume"))
        if named or self.admission == "check":
            self.paging = Paging(options["prefix_cache"], self.admission == "reserve", options["resume"] == "back",
                                 options["steps_in_flight"], options["freed_uncached"] == "front")
        #: Whether blocks are counted, and a prompt takes them chunk by chunk.
        self.by_chunk = self.paging is None and self.admission == "chunk"
        self._decode_all = HybridStep(self.sms, steady=True, by_chunk=self.by_chunk)  # most steps are this one

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """Running first, then admissions."""
        if self.paging is not None:
            assert isinstance(state, PagedState), "named blocks need the paged driver"
            return self._paged_step(state)
        decode, kv, queue = state.decode, state.kv, state.queue.requests
        seqs = decode.size
        free = kv.free_blocks - decode.growth_blocks
        if free < 0:
            return self._preempting(state)
        if seqs and not queue and not state.chunked:
            return self._decode_all
        chunks: list[Chunk] = []
        budget, slots = self.budget_tokens - seqs, self.max_num_seqs - seqs
        by_chunk = self.by_chunk
        if state.chunked:
            chunks, budget = _continue(state.chunked, budget)
            slots -= len(state.chunked)
            if by_chunk and chunks:
                free -= kv.blocks_for(chunks[0].past_tokens + chunks[0].new_tokens) - kv.blocks_for(chunks[0].past_tokens)
                if free < 0:  # it is the tail of running: it preempts itself, and nobody is admitted
                    assert seqs, f"a lone prompt outgrew the KV cache of {kv.total_blocks} blocks"
                    return HybridStep(self.sms, preempt=(chunks[0].request_id,), reason="preempt", by_chunk=True)
        for request in queue:
            if budget == 0 or slots == 0:
                break
            known = request.prompt_tokens + request.generated
            new = known if known < budget else budget
            blocks = kv.blocks_for(new if by_chunk else known)
            if blocks > free:
                break
            chunks.append(Chunk(request.id, new, 0))
            free -= blocks
            budget -= new
            slots -= 1
        if not seqs and not chunks:
            return Wait(reason="nothing fits")
        return HybridStep(self.sms, tuple(chunks), seqs > 0, by_chunk=by_chunk)

    def _preempting(self, state: SystemState) -> HybridStep:
        """Blocks are short: walk ``running`` request by request, as the engine does. Nobody is admitted in such a step."""
        decode, kv = state.decode, state.kv
        chunked = list(state.chunked)
        decodes = list(decode.requests.values())
        free, served = kv.free_blocks, 0
        victims: list[int] = []
        while served < len(decodes):
            request = decodes[served]
            needed = decode.growth_of(request)
            while needed > free:
                tail = (chunked or decodes).pop()
                held = (decode.cached(tail) if tail.id in decode.requests else
                        tail.computed_tokens if self.by_chunk else tail.known_tokens)
                free += kv.blocks_for(held)
                victims.append(tail.id)
                if tail is request:
                    break
            else:
                free -= needed
                served += 1
        assert decodes or chunked, f"a lone request outgrew the KV cache of {kv.total_blocks} blocks; preempted {victims}"
        chunks, _ = _continue(chunked, self.budget_tokens - len(decodes))
        if self.by_chunk and chunks:
            reach = chunks[0].past_tokens + chunks[0].new_tokens
            if kv.blocks_for(reach) - kv.blocks_for(chunks[0].past_tokens) > free:
                victims.append(chunks.pop().request_id)
        return HybridStep(self.sms, tuple(chunks), bool(decodes), preempt=tuple(victims), reason="preempt",
                          by_chunk=self.by_chunk)

    @property
    def shares_prefixes(self) -> bool:
        """Only with named blocks."""
        return self.paging is not None and self.paging.prefix_cache

    # ---- with named blocks -----------------------------------------------------------------------

    def _paged_step(self, state: PagedState) -> Decision:
        """As above, request by request: every request of the step is a chunk, decodes of one token."""
        served, growth, budget = self._lacking(state)
        kv = state.blocks
        if growth <= kv.free_blocks and not self._may_admit(state, served, growth, budget):
            return HybridStep(self.sms, tuple(served), False) if served else Wait(reason="nothing fits")
        plan = kv.plan()
        running = list(state.running)
        chunks: list[Chunk] = []
        victims: list[int] = []
        by_id = {request.id: request for request in running}
        for chunk in served:
            request = by_id[chunk.request_id]
            if request.id in victims:
                break  # it was the tail of a request before it, and so were all behind it
            reach = chunk.past_tokens + chunk.new_tokens
            while not plan.extend(request, reach, reach):
                tail = running.pop()
                plan.free(tail)
                victims.append(tail.id)
                if tail is request:
                    break
            else:
                chunks.append(chunk)
                continue
            break
        if victims:
            reason = "preempt"
        else:
            self._admissions(state, plan, len(running), budget, chunks)
            reason = ""
        if not chunks:
            # Only requests with their last token in flight are left: their blocks come free when it arrives.
            assert not victims or running, f"a lone request outgrew the KV cache of {kv.total_blocks} blocks: {victims}"
            return Wait(reason="nothing fits")
        return HybridStep(self.sms, tuple(chunks), False, preempt=tuple(victims), reason=reason)

    def _lacking(self, state: PagedState) -> tuple[list[Chunk], int, int]:
        """What running requests are due, the fresh blocks that it takes, and the tokens that are left for others.

        One whose last token is in flight is due nothing.
        """
        tables, size, ending, unknown = state.blocks.tables, state.blocks.block_tokens, state.ending, state.unknown
        budget, growth = self.budget_tokens, 0
        due: list[Chunk] = []
        for request in state.running:
            if budget == 0:
                break
            number, computed = request.id, request.computed_tokens
            if number in ending:
                continue
            new = request.known_tokens + unknown[number] - computed
            if new > budget:
                new = budget
            due.append(Chunk(number, new, computed))
            lacking = -(-(computed + new) // size) - len(tables[number])
            if lacking > 0:
                growth += lacking
            budget -= new
        return due, growth, budget

    def _may_admit(self, state: PagedState, served: Sequence[Chunk], growth: int, budget: int) -> bool:
        """Whether the head of the queue could fit; False only if it cannot."""
        if budget == 0 or not state.queue.requests or len(state.running) >= self.max_num_seqs:
            return False
        if self.admission == "chunk":
            return growth < state.blocks.free_blocks
        # Growth may yet evict some of these hits, which can only raise the cost: it is all blocks but the referenced hits. What
        # this step's chunks fill may be hit in the same step, which lowers it.
        head, kv = state.queue.requests[0], state.blocks
        over = kv.cost(kv.hits(head), head.known_tokens) - (kv.free_blocks - growth)
        if over <= 0 or not kv.caching:
            return over <= 0
        size = kv.block_tokens
        return over <= sum((past + new) // size - past // size for _, new, past in served)

    def _admissions(self, state: PagedState, plan: PrefixKvCache, running: int, budget: int, chunks: list[Chunk]) -> None:
        """From the front of the queue while tokens, sequences and blocks last; the first that does not fit ends it."""
        last = len(state.queue.requests) - 1
        for place, request in enumerate(state.queue.requests):
            if budget == 0 or running == self.max_num_seqs:
                break
            hits = plan.hits(request)
            past = len(hits) * plan.block_tokens
            new = min(request.known_tokens - past, budget)
            if self.admission == "check" and plan.cost(hits, request.known_tokens) > plan.free_blocks:
                break
            room = state.room(request, past + new)
            if new == budget or place == last:  # nobody comes after it who would see what it took
                if plan.cost(hits, room) > plan.free_blocks:
                    break
            elif not plan.admit(request, hits, room, past + new):
                break
            chunks.append(Chunk(request.id, new, past))
            budget -= new
            running += 1

    def observe(self, step: Step, elapsed_s: float) -> None:
        """It learns nothing."""


def _continue(chunked: Sequence[Request], budget: int) -> tuple[list[Chunk], int]:
    """The next chunk of prompts computed in part, and the budget left."""
    chunks: list[Chunk] = []
    for request in chunked:
        new = min(request.known_tokens - request.computed_tokens, budget)
        if new > 0:
            chunks.append(Chunk(request.id, new, request.computed_tokens))
            budget -= new
    return chunks, budget
