"""Bullet's scheduler: Algorithm 1 (section 3.3), one object for both lanes. Newcomers start here.

Prefill lane, at each group of layers          Decode lane, at each iteration
  estimate TTFT of P and Q, publish              merge, estimate TPOT, publish
  sort Q by least estimated latency              read TTFT
  P runs: satisfied = all of P in time           no prefill work: all N SMs
  else: satisfied = P90 of Q in time, pop P      the same branches choose (p, d)
  choose (p, d) by three branches                hand-over, or delayed decode
  launch the next layers on p SMs                launch one iteration on d SMs

The branches:  TTFT lost and TPOT lost -> SetBalancedSM;  TPOT met -> ReduceDecodeSM;  else -> ReducePrefillSM.

How the tests are computed. "P90(x_i) <= SLO" holds exactly when at least ceil(0.9 n) of the x_i do, that is, when the
order statistic number n - ceil(0.9 n) (from 0, ascending) of the slacks is not negative. For TPOT the slack of
request i against a step of T seconds is ``SLO (g_i + 1) - (now - d_i) - T``: T enters alike for all, so one number,
``limit_s``, says how long the next step may be, and every candidate d is tested by ``T(d) <= limit_s``. Between joins
and leaves that number moves by one SLO an iteration and by the clock alone, so it costs nothing to keep.

Where the paper is silent the reading is an option (``OPTIONS``). ``BulletLiteral`` is the letter of the text.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bullet.errors import ConfigError
from bullet.perf import Estimator
from bullet.policies.base import PolicyContext, read_options
from bullet.policies.twolane import decode_victims, fits
from bullet.state import (
    DECODE,
    PREFILL,
    Decision,
    DecodeStep,
    Partition,
    PrefillStep,
    Published,
    Request,
    Step,
    SystemState,
    Wait,
)

OPTIONS: dict[str, Any] = {
    "layers_per_step": 4,  # L_step
    "decode_floor": 1 / 9,  # decode never below this share of the SMs (12 of 108: Fig. 20)
    "cap_next_step": True,  # the next decode step itself stays within the TPOT SLO
    "order": "least",  # least | fcfs | normalised (largest TTFT / SLO first, as the released code)
    "late_first": False,  # requests already late go first, in order of arrival
    "late_patience": 20.0,  # x its SLO: longest that a late request waits behind later arrivals
    "repair": True,  # a request in time by arrival order but not after the sort moves forward
    "hand_over": "batch",  # off | batch (nothing can follow P) | queue (P and all of Q end within a step)
    "delayed_decode": True,
    "delay_limit": 1.0,  # x TPOT SLO: longest delay
    "partition": True,  # off: both lanes hold all N SMs (Fig. 23, scheduler only)
}


def order_statistic(slacks: NDArray[np.float64]) -> float:
    """The slack whose sign says whether P90 (nearest rank) is inside its SLO; infinity for none."""
    n = len(slacks)
    if n == 0:
        return math.inf
    index = n - math.ceil(0.9 * n)
    return float(np.partition(slacks, index)[index])


def p90(values: NDArray[np.float64]) -> float:
    """Nearest-rank P90; 0 for none (an empty set meets any objective)."""
    n = len(values)
    if n == 0:
        return 0.0
    index = math.ceil(0.9 * n) - 1
    return float(np.partition(values, index)[index])


class Bullet:
    """Algorithm 1 with the readings of ``OPTIONS``. Asks ``context.estimator`` for every prediction."""

    lanes: tuple[str, ...] = (PREFILL, DECODE)
    defaults = OPTIONS

    def __init__(self, context: PolicyContext) -> None:
        if context.estimator is None:
            raise ConfigError("policy bullet needs an estimator: srm, srm-blind or oracle")
        options = read_options("bullet", context.options, self.defaults)
        if options["order"] not in ("least", "fcfs", "normalised"):
            raise ConfigError(f"policy.options.order = {options['order']!r}: must be least, fcfs or normalised")
        if options["hand_over"] not in ("off", "batch", "queue"):
            raise ConfigError(f"policy.options.hand_over = {options['hand_over']!r}: must be off, batch or queue")
        if not options["layers_per_step"] >= 1:
            raise ConfigError(f"policy.options.layers_per_step = {options['layers_per_step']}: must be 1 or more")
        if not 0 <= options["decode_floor"] < 1:
            raise ConfigError(f"policy.options.decode_floor = {options['decode_floor']}: must be from 0 to under 1")
        self.options = options
        self.estimator = context.estimator
        self.splits = context.splits
        self.num_sms = context.splits.num_sms
        self.full = context.splits.full
        self.tpot_slo_s = context.tpot_slo_s
        self.layers_per_step: int = options["layers_per_step"]
        self.partition: bool = options["partition"]
        self.cap_next_step: bool = options["cap_next_step"]
        self._index_of = {int(d): i for i, d in enumerate(self.splits.decode_sms)}
        self._partitions = [Partition(self.num_sms - int(d), int(d)) for d in self.splits.decode_sms]
        self._shared = Partition(self.num_sms, self.num_sms)
        self._all_decode = Partition(0, self.num_sms)
        #: Smallest admissible split index: decode never below its floor.
        self.floor = int(np.searchsorted(self.splits.decode_sms, options["decode_floor"] * self.num_sms - 1e-9))
        self.floor = min(self.floor, self.full - 1)
        # Derived from the states seen, for speed only: a fresh policy recomputes the same values.
        self._limit_key: tuple[int, int] = (-1, -1)
        self._limit_const = math.inf
        self._delay_until_s: float | None = None
        self._largest_key = -1
        self._largest_blocks = 0
        self._rows_key = -1
        self._rows = np.empty(0, dtype=np.int64)
        self._row_of: dict[int, int] = {}
        self._table = np.empty((256, self.full + 1))
        self._order_key = -1
        self._order = np.empty(0, dtype=np.int64)

    # ---- the two lanes ---------------------------------------------------------------------------

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """Algorithm 1 for the lane that is idle."""
        return self._prefill(state, now_s) if lane == PREFILL else self._decode(state, now_s)

    def observe(self, step: Step, elapsed_s: float) -> None:
        """Online recalibration (section 3.2.4); steps launched outside the model's assumptions teach nothing."""
        if isinstance(step, PrefillStep):
            if step.predicted_s and step.reason != "delayed-decode":
                self.estimator.observe(PREFILL, step.sms, step.predicted_s, elapsed_s)
        elif isinstance(step, DecodeStep) and step.predicted_s and step.reason != "hand-over":
            self.estimator.observe(DECODE, step.sms, step.predicted_s, elapsed_s)

    def _prefill(self, state: SystemState, now_s: float) -> Decision:
        batch = state.prefill
        present = self._present_prefill(state)
        seqs = state.decode_seqs
        beside = (seqs, state.decode_context_tokens) if seqs else None
        ttft: _Forecast
        if batch is not None:
            # P runs and goes on: satisfied = every request of P meets its TTFT SLO under the present split.
            admit: tuple[int, ...] = ()
            tokens, layers_left = batch.tokens, batch.layers_left
            ttft = _RunningBatch(self, state, now_s, beside, layers_left / batch.num_layers, 0.0)
            margin_s = ttft.margin(present)
        else:
            order = self._sort(state, now_s, present)
            margin_s = self.queue_margin(state, now_s, present)
            popped = self._pop(state, [state.queue.requests[i] for i in order], present)
            if not popped:  # the head does not fit: only decode can free its blocks, and gets all SMs to do so
                return Wait(None, Published(ttft_margin_s=margin_s), Partition(0, self.num_sms), "kv-full")
            admit = tuple(r.id for r in popped)
            tokens, layers_left = tuple(r.known_tokens for r in popped), state.num_layers
            ttft = _PoppedBatch(self, state, now_s)
        published = Published(ttft_margin_s=margin_s)
        layers = min(self.layers_per_step, layers_left)

        def launch(sms: int, index: int, target: Partition, reason: str) -> PrefillStep:
            predicted_s = self.estimator.prefill_at(tokens, beside, index) * layers / state.num_layers
            return PrefillStep(sms, layers, admit, predicted_s, published, target, (), reason)

        if not self.partition:
            return launch(self.num_sms, self.full, self._shared, "shared")
        if not seqs:  # no decodes: p = N
            return launch(self.num_sms, self.full, Partition(self.num_sms, 0), "no-decode")

        step = self._decode_step(state, sum(tokens))
        limit_s = self._limit(state, now_s)
        tpot_margin_s = state.decode_published.tpot_margin_s
        tpot_met = tpot_margin_s is None or tpot_margin_s >= 0
        kv_full = bool(state.queue.requests) and self._kv_full(state, admit)
        index, reason = self._choose(state, now_s, margin_s >= 0, tpot_met, step, limit_s, ttft, kv_full)
        partition = self._partitions[index]
        if (reason == "reduce-decode" and DECODE not in state.in_flight and ttft.margin(index) < 0
                and self._delayed(now_s, step.at(index), limit_s) is not None):
            # Delayed decode: prefill has the device to itself until decode's latest start.
            return launch(self.num_sms, self.full, partition, "delayed-decode")
        return launch(partition.prefill_sms, index, partition, reason)

    def _decode(self, state: SystemState, now_s: float) -> Decision:
        victims = decode_victims(state)
        if victims and len(victims) >= state.decode_seqs:
            raise AssertionError(f"one request outgrew the KV cache: {state.decode_seqs} decoding")
        batch = state.prefill
        step = self._decode_step(state, sum(batch.tokens) if batch is not None else 0)
        limit_s = self._limit(state, now_s)
        present = self._present_decode(state)
        tpot_margin_s = limit_s - step.at(present)
        published = Published(tpot_margin_s=tpot_margin_s)

        def launch(sms: int, index: int, target: Partition, reason: str) -> DecodeStep:
            self._delay_until_s = None
            return DecodeStep(sms, step.at(index), published, target, victims, reason)

        if not self.partition:
            return launch(self.num_sms, self.full, self._shared, "shared")
        if batch is None:  # no prefill work: d = N
            return launch(self.num_sms, self.full, self._all_decode, "no-prefill")

        flight = state.in_flight.get(PREFILL)
        flying_s, layers = 0.0, batch.layers_left
        if flight is not None and isinstance(flight.step, PrefillStep):
            flying_s = flight.remaining_s(now_s)
            layers -= flight.step.layers
        beside = (state.decode_seqs, state.decode_context_tokens)
        ttft = _RunningBatch(self, state, now_s, beside, layers / batch.num_layers, flying_s)
        ttft_margin_s = state.prefill_published.ttft_margin_s
        satisfied = ttft_margin_s is None or ttft_margin_s >= 0
        kv_full = bool(state.queue.requests) and self._kv_full(state, ())
        index, reason = self._choose(state, now_s, satisfied, tpot_margin_s >= 0, step, limit_s, ttft, kv_full)
        partition = self._partitions[index]
        if self._tail_is_short(state, ttft, index, step.at(index)):
            return launch(self.num_sms, self.full, partition, "hand-over")
        if reason == "reduce-decode" and not victims and ttft.margin(index) < 0:
            until_s = self._delayed(now_s, step.at(index), limit_s)
            if until_s is not None:
                if self._delay_until_s is None:
                    self._delay_until_s = now_s + self.options["delay_limit"] * self.tpot_slo_s
                return Wait(until_s, published, partition, "delayed-decode")
        return launch(partition.decode_sms, index, partition, reason)

    # ---- the branches of Algorithm 1 -------------------------------------------------------------

    def _choose(self, state: SystemState, now_s: float, satisfied: bool, tpot_met: bool, step: _DecodeForecast,
                limit_s: float, ttft: _Forecast, kv_full: bool) -> tuple[int, str]:
        """Index of the split and the branch that chose it."""
        if kv_full:
            return self._free_kv(ttft), "kv-full"
        cap_s = min(limit_s, self.tpot_slo_s) if self.cap_next_step else limit_s
        present = self._present_decode(state)
        if not satisfied and not tpot_met:
            return self._set_balanced(state, now_s, step, ttft), "balanced"
        if tpot_met:
            # ReduceDecodeSM: the smallest d, not above the present one, that keeps P90(tpot) within its SLO.
            found = step.first_within(cap_s, self.floor, min(present, self.full - 1))
            if found is not None:
                return found, "reduce-decode"
            if self.floor <= present < self.full and state.target.prefill_sms:
                return present, "keep"
            return self._set_balanced(state, now_s, step, ttft), "balanced"
        # ReducePrefillSM: the largest p that meets both; if none, the smallest p that keeps TTFT.
        in_time = ttft.met(self.floor, self.full)
        both = (step.all()[self.floor : self.full] <= cap_s) & in_time
        first = int(both.argmax())
        if both[first]:
            return self.floor + first, "reduce-prefill"
        keeps = np.flatnonzero(in_time)
        if len(keeps):
            return self.floor + int(keeps[-1]), "reduce-prefill"
        return self._set_balanced(state, now_s, step, ttft), "balanced"

    def _set_balanced(self, state: SystemState, now_s: float, step: _DecodeForecast, ttft: _Forecast) -> int:
        """SetBalancedSM: minimise max(P90(ttft) / SLO, P90(tpot) / SLO) over the splits, ties to the larger p.

        The first falls and the second rises with p, so the best split is where they cross: bisect for the smallest
        index (largest p) at which TTFT is the worse of the two, and compare it with its left neighbour.
        """
        running = state.decode
        flight = state.in_flight.get(DECODE)
        ahead_s = 0.0 if flight is None else flight.remaining_s(now_s)
        gained = running.generated_offset + running.iteration + (0 if flight is None else 1)  # g + 1 of the next step
        age_s = now_s + ahead_s - running.first_token_s
        if state.ready:
            gained = np.concatenate((gained, [float(r.generated) for r in state.ready]))
            age_s = np.concatenate((age_s, [now_s + ahead_s - (r.first_token_s or now_s) for r in state.ready]))

        def tpot(index: int) -> float:
            return p90((age_s + step.at(index)) / gained) / self.tpot_slo_s

        # The cap on the next step holds here too where any split can meet it: P90 says nothing of one long step.
        capped = step.first_within(self.tpot_slo_s, self.floor, self.full - 1) if self.cap_next_step else None
        first = self.floor if capped is None else capped
        low, high = first, self.full - 1
        while low < high:
            middle = (low + high) // 2
            if ttft.ratio(middle) >= tpot(middle):
                high = middle
            else:
                low = middle + 1
        if low > first and max(ttft.ratio(low - 1), tpot(low - 1)) <= max(ttft.ratio(low), tpot(low)):
            low -= 1
        return low

    def _free_kv(self, ttft: _Forecast) -> int:
        """KV full: decode frees it. The largest d up to N/2 that keeps P's TTFT, else 2N/9."""
        half = int(np.searchsorted(self.splits.decode_sms, self.num_sms / 2, side="right"))
        keeps = np.flatnonzero(ttft.met(self.floor, max(half, self.floor + 1)))
        if len(keeps):
            return self.floor + int(keeps[-1])
        return min(self.full - 1, max(self.floor, int(np.searchsorted(self.splits.decode_sms, 2 * self.num_sms / 9))))

    def _delayed(self, now_s: float, step_s: float, limit_s: float) -> float | None:
        """Latest start of a decode step that keeps P90(tpot), or ``None`` if that is now."""
        if not self.options["delayed_decode"]:
            return None
        # One TPOT SLO in all, from when the delay began: it is decided again at each prefill launch.
        longest = now_s + self.options["delay_limit"] * self.tpot_slo_s if self._delay_until_s is None else self._delay_until_s
        until_s = min(now_s + limit_s - step_s, longest)
        return until_s if until_s > now_s + 1e-6 else None

    def _tail_is_short(self, state: SystemState, ttft: _RunningBatch, index: int, step_s: float) -> bool:
        """Hand-over: what is left of prefill ends within one decode step, and no batch can follow."""
        mode = self.options["hand_over"]
        left_s = ttft.left(index)
        if mode == "off" or left_s >= step_s:
            return False
        waiting = state.queue.requests
        if mode == "batch":
            return not any(fits(state, request) for request in waiting)
        for request in waiting:
            left_s += self.estimator.prefill_at((request.known_tokens,), None, index)
        return left_s < step_s

    # ---- estimates -------------------------------------------------------------------------------

    def _decode_step(self, state: SystemState, prefill_tokens: int) -> _DecodeForecast:
        """The next iteration beside a prefill of that many tokens; waiting merges included."""
        context = state.decode_context_tokens
        if DECODE in state.in_flight:
            context += state.decode.size  # the iteration in flight adds a token to each
        return _DecodeForecast(self.estimator, state.decode_seqs, context, prefill_tokens)

    def _limit(self, state: SystemState, now_s: float) -> float:
        """How long the next decode step may be with P90(tpot) inside its SLO; infinity without decodes."""
        running, slo = state.decode, self.tpot_slo_s
        flight = state.in_flight.get(DECODE)
        ahead_s = 0.0 if flight is None else flight.remaining_s(now_s)
        iteration = running.iteration + (0 if flight is None else 1)
        if not state.ready:
            key = (running.version, 0)
            if key != self._limit_key:
                self._limit_key = key
                self._limit_const = order_statistic(running.first_token_s + slo * running.generated_offset)
            return self._limit_const + slo * iteration - now_s - ahead_s
        slacks = running.first_token_s + slo * (running.generated_offset + iteration)
        ready = [(r.first_token_s or now_s) + slo * r.generated for r in state.ready]
        return order_statistic(np.concatenate((slacks, ready))) - now_s - ahead_s

    def _own(self, state: SystemState, index: int) -> NDArray[np.float64]:
        """Each waiting request's own prefill seconds under one split, in the queue's order."""
        queue = state.queue
        if queue.version != self._rows_key:
            self._rows_key = queue.version
            self._rows = np.array([self._row(r.known_tokens) for r in queue.requests], dtype=np.int64)
        own: NDArray[np.float64] = self._table[self._rows, index] * self.estimator.prefill_correction()[index]
        return own

    def _row(self, tokens: int) -> int:
        """Row of ``_table`` that holds a prompt length's uncorrected seconds over all splits."""
        row = self._row_of.get(tokens)
        if row is None:
            row = self._row_of[tokens] = len(self._row_of)
            if row == len(self._table):
                self._table = np.concatenate((self._table, np.empty_like(self._table)))
            self._table[row] = self.estimator.prefill_base(tokens)
        return row

    def _sort(self, state: SystemState, now_s: float, index: int) -> NDArray[np.int64]:
        """Q by least estimated latency under one split, with the readings of ``OPTIONS``: positions in the queue."""
        queue = state.queue
        if len(queue) == 1:
            order = np.zeros(1, dtype=np.int64)
        else:
            own = self._own(state, index)
            started = self._started(state)
            order = self._rank(state, now_s, own, started)
            if self.options["repair"] and self.options["order"] == "least":
                slack = queue.arrival_s + queue.ttft_slo_s - now_s - self._ahead(state, now_s, index)
                order = self._repair(order, own, np.where(started, math.inf, slack))
        self._order_key, self._order = queue.version, order
        return order

    def _last_order(self, state: SystemState, now_s: float) -> NDArray[np.int64]:
        """The order of the last sort, sorted anew if the queue has changed since."""
        if self._order_key == state.queue.version:
            return self._order
        return self._sort(state, now_s, self._present_prefill(state))

    @staticmethod
    def _started(state: SystemState) -> NDArray[np.bool_]:
        """Requests that are recomputed after a preemption: their first token is out, only TPOT is at stake."""
        return np.array([r.first_token_s is not None for r in state.queue.requests])

    def queue_margin(self, state: SystemState, now_s: float, index: int) -> float:
        """Seconds by which P90(ttft) over Q is inside its SLO under one split, Q served in its last order."""
        queue = state.queue
        if len(queue) == 1:  # the common case, spared the arrays
            only = queue[0]
            if only.first_token_s is not None:
                return math.inf
            own_s = self.estimator.prefill_at((only.known_tokens,), None, index)
            return only.arrival_s + only.ttft_slo_s - now_s - self._ahead(state, now_s, index) - own_s
        order = self._last_order(state, now_s)
        done = np.cumsum(self._own(state, index)[order])
        slack = (queue.arrival_s + queue.ttft_slo_s)[order] - now_s - self._ahead(state, now_s, index) - done
        return order_statistic(slack[~self._started(state)[order]])

    def queue_ratios(self, state: SystemState, now_s: float, index: int, ahead_s: float) -> NDArray[np.float64]:
        """TTFT / SLO of everything in Q under one split, served in its last order after ``ahead_s`` seconds."""
        queue = state.queue
        if not len(queue):
            return np.empty(0)
        order = self._last_order(state, now_s)
        done = np.cumsum(self._own(state, index)[order])
        ratios: NDArray[np.float64] = (now_s - queue.arrival_s[order] + ahead_s + done) / queue.ttft_slo_s[order]
        return ratios[~self._started(state)[order]]

    def _rank(self, state: SystemState, now_s: float, own: NDArray[np.float64],
              started: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Positions of Q in the order of service, before repair. The queue itself is in order of arrival."""
        queue, options = state.queue, self.options
        n = len(queue)
        arrival_rank = np.arange(n)
        waited = now_s - queue.arrival_s
        if options["order"] == "fcfs":
            return arrival_rank
        if options["order"] == "normalised":
            key = -(waited + own) / queue.ttft_slo_s
            by_key: NDArray[np.int64] = np.lexsort((arrival_rank, np.where(started, -math.inf, key)))
            return by_key
        late = (waited > queue.ttft_slo_s) & ~started
        if options["late_first"]:
            group = np.where(late, 1, 2)
        else:
            overdue = late & (waited > options["late_patience"] * queue.ttft_slo_s)
            group = np.where(overdue, 1, np.where(late, 3, 2))
        group = np.where(started, 0, group)
        ranked: NDArray[np.int64] = np.lexsort((arrival_rank, np.where(group == 2, own, 0.0), group))
        return ranked

    @staticmethod
    def _repair(order: NDArray[np.int64], own: NDArray[np.float64],
                slack: NDArray[np.float64]) -> NDArray[np.int64]:
        """Each request in time by arrival order but not after the sort moves to the last place where it is.

        ``slack``: seconds that may pass until each one's first token. In order of arrival, each judged in the order
        as the moves before it left it.
        """
        by_arrival = np.cumsum(own) <= slack
        after_sort = np.empty(len(own), dtype=bool)
        after_sort[order] = np.cumsum(own[order]) <= slack[order]
        broken = np.flatnonzero(by_arrival & ~after_sort)
        if not len(broken):
            return order
        places = order.tolist()
        for i in broken.tolist():
            at = places.index(i)
            starts = np.concatenate(([0.0], np.cumsum(own[places[:at]])))
            if starts[at] + own[i] <= slack[i]:
                continue  # an earlier move brought it in time
            able = np.flatnonzero(starts + own[i] <= slack[i])
            if len(able):
                places.insert(int(able[-1]), places.pop(at))
        return np.array(places)

    def _ahead(self, state: SystemState, now_s: float, index: int) -> float:
        """Predicted seconds until the running prefill batch is done, under one split."""
        batch = state.prefill
        if batch is None:
            return 0.0
        flight = state.in_flight.get(PREFILL)
        flying_s = 0.0 if flight is None else flight.remaining_s(now_s)
        flying = flight.step.layers if flight is not None and isinstance(flight.step, PrefillStep) else 0
        seqs = state.decode_seqs
        whole_s = self.estimator.prefill_at(batch.tokens, (seqs, state.decode_context_tokens) if seqs else None, index)
        return flying_s + whole_s * (batch.layers_left - flying) / batch.num_layers

    def _pop(self, state: SystemState, order: list[Request], index: int) -> list[Request]:
        """The head of Q, and more while a layer's flops per byte stay under the ridge point and whole prompts fit."""
        head = order[0]
        if not fits(state, head):
            return []
        popped, blocks = [head], state.kv.blocks_for(head.known_tokens)
        ridge = self.estimator.ridge(index)
        lengths: tuple[int, ...] = (head.known_tokens,)
        for request in order[1:]:
            if self.estimator.prefill_intensity(lengths) >= ridge or not fits(state, request, blocks):
                break
            popped.append(request)
            blocks += state.kv.blocks_for(request.known_tokens)
            lengths = (*lengths, request.known_tokens)
        return popped

    # ---- small questions -------------------------------------------------------------------------

    def _present_decode(self, state: SystemState) -> int:
        """Index of the present split for the search; a d of 0 or N counts as N."""
        return self._index_of.get(state.target.decode_sms, self.full)

    def _present_prefill(self, state: SystemState) -> int:
        """Index under which prefill is estimated now; without a split of its own, all N."""
        p, d = state.target
        return self._index_of.get(d, self.full) if 0 < p < self.num_sms else self.full

    def _kv_full(self, state: SystemState, admit: tuple[int, ...]) -> bool:
        """Whether a waiting head does not fit in KV. ``admit``: requests that leave the queue with this step."""
        queue = state.queue
        if len(queue.requests) == len(admit):
            return False
        if queue.version != self._largest_key:
            self._largest_key = queue.version
            self._largest_blocks = state.kv.blocks_for(max(r.known_tokens for r in queue.requests))
        if state.kv.free_blocks > (1 + len(admit)) * self._largest_blocks + state.decode_seqs:
            return False  # whichever is the head, it fits
        taken = sum(state.kv.blocks_for(r.known_tokens) for r in queue.requests if r.id in admit)
        waiting = [r for r in queue.requests if r.id not in admit]
        head = min(waiting, key=lambda r: (r.first_token_s is None, r.known_tokens, r.id))
        return not fits(state, head, taken)


class _Forecast(Protocol):
    """TTFT under each candidate split, by the test that Algorithm 1 prescribes."""

    def margin(self, index: int) -> float:
        """Seconds to spare under one split; negative: TTFT is missed."""

    def met(self, first: int, last: int) -> NDArray[np.bool_]:
        """Whether TTFT is met under splits ``first`` .. ``last - 1``."""

    def ratio(self, index: int) -> float:
        """P90(ttft / SLO) over P and Q."""


class _DecodeForecast:
    """The next decode step's seconds under each split: one at a time, or all at once."""

    __slots__ = ("context_tokens", "estimator", "prefill_tokens", "seqs")

    def __init__(self, estimator: Estimator, seqs: int, context_tokens: int, prefill_tokens: int) -> None:
        self.estimator = estimator
        self.seqs = seqs
        self.context_tokens = context_tokens
        self.prefill_tokens = prefill_tokens

    def at(self, index: int) -> float:
        """Seconds under one split."""
        return self.estimator.decode_at(self.seqs, self.context_tokens, self.prefill_tokens, index)

    def all(self) -> NDArray[np.float64]:
        """Seconds under all splits."""
        return self.estimator.decode_seconds(self.seqs, self.context_tokens, self.prefill_tokens)

    def first_within(self, limit_s: float, first: int, last: int) -> int | None:
        """The first split of ``first .. last`` whose step takes at most ``limit_s``: mostly one of the first few."""
        for index in range(first, min(first + 4, last + 1)):
            if self.at(index) <= limit_s:
                return index
        if last < first + 4:
            return None
        met = self.all()[first + 4 : last + 1] <= limit_s
        found = int(met.argmax())
        return first + 4 + found if met[found] else None


class _RunningBatch:
    """P runs: every request of P must be in time. ``share`` of its layers is to launch after ``flying_s`` in flight."""

    __slots__ = ("beside", "flying_s", "now_s", "policy", "share", "slack_s", "state", "tokens")

    def __init__(self, policy: Bullet, state: SystemState, now_s: float, beside: tuple[int, int] | None, share: float,
                 flying_s: float) -> None:
        batch = state.prefill
        assert batch is not None
        self.policy, self.state, self.now_s, self.beside = policy, state, now_s, beside
        self.tokens, self.share, self.flying_s = batch.tokens, share, flying_s
        self.slack_s = batch.deadline_s - now_s

    def left(self, index: int) -> float:
        """Seconds until P is done under one split."""
        return self.flying_s + self.share * self.policy.estimator.prefill_at(self.tokens, self.beside, index)

    def margin(self, index: int) -> float:
        return self.slack_s - self.left(index)

    def met(self, first: int, last: int) -> NDArray[np.bool_]:
        seconds = self.policy.estimator.prefill_seconds(self.tokens, self.beside)[first:last]
        met: NDArray[np.bool_] = self.flying_s + self.share * seconds <= self.slack_s
        return met

    def ratio(self, index: int) -> float:
        left_s, now_s, batch = self.left(index), self.now_s, self.state.prefill
        assert batch is not None
        own = [(now_s - r.arrival_s + left_s) / r.ttft_slo_s for r in batch.requests if r.first_token_s is None]
        behind = self.policy.queue_ratios(self.state, now_s, index, left_s)
        return p90(np.concatenate((own, behind)))


class _PoppedBatch:
    """P was popped just now: P90 over Q as it was before the pop. Slower prefill never helps, so bisect."""

    def __init__(self, policy: Bullet, state: SystemState, now_s: float) -> None:
        self.policy, self.state, self.now_s = policy, state, now_s

    def margin(self, index: int) -> float:
        return self.policy.queue_margin(self.state, self.now_s, index)

    def met(self, first: int, last: int) -> NDArray[np.bool_]:
        low, high = first, last  # the first split that misses lies in low .. high
        while low < high:
            middle = (low + high) // 2
            if self.margin(middle) >= 0:
                low = middle + 1
            else:
                high = middle
        met: NDArray[np.bool_] = np.arange(first, last) < low
        return met

    def ratio(self, index: int) -> float:
        return p90(self.policy.queue_ratios(self.state, self.now_s, index, 0.0))


class BulletLiteral(Bullet):
    """The letter of the text: no decode floor, no cap on the next step, late requests first."""

    defaults = OPTIONS | {"decode_floor": 0.0, "cap_next_step": False, "late_first": True}
