"""``vllm-N``: the vLLM V1 scheduler (as of 0.8.5, the paper's rival; unchanged in these points in 0.19) with a budget
of N tokens a step.

Each step first serves ``running`` in order of admission, one token for a decode, ``min(known - computed, budget)`` for a
prompt; a request that finds no KV block preempts the tail of ``running`` (recompute; to the front of the queue) until it
does or is itself the tail. If nothing was preempted, the queue is admitted from the front while tokens, sequences and
blocks for the whole known length last; the first that does not fit ends it.

``running`` is ``state.decode`` (a dict in order of admission) followed by ``state.chunked``. A prompt computed in part is
always the tail: whoever is admitted after it gets tokens only from the budget that it leaves, and it leaves none until
its prompt is complete. So all decodes come first, each takes one token, and at most one chunk is pending when a step
begins; with more sequences than budget the decodes beyond it wait a step (not modelled: N is at least the sequence cap).

Not modelled yet: prefix sharing, two steps in flight.
"""

from __future__ import annotations

from bullet.errors import ConfigError
from bullet.policies.base import PolicyContext, read_options
from bullet.state import HYBRID, Chunk, Decision, HybridStep, Step, SystemState, Wait


class Vllm:
    """One lane, running first, token budget. Options: ``max_num_seqs`` (256, vLLM's default)."""

    lanes: tuple[str, ...] = (HYBRID,)

    def __init__(self, context: PolicyContext, budget_tokens: int) -> None:
        options = read_options(f"vllm-{budget_tokens}", context.options, {"max_num_seqs": 256})
        self.max_num_seqs: int = options["max_num_seqs"]
        self.budget_tokens = budget_tokens
        self.sms = context.splits.num_sms
        if self.max_num_seqs < 1:
            raise ConfigError(f"policy.options.max_num_seqs = {self.max_num_seqs}: must be 1 or more")
        if budget_tokens < self.max_num_seqs:
            raise ConfigError(f"policy vllm-{budget_tokens}: the token budget must be at least max_num_seqs = "
                              f"{self.max_num_seqs}, or decodes could not all run")

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """Running first, then admissions."""
        decode, kv = state.decode, state.kv
        seqs = decode.size
        growth = decode.growth_blocks
        if growth > kv.free_blocks:
            return self._preempting(state)
        budget = self.budget_tokens - seqs
        chunks: list[Chunk] = []
        for request in state.chunked:
            new = min(request.known_tokens - request.computed_tokens, budget)
            if new > 0:
                chunks.append(Chunk(request.id, new, request.computed_tokens))
                budget -= new
        if budget > 0 and state.queue.requests:
            free = kv.free_blocks - growth
            room = self.max_num_seqs - seqs - len(state.chunked)
            for request in state.queue.requests:
                if budget <= 0 or room <= 0:
                    break
                blocks = kv.blocks_for(request.known_tokens)
                if blocks > free:
                    break
                new = min(request.known_tokens, budget)
                chunks.append(Chunk(request.id, new, 0))
                free -= blocks
                budget -= new
                room -= 1
        if not seqs and not chunks:
            return Wait(reason="nothing fits")
        return HybridStep(self.sms, tuple(chunks), seqs > 0)

    def _preempting(self, state: SystemState) -> HybridStep:
        """Blocks are short: walk ``running`` request by request, as the engine does. No admissions in such a step."""
        decode, kv = state.decode, state.kv
        running = [*decode.requests.values(), *state.chunked]
        free, served, victims = kv.free_blocks, 0, []
        while served < len(running):
            request = running[served]
            inside = request.id in decode.requests
            needed = 1 if inside and decode.needs_block(request) else 0
            while needed > free:
                victim = running.pop()
                held = decode.cached(victim) if victim.id in decode.requests else victim.known_tokens
                free += kv.blocks_for(held)
                victims.append(victim.id)
                if victim is request:
                    break
            else:
                free -= needed
                served += 1
        seqs = sum(r.id in decode.requests for r in running)
        budget = self.budget_tokens - seqs
        chunks = []
        for request in running[seqs:]:
            new = min(request.known_tokens - request.computed_tokens, budget)
            if new > 0:
                chunks.append(Chunk(request.id, new, request.computed_tokens))
                budget -= new
        return HybridStep(self.sms, tuple(chunks), seqs > 0, preempt=tuple(victims), reason="preempt")

    def observe(self, step: Step, elapsed_s: float) -> None:
        """It learns nothing."""
