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

Candidates are indices into the split table, in ascending d: the smallest index is the largest p. Searches bisect where
they may take a step to be no slower on more SMs; online corrections by SM bucket can bend that by their error.

Where the paper is silent the reading is an option (``OPTIONS``). ``BulletLiteral`` is the letter of the text.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate, compress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bullet.errors import ConfigError
from bullet.estimators.base import Estimator
from bullet.policies.base import PolicyContext, read_options
from bullet.policies.twolane import decode_victims, fits
from bullet.state import (
    DECODE,
    PREFILL,
    Decision,
    DecodeBatch,
    DecodeStep,
    Partition,
    PrefillBatch,
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
    "delayed_decode": True,  # while prefill layers that end by decode's latest start run on N: no others can use the wait
    "delay_limit": 1.0,  # x TPOT SLO: longest delay
    "fixed_decode_sms": 0,  # not 0: decode always has these, the split is not chosen; what the adaptive split is worth
    "partition": True,  # off: both lanes hold all N SMs; reordering and delayed decode stay (Fig. 23, w/ Scheduler)
}

REDUCE_DECODE = "reduce-decode"
SHARED = "shared"
DELAYED = "delayed-decode"
HAND_OVER = "hand-over"
_new = tuple.__new__
"""A NamedTuple's own constructor is a Python function and takes twice as long; all fields must be given."""
SHARING = frozenset({DELAYED, HAND_OVER})
DELAYABLE = frozenset({REDUCE_DECODE, SHARED})


def p90(values: NDArray[np.float64]) -> float:
    """Nearest-rank P90; 0 for none (an empty set meets any objective)."""
    n = len(values)
    if n == 0:
        return 0.0
    index = n - n // 10 - 1  # ceil(0.9 n) - 1
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
        for name in ("late_patience", "delay_limit"):
            if not options[name] >= 0:
                raise ConfigError(f"policy.options.{name} = {options[name]}: must be 0 or more")
        legal = context.splits.decode_sms.tolist()
        if options["fixed_decode_sms"] not in (0, *legal):
            raise ConfigError(f"policy.options.fixed_decode_sms = {options['fixed_decode_sms']}: must be 0 (adaptive) or "
                              f"{legal[0]} to {legal[-1]} in the partition's steps")
        self.options = options
        self.estimator = context.estimator
        self._learn = context.estimator.observe
        self.splits = context.splits
        self.num_sms = context.splits.num_sms
        self.full = context.splits.full
        self.tpot_slo_s = context.tpot_slo_s
        self.layers_per_step: int = options["layers_per_step"]
        self.partition: bool = options["partition"]
        self.cap_next_step: bool = options["cap_next_step"]
        self.cap_s = context.tpot_slo_s if self.cap_next_step else math.inf
        self.delay_limit_s: float = options["delay_limit"] * context.tpot_slo_s
        self._index_of = {int(d): i for i, d in enumerate(self.splits.decode_sms)}
        self._partitions = [Partition(self.num_sms - int(d), int(d)) for d in self.splits.decode_sms]
        self._partitions.append(Partition(self.num_sms, self.num_sms))  # at ``full``: everything is shared
        #: Smallest admissible split index: decode never below its floor.
        self.floor = int(np.searchsorted(self.splits.decode_sms, options["decode_floor"] * self.num_sms - 1e-9))
        self.floor = min(self.floor, self.full - 1)
        self.fixed = self._index_of.get(options["fixed_decode_sms"])
        # What it remembers; all of it follows from the calls so far, so a record replays into a fresh policy.
        self._delay_until_s: float | None = None  # end of the delay that decode is in
        self._ranked: _Ranked | None = None  # Q as last sorted
        # Kept for speed: the same values would be computed anew.
        self._dues: list[float] = []  # of the decode batch, ascending: see _limit
        self._dues_version = 0
        self._forecast: _DecodeForecast | None = None
        self._largest: tuple[int, int] | None = None  # queue version, most tokens waiting
        # Uncorrected seconds of a prompt alone: on a split, by its length; and over all splits, in a row for each length.
        self._lone_s: list[dict[int, float]] = [{} for _ in range(self.full + 1)]
        self._table = np.empty((256, self.full + 1))
        self._row_of: dict[int, int] = {}  # prompt length -> row

    # ---- the two lanes ---------------------------------------------------------------------------

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """Algorithm 1 for the lane that is idle."""
        return self._prefill(state, now_s) if lane == PREFILL else self._decode(state, now_s)

    def observe(self, step: Step, elapsed_s: float) -> None:
        """Online recalibration (section 3.2.4); steps meant to share SMs teach nothing, as no model here covers that."""
        predicted_s, reason = step.predicted_s, step.reason
        if predicted_s and reason not in SHARING:
            self._learn(PREFILL if isinstance(step, PrefillStep) else DECODE, step.sms, predicted_s, elapsed_s)

    def _prefill(self, state: SystemState, now_s: float) -> Decision:
        batch = state.prefill
        present = self._present_prefill(state)
        seqs, context = beside = state.next_decode()
        popped: list[Request] = []
        ttft: _Forecast | None = None
        deadline_s = 0.0
        if batch is not None:
            # P runs and goes on: satisfied = every request of P meets its TTFT SLO under the present split.
            tokens, total_tokens, layers_left = batch.tokens, batch.total_tokens, batch.layers_left
            whole = self.estimator.prefill_line(tokens, beside if seqs else None)
            share, deadline_s = layers_left / batch.num_layers, batch.deadline_s
            margin_s = deadline_s - now_s - share * whole(present)
        else:
            # Otherwise satisfied = P90 over Q as it is before the pop, re-estimated after the sort.
            ranked = self._sort(state, now_s, present)
            ttft = _PoppedBatch(self, ranked, now_s)
            margin_s = ttft.margin(present)
            popped = self._pop(state, ranked, present if seqs else self.full)
            if not popped:  # the head does not fit: only decode can free its blocks, and gets all SMs to do so
                return Wait(None, Published(margin_s), Partition(0, self.num_sms), "kv-full")
            tokens, layers_left, share = tuple([r.known_tokens for r in popped]), state.num_layers, 1.0
            total_tokens = sum(tokens)
            whole = self.estimator.prefill_line(tokens, beside if seqs else None)
        layers = min(self.layers_per_step, layers_left)
        admit = tuple([r.id for r in popped]) if popped else ()

        if not self.partition:
            sms, index, target, reason = self.num_sms, self.full, self._partitions[self.full], SHARED
        elif not seqs:  # no decodes: p = N
            sms, index, target, reason = self.num_sms, self.full, Partition(self.num_sms, 0), "no-decode"
        else:
            step = self._decode_step(state, seqs, context, total_tokens)
            limit_s = self._limit(state, now_s)
            # The branch test reads what decode published, unless the batch it spoke of is gone: an empty one is satisfied.
            tpot_margin_s = state.decode_published.tpot_margin_s
            tpot_met = tpot_margin_s is None or tpot_margin_s >= 0 or not state.decode.size
            kv_full = len(state.queue.requests) > len(popped) and self._kv_full(state, now_s, popped)
            found = self._reduce_decode(state, step, limit_s) if tpot_met and not kv_full else None
            if found is not None:
                index, reason = found, REDUCE_DECODE
            else:
                if ttft is None:  # here and not before: ReduceDecodeSM, which does without, is the rule
                    assert batch is not None
                    ttft = _RunningBatch(self, state, batch, now_s, beside, share, 0.0)
                index, reason = self._choose(state, now_s, margin_s >= 0, tpot_met, step, limit_s, ttft, kv_full)
            target = self._partitions[index]
            sms = target.prefill_sms
            if reason == REDUCE_DECODE and DECODE not in state.in_flight:
                chosen_s = deadline_s - now_s - share * whole(index) if ttft is None else ttft.margin(index)
                if chosen_s < 0 and whole(self.full) * layers / state.num_layers <= self._delay(now_s, step.at(index), limit_s):
                    # These layers have the device to themselves, as they end by decode's latest start.
                    sms, index, reason = self.num_sms, self.full, DELAYED
        return _new(PrefillStep, (sms, layers, admit, whole(index) * layers / state.num_layers, _new(Published, (margin_s, None)),
                                  target, (), reason))

    def _decode(self, state: SystemState, now_s: float) -> Decision:
        batch = state.prefill
        seqs, context = state.next_decode()
        victims = () if state.kv.free_blocks >= seqs else decode_victims(state)  # a sequence takes one block at most
        if victims and len(victims) >= seqs:
            assert batch is not None, f"one request outgrew the KV cache: {seqs} decoding"
            return Wait(reason="kv-full")  # P holds the blocks, until its last layer
        step = self._decode_step(state, seqs, context, batch.total_tokens if batch is not None else 0, victims)
        limit_s = self._limit(state, now_s)
        tpot_margin_s = limit_s - step.at(self._present_decode(state))
        published = _new(Published, (None, tpot_margin_s))

        if batch is None:  # no prefill work: d = N
            target = Partition(0, self.num_sms) if self.partition else self._partitions[self.full]
            return self._launch_decode(self.num_sms, step.at(self.full), published, target, victims, "no-prefill")

        flight = state.in_flight.get(PREFILL)
        flying_s, layers = 0.0, batch.layers_left
        if flight is not None and isinstance(flight.step, PrefillStep):
            flying_s = flight.remaining_s(now_s)
            layers -= flight.step.layers
        ttft = _RunningBatch(self, state, batch, now_s, (seqs, context), layers / batch.num_layers, flying_s)
        if self.partition:
            kv_full = bool(state.queue.requests) and self._kv_full(state, now_s, [])
            found = self._reduce_decode(state, step, limit_s) if tpot_margin_s >= 0 and not kv_full else None
            if found is not None:
                index, reason = found, REDUCE_DECODE
            else:
                ttft_margin_s = state.prefill_published.ttft_margin_s
                satisfied = ttft_margin_s is None or ttft_margin_s >= 0
                index, reason = self._choose(state, now_s, satisfied, tpot_margin_s >= 0, step, limit_s, ttft, kv_full)
            step_s = step.at(index)
            if self._tail_is_short(state, ttft.left(index), index, step_s, kv_full):
                full_s = step.at(self.full)
                return self._launch_decode(self.num_sms, full_s, published, self._partitions[index], victims, HAND_OVER)
        else:
            index, reason = self.full, SHARED
            step_s = step.at(index)
        target = self._partitions[index]
        if reason in DELAYABLE and not victims and (layers or state.queue.requests):
            # Delayed decode: as prefill's launch in flight decided it, or decided here until prefill's next launch,
            # which must come in time to use the SMs.
            delay_s = self._delay(now_s, step_s, limit_s)
            if delay_s > 0:
                decided = flight is not None and flight.step.reason == DELAYED
                usable = flying_s < delay_s or (flight is not None and flight.step.sms == self.num_sms)
                if decided or (usable and ttft.margin(index) < 0):
                    if self._delay_until_s is None:
                        self._delay_until_s = now_s + self.delay_limit_s
                    return Wait(now_s + delay_s, published, target, DELAYED)
        return self._launch_decode(target.decode_sms, step_s, published, target, victims, reason)

    def _launch_decode(self, sms: int, predicted_s: float, published: Published, target: Partition,
                       victims: tuple[int, ...], reason: str) -> DecodeStep:
        self._delay_until_s = None
        return _new(DecodeStep, (sms, predicted_s, published, target, victims, reason))

    # ---- the branches of Algorithm 1 -------------------------------------------------------------

    def _reduce_decode(self, state: SystemState, step: _DecodeForecast, limit_s: float) -> int | None:
        """ReduceDecodeSM: the smallest d, not above the present one, that keeps P90(tpot) within its SLO."""
        if self.fixed is not None:
            return None
        return step.first_within(min(limit_s, self.cap_s), self.floor, min(self._present_decode(state), self.full - 1))

    def _choose(self, state: SystemState, now_s: float, satisfied: bool, tpot_met: bool, step: _DecodeForecast,
                limit_s: float, ttft: _Forecast, kv_full: bool) -> tuple[int, str]:
        """Index of the split and the branch that chose it, where ReduceDecodeSM found none."""
        if self.fixed is not None:
            return self.fixed, "fixed"
        if kv_full:
            return self._free_kv(ttft), "kv-full"
        if tpot_met:
            present = self._present_decode(state)
            if self.floor <= present < self.full:
                return present, "keep"
        elif satisfied:
            # ReducePrefillSM: the largest p that meets both; if none, the smallest p that keeps TTFT.
            cap_s = min(limit_s, self.cap_s)
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

        As d rises the first rises and the second falls, so the best split is where they cross: the smallest d at which
        TTFT is the worse of the two, or its neighbour.
        """
        running = state.decode
        flight = state.in_flight.get(DECODE)
        ahead_s = 0.0 if flight is None else flight.remaining_s(now_s)
        gained = running.generated_offset + running.iteration + (0 if flight is None else 1)  # g + 1 of the next step
        age_s = now_s + ahead_s - running.first_token_s
        if state.ready:
            gained = np.concatenate((gained, [float(r.generated) for r in state.ready]))
            age_s = np.concatenate((age_s, [now_s + ahead_s - _first_token_s(r) for r in state.ready]))

        def tpot(index: int) -> float:
            return p90((age_s + step.at(index)) / gained) / self.tpot_slo_s

        def ttft_decides(index: int) -> bool:
            return ttft.ratio(index) >= tpot(index)

        # The cap on the next step holds here too where any split can meet it: P90 says nothing of one long step.
        capped = step.first_within(self.tpot_slo_s, self.floor, self.full - 1) if self.cap_next_step else None
        first = self.floor if capped is None else capped
        if ttft_decides(first):  # as in deep overload
            return first
        crossing = first + bisect_left(range(first, self.full - 1), True, key=ttft_decides)
        left = crossing - 1
        if max(ttft.ratio(crossing), tpot(crossing)) < tpot(left):
            return crossing
        # Left of the crossing decode decides, and more SMs may not help it at all: the largest p of equals.
        return first + bisect_left(range(first, left), True, key=lambda i: step.at(i) <= step.at(left))

    def _free_kv(self, ttft: _Forecast) -> int:
        """KV full: decode frees it. The largest d up to N/2 that keeps P's TTFT, else 2N/9."""
        half = int(np.searchsorted(self.splits.decode_sms, self.num_sms / 2, side="right"))
        keeps = np.flatnonzero(ttft.met(self.floor, max(half, self.floor + 1)))
        if len(keeps):
            return self.floor + int(keeps[-1])
        return min(self.full - 1, max(self.floor, int(np.searchsorted(self.splits.decode_sms, 2 * self.num_sms / 9))))

    def _delay(self, now_s: float, step_s: float, limit_s: float) -> float:
        """Delayed decode: seconds until the latest start of a step that keeps P90(tpot); 0 if that is now.

        At most one TPOT SLO in all, from when the delay began: it is decided again at each prefill launch.
        """
        if not self.options["delayed_decode"]:
            return 0.0
        longest_s = self.delay_limit_s if self._delay_until_s is None else self._delay_until_s - now_s
        delay_s = min(limit_s - step_s, longest_s)
        return delay_s if delay_s > 1e-6 else 0.0

    def _tail_is_short(self, state: SystemState, left_s: float, index: int, step_s: float, kv_full: bool) -> bool:
        """Hand-over: what is left of prefill ends within one decode step, and no batch can follow."""
        mode, waiting = self.options["hand_over"], state.queue.requests
        if mode == "off" or left_s >= step_s:
            return False
        if mode == "batch":
            return not waiting or kv_full
        for request in waiting:
            left_s += self.estimator.prefill_line((request.known_tokens,), None)(index)
            if left_s >= step_s:
                return False
        return True

    # ---- TPOT ------------------------------------------------------------------------------------

    def _decode_step(self, state: SystemState, seqs: int, context: int, prefill_tokens: int,
                     victims: tuple[int, ...] = ()) -> _DecodeForecast:
        """The next iteration (``seqs``, ``context``: with those waiting to merge) beside a prefill, without victims."""
        if DECODE in state.in_flight:
            context += state.decode.size  # the iteration in flight adds a token to each
        for request_id in victims:
            request = state.decode.requests.get(request_id)
            seqs -= 1
            context -= (next(r.known_tokens for r in state.ready if r.id == request_id) if request is None
                        else state.decode.cached(request) + 1)
        # What prefill expects of the next iteration while one is in flight, decode asks again when that ends.
        last = self._forecast
        if last is None or last.context_tokens != context or last.seqs != seqs or last.prefill_tokens != prefill_tokens:
            last = self._forecast = _DecodeForecast(self.estimator, seqs, context, prefill_tokens)
        return last

    def _limit(self, state: SystemState, now_s: float) -> float:
        """How long the next decode step may be with P90(tpot) inside its SLO; infinity without decodes.

        A request's next token is due one SLO after its first for each token it has by then: g + 1 at an iteration's
        end, g + 2 while one is in flight; those waiting to merge gain nothing from the one in flight.
        """
        running, ready, slo = state.decode, state.ready, self.tpot_slo_s
        flight = state.in_flight.get(DECODE)
        iteration, ahead_s = running.iteration, 0.0
        if flight is not None:
            iteration += 1
            ahead_s = flight.remaining_s(now_s)
        dues = self._dues if running.version == self._dues_version else self._follow(running)
        if ready:
            dues = sorted([*dues, *[_first_token_s(r) + slo * (r.generated - iteration) for r in ready]])
        due_s = dues[len(dues) // 10] if dues else math.inf  # P90's order statistic: n - ceil(0.9 n)
        return due_s + slo * iteration - now_s - ahead_s

    def _follow(self, running: DecodeBatch) -> list[float]:
        """``first token + SLO x (generated - iteration)`` over the batch, sorted: constant while a request stays in it."""
        dues, slo, changes = self._dues, self.tpot_slo_s, running.changes
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

    # ---- the queue -------------------------------------------------------------------------------

    def _sort(self, state: SystemState, now_s: float, index: int) -> _Ranked:
        """Q by least estimated latency under one split, with the readings of ``OPTIONS``.

        On plain lists: queues are mostly short, and then each numpy call costs more than the whole sort.
        """
        queue = state.queue
        requests = queue.requests
        if len(requests) == 1:
            (first,) = requests
            counts = None if first.first_token_s is None else [False]
            self._ranked = _Ranked(queue.version, [0], [first.known_tokens], [first.arrival_s],
                                   [first.ttft_slo_s], counts)
            return self._ranked
        # Preempted requests stand at the front. Their first token is out, so that only TPOT is at stake: they go first.
        started = 0
        while started < len(requests) and requests[started].first_token_s is not None:
            started += 1
        tokens, arrival_s, ttft_slo_s = queue.known_tokens, queue.arrival_s, queue.ttft_slo_s
        order = list(range(len(tokens)))
        if len(tokens) - started > 1:
            correction = self.estimator.prefill_correction(index)
            own = [alone_s * correction for alone_s in self._lone(tokens, index)]
            waited = [now_s - at_s for at_s in arrival_s]
            order = self._rank(waited, own, ttft_slo_s, started)
            if self.options["repair"] and self.options["order"] == "least":
                ahead_s = self._ahead(state, now_s, index)
                slack = [math.inf] * started + [slo_s - waited_s - ahead_s for slo_s, waited_s
                                                in zip(ttft_slo_s[started:], waited[started:], strict=True)]
                order = self._repair(order, own, slack)
        self._ranked = _Ranked(queue.version, order, [tokens[i] for i in order], [arrival_s[i] for i in order],
                               [ttft_slo_s[i] for i in order], [i >= started for i in order] if started else None)
        return self._ranked

    def _last_sorted(self, state: SystemState, now_s: float) -> _Ranked:
        """Q as last sorted, sorted anew if it has changed since."""
        if self._ranked is not None and self._ranked.version == state.queue.version:
            return self._ranked
        return self._sort(state, now_s, self._present_prefill(state))

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

    def _pop(self, state: SystemState, ranked: _Ranked, index: int) -> list[Request]:
        """The head of Q, and more while a layer's flops per byte stay under the ridge point and whole prompts fit.

        The ridge point is that of ``index``, the present split: which one follows depends on the batch itself.
        """
        popped: list[Request] = []
        lengths: tuple[int, ...] = ()
        blocks = 0
        for i in ranked.order:
            request = state.queue.requests[i]
            if not fits(state, request, blocks):
                break
            if popped and self.estimator.prefill_intensity(lengths) >= self.estimator.ridge(index):
                break
            popped.append(request)
            blocks += state.kv.blocks_for(request.known_tokens)
            lengths = (*lengths, request.known_tokens)
        return popped

    def _kv_full(self, state: SystemState, now_s: float, popped: list[Request]) -> bool:
        """Whether the head of Q does not fit in KV. ``popped``: the first of it, not all, which leave with this step."""
        queue, kv = state.queue, state.kv
        if self._largest is None or self._largest[0] != queue.version:
            self._largest = (queue.version, max(queue.known_tokens))
        blocks = kv.blocks_for(self._largest[1])
        if kv.free_blocks > blocks * (1 + len(popped)) + state.decode_seqs:
            return False  # whichever is the head, it fits
        head = queue.requests[self._last_sorted(state, now_s).order[len(popped)]]
        return not fits(state, head, sum(kv.blocks_for(r.known_tokens) for r in popped))

    # ---- TTFT ------------------------------------------------------------------------------------

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

    def _queue_margin(self, ranked: _Ranked, now_s: float, index: int) -> float:
        """Seconds by which P90(ttft) over Q is inside its SLO under one split, no batch being ahead of it."""
        correction = self.estimator.prefill_correction(index)
        ends_s = accumulate(self._lone(ranked.tokens, index))
        slacks = [arrival_s + slo_s - end_s * correction for arrival_s, slo_s, end_s
                  in zip(ranked.arrival_s, ranked.ttft_slo_s, ends_s, strict=True)]
        if ranked.counts is not None:
            slacks = list(compress(slacks, ranked.counts))
        return (sorted(slacks)[len(slacks) // 10] if slacks else math.inf) - now_s

    def _queue_ratios(self, ranked: _Ranked, now_s: float, index: int, ahead_s: float) -> NDArray[np.float64]:
        """TTFT / SLO of everything in Q under one split, served after ``ahead_s`` seconds."""
        if ranked.arrays is None:  # a search over splits follows: a long queue makes it dear
            ranked.arrays = (np.array([self._row_for(length) for length in ranked.tokens]), np.array(ranked.arrival_s),
                             np.array(ranked.ttft_slo_s))
        rows, arrival_s, ttft_slo_s = ranked.arrays
        ends = np.cumsum(self._table[rows, index]) * self.estimator.prefill_correction(index)
        ratios: NDArray[np.float64] = (now_s + ahead_s + ends - arrival_s) / ttft_slo_s
        return ratios if ranked.counts is None else ratios[ranked.counts]

    def _lone(self, lengths: list[int], index: int) -> list[float]:
        """Uncorrected seconds of prompts of these lengths, each alone, on one split."""
        known = self._lone_s[index]
        for length in lengths:
            if length not in known:
                known[length] = self.estimator.prefill_base_at((length,), index)
        return [known[length] for length in lengths]

    def _row_for(self, length: int) -> int:
        """Row of ``_table`` for a prompt length; a new one is filled in."""
        row = self._row_of.get(length)
        if row is None:
            row = self._row_of[length] = len(self._row_of)
            if row == len(self._table):
                self._table = np.concatenate((self._table, np.empty_like(self._table)))
            self._table[row] = self.estimator.prefill_base(length)
        return row

    # ---- small questions -------------------------------------------------------------------------

    def _present_decode(self, state: SystemState) -> int:
        """Index of the present split for the search; a d of 0 or N counts as N."""
        return self._index_of.get(state.target.decode_sms, self.full)

    def _present_prefill(self, state: SystemState) -> int:
        """Index under which prefill is estimated now; without a split of its own, all N."""
        p, d = state.target
        return self._index_of.get(d, self.full) if 0 < p < self.num_sms else self.full


def _first_token_s(request: Request) -> float:
    assert request.first_token_s is not None, request
    return request.first_token_s


class _Ranked:
    """Q in order of service: columns in that order. ``counts``: who has a TTFT left to miss (``None``: all)."""

    __slots__ = ("arrays", "arrival_s", "counts", "order", "tokens", "ttft_slo_s", "version")

    def __init__(self, version: int, order: list[int], tokens: list[int], arrival_s: list[float], ttft_slo_s: list[float],
                 counts: list[bool] | None) -> None:
        self.version = version
        self.order = order  # positions in the queue
        self.tokens = tokens
        self.arrival_s = arrival_s
        self.ttft_slo_s = ttft_slo_s
        self.counts = counts
        #: Rows of the policy's table, arrivals and SLOs, once they are asked for.
        self.arrays: tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]] | None = None


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

    __slots__ = ("at", "context_tokens", "estimator", "prefill_tokens", "seqs")

    def __init__(self, estimator: Estimator, seqs: int, context_tokens: int, prefill_tokens: int) -> None:
        self.estimator = estimator
        self.seqs = seqs
        self.context_tokens = context_tokens
        self.prefill_tokens = prefill_tokens
        #: Seconds under one split, by its index.
        self.at = estimator.decode_line(seqs, context_tokens, prefill_tokens)

    def all(self) -> NDArray[np.float64]:
        """Seconds under all splits."""
        return self.estimator.decode_seconds(self.seqs, self.context_tokens, self.prefill_tokens)

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
        met = self.all()[first + 4 : last + 1] <= limit_s
        found = int(met.argmax())
        return first + 4 + found if met[found] else None


class _RunningBatch:
    """P runs: every request of P must be in time. ``share`` of its layers is to launch after ``flying_s`` in flight."""

    __slots__ = ("batch", "beside", "flying_s", "now_s", "policy", "share", "state", "whole")

    def __init__(self, policy: Bullet, state: SystemState, batch: PrefillBatch, now_s: float,
                 beside: tuple[int, int] | None, share: float, flying_s: float) -> None:
        self.policy, self.state, self.batch, self.now_s = policy, state, batch, now_s
        self.beside, self.share, self.flying_s = beside, share, flying_s
        #: Seconds of all its layers under one split, by its index.
        self.whole = policy.estimator.prefill_line(batch.tokens, beside)

    def left(self, index: int) -> float:
        """Seconds until P is done under one split."""
        return self.flying_s + self.share * self.whole(index)

    def margin(self, index: int) -> float:
        return self.batch.deadline_s - self.now_s - self.left(index)

    def met(self, first: int, last: int) -> NDArray[np.bool_]:
        seconds = self.policy.estimator.prefill_seconds(self.batch.tokens, self.beside)[first:last]
        met: NDArray[np.bool_] = self.flying_s + self.share * seconds <= self.batch.deadline_s - self.now_s
        return met

    def ratio(self, index: int) -> float:
        policy, state, now_s, left_s = self.policy, self.state, self.now_s, self.left(index)
        ratios = np.array([(now_s - r.arrival_s + left_s) / r.ttft_slo_s for r in self.batch.requests
                           if r.first_token_s is None])
        if state.queue.requests:
            behind = policy._queue_ratios(policy._last_sorted(state, now_s), now_s, index, left_s)
            ratios = np.concatenate((ratios, behind))
        return p90(ratios)


class _PoppedBatch:
    """P is popped just now: P90 over Q as it was before the pop. Slower prefill never helps, so bisect."""

    __slots__ = ("now_s", "policy", "ranked")

    def __init__(self, policy: Bullet, ranked: _Ranked, now_s: float) -> None:
        self.policy, self.ranked, self.now_s = policy, ranked, now_s

    def margin(self, index: int) -> float:
        return self.policy._queue_margin(self.ranked, self.now_s, index)

    def met(self, first: int, last: int) -> NDArray[np.bool_]:
        splits = range(first, last)
        met: NDArray[np.bool_] = np.arange(len(splits)) < bisect_left(splits, True, key=lambda i: self.margin(i) < 0)
        return met

    def ratio(self, index: int) -> float:
        return p90(self.policy._queue_ratios(self.ranked, self.now_s, index, 0.0))


class BulletLiteral(Bullet):
    """The letter of the text: no decode floor, no cap on the next step, late requests first."""

    defaults = OPTIONS | {"decode_floor": 0.0, "cap_next_step": False, "late_first": True}
