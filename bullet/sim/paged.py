"""The simulated driver for policies that name their blocks, with one or two steps in flight (bullet/state/prefix.py).

The loop is the ordinary one. What differs: with two steps in flight the next step is decided when one ends and another
is still to run, and begins the moment that one ends::

    device      |--- n ----|--- n + 1 ---|--- n + 2 ---|
    decided          ^n+1  ^n+2 (n's tokens are known, n + 1's are not)

As in the engine (``v1/engine/core.py``, ``step_with_batch_queue``), arrivals are noticed when a step ends or when nothing
runs, and an idle engine decides two steps at once.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from bullet.config import RunConfig
from bullet.devices.base import Device, StepWork
from bullet.errors import ConfigError
from bullet.policies.base import Policy
from bullet.sim.driver import Simulation
from bullet.sim.gpu import HybridFlight
from bullet.state import HYBRID, HybridStep, KvCache, Partition, Phase, Request, SplitTable
from bullet.state.prefix import PagedState, Paging, PrefixKvCache
from bullet.state.sharing import check_prefixes
from bullet.workload import Workload


class Ticket(NamedTuple):
    """A step that has been decided: its requests (and whether each gets a token by it), its work, its row's columns."""

    step: HybridStep
    served: list[tuple[Request, bool]]
    work: StepWork
    row: tuple[Any, ...]


class PagedSimulation(Simulation):
    """One run of a one-lane policy with ``paging``."""

    state: PagedState

    def __init__(self, config: RunConfig, workload: Workload, device: Device, policy: Policy, splits: SplitTable,
                 kv: KvCache, sink: Any, **options: Any) -> None:
        super().__init__(config, workload, device, policy, splits, kv, sink, **options)
        paging = getattr(policy, "paging", None)
        if self.two_lanes or not isinstance(paging, Paging):
            raise ConfigError(f"policy {config.policy.name!r}: paging = {paging!r}: must be a bullet.state.prefix.Paging, and "
                              "lanes ('hybrid',)")
        if kv.block_units > 1 or device.asks_within:
            raise ConfigError(f"policy {config.policy.name!r} with prefix_cache, admission, steps_in_flight or resume: blocks "
                              f"with names are not modelled for layers with a window, which {device.model.name} has")
        shared = workload.shared_prefix or {}
        check_prefixes(shared, self.prompts, workload.name)
        blocks = PrefixKvCache(kv.total_blocks, shared, caching=paging.prefix_cache, uncached_first=paging.uncached_first)
        num_sms = splits.num_sms
        self.state = PagedState(splits, blocks, device.model.num_layers, Partition(num_sms, num_sms), paging)
        self.depth = paging.steps_in_flight
        self.served: list[tuple[Request, bool]] = []  # by the step that runs
        self.decided: deque[Ticket] = deque()  # to run after it

    def _boundary_of_one(self, now: float) -> float:
        gpu, state, lane = self.gpu, self.state, self.lanes[0]
        flight = gpu.hybrid
        if flight is not None:  # nobody wakes a busy device
            gpu.hybrid = None
            self._deliver(now)
            self.step_ended(flight, HYBRID, now, now - flight.start_s)
            if self.decided:
                self._start(self.decided.popleft(), now)
        if self.next_arrival_s <= now:
            self.arrived(now, self._let_in)
        while (gpu.hybrid is not None) + len(self.decided) < self.depth and (state.queue.requests or state.running):
            step = self._decide(lane, now)
            if step is None:
                break
            self._launch(lane, step, now)
        if self.debug:
            state.check()
        flight = gpu.hybrid
        return flight.end_s if flight is not None else min(self.next_arrival_s, lane.wait_until_s)

    def _begin(self, lane: Any, step: Any, now: float) -> None:
        """Carry out a decision on queues and blocks; run it now, or after the step that runs."""
        state = self.state
        assert isinstance(step, HybridStep), step
        self._integrate_queue(now)
        self.preemptions_since_token += len(step.preempt)
        queue_length = len(state.queue.requests)
        stay = len(state.running) - len(step.preempt)
        served = state.begin_paged(step, now)
        for request in state.running[stay:]:
            self.wait_sum_s += now - request.queued_s
        # To the attention kernel a request with one new token is a decode, whatever that token is.
        pieces = [(new, past) for _, new, past in step.chunks if new > 1]
        seqs = len(step.chunks) - len(pieces)
        context = sum(past + 1 for _, new, past in step.chunks if new == 1)
        # The engine computes logits for the last token of every request, also where a prompt is not complete.
        told: dict[str, int] = {}
        if self.device.asks_longest:
            told["longest_tokens"] = max((past + 1 for _, new, past in step.chunks if new == 1), default=0)
        work = self.device.hybrid_work(pieces, seqs, context, logits_seqs=len(step.chunks), **told)
        for request, gives in served:
            if gives and request.generated + state.unknown[request.id] == self.outputs[request.id]:
                state.ending.add(request.id)
        self.waits_since_launch = 0
        row = (sum(new for new, _ in pieces), seqs, context, 0, state.num_layers, queue_length, state.blocks.used_blocks,
               *(step.target or state.target))
        ticket = Ticket(step, served, work, row)
        if self.gpu.hybrid is not None:
            self.decided.append(ticket)
        else:
            self._start(ticket, now)

    def _start(self, ticket: Ticket, now: float) -> None:
        self.served = ticket.served
        noise = self.lanes[0].noise
        seconds = self.device.solo_seconds(ticket.work, ticket.step.sms) * (1.0 if noise is None else noise.next())
        seconds += self.host_prompt_step_s if ticket.row[0] else self.host_step_s
        self.gpu.hybrid = HybridFlight(ticket.step, now, now + seconds, ticket.row)

    def _deliver(self, now: float) -> None:
        """The step's tokens reach their requests, also those that were preempted while it ran."""
        gaps: dict[float, int] = {}
        for request, gives in self.served:
            if not gives:
                continue
            before = self.emitted_s.get(request.id)
            if before is not None:
                gaps[now - before] = gaps.get(now - before, 0) + 1
            self.emitted_s[request.id] = now
            self.preemptions_since_token = 0
            self.state.deliver(request, now)
            if request.generated == self.outputs[request.id]:
                if request.phase is Phase.WAITING:  # preempted with its last token in flight
                    self._integrate_queue(now)
                    self.wait_sum_s += now - request.queued_s
                self.state.finish(request)
                self.finished(request, now)
        if not self.decided:
            del self.state.in_flight[HYBRID]
        self.itl_s.extend(gaps)
        self.itl_counts.extend(gaps.values())

    def standing(self) -> str:
        return f"{super().standing()}, {len(self.state.running)} running"

    def close_unfinished(self) -> None:
        for request in self.state.running:
            self.request_row(request, "unfinished", "", None, request.generated)
        super().close_unfinished()
