"""The real driver: one policy, one engine, wall-clock time.

At a boundary (a launch ended, a request arrived, a wait is over): finish what ended, let arrivals in, ask the policy for
each idle lane that has work, launch. The simulated driver has a loop of the same shape; the two are kept apart on
purpose: there time is computed, here it passes.

==========  ==========================================================================================
machine     how a launch spends its time
==========  ==========================================================================================
GPU         queued on the lane's stream at once; both lanes run; timed by the launch's own pair of events
one CPU     lanes *take turns*, first launched first: nothing overlaps. A step is in flight from its launch to
            its end, its turn's wait included, as on any time-shared processor
==========  ==========================================================================================

One host thread decides for both lanes, so what one lane publishes the other sees at its next decision: no delay. Clock
and sleep are arguments. No torch here: the engine is whatever has :class:`EngineFace`. The GPU side is not yet run on one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bullet.catalog.models import get_model
from bullet.config import RunConfig
from bullet.errors import ConfigError
from bullet.policies import is_custom
from bullet.policies.base import Policy
from bullet.results.bookkeeping import INFINITY, STEP_ERRORS, Bookkeeping, Recorder
from bullet.results.columns import RunOutcome
from bullet.results.sink import RowSink
from bullet.signals import stopped
from bullet.state import (
    DECODE,
    HYBRID,
    PREFILL,
    Chunk,
    Decision,
    DecodeStep,
    HybridStep,
    KvCache,
    PrefillStep,
    Request,
    SplitTable,
    Step,
    SystemState,
    Wait,
)
from bullet.workload import Workload

POLL_S = 20e-6
"""Pause asked for between two looks at a GPU's events; the system's timer adds its own (some 50 us on Linux)."""
NAP_S = 0.05
"""Longest sleep, so that Ctrl-C is heard."""


class LaunchFace(Protocol):
    """Work queued on a lane; :class:`bullet.engine.engine.Launch`."""

    def done(self) -> bool: ...

    def finish(self) -> Mapping[int, int]: ...

    def elapsed_s(self) -> float | None: ...


class EngineFace(Protocol):
    """What the driver asks of :class:`bullet.engine.engine.Engine`."""

    max_tokens: int

    def add(self, request_id: int, prompt: Sequence[int]) -> None: ...

    def preempt(self, request_id: int) -> None: ...

    def remove(self, request_id: int) -> list[int]: ...

    def start_prefill(self, chunks: Sequence[Chunk], lane: Any, decode_ids: Sequence[int] = (), *,
                      by_chunk: bool = False) -> Any: ...

    def run_layers(self, run: Any, layers: int, lane: Any) -> LaunchFace: ...

    def decode(self, ids: Sequence[int], lane: Any) -> LaunchFace: ...


@dataclass
class Machine:
    """An engine and where its lanes run. ``lane``: (name, SMs) -> what the engine launches on; ``turns``: lanes share one
    processor; ``name``: the hardware, as every file says it; ``partition``: what is known of the SM partition."""

    engine: EngineFace
    splits: SplitTable
    kv_blocks: int
    lane: Callable[[str, int], Any]
    name: str
    partition: str
    turns: bool
    free_blocks: Callable[[], int] | None = None
    """The engine's own count, compared with the state's in debug runs."""


@dataclass
class Flight:
    """One step in flight; ``launch`` is None while it waits for its turn, ``go`` makes it."""

    step: Step
    start_s: float
    go: Callable[[], LaunchFace]
    row: tuple[int, ...]
    launch: LaunchFace | None = None
    corun_s: float = 0.0
    corun_sms: int = 0
    busy_s: float | None = None


@dataclass
class HostTimes:
    """Seconds that the host spent, one entry an event: the rows of the paper's Table 5."""

    prediction: list[float] = field(default_factory=list)
    reconfiguration: list[float] = field(default_factory=list)
    hand_over: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Counts, and mean, std, P90 and P99 in microseconds; null where nothing was timed."""
        out: dict[str, Any] = {}
        for name, values in vars(self).items():
            micro = np.array(values) * 1e6
            figures = [None] * 4
            if values:
                figures = [float(micro.mean()), float(micro.std()), *np.percentile(micro, (90, 99)).tolist()]
            out[name] = {"count": len(values), **dict(zip(("mean_us", "std_us", "p90_us", "p99_us"), figures, strict=True))}
        return out


class Replay(Bookkeeping):
    """One run. ``prompts``: request id -> its tokens. Rows go to ``sink`` as they come, as the simulator's do."""

    source = "measured"

    def __init__(self, config: RunConfig, workload: Workload, machine: Machine, policy: Policy, sink: RowSink,
                 prompts: Callable[[int], Sequence[int]], *, clock: Callable[[], float] = time.perf_counter,
                 sleep: Callable[[float], None] = time.sleep, stop: Callable[[bool], bool] = lambda busy: False,
                 progress: Callable[[int], None] | None = None, record: Recorder | None = None) -> None:
        super().__init__(config, workload, policy, machine.splits, KvCache(machine.kv_blocks),
                         get_model(config.device.model).num_layers, sink, machine.engine.max_tokens, progress, record)
        self.machine, self.engine = machine, machine.engine
        self.prompt_of, self.clock, self.sleep, self.stop = prompts, clock, sleep, stop
        self.flights: dict[str, Flight] = {}
        self.turn: list[Flight] = []  # launched, and waiting for the one processor
        self.prefill_run: Any = None
        self.wait_until_s = dict.fromkeys(self.names, INFINITY)
        self.last_sms = dict.fromkeys(self.names, 0)
        self.begun_s = 0.0
        self.host = HostTimes()
        self.sm_seconds = dict.fromkeys(("prefill_only", "decode_only", "hybrid", "shared", "idle"), 0.0)
        self.accounted_s = self.arrivals[0] if self.arrivals else 0.0
        self.busy_s: dict[str, float] = dict.fromkeys(self.names, 0.0)

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Until every request is finished or rejected. Time 0 is the call; arrivals count from there."""
        self.begun_s = self.clock()
        while self.closed < len(self.arrivals):
            if self.stop(bool(self.flights)):
                raise stopped()
            now = self._now()
            if self._changed(now):
                self._boundary(now)
            if self.closed < len(self.arrivals):
                self._spend()

    def _now(self) -> float:
        now = self.clock() - self.begun_s
        assert now >= self.now_s, f"I6: time went back from {self.now_s} to {now}"
        self.now_s = now
        return now

    def _changed(self, now: float) -> bool:
        return (any(f.launch is not None and f.launch.done() for f in self.flights.values())
                or self.next_arrival_s <= now or any(until <= now for until in self.wait_until_s.values()))

    def _boundary(self, now: float) -> None:
        self._account(now)
        for name in self.names:
            flight = self.flights.get(name)
            if flight is not None and flight.launch is not None and flight.launch.done():
                self._finish(name, flight, now)
        self.arrived(now, self._let_in)
        for name in self.names:
            if name not in self.flights and self._has_work(name):
                step = self._decide(name, now)
                if step is not None:
                    self._launch(name, step, now)
        if self.config.debug:
            self.state.check()
            free = self.machine.free_blocks
            # On one processor a launch takes its blocks when its turn comes; until then the books differ.
            assert free is None or self.turn or free() == self.state.kv.free_blocks, (
                f"I4: the engine has {free()} blocks free, the state {self.state.kv.free_blocks}")

    def _has_work(self, name: str) -> bool:
        state = self.state
        if name == PREFILL:
            return state.prefill is not None or bool(state.queue.requests)
        if name == DECODE:
            return bool(state.decode.size or state.ready)
        return bool(state.decode.size or state.queue.requests or state.chunked)

    def _spend(self) -> None:
        """Let time pass: the next turn on one processor, or a pause."""
        if self.turn:
            flight = self.turn.pop(0)
            started = self.clock()
            flight.launch = flight.go()
            flight.busy_s = self.clock() - started
            return
        if self.flights:
            if not any(f.launch is not None and f.launch.done() for f in self.flights.values()):
                self.sleep(POLL_S)
            return
        at = min(self.next_arrival_s, *self.wait_until_s.values())
        if not at < INFINITY:
            raise self.nothing_can_happen()
        left = at - (self.clock() - self.begun_s)
        if left > 0:
            self.sleep(min(left, NAP_S))

    # ---- arrivals --------------------------------------------------------------------------------

    def _let_in(self, request: Request) -> None:
        self.engine.add(request.id, self.prompt_of(request.id))
        self._note("arrive", (request.id, self.now_s))
        self.state.arrive(request)

    # ---- deciding --------------------------------------------------------------------------------

    def _decide(self, lane: str, now: float) -> Step | None:
        state = self.state
        started = self.clock()
        decision: Decision = self.policy.next_step(lane, state, now)
        self.host.prediction.append(self.clock() - started)
        self.decisions += 1
        self._note("next_step", (lane, state, now, decision))
        self.wait_until_s[lane] = INFINITY
        if self.two_lanes:
            if decision.target is not None:
                self.split_changes += decision.target != state.target
            publish(state, lane, decision)
        step_type = {PREFILL: PrefillStep, DECODE: DecodeStep, HYBRID: HybridStep}[lane]
        if isinstance(decision, step_type):
            return decision
        if not isinstance(decision, Wait):
            raise self.wrong_answer(lane, now, decision, step_type)
        if decision.until_s is not None:
            if decision.until_s <= now:
                raise self.already_past(lane, decision.until_s)
            self.wait_until_s[lane] = decision.until_s
        self.waited(lane, not self.flights)
        return None

    # ---- launching -------------------------------------------------------------------------------

    def _launch(self, lane: str, step: Step, now: float) -> None:
        if not is_custom(self.config.policy.name):
            self._begin(lane, step, now)
            return
        try:  # a user's policy: what its step breaks is its mistake, told in one line
            self._begin(lane, step, now)
        except STEP_ERRORS as exc:
            raise self.cannot_carry_out(step, now, exc) from exc

    def _begin(self, lane: str, step: Step, now: float) -> None:
        state = self.state
        if not 0 < step.sms <= self.num_sms:
            raise self.no_such_sms(step.sms)
        where = self._lane(lane, step.sms)
        for victim in step.preempt:
            self.preemptions_since_token += 1
            self.engine.preempt(victim)
        self.check_preemptions()
        queue_length = len(state.queue.requests)
        self._note("begin", (lane, now))
        tokens = seqs = context = first_layer = 0
        layers = state.num_layers
        if isinstance(step, DecodeStep):
            state.begin_decode(step, now)
            ids = list(state.decode.requests)
            seqs, context = state.decode.size, state.decode.context_tokens
            go: Callable[[], LaunchFace] = lambda: self.engine.decode(ids, where)  # noqa: E731
        elif isinstance(step, PrefillStep):
            state.begin_prefill(step, now)
            batch = state.prefill
            assert batch is not None
            tokens, first_layer, layers = batch.total_tokens, batch.layers_done, step.layers
            chunks = [Chunk(r.id, t, 0) for r, t in zip(batch.requests, batch.tokens, strict=True)] if step.admit else []
            go = lambda: self._prefill(chunks, layers, where)  # noqa: E731
        else:
            if step.overlap != "none":
                raise ConfigError(f"policy {self.config.policy.name!r}: overlap = {step.overlap!r}: the engine runs a hybrid "
                                  "batch as one (none)")
            state.begin_hybrid(step, now)
            tokens = sum(c.new_tokens for c in step.chunks)
            ids = list(state.decode.requests) if step.decode else []
            if step.decode:
                seqs, context = state.decode.size, state.decode.context_tokens
            go = lambda: self._hybrid(step, ids, where)  # noqa: E731
        self.waits_since_launch = 0
        target = step.target or state.target
        flight = Flight(step, now, go, (tokens, seqs, context, first_layer, layers, queue_length,
                                        state.kv.total_blocks - state.kv.free_blocks, *target))
        for other in self.flights.values():
            flight.corun_sms = other.step.sms
            other.corun_sms = other.corun_sms or step.sms
        self.flights[lane] = flight
        if self.machine.turns:
            self.turn.append(flight)
        else:
            flight.launch = go()

    def _prefill(self, chunks: Sequence[Chunk], layers: int, where: Any) -> LaunchFace:
        if chunks:
            self.prefill_run = self.engine.start_prefill(chunks, where)
        return self.engine.run_layers(self.prefill_run, layers, where)

    def _hybrid(self, step: HybridStep, ids: Sequence[int], where: Any) -> LaunchFace:
        if not step.chunks:
            return self.engine.decode(ids, where)
        run = self.engine.start_prefill(step.chunks, where, ids, by_chunk=step.by_chunk)
        return self.engine.run_layers(run, self.state.num_layers, where)

    def _lane(self, name: str, sms: int) -> Any:
        """Where the lane runs now. A change of SMs is a change of stream: the reconfiguration of Table 5."""
        if sms == self.last_sms[name]:
            return self.machine.lane(name, sms)
        started = self.clock()
        where = self.machine.lane(name, sms)
        if self.last_sms[name]:
            self.host.reconfiguration.append(self.clock() - started)
        self.last_sms[name] = sms
        return where

    # ---- finishing -------------------------------------------------------------------------------

    def _finish(self, lane: str, flight: Flight, now: float) -> None:
        """The launch ended: sequences and state move on together, then the policy hears how long it took."""
        assert flight.launch is not None
        flight.launch.finish()
        del self.flights[lane]
        started = self.clock() if lane == PREFILL else 0.0
        served, ended = finish_lane(self.state, lane, flight.step, now, self._is_last)
        if lane == PREFILL and served:
            # No KV moves: the next decode launch reads the blocks that prefill wrote. This is all there is to it.
            self.host.hand_over.append(self.clock() - started)
            self.prefill_run = None
        for request in served:
            self.emit(request, now)
        self._note("finish", (lane, now, tuple(r.id for r in ended)))
        for request in ended:
            made = self.engine.remove(request.id)
            assert len(made) == request.generated, f"I2: the engine made {len(made)} tokens, {request}"
            self.finished(request, now)
        on_device = flight.launch.elapsed_s()
        self.busy_s[lane] += on_device if on_device is not None else flight.busy_s or 0.0
        self.step_ended(flight, lane, now, now - flight.start_s if on_device is None else on_device)

    def _is_last(self, request: Request, generated: int) -> bool:
        return generated >= self.outputs[request.id]

    # ---- accounts --------------------------------------------------------------------------------

    def _account(self, now: float) -> None:
        """Book the SM-seconds since the last boundary (I5); on one processor these are of the SMs asked for."""
        span = now - self.accounted_s
        if span <= 0:
            return
        self.accounted_s = now
        n, booked = self.num_sms, self.sm_seconds
        sms = {lane: flight.step.sms for lane, flight in self.flights.items()}
        if HYBRID in sms:
            booked["hybrid"] += sms[HYBRID] * span
            booked["idle"] += (n - sms[HYBRID]) * span
            return
        p, d = sms.get(PREFILL, 0), sms.get(DECODE, 0)
        shared = max(0, p + d - n)
        booked["shared"] += shared * span
        booked["prefill_only"] += (p - shared) * span
        booked["decode_only"] += (d - shared) * span
        booked["idle"] += (n - p - d + shared) * span
        if len(self.flights) == 2:
            for flight in self.flights.values():
                flight.corun_s += span

    def _note(self, kind: str, what: tuple[Any, ...]) -> None:
        if self.record is not None:
            self.record(kind, what)

    def outcome(self) -> RunOutcome:
        """What happened, as the simulator says it; ``source`` is measured."""
        return self.made_outcome(
            self.sink.tables(), gpu=self.machine.name, device_source=self.machine.partition, sm_seconds=dict(self.sm_seconds),
            span_s=max(0.0, self.accounted_s - self.arrivals[0]) if self.arrivals else 0.0,
            decision_wall_s=sum(self.host.prediction))

    def timing(self, wall_s: float) -> dict[str, Any]:
        """``timing.json``: Table 5's rows in host microseconds, and how long each lane was at work."""
        return {"wall_s": wall_s, "decisions": self.decisions, "device": self.machine.name,
                "partition": self.machine.partition, "host": self.host.summary(), "busy_s": dict(self.busy_s)}


def publish(state: SystemState, lane: str, decision: Decision) -> None:
    """Store what a decision tells the other lane: it sees it at its next decision."""
    if decision.target is not None:
        state.target = decision.target
    if decision.published is not None:
        if lane == PREFILL:
            state.prefill_published = decision.published
        else:
            state.decode_published = decision.published


def finish_lane(state: SystemState, lane: str, step: Step, now_s: float,
                is_last: Callable[[Request, int], bool]) -> tuple[list[Request], list[Request]]:
    """A launch ended: the state's part. ``is_last(request, generated)``: whether the token that it has now is its last.

    Returns the requests that have a token more, and those among them that ended.
    """
    decode = state.decode
    complete: Sequence[Request] = ()
    if lane != DECODE:
        complete = state.finish_prefill(now_s) if lane == PREFILL else state.finish_hybrid(now_s)
    served: list[Request] = []
    if lane == DECODE or (isinstance(step, HybridStep) and step.decode):
        served = list(decode.requests.values())
    ended = [r for r in served if is_last(r, decode.generated(r) + 1)]
    if lane == DECODE:
        state.finish_decode(ended)
    elif served:
        state.end_hybrid_decode(ended)
    for request in complete:
        served.append(request)
        if is_last(request, request.generated):
            state.release(request)
            ended.append(request)
        elif lane == HYBRID:
            state.join_decode(request)
    return served, ended
