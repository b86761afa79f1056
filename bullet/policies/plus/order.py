"""Q in order of service, and the pop of a batch, as ``bullet-plus`` has them.

Timely requests as in ``bullet``: least predicted prefill first, repaired. After them the late ones, by waited / own seconds,
largest first: short ones soon, and long ones the longer they have waited. Overdue ones (late by ``late_patience`` x their SLO)
lead every ``overdue_every``-th batch, else they stand last. In ``bullet`` they lead every one, and in an overload, where no
bound on lateness can be kept, all capacity goes to who is overdue and all are late; a share of it for them starves nobody and
leaves the rest in time.

From ``LONG_PLUS`` waiting requests on, longqueue.py keeps the order, and it is ``bullet``'s.
"""

from __future__ import annotations

from typing import Any

from bullet.policies.bullet.longqueue import LongRanked
from bullet.policies.bullet.queue import Ranked, ServiceOrder
from bullet.state import Request, SystemState

LONG_PLUS = 2048
MEMORY = 64
"""Batches, or requests that left, over which a mean is an average."""


class PlusOrder(ServiceOrder):
    """See the module's text."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.long_from = LONG_PLUS
        self.batch_tokens = self.options["batch_tokens"]
        self.overdue_every: int = self.options["overdue_every"]
        self.by_ratio: bool = self.options["late"] == "ratio"
        self.batches = 0  # popped so far
        self.mean_prompt = 0.0

    def pop(self, state: SystemState, ranked: Ranked | LongRanked, index: int) -> list[Request]:
        """As in ``bullet``; batches and the length of their prompts are noted."""
        popped = super().pop(state, ranked, index)
        if popped:
            self.batches += 1
            mean = sum(map(state.kv.fresh, popped)) / len(popped)
            self.mean_prompt += (mean - self.mean_prompt) / min(self.batches, MEMORY)
        return popped

    def _rank(self, waited: list[float], own: list[float], slo: list[float], started: int) -> list[int]:
        if self.options["order"] != "least" or self.options["late_first"]:
            return super()._rank(waited, own, slo, started)
        first, rest = list(range(started)), range(started, len(own))
        timely = sorted([i for i in rest if not waited[i] > slo[i]], key=own.__getitem__)
        if len(timely) == len(rest):
            return first + timely
        patience = self.options["late_patience"]
        late = [i for i in rest if waited[i] > slo[i]]
        overdue = [i for i in late if waited[i] > patience * slo[i]]
        late = [i for i in late if not waited[i] > patience * slo[i]]
        if self.by_ratio:
            late.sort(key=lambda i: -waited[i] / own[i])
        if self.batches % self.overdue_every == 0:
            return [*first, *overdue, *timely, *late]
        return [*first, *timely, *late, *overdue]
