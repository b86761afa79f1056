"""``static-P``: prefill always on P SMs, decode on the rest (MuxServe-like), first come first served. ``naive``: both on
all N SMs, no scheduler (the paper's Fig. 23).

Free tails: a lane whose co-lane has no work takes all SMs at its next launch (``free_tails``). ``decode_sms`` gives decode
a share of its own, N for Fig. 22's "decode may use all"; what both hold is shared.
"""

from __future__ import annotations

from itertools import pairwise

from bullet.errors import ConfigError
from bullet.policies.base import PolicyContext, read_options, require
from bullet.policies.twolane import decode_victims, fits
from bullet.state import (
    DECODE,
    PREFILL,
    Decision,
    DecodeStep,
    Partition,
    PrefillStep,
    Step,
    SystemState,
    Wait,
)

OPTIONS = {
    "layers_per_step": 4,
    "free_tails": True,
    "decode_sms": 0,  # 0: the rest of the device
    "max_batch_tokens": 4096,  # prompts are batched up to this; the head goes alone if it is longer
}


def _listed(values: list[int]) -> str:
    """Ascending SM counts in words; a real card's table is a few uneven splits."""
    steps = {b - a for a, b in pairwise(values)}
    if len(steps) == 1 and len(values) > 2:
        return f"{values[0]} to {values[-1]} in steps of {steps.pop()}"
    return ", ".join(str(v) for v in values)


class Static:
    """A fixed split of the SMs."""

    lanes: tuple[str, ...] = (PREFILL, DECODE)
    shares_prefixes = True

    def __init__(self, context: PolicyContext, prefill_sms: int, decode_sms: int | None = None, name: str = "") -> None:
        options = read_options(name or f"static-{prefill_sms}", context.options, OPTIONS)
        self.num_sms = n = context.splits.num_sms
        legal, legal_decode = context.splits.prefill_sms.tolist()[::-1], context.splits.decode_sms.tolist()
        if prefill_sms != n and prefill_sms not in legal:
            raise ConfigError(f"policy static-{prefill_sms}: prefill SMs must be {_listed(legal)}, or {n} (with decode_sms)")
        own = options["decode_sms"] or decode_sms or n - prefill_sms
        if own != n and own not in legal_decode:
            raise ConfigError(f"policy.options.decode_sms = {own}: must be {_listed(legal_decode)}, or {n}; static-{n} needs it")
        for option in ("layers_per_step", "max_batch_tokens"):
            require(options, option, options[option] >= 1, "1 or more")
        self.target = Partition(prefill_sms, own)
        self.layers: int = options["layers_per_step"]
        self.free_tails: bool = options["free_tails"]
        self.max_batch_tokens: int = options["max_batch_tokens"]

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """The next layers, or the next iteration, on this lane's SMs."""
        if lane == DECODE:
            sms = self.num_sms if self.free_tails and state.prefill is None else self.target.decode_sms
            victims = decode_victims(state)
            if len(victims) == state.decode_seqs:  # the prefill batch holds the blocks, and gives some back by ending
                return Wait(reason="kv-full")
            return DecodeStep(sms, target=self.target, preempt=victims)
        sms = self.num_sms if self.free_tails and not state.decode_seqs else self.target.prefill_sms
        if state.prefill is not None:
            return PrefillStep(sms, min(self.layers, state.prefill.layers_left), target=self.target)
        admit: list[int] = []
        tokens = blocks = 0
        pinned: set[tuple[int, int]] = set()
        for request in state.queue:
            fresh = state.kv.fresh(request)
            if admit and tokens + fresh > self.max_batch_tokens:
                break
            cost = state.kv.blocks_to_admit(request, pinned)
            if not fits(state, cost, blocks):
                break
            admit.append(request.id)
            tokens += fresh
            blocks += cost
        if not admit:
            return Wait(reason="kv-full")
        return PrefillStep(sms, min(self.layers, state.num_layers), tuple(admit), target=self.target)

    def observe(self, step: Step, elapsed_s: float) -> None:
        """It learns nothing."""


class Naive(Static):
    """Both lanes on all SMs."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context, context.splits.num_sms, context.splits.num_sms, "naive")
