"""A device of a cluster: a simulation of one device, but that a router sends it its requests, and others may hand it theirs."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from bullet.config import RunConfig
from bullet.errors import ConfigError
from bullet.results.bookkeeping import INFINITY
from bullet.results.sink import PACK_STEPS
from bullet.sim.driver import Simulation
from bullet.sim.lane import Noise
from bullet.sim.paged import PagedSimulation
from bullet.state import HYBRID, Phase, Request


@dataclasses.dataclass(slots=True)
class Move:
    """A request's way from one device to another. ``granted_s``: when its blocks were reserved; ``request``: once its prompt is
    complete."""

    id: int
    source: Any
    target: Any
    blocks: int
    granted_s: float | None = None
    request: Request | None = None
    ready_s: float = math.nan


class _Member(Simulation):
    """A device of a cluster: requests come from the router, and others may land with their KV."""

    cluster: Any
    #: What the router sent and the device has not seen: when it sees it, the request. Empty until it stands in a cluster.
    inbox: Any = ()
    landed: Any = ()

    def stand(self, cluster: Any, number: int, name: str) -> None:
        """Take a place in a cluster."""
        self.cluster, self.number, self.name = cluster, number, name
        self.inbox, self.landed = deque[tuple[float, int]](), deque[tuple[float, Request]]()
        self.arrivals, self.sends, self.next_arrival_s = cluster.arrivals, None, INFINITY
        self.lane_names = {lane: f"{name} {lane}" if cluster.several else lane for lane in self.names}
        self.open_requests = self.open_tokens = 0  # sent here, and not yet finished or handed over
        self.waiting: deque[Move] = deque()  # who wants to decode here and has no blocks yet
        self.held: dict[int, int] = {}  # blocks that no state knows of: of requests that leave, and of those that will come
        self.link_free_s = 0.0
        if number:
            for lane in self.lanes:
                if lane.noise is not None:
                    lane.noise = Noise(lane.noise.std, self.config.seed, lane.name, number)
        if self.debug:
            self._check, self.state.check = self.state.check, self._checked  # type: ignore[method-assign]

    def _checked(self) -> None:
        held, kv = sum(self.held.values()), self.state.kv
        kv.free_blocks += held
        self._check()
        kv.free_blocks -= held

    @property
    def busy(self) -> bool:
        """Whether it notices nothing before a step ends."""
        gpu = self.gpu
        return (gpu.prefill is not None and gpu.decode is not None) if self.two_lanes else gpu.hybrid is not None

    # ---- requests --------------------------------------------------------------------------------

    def _arrival_after(self, i: int) -> float:
        if not self.inbox:
            return self._landing_s()
        seen_s, self.next_arrival = self.inbox.popleft()
        return float(seen_s)

    def _landing_s(self) -> float:
        return float(self.landed[0][0]) if self.landed else INFINITY

    def send(self, i: int, seen_s: float) -> None:
        """The router's."""
        if self.next_arrival_s == INFINITY:
            self.next_arrival, self.next_arrival_s = i, seen_s
        else:
            self.inbox.append((seen_s, i))

    def arrived(self, now_s: float, let_in: Callable[[Request], None]) -> None:
        if not self.landed:
            super().arrived(now_s, let_in)
            return
        while self.landed and self.landed[0][0] <= now_s:
            self._join(self.landed.popleft()[1])
        self.next_arrival_s = self._landing_s()

    def land(self, request: Request, at_s: float) -> None:
        """A request comes with its KV, for which blocks were taken."""
        self.landed.append((at_s, request))
        self.next_arrival_s = self._landing_s()

    def _join(self, request: Request) -> None:
        del self.held[request.id]
        if self.itl_from is None and self.cluster.warm(request):
            self.itl_from = len(self.itl_s)
        if self.two_lanes:
            request.phase = Phase.READY
            self.state.ready.append(request)
        else:
            self.state.join_decode(request)
            self._expect_end(request)
            self.merged.append(request)

    def _close(self, request: Request, status: str, reason: str, finish_s: float | None) -> None:
        super()._close(request, status, reason, finish_s)
        self.cluster.ended(self, request, finish_s)

    # ---- steps -----------------------------------------------------------------------------------

    def step_row(self, row: tuple[Any, ...]) -> None:
        cluster = self.cluster
        self._write_step((cluster.steps, self.lane_names[row[1]], *row[2:]))
        self.steps_ended += 1
        cluster.steps = number = cluster.steps + 1
        if self._pack is not None and number % PACK_STEPS == 0:
            self._pack()

    def close_unfinished(self) -> None:
        seen, self.next_arrival = self.next_arrival, len(self.arrivals)
        super().close_unfinished()
        coming = [i for _, i in self.inbox]
        if self.next_arrival_s < INFINITY and not self.landed:
            coming.append(seen)
        for i in coming:
            self.request_row(Request(i, self.arrivals[i], self.prompts[i], self.mean_slo_s), "unfinished", "", None, 0)
        for _, request in self.landed:
            self.request_row(request, "unfinished", "", None, request.generated)


class Member(_Member):
    """Of a policy that leaves blocks without names."""

    def _boundary_of_one(self, now: float) -> float:
        """As alone, but that a steady step is launched again, one at a time: others may send something before it ends."""
        gpu, state, lane = self.gpu, self.state, self.lanes[0]
        flight = gpu.hybrid
        again: Any = None
        if flight is not None:
            gpu.hybrid = None
            step: Any = flight.step
            self._finish_hybrid(step, now)
            self.step_ended(flight, HYBRID, now, now - flight.start_s)
            if step.steady and not self.custom:
                decode = state.decode
                growth = decode.residues[decode.iteration % decode.block_tokens]
                if decode.size and self.next_arrival_s > now and growth <= state.kv.free_blocks:
                    again = step
        if again is not None:
            self._begin(lane, again, now)
        else:
            if self.next_arrival_s <= now:
                self.arrived(now, self._let_in)
            if state.decode.size or state.queue.requests or state.chunked:
                step = self._decide(lane, now)
                if step is not None:
                    self._launch(lane, step, now)
        flight = gpu.hybrid
        if self.debug:
            state.check()
        return flight.end_s if flight is not None else min(self.next_arrival_s, lane.wait_until_s)


class PagedMember(_Member, PagedSimulation):
    """Of a policy that names its blocks."""


class DecodeMember(Member):
    """Goes on with what others began; and what a device that hands over shares with it: blocks that no state knows of."""

    def _decide(self, lane: Any, now: float) -> Any:
        if self.held and self._short():
            lane.wait_until_s = INFINITY  # until some of them land
            return None
        return super()._decide(lane, now)

    def _short(self) -> bool:
        """Whether a lone request needs blocks that those on their way hold: a policy takes a lone one to have all others."""
        state = self.state
        seqs = state.decode_seqs
        if seqs > 1:
            return False
        kv, need = state.kv, state.decode_growth_blocks() if seqs else 0
        if state.chunked and state._by_chunk:
            first = state.chunked[0]
            need += kv.blocks_for(first.known_tokens) - kv.blocks_for(first.computed_tokens)
        return need > kv.free_blocks


class PrefillMember(DecodeMember):
    """Computes prompts; whoever has more tokens to come goes on elsewhere."""

    def _prefilled(self, complete: Iterable[Request], now: float) -> None:
        for request in complete:
            self.emit(request, now)
            if request.generated >= self.outputs[request.id]:
                self.state.release(request)
                self.finished(request, now)
                continue
            if request.phase is Phase.READY:
                self.state.ready.remove(request)
            self.held[request.id] = self.state.kv.blocks_for(request.known_tokens - 1)
            self.cluster.leaves(self, request, now)


class NoPaging(PrefillMember, PagedSimulation):
    """Named blocks have no transfer."""

    def __init__(self, config: RunConfig, *_: Any, **__: Any) -> None:
        raise ConfigError(f"policy {config.policy.name!r} with prefix_cache, admission, steps_in_flight or resume: blocks with "
                          "names are not modelled on devices that prefill for others, or decode for them")
