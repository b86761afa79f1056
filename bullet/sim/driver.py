"""The simulated driver: one policy, one modelled device, simpy time.

At a boundary (a step ends, a request arrives while a lane is idle, a wait is over): finish what ended, let arrivals
in, ask the policy for each idle lane that has work, launch, settle the device, sleep until the next boundary. One
simpy event is pending at any time; steps that a policy calls steady are repeated without one. The real runtime has a
loop of the same shape; the two are kept apart on purpose.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import simpy
from simpy.events import NORMAL

from bullet.catalog.models import get_model
from bullet.config import RunConfig
from bullet.devices.base import Device, StepWork
from bullet.errors import ConfigError, NoProgressError, PartitionError
from bullet.policies import is_custom
from bullet.policies.base import Policy, check_decision
from bullet.results.columns import RequestTable, StepTable
from bullet.sim.gpu import Flight, HybridFlight, SimulatedGpu
from bullet.state import (
    DECODE,
    HYBRID,
    PREFILL,
    Decision,
    DecodeStep,
    HybridStep,
    KvCache,
    Partition,
    Phase,
    PrefillStep,
    Published,
    Request,
    SplitTable,
    SystemState,
    Wait,
)
from bullet.workload import Workload

INFINITY = float("inf")
STALL_DECISIONS = 20_000
"""Decisions at one instant, preemptions without one new token, or waits with nothing running and nothing to arrive,
after which a run counts as stuck."""
PENDING_KEPT = 1024
"""Decisions that a lane leaves unseen before it looks without having to decide."""
INSTANT_S = 1e-6
"""Decisions closer than this are at one instant: no step is as short, but a policy that waits may let time creep."""


class RowSink(Protocol):
    """Takes rows as they come, in the column order of bullet.results."""

    def step(self, row: tuple[Any, ...]) -> None:
        """A step ended."""

    def request(self, row: tuple[Any, ...]) -> None:
        """A request finished, was rejected, or was left unfinished at the end."""


PACK_STEPS = 4096
"""Steps that a run without a folder gathers before it packs them into columns: they are still in the processor's cache."""


class ListSink:
    """Rows in memory, for runs without a folder."""

    def __init__(self) -> None:
        self.cells: list[Any] = []  # of steps, one row after the other
        self.packed: list[StepTable] = []
        self.requests: list[Any] = []
        self.step = self.cells.extend
        self.request = self.requests.extend

    def pack(self) -> None:
        """Called every ``PACK_STEPS`` steps."""
        self.packed.append(StepTable.from_cells(self.cells))
        self.cells.clear()

    def tables(self) -> tuple[StepTable, RequestTable]:
        """All rows."""
        self.pack()
        return StepTable.concatenate(self.packed), RequestTable.from_cells(self.requests)


Recorder = Callable[[str, tuple[Any, ...]], None]
"""Called with ("next_step", (lane, state, now_s, decision)) and ("observe", (step, elapsed_s)), in order."""


class _Lane:
    """One lane: what it may launch, and the target and published estimates as it sees them.

    Its own decisions it sees at once, the other lane's after a delay. The last writer wins, by the decision's number: two
    lanes may decide at one instant, yet one of them was last.
    """

    __slots__ = ("last_sms", "name", "noise", "other", "own", "pending", "seen", "step_type", "target", "wait_until_s",
                 "written")

    def __init__(self, name: str, target: Partition, noise: _Noise | None) -> None:
        self.name = name
        self.step_type = {PREFILL: PrefillStep, DECODE: DecodeStep, HYBRID: HybridStep}[name]
        self.noise = noise
        self.other = self  # of two, the other one
        self.last_sms = 0
        self.wait_until_s = INFINITY
        self.target = target
        self.written = 0
        self.own = self.seen = Published()  # what it published itself, and what it has seen of the other
        #: What the other lane decided: when it can be seen, the decision's number, what it published, its target.
        self.pending: deque[tuple[float, int, Published | None, Partition | None]] = deque()

    def look(self, now_s: float) -> None:
        """See what the other lane has decided by now."""
        pending = self.pending
        while pending and pending[0][0] <= now_s:
            _, number, published, target = pending.popleft()
            if target is not None and number > self.written:
                self.target, self.written = target, number
            if published is not None:
                self.seen = published


class _Noise:
    """Log-normal factors, keyed by lane and step index: drawn in order from the lane's own stream."""

    def __init__(self, std: float, seed: int, lane: str) -> None:
        self.std = std
        self.rng = np.random.default_rng(np.random.SeedSequence([seed, 0, crc32(f"noise:{lane}".encode())]))
        self.drawn: list[float] = []

    def next(self) -> float:
        if not self.drawn:
            self.drawn.extend(np.exp(self.std * self.rng.standard_normal(1024))[::-1].tolist())
        return self.drawn.pop()


class Simulation:
    """One run. ``run`` executes it to the end; rows go to ``sink`` as they come."""

    def __init__(self, config: RunConfig, workload: Workload, device: Device, policy: Policy, splits: SplitTable,
                 kv_blocks: int, sink: RowSink, *, progress: Callable[[int], None] | None = None,
                 record: Recorder | None = None) -> None:
        assert config.slo.ttft_s_per_token is not None
        assert config.slo.mean_prompt_tokens is not None
        self.config = config
        self.policy = policy
        self.device = device
        self.sink = sink
        self._pack = sink.pack if isinstance(sink, ListSink) else None
        self._write_step, self._observe = sink.step, policy.observe  # bound once: they are called at every step
        self.progress = progress
        self.record = record
        self.context_tokens = get_model(config.device.model).context_tokens
        self.gpu = SimulatedGpu(device)
        num_sms = splits.num_sms
        self.state = SystemState(splits, KvCache(kv_blocks), device.model.num_layers, Partition(num_sms, num_sms))
        names = tuple(policy.lanes)
        if names not in ((PREFILL, DECODE), (HYBRID,)):
            raise ConfigError(f"policy {config.policy.name!r}: lanes = {names}: must be ('prefill', 'decode') or "
                              "('hybrid',)")
        std = config.device.noise_std
        self.lanes = [_Lane(name, self.state.target, _Noise(std, config.seed, name) if std else None) for name in names]
        self.two_lanes = len(names) == 2
        if self.two_lanes:
            self.lanes[0].other, self.lanes[1].other = self.lanes[1], self.lanes[0]
        # Plain lists: indexing them is several times faster than indexing arrays.
        self.arrivals: list[float] = workload.arrival_s.tolist()
        self.next_arrival_s = self.arrivals[0] if self.arrivals else INFINITY
        self.prompts: list[int] = workload.prompt_tokens.tolist()
        self.outputs: list[int] = workload.output_tokens.tolist()
        rate = config.slo.ttft_s_per_token
        self.mean_slo_s = rate * config.slo.mean_prompt_tokens
        self.slo_per_token_s = rate
        self.policy_reads_mean = config.slo.ttft_slo_policy == "mean_length"

        self.env = simpy.Environment()
        self._tick = simpy.Event(self.env)
        self._tick._ok, self._tick._value = True, None
        self.now_s = 0.0
        self.next_arrival = 0
        self.delay_s = config.device.publish_delay_s
        self.reconfigure_s = config.device.reconfigure_s
        self.custom = is_custom(config.policy.name)
        self.debug = config.debug
        self.legal_sms = {int(sms) for sms in (*splits.prefill_sms, *splits.decode_sms)}
        self._boundary = self._boundary_of_two if self.two_lanes else self._boundary_of_one
        self._callbacks: list[Callable[[simpy.Event], None]] = [self._boundary]
        self._begin = self._begin_two if self.two_lanes else self._begin_one
        self._launch = self._launch_guarded if self.custom else self._begin
        self._ask = self._ask_guarded if self.custom else policy.next_step
        self.split_changes = 0
        self.steps_ended = 0
        self.closed = 0  # finished or rejected
        self.decisions = 0
        self.decision_wall_s = 0.0
        self.works: dict[int, StepWork] = {}  # of the present prefill batch, by layers; negative: with the LM head
        # Requests by the decode iteration that gives them their last token: O(1) a step, whatever the batch.
        self.finish_at: dict[int, list[Request]] = {}
        self.emitted_s: dict[int, float] = {}
        self.merged: list[Request] = []
        self.last_iteration_s = 0.0
        self.itl_s = array("d")
        self.itl_counts = array("q")
        self.queue_integral_s = 0.0
        self.queue_since_s = 0.0
        self.wait_sum_s = 0.0
        self.stalled = 0
        self.stalled_at = -1.0
        self.preemptions_since_token = 0
        self.waits_since_launch = 0

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every request is finished or rejected; :class:`NoProgressError` if nothing can happen."""
        self._schedule(self.next_arrival_s)
        self.env.run()

    def _schedule(self, at_s: float) -> None:
        env = self.env
        delay_s = at_s - env._now  # the property costs as much as the subtraction
        if delay_s == INFINITY:
            if self.closed < len(self.arrivals):
                raise NoProgressError(
                    self._stuck("no step runs, no request is to arrive, and the policy waits for nothing"))
            return
        assert at_s >= self.now_s, f"I6: time would go back from {self.now_s} to {at_s}"
        # simpy's clock only orders events; `next_s` is exact, where now + (next - now) may be an ulp off.
        self.next_s = at_s
        event = self._tick  # the one pending event, used again and again
        event.callbacks = self._callbacks
        env.schedule(event, NORMAL, delay_s if delay_s > 0.0 else 0.0)

    def _boundary_of_two(self, _event: simpy.Event) -> None:
        now = self.now_s = self.next_s
        gpu, state = self.gpu, self.state
        flight = gpu.prefill
        if flight is not None and flight.end_s <= now:
            gpu.prefill = None
            if gpu.decode is not None:
                gpu.part(flight, gpu.decode, now)
            for request in state.finish_prefill(now):
                self._emit_first(request, now)
                if request.generated >= self.outputs[request.id]:
                    state.release(request)
                    self._close_finished(request, now)
            self._ended(flight, PREFILL, now)
        flight = gpu.decode
        if flight is not None and flight.end_s <= now:
            gpu.decode = None
            if gpu.prefill is not None:
                gpu.part(flight, gpu.prefill, now)
            finished = self.finish_at.pop(state.decode.iteration + 1, ())
            self._emit_iteration(now)
            state.finish_decode(finished)
            for request in finished:
                self._close_finished(request, now)
            self._ended(flight, DECODE, now)
        if self.next_arrival_s <= now:
            self._arrivals(now)
        prefill, decode = self.lanes
        if gpu.prefill is None and (state.prefill is not None or state.queue.requests):
            if prefill.pending:
                prefill.look(now)
            state.target, state.prefill_published, state.decode_published = prefill.target, prefill.own, prefill.seen
            step = self._decide(prefill, now)
            if step is not None:
                self._launch(prefill, step, now)
        if gpu.decode is None and (state.decode.size or state.ready):
            if decode.pending:
                decode.look(now)
            state.target, state.prefill_published, state.decode_published = decode.target, decode.seen, decode.own
            step = self._decide(decode, now)
            if step is not None:
                self._launch(decode, step, now)
        at = gpu.settle(now)
        if gpu.prefill is None or gpu.decode is None:  # who is idle waits for these too
            if self.next_arrival_s < at:
                at = self.next_arrival_s
            if prefill.wait_until_s < at:
                at = prefill.wait_until_s
            if decode.wait_until_s < at:
                at = decode.wait_until_s
        if self.debug:
            state.check()
        self._schedule(at)

    def _boundary_of_one(self, _event: simpy.Event) -> None:
        now = self.now_s = self.next_s
        gpu, state = self.gpu, self.state
        flight = gpu.hybrid
        if flight is not None:  # nobody wakes a busy device
            gpu.hybrid = None
            step: Any = flight.step
            self._finish_hybrid(step, now)
            self._ended(flight, HYBRID, now)
            if step.steady and self.record is None and not self.custom:  # a user's policy may count on being asked
                now = self.now_s = self._repeat(step, now)
        if self.next_arrival_s <= now:
            self._arrivals(now)
        lane = self.lanes[0]
        if state.decode.size or state.queue.requests or state.chunked:
            step = self._decide(lane, now)
            if step is not None:
                self._launch(lane, step, now)
        flight = gpu.hybrid
        if self.debug:
            state.check()
        self._schedule(flight.end_s if flight is not None else min(self.next_arrival_s, lane.wait_until_s))

    # ---- arrivals --------------------------------------------------------------------------------

    def _arrivals(self, now: float) -> None:
        """Let in all that arrived since the last boundary; refuse by name what can never be served."""
        kv, i = self.state.kv, self.next_arrival
        while i < len(self.arrivals) and self.arrivals[i] <= now:
            prompt, output, arrival = self.prompts[i], self.outputs[i], self.arrivals[i]
            slo = self.mean_slo_s if self.policy_reads_mean else self.slo_per_token_s * prompt
            request = Request(i, arrival, prompt, slo)
            if prompt + output > self.context_tokens:
                self._reject(request, "over_context")
            elif kv.blocks_for(prompt + output - 1) > kv.total_blocks:
                self._reject(request, "over_kv_capacity")
            else:
                self._integrate_queue(arrival)
                self.state.arrive(request)
            i += 1
        self.next_arrival = i
        self.next_arrival_s = self.arrivals[i] if i < len(self.arrivals) else INFINITY

    def _reject(self, request: Request, reason: str) -> None:
        request.phase = Phase.REJECTED
        self._close(request, "rejected", reason, None, 0)

    def _integrate_queue(self, now: float) -> None:
        self.queue_integral_s += len(self.state.queue.requests) * (now - self.queue_since_s)
        self.queue_since_s = now

    # ---- deciding --------------------------------------------------------------------------------

    def _decide(self, lane: _Lane, now: float) -> Any:
        """Ask the policy, and publish its answer: a step, or ``None``: it waits."""
        started = perf_counter()
        decision: Any = self._ask(lane.name, self.state, now)
        self.decision_wall_s += perf_counter() - started
        self.decisions = number = self.decisions + 1
        if self.record is not None:
            self.record("next_step", (lane.name, self.state, now, decision))
        if now - self.stalled_at < INSTANT_S or self.preemptions_since_token > STALL_DECISIONS:
            self._guard(now)
        else:
            self.stalled_at = now
            self.stalled = 0
        lane.wait_until_s = INFINITY
        launches = type(decision) is lane.step_type
        if not launches and not isinstance(decision, Wait):
            raise ConfigError(f"policy {self.config.policy.name!r}: at t = {now:.6f} s {lane.name} was answered {decision!r}: "
                              f"must be a {lane.step_type.__name__} or a Wait")
        if self.two_lanes:
            published, target = decision.published, decision.target
            if target is not None:
                if target != lane.target:
                    self.split_changes += 1
                    lane.target = target
                lane.written = number
            if published is not None:
                lane.own = published
            pending = lane.other.pending
            pending.append((now + self.delay_s, number, published, target))
            if len(pending) > PENDING_KEPT:  # the other lane has had nothing to decide for long
                lane.other.look(now)
        if launches:
            return decision
        if decision.until_s is not None:
            if decision.until_s <= now:
                raise NoProgressError(self._stuck(f"{lane.name} asked to wait until {decision.until_s}, already past"))
            lane.wait_until_s = decision.until_s
            self._guard_waits(lane.name)
        return None

    def _ask_guarded(self, lane: str, state: SystemState, now: float) -> Decision:
        """For a user's policy: its answer is looked at."""
        decision = self.policy.next_step(lane, state, now)
        check_decision(self.config.policy.name, lane, now, decision, self.gpu.num_sms)
        return decision

    def _launch_guarded(self, lane: _Lane, step: PrefillStep | DecodeStep | HybridStep, now: float) -> None:
        """For a user's policy: what its step breaks is its mistake, told in one line."""
        n, legal = self.gpu.num_sms, self.legal_sms
        if 0 < step.sms < n and step.sms not in legal:
            raise PartitionError(f"policy {self.config.policy.name!r} asked for {step.sms} SMs: the device has {n}, and a "
                                 f"partition {min(legal)} to {max(legal)} in steps of {min(legal)}")
        try:
            self._begin(lane, step, now)
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError, StopIteration) as exc:
            raise ConfigError(f"policy {self.config.policy.name!r}: at t = {now:.6f} s its {step!r} cannot be carried out: "
                              f"{type(exc).__name__}: {exc}") from exc

    def _no_such_sms(self, sms: int) -> NoProgressError:
        return NoProgressError(f"policy {self.config.policy.name!r} asked for {sms} SMs: the device has 1 to "
                               f"{self.gpu.num_sms}")

    def _make_room(self, victims: tuple[int, ...], now: float) -> None:
        self._integrate_queue(now)
        for victim in victims:
            self._forget(victim)

    def _extra_s(self, lane: _Lane, sms: int) -> float:
        """What it costs to come to these SMs from the lane's last."""
        last, lane.last_sms = lane.last_sms, sms
        return self.reconfigure_s if last and last != sms else 0.0

    def _begin_two(self, lane: _Lane, step: PrefillStep | DecodeStep | HybridStep, now: float) -> None:
        state, gpu, kv = self.state, self.gpu, self.state.kv
        sms = step.sms
        if not 0 < sms <= gpu.num_sms:
            raise self._no_such_sms(sms)
        if step.preempt:
            self._make_room(step.preempt, now)
        queue_length = len(state.queue.requests)
        extra_s = 0.0 if sms == lane.last_sms else self._extra_s(lane, sms)
        factor = 1.0 if lane.noise is None else lane.noise.next()
        self.waits_since_launch = 0
        target_p, target_d = step.target or state.target
        if isinstance(step, DecodeStep):
            self.merged = state.begin_decode(step, now)
            for request in self.merged:
                self._expect_end(request)
            seqs, context = state.decode.size, state.decode.context_tokens
            gpu.decode = Flight(step, self.device.decode_work(seqs, context), now, extra_s, factor,
                                (0, seqs, context, 0, state.num_layers, queue_length, kv.total_blocks - kv.free_blocks,
                                 target_p, target_d))
            return
        assert isinstance(step, PrefillStep)
        work = self._begin_prefill(step, now)
        batch = state.prefill
        assert batch is not None
        gpu.prefill = Flight(step, work, now, extra_s, factor,
                             (batch.total_tokens, 0, 0, batch.layers_done, step.layers, queue_length,
                              kv.total_blocks - kv.free_blocks, target_p, target_d))

    def _begin_one(self, lane: _Lane, step: Any, now: float) -> None:
        state, gpu, kv = self.state, self.gpu, self.state.kv
        sms = step.sms
        if not 0 < sms <= gpu.num_sms:
            raise self._no_such_sms(sms)
        if step.preempt:
            self._make_room(step.preempt, now)
        queue_length = len(state.queue.requests)
        if step.chunks:
            self._integrate_queue(now)
        requests = state.begin_hybrid(step, now)
        seqs = context = 0
        if step.decode:
            seqs, context = state.decode.size, state.decode.context_tokens
        if requests:
            work, tokens = self._hybrid_work(requests, step, seqs, context, now)
            seconds = self.device.solo_seconds(work, sms)
        else:
            tokens = 0
            seconds = self.device.decode_seconds(seqs, context, sms)
        if lane.noise is not None:
            seconds *= lane.noise.next()
        if sms != lane.last_sms:
            seconds += self._extra_s(lane, sms)
        self.waits_since_launch = 0
        target_p, target_d = step.target or state.target
        gpu.hybrid = HybridFlight(
            step, now, now + seconds,
            (tokens, seqs, context, 0, state.num_layers, queue_length, kv.total_blocks - kv.free_blocks, target_p, target_d))

    def _repeat(self, step: Any, now: float) -> float:
        """Repeat a steady step for as long as it holds, without asking or sleeping between; returns when the last one ended."""
        state, sms, noise = self.state, step.sms, self.lanes[0].noise
        decode, kv = state.decode, state.kv
        assert not step.chunks, f"{step}: a steady step has decodes alone"
        assert not step.preempt, f"{step}: a steady step preempts nobody"
        queue_length = len(state.queue.requests)
        target_p, target_d = step.target or state.target
        while decode.size and self.next_arrival_s > now and decode.growth_blocks <= kv.free_blocks:
            kv.take(decode.growth_blocks)
            seqs, context, kv_used = decode.size, decode.context_tokens, kv.total_blocks - kv.free_blocks
            seconds = self.device.decode_seconds(seqs, context, sms)
            if noise is not None:
                seconds *= noise.next()
            end = now + seconds
            self._end_iteration(end)
            elapsed = end - now
            self._observe(step, elapsed)
            self._step_row((self.steps_ended, HYBRID, HYBRID, now, end, sms, 0, seqs, context, 0, state.num_layers,
                            step.predicted_s, elapsed, 0.0, 0, queue_length, kv_used, target_p, target_d, step.reason))
            now = end
            if self.debug:
                state.check()
        return now

    def _hybrid_work(self, requests: list[Request], step: HybridStep, seqs: int, context: int,
                     now: float) -> tuple[StepWork, int]:
        """The work of a batch with chunks, and their tokens."""
        pieces = [(new, past) for _, new, past in step.chunks]
        tokens, logits = 0, seqs
        for i, request in enumerate(requests):
            new, past = pieces[i]
            if past == 0:
                self.wait_sum_s += now - request.queued_s
            if new + past == request.prompt_tokens + request.generated:
                logits += 1
            tokens += new
        return self.device.hybrid_work(pieces, seqs, context, logits_seqs=logits), tokens

    def _begin_prefill(self, step: PrefillStep, now: float) -> StepWork:
        state = self.state
        if step.admit:
            self._integrate_queue(now)
        state.begin_prefill(step, now)
        batch = state.prefill
        assert batch is not None
        if step.admit:
            self.wait_sum_s += sum(now - request.queued_s for request in batch.requests)
            self.works = {}
        last = step.layers == batch.layers_left
        key = -step.layers if last else step.layers
        work = self.works.get(key)
        if work is None:
            work = self.works[key] = self.device.prefill_work([(t, 0) for t in batch.tokens], step.layers,
                                                              logits_seqs=len(batch.tokens) if last else 0)
        return work

    # ---- finishing -------------------------------------------------------------------------------

    def _ended(self, flight: Flight | HybridFlight, lane: str, now: float) -> None:
        """Tell the policy how long a step took, and write its row."""
        step, start = flight.step, flight.start_s
        elapsed = now - start
        if self.record is not None:
            self.record("observe", (step, elapsed))
        self._observe(step, elapsed)
        (prefill_tokens, seqs, context, first_layer, layers, queue, kv_used, target_p, target_d) = flight.row
        self._step_row((self.steps_ended, lane, lane, start, now, flight.sms, prefill_tokens, seqs, context, first_layer,
                        layers, step.predicted_s, elapsed, flight.corun_s, flight.corun_sms, queue, kv_used, target_p,
                        target_d, step.reason))

    def _step_row(self, row: tuple[Any, ...]) -> None:
        self._write_step(row)
        self.steps_ended = number = self.steps_ended + 1
        if self._pack is not None and number % PACK_STEPS == 0:
            self._pack()

    def _finish_hybrid(self, step: Any, now: float) -> None:
        state = self.state
        complete = state.finish_hybrid(now)
        if step.decode and state.decode.size:
            self._end_iteration(now)
        for request in complete:
            self._emit_first(request, now)
            if request.generated >= self.outputs[request.id]:
                state.release(request)
                self._close_finished(request, now)
            else:
                state.join_decode(request)
                self._expect_end(request)
                self.merged.append(request)

    def _end_iteration(self, now: float) -> None:
        """Every decode has a token more."""
        finished = self.finish_at.pop(self.state.decode.iteration + 1, ())
        self._emit_iteration(now)
        self.state.end_hybrid_decode(finished)
        for request in finished:
            self._close_finished(request, now)

    def _expect_end(self, request: Request) -> None:
        """File a request that just joined the decode batch under the iteration that ends it."""
        end = request.join_iteration + self.outputs[request.id] - request.generated
        self.finish_at.setdefault(end, []).append(request)

    def _forget(self, victim: int) -> None:
        """A request is about to be preempted: it ends at another iteration than was filed."""
        self.preemptions_since_token += 1
        request = self.state.decode.requests.get(victim)
        if request is None:
            return
        end = request.join_iteration + self.outputs[request.id] - request.generated
        self.finish_at[end].remove(request)
        if self.state.decode.iteration > request.join_iteration:
            self.emitted_s[request.id] = self.last_iteration_s
        elif request in self.merged:
            self.merged.remove(request)

    def _emit_iteration(self, now: float) -> None:
        """Gaps between tokens: one value for all that were in the iteration before, one for each newcomer."""
        merged = self.merged
        staying = self.state.decode.size - len(merged)
        if staying:
            self.itl_s.append(now - self.last_iteration_s)
            self.itl_counts.append(staying)
        if merged:
            for request in merged:
                self.itl_s.append(now - self.emitted_s[request.id])
                self.itl_counts.append(1)
            self.merged = []
        self.last_iteration_s = now
        self.preemptions_since_token = 0

    def _emit_first(self, request: Request, now: float) -> None:
        before = self.emitted_s.get(request.id)
        if before is not None:  # recomputed after a preemption: the gap spans it
            self.itl_s.append(now - before)
            self.itl_counts.append(1)
        self.emitted_s[request.id] = now
        self.preemptions_since_token = 0

    def _close_finished(self, request: Request, now: float) -> None:
        assert request.generated == self.outputs[request.id], f"I2: {request} of {self.outputs[request.id]}"
        self.emitted_s.pop(request.id, None)
        self._close(request, "finished", "", now, request.generated)

    def _close(self, request: Request, status: str, reason: str, finish_s: float | None, generated: int) -> None:
        self.closed += 1
        self._request_row(request, status, reason, finish_s, generated)
        if self.progress is not None:
            self.progress(1)

    def _request_row(self, request: Request, status: str, reason: str, finish_s: float | None, generated: int) -> None:
        self.sink.request((request.id, request.arrival_s, request.prompt_tokens, self.outputs[request.id], status, reason,
                           request.admitted_s, request.first_token_s, finish_s, generated, request.preemptions,
                           self.slo_per_token_s * request.prompt_tokens, self.mean_slo_s))

    def close_unfinished(self) -> None:
        """Rows of the requests that an interrupted run leaves behind, those yet to arrive included."""
        state = self.state
        left = [*state.queue, *state.ready, *state.chunked, *state.decode.requests.values()]
        if state.prefill is not None:
            left.extend(state.prefill.requests)
        for request in left:
            inside = request.id in state.decode.requests
            self._request_row(request, "unfinished", "", None,
                              state.decode.generated(request) if inside else request.generated)
        for i in range(self.next_arrival, len(self.arrivals)):
            self._request_row(Request(i, self.arrivals[i], self.prompts[i], self.mean_slo_s), "unfinished",
                              "not yet arrived", None, 0)

    # ---- guards ----------------------------------------------------------------------------------

    def _guard(self, now: float) -> None:
        """Called when time stands still between decisions, or preemptions outrun tokens."""
        self.stalled += 1
        if self.stalled > STALL_DECISIONS:
            raise NoProgressError(self._stuck(f"{STALL_DECISIONS} decisions at one instant"))
        if self.preemptions_since_token > STALL_DECISIONS:
            raise NoProgressError(self._stuck(f"{STALL_DECISIONS} preemptions without one new token"))

    def _guard_waits(self, lane: str) -> None:
        """A policy that waits, and then waits again, with nobody else to change anything, would do so for ever."""
        self.waits_since_launch += 1
        idle = self.gpu.prefill is None and self.gpu.decode is None and self.gpu.hybrid is None
        if (self.waits_since_launch > STALL_DECISIONS and idle
                and self.next_arrival == len(self.arrivals)):
            raise NoProgressError(self._stuck(f"{lane} waited {STALL_DECISIONS} times while nothing ran or arrived"))

    def _stuck(self, why: str) -> str:
        state = self.state
        head = state.queue[0] if len(state.queue) else None
        return (f"policy {self.config.policy.name!r} makes no progress at t = {self.now_s:.3f} s: {why}; "
                f"{self.closed} of {len(self.arrivals)} requests closed, {len(state.queue)} waiting (head: {head}), "
                f"{len(state.chunked)} in chunks, prefill batch: "
                f"{None if state.prefill is None else [r.id for r in state.prefill.requests]}, {len(state.ready)} ready, "
                f"{state.decode.size} decoding, KV {state.kv.free_blocks} of {state.kv.total_blocks} blocks free")
