"""The simulated driver: one policy, one modelled device, simulated time.

At a boundary (a step ends, a request arrives while a lane is idle, a wait is over): finish what ended, let arrivals
in, ask the policy for each idle lane that has work, launch, settle the device, go on at the next boundary. One instant
is ahead at any time, so that there is no queue of events; steps that a policy calls steady are repeated without a boundary.
The real runtime has a loop of the same shape; the two are kept apart on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

from bullet.catalog.models import described
from bullet.config import RunConfig
from bullet.devices.base import Device, StepWork
from bullet.devices.load import host_label, served_model
from bullet.errors import PartitionError
from bullet.policies import is_custom
from bullet.policies.base import Policy
from bullet.results.bookkeeping import INFINITY, STALL_DECISIONS, STEP_ERRORS, Bookkeeping, Recorder
from bullet.results.columns import RunOutcome
from bullet.results.sink import RowSink
from bullet.sim.gpu import Flight, HybridFlight, SimulatedGpu
from bullet.sim.lane import Lane, Noise
from bullet.state import (
    DECODE,
    HYBRID,
    PREFILL,
    DecodeStep,
    HybridStep,
    KvCache,
    PrefillStep,
    Request,
    SplitTable,
    Wait,
)
from bullet.workload import Workload

PENDING_KEPT = 1024
"""Decisions that a lane leaves unseen before it looks without having to decide."""
INSTANT_S = 1e-6
"""Decisions closer than this are at one instant: no step is as short, but a policy that waits may let time creep."""


class Simulation(Bookkeeping):
    """One run. ``run`` executes it to the end; rows go to ``sink`` as they come."""

    def __init__(self, config: RunConfig, workload: Workload, device: Device, policy: Policy, splits: SplitTable,
                 kv: KvCache, sink: RowSink, *, progress: Callable[[int], None] | None = None,
                 record: Recorder | None = None) -> None:
        super().__init__(config, workload, policy, splits, kv, device.model.num_layers, sink,
                         served_model(config.device).context_tokens, progress, record)
        self.device = device
        self.gpu = SimulatedGpu(device)
        self._decode_work = self._decode_work_within if device.asks_within else device.decode_work
        self._decode_seconds = self._decode_seconds_within if device.asks_within else device.decode_seconds
        std = config.device.noise_std
        self.lanes = [Lane(name, self.state.target, Noise(std, config.seed, name) if std else None)
                      for name in self.names]
        if self.two_lanes:
            self.lanes[0].other, self.lanes[1].other = self.lanes[1], self.lanes[0]
        self.delay_s = config.device.publish_delay_s
        self.reconfigure_s = config.device.reconfigure_s
        # Of each launch; of a whole iteration or batch, its launch included; of all of a prefill's layers, without.
        self.launch_s = launch_s = config.device.host_launch_s + config.device.device_launch_s
        self.host_step_s = config.device.host_step_s + launch_s
        self.host_prefill_s = config.device.host_step_s + config.device.host_prefill_step_s
        self.host_prompt_step_s = self.host_prefill_s + launch_s
        self.custom = is_custom(config.policy.name)
        self.debug = config.debug
        self.legal_sms = {int(sms) for sms in (*splits.prefill_sms, *splits.decode_sms)}
        self._boundary = self._boundary_of_two if self.two_lanes else self._boundary_of_one
        self._launch = self._launch_guarded if self.custom else self._begin
        self._ask = policy.next_step
        self.decision_wall_s = 0.0
        self.works: dict[int, StepWork] = {}  # of the present prefill batch, by layers; negative: with the LM head
        # Requests by the decode iteration that gives them their last token: O(1) a step, whatever the batch.
        self.finish_at: dict[int, list[Request]] = {}
        self.merged: list[Request] = []
        self.last_iteration_s = 0.0
        self.queue_integral_s = 0.0
        self.queue_since_s = 0.0
        self.wait_sum_s = 0.0
        self.stalled = 0
        self.stalled_at = -1.0

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every request is finished or rejected; :class:`NoProgressError` if nothing can happen."""
        boundary, at_s = self._boundary, self.next_arrival_s
        while at_s != INFINITY:
            assert at_s >= self.now_s, f"I6: time would go back from {self.now_s} to {at_s}"
            self.now_s = at_s
            at_s = boundary(at_s)
        if self.closed < len(self.arrivals):
            raise self.nothing_can_happen()

    def _boundary_of_two(self, now: float) -> float:
        """What is due ``now``; returns when the next boundary is."""
        gpu, state = self.gpu, self.state
        flight = gpu.prefill
        if flight is not None and flight.end_s <= now:
            gpu.prefill = None
            if gpu.decode is not None:
                gpu.part(flight, gpu.decode, now)
            complete = state.finish_prefill(now)
            if complete:
                self._prefilled(complete, now)
            self.step_ended(flight, PREFILL, now, now - flight.start_s)
        flight = gpu.decode
        if flight is not None and flight.end_s <= now:
            gpu.decode = None
            if gpu.prefill is not None:
                gpu.part(flight, gpu.prefill, now)
            finished = self.finish_at.pop(state.decode.iteration + 1, ())
            self._emit_iteration(now)
            state.finish_decode(finished)
            for request in finished:
                self.finished(request, now)
            self.step_ended(flight, DECODE, now, now - flight.start_s)
        if self.next_arrival_s <= now:
            self.arrived(now, self._let_in)
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
        return at

    def _boundary_of_one(self, now: float) -> float:
        gpu, state = self.gpu, self.state
        flight = gpu.hybrid
        if flight is not None:  # nobody wakes a busy device
            gpu.hybrid = None
            step: Any = flight.step
            self._finish_hybrid(step, now)
            self.step_ended(flight, HYBRID, now, now - flight.start_s)
            if step.steady and self.record is None and not self.custom:  # a user's policy may count on being asked
                now = self.now_s = self._repeat(step, now)
        if self.next_arrival_s <= now:
            self.arrived(now, self._let_in)
        lane = self.lanes[0]
        if state.decode.size or state.queue.requests or state.chunked:
            step = self._decide(lane, now)
            if step is not None:
                self._launch(lane, step, now)
        flight = gpu.hybrid
        if self.debug:
            state.check()
        return flight.end_s if flight is not None else min(self.next_arrival_s, lane.wait_until_s)

    # ---- arrivals --------------------------------------------------------------------------------

    def _let_in(self, request: Request) -> None:
        """A request that arrived since the last boundary."""
        self._integrate_queue(request.queued_s)
        self.state.arrive(request)

    def _integrate_queue(self, now: float) -> None:
        self.queue_integral_s += len(self.state.queue.requests) * (now - self.queue_since_s)
        self.queue_since_s = now

    # ---- deciding --------------------------------------------------------------------------------

    def _decide(self, lane: Lane, now: float) -> Any:
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
            raise self.wrong_answer(lane.name, now, decision, lane.step_type)
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
                raise self.already_past(lane.name, decision.until_s)
            lane.wait_until_s = decision.until_s
            gpu = self.gpu
            self.waited(lane.name, gpu.prefill is None and gpu.decode is None and gpu.hybrid is None)
        return None

    def _launch_guarded(self, lane: Lane, step: PrefillStep | DecodeStep | HybridStep, now: float) -> None:
        """For a user's policy: what its step breaks is its mistake, told in one line."""
        n, legal = self.gpu.num_sms, self.legal_sms
        if 0 < step.sms < n and step.sms not in legal:
            raise PartitionError(f"{self.owner} asked for {step.sms} SMs: the device has {n}, and a "
                                 f"partition {min(legal)} to {max(legal)} in steps of {min(legal)}")
        try:
            self._begin(lane, step, now)
        except STEP_ERRORS as exc:
            raise self.cannot_carry_out(step, now, exc) from exc

    def _make_room(self, victims: tuple[int, ...], now: float) -> None:
        self._integrate_queue(now)
        for victim in victims:
            self._forget(victim)

    def _extra_s(self, lane: Lane, sms: int) -> float:
        """What it costs to come to these SMs from the lane's last."""
        last, lane.last_sms = lane.last_sms, sms
        return self.reconfigure_s if last and last != sms else 0.0

    def _begin(self, lane: Lane, step: Any, now: float) -> None:
        state, gpu, kv, kind = self.state, self.gpu, self.state.kv, lane.step_type
        sms = step.sms
        if not 0 < sms <= gpu.num_sms:
            raise self.no_such_sms(sms)
        if step.preempt:
            self._make_room(step.preempt, now)
        queue_length = len(state.queue.requests)
        extra_s = self.host_step_s
        if sms != lane.last_sms:
            extra_s += self._extra_s(lane, sms)
        factor = 1.0 if lane.noise is None else lane.noise.next()
        self.waits_since_launch = 0
        target_p, target_d = step.target or state.target
        if kind is DecodeStep:
            self.merged = state.begin_decode(step, now)
            for request in self.merged:
                self._expect_end(request)
            seqs, context = state.decode.size, state.decode.context_tokens
            gpu.decode = Flight(step, self._decode_work(seqs, context), now, extra_s, factor,
                                (0, seqs, context, 0, state.num_layers, queue_length, kv.total_blocks - kv.free_blocks,
                                 target_p, target_d))
            return
        if kind is PrefillStep:
            work = self._begin_prefill(step, now)
            batch = state.prefill
            assert batch is not None
            extra_s += self.launch_s + self.host_prefill_s * step.layers / batch.num_layers - self.host_step_s
            gpu.prefill = Flight(step, work, now, extra_s, factor,
                                 (batch.total_tokens, 0, 0, batch.layers_done, step.layers, queue_length,
                                  kv.total_blocks - kv.free_blocks, target_p, target_d))
            return
        if step.chunks:
            self._integrate_queue(now)
        requests = state.begin_hybrid(step, now)
        tokens = seqs = context = 0
        if step.decode:
            seqs, context = state.decode.size, state.decode.context_tokens
        if requests:
            work, tokens = self._hybrid_work(requests, step, seqs, context, now)
            seconds = self.device.solo_seconds(work, sms)
            extra_s += self.host_prompt_step_s - self.host_step_s
        else:
            seconds = self._decode_seconds(seqs, context, sms)
        gpu.hybrid = HybridFlight(
            step, now, now + (seconds * factor + extra_s),
            (tokens, seqs, context, 0, state.num_layers, queue_length, kv.total_blocks - kv.free_blocks, target_p, target_d))

    def _repeat(self, step: Any, now: float) -> float:
        """Repeat a steady step for as long as it holds, without asking or sleeping between; returns when the last one ended."""
        state, sms, noise, host_step_s = self.state, step.sms, self.lanes[0].noise, self.host_step_s
        decode, kv = state.decode, state.kv
        assert not step.chunks, f"{step}: a steady step has decodes alone"
        assert not step.preempt, f"{step}: a steady step preempts nobody"
        queue_length = len(state.queue.requests)
        target_p, target_d = step.target or state.target
        residues, block_tokens, finish_at = decode.residues, decode.block_tokens, self.finish_at
        next_arrival_s = self.next_arrival_s
        while True:
            seqs, growth = decode.size, residues[decode.iteration % block_tokens]
            if not seqs or next_arrival_s <= now or growth > kv.free_blocks:
                return now
            if growth:
                kv.take(growth)
            context, kv_used = decode.context_tokens, kv.total_blocks - kv.free_blocks
            seconds = self._decode_seconds(seqs, context, sms)
            if noise is not None:
                seconds *= noise.next()
            end = now + (seconds + host_step_s)
            if self.merged or decode.iteration + 1 in finish_at:
                self._end_iteration(end)
                next_arrival_s = self.next_arrival_s  # of a closed loop: whoever ended may send again
            else:  # what _end_iteration does where nobody joined or ends
                self.itl_s.append(end - self.last_iteration_s)
                self.itl_counts.append(seqs)
                self.last_iteration_s = end
                self.preemptions_since_token = 0
                decode.advance()
            elapsed = end - now
            self._observe(step, elapsed)
            self.step_row((self.steps_ended, HYBRID, HYBRID, now, end, sms, 0, seqs, context, 0, state.num_layers,
                           step.predicted_s, elapsed, 0.0, 0, queue_length, kv_used, target_p, target_d, step.reason))
            now = end
            if self.debug:
                state.check()

    def _hybrid_work(self, requests: list[Request], step: HybridStep, seqs: int, context: int,
                     now: float) -> tuple[StepWork, int]:
        """The work of a batch with chunks, and their tokens."""
        pieces = [(new, past) for _, new, past in step.chunks]
        tokens, logits = 0, seqs
        for request in self.state.admitted:
            self.wait_sum_s += now - request.queued_s
        for i, request in enumerate(requests):
            new, past = pieces[i]
            if new + past == request.prompt_tokens + request.generated:
                logits += 1
            tokens += new
        device: Any = self.device
        if device.asks_within:
            return device.hybrid_work(pieces, seqs, context, logits_seqs=logits, within_tokens=self._within(seqs)), tokens
        return device.hybrid_work(pieces, seqs, context, logits_seqs=logits), tokens

    def _within(self, seqs: int) -> int:
        """Tokens within the decodes' windows; none where a batch has no decodes."""
        decode: Any = self.state.decode
        return decode.within_tokens if seqs else 0

    def _decode_work_within(self, seqs: int, context: int) -> StepWork:
        return self.device.decode_work(seqs, context, **{"within_tokens": self._within(seqs)})

    def _decode_seconds_within(self, seqs: int, context: int, sms: int) -> float:
        return self.device.solo_seconds(self._decode_work_within(seqs, context), sms)

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
            work = self.works[key] = self.device.prefill_work([*zip(batch.tokens, batch.past, strict=True)], step.layers,
                                                              logits_seqs=len(batch.tokens) if last else 0)
        return work

    # ---- finishing -------------------------------------------------------------------------------

    def _finish_hybrid(self, step: Any, now: float) -> None:
        complete = self.state.finish_hybrid(now)
        if step.decode and self.state.decode.size:
            self._end_iteration(now)
        if complete:
            self._prefilled(complete, now)

    def _prefilled(self, complete: Iterable[Request], now: float) -> None:
        """Prompts are complete, and have their first token; of a single lane they decode with the next step."""
        state = self.state
        for request in complete:
            self.emit(request, now)
            if request.generated >= self.outputs[request.id]:
                state.release(request)
                self.finished(request, now)
            elif not self.two_lanes:
                state.join_decode(request)
                self._expect_end(request)
                self.merged.append(request)

    def _end_iteration(self, now: float) -> None:
        """Every decode has a token more."""
        finished = self.finish_at.pop(self.state.decode.iteration + 1, ())
        self._emit_iteration(now)
        self.state.end_hybrid_decode(finished)
        for request in finished:
            self.finished(request, now)

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

    # ---- guards ----------------------------------------------------------------------------------

    def _guard(self, now: float) -> None:
        """Called when time stands still between decisions, or preemptions outrun tokens."""
        self.stalled += 1
        if self.stalled > STALL_DECISIONS:
            raise self.stuck(f"{STALL_DECISIONS} decisions at one instant")
        self.check_preemptions()

    # ---- the end ---------------------------------------------------------------------------------

    def outcome(self) -> RunOutcome:
        """What happened, once every request is closed."""
        tables = self.sink.tables()
        span_s = self.now_s - (self.arrivals[0] if len(self.arrivals) else 0.0)
        held = dict.fromkeys(self.names, 0.0)
        for batch in tables[0].batches("lane", "sms", "actual_s"):
            held_sm_s = batch["sms"] * batch["actual_s"]
            for name in self.names:
                held[name] += float(held_sm_s[batch["lane"] == name].sum())
        return self.made_outcome(
            tables, gpu=self.device.gpu.name, device_source=self.device.source + host_label(self.config.device),
            host_time=self.device.has_host_time or self.host_step_s > 0, **described(served_model(self.config.device)),
            sm_seconds=self.gpu.sm_seconds(span_s, held),
            span_s=span_s, decision_wall_s=self.decision_wall_s, queue_integral_s=self.queue_integral_s,
            wait_sum_s=self.wait_sum_s)
