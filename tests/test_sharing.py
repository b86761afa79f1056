"""Shared prefixes in a counted cache, against one that keeps every block's tokens and looks at all of them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from bullet.errors import ConfigError
from bullet.sim import run as sim_run
from bullet.sim.run import simulate
from bullet.state import KvCache, Request
from bullet.state.sharing import SharingKvCache
from bullet.workload import Workload
from tests.worlds import A100, config, times, workload

BLOCK = 16


class Brute(KvCache):
    """Each block: its tokens with all before them, who holds it, and when it was last let go. Everything is found by looking."""

    sharing = True

    def __init__(self, total: int, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(total)
        self.prompts, self.clock = prompts, itertools.count()
        self.blocks: list[dict[str, Any]] = []  # cached ones
        self.counted: dict[int, int] = {}  # request -> blocks without a name

    def content(self, request: Request, i: int) -> tuple[int, ...]:
        return tuple(self.prompts[request.id][:(i + 1) * BLOCK])

    def found(self, content: tuple[int, ...]) -> dict[str, Any] | None:
        return next((b for b in self.blocks if b["content"] == content), None)

    def matching(self, request: Request) -> list[dict[str, Any]]:
        found = []
        for i in range((request.known_tokens - 1) // BLOCK):
            block = self.found(self.content(request, i)) if (i + 1) * BLOCK <= request.prompt_tokens else None
            if block is None:
                break
            found.append(block)
        return found

    def recount(self) -> None:
        self.free_blocks = self.total_blocks - sum(self.counted.values()) - sum(bool(b["holders"]) for b in self.blocks)
        assert self.free_blocks >= 0
        self.peak_blocks = max(self.peak_blocks, self.total_blocks - self.free_blocks)
        while sum(not b["holders"] for b in self.blocks) > self.free_blocks:
            self.blocks.remove(min((b for b in self.blocks if not b["holders"]), key=lambda b: b["let_go"]))

    def past(self, request: Request) -> int:
        return len(self.matching(request)) * BLOCK

    def fresh(self, request: Request) -> int:
        return request.known_tokens - self.past(request)

    def blocks_to_admit(self, request: Request, pinned: set[Any]) -> int:
        found = self.matching(request)
        new = {b["content"] for b in found if not b["holders"]} - pinned
        pinned |= new
        return len(range(0, request.known_tokens, BLOCK)) - len(found) + len(new)

    def freed(self, request: Request, tokens: int) -> int:
        return len(range(0, tokens, BLOCK)) - sum(request.id in b["holders"] and len(b["holders"]) > 1 for b in self.blocks)

    def reserve(self, requests: Sequence[Request]) -> list[int]:
        past = []
        for request in requests:
            found = self.matching(request)
            for block in found:
                block["holders"].add(request.id)
            past.append(len(found) * BLOCK)
            self.asked_tokens += request.known_tokens
            self.hit_tokens += past[-1]
        for request, tokens in zip(requests, past, strict=True):
            self.counted[request.id] = len(range(0, request.known_tokens, BLOCK)) - tokens // BLOCK
            self.recount()
        return past

    def computed(self, request: Request, tokens: int) -> None:
        for i in range(min(tokens, request.prompt_tokens) // BLOCK):
            block = self.found(self.content(request, i))
            if block is None:
                self.blocks.append({"content": self.content(request, i), "holders": {request.id}, "let_go": -1})
                self.counted[request.id] -= 1
            elif request.id not in block["holders"]:
                block["holders"].add(request.id)
                self.counted[request.id] -= 1
        self.recount()

    def release(self, request: Request, tokens: int) -> None:
        held = sorted((b for b in self.blocks if request.id in b["holders"]), key=lambda b: -len(b["content"]))
        assert self.counted.pop(request.id) + len(held) == len(range(0, tokens, BLOCK))
        for block in held:
            block["holders"].discard(request.id)
            block["let_go"] = next(self.clock)
        self.recount()


def tree(count: int, seed: int, branch: int = 3, most: int = 12) -> list[list[int]]:
    """Prompts that begin as another does for some length, often not a whole block."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for i in range(count):
        begin = prompts[rng.randrange(len(prompts))] if prompts and rng.random() < 0.8 else []
        begin = begin[:rng.randrange(len(begin) + 1)]
        prompts.append([*begin, *(1000 * (i + 1) + j for j in range(rng.randint(1, most * BLOCK)))])
    return prompts


def shared_of(prompts: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """Request -> the first of those that share most full blocks with it, by comparing tokens."""
    shared = {}
    for i, prompt in enumerate(prompts):
        best = (0, -1)
        for donor in range(i):
            common = next((k for k, (a, b) in enumerate(zip(prompt, prompts[donor], strict=False)) if a != b),
                          min(len(prompt), len(prompts[donor])))
            best = max(best, (common // BLOCK, -donor))
        if best[0] > 0:
            shared[i] = (-best[1], best[0])
    return shared


@pytest.mark.parametrize("seed", range(30))
def test_against_a_cache_that_looks_at_all_tokens(seed: int) -> None:
    """Requests come, are computed in pieces, are preempted and end; hits, room and evictions agree at every step."""
    rng = random.Random(seed)
    prompts = tree(60, seed)
    total = rng.randint(14, 60)
    kv, brute = SharingKvCache(total, shared_of(prompts)), Brute(total, prompts)
    waiting = [Request(i, 0.0, len(prompt), 1.0) for i, prompt in enumerate(prompts)]
    running: dict[int, tuple[Request, int]] = {}
    for _ in range(400):
        action = rng.random()
        if action < 0.45 and waiting:
            group = [waiting[i] for i in sorted(rng.sample(range(len(waiting)), min(len(waiting), rng.randint(1, 3))))]
            pins: tuple[set[Any], set[Any]] = (set(), set())
            admitted: list[Request] = []
            taken = 0
            for request in group:
                costs = [cache.blocks_to_admit(request, pinned) for cache, pinned in zip((kv, brute), pins, strict=True)]
                assert costs[0] == costs[1]
                if taken + costs[0] > kv.free_blocks:
                    break
                taken += costs[0]
                admitted.append(request)
            before = kv.free_blocks
            past = kv.reserve(admitted)
            assert past == brute.reserve(admitted)
            assert kv.free_blocks == before - taken
            for request, there in zip(admitted, past, strict=True):
                waiting.remove(request)
                running[request.id] = (request, there)
        elif action < 0.8 and running:
            request, tokens = running[rng.choice(list(running))]
            tokens = min(request.known_tokens, tokens + rng.randint(1, 80))
            for cache in (kv, brute):
                cache.computed(request, tokens)
            running[request.id] = (request, tokens)
        elif running:
            request, _ = running.pop(rng.choice(list(running)))
            assert kv.freed(request, request.known_tokens) == brute.freed(request, request.known_tokens)
            for cache in (kv, brute):
                cache.release(request, request.known_tokens)
            if rng.random() < 0.3:
                waiting.append(request)
        assert kv.free_blocks == brute.free_blocks
        assert kv.check({i: (r, r.known_tokens) for i, (r, _) in running.items()}) == kv.used_blocks
        assert {i: kv.past(r) for i, r in enumerate(waiting)} == {i: brute.past(r) for i, r in enumerate(waiting)}
    assert kv.hit_tokens == brute.hit_tokens > 0


class Watched(SharingKvCache):
    """Asks the brute-force cache the same, all through a run. Blocks of generated tokens are taken for a whole batch at once:
    whose they are is only said when they are given up, and until then they stand under -1."""

    prompts: Sequence[Sequence[int]] = ()

    def __init__(self, total: int, shared: Any) -> None:
        super().__init__(total, shared)
        self.brute = Brute(total, self.prompts)
        self.brute.counted[-1] = 0  # what decodes have grown by

    def take(self, blocks: int) -> None:
        super().take(blocks)
        if self.growing:
            self.brute.counted[-1] += blocks
            self.brute.recount()

    growing = True

    def reserve(self, requests: Sequence[Request]) -> list[int]:
        self.growing = False
        past = super().reserve(requests)
        self.growing = True
        assert past == self.brute.reserve(requests)
        assert self.free_blocks == self.brute.free_blocks
        return past

    def computed(self, request: Request, tokens: int) -> None:
        self.growing = False
        super().computed(request, tokens)
        self.growing = True
        self.brute.computed(request, tokens)
        assert self.free_blocks == self.brute.free_blocks

    def release(self, request: Request, tokens: int) -> None:
        super().release(request, tokens)
        grown = len(range(0, tokens, BLOCK)) - self.brute.counted[request.id] - sum(
            request.id in b["holders"] for b in self.brute.blocks)
        self.brute.counted[-1] -= grown
        self.brute.counted[request.id] += grown
        self.brute.release(request, tokens)
        assert self.free_blocks == self.brute.free_blocks

    def past(self, request: Request) -> int:
        found = super().past(request)
        assert found == self.brute.past(request)
        return found


def world(count: int = 80, seed: int = 5) -> tuple[Workload, list[list[int]]]:
    prompts = tree(count, seed, most=40)
    rng = random.Random(seed)
    made = workload([(0.05 * i, len(prompt), rng.randint(1, 60)) for i, prompt in enumerate(prompts)])
    return dataclasses.replace(made, shared_prefix=shared_of(prompts)), prompts


@pytest.mark.parametrize(("policy", "options"), [
    ("sglang-512", {}), ("sglang-512", {"schedule_policy": "lpm"}), ("sglang-512-mixed", {}), ("static-96", {}), ("naive", {}),
    ("bullet", {}), ("bullet-literal", {})])
@pytest.mark.parametrize("kv_tokens", [4_000, 400_000])
def test_whole_runs_against_it(policy: str, options: dict[str, Any], kv_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    load, prompts = world()
    monkeypatch.setattr(Watched, "prompts", prompts)
    plain = simulate(config(policy, device__kv_tokens=kv_tokens, policy__options=options, policy__prefix_cache="off"),
                     workload=load, device=A100)
    monkeypatch.setattr(sim_run, "SharingKvCache", Watched)
    outcome = simulate(config(policy, device__kv_tokens=kv_tokens, policy__options=options), workload=load, device=A100)
    assert set(outcome.requests["status"].tolist()) == {"finished"}
    rate = outcome.device["prefix_hit_rate"]
    assert 0.1 < rate < 0.7
    assert plain.device["prefix_hit_rate"] is None
    if policy.startswith("sglang") and not outcome.requests["preemptions"].any():
        computed = int(outcome.steps["prefill_tokens"].sum())
        assert computed == round(int(load.prompt_tokens.sum()) * (1 - rate))
    assert outcome.requests["first_token_s"].mean() < plain.requests["first_token_s"].mean()


@pytest.mark.parametrize("policy", ["vllm-512", "sglang-512", "static-96", "bullet"])
def test_a_second_request_computes_what_is_new(policy: str) -> None:
    """Prompts of 400 and 500 tokens, the first 20 blocks (320 tokens) shared: the second computes 180 that see 320 cached."""
    load = dataclasses.replace(workload([(0.0, 400, 4), (5.0, 500, 4)]), shared_prefix={1: (0, 20)})
    outcome = simulate(config(policy), workload=load, device=A100)
    assert outcome.device["prefix_hit_rate"] == pytest.approx(320 / 900)
    found = times(outcome)
    work = A100.hybrid_work([(180, 320)], 0, 0, logits_seqs=1)
    assert found[1][0] - 5.0 == pytest.approx(A100.solo_seconds(work, 108), rel=0.02)
    assert int(outcome.steps["prefill_tokens"][outcome.steps["start_s"] >= 5].max()) == 180


def test_off_where_nothing_is_shared_and_where_it_is_said() -> None:
    rows = [(0.0, 400, 4), (5.0, 400, 4)]
    shared = dataclasses.replace(workload(rows), shared_prefix={1: (0, 20)})
    for load, asked, rate in ((workload(rows), "auto", None), (shared, "off", None), (shared, "auto", 0.4),
                              (workload(rows), "on", 0.0)):
        for policy in ("vllm-512", "sglang-512", "bullet"):
            found = simulate(config(policy, policy__prefix_cache=asked), workload=load, device=A100).device["prefix_hit_rate"]
            assert found == (rate if rate is None else pytest.approx(rate))


def test_a_policy_of_ones_own_shares_if_it_says_so() -> None:
    """It would start chunks at 0 otherwise."""
    from bullet.policies.base import PolicyContext
    from bullet.policies.chunked import Sglang
    from bullet.state import SplitTable

    class Mine(Sglang):
        shares_prefixes = False

    load = dataclasses.replace(workload([(0.0, 400, 4), (5.0, 400, 4)]), shared_prefix={1: (0, 20)})
    made = Mine(PolicyContext(A100.model, A100.gpu, SplitTable.every(108), 1.0), 512)
    assert simulate(config("sglang-512"), workload=load, device=A100, policy=made).device["prefix_hit_rate"] is None
    with pytest.raises(ConfigError, match="does not share prefixes"):
        simulate(config("sglang-512", policy__prefix_cache="on"), workload=load, device=A100, policy=made)


def test_longest_prefix_goes_first() -> None:
    """Three wait for a slot: the last to come shares most with what is cached and is served before the others."""
    load = dataclasses.replace(workload([(0.0, 3200, 40), (0.01, 3000, 2), (0.02, 3000, 2), (0.03, 3200, 2)]),
                               shared_prefix={3: (0, 190)})
    first = {}
    for order in ("fcfs", "lpm"):
        outcome = simulate(config("sglang-512", policy__options={"schedule_policy": order}), workload=load, device=A100)
        first[order] = {i: t[0] for i, t in times(outcome).items()}
    assert first["fcfs"][1] < first["fcfs"][2] < first["fcfs"][3]
    assert first["lpm"][3] < first["lpm"][1] < first["lpm"][2]


def test_sharing_that_cannot_be_is_refused() -> None:
    from bullet.errors import TraceError

    load = dataclasses.replace(workload([(0.0, 40, 2), (1.0, 400, 2)]), shared_prefix={1: (0, 20)})
    with pytest.raises(TraceError, match="share 20 blocks: must be 1 to 2"):
        simulate(config("sglang-512"), workload=load, device=A100)


