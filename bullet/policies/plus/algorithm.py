"""``bullet-plus``: ours. Algorithm 1's lanes, branches and estimates, and four decisions made otherwise, each an option.

- *Split* (``throughput_split``). The least d that keeps TPOT makes prefill quickest, and decode, which frees KV, slowest: on long
  prompts the cache fills and prefill stands still. As blocks fill from ``split_from`` to ``split_full``, d moves from there to
  the split of best throughput: the one that finishes a mean request's prefill and decode soonest, the tail of either alone on N.
- *TPOT* (``tpot_one_in``). A P90 inside its SLO lets a tenth of the requests miss; attainment counts them. One in so many may.
- *Batch* (``batch_tokens``) and *late requests* (``late``, ``overdue_every``): order.py.

It is told what Bullet is told: no output lengths. Mean lengths are learnt from requests that came and went.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bullet.policies.base import PolicyContext, require
from bullet.policies.bullet.algorithm import OPTIONS, Bullet
from bullet.policies.bullet.forecast import StepForecast, Tpot, TtftForecast
from bullet.policies.plus.order import MEMORY, PlusOrder
from bullet.state import Decision, SystemState

PLUS_OPTIONS: dict[str, Any] = OPTIONS | {
    "throughput_split": True,  # d moves towards the split of best throughput as KV fills
    "split_from": 0.5,  # share of the blocks in use from which it does; under it the least d is as good for less TTFT
    "split_full": 0.9,  # share at which it has arrived: before prompts are refused
    "tpot_one_in": 50,  # one in so many requests may miss its TPOT; 10: P90, as bullet
    "batch_tokens": 512,  # batched up to here whatever the ridge point: fewer tokens do not fill the device; 0: as bullet
    "late": "ratio",  # late requests by waited / own seconds; arrival: as bullet
    "overdue_every": 8,  # each so manyth batch begins with the overdue; 1: all do, as bullet
}
LEARNT_FROM = 8
"""Requests that must have left before their mean output is believed."""
MEAN_BATCH_TOKENS = 4096
"""Of the prefill that stands for the workload's: far past the ridge point."""


class BulletPlus(Bullet):
    """See the module's text. Options of ``bullet`` as there."""

    name = "bullet-plus"
    defaults = PLUS_OPTIONS
    service_order: type[PlusOrder] = PlusOrder
    queue: PlusOrder

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        options = self.options
        require(options, "late", options["late"] in ("ratio", "arrival"), "ratio or arrival")
        for name in ("tpot_one_in", "overdue_every"):
            require(options, name, options[name] >= 1, "1 or more")
        require(options, "batch_tokens", options["batch_tokens"] >= 0, "0 or more")
        self.split_from: float = options["split_from"]
        require(options, "split_from", 0 <= self.split_from < 1, "from 0 to under 1")
        require(options, "split_full", self.split_from < options["split_full"] <= 1, "over split_from, and 1 at most")
        self.split_over: float = options["split_full"] - self.split_from
        self.throughput_split: bool = options["throughput_split"]
        self.tpot = Tpot(context.estimator, context.tpot_slo_s, options["tpot_one_in"])  # type: ignore[arg-type]
        # Learnt from the states seen, so that a record replays into a fresh policy.
        self.left = 0  # requests that left the decode batch
        self.mean_output = 0.0
        self._version = 0
        self._best = self._best_of = -1

    def _decode(self, state: SystemState, now_s: float) -> Decision:
        decode = state.decode
        behind = decode.version - self._version
        if behind:
            self._version, changes = decode.version, decode.changes
            for i in range(-min(behind, len(changes)), 0):
                _, offset, joined = changes[i]
                if not joined:
                    self.left += 1
                    self.mean_output += (offset + decode.iteration - self.mean_output) / min(self.left, MEMORY)
        return super()._decode(state, now_s)

    def best_split(self, state: SystemState) -> int:
        """Index of the split of best throughput, for mean requests beside the present batch; anew when that has changed by an
        eighth."""
        seqs, context = state.next_decode()
        size = seqs.bit_length() * 8 + (seqs * 8 >> seqs.bit_length())
        if size == self._best_of:
            return self._best
        self._best_of = size
        prompt = max(1, round(self.queue.mean_prompt))
        batch = (prompt,) * max(1, MEAN_BATCH_TOKENS // prompt)
        # Seconds of a mean request's prefill, and of its decode: its share of as many steps as it has tokens.
        tokens = max(1.0, self.mean_output) / seqs
        prefill = self.estimator.prefill_seconds(batch, (seqs, context)) / len(batch)
        decode = self.estimator.decode_seconds(seqs, context, sum(batch)) * tokens
        p, d = prefill[:-1], decode[:-1]
        both = np.minimum(p, d)
        self._best = int((both + (1 - both / p) * prefill[-1] + (1 - both / d) * decode[-1]).argmin())
        return self._best

    def _reduce_decode(self, state: SystemState, step: StepForecast, limit_s: float) -> int | None:
        found = super()._reduce_decode(state, step, limit_s)
        if not self.throughput_split or self.left < LEARNT_FROM or self.fixed is not None:
            return found
        kv = state.kv
        pressure = (1 - kv.free_blocks / kv.total_blocks - self.split_from) / self.split_over
        if pressure <= 0:
            return found
        if found is None:  # above the present d there may be one
            found = step.first_within(limit_s if limit_s < self.cap_s else self.cap_s, self.floor, self.full - 1)
            if found is None:
                return None
        best = self.best_split(state)
        return found if best <= found else found + round(min(1.0, pressure) * (best - found))

    def _free_kv(self, ttft: TtftForecast, state: SystemState, step: StepForecast) -> int:
        """KV full: the split of best throughput, or the least d that keeps the cap."""
        if not self.throughput_split or self.left < LEARNT_FROM:
            return super()._free_kv(ttft, state, step)
        least, best = step.first_within(self.cap_s, self.floor, self.full - 1), self.best_split(state)
        return best if least is None or least < best else least
