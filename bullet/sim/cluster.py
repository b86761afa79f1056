"""Many simulated devices behind one router: replicas, or devices that prefill and devices that decode (docs/cluster.md).

Each device is a :class:`~bullet.sim.driver.Simulation` of its own, with its own policy, queue and KV cache; what it does at a
boundary is what it does alone. The cluster holds the clock: one heap of what is due, in order of time, at one instant arrivals
before landings before boundaries, and these by the device's number. So a router sees every device as it stands at that moment.

Disaggregated, a request goes this way::

    arrival -> router -> prefill device -> first token
                 -> router -> reservation (waits, in order, for blocks where it will decode)
                 -> link (latency + bytes / bandwidth; the links of both devices are taken meanwhile)
                 -> its blocks on the prefill device come free, and it joins the decode batch there

A decode device that preempts a request computes it anew itself, by its own policy, before it takes newcomers.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

import numpy as np

from bullet.catalog.spec import ModelSpec
from bullet.config import RunConfig
from bullet.devices.base import Device
from bullet.errors import require
from bullet.layout import Layout, layout_of, split_layout
from bullet.policies import is_custom
from bullet.results.bookkeeping import INFINITY, STEP_ERRORS
from bullet.results.columns import RunOutcome
from bullet.results.sink import RowSink
from bullet.sim.gpu import SimulatedGpu
from bullet.sim.member import DecodeMember, Member, Move, NoPaging, PagedMember, PrefillMember
from bullet.state import Request
from bullet.workload import Workload

ARRIVAL, LANDING, BOUNDARY = range(3)
MOST_AHEAD = 32
"""Unfinished requests by which a device may be ahead of the least loaded one and still be sent what its cache begins with."""


class Cluster:
    """One run of several devices; :func:`cluster_of` makes it. As a :class:`~bullet.sim.driver.Simulation`: ``run``, ``outcome``,
    ``break_off``."""

    def __init__(self, config: RunConfig, workload: Workload, layout: Layout, make: Callable[[int, str], Any],
                 sink: RowSink) -> None:
        self.config, self.workload, self.layout, self.sink = config, workload, layout, sink
        self.options = config.cluster
        self.several = layout != Layout(1)
        self.arrivals: Any = np.ascontiguousarray(workload.arrival_s).data
        self.sends: list[float] | None = None
        if workload.closed is not None:
            self.arrivals = array("d", [math.nan]) * len(workload)
            self.thinks = iter(workload.closed.think_s.tolist())
            self.sends = list(islice(self.thinks, workload.closed.clients))
            heapify(self.sends)
        self.host_request_s = config.device.host_request_s
        kinds = [("replica", layout.replicas), ("prefill", layout.prefill), ("decode", layout.decode)]
        named = [(kind, f"{kind} {i}") for kind, count in kinds for i in range(count)]
        self.members: list[Any] = [make(number, kind) for number, (kind, _) in enumerate(named)]
        for number, (member, (_, name)) in enumerate(zip(self.members, named, strict=True)):
            member.stand(self, number, name)
        self.decoders = self.members[layout.prefill:] if layout.decode else []
        self.front = self.members[:layout.prefill] if layout.decode else self.members
        self.next_arrival = self.steps = self.closed = 0
        self.turns = [0, 0]  # round-robin, at the front and among the decoders
        self.moves: dict[int, Move] = {}
        self.heap: list[tuple[float, int, int]] = []
        self.due = [INFINITY] * len(self.members)
        self.now_s = 0.0
        count = len(workload)
        #: A request's way: its devices (-1: none yet), when blocks were reserved for it, its KV began to leave and landed, bytes.
        self.way_devices = np.full((count, 2), -1, dtype=np.int32)
        self.way_s = np.full((count, 3), np.nan)
        self.way_bytes = np.zeros(count)
        model = self.members[0].device.model
        self.window_bytes = model.kv_bytes_per_token * model.window_layers // model.num_layers
        self.model: ModelSpec = model
        self.bytes_sent = self.bytes_landed = 0.0

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every request is finished or rejected; :class:`NoProgressError` if nothing can happen."""
        heap, due, members, overlap = self.heap, self.due, self.members, self.options.overlap and bool(self.decoders)
        self._expect_arrival()
        while heap:
            at_s, kind, number = heappop(heap)
            if kind == BOUNDARY:
                if due[number] != at_s:
                    continue  # it was called earlier
                self.now_s = at_s
                member = members[number]
                assert at_s >= member.now_s, f"I6: time would go back from {member.now_s} to {at_s}"
                member.now_s = at_s
                next_s = member._boundary(at_s)
                due[number] = INFINITY  # whatever was sent to it meanwhile it has seen
                self._call(number, next_s)
                if member.waiting or (overlap and member.held):
                    self._grant(member, at_s)
            elif kind == ARRIVAL:
                self.now_s = at_s
                self._route(at_s)
                self._expect_arrival()
            else:
                self.now_s = at_s
                self._land(number, at_s)
        if self.closed < len(self.arrivals):
            stuck = next((m for m in members if m.open_requests), members[0])
            raise stuck.nothing_can_happen()

    def _call(self, number: int, at_s: float) -> None:
        """A device has a boundary at that time, unless it has an earlier one."""
        if at_s < self.due[number]:
            self.due[number] = at_s
            heappush(self.heap, (at_s, BOUNDARY, number))

    def _wake(self, member: Any, at_s: float) -> None:
        if not member.busy:
            self._call(member.number, at_s)

    def _next_arrival_s(self) -> float:
        if self.sends is not None:
            return self.sends[0] if self.sends else INFINITY
        return self.arrivals[self.next_arrival] if self.next_arrival < len(self.arrivals) else INFINITY

    def _expect_arrival(self) -> None:
        at_s = self._next_arrival_s()
        if at_s < INFINITY:
            heappush(self.heap, (at_s, ARRIVAL, 0))

    def _route(self, now_s: float) -> None:
        """Everybody who arrives by now goes to a device."""
        while self._next_arrival_s() <= now_s:
            i = self.next_arrival
            if self.sends is not None:
                self.arrivals[i] = heappop(self.sends)
            self.next_arrival = i + 1
            member = self._choose(self.front, i, 0)
            self.way_devices[i, 0] = member.number
            member.open_requests += 1
            member.open_tokens += member.prompts[i]
            member.send(i, self.arrivals[i] + self.host_request_s)
            if self.decoders and self.options.overlap:
                self._grant(self._ask(i, member, member.prompts[i]).target, now_s)
            self._wake(member, member.next_arrival_s)

    def ended(self, member: Any, request: Request, finish_s: float | None) -> None:
        """A request is finished or rejected; of a closed loop its client thinks, and sends again."""
        self.closed += 1
        self._left(member, request)
        move = self.moves.pop(request.id, None)
        if move is not None:  # blocks were reserved for it, or asked for, and it needs none
            self._left(move.target, request)
            if move.granted_s is None:
                move.target.waiting.remove(move)
            else:
                move.target.state.kv.give_back(move.target.held.pop(request.id))
                self._wake(move.target, self.now_s)
                self._grant(move.target, self.now_s)
        if self.sends is not None:
            think_s = next(self.thinks, None)
            if think_s is not None:
                at_s = (request.queued_s if finish_s is None else finish_s) + think_s
                heappush(self.sends, at_s)
                if at_s + self.host_request_s <= self.now_s:  # within this boundary, as on one device
                    self._route(self.now_s)
                self._expect_arrival()

    def _left(self, member: Any, request: Request) -> None:
        member.open_requests -= 1
        member.open_tokens -= request.prompt_tokens

    def warm(self, request: Request) -> bool:
        """Whether a request came after the warm-up."""
        first = self.members[0]
        return bool(request.arrival_s >= self.arrivals[0] + first.warm_s if first.warm_requests is None
                    else request.id >= first.warm_requests)

    # ---- routing ---------------------------------------------------------------------------------

    def _choose(self, among: list[Any], i: int, place: int) -> Any:
        router = self.options.router
        if len(among) == 1:
            return among[0]
        if router == "round-robin":
            turn = self.turns[place]
            self.turns[place] = (turn + 1) % len(among)
            return among[turn]
        if router == "shortest-queue":
            return min(among, key=lambda m: (len(m.state.queue.requests) + len(m.inbox) + (m.next_arrival_s < INFINITY)
                                             + len(m.waiting), m.open_requests, m.number))
        least = min(among, key=lambda m: (m.open_tokens, m.number))
        if router == "prefix-aware" and not place and self.workload.shared_prefix:
            donor = self.workload.shared_prefix.get(i)
            home = -1 if donor is None else int(self.way_devices[donor[0], 0])
            if home >= 0 and self.members[home].open_requests <= least.open_requests + MOST_AHEAD:
                return self.members[home]
        return least

    # ---- from one device to another ----------------------------------------------------------------

    def kv_bytes(self, tokens: int) -> int:
        """Of a request's tokens in the whole model: layers with a window keep no more than that."""
        outside = max(0, tokens - self.model.window_tokens) if self.window_bytes else 0
        whole: int = self.model.kv_bytes_per_token * tokens - self.window_bytes * outside
        return whole

    def leaves(self, member: Any, request: Request, now_s: float) -> None:
        """A prompt is complete where it was computed."""
        self._left(member, request)
        move = self.moves.get(request.id)
        if move is None:
            move = self._ask(request.id, member, request.known_tokens - 1)
        move.request, move.ready_s = request, now_s
        if move.granted_s is None:
            self._grant(move.target, now_s)
        else:
            self._send(move)

    def _ask(self, i: int, member: Any, tokens: int) -> Move:
        """Choose where a request will decode, and ask for its blocks there."""
        target = self._choose(self.decoders, i, 1)
        target.open_requests += 1
        target.open_tokens += target.prompts[i]
        self.way_devices[i, 1] = target.number
        move = self.moves[i] = Move(i, member, target, target.state.kv.blocks_for(tokens))
        target.waiting.append(move)
        return move

    def _grant(self, target: Any, now_s: float) -> None:
        """Reserve blocks in order, for as long as they last. Before newcomers goes whom the device preempted, and before
        prompts to come those that are complete: for either, blocks that were reserved ahead are taken back."""
        state, waiting = target.state, target.waiting
        kv = state.kv
        ahead: list[Move] = []
        if self.options.overlap:
            ahead = [m for m in self.moves.values() if m.target is target and m.granted_s is not None and m.request is None]
        if state.queue.requests or state.chunked:
            for move in reversed(ahead):
                self._take_back(move, now_s)
            return
        while waiting:
            move = next((m for m in waiting if m.request is not None), waiting[0])
            if move.blocks > kv.free_blocks:
                if move.request is None or move.blocks > kv.free_blocks + sum(m.blocks for m in ahead):
                    return
                while move.blocks > kv.free_blocks:
                    self._take_back(ahead.pop(), now_s)
            waiting.remove(move)
            kv.take(move.blocks)
            target.held[move.id] = move.blocks
            move.granted_s = self.way_s[move.id, 0] = now_s
            if move.request is not None:
                self._send(move)
            else:
                ahead.append(move)

    def _take_back(self, move: Move, now_s: float) -> None:
        target = move.target
        target.state.kv.give_back(target.held.pop(move.id))
        move.granted_s = None
        self.way_s[move.id, 0] = np.nan
        target.waiting.appendleft(move)
        self._wake(target, now_s)

    def _send(self, move: Move) -> None:
        """The KV of a complete prompt goes over the links: whole from now on, or layer by layer since they were computed."""
        request, source, target, options = move.request, move.source, move.target, self.options
        assert request is not None
        assert move.granted_s is not None
        size = self.kv_bytes(request.known_tokens - 1)
        wire_s, layers = size / options.link_bytes_per_s, self.model.num_layers
        free_s = max(move.granted_s, source.link_free_s, target.link_free_s)
        ready_s = move.ready_s
        if options.overlap:
            # KV comes to be evenly between admission and first token; the last layer's leaves after that.
            began_s = request.admitted_s
            assert began_s is not None
            start_s = max(free_s, began_s + (ready_s - began_s) / layers)
            end_s = max(start_s + wire_s, ready_s + wire_s / layers)
        else:
            start_s = max(free_s, ready_s)
            end_s = start_s + wire_s
        source.link_free_s = target.link_free_s = end_s
        lands_s = end_s + options.link_latency_s
        self.way_s[move.id, 1:] = start_s, lands_s
        self.way_bytes[move.id] = size
        self.bytes_sent += size
        heappush(self.heap, (lands_s, LANDING, move.id))

    def _land(self, i: int, now_s: float) -> None:
        move = self.moves.pop(i)
        request, source, target = move.request, move.source, move.target
        assert request is not None
        self.bytes_landed += self.way_bytes[i]
        del source.held[i]
        source.state.kv.release(request, request.known_tokens - 1)
        self._wake(source, now_s)
        target.emitted_s[i] = source.emitted_s.pop(i)
        target.land(request, now_s)
        self._wake(target, now_s)

    # ---- the end ---------------------------------------------------------------------------------

    def break_off(self, exc: BaseException) -> BaseException:
        """As :meth:`bullet.results.bookkeeping.Bookkeeping.break_off`."""
        first = self.members[0]
        users = bool(getattr(first.policy, "where", ""))
        try:
            self.close_unfinished()
        except Exception:
            if not users:
                raise
        wrong: BaseException = first.books_wrong(exc) if users and isinstance(exc, (*STEP_ERRORS, AttributeError)) else exc
        return wrong

    def close_unfinished(self) -> None:
        """Rows of all that an interrupted run leaves behind, between devices and yet to arrive included."""
        for member in self.members:
            member.close_unfinished()
        first = self.members[0]
        for move in self.moves.values():
            if move.request is not None:
                first.request_row(move.request, "unfinished", "", None, move.request.generated)
        for i in range(self.next_arrival, len(self.arrivals)):
            first.request_row(Request(i, self.arrivals[i], first.prompts[i], first.mean_slo_s), "unfinished",
                              "not yet arrived", None, 0)

    def outcome(self) -> RunOutcome:
        """What happened on all devices together, once every request is closed. ``num_sms``, KV blocks, decisions and SM-seconds
        are sums over devices; ``kv_peak_blocks`` too, of each one's own peak."""
        members, first = self.members, self.members[0]
        for member in members:
            member.now_s = self.now_s = max(self.now_s, member.now_s)
        whole = SimulatedGpu(first.device)
        whole.num_sms = sum(m.num_sms for m in members)
        for member in members:
            whole.shared_sm_s += member.gpu.shared_sm_s
        alone = first.outcome()
        span_s = self.now_s - (self.arrivals[0] if len(self.arrivals) else 0.0)
        held: dict[str, float] = {}
        for batch in alone.steps.batches("kind", "sms", "actual_s"):
            held_sm_s = batch["sms"] * batch["actual_s"]
            for name in dict.fromkeys(name for m in members for name in m.names):
                held[name] = held.get(name, 0.0) + float(held_sm_s[batch["kind"] == name].sum())
        asked, hits = (sum(getattr(m.state.kv, name) for m in members) for name in ("asked_tokens", "hit_tokens"))
        starts = [len(m.itl_s) if m.itl_from is None else m.itl_from for m in members]
        outcome: RunOutcome = dataclasses.replace(
            alone, config=self.config, system=self.config.system, span_s=span_s, num_sms=whole.num_sms,
            itl_s=np.concatenate([np.asarray(m.itl_s)[at:] for m, at in zip(members, starts, strict=True)]),
            itl_counts=np.concatenate([np.asarray(m.itl_counts)[at:] for m, at in zip(members, starts, strict=True)]),
            sm_seconds=whole.sm_seconds(span_s, held), kv_blocks=sum(m.state.kv.total_blocks for m in members),
            split_changes=sum(m.split_changes for m in members), decisions=sum(m.decisions for m in members),
            decision_wall_s=sum(m.decision_wall_s for m in members),
            device=alone.device | {
                "queue_integral_s": sum(m.queue_integral_s for m in members), "wait_sum_s": sum(m.wait_sum_s for m in members),
                "kv_peak_blocks": sum(m.state.kv.peak_blocks for m in members),
                "prefix_hit_rate": hits / asked if asked else None,
                "cluster": self._figures()},
            ways={"device": self.way_devices[:, 0], "decode_device": self.way_devices[:, 1], "reserved_s": self.way_s[:, 0],
                  "leaves_s": self.way_s[:, 1], "lands_s": self.way_s[:, 2], "bytes": self.way_bytes})
        return outcome

    def _figures(self) -> dict[str, Any]:
        """What summary.json says of a cluster alone; seconds are means over the requests that moved."""
        moved = np.isfinite(self.way_s[:, 2])
        figures: dict[str, Any] = {"layout": self.config.layout, "devices": len(self.members), "router": self.options.router,
                                   "gpus": len(self.members) * self.members[0].device.tensor_parallel}
        if self.decoders:
            figures |= {"kv_bytes_moved": float(self.way_bytes.sum()), "requests_moved": int(moved.sum()),
                        "mean_link_s": float((self.way_s[:, 2] - self.way_s[:, 1])[moved].mean()) if moved.any() else None}
        return figures


def cluster_of(config: RunConfig, workload: Workload, device: Device, sink: RowSink, build: Callable[..., Any],
               progress: Callable[[int], None] | None = None) -> Cluster:
    """The cluster that a resolved configuration names; :class:`~bullet.errors.ConfigError` where it cannot be. ``build``:
    :func:`bullet.sim.run.simulation`."""
    assert config.layout is not None
    layout, options = layout_of(config.layout), config.cluster
    name = split_layout(config.policy.name)[0]
    most = device.gpu.gpus_per_node
    require(device.tensor_parallel <= most, "device.tensor_parallel", device.tensor_parallel,
            f"{most} or less in a cluster, the GPUs of a node: more of {device.gpu.name} are more devices (--cluster)")
    chosen = {"replica": name, "prefill": name, "decode": name}
    for kind in ("prefill", "decode"):
        own = getattr(options, f"{kind}_policy")
        if own is not None:
            where = f"cluster.{kind}_policy"
            require(layout.decode > 0, where, own, f"none with {layout.replicas} replicas, which run policy.name")
            require(not is_custom(own), where, own, "a built-in policy: give your own as policy.name (--policy)")
            chosen[kind] = own

    def make(number: int, kind: str) -> Any:
        cache = "off" if kind == "decode" else config.policy.prefix_cache
        policy = dataclasses.replace(config.policy, name=chosen[kind], prefix_cache=cache)
        kinds: Any = {"replica": (Member, PagedMember), "prefill": (PrefillMember, NoPaging),
                      "decode": (DecodeMember, NoPaging)}[kind]
        return build(dataclasses.replace(config, policy=policy), workload, device, sink, progress=progress, kinds=kinds)

    return Cluster(config, workload, layout, make, sink)
