"""Random worlds, and our policies in them one step at a time: what each step serves, whom it preempts, what stays free."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.policies import make_policy
from bullet.policies.base import PolicyContext
from bullet.state import HYBRID, KvCache, Partition, Request, SplitTable, SystemState, Wait
from bullet.state.prefix import PagedState, PrefixKvCache
from bullet.state.sharing import SharingKvCache

BLOCK = 16
MOST_STEPS = 20_000
SPLITS = SplitTable.every(108)


class Row(NamedTuple):
    """A request: the step before which it arrives, its tokens, and how many full blocks it begins with as ``donor`` does."""

    at: int
    prompt: int
    output: int
    donor: int | None = None
    blocks: int = 0


class World(NamedTuple):
    """``blocks`` of 16 tokens of KV; ``budget`` tokens a step; ``seqs`` at most at once; ``caching``: prefixes are shared."""

    seed: int
    rows: tuple[Row, ...]
    blocks: int
    budget: int
    seqs: int
    caching: bool


class Outcome(NamedTuple):
    """A step: tokens by request, who was preempted, free blocks while it runs."""

    tokens: Mapping[int, int]
    preempted: frozenset[int]
    free: int


class Engine(Protocol):
    """Somebody's scheduler in a world."""

    def arrive(self, number: int) -> None: ...
    def idle(self) -> None: ...
    def step(self) -> Outcome | None: ...


def draw(seed: int, *, tight: bool, caching: bool = False, least_budget: int = 0, announced: int = 0) -> World:
    """Up to 14 requests of up to 400 tokens. ``tight``: the cache holds the largest and hardly more, else all at once;
    ``announced``: with so many tokens of output each, whatever they make."""
    rng = random.Random(seed)
    rows: list[Row] = []
    at = 0
    for number in range(rng.randint(1, 14)):
        at += rng.choice((0, 0, 1, rng.randint(0, 25)))
        row = Row(at, rng.randint(1, 400), rng.randint(1, rng.choice((4, 90))))
        if caching and number and rng.random() < 0.6:
            donor = rng.randrange(number)
            most = min(row.prompt, rows[donor].prompt) // BLOCK
            if most:
                row = row._replace(donor=donor, blocks=rng.randint(1, most))
        rows.append(row)
    needs = [-(-(row.prompt + max(row.output, announced) + 1) // BLOCK) for row in rows]
    seqs = rng.randint(1, 12)
    blocks = max(needs) + rng.randint(0, max(needs)) if tight else sum(needs) + 50
    budget = max(seqs, least_budget) + rng.choice((0, rng.randint(0, 60), rng.randint(0, 600)))
    return World(seed, tuple(rows), blocks, max(budget, 1), seqs, caching)


def tokens_of(world: World, number: int) -> list[int]:
    """A prompt's tokens: its own numbers, or its donor's where it begins alike."""
    row = world.rows[number]
    own = [number * 10_000 + i for i in range(row.prompt)]
    return own if row.donor is None else tokens_of(world, row.donor)[: row.blocks * BLOCK] + own[row.blocks * BLOCK:]


def make(name: str, options: Mapping[str, Any], gpu: str = "a100-80gb") -> Any:
    """A policy as the simulator makes it."""
    return make_policy(name, PolicyContext(get_model("llama-3.1-8b"), get_gpu(gpu), SPLITS, 0.2, None, dict(options)))


class Ours:
    """One of our policies on the state that drivers give it: counted blocks, or blocks with names where it asks for them."""

    def __init__(self, world: World, policy: Any, block_tokens: int = BLOCK) -> None:
        self.world, self.policy = world, policy
        shared = {i: (row.donor, row.blocks) for i, row in enumerate(world.rows) if row.donor is not None}
        whole = Partition(108, 108)
        paging = getattr(policy, "paging", None)
        self.state: SystemState
        if paging is not None:
            self.state = PagedState(SPLITS, PrefixKvCache(world.blocks, shared, caching=paging.prefix_cache,
                                                           uncached_first=paging.uncached_first), 32, whole, paging)
        else:
            blocks = world.blocks * BLOCK // block_tokens
            kv = SharingKvCache(blocks, shared, block_tokens) if world.caching else KvCache(blocks, block_tokens)
            self.state = SystemState(SPLITS, kv, 32, whole)
        self.requests = [Request(i, 0.0, row.prompt, 1.0) for i, row in enumerate(world.rows)]
        self.made = [0] * len(world.rows)
        self.clock, self.idled = 0.0, True

    def arrive(self, number: int) -> None:
        # While the last step ran, unless nothing did: a step lasts half of its unit of time.
        request = self.requests[number]
        request.arrival_s = request.queued_s = self.clock if self.idled else self.clock - 0.75
        self.state.arrive(request)

    def idle(self) -> None:
        self.clock += 1.0
        self.idled = True

    def ended(self, request: Request) -> bool:
        self.made[request.id] += 1
        return self.made[request.id] == self.world.rows[request.id].output

    def step(self) -> Outcome | None:
        state, now = self.state, self.clock
        self.clock += 1.0
        self.idled = False
        decision = self.policy.next_step(HYBRID, state, now)
        if isinstance(decision, Wait):
            return None
        tokens: dict[int, int] = {}
        if isinstance(state, PagedState):
            served = state.begin_paged(decision, now)
            tokens = {chunk.request_id: chunk.new_tokens for chunk in decision.chunks}
            found = Outcome(tokens, frozenset(decision.preempt), state.blocks.free_blocks)
            state.in_flight.clear()
            for request, gives in served:
                if gives:
                    state.deliver(request, now)
                    if self.ended(request):
                        state.finish(request)
        else:
            state.begin_hybrid(decision, now)
            if decision.decode:
                tokens = dict.fromkeys(state.decode.requests, 1)
            tokens |= {chunk.request_id: chunk.new_tokens for chunk in decision.chunks}
            found = Outcome(tokens, frozenset(decision.preempt), state.kv.free_blocks)
            complete = state.finish_hybrid(now)
            if decision.decode and state.decode.size:
                state.end_hybrid_decode([r for r in list(state.decode.requests.values()) if self.ended(r)])
            for request in complete:
                (state.release if self.ended(request) else state.join_decode)(request)
        self.policy.observe(decision, 0.5)
        return found


def compare(world: World, ours: Engine, theirs: Engine, same: Callable[[Outcome, Outcome], bool]) -> str | None:
    """Both through the world, step by step, until all is done or they differ: ``None``, or the first step that does."""
    arrived, done = 0, [0] * len(world.rows)
    for step in range(MOST_STEPS):
        while arrived < len(world.rows) and world.rows[arrived].at <= step:
            ours.arrive(arrived)
            theirs.arrive(arrived)
            arrived += 1
        if arrived == len(world.rows) and done == [row.output for row in world.rows]:
            return None
        if all(made == world.rows[i].output for i, made in enumerate(done) if i < arrived):
            ours.idle()  # nobody is there
            theirs.idle()
            continue
        a, b = ours.step(), theirs.step()
        if a is None and b is None:
            return f"world {world.seed}, step {step}: neither does anything"
        if a is None or b is None or not same(a, b):
            return f"world {world.seed}, step {step}: ours {a}, theirs {b}"
        done = list(ours.made)  # type: ignore[attr-defined]
    return f"world {world.seed}: not done after {MOST_STEPS} steps"
