"""A driver without time: carries out what a policy says, one step at a time, and checks the state after each transition."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from bullet.catalog.gpus import GPUS
from bullet.catalog.models import MODELS
from bullet.policies import make_policy
from bullet.policies.base import PolicyContext
from bullet.state import DECODE, HYBRID, PREFILL, Decision, KvCache, Partition, Request, SplitTable, SystemState, Wait

SPLITS = SplitTable.every(108)
Row = tuple[int, int, int]  # boundary at which it arrives, prompt tokens, output tokens


def build(name: str, **options: Any) -> Any:
    """A policy for a tiny model on 108 SMs."""
    return make_policy(name, PolicyContext(MODELS["tiny"], GPUS["a100-80gb"], SPLITS, 0.2, None, options))


class World:
    """Requests in order of arrival; what cannot ever fit in ``blocks`` is left out, as drivers do."""

    def __init__(self, rows: Sequence[Row], blocks: int) -> None:
        self.state = SystemState(SPLITS, KvCache(blocks), 8, Partition(108, 108))
        self.rows = [row for row in sorted(rows, key=lambda r: r[0]) if -(-(row[1] + row[2] - 1) // 16) <= blocks]
        self.requests = [Request(i, float(row[0]), row[1], 1.0) for i, row in enumerate(self.rows)]
        self.arrived = 0
        self.made = [0] * len(self.rows)
        self.log: list[tuple[str, Decision]] = []

    @property
    def done(self) -> bool:
        return all(made == row[2] for made, row in zip(self.made, self.rows, strict=True))

    def arrive(self, boundary: int) -> None:
        while self.arrived < len(self.rows) and self.rows[self.arrived][0] <= boundary:
            self.state.arrive(self.requests[self.arrived])
            self.arrived += 1

    def token(self, request: Request) -> bool:
        """One more token; whether it was the last."""
        self.made[request.id] += 1
        assert self.made[request.id] <= self.rows[request.id][2]
        return self.made[request.id] == self.rows[request.id][2]

    def run_hybrid(self, policy: Any, limit: int = 20_000) -> World:
        """Until all is done. Every step must be legal, take no more KV than there is, and do something."""
        state = self.state
        for boundary in range(limit):
            self.arrive(boundary)
            if self.done:
                return self
            if not (state.queue.requests or state.chunked or state.decode.size):
                continue
            step = policy.next_step(HYBRID, state, float(boundary))
            self.log.append((HYBRID, step))
            assert not isinstance(step, Wait), f"{step} with {state.queue.requests}, nothing running"
            state.begin_hybrid(step, float(boundary))
            state.check()
            complete = state.finish_hybrid(boundary + 0.5)
            if step.decode and state.decode.size:
                state.end_hybrid_decode([r for r in list(state.decode.requests.values()) if self.token(r)])
            for request in complete:
                if self.token(request):
                    state.release(request)
                else:
                    state.join_decode(request)
            state.check()
            policy.observe(step, 0.5)
        raise AssertionError(f"not done after {limit} steps: {self.made} of {self.rows}")

    def run_two_lanes(self, policy: Any, seed: int, limit: int = 40_000) -> World:
        """As above for two lanes, which end their steps in random order."""
        state, rng = self.state, random.Random(seed)
        idle = 0
        for boundary in range(limit):
            self.arrive(boundary)
            if self.done:
                return self
            now = float(boundary)
            for lane in (PREFILL, DECODE):
                work = (state.prefill or len(state.queue)) if lane == PREFILL else state.decode_seqs
                if lane in state.in_flight or not work:
                    continue
                step = policy.next_step(lane, state, now)
                self.log.append((lane, step))
                if isinstance(step, Wait):
                    continue
                (state.begin_prefill if lane == PREFILL else state.begin_decode)(step, now)
                state.check()
            if not state.in_flight:
                idle += 1
                assert idle < 3 or self.arrived < len(self.rows), f"stuck: {state.queue.requests}, {state.kv.free_blocks} free"
                continue
            idle = 0
            lane = rng.choice(sorted(state.in_flight))
            step = state.in_flight[lane].step
            if lane == PREFILL:
                for request in state.finish_prefill(now):
                    if self.token(request):
                        state.release(request)
            else:
                state.finish_decode([r for r in list(state.decode.requests.values()) if self.token(r)])
            state.check()
            policy.observe(step, 0.5)
        raise AssertionError(f"not done after {limit} boundaries: {self.made} of {self.rows}")
