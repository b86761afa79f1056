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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bullet.catalog.models import get_model
from bullet.config import RunConfig
from bullet.errors import ConfigError, NoProgressError
from bullet.policies import is_custom
from bullet.policies.base import Policy, check_decision
from bullet.results.columns import RequestTable, RunOutcome, StepTable
from bullet.state import (
    DECODE,
    HYBRID,
    PREFILL,
    Chunk,
    Decision,
    DecodeStep,
    HybridStep,
    KvCache,
    Partition,
    Phase,
    PrefillStep,
    Request,
    SplitTable,
    Step,
    SystemState,
    Wait,
)
from bullet.workload import Workload

INFINITY = float("inf")
STALL = 20_000
"""Preemptions without one new token, or waits with nothing running and nothing to arrive, after which a run is stuck."""
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

    def start_prefill(self, chunks: Sequence[Chunk], lane: Any, decode_ids: Sequence[int] = ()) -> Any: ...

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


Recorder = Callable[[str, tuple[Any, ...]], None]
"""Called in order with what :mod:`bullet.runtime.record` needs to run the same decisions again."""


class Replay:
    """One run. ``prompts``: request id -> its tokens. Rows go to ``sink`` as they come, as the simulator's do."""

    def __init__(self, config: RunConfig, workload: Workload, machine: Machine, policy: Policy, sink: Any,
                 prompts: Callable[[int], Sequence[int]], *, clock: Callable[[], float] = time.perf_counter,
                 sleep: Callable[[float], None] = time.sleep, stop: Callable[[], bool] = lambda: False,
                 progress: Callable[[int], None] | None = None, record: Recorder | None = None) -> None:
        names = tuple(policy.lanes)
        if names not in ((PREFILL, DECODE), (HYBRID,)):
            raise ConfigError(f"policy {config.policy.name!r}: lanes = {names}: must be ('prefill', 'decode') or "
                              "('hybrid',)")
        slo = config.slo
        assert slo.ttft_s_per_token is not None
        assert slo.mean_prompt_tokens is not None
        self.config, self.machine, self.engine, self.policy, self.sink = config, machine, machine.engine, policy, sink
        self.prompts, self.clock, self.sleep, self.stop = prompts, clock, sleep, stop
        self.progress, self.record = progress, record
        n = machine.splits.num_sms
        self.names = names
        layers = get_model(config.device.model).num_layers
        self.state = SystemState(machine.splits, KvCache(machine.kv_blocks), layers, Partition(n, n))
        self.arrivals: list[float] = workload.arrival_s.tolist()
        self.prompt_tokens: list[int] = workload.prompt_tokens.tolist()
        self.outputs: list[int] = workload.output_tokens.tolist()
        self.slo_per_token_s, self.mean_slo_s = slo.ttft_s_per_token, slo.ttft_s_per_token * slo.mean_prompt_tokens
        self.policy_reads_mean = slo.ttft_slo_policy == "mean_length"

        self.flights: dict[str, Flight] = {}
        self.turn: list[Flight] = []  # launched, and waiting for the one processor
        self.prefill_run: Any = None
        self.wait_until_s = dict.fromkeys(names, INFINITY)
        self.last_sms = dict.fromkeys(names, 0)
        self.begun_s = 0.0
        self.now_s = 0.0
        self.next_arrival = 0
        self.closed = self.decisions = self.steps_ended = self.split_changes = 0
        self.preemptions_since_token = self.waits_since_launch = 0
        self.emitted_s: dict[int, float] = {}
        self.itl_s: list[float] = []
        self.host = HostTimes()
        self.sm_seconds = dict.fromkeys(("prefill_only", "decode_only", "hybrid", "shared", "idle"), 0.0)
        self.accounted_s = self.arrivals[0] if self.arrivals else 0.0
        self.busy_s: dict[str, float] = dict.fromkeys(names, 0.0)

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Until every request is finished or rejected. Time 0 is the call; arrivals count from there."""
        self.begun_s = self.clock()
        while self.closed < len(self.arrivals):
            if self.stop():
                raise KeyboardInterrupt
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
                or self._next_arrival_s() <= now or any(until <= now for until in self.wait_until_s.values()))

    def _next_arrival_s(self) -> float:
        return self.arrivals[self.next_arrival] if self.next_arrival < len(self.arrivals) else INFINITY

    def _boundary(self, now: float) -> None:
        self._account(now)
        for name in self.names:
            flight = self.flights.get(name)
            if flight is not None and flight.launch is not None and flight.launch.done():
                self._finish(name, flight, now)
        self._arrivals(now)
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
        at = min(self._next_arrival_s(), *self.wait_until_s.values())
        if not at < INFINITY:
            raise NoProgressError(self._stuck("no step runs, no request is to arrive, and the policy waits for nothing"))
        left = at - (self.clock() - self.begun_s)
        if left > 0:
            self.sleep(min(left, NAP_S))

    # ---- arrivals --------------------------------------------------------------------------------

    def _arrivals(self, now: float) -> None:
        kv = self.state.kv
        while self._next_arrival_s() <= now:
            i = self.next_arrival
            prompt, output = self.prompt_tokens[i], self.outputs[i]
            request = Request(i, self.arrivals[i], prompt,
                              self.mean_slo_s if self.policy_reads_mean else self.slo_per_token_s * prompt)
            self.next_arrival += 1
            if prompt + output > self.engine.max_tokens:
                self._reject(request, "over_context")
            elif kv.blocks_for(prompt + output - 1) > kv.total_blocks:
                self._reject(request, "over_kv_capacity")
            else:
                self.engine.add(i, self.prompts(i))
                self._note("arrive", (i, now))
                self.state.arrive(request)

    def _reject(self, request: Request, reason: str) -> None:
        request.phase = Phase.REJECTED
        self._close(request, "rejected", reason, None)

    # ---- deciding --------------------------------------------------------------------------------

    def _decide(self, lane: str, now: float) -> Step | None:
        state = self.state
        started = self.clock()
        decision: Decision = self.policy.next_step(lane, state, now)
        self.host.prediction.append(self.clock() - started)
        if is_custom(self.config.policy.name):
            check_decision(self.config.policy.name, lane, now, decision, state.splits.num_sms)
        self.decisions += 1
        self._note("next_step", (lane, state, now, decision))
        self.wait_until_s[lane] = INFINITY
        if len(self.names) == 2:
            if decision.target is not None:
                self.split_changes += decision.target != state.target
            publish(state, lane, decision)
        if isinstance(decision, {PREFILL: PrefillStep, DECODE: DecodeStep, HYBRID: HybridStep}[lane]):
            return decision
        if not isinstance(decision, Wait):
            raise ConfigError(f"policy {self.config.policy.name!r}: at t = {now:.6f} s {lane} was answered {decision!r}: "
                              "must be a step of that lane or a Wait")
        if decision.until_s is not None:
            if decision.until_s <= now:
                raise NoProgressError(self._stuck(f"{lane} asked to wait until {decision.until_s}, already past"))
            self.wait_until_s[lane] = decision.until_s
        self.waits_since_launch += 1
        if self.waits_since_launch > STALL and not self.flights and self.next_arrival == len(self.arrivals):
            raise NoProgressError(self._stuck(f"{lane} waited {STALL} times while nothing ran or arrived"))
        return None

    # ---- launching -------------------------------------------------------------------------------

    def _launch(self, lane: str, step: Step, now: float) -> None:
        if not is_custom(self.config.policy.name):
            self._begin(lane, step, now)
            return
        try:  # a user's policy: what its step breaks is its mistake, told in one line
            self._begin(lane, step, now)
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError, StopIteration) as exc:
            raise ConfigError(f"policy {self.config.policy.name!r}: at t = {now:.6f} s its {step!r} cannot be carried out: "
                              f"{type(exc).__name__}: {exc}") from exc

    def _begin(self, lane: str, step: Step, now: float) -> None:
        state = self.state
        if not 0 < step.sms <= state.splits.num_sms:
            raise NoProgressError(f"policy {self.config.policy.name!r} asked for {step.sms} SMs: the device has 1 to "
                                  f"{state.splits.num_sms}")
        where = self._lane(lane, step.sms)
        for victim in step.preempt:
            self.preemptions_since_token += 1
            self.engine.preempt(victim)
        if self.preemptions_since_token > STALL:
            raise NoProgressError(self._stuck(f"{STALL} preemptions without one new token"))
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
            go = lambda: self._hybrid(step.chunks, ids, where)  # noqa: E731
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

    def _hybrid(self, chunks: Sequence[Chunk], ids: Sequence[int], where: Any) -> LaunchFace:
        if not chunks:
            return self.engine.decode(ids, where)
        return self.engine.run_layers(self.engine.start_prefill(chunks, where, ids), self.state.num_layers, where)

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
        state, step = self.state, flight.step
        ended: list[Request] = []
        if lane == PREFILL:
            assert isinstance(step, PrefillStep)
            started = self.clock()
            ready = state.finish_prefill(now)
            if ready:
                # No KV moves: the next decode launch reads the blocks that prefill wrote. This is all there is to it.
                self.host.hand_over.append(self.clock() - started)
                self.prefill_run = None
            for request in ready:
                self._emit(request.id, now)
                if self._is_last(request, request.generated):
                    state.release(request)
                    ended.append(request)
        elif lane == DECODE:
            ended = self._iteration(now)
            state.finish_decode(ended)
        else:
            assert isinstance(step, HybridStep)
            complete = state.finish_hybrid(now)
            if step.decode and state.decode.size:
                ended = self._iteration(now)
                state.end_hybrid_decode(ended)
            for request in complete:
                self._emit(request.id, now)
                if self._is_last(request, request.generated):
                    state.release(request)
                    ended.append(request)
                else:
                    state.join_decode(request)
        self._note("finish", (lane, now, tuple(r.id for r in ended)))
        for request in ended:
            assert request.generated == self.outputs[request.id], f"I2: {request} of {self.outputs[request.id]}"
            made = self.engine.remove(request.id)
            assert len(made) == request.generated, f"I2: the engine made {len(made)} tokens, {request}"
            self.emitted_s.pop(request.id)
            self._close(request, "finished", "", now)
        on_device = flight.launch.elapsed_s()
        elapsed = now - flight.start_s if on_device is None else on_device
        self.busy_s[lane] += on_device if on_device is not None else flight.busy_s or 0.0
        self._note("observe", (step, elapsed))
        self.policy.observe(step, elapsed)
        tokens, seqs, context, first_layer, layers, queue, kv_used, target_p, target_d = flight.row
        self.sink.step((self.steps_ended, lane, lane, flight.start_s, now, step.sms, tokens, seqs, context, first_layer, layers,
                        step.predicted_s, elapsed, flight.corun_s, flight.corun_sms, queue, kv_used, target_p, target_d,
                        step.reason))
        self.steps_ended += 1

    def _iteration(self, now: float) -> list[Request]:
        """A token for every decoding request; returns those for which it was the last."""
        decode = self.state.decode
        for request_id in decode.requests:
            self._emit(request_id, now)
        return [r for r in decode.requests.values() if self._is_last(r, decode.generated(r) + 1)]

    def _is_last(self, request: Request, generated: int) -> bool:
        return generated >= self.outputs[request.id]

    def _emit(self, request_id: int, now: float) -> None:
        before = self.emitted_s.get(request_id)
        if before is not None:
            self.itl_s.append(now - before)
        self.emitted_s[request_id] = now
        self.preemptions_since_token = 0

    def _close(self, request: Request, status: str, reason: str, finish_s: float | None) -> None:
        self.closed += 1
        self._request_row(request, status, reason, finish_s, request.generated)
        if self.progress is not None:
            self.progress(1)

    def _request_row(self, request: Request, status: str, reason: str, finish_s: float | None, generated: int) -> None:
        self.sink.request((request.id, request.arrival_s, request.prompt_tokens, self.outputs[request.id], status, reason,
                           request.admitted_s, request.first_token_s, finish_s, generated, request.preemptions,
                           self.slo_per_token_s * request.prompt_tokens, self.mean_slo_s))

    def close_unfinished(self) -> None:
        """Rows of the requests that an interrupted run leaves behind, those yet to arrive included."""
        state = self.state
        left: list[Request] = [*state.queue, *state.ready, *state.chunked]
        if state.prefill is not None:
            left.extend(state.prefill.requests)
        for request in left:
            self._request_row(request, "unfinished", "", None, request.generated)
        for request in state.decode.requests.values():
            self._request_row(request, "unfinished", "", None, state.decode.generated(request))
        for i in range(self.next_arrival, len(self.arrivals)):
            self._request_row(Request(i, self.arrivals[i], self.prompt_tokens[i], self.mean_slo_s), "unfinished",
                              "not yet arrived", None, 0)

    # ---- accounts --------------------------------------------------------------------------------

    def _account(self, now: float) -> None:
        """Book the SM-seconds since the last boundary (I5); on one processor these are of the SMs asked for."""
        span = now - self.accounted_s
        if span <= 0:
            return
        self.accounted_s = now
        n, booked = self.state.splits.num_sms, self.sm_seconds
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

    def _stuck(self, why: str) -> str:
        state = self.state
        return (f"policy {self.config.policy.name!r} makes no progress at t = {self.now_s:.3f} s: {why}; {self.closed} of "
                f"{len(self.arrivals)} requests closed, {len(state.queue)} waiting, {len(state.chunked)} in chunks, "
                f"{len(state.ready)} ready, {state.decode.size} decoding, KV {state.kv.free_blocks} of "
                f"{state.kv.total_blocks} blocks free")

    def outcome(self, steps: StepTable, requests: RequestTable, workload: Workload) -> RunOutcome:
        """What happened, as the simulator says it; ``source`` is measured."""
        config = self.config
        assert config.slo.tpot_s is not None
        return RunOutcome(
            config=config, system=config.policy.name, steps=steps, requests=requests, itl_s=np.array(self.itl_s),
            itl_counts=np.ones(len(self.itl_s), dtype=np.int64), sm_seconds=dict(self.sm_seconds),
            span_s=max(0.0, self.accounted_s - self.arrivals[0]) if self.arrivals else 0.0,
            num_sms=self.state.splits.num_sms, kv_blocks=self.state.kv.total_blocks, split_changes=self.split_changes,
            decisions=self.decisions, decision_wall_s=sum(self.host.prediction), tpot_slo_s=config.slo.tpot_s,
            device={"gpu": self.machine.name, "model": config.device.model, "source": self.machine.partition,
                    "workload": workload.source, "kv_peak_blocks": self.state.kv.peak_blocks},
            source="measured")

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


def finish_lane(state: SystemState, lane: str, step: Step, now_s: float, ended: Iterable[int]) -> None:
    """The state's part of ``Replay._finish``, given who ended: what a record is replayed with."""
    last = set(ended)
    if lane == PREFILL:
        for request in state.finish_prefill(now_s):
            if request.id in last:
                state.release(request)
        return
    if lane == DECODE:
        state.finish_decode([state.decode.requests[i] for i in ended])
        return
    assert isinstance(step, HybridStep)
    complete = state.finish_hybrid(now_s)
    done = {r.id for r in complete}
    if step.decode and state.decode.size:
        state.end_hybrid_decode([state.decode.requests[i] for i in ended if i not in done])
    for request in complete:
        if request.id in last:
            state.release(request)
        else:
            state.join_decode(request)
