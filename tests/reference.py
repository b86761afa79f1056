"""A serving engine written for obviousness: it walks every token of every request.

No counters, no caches: requests hold lists of token times, KV is counted by walking, time goes from event to
event by looking at everything. The chunked schedulers are written again, request by request; the two-lane loop asks the
same policy class, but through a decode batch whose figures are sums over requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bullet.state import (
    DECODE,
    PREFILL,
    DecodeStep,
    InFlight,
    Partition,
    PrefillStep,
    Published,
    Request,
    SystemState,
    Wait,
    kv_cache_of,
)

BLOCK = 16


def pages(model: Any, cached: int) -> int:
    """Blocks that a sequence of so many tokens holds: a token's position divisible by 16 begins one in each group of layers;
    those with a window keep the last that the window can reach into."""
    _, full, window = model.kv_groups
    begun = len(range(0, cached, BLOCK))
    reach = len(range(0, model.window_tokens, BLOCK)) + 1
    return full * begun + window * min(begun, reach)


def units(model: Any) -> int:
    """Blocks that begin with such a token while no window is full."""
    return pages(model, 1)


def told(model: Any, contexts: list[int]) -> dict[str, int]:
    """What a device is told of decodes' contexts beside their sum."""
    return {"within_tokens": sum(min(c, model.window_tokens) for c in contexts)} if model.window_layers else {}


@dataclass
class Walk:
    """A request of the chunked reference."""

    id: int
    arrival: float
    prompt: int
    output: int
    computed: int = 0
    tokens: list[float] = field(default_factory=list)
    preemptions: int = 0
    prefilled: bool = False
    model: Any = None

    @property
    def known(self) -> int:
        return self.prompt + len(self.tokens)

    def blocks(self, cached: int) -> int:
        return pages(self.model, cached)


class Chunked:
    """One lane. ``schedule`` returns {request: new tokens}; who holds what is found by walking ``running``."""

    def __init__(self, device: Any, blocks: int, budget: int) -> None:
        self.device, self.total, self.budget = device, blocks, budget
        self.page = BLOCK / units(device.model)  # tokens that a block is worth
        self.waiting: list[Walk] = []
        self.running: list[Walk] = []
        self.held: dict[int, int] = {}  # blocks that each running request holds
        self.last_end = float("-inf")

    def free(self) -> int:
        return self.total - sum(self.held.values())

    def decoding(self, r: Walk) -> bool:
        """Its prompt (and after a preemption what it had made) is computed: each step gives a token."""
        return r.prefilled

    def admit(self, r: Walk) -> None:
        self.waiting.remove(r)
        self.running.append(r)
        self.held[r.id] = r.blocks(r.known)

    def preempt(self, r: Walk) -> None:
        self.running.remove(r)
        del self.held[r.id]
        r.computed = 0
        r.prefilled = False
        r.preemptions += 1
        self.waiting.insert(0, r)

    def schedule(self) -> dict[int, int]:
        raise NotImplementedError

    def run(self, rows: list[tuple[float, int, int]]) -> list[Walk]:
        everyone = [Walk(i, *row, model=self.device.model) for i, row in enumerate(rows)]
        coming, now = list(everyone), 0.0
        while coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                now = max(now, coming[0].arrival)
            while coming and coming[0].arrival <= now:
                self.waiting.append(coming.pop(0))
            plan = self.schedule()
            pieces, contexts, logits = [], [], 0
            for r in self.running:
                new = plan.get(r.id, 0)
                if not new:
                    continue
                if self.decoding(r):
                    contexts.append(r.computed + 1)
                    logits += 1
                else:
                    pieces.append((new, r.computed))
                    logits += r.computed + new == r.known
            assert plan, f"nothing to do at {now}"
            work = self.device.hybrid_work(pieces, len(contexts), sum(contexts), logits_seqs=logits,
                                           **told(self.device.model, contexts))
            now += self.device.solo_seconds(work, self.device.num_sms)
            self.last_end = now
            for r in list(self.running):
                new = plan.get(r.id, 0)
                if not new:
                    continue
                full = r.computed + new == r.known
                r.computed += new
                if full:
                    r.prefilled = True
                    r.tokens.append(now)
                    if len(r.tokens) == r.output:
                        self.running.remove(r)
                        del self.held[r.id]
        return everyone


class VllmWalk(Chunked):
    """Running first in order of admission, then the queue, by its first chunk's blocks; see VLLM's V1 scheduler."""

    def schedule(self) -> dict[int, int]:
        plan: dict[int, int] = {}
        left = self.budget
        preempted = False
        i = 0
        while i < len(self.running):
            r = self.running[i]
            new = min(r.known - r.computed, left)
            if new == 0:
                break
            needed = max(r.blocks(r.computed + new) - self.held[r.id], 0)
            out = False
            while needed > self.free():
                tail = self.running[-1]
                self.preempt(tail)
                preempted = True
                if tail is r:
                    out = True
                    break
            if out:
                break
            self.held[r.id] += needed
            plan[r.id] = new
            left -= new
            i += 1
        while not preempted and self.waiting and left > 0 and len(self.running) < min(1024, self.budget):
            r = self.waiting[0]
            new = min(r.known, left)
            if r.blocks(new) > self.free():
                break
            self.admit(r)
            self.held[r.id] = r.blocks(new)
            plan[r.id] = new
            left -= new
        return plan


class SglangWalk(Chunked):
    """Chunks ahead of decodes, or (``mixed``) both; admission sets room aside, shortage retracts to the back of the queue."""

    mixed = False
    ratio = 0.7
    full = False  # a prompt found no room; forgotten when a decode step finds fewer requests than then
    full_with = 0
    prefilled = False  # whether the last step was a prefill batch: who ends with one is noticed at once
    ended: tuple[Walk, ...] = ()  # since the last step of decodes alone
    decoded: tuple[Walk, ...] = ()  # in that step

    def schedule(self) -> dict[int, int]:
        decodes = [r for r in self.running if self.decoding(r)]
        pending = [r for r in self.running if not self.decoding(r)]
        # Who ended in a step of decodes alone counts as running until the next such step.
        self.ended += tuple(r for r in self.decoded if len(r.tokens) == r.output)
        self.decoded = ()
        if self.prefilled and len(decodes) + len(self.ended) < self.full_with:
            self.full = False
        self.prefilled = False
        if not decodes:
            if not pending and self.rested():
                self.idle()
            elif not self.ended:
                self.full = False
        growth = sum(r.blocks(r.computed + 1) - self.held[r.id] for r in decodes)
        if self.mixed and growth > self.free():
            return self.retract(decodes)
        while True:
            if pending or (self.waiting and not self.full):
                plan = self.chunks(decodes, growth if self.mixed else 0)
                if plan:
                    self.prefilled = True
                    if self.mixed:
                        self.ended = ()
                    return plan | (self.decode(decodes) if self.mixed else {})
            if decodes or not self.ended:
                break
            self.idle()
        if growth > self.free():
            return self.retract(decodes)
        if self.ended:
            self.ended = ()
            self.full = False
        self.ratio = max(self.ratio - (0.7 - 0.098) / 600, 0.098)
        self.decoded = tuple(decodes)
        return self.decode(decodes)

    def idle(self) -> None:
        self.ratio, self.full, self.ended = 0.7, False, ()

    def rested(self) -> bool:
        """Nobody waited when the last step ended."""
        return min(r.arrival for r in self.waiting) > self.last_end

    def decode(self, decodes: list[Walk]) -> dict[int, int]:
        for r in decodes:
            self.held[r.id] = r.blocks(r.computed + 1)
        return {r.id: 1 for r in decodes}

    def chunks(self, decodes: list[Walk], growth: int) -> dict[int, int]:
        plan: dict[int, int] = {}
        self.full = False
        there = len(decodes) + len(self.ended)
        left = self.budget - (there if self.mixed else 0)
        prefill_left = 16384 - (there if self.mixed else 0)
        aside = self.ratio * sum(max(512 - len(r.tokens), 0) for r in (*decodes, *self.ended))
        aside += len(self.ended) if self.mixed else 0
        for r in self.running:
            if not self.decoding(r):
                new = min(r.known - r.computed, left)
                if new > 0:
                    plan[r.id] = new
                    left -= new
                    prefill_left -= new
                if new == r.known - r.computed:
                    aside += 512
        for r in list(self.waiting):
            room = self.free() - growth
            if there + len(plan) >= 2048 or r.blocks(r.known) > room:
                self.full = True
            elif there or plan:
                self.full = r.known + 512 >= room * self.page - aside
            if self.full or (plan and r.known >= prefill_left) or left <= 0:
                break
            self.admit(r)
            plan[r.id] = min(r.known, left)
            left -= plan[r.id]
            prefill_left -= plan[r.id]
            if plan[r.id] == r.known:
                aside += 512
            if (self.free() - growth) * self.page <= aside:
                self.full = True
                break
            if left <= 0 or prefill_left <= 0:
                break
        if not there or (self.mixed and plan):
            self.full = False
        self.full_with = there + len(plan)
        return plan

    def retract(self, decodes: list[Walk]) -> dict[int, int]:
        stay = sorted(decodes, key=lambda r: (-len(r.tokens), r.prompt))
        out: list[Walk] = []
        free = self.free()
        while len(stay) > 1 and (not out or free * self.page < 20 * len(stay)):
            out.append(stay.pop())
            free += self.held[out[-1].id]
        for r in out:
            self.preempt(r)
            self.waiting.append(self.waiting.pop(0))
        generated = sum(len(r.tokens) for r in stay)
        self.ratio = min(1.0, (generated + 20 * len(stay)) / (512 * len(stay)))
        self.full, self.ended = False, ()
        self.decoded = tuple(r for r in decodes if r in stay)
        return self.decode([*self.decoded])


# ------------------------------------------------------------------------------------------- two lanes


class NaiveDecodeBatch:
    """What a policy reads of a decode batch, each time summed over requests. ``cached[id]``: one entry a token."""

    block_tokens = BLOCK
    changes = ()  # it remembers none

    def __init__(self, model: Any) -> None:
        self.model = model
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.made: dict[int, int] = {}
        self.order: list[Request] = []
        self.iteration = 0
        self.version = 0

    def __len__(self) -> int:
        return len(self.requests)

    size = property(__len__)

    def cached(self, r: Request) -> int:
        return len(self.tokens[r.id])

    def generated(self, r: Request) -> int:
        return self.made[r.id]

    def growth_of(self, r: Request) -> int:
        return pages(self.model, self.cached(r) + 1) - pages(self.model, self.cached(r))

    @property
    def cached_tokens(self) -> int:
        return sum(len(t) for t in self.tokens.values())

    @property
    def context_tokens(self) -> int:
        return sum(len(t) + 1 for t in self.tokens.values())

    @property
    def growth_blocks(self) -> int:
        return sum(self.growth_of(r) for r in self.requests.values())

    @property
    def first_token_s(self) -> np.ndarray:
        return np.array([r.first_token_s for r in self.order], dtype=float)

    @property
    def generated_offset(self) -> np.ndarray:
        return np.array([self.made[r.id] - self.iteration for r in self.order], dtype=float)

    def join(self, r: Request) -> None:
        self.requests[r.id] = r
        self.order.append(r)
        self.tokens[r.id] = [0] * (r.known_tokens - 1)
        self.made[r.id] = r.generated
        r.phase = r.phase.DECODE
        self.version += 1

    def leave(self, r: Request) -> int:
        r.generated = self.made.pop(r.id)
        del self.requests[r.id]
        self.order.remove(r)
        self.version += 1
        return len(self.tokens.pop(r.id))

    def advance(self) -> None:
        self.iteration += 1

    def step(self) -> None:
        for r in self.requests.values():
            self.tokens[r.id].append(0)
            self.made[r.id] += 1
        self.version += 1  # nothing here stays valid over an iteration


class NaiveState(SystemState):
    """The transitions of SystemState over the naive batch."""

    def __init__(self, model: Any, *args: Any) -> None:
        super().__init__(*args)
        self.decode = NaiveDecodeBatch(model)  # type: ignore[assignment]

    def end_hybrid_decode(self, finished: Any) -> None:
        self.decode.step()  # type: ignore[attr-defined]
        super().end_hybrid_decode(finished)


def held_blocks(model: Any, state: SystemState) -> int:
    """Blocks that each request holds, found by walking all that hold any.

    A decode in flight holds room for the token that it computes, an admitted prompt for all its tokens.
    """
    decoding = DECODE in state.in_flight
    cached = [state.decode.cached(r) + decoding for r in state.decode.requests.values()]
    cached += [r.known_tokens - 1 for r in state.ready]
    cached += [r.known_tokens for r in state.prefill.requests] if state.prefill is not None else []
    return sum(pages(model, tokens) for tokens in cached)


def two_lane(policy: Any, device: Any, splits: Any, blocks: int, rows: list[tuple[float, int, int]], slo_s: float,
             delay_s: float, reconfigure_s: float) -> dict[int, tuple[list[float], int]]:
    """Token times and preemptions by request."""
    n = splits.num_sms
    model = device.model
    state = NaiveState(model, splits, kv_cache_of(model, blocks * BLOCK), model.num_layers, Partition(n, n))
    tokens: dict[int, list[float]] = {i: [] for i in range(len(rows))}
    requests: dict[int, Request] = {}
    arrived = finished = 0
    now = 0.0
    flights: dict[str, dict[str, Any]] = {}
    last_sms: dict[str, int] = {}
    waits: dict[str, float] = {}
    writes: list[tuple[float, str, Published | None, Partition | None]] = []

    def look(lane: str) -> None:
        """What a lane can see: its own writes at once, the other's after the delay; the latest wins."""
        state.target, at = Partition(n, n), -1.0
        state.prefill_published = state.decode_published = Published()
        for when, writer, published, target in writes:
            if writer != lane and when + delay_s > now:
                continue
            if target is not None and when >= at:
                state.target, at = target, when
            if published is not None:
                if writer == PREFILL:
                    state.prefill_published = published
                else:
                    state.decode_published = published

    def durations() -> None:
        both = flights.get(PREFILL), flights.get(DECODE)
        if both[0] and both[1]:
            pair = device.corun_seconds(both[0]["work"], both[0]["sms"], both[1]["work"], both[1]["sms"])
            both[0]["takes"], both[1]["takes"] = pair[0] + both[0]["extra"], pair[1] + both[1]["extra"]
        else:
            for flight in flights.values():
                flight["takes"] = device.solo_seconds(flight["work"], flight["sms"]) + flight["extra"]

    while finished < len(rows):
        ends = {lane: now + f["left"] * f["takes"] for lane, f in flights.items()}
        upcoming = list(ends.values())
        if len(flights) < 2:
            upcoming += [rows[arrived][0]] if arrived < len(rows) else []
            upcoming += list(waits.values())
        then = min(upcoming)
        for f in flights.values():
            f["left"] -= (then - now) / f["takes"]
        now = then
        for lane in (PREFILL, DECODE):
            if lane not in flights or ends[lane] > now:
                continue
            flight = flights.pop(lane)
            if lane == PREFILL:
                for r in state.finish_prefill(now):
                    tokens[r.id].append(now)
                    if len(tokens[r.id]) == rows[r.id][2]:
                        state.release(r)
                        finished += 1
            else:
                done = []
                for r in state.decode.requests.values():
                    tokens[r.id].append(now)
                    if len(tokens[r.id]) == rows[r.id][2]:
                        done.append(r)
                state.finish_decode(done)
                finished += len(done)
            policy.observe(flight["step"], now - flight["start"])
        while arrived < len(rows) and rows[arrived][0] <= now:
            requests[arrived] = Request(arrived, rows[arrived][0], rows[arrived][1], slo_s)
            state.arrive(requests[arrived])
            arrived += 1
        for lane in (PREFILL, DECODE):
            busy = lane in flights
            some = (state.prefill or len(state.queue)) if lane == PREFILL else (len(state.decode) or state.ready)
            if busy or not some:
                continue
            writes = writes[-400:]
            look(lane)
            step = policy.next_step(lane, state, now)
            waits.pop(lane, None)
            if step.published is not None or step.target is not None:
                writes.append((now, lane, step.published, step.target))
            if isinstance(step, Wait):
                if step.until_s is not None:
                    waits[lane] = step.until_s
                continue
            if isinstance(step, PrefillStep):
                state.begin_prefill(step, now)
                batch = state.prefill
                assert batch is not None
                last = step.layers == batch.layers_left
                work = device.prefill_work([(t, 0) for t in batch.tokens], step.layers, logits_seqs=len(batch.tokens) * last)
            else:
                assert isinstance(step, DecodeStep)
                state.begin_decode(step, now)
                contexts = [state.decode.cached(r) + 1 for r in state.decode.requests.values()]
                work = device.decode_work(len(contexts), sum(contexts), **told(model, contexts))
            extra = reconfigure_s if last_sms.get(lane, step.sms) != step.sms else 0.0
            last_sms[lane] = step.sms
            flights[lane] = {"step": step, "work": work, "sms": step.sms, "left": 1.0, "start": now, "extra": extra}
            state.in_flight[lane] = InFlight(step, now)
        durations()
        assert state.kv.used_blocks == held_blocks(model, state), f"at {now}"
    return {i: (tokens[i], requests[i].preemptions) for i in tokens}
