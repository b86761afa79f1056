"""What a driver keeps of a run, whether its time is computed or passes: requests from their arrival to their row, the gaps
between tokens, the rows of steps, what is told of a policy that is stuck or wrong, and the outcome.

The drivers' loops, which spend the time, are written twice on purpose; all that they need not differ in is here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

import numpy as np

from bullet.config import RunConfig
from bullet.errors import ConfigError, NoProgressError, PolicyError, one_line
from bullet.results.columns import RequestTable, RunOutcome, StepTable
from bullet.results.sink import PACK_STEPS, ListSink, RowSink
from bullet.state import DECODE, HYBRID, PREFILL, KvCache, Partition, Phase, Request, SplitTable, Step, SystemState
from bullet.workload import Workload
from bullet.workload.cuts import warmup_of

INFINITY = float("inf")
STALL_DECISIONS = 20_000
"""Decisions at one instant, preemptions without one new token, or waits with nothing running and nothing to arrive,
after which a run counts as stuck."""
STEP_ERRORS = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError, StopIteration)
"""What a step that cannot be carried out brings on: of a user's policy its mistake, told in one line."""

Recorder = Callable[[str, tuple[Any, ...]], None]
"""Called in order with ("next_step", (lane, state, now_s, decision)) and ("observe", (step, elapsed_s)); by the real driver
also with what :mod:`bullet.runtime.record` needs to run the same decisions again."""


class Bookkeeping:
    """One run's books. Rows go to ``sink`` as they come; ``longest_tokens``: prompt and output that can be served at all."""

    source = "simulated"
    state: SystemState

    def __init__(self, config: RunConfig, workload: Workload, policy: Any, splits: SplitTable, kv: KvCache,
                 num_layers: int, sink: RowSink, longest_tokens: int, progress: Callable[[int], None] | None,
                 record: Recorder | None) -> None:
        names = self.names = tuple(policy.lanes)
        if names not in ((PREFILL, DECODE), (HYBRID,)):
            raise ConfigError(f"policy {config.policy.name!r}: lanes = {names}: must be ('prefill', 'decode') or "
                              "('hybrid',)")
        slo = config.slo
        assert slo.mean_prompt_tokens is not None
        assert (slo.ttft_s is None) != (slo.ttft_s_per_token is None), slo
        self.config, self.policy, self.sink, self.progress, self.record = config, policy, sink, progress, record
        self.two_lanes = len(names) == 2
        self._pack = sink.pack if isinstance(sink, ListSink) else None
        self._write_step, self._observe = sink.step, policy.observe  # bound once: they are called at every step
        self.num_sms = num_sms = splits.num_sms
        self.state = SystemState(splits, kv, num_layers, Partition(num_sms, num_sms))
        self.longest_tokens = longest_tokens
        self.workload_source = workload.source
        # Views: an element comes as fast as a list's, as a number of Python's, and a million cost no memory.
        self.arrivals: Any = np.ascontiguousarray(workload.arrival_s).data
        self.prompts: Sequence[int] = np.ascontiguousarray(workload.prompt_tokens).data
        self.outputs: Sequence[int] = np.ascontiguousarray(workload.output_tokens).data
        # For every request the same, or in proportion to its prompt.
        self.slo_fixed_s, self.slo_per_token_s = slo.ttft_s or 0.0, slo.ttft_s_per_token or 0.0
        self.mean_slo_s = self.slo_fixed_s + self.slo_per_token_s * slo.mean_prompt_tokens
        self.policy_reads_mean = slo.ttft_slo_policy == "mean_length"
        self.now_s = 0.0
        self.next_arrival = 0
        #: From an arrival until a policy sees it.
        self.host_request_s = config.device.host_request_s
        self.closed = 0  # finished or rejected
        self.sends: list[float] | None = None  # of a closed loop: when those who think will send, a heap
        if workload.closed is not None:
            self.arrivals = array("d", [math.nan]) * len(workload)
            self.thinks = iter(workload.closed.think_s.tolist())
            self.sends = list(islice(self.thinks, workload.closed.clients))
            heapify(self.sends)
        self.next_arrival_s = self._arrival_after(-1)
        self.decisions = self.steps_ended = self.split_changes = 0
        self.preemptions_since_token = self.waits_since_launch = 0
        self.emitted_s: dict[int, float] = {}
        self.itl_s = array("d")
        self.itl_counts = array("i")
        #: Gaps before it ended while the run warmed up; ``None``: it still does.
        self.itl_from: int | None = 0
        warmup = config.workload.warmup
        if warmup is not None:
            self.itl_from = None
            self.warm_requests, self.warm_s = warmup_of(warmup)

    # ---- requests --------------------------------------------------------------------------------

    def own_slo_s(self, prompt_tokens: int) -> float:
        """The TTFT objective by a request's own prompt."""
        return self.slo_fixed_s + self.slo_per_token_s * prompt_tokens

    def ttft_slo_s(self, prompt_tokens: int) -> float:
        """The TTFT that a policy is shown as a request's objective."""
        return self.mean_slo_s if self.policy_reads_mean else self.own_slo_s(prompt_tokens)

    def arrived(self, now_s: float, let_in: Callable[[Request], None]) -> None:
        """Requests that arrived by now are let in one by one; what can never be served is refused by name."""
        kv, arrivals = self.state.kv, self.arrivals
        while self.next_arrival_s <= now_s:
            i = self.next_arrival
            if self.sends is not None:
                arrivals[i] = heappop(self.sends)
            prompt = self.prompts[i]
            total = prompt + self.outputs[i]
            request = Request(i, arrivals[i], prompt, self.ttft_slo_s(prompt))
            request.queued_s = self.next_arrival_s
            if self.itl_from is None and (arrivals[i] >= arrivals[0] + self.warm_s if self.warm_requests is None
                                          else i >= self.warm_requests):
                self.itl_from = len(self.itl_s)
            self.next_arrival = i + 1
            self.next_arrival_s = self._arrival_after(i)
            if total <= self.longest_tokens and kv.blocks_for(total - 1) <= kv.total_blocks:
                let_in(request)
                continue
            request.phase = Phase.REJECTED
            self._close(request, "rejected", "over_context" if total > self.longest_tokens else "over_kv_capacity", None)

    def _arrival_after(self, i: int) -> float:
        """When a policy sees the next request, as far as is known."""
        if self.sends is not None:
            return self.sends[0] + self.host_request_s if self.sends else INFINITY
        return self.arrivals[i + 1] + self.host_request_s if i + 1 < len(self.arrivals) else INFINITY

    def emit(self, request: Request, now_s: float) -> None:
        """A request has a token more: note the gap, which spans a preemption too."""
        before = self.emitted_s.get(request.id)
        if before is not None:
            self.itl_s.append(now_s - before)
            self.itl_counts.append(1)
        self.emitted_s[request.id] = now_s
        self.preemptions_since_token = 0

    def finished(self, request: Request, now_s: float) -> None:
        """A request has all its tokens."""
        assert request.generated == self.outputs[request.id], f"I2: {request} of {self.outputs[request.id]}"
        self.emitted_s.pop(request.id, None)
        self._close(request, "finished", "", now_s)

    def _close(self, request: Request, status: str, reason: str, finish_s: float | None) -> None:
        self.closed += 1
        if self.sends is not None:
            think_s = next(self.thinks, None)
            if think_s is not None:
                heappush(self.sends, (request.queued_s if finish_s is None else finish_s) + think_s)
                self.next_arrival_s = self.sends[0] + self.host_request_s
        self.request_row(request, status, reason, finish_s, request.generated)
        if self.progress is not None:
            self.progress(1)

    def request_row(self, request: Request, status: str, reason: str, finish_s: float | None, generated: int) -> None:
        """A row of requests.parquet."""
        self.sink.request((request.id, request.arrival_s, request.prompt_tokens, self.outputs[request.id], status, reason,
                           request.admitted_s, request.first_token_s, finish_s, generated, request.preemptions,
                           self.own_slo_s(request.prompt_tokens), self.mean_slo_s))

    def break_off(self, exc: BaseException) -> BaseException:
        """Whatever stopped the run (Ctrl-C, a stuck policy, a bug): offered = finished + rejected + unfinished. Returns what to
        raise for it."""
        users = bool(getattr(self.policy, "where", ""))
        try:
            self.close_unfinished()
        except Exception:
            if not users:  # it broke the state: who has no row counts as unfinished
                raise
        return self.books_wrong(exc) if users and isinstance(exc, (*STEP_ERRORS, AttributeError)) else exc

    def close_unfinished(self) -> None:
        """Rows of the requests that an interrupted run leaves behind, those yet to arrive included."""
        state, decode = self.state, self.state.decode
        left = [*state.queue, *state.ready, *state.chunked, *decode.requests.values()]
        if state.prefill is not None:
            left.extend(state.prefill.requests)
        for request in {request.id: request for request in left}.values():
            generated = decode.generated(request) if request.id in decode.requests else request.generated
            self.request_row(request, "unfinished", "", None, generated)
        for i in range(self.next_arrival, len(self.arrivals)):
            self.request_row(Request(i, self.arrivals[i], self.prompts[i], self.mean_slo_s), "unfinished",
                             "not yet arrived", None, 0)

    # ---- steps -----------------------------------------------------------------------------------

    def step_ended(self, flight: Any, lane: str, now_s: float, elapsed_s: float) -> None:
        """Tell the policy how long a step took, and write its row."""
        step = flight.step
        if self.record is not None:
            self.record("observe", (step, elapsed_s))
        self._observe(step, elapsed_s)
        (prefill_tokens, seqs, context, first_layer, layers, queue, kv_used, target_p, target_d) = flight.row
        self.step_row((self.steps_ended, lane, lane, flight.start_s, now_s, step.sms, prefill_tokens, seqs, context,
                       first_layer, layers, step.predicted_s, elapsed_s, flight.corun_s, flight.corun_sms, queue, kv_used,
                       target_p, target_d, step.reason))

    def step_row(self, row: tuple[Any, ...]) -> None:
        """A row of steps.parquet."""
        self._write_step(row)
        self.steps_ended = number = self.steps_ended + 1
        if self._pack is not None and number % PACK_STEPS == 0:
            self._pack()

    # ---- what a policy got wrong -------------------------------------------------------------------

    def waited(self, lane: str, idle: bool) -> None:
        """A policy that waits, and then waits again, with nobody else to change anything, would do so for ever."""
        self.waits_since_launch += 1
        if self.waits_since_launch > STALL_DECISIONS and idle and self.next_arrival_s == INFINITY:
            raise self.stuck(f"{lane} waited {STALL_DECISIONS} times while nothing ran or arrived")

    def check_preemptions(self) -> None:
        """Preemptions must not outrun tokens for ever."""
        if self.preemptions_since_token > STALL_DECISIONS:
            raise self.stuck(f"{STALL_DECISIONS} preemptions without one new token")

    @property
    def owner(self) -> str:
        """Who is at fault, for a line: a user's policy with its file and line."""
        where = getattr(self.policy, "where", "")
        return f"{where}{': ' if where else ''}policy {self.config.policy.name!r}"

    def books_wrong(self, exc: BaseException) -> PolicyError:
        """Under a user's policy, which may have changed what it may only read, the driver's own books broke."""
        return PolicyError(f"{self.owner}: at t = {self.now_s:.6f} s the run's books no longer add up ({type(exc).__name__}: "
                           f"{one_line(exc, 300)}): a policy may only read the state")

    def stuck(self, why: str) -> NoProgressError:
        """The error, with the state as it stands."""
        return NoProgressError(f"{self.owner} makes no progress at t = {self.now_s:.3f} s: {why}; "
                               f"{self.closed} of {len(self.arrivals)} requests closed, {self.standing()}")

    def standing(self) -> str:
        """Where the requests are."""
        state = self.state
        head = state.queue[0] if len(state.queue) else None
        return (f"{len(state.queue)} waiting (head: {head}), {len(state.chunked)} in chunks, prefill batch: "
                f"{None if state.prefill is None else [r.id for r in state.prefill.requests]}, {len(state.ready)} ready, "
                f"{state.decode.size} decoding, KV {state.kv.free_blocks} of {state.kv.total_blocks} blocks free")

    def nothing_can_happen(self) -> NoProgressError:
        """No event is to come."""
        return self.stuck("no step runs, no request is to arrive, and the policy waits for nothing")

    def already_past(self, lane: str, until_s: float) -> NoProgressError:
        """A wait that is over before it begins."""
        return self.stuck(f"{lane} asked to wait until {until_s}, already past")

    def no_such_sms(self, sms: int) -> NoProgressError:
        """A step on SMs that the device does not have."""
        return NoProgressError(f"{self.owner} asked for {sms} SMs: the device has 1 to {self.num_sms}")

    def wrong_answer(self, lane: str, now_s: float, decision: Any, step_type: type) -> ConfigError:
        """Neither a step of the lane nor a wait."""
        return ConfigError(f"{self.owner}: at t = {now_s:.6f} s {lane} was answered {decision!r}: "
                           f"must be a {step_type.__name__} or a Wait")

    def cannot_carry_out(self, step: Step, now_s: float, exc: BaseException) -> ConfigError:
        """A user's step that the state refused, by one of ``STEP_ERRORS``."""
        return ConfigError(f"{self.owner}: at t = {now_s:.6f} s its {step!r} cannot be carried out: "
                           f"{type(exc).__name__}: {one_line(exc, 300)}")

    # ---- the end ---------------------------------------------------------------------------------

    def made_outcome(self, tables: tuple[StepTable, RequestTable], *, gpu: str, device_source: str,
                     sm_seconds: dict[str, float], span_s: float, decision_wall_s: float, **measures: Any) -> RunOutcome:
        """What happened, once nothing is in flight; ``measures``: what only this driver keeps."""
        config, kv = self.config, self.state.kv
        assert config.slo.tpot_s is not None
        begin = len(self.itl_s) if self.itl_from is None else self.itl_from
        return RunOutcome(
            config=config, system=config.policy.name, steps=tables[0], requests=tables[1], itl_s=np.asarray(self.itl_s)[begin:],
            itl_counts=np.asarray(self.itl_counts)[begin:], sm_seconds=sm_seconds, span_s=span_s, num_sms=self.num_sms,
            kv_blocks=kv.total_blocks, split_changes=self.split_changes, decisions=self.decisions,
            decision_wall_s=decision_wall_s, tpot_slo_s=config.slo.tpot_s,
            device={"gpu": gpu, "model": config.device.model, "source": device_source, "workload": self.workload_source,
                    **measures, "kv_peak_blocks": kv.peak_blocks,
                    "prefix_hit_rate": kv.hit_tokens / kv.asked_tokens if kv.asked_tokens else None},
            source=self.source)
