"""``sglang-N`` and ``sglang-N-mixed``: SGLang 0.4.6 with chunked prefill of N tokens.

``sglang-N`` is the engine's default: prefill runs ahead of decodes. Whenever a chunk is pending or a queued prompt can be
admitted, the step is a prefill batch of up to N tokens; otherwise every running request decodes one token.

``sglang-N-mixed`` is the paper's hybrid batch (``enable_mixed_chunk``): all decodes, then prompt chunks up to N tokens in
all, so a prompt of sl tokens beside ds decodes takes ceil(sl / (N - ds)) iterations.

Admission: the engine sets aside room for what running requests may yet generate, ``new_token_ratio`` x what is left of
their announced ``max_new_tokens`` (clipped to 4,096); the ratio starts at 0.7, decays to 0.098 over 600 decode steps and
is raised when requests were retracted. Here a policy must not see output lengths, and clients of these traces announce
none, so ``assumed_new_tokens`` stands for the announced maximum (*assumed*). Retraction, when decode finds no block:
requests with the fewest generated tokens leave last; retracted ones go back to the queue.

Left out: radix cache (no shared prefixes here), the overlap scheduler's one-step lag, page alignment of chunks.
"""

from __future__ import annotations

from bullet.errors import ConfigError
from bullet.policies.base import PolicyContext, read_options
from bullet.state import HYBRID, Chunk, Decision, HybridStep, Request, Step, SystemState, Wait

OPTIONS = {
    "max_running_requests": 4096,  # SGLang derives it from the KV size; on 80 GB it does not bind
    "max_prefill_tokens": 16384,  # the engine's default cap on one prefill batch
    "initial_new_token_ratio": 0.7,
    "min_new_token_ratio": 0.098,  # 0.14 x the initial ratio
    "ratio_decay_steps": 600,
    "assumed_new_tokens": 512,
    "retract_steps": 20,  # decode steps' worth of room that a retraction makes
}


class Sglang:
    """One lane, chunks of ``chunk_tokens`` ahead of decodes; ``mixed``: both in one batch."""

    lanes: tuple[str, ...] = (HYBRID,)

    def __init__(self, context: PolicyContext, chunk_tokens: int, mixed: bool = False) -> None:
        self.name = f"sglang-{chunk_tokens}" + ("-mixed" if mixed else "")
        options = read_options(self.name, context.options, OPTIONS)
        for name, value in options.items():
            if value <= 0:
                raise ConfigError(f"policy.options.{name} = {value}: must be positive")
        self.options = options
        self.chunk_tokens = min(chunk_tokens, options["max_prefill_tokens"])
        self.mixed = mixed
        self.sms = context.splits.num_sms
        self.ratio: float = options["initial_new_token_ratio"]
        self.decay: float = (self.ratio - options["min_new_token_ratio"]) / options["ratio_decay_steps"]

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """Chunks ahead of decodes, or (mixed) decodes and chunks together."""
        decode, kv = state.decode, state.kv
        seqs = len(decode)
        if self.mixed:
            if decode.growth_blocks > kv.free_blocks:
                return self._retract(state)
            chunks = self._chunks(state, self.chunk_tokens - seqs, decode.growth_blocks)
            if not seqs and not chunks:
                return Wait(reason="nothing fits")
            return HybridStep(self.sms, chunks, seqs > 0)
        if state.chunked or state.queue.requests:
            chunks = self._chunks(state, self.chunk_tokens, 0)
            if chunks:
                return HybridStep(self.sms, chunks, False)
        if not seqs:
            return Wait(reason="nothing fits")
        if decode.growth_blocks > kv.free_blocks:
            return self._retract(state)
        return HybridStep(self.sms, (), True)

    def _chunks(self, state: SystemState, budget: int, growth: int) -> tuple[Chunk, ...]:
        """The pending chunk first, then prompts from the queue in order while tokens and room last."""
        chunks: list[Chunk] = []
        for request in state.chunked:
            new = min(request.known_tokens - request.computed_tokens, budget)
            if new > 0:
                chunks.append(Chunk(request.id, new, request.computed_tokens))
                budget -= new
        if budget <= 0 or not state.queue.requests:
            return tuple(chunks)
        kv = state.kv
        seqs = len(state.decode) + len(state.chunked)
        free = kv.free_blocks - growth
        # Blocks set aside for what is running and being admitted; an idle engine sets none aside.
        each = kv.blocks_for(int(self.ratio * self.options["assumed_new_tokens"]))
        room = self.options["max_running_requests"] - seqs
        for request in state.queue.requests:
            blocks = kv.blocks_for(request.known_tokens)
            aside = each * (seqs + 1) if seqs else 0
            if budget <= 0 or room <= 0 or blocks + aside > free:
                break
            new = min(request.known_tokens, budget)
            chunks.append(Chunk(request.id, new, 0))
            free -= blocks
            budget -= new
            room -= 1
            seqs += 1
        return tuple(chunks)

    def _retract(self, state: SystemState) -> Decision:
        """Free blocks for the coming ``retract_steps`` tokens of those that stay; one request always stays."""
        decode, kv = state.decode, state.kv
        # Most generated first, then shortest prompt: the last in this order are retracted first.
        ranked = sorted(decode.requests.values(), key=lambda r: (-decode.generated(r), r.prompt_tokens, r.id))
        free = kv.free_blocks
        victims: list[Request] = []
        per_seq = kv.blocks_for(self.options["retract_steps"])
        while len(ranked) > 1 and (free < per_seq * len(ranked)):
            victim = ranked.pop()
            free += kv.blocks_for(decode.cached(victim))
            victims.append(victim)
        if len(ranked) == 1 and decode.needs_block(ranked[0]) and free < 1:
            # A mixed batch's pending prompt holds the rest of the cache: it goes too.
            assert state.chunked, f"{ranked[0]} outgrew the KV cache of {kv.total_blocks} blocks"
            victims.extend(reversed(state.chunked))
        options = self.options
        decoded = sum(decode.generated(r) for r in ranked)
        self.ratio = min(1.0, (decoded + options["retract_steps"] * len(ranked))
                         / max(1, options["assumed_new_tokens"] * len(ranked)))
        self.ratio = max(self.ratio, options["min_new_token_ratio"])
        return HybridStep(self.sms, (), True, preempt=tuple(r.id for r in victims), reason="retract")

    def observe(self, step: Step, elapsed_s: float) -> None:
        """The admission ratio decays by one decode step."""
        if isinstance(step, HybridStep) and step.decode and not step.preempt:
            self.ratio = max(self.ratio - self.decay, self.options["min_new_token_ratio"])
