"""What Algorithm 1 predicts before it decides: TTFT of P and Q and TPOT of the decodes, under the present split and every other.

How the tests are computed. "P90(x_i) <= SLO" holds exactly when at least ceil(0.9 n) of the x_i do, that is, when the
order statistic number n - ceil(0.9 n) (from 0, ascending) of the slacks is not negative. For TPOT the slack of
request i against a step of T seconds is ``SLO (g_i + 1) - (now - d_i) - T``: T enters alike for all, so one number,
:meth:`Tpot.limit`, says how long the next step may be, and every candidate d is tested by ``T(d) <= limit``. Between joins
and leaves that number moves by one SLO an iteration and by the clock alone, so it costs nothing to keep.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bullet.estimators.base import Estimator
from bullet.policies.bullet.longqueue import LongRanked
from bullet.policies.bullet.queue import Ranked, ServiceOrder, p90
from bullet.state import DECODE, DecodeBatch, PrefillBatch, Request, SystemState

# -------------------------------------------------------------------------------------------------- TTFT


class TtftForecast(Protocol):
    """TTFT under each candidate split, by the test that Algorithm 1 prescribes."""

    def margin(self, index: int) -> float:
        """Seconds to spare under one split; negative: TTFT is missed."""

    def met(self, first: int, last: int) -> NDArray[np.bool_]:
        """Whether TTFT is met under splits ``first`` .. ``last - 1``."""

    def reaches(self, ratio: float, index: int) -> bool:
        """Whether P90(ttft / SLO) over P and Q is ``ratio`` or more."""

    def exceeds(self, ratio: float, index: int) -> bool:
        """Whether it is more, as far as a bound tells at once; false where it does not."""


class RunningBatch:
    """P runs: every request of P must be in time. ``share`` of its layers is to launch after ``flying_s`` in flight."""

    __slots__ = ("batch", "beside", "flying_s", "now_s", "queue", "share", "state", "whole")

    def __init__(self, queue: ServiceOrder, state: SystemState, batch: PrefillBatch, now_s: float,
                 beside: tuple[int, int] | None, share: float, flying_s: float,
                 whole: Callable[[int], float] | None = None) -> None:
        self.queue, self.state, self.batch, self.now_s = queue, state, batch, now_s
        self.beside, self.share, self.flying_s = beside, share, flying_s
        #: Seconds of all its layers under one split, by its index.
        self.whole = queue.estimator.prefill_line(batch.tokens, beside) if whole is None else whole

    def left(self, index: int) -> float:
        """Seconds until P is done under one split."""
        return self.flying_s + self.share * self.whole(index)

    def margin(self, index: int) -> float:
        return self.batch.deadline_s - self.now_s - (self.flying_s + self.share * self.whole(index))

    def met(self, first: int, last: int) -> NDArray[np.bool_]:
        seconds = self.queue.estimator.prefill_seconds(self.batch.tokens, self.beside)[first:last]
        met: NDArray[np.bool_] = self.flying_s + self.share * seconds <= self.batch.deadline_s - self.now_s
        return met

    def reaches(self, ratio: float, index: int) -> bool:
        now_s, left_s = self.now_s, self.left(index)
        own = [(now_s - r.arrival_s + left_s) / r.ttft_slo_s for r in self.batch.requests if r.first_token_s is None]
        if self.state.queue.requests:
            return self.queue.last_sorted(self.state, now_s).reaches(ratio, index, now_s, left_s, own)
        return p90(np.array(own)) >= ratio

    def exceeds(self, ratio: float, index: int) -> bool:
        if not self.state.queue.requests:
            return False
        own = sum([r.first_token_s is None for r in self.batch.requests])
        return self.queue.last_sorted(self.state, self.now_s).exceeds(ratio, index, self.now_s, self.left(index), own)


class PoppedBatch:
    """P is popped just now: P90 over Q as it was before the pop. Slower prefill never helps, so bisect."""

    __slots__ = ("now_s", "ranked")

    def __init__(self, ranked: Ranked | LongRanked, now_s: float) -> None:
        self.ranked, self.now_s = ranked, now_s

    def margin(self, index: int) -> float:
        return self.ranked.margin(index, self.now_s)

    def met(self, first: int, last: int) -> NDArray[np.bool_]:
        splits = range(first, last)
        missed = bisect_left(splits, True, key=lambda i: self.ranked.missed(i, self.now_s))
        met: NDArray[np.bool_] = np.arange(len(splits)) < missed
        return met

    def reaches(self, ratio: float, index: int) -> bool:
        return self.ranked.reaches(ratio, index, self.now_s, 0.0)

    def exceeds(self, ratio: float, index: int) -> bool:
        return self.ranked.exceeds(ratio, index, self.now_s, 0.0)


# -------------------------------------------------------------------------------------------------- TPOT


class StepForecast:
    """The next decode step's seconds under each split: one at a time, or all at once."""

    __slots__ = ("at", "estimator", "found", "row", "state")

    def __init__(self, estimator: Estimator, state: tuple[int, int, int]) -> None:
        self.estimator = estimator
        self.state = state  # sequences, context tokens, tokens of the prefill beside
        #: Seconds under one split, by its index.
        self.at = estimator.decode_line(*state)
        # Until a decode step is observed, which changes the correction.
        self.row: NDArray[np.float64] | None = None
        self.found: dict[tuple[float, int, int], int | None] = {}

    def all(self) -> NDArray[np.float64]:
        """Seconds under all splits."""
        if self.row is None:
            self.row = self.estimator.decode_seconds(*self.state)
        return self.row

    def first_within(self, limit_s: float, first: int, last: int) -> int | None:
        """The first split of ``first .. last`` whose step takes at most ``limit_s``: mostly one of the first few."""
        at = self.at
        if first <= last and at(first) <= limit_s:
            return first
        for index in range(first + 1, min(first + 4, last + 1)):
            if at(index) <= limit_s:
                return index
        if last < first + 4:
            return None
        asked = (limit_s, first, last)
        if asked not in self.found:
            met = self.all()[first + 4 : last + 1] <= limit_s
            found = int(met.argmax())
            self.found[asked] = first + 4 + found if met[found] else None
        return self.found[asked]


class Tpot:
    """The decodes' TPOT against its SLO, and the step that comes next."""

    def __init__(self, estimator: Estimator, slo_s: float, one_in: int = 10) -> None:
        self.estimator, self.slo_s = estimator, slo_s
        self.one_in = one_in  # requests of which one may miss: of 10 it is P90 that must not
        # Kept for speed: the same values would be computed anew.
        self._dues: list[float] = []  # of the decode batch, ascending: see limit
        self._dues_version = 0
        self._last: StepForecast | None = None

    def step(self, state: SystemState, seqs: int, context: int, prefill_tokens: int,
             victims: tuple[int, ...] = ()) -> StepForecast:
        """The next iteration (``seqs``, ``context``: with those waiting to merge) beside a prefill, without victims."""
        if DECODE in state.in_flight:
            context += state.decode.size  # the iteration in flight adds a token to each
        for request_id in victims:
            request = state.decode.requests.get(request_id)
            seqs -= 1
            context -= (next(r.known_tokens for r in state.ready if r.id == request_id) if request is None
                        else state.decode.cached(request) + 1)
        # What prefill expects of the next iteration while one is in flight, decode asks again when that ends.
        last, asked = self._last, (seqs, context, prefill_tokens)
        if last is None or last.state != asked:
            last = self._last = StepForecast(self.estimator, asked)
        return last

    def learned(self) -> None:
        """A decode step was observed: its seconds on all splits are reckoned anew."""
        if self._last is not None:
            self._last.row = None
            self._last.found.clear()

    def limit(self, state: SystemState, now_s: float) -> float:
        """How long the next decode step may be with P90(tpot) inside its SLO; infinity without decodes.

        A request's next token is due one SLO after its first for each token it has by then: g + 1 at an iteration's
        end, g + 2 while one is in flight; those waiting to merge gain nothing from the one in flight.
        """
        running, ready, slo = state.decode, state.ready, self.slo_s
        flight = state.in_flight.get(DECODE)
        iteration, ahead_s = running.iteration, 0.0
        if flight is not None:
            iteration += 1
            ahead_s = flight.remaining_s(now_s)
        dues = self._dues if running.version == self._dues_version else self._follow(running)
        at = (len(dues) + len(ready)) // self.one_in  # of 10 P90's order statistic: n - ceil(0.9 n)
        if ready:  # those few can move it by no more than their number
            first = max(0, at - len(ready))
            dues = sorted([*dues[first : at + 1], *[_first_token_s(r) + slo * (r.generated - iteration) for r in ready]])
            at -= first
        due_s = dues[at] if dues else math.inf
        return due_s + slo * iteration - now_s - ahead_s

    def _follow(self, running: DecodeBatch) -> list[float]:
        """``first token + SLO x (generated - iteration)`` over the batch, sorted: constant while a request stays in it."""
        dues, slo, changes = self._dues, self.slo_s, running.changes
        behind = running.version - self._dues_version
        if 0 < behind <= len(changes):
            for i in range(-behind, 0):
                first_token_s, offset, joined = changes[i]
                due_s = first_token_s + slo * offset
                at = bisect_left(dues, due_s)
                if joined:
                    dues.insert(at, due_s)
                else:
                    assert dues[at] == due_s, f"{due_s} is not among {dues}"
                    del dues[at]
        else:
            dues = self._dues = sorted((running.first_token_s + slo * running.generated_offset).tolist())
        self._dues_version = running.version
        return dues

    def ratio(self, state: SystemState, now_s: float) -> Callable[[float], float]:
        """P90(tpot) / SLO as a function of the next step's seconds."""
        running = state.decode
        flight = state.in_flight.get(DECODE)
        ahead_s = 0.0 if flight is None else flight.remaining_s(now_s)
        gained = running.generated_offset + running.iteration + (0 if flight is None else 1)  # g + 1 of the next step
        age_s = now_s + ahead_s - running.first_token_s
        if state.ready:
            gained = np.concatenate((gained, [float(r.generated) for r in state.ready]))
            age_s = np.concatenate((age_s, [now_s + ahead_s - _first_token_s(r) for r in state.ready]))
        return lambda step_s: p90((age_s + step_s) / gained) / self.slo_s


def _first_token_s(request: Request) -> float:
    assert request.first_token_s is not None, request
    return request.first_token_s
