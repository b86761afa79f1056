"""``sglang-N`` and ``sglang-N-mixed``: SGLang 0.4.6 with chunked prefill of N tokens. docs/policies.md names the sources.

``sglang-N`` is the engine's default: prefill runs ahead of decodes. While a chunk is pending or a queued prompt is admitted,
the step is a prefill batch of up to N tokens; otherwise every running request decodes one token.

``sglang-N-mixed`` is the paper's hybrid batch (``enable_mixed_chunk``): all decodes, then prompt chunks up to N tokens in
all, so a prompt of sl tokens beside ds decodes takes ceil(sl / (N - ds)) iterations.

Admission is first come, first served. It sets room aside for what may yet be generated: all of the announced
``max_new_tokens`` for a newcomer, ``ratio`` x what is left of it for who runs already. The ratio starts at 0.7, falls to
0.098 over 600 decode steps, is estimated anew by a retraction and starts over when the engine has been idle. Once a prompt
found no room the batch counts as full: nothing is tried until a decode step finds that the batch has shrunk, or a prompt
ends with its first token.

A policy must not see output lengths, and clients of these traces announce none: ``assumed_new_tokens`` stands for the
announced maximum (*assumed*). The engine's own benchmark client announces the true length; 512 is of the order of its
outputs and, unlike a chat client's 4,096, lets a batch grow.

Retraction, when decode finds no block: those with the fewest generated tokens leave (the longest prompt first), at least
one, until each that stays has room for 20 tokens; they queue up *behind* who waits.
"""

from __future__ import annotations

import numpy as np

from bullet.policies.base import PolicyContext, read_options, require
from bullet.state import HYBRID, Chunk, Decision, HybridStep, Request, Step, SystemState, Wait

OPTIONS = {
    # What the engine derives (capacity / context length x 512, within 2,048 and 4,096) for one 80 GB device and 128k context.
    "max_running_requests": 2048,
    "max_prefill_tokens": 16384,
    "initial_new_token_ratio": 0.7,
    "min_new_token_ratio": 0.098,  # 0.14 x the initial ratio
    "ratio_decay_steps": 600,
    "assumed_new_tokens": 512,
    "retract_steps": 20,
    "schedule_policy": "fcfs",  # or lpm: of the waiting, who shares most with the cache first; while few enough wait
}
LPM_QUEUE = 128
"""More than so many wait in order of arrival: the engine finds matching all of them too dear."""


class Sglang:
    """One lane, chunks of ``chunk_tokens`` ahead of decodes; ``mixed``: both in one batch."""

    lanes: tuple[str, ...] = (HYBRID,)
    shares_prefixes = True

    def __init__(self, context: PolicyContext, chunk_tokens: int, mixed: bool = False) -> None:
        self.name = f"sglang-{chunk_tokens}" + ("-mixed" if mixed else "")
        options = read_options(self.name, context.options, OPTIONS)
        for name, value in options.items():
            if name != "schedule_policy":
                require(options, name, value > 0, "positive")
        require(options, "schedule_policy", options["schedule_policy"] in ("fcfs", "lpm"), "fcfs or lpm")
        self.longest_prefix = options["schedule_policy"] == "lpm"
        self.chunk_tokens = chunk_tokens
        self.mixed = mixed
        self.sms = context.splits.num_sms
        self.max_running: int = options["max_running_requests"]
        self.max_prefill_tokens: int = options["max_prefill_tokens"]
        self.new_tokens: int = options["assumed_new_tokens"]
        self.retract_steps: int = options["retract_steps"]
        self.initial_ratio: float = options["initial_new_token_ratio"]
        self.min_ratio: float = min(options["min_new_token_ratio"], self.initial_ratio)
        self.decay: float = (self.initial_ratio - self.min_ratio) / options["ratio_decay_steps"]
        self.ratio = self.initial_ratio
        #: Sequences when a prompt last found no room; ``None``: there may be room.
        self.full_at: int | None = None
        self.prefilled = False  # whether the last step was a prefill batch
        self.launched_s = self.ended_s = float("-inf")
        self._decode_all = HybridStep(self.sms)

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """Chunks ahead of decodes, or (mixed) decodes and chunks together."""
        self.launched_s = now_s
        decode, queue = state.decode, state.queue.requests
        seqs, growth = decode.size, decode.growth_blocks
        if self.full_at is not None and self.prefilled and seqs < self.full_at:
            self.full_at = None  # a prompt of the last batch ended with its first token, which is seen at once
        self.prefilled = False
        if not seqs:
            self.full_at = None
            if not state.chunked and queue and queue[0].queued_s > self.ended_s:  # nobody waited: the engine was idle
                self.ratio = self.initial_ratio
        short = growth > state.kv.free_blocks
        if self.mixed and short:
            return self._retract(state)
        if state.chunked or (queue and self.full_at is None):
            chunks = self._chunks(state)
            if chunks:
                self.prefilled = True
                return HybridStep(self.sms, chunks, self.mixed and seqs > 0)
        if not seqs:
            return Wait(reason="nothing fits")
        if short:
            return self._retract(state)
        if self.full_at is not None and seqs < self.full_at:
            self.full_at = None  # seen only now: the batch is tidied up in a decode step, so admission lags one behind
        return self._decode_all

    def _chunks(self, state: SystemState) -> tuple[Chunk, ...]:
        """The pending chunk first, then prompts from the queue in order while tokens and room last."""
        self.full_at = None
        decode, kv = state.decode, state.kv
        beside = decode.size if self.mixed else 0
        budget, input_left = self.chunk_tokens - beside, self.max_prefill_tokens - beside
        chunks: list[Chunk] = []
        aside = 0  # tokens, for newcomers
        for request in state.chunked:
            lacking = request.known_tokens - request.computed_tokens
            new = min(lacking, budget)
            if new > 0:
                chunks.append(Chunk(request.id, new, request.computed_tokens))
                budget -= new
                input_left -= new
            aside += self.new_tokens if new == lacking else 0
        if not state.queue.requests:
            return tuple(chunks)
        free = kv.free_blocks - (decode.growth_blocks if self.mixed else 0)
        free_tokens = free * kv.tokens_a_block
        pinned: set[tuple[int, int]] = set()
        # For who runs: first as if nobody had made a token yet. Requests are counted only where that would refuse.
        running, counted = self.ratio * self.new_tokens * decode.size, False
        room = self.max_running - decode.size - len(chunks)
        full = False
        queue = _by_queueing(state.queue.requests)
        if self.longest_prefix and kv.sharing and len(queue) <= LPM_QUEUE:
            queue = sorted(queue, key=lambda r: -kv.past(r))
        for request in queue:
            known = kv.fresh(request)
            blocks = kv.blocks_to_admit(request, pinned)
            tokens = blocks * kv.tokens_a_block
            if not counted and known + self.new_tokens >= free_tokens - tokens - aside - running:
                running, counted = self._set_aside(state), True
            alone = not decode.size and not chunks  # whatever fits at all is served, or it would wait for ever
            full = room <= 0 or blocks > free or (
                not alone and known + self.new_tokens >= free_tokens - aside - running)
            if full or (known >= input_left and chunks) or budget <= 0:
                break
            new = min(known, budget)
            chunks.append(Chunk(request.id, new, kv.past(request)))
            budget -= new
            input_left -= new
            room -= 1
            free -= blocks
            free_tokens = free * kv.tokens_a_block
            aside += self.new_tokens if new == known else 0
            full = free_tokens <= aside + running
            if full or budget <= 0 or input_left <= 0:
                break
        # The flag lives on the batch of decodes: lost with it if that is empty, or mixed into a prefill batch.
        if full and decode.size and not (self.mixed and chunks):
            self.full_at = decode.size + len(chunks)
        return tuple(chunks)

    def _set_aside(self, state: SystemState) -> float:
        """Tokens set aside for what the running requests may yet generate."""
        generated = state.decode.generated_offset + state.decode.iteration
        left: float = self.ratio * float(np.maximum(self.new_tokens - generated, 0.0).sum())
        return left

    def _retract(self, state: SystemState) -> HybridStep:
        """Free room for the coming ``retract_steps`` tokens of those that stay; one request always stays."""
        decode, kv = state.decode, state.kv
        # Most generated first, then shortest prompt, then in order of joining: the last ones go.
        ranked = sorted(decode.requests.values(), key=lambda r: (-decode.generated(r), r.prompt_tokens))
        free = kv.free_blocks
        headroom = max(self.retract_steps, kv.block_tokens)  # no less than the next step's blocks can be
        victims: list[Request] = []
        while len(ranked) > 1 and (not victims or free * kv.tokens_a_block < headroom * len(ranked)):
            victim = ranked.pop()
            free += kv.freed(victim, decode.cached(victim))
            victims.append(victim)
        if len(ranked) == 1 and decode.growth_of(ranked[0]) > free:
            # A mixed batch's pending prompt holds the rest of the cache: it goes too.
            assert state.chunked, f"{ranked[0]} outgrew the KV cache of {kv.total_blocks} blocks"
            victims.extend(reversed(state.chunked))
        made = sum(decode.generated(r) for r in ranked)
        self.ratio = min(1.0, (made + self.retract_steps * len(ranked)) / (self.new_tokens * len(ranked)))
        self.full_at = None
        return HybridStep(self.sms, (), True, preempt=tuple(r.id for r in victims), reason="retract")

    def observe(self, step: Step, elapsed_s: float) -> None:
        """A plain decode step lowers the ratio."""
        self.ended_s = self.launched_s + elapsed_s
        if isinstance(step, HybridStep) and not step.chunks and not step.preempt:
            self.ratio = max(self.ratio - self.decay, self.min_ratio)


class SglangMixed(Sglang):
    """Decodes and chunks in one batch."""

    def __init__(self, context: PolicyContext, chunk_tokens: int) -> None:
        super().__init__(context, chunk_tokens, mixed=True)


def _by_queueing(queue: list[Request]) -> list[Request]:
    """The queue as the engine keeps it: retracted requests, which ``state`` puts in front, behind those already waiting."""
    if not queue[0].preemptions:
        return queue
    fresh = next((i for i, r in enumerate(queue) if not r.preemptions), len(queue))
    return sorted([*queue[fresh:], *reversed(queue[:fresh])], key=lambda r: r.queued_s)
