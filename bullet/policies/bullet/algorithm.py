"""Bullet's scheduler: Algorithm 1 (section 3.3), one object for both lanes. Newcomers start here.

Prefill lane, at each group of layers          Decode lane, at each iteration
  estimate TTFT of P and Q, publish              merge, estimate TPOT, publish
  read TPOT                                      read TTFT
  sort Q by least estimated latency              no prefill work: all N SMs
  P runs: satisfied = all of P in time           choose (p, d) by the same branches
  else: satisfied = P90 of Q in time, pop P      hand-over, or delayed decode
  choose (p, d) by the branches                  launch one iteration on d SMs
  launch the next layers on p SMs

The branches:  TTFT lost and TPOT lost -> SetBalancedSM;  TPOT met -> ReduceDecodeSM;  else -> ReducePrefillSM.

queue.py sorts, repairs and pops Q; forecast.py says what TTFT and TPOT would come to. Candidates are indices into the
split table, in ascending d: the smallest index is the largest p. Searches bisect where they may take a step to be no
slower on more SMs; online corrections by SM bucket can bend that by their error.

Where the paper is silent the reading is an option (``OPTIONS``). ``BulletLiteral`` is the letter of the text.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

import numpy as np

from bullet.errors import ConfigError
from bullet.policies.base import PolicyContext, read_options, require
from bullet.policies.bullet.forecast import PoppedBatch, RunningBatch, StepForecast, Tpot, TtftForecast
from bullet.policies.bullet.queue import ServiceOrder
from bullet.policies.twolane import decode_victims
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
    "decode_floor": 0.0,  # decode never below this share of the SMs; 1/9 (12 of 108, Fig. 20) was the default once
    "cap_next_step": True,  # the next decode step itself stays within the TPOT SLO
    "order": "least",  # least | fcfs | normalised (largest TTFT / SLO first, as the released code)
    "late_first": False,  # requests already late go first, in order of arrival
    "late_patience": 20.0,  # x its SLO: longest that a late request waits behind later arrivals
    "repair": True,  # a request in time by arrival order but not after the sort moves forward
    "hand_over": "queue",  # off | batch (nothing can follow P) | queue (or all of Q ends with it within a step)
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


class Bullet:
    """Algorithm 1 with the readings of ``OPTIONS``, the nearest to the text and the paper's figures. ``context.estimator`` makes
    every prediction.

    Where it departs from the letter (docs/policies.md has the figures): the next step is capped (a P90 over whole requests lets
    single steps run to seconds, and Fig. 16 and 20 show none); late requests wait behind timely ones, 20 x their SLO at most
    (first, they make an overload first come first served over requests already lost; last without bound, they starve, which the
    text rules out); the sort is repaired (as it would make timely requests late). The floor under decode that stood here before
    is not in the text, and under the cap it only costs.
    """

    lanes: tuple[str, ...] = (PREFILL, DECODE)
    defaults = OPTIONS
    shares_prefixes = True
    name = "bullet"
    service_order = ServiceOrder

    def __init__(self, context: PolicyContext) -> None:
        if context.estimator is None:
            raise ConfigError(f"policy {self.name} needs an estimator: srm, srm-blind or oracle")
        self.options = options = read_options(self.name, context.options, self.defaults)
        legal = context.splits.decode_sms.tolist()
        require(options, "order", options["order"] in ("least", "fcfs", "normalised"), "least, fcfs or normalised")
        require(options, "hand_over", options["hand_over"] in ("off", "batch", "queue"), "off, batch or queue")
        require(options, "layers_per_step", options["layers_per_step"] >= 1, "1 or more")
        require(options, "decode_floor", 0 <= options["decode_floor"] < 1, "from 0 to under 1")
        for name in ("late_patience", "delay_limit"):
            require(options, name, options[name] >= 0, "0 or more")
        require(options, "fixed_decode_sms", options["fixed_decode_sms"] in (0, *legal),
                f"0 (adaptive) or {legal[0]} to {legal[-1]} in the partition's steps")
        self.estimator = context.estimator
        self._learn = context.estimator.observe
        self.splits = context.splits
        self.num_sms, self.full = context.splits.num_sms, context.splits.full
        self.tpot_slo_s = context.tpot_slo_s
        self.layers_per_step: int = options["layers_per_step"]
        self.partition: bool = options["partition"]
        self.cap_next_step: bool = options["cap_next_step"]
        self.cap_s = context.tpot_slo_s if self.cap_next_step else math.inf
        self.delay_limit_s: float = options["delay_limit"] * context.tpot_slo_s
        self._index_of = {d: i for i, d in enumerate(legal)}
        self._partitions = [Partition(self.num_sms - d, d) for d in legal]
        self._partitions.append(Partition(self.num_sms, self.num_sms))  # at ``full``: everything is shared
        #: Smallest admissible split index: decode never below its floor.
        self.floor = int(np.searchsorted(self.splits.decode_sms, options["decode_floor"] * self.num_sms - 1e-9))
        self.floor = min(self.floor, self.full - 1)
        self.fixed = self._index_of.get(options["fixed_decode_sms"])
        # What these remember follows from the calls so far, so a record replays into a fresh policy.
        self.queue = self.service_order(context.estimator, context.splits, self._index_of, options)
        self.tpot = Tpot(context.estimator, context.tpot_slo_s)
        self._delay_until_s: float | None = None  # end of the delay that decode is in

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Decision:
        """Algorithm 1 for the lane that is idle."""
        return self._prefill(state, now_s) if lane == PREFILL else self._decode(state, now_s)

    def observe(self, step: Step, elapsed_s: float) -> None:
        """Online recalibration (section 3.2.4); steps meant to share SMs teach nothing, as no model here covers that."""
        predicted_s, reason = step.predicted_s, step.reason
        if predicted_s and reason not in SHARING:
            if isinstance(step, PrefillStep):
                self._learn(PREFILL, step.sms, predicted_s, elapsed_s)
            else:
                self._learn(DECODE, step.sms, predicted_s, elapsed_s)
                self.tpot.learned()

    # ---- the two lanes ---------------------------------------------------------------------------

    def _prefill(self, state: SystemState, now_s: float) -> Decision:
        batch, tpot = state.prefill, self.tpot
        present = self.queue.present_prefill(state)
        seqs, context = decodes = state.next_decode()
        beside = decodes if seqs else None
        popped: list[Request] = []
        ttft: TtftForecast | None
        if batch is not None:
            # P runs and goes on: satisfied = every request of P meets its TTFT SLO under the present split.
            total_tokens, layers_left = batch.total_tokens, batch.layers_left
            ttft, deadline_s, share = None, batch.deadline_s, layers_left / batch.num_layers
            whole = self.estimator.prefill_line(batch.tokens, beside)
            margin_s = deadline_s - now_s - share * whole(present)
        else:
            # Otherwise satisfied = P90 over Q as it is before the pop, re-estimated after the sort.
            ranked = self.queue.sort(state, now_s, present)
            ttft, deadline_s, share = PoppedBatch(ranked, now_s), math.inf, 1.0
            margin_s = ttft.margin(present)
            popped = self.queue.pop(state, ranked, present if seqs else self.full)
            if not popped:  # the head does not fit: only decode can free its blocks, and gets all SMs to do so
                return Wait(None, Published(margin_s), Partition(0, self.num_sms), "kv-full")
            tokens, layers_left = tuple([state.kv.fresh(r) for r in popped]), state.num_layers
            total_tokens = sum(tokens)
            whole = self.estimator.prefill_line(tokens, beside)
        layers = self.layers_per_step if self.layers_per_step < layers_left else layers_left
        admit = tuple([r.id for r in popped]) if popped else ()

        if not self.partition:
            sms, index, target, reason = self.num_sms, self.full, self._partitions[self.full], SHARED
        elif not seqs:  # no decodes: p = N
            sms, index, target, reason = self.num_sms, self.full, Partition(self.num_sms, 0), "no-decode"
        else:
            step, limit_s = tpot.step(state, seqs, context, total_tokens), tpot.limit(state, now_s)
            # The branch test reads what decode published, unless the batch it spoke of is gone: an empty one is satisfied.
            tpot_margin_s = state.decode_published.tpot_margin_s
            tpot_met = tpot_margin_s is None or tpot_margin_s >= 0 or not state.decode.size
            kv_full = len(state.queue.requests) > len(popped) and self.queue.kv_full(state, now_s, popped)
            found = self._reduce_decode(state, step, limit_s) if tpot_met and not kv_full else None
            if found is not None:
                index, reason = found, REDUCE_DECODE
            else:
                if ttft is None:  # here and not before: ReduceDecodeSM, which does without, is the rule
                    assert batch is not None
                    ttft = RunningBatch(self.queue, state, batch, now_s, beside, share, 0.0, whole)
                index, reason = self._choose(state, now_s, margin_s >= 0, tpot_met, kv_full, step, limit_s, ttft)
            target = self._partitions[index]
            sms = target.prefill_sms
            if reason == REDUCE_DECODE and DECODE not in state.in_flight:
                spare_s = deadline_s - now_s - share * whole(index) if ttft is None else ttft.margin(index)
                if spare_s < 0 and whole(self.full) * layers / state.num_layers <= self._delay(now_s, step.at(index), limit_s):
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
        step = self.tpot.step(state, seqs, context, batch.total_tokens if batch is not None else 0, victims)
        limit_s = self.tpot.limit(state, now_s)
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
        ttft = RunningBatch(self.queue, state, batch, now_s, (seqs, context), layers / batch.num_layers, flying_s)
        if self.partition:
            kv_full = bool(state.queue.requests) and self.queue.kv_full(state, now_s, [])
            ttft_margin_s = state.prefill_published.ttft_margin_s
            ttft_met = ttft_margin_s is None or ttft_margin_s >= 0
            found = self._reduce_decode(state, step, limit_s) if tpot_margin_s >= 0 and not kv_full else None
            if found is not None:
                index, reason = found, REDUCE_DECODE
            else:
                index, reason = self._choose(state, now_s, ttft_met, tpot_margin_s >= 0, kv_full, step, limit_s, ttft)
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

    def _reduce_decode(self, state: SystemState, step: StepForecast, limit_s: float) -> int | None:
        """ReduceDecodeSM: the smallest d, not above the present one, that keeps P90(tpot) within its SLO."""
        if self.fixed is not None:
            return None
        present = self._present_decode(state)
        return step.first_within(limit_s if limit_s < self.cap_s else self.cap_s, self.floor,
                                 present if present < self.full else self.full - 1)

    def _choose(self, state: SystemState, now_s: float, ttft_met: bool, tpot_met: bool, kv_full: bool, step: StepForecast,
                limit_s: float, ttft: TtftForecast) -> tuple[int, str]:
        """Index of the split and the branch that chose it, where ReduceDecodeSM found none."""
        if self.fixed is not None:
            return self.fixed, "fixed"
        if kv_full:
            return self._free_kv(ttft, state, step), "kv-full"
        if tpot_met:
            present = self._present_decode(state)
            if self.floor <= present < self.full:
                return present, "keep"
        elif ttft_met:
            # ReducePrefillSM: the largest p that meets both; if none, the smallest p that keeps TTFT.
            in_time = ttft.met(self.floor, self.full)
            both = (step.all()[self.floor : self.full] <= min(limit_s, self.cap_s)) & in_time
            first = int(both.argmax())
            if both[first]:
                return self.floor + first, "reduce-prefill"
            keeps = np.flatnonzero(in_time)
            if len(keeps):
                return self.floor + int(keeps[-1]), "reduce-prefill"
        return self._set_balanced(state, now_s, step, limit_s, ttft), "balanced"

    def _set_balanced(self, state: SystemState, now_s: float, step: StepForecast, limit_s: float, ttft: TtftForecast) -> int:
        """SetBalancedSM: minimise max(P90(ttft) / SLO, P90(tpot) / SLO) over the splits, ties to the larger p.

        As d rises the first rises and the second falls, so the best split is where they cross: the smallest d at which
        TTFT is the worse of the two, or its neighbour.
        """
        # The cap on the next step holds here too where any split can meet it: P90 says nothing of one long step.
        capped = step.first_within(self.tpot_slo_s, self.floor, self.full - 1) if self.cap_next_step else None
        first = self.floor if capped is None else capped
        # P90(tpot) meets its SLO up to the limit, and what a step takes beyond that is shared by two tokens or more.
        most = 1 + max(0.0, step.at(first) - limit_s) / self.tpot_slo_s
        if ttft.exceeds(most * (1 + 1e-9), first):  # as in deep overload
            return first
        tpot_ratio = self.tpot.ratio(state, now_s)

        def tpot(index: int) -> float:
            return tpot_ratio(step.at(index))

        def ttft_decides(index: int) -> bool:
            return ttft.reaches(tpot(index), index)

        if ttft_decides(first):
            return first
        crossing = first + bisect_left(range(first, self.full - 1), True, key=ttft_decides)
        left = crossing - 1
        if tpot(crossing) < tpot(left) and not ttft.reaches(tpot(left), crossing):
            return crossing
        # Left of the crossing decode decides, and more SMs may not help it at all: the largest p of equals.
        return first + bisect_left(range(first, left), True, key=lambda i: step.at(i) <= step.at(left))

    def _free_kv(self, ttft: TtftForecast, state: SystemState, step: StepForecast) -> int:
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
        if mode == "batch" or kv_full:
            return not waiting or kv_full
        for request in waiting:
            left_s += self.estimator.prefill_line((state.kv.fresh(request),), None)(index)
            if left_s >= step_s:
                return False
        return True

    def _present_decode(self, state: SystemState) -> int:
        """Index of the present split for the search; a d of 0 or N counts as N."""
        return self._index_of.get(state.target.decode_sms, self.full)


class BulletLiteral(Bullet):
    """The letter of the text: no cap on the next step, late requests first, hand-over where no batch can follow."""

    defaults = OPTIONS | {"cap_next_step": False, "late_first": True, "hand_over": "batch"}


class BulletPartition(Bullet):
    """Fig. 23's partition without the scheduler: splits by Algorithm 1, prompts in order of arrival, decode never waits."""

    name = "bullet-partition"
    defaults = OPTIONS | {"order": "fcfs", "delayed_decode": False}


class BulletScheduler(Bullet):
    """Fig. 23's scheduler without the partition: the sorted queue and delayed decode, both lanes on all SMs."""

    name = "bullet-scheduler"
    defaults = OPTIONS | {"partition": False}
