"""Q in order of service (section 3.3): the sort by least estimated latency, its repair, the pop of a batch; and KV full.

Where the paper is silent the reading is one of ``OPTIONS`` in algorithm.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet.estimators.base import Estimator
from bullet.policies.bullet.longqueue import LONG, LongQueue, LongRanked
from bullet.policies.twolane import fits
from bullet.state import PREFILL, PrefillStep, Request, SplitTable, SystemState


def p90(values: NDArray[np.float64]) -> float:
    """Nearest-rank P90; 0 for none (an empty set meets any objective)."""
    n = len(values)
    if n == 0:
        return 0.0
    index = n - n // 10 - 1  # ceil(0.9 n) - 1
    return float(np.partition(values, index)[index])


@dataclass(slots=True, eq=False)
class Ranked:
    """Q in order of service: columns in that order. ``counts``: who has a TTFT left to miss (``None``: all)."""

    own: ServiceOrder
    version: int  # the queue's, when it was sorted
    requests: list[Request]
    tokens: list[int]
    arrival_s: list[float]
    ttft_slo_s: list[float]
    counts: list[bool] | None
    #: Rows of ``ServiceOrder.table``, arrivals and SLOs, once they are asked for.
    arrays: tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]] | None = None

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def margin(self, index: int, now_s: float) -> float:
        """P90 over Q: seconds to spare for TTFT under one split."""
        correction = self.own.estimator.prefill_correction(index)
        ends_s = accumulate(self.own.alone(self.tokens, index))
        slacks = [arrival_s + slo_s - end_s * correction for arrival_s, slo_s, end_s
                  in zip(self.arrival_s, self.ttft_slo_s, ends_s, strict=True)]
        if self.counts is not None:
            slacks = list(compress(slacks, self.counts))
        return (sorted(slacks)[len(slacks) // 10] if slacks else math.inf) - now_s

    def missed(self, index: int, now_s: float) -> bool:
        """Whether that is negative."""
        return self.margin(index, now_s) < 0

    def reaches(self, ratio: float, index: int, now_s: float, ahead_s: float, others: Sequence[float] = ()) -> bool:
        """Whether P90 of TTFT / SLO over Q, served after ``ahead_s`` seconds, and ``others`` is ``ratio`` or more."""
        if self.arrays is None:  # in order of service: for a search over splits, which a long queue makes dear
            self.arrays = (np.array([self.own.row_for(length) for length in self.tokens]), np.array(self.arrival_s),
                           np.array(self.ttft_slo_s))
        rows, arrival_s, ttft_slo_s = self.arrays
        ends = np.cumsum(self.own.table[rows, index]) * self.own.estimator.prefill_correction(index)
        ratios = (now_s + ahead_s + ends - arrival_s) / ttft_slo_s
        if self.counts is not None:
            ratios = ratios[self.counts]
        return p90(np.concatenate((others, ratios)) if len(others) else ratios) >= ratio

    def exceeds(self, ratio: float, index: int, now_s: float, ahead_s: float, others: int = 0) -> bool:
        """Whether it is more than ``ratio`` whatever ``others`` there are, if that is told at once: here it is not."""
        return False


class ServiceOrder:
    """Sorts Q and pops batches from it. ``index_of``: index of the split that gives decode so many SMs."""

    batch_tokens = 0
    """Up to so many a batch may pass the ridge point."""

    def __init__(self, estimator: Estimator, splits: SplitTable, index_of: Mapping[int, int], options: Mapping[str, Any]) -> None:
        self.estimator, self.options, self.index_of = estimator, options, index_of
        self.num_sms, self.full = splits.num_sms, splits.full
        # Kept for speed: the same values would be computed anew.
        self._ranked: Ranked | LongRanked | None = None  # Q as last sorted
        self._largest: tuple[int, int] | None = None  # queue version, blocks of the longest prompt
        self._bound: tuple[int, int | None] | None = None  # the same, of one that none exceeds
        self._alone_s: list[dict[int, float]] = [{} for _ in range(self.full + 1)]  # on a split, by prompt length
        #: Uncorrected seconds of a prompt alone over all splits, a row for each length met; last, the least of them.
        self.table = np.empty((256, self.full + 2))
        self._row_of: dict[int, int] = {}  # prompt length -> row
        self.long, self.long_from = LongQueue(self), LONG

    def sort(self, state: SystemState, now_s: float, index: int) -> Ranked | LongRanked:
        """Q by least estimated latency under one split, with the readings of ``OPTIONS``."""
        queue = state.queue
        waiting, ranked = len(queue.requests), None
        # By ``normalised`` the order is another one at each instant, and where prefixes are shared so are the lengths.
        if waiting >= self.long_from and self.options["order"] != "normalised" and not state.kv.sharing:
            ahead_s = self._ahead(state, now_s, index) if self.long.repairs else 0.0
            ranked = self.long.sort(queue, now_s, index, ahead_s)
        elif 2 * waiting < self.long_from and self.long.queue is not None:
            self.long.drop()
        self._ranked = self._sort(state, now_s, index) if ranked is None else ranked
        return self._ranked

    def _sort(self, state: SystemState, now_s: float, index: int) -> Ranked:
        """On plain lists: queues are mostly short, and then each numpy call costs more than the whole sort."""
        queue = state.queue
        requests = queue.requests
        if len(requests) == 1:
            (first,) = requests
            return Ranked(self, queue.version, [first], [state.kv.fresh(first)], [first.arrival_s], [first.ttft_slo_s],
                          None if first.first_token_s is None else [False])
        # Preempted requests stand at the front. Their first token is out, so that only TPOT is at stake: they go first.
        started = 0
        while started < len(requests) and requests[started].first_token_s is not None:
            started += 1
        tokens, arrival_s, ttft_slo_s = queue.known_tokens, queue.arrival_s, queue.ttft_slo_s
        if state.kv.sharing:
            tokens = [state.kv.fresh(request) for request in requests]
        order = list(range(len(tokens)))
        if len(tokens) - started > 1:
            correction = self.estimator.prefill_correction(index)
            own = [alone_s * correction for alone_s in self.alone(tokens, index)]
            waited = [now_s - at_s for at_s in arrival_s]
            order = self._rank(waited, own, ttft_slo_s, started)
            if self.options["repair"] and self.options["order"] == "least":
                ahead_s = self._ahead(state, now_s, index)
                slack = [math.inf] * started + [slo_s - waited_s - ahead_s for slo_s, waited_s
                                                in zip(ttft_slo_s[started:], waited[started:], strict=True)]
                order = self._repair(order, own, slack)
        return Ranked(self, queue.version, [requests[i] for i in order], [tokens[i] for i in order],
                      [arrival_s[i] for i in order], [ttft_slo_s[i] for i in order],
                      [i >= started for i in order] if started else None)

    def written_out(self, version: int, requests: list[Request], started: int) -> Ranked:
        """Requests in order of service, of which the first ``started`` have their first token."""
        return Ranked(self, version, requests, [r.known_tokens for r in requests], [r.arrival_s for r in requests],
                      [r.ttft_slo_s for r in requests], [i >= started for i in range(len(requests))] if started else None)

    def last_sorted(self, state: SystemState, now_s: float) -> Ranked | LongRanked:
        """Q as last sorted, sorted anew if it has changed since."""
        if self._ranked is not None and self._ranked.version == state.queue.version:
            return self._ranked
        return self.sort(state, now_s, self.present_prefill(state))

    def _rank(self, waited: list[float], own: list[float], slo: list[float], started: int) -> list[int]:
        """Positions of Q, which is in order of arrival, in order of service before the repair."""
        if self.options["order"] == "fcfs":
            return list(range(len(own)))
        first, rest = list(range(started)), range(started, len(own))
        if self.options["order"] == "normalised":
            return first + sorted(rest, key=lambda i: -((waited[i] + own[i]) / slo[i]))
        timely = sorted([i for i in rest if not waited[i] > slo[i]], key=own.__getitem__)
        if len(timely) == len(rest):
            return first + timely
        late = [i for i in rest if waited[i] > slo[i]]
        if self.options["late_first"]:
            return first + late + timely
        patience = self.options["late_patience"]
        overdue = [i for i in late if waited[i] > patience * slo[i]]
        return first + overdue + timely + [i for i in late if not waited[i] > patience * slo[i]]

    @staticmethod
    def _repair(order: list[int], own: list[float], slack: list[float]) -> list[int]:
        """Each request in time by arrival order but not after the sort moves to the last place where it is.

        ``slack``: seconds that may pass until each one's first token. In order of arrival, each judged in the order
        as the moves before it left it.
        """
        in_time = [end_s <= slack_s for end_s, slack_s in zip(accumulate(own), slack, strict=True)]
        judged = -1
        while True:
            ends = list(accumulate([own[i] for i in order]))
            broken = [i for i, end_s in zip(order, ends, strict=True) if i > judged and end_s > slack[i] and in_time[i]]
            if not broken:
                return order
            judged = min(broken)
            at = order.index(judged)
            own_s, slack_s = own[judged], slack[judged]
            # ``ends[to - 1]``: when a place's turn comes; the first's comes at once.
            to = next((to for to in range(at - 1, -1, -1) if (ends[to - 1] if to else 0.0) + own_s <= slack_s), None)
            if to is not None:
                order.insert(to, order.pop(at))

    def pop(self, state: SystemState, ranked: Ranked | LongRanked, index: int) -> list[Request]:
        """The head of Q, and more while whole prompts fit and a layer's flops per byte stay under the ridge point, or the
        batch within ``batch_tokens``.

        The ridge point is that of ``index``, the present split: which one follows depends on the batch itself.
        """
        popped: list[Request] = []
        lengths: tuple[int, ...] = ()
        blocks = total = 0
        kv = state.kv
        pinned: set[tuple[int, int]] = set()
        for request in ranked:
            cost = kv.blocks_to_admit(request, pinned)
            if not fits(state, cost, blocks):
                break
            fresh = kv.fresh(request)
            if popped and total + fresh > self.batch_tokens and (
                    self.estimator.prefill_intensity(lengths) >= self.estimator.ridge(index)):
                break
            popped.append(request)
            blocks += cost
            total += fresh
            lengths = (*lengths, fresh)
        return popped

    def kv_full(self, state: SystemState, now_s: float, popped: list[Request]) -> bool:
        """Whether the head of Q does not fit in KV. ``popped``: the first of it, not all, which leave with this step."""
        queue, kv = state.queue, state.kv
        if self._largest is None or self._largest[0] != queue.version:
            if self._bound is None or self._bound[0] != queue.version:
                seen = self.long.longest_seen(queue)
                self._bound = queue.version, None if seen is None else kv.blocks_for(seen)
            most = self._bound[1]
            if most is not None and kv.free_blocks > most * (1 + len(popped)) + state.decode_seqs * kv.block_units:
                return False
            longest = max(queue.known_tokens) if most is None else self.long.longest_tokens(queue)
            self._largest = (queue.version, kv.blocks_for(longest))
        if kv.free_blocks > self._largest[1] * (1 + len(popped)) + state.decode_seqs * kv.block_units:
            return False  # whichever is the head, it fits
        head = next(islice(self.last_sorted(state, now_s), len(popped), None))
        pinned: set[tuple[int, int]] = set()
        taken = sum([kv.blocks_to_admit(r, pinned) for r in popped])
        return not fits(state, kv.blocks_to_admit(head, pinned), taken)

    # ---- seconds ---------------------------------------------------------------------------------

    def present_prefill(self, state: SystemState) -> int:
        """Index of the split under which prefill is estimated now; without a split of its own, all N."""
        p, d = state.target
        return self.index_of.get(d, self.full) if 0 < p < self.num_sms else self.full

    def _ahead(self, state: SystemState, now_s: float, index: int) -> float:
        """Predicted seconds until the running prefill batch is done, under one split."""
        batch = state.prefill
        if batch is None:
            return 0.0
        flight = state.in_flight.get(PREFILL)
        flying_s = 0.0 if flight is None else flight.remaining_s(now_s)
        flying = flight.step.layers if flight is not None and isinstance(flight.step, PrefillStep) else 0
        beside = state.next_decode()
        whole_s = self.estimator.prefill_line(batch.tokens, beside if beside[0] else None)(index)
        return flying_s + whole_s * (batch.layers_left - flying) / batch.num_layers

    def alone(self, lengths: list[int], index: int) -> list[float]:
        """Uncorrected seconds of prompts of these lengths, each alone, on one split."""
        known = self._alone_s[index]
        for length in lengths:
            if length not in known:
                known[length] = self.estimator.prefill_base_at((length,), index)
        return [known[length] for length in lengths]

    def alone_at(self, length: int, index: int) -> float:
        """The same of one prompt."""
        seconds = self._alone_s[index].get(length)
        return self.alone([length], index)[0] if seconds is None else seconds

    @property
    def lengths(self) -> int:
        """Rows of ``table`` that are filled in."""
        return len(self._row_of)

    def row_for(self, length: int) -> int:
        """Row of ``table`` for a prompt length; a new one is filled in."""
        row = self._row_of.get(length)
        if row is None:
            row = self._row_of[length] = len(self._row_of)
            if row == len(self.table):
                self.table = np.concatenate((self.table, np.empty_like(self.table)))
            self.table[row, :-1] = base = self.estimator.prefill_base(length)
            self.table[row, -1] = base.min()
        return row
