"""``muxwise``: Drift, later MuxWise (arXiv 2504.14489: versions 2 and 3): prefill and decode on green contexts, the split
chosen at each decode iteration so that decode keeps its TPOT under the worst contention, prefill launched by layers in step
with it.

**Splits.** A few made beforehand: decode on multiples of ``step_sms`` (16), prefill on the rest; each phase alone on all SMs.

**How many SMs for decode** (the dispatcher): best fit, the smallest of these on which the predicted iteration *alone*, times
``worst_slow_down``, is within the TPOT objective; none: the largest. The paper measures that bandwidth contention slows
decode by at most 20 % on A100 and 30 % on H100, and takes the worst, since a co-runner is hard to foresee: 1.2 on compute
capability 8, else 1.3.

**Layers per iteration** (the engine without bubbles): prefill is launched in groups of ``ceil(T_d n_layers / T_p)`` layers,
as many as last about one decode iteration (T_d) of a whole prefill (T_p) on its SMs, so that both lanes are free to change
the split at about the same time. With nobody decoding it is launched whole.

**Who**: prompts in order of arrival, whole, up to ``max_prefill_tokens`` a batch, as long as they fit in KV with room for
every running sequence to grow.

Left out, or our reading: a long prefill that a shorter prompt pre-empts at a layer, multi-turn reuse of KV, and the
estimator's fit (a prediction here is our SRM's for the phase alone). Where no decode split keeps TPOT the paper's dispatcher
holds new prompts back; here they go on beside the largest."""

from __future__ import annotations

import math

from bullet.errors import ConfigError
from bullet.policies.base import PolicyContext, read_options, require
from bullet.policies.twolane import decode_victims, fits
from bullet.state import DECODE, PREFILL, Decision, DecodeStep, Partition, PrefillStep, Step, SystemState, Wait

OPTIONS = {
    "step_sms": 16,
    "worst_slow_down": 0.0,  # 0: the paper's for the card
    "max_prefill_tokens": 16384,
}


class Muxwise:
    """See the module's text."""

    lanes: tuple[str, ...] = (PREFILL, DECODE)
    shares_prefixes = True

    def __init__(self, context: PolicyContext) -> None:
        options = read_options("muxwise", context.options, OPTIONS)
        require(options, "step_sms", options["step_sms"] >= 1, "1 or more")
        require(options, "max_prefill_tokens", options["max_prefill_tokens"] >= 1, "1 or more")
        slow_down = options["worst_slow_down"] or (1.2 if context.gpu.compute_capability[0] < 9 else 1.3)
        require(options, "worst_slow_down", 1 <= slow_down <= 10, "1 to 10, or 0 for the paper's")
        if context.estimator is None:
            raise ConfigError("policy muxwise: needs an estimator")
        self.estimator = context.estimator
        self.num_sms = n = context.splits.num_sms
        self.full = context.splits.full
        legal = {int(d): i for i, d in enumerate(context.splits.decode_sms)}
        #: (decode's SMs, index of the split), fewest first.
        self.candidates = [(d, legal[d]) for d in range(options["step_sms"], n, options["step_sms"]) if d in legal]
        if not self.candidates:
            raise ConfigError(f"policy.options.step_sms = {options['step_sms']}: no multiple of it is a split of {n} SMs that "
                              "partitions grant (device.partition_step_sms)")
        self.limit_s = context.tpot_slo_s / slow_down
        self.max_prefill_tokens: int = options["max_prefill_tokens"]
        self.decode_sms, self.index = self.candidates[0]
        self.iteration_s = 0.0

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """The next iteration, which chooses the split; or the layers that last about as long."""
        if lane == DECODE:
            return self._iteration(state)
        if state.prefill is not None:
            tokens = tuple(request.known_tokens for request in state.prefill.requests)
            return self._layers(state, tokens, state.prefill.layers_left)
        admit: list[int] = []
        lengths: list[int] = []
        blocks = 0
        pinned: set[tuple[int, int]] = set()
        for request in state.queue:
            fresh = state.kv.fresh(request)
            if admit and sum(lengths) + fresh > self.max_prefill_tokens:
                break
            cost = state.kv.blocks_to_admit(request, pinned)
            if not fits(state, cost, blocks):
                break
            admit.append(request.id)
            lengths.append(fresh)
            blocks += cost
        if not admit:
            return Wait(reason="kv-full")
        return self._layers(state, tuple(lengths), state.num_layers, tuple(admit))

    def _iteration(self, state: SystemState) -> Decision:
        victims = decode_victims(state)
        if len(victims) == state.decode_seqs:  # the prefill batch holds the blocks, and gives some back by ending
            return Wait(reason="kv-full")
        self._choose(state)
        if state.prefill is None and not state.queue.requests:
            return DecodeStep(self.num_sms, preempt=victims)
        return DecodeStep(self.decode_sms, preempt=victims, target=Partition(self.num_sms - self.decode_sms, self.decode_sms))

    def _choose(self, state: SystemState) -> None:
        """Best fit: the fewest SMs that keep TPOT under the worst contention."""
        seconds = self.estimator.decode_line(state.decode_seqs, state.decode_context_tokens, 0)
        for sms, index in self.candidates:
            self.decode_sms, self.index, self.iteration_s = sms, index, seconds(index)
            if self.iteration_s <= self.limit_s:
                break

    def _layers(self, state: SystemState, tokens: tuple[int, ...], left: int, admit: tuple[int, ...] = ()) -> PrefillStep:
        if not state.decode_seqs:
            return PrefillStep(self.num_sms, left, admit)
        if not self.iteration_s:  # prompts were there before the first decode
            self._choose(state)
        whole_s = self.estimator.prefill_line(tokens, None)(self.index)
        layers = max(1, math.ceil(self.iteration_s * state.num_layers / whole_s))
        return PrefillStep(self.num_sms - self.decode_sms, min(layers, left), admit,
                           target=Partition(self.num_sms - self.decode_sms, self.decode_sms))

    def observe(self, step: Step, elapsed_s: float) -> None:
        """Its model is made beforehand and not corrected."""
