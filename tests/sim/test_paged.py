"""vllm-N with named blocks: two steps in flight, preemption, admission, against worked examples and the ordinary driver."""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from bullet.catalog.gpus import GPUS
from bullet.catalog.models import MODELS
from bullet.errors import ConfigError
from bullet.policies.base import PolicyContext
from bullet.policies.vllm import Vllm
from bullet.sim.run import simulate
from bullet.state import Chunk, HybridStep, SplitTable
from bullet.state.prefix import Paging, PrefixKvCache
from tests import worlds


class TokenDevice(worlds.FixedDevice):
    """A step takes ``fixed`` seconds and ``per_token`` for each of its tokens, whatever they are."""

    def __init__(self, fixed: float, per_token: float = 0.0) -> None:
        super().__init__(lambda kind, tokens, sms: fixed + per_token * tokens)

    def hybrid_work(self, pieces: Any, num_seqs: int, context_tokens: int, *, logits_seqs: int) -> Any:
        return ("step", sum(new for new, _ in pieces) + num_seqs, 1.0)

    def decode_work(self, num_seqs: int, context_tokens: int) -> Any:
        return ("step", num_seqs, 1.0)


def play(rows: Any, blocks: int, *, budget: int = 256, device: Any = None, shared: Any = None, paging: Paging | None = None,
         seed: int = 0, **options: Any) -> tuple[worlds.RunOutcome, list[tuple[float, HybridStep]]]:
    """Run rows; the outcome, and each step with the time of its decision. Steps take 1 s if nothing else is said."""
    log: list[tuple[float, HybridStep]] = []

    def record(kind: str, what: Any) -> None:
        if kind == "next_step" and isinstance(what[3], HybridStep):
            log.append((what[2], what[3]))

    options = {"max_num_seqs": 8, **options}
    policy = Vllm(PolicyContext(MODELS["llama-3.1-8b"], GPUS["a100-80gb"], SplitTable.every(108), 0.2, None, options), budget)
    if paging is not None:
        policy.paging = paging
    workload = dataclasses.replace(worlds.workload(rows), shared_prefix=shared)
    outcome = simulate(worlds.config(f"vllm-{budget}", device__kv_tokens=16 * blocks, seed=seed), workload=workload,
                       device=device or TokenDevice(1.0), policy=policy, record=record)
    assert (outcome.requests["status"] == "finished").all()
    assert outcome.device["queue_integral_s"] == pytest.approx(outcome.device["wait_sum_s"])  # I11
    return outcome, log


def test_an_arrival_waits_for_the_step_that_was_decided_before_it() -> None:
    rows = [(0.0, 10, 5), (0.5, 10, 1)]
    # One in flight: noticed at 1, computed in [1, 2]. Two: the step [1, 2] was decided at 0, so [2, 3].
    one, _ = play(rows, 10, admission="check", steps_in_flight=1)
    two, log = play(rows, 10, admission="check", steps_in_flight=2)
    assert worlds.times(one) == {0: (1.0, 5.0), 1: (2.0, 2.0)}
    assert worlds.times(two) == {0: (1.0, 5.0), 1: (3.0, 3.0)}
    assert [at for at, _ in log] == [0.0, 0.0, 1.0, 2.0, 3.0]  # an idle engine decides two steps at once
    assert log[2][1].chunks == (Chunk(0, 1, 11), Chunk(1, 10, 0))


def test_a_request_with_its_last_token_in_flight_is_scheduled_no_more() -> None:
    outcome, log = play([(0.0, 10, 3), (0.0, 10, 6)], 10, steps_in_flight=2)
    assert worlds.times(outcome) == {0: (1.0, 3.0), 1: (1.0, 6.0)}
    assert [[c.request_id for c in step.chunks] for _, step in log] == [[0, 1], [0, 1], [0, 1], [1], [1], [1]]
    assert [at for at, _ in log] == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0]  # none at 5: request 1's last token is in flight


def test_a_preempted_request_still_gets_its_token_in_flight_and_hits_its_own_blocks() -> None:
    # Two prompts of 31 tokens fill 4 blocks. The third step needs a fifth: request 1 goes while its second token is in flight.
    outcome, log = play([(0.0, 31, 4), (0.0, 31, 4)], 4, admission="check", steps_in_flight=2, prefix_cache=True)
    preempting = log[2]
    assert preempting == (1.0, HybridStep(108, (Chunk(0, 1, 32),), False, preempt=(1,), reason="preempt"))
    # Request 0 took the free queue's head, request 1's second block. It ends at 4; request 1's 33 tokens hit their first block.
    assert log[4] == (4.0, HybridStep(108, (Chunk(1, 17, 16),), False))
    assert worlds.times(outcome) == {0: (1.0, 4.0), 1: (1.0, 6.0)}
    # tokens of request 1 at 1, 2 (delivered though preempted), 5, 6: gaps 1, 3, 1; of request 0: 1, 1, 1
    assert sorted(zip(outcome.itl_s.tolist(), outcome.itl_counts.tolist(), strict=True)) == [
        (1.0, 1), (1.0, 1), (1.0, 1), (1.0, 2), (3.0, 1)]
    # Without a cache all 33 known tokens are computed again.
    _, log = play([(0.0, 31, 4), (0.0, 31, 4)], 4, admission="check", steps_in_flight=2)
    assert log[4] == (4.0, HybridStep(108, (Chunk(1, 33, 0),), False))


def test_a_request_may_end_while_it_waits() -> None:
    # As above with 2 output tokens: request 1 is preempted while its last token is in flight.
    outcome, _ = play([(0.0, 31, 4), (0.0, 31, 2)], 4, admission="check", steps_in_flight=2)
    assert worlds.times(outcome) == {0: (1.0, 4.0), 1: (1.0, 2.0)}
    assert outcome.requests["preemptions"].sum() == 1


def test_the_tail_goes_first_and_the_last_to_go_is_first_in_line() -> None:
    # 5 blocks: 2, 2 and 1. At the third step request 0 takes the block of request 2, and request 1 finds none for itself.
    _, log = play([(0.0, 31, 4), (0.0, 31, 4), (0.0, 10, 9)], 5, admission="check")
    assert log[2][1].preempt == (2, 1)
    assert log[2][1].chunks == (Chunk(0, 1, 32),)
    back = [c.request_id for _, step in log[3:] for c in step.chunks if c.past_tokens == 0]
    assert back == [1, 2]
    _, log = play([(0.0, 31, 4), (0.0, 31, 4), (0.0, 10, 9)], 5, admission="check", resume="back")
    back = [c.request_id for _, step in log[3:] for c in step.chunks if c.past_tokens == 0]
    assert back == [2, 1]


@pytest.mark.parametrize(("admission", "first_chunk_at", "held"), [("reserve", 3.0, 3), ("check", 3.0, 1), ("chunk", 1.0, 1)])
def test_what_admission_asks_of_a_prompt(admission: str, first_chunk_at: float, held: int) -> None:
    """4 blocks, 2 held by request 0 until 3; request 1 has 3 blocks of prompt, in chunks of one block."""
    _, log = play([(0.0, 16, 3), (0.5, 48, 1)], 4, budget=16, admission=admission, prefix_cache=True)
    at, step = next((at, step) for at, step in log if any(c.request_id == 1 for c in step.chunks))
    assert at == first_chunk_at
    assert max(c.new_tokens for c in step.chunks if c.request_id == 1) == (16 if at == 3.0 else 15)
    rows = play([(0.0, 48, 1)], 4, budget=16, admission=admission, prefix_cache=True)[0].steps["kv_used_blocks"]
    assert rows[0] == held


def test_a_shared_prompt_is_computed_once() -> None:
    rows = [(0.0, 64, 2), (5.0, 70, 1), (6.5, 64, 1)]
    _, log = play(rows, 20, prefix_cache=True, shared={1: (0, 4), 2: (0, 4)})
    assert [step.chunks for _, step in log] == [(Chunk(0, 64, 0),), (Chunk(0, 1, 64),), (Chunk(1, 6, 64),), (Chunk(2, 16, 48),)]


def test_blocks_of_the_same_step_are_hit_already() -> None:
    _, log = play([(0.0, 40, 1), (0.0, 40, 1)], 20, prefix_cache=True, shared={1: (0, 2)})
    assert log[0][1].chunks == (Chunk(0, 40, 0), Chunk(1, 8, 32))


def test_options_are_checked() -> None:
    for name, value in (("admission", "never"), ("steps_in_flight", 3), ("resume", "middle")):
        with pytest.raises(ConfigError, match=rf"policy.options.{name} = .*must be"):
            play([(0.0, 10, 1)], 4, **{name: value})


def test_paging_is_for_one_lane() -> None:
    policy = Vllm(PolicyContext(MODELS["llama-3.1-8b"], GPUS["a100-80gb"], SplitTable.every(108), 0.2), 256)
    policy.paging = (True, False)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"must be a bullet\.state\.prefix\.Paging"):
        worlds.run_with(policy, [(0.0, 10, 1)])


def random_rows(seed: int, count: int = 60) -> list[tuple[float, int, int]]:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(0.05, count))
    return [(float(a), int(p), int(o)) for a, p, o in zip(arrival, rng.integers(1, 200, count), rng.integers(1, 60, count),
                                                          strict=True)]


@pytest.mark.parametrize("admission", ["chunk", "reserve"])
@pytest.mark.parametrize("seed", range(4))
def test_named_blocks_without_any_option_are_the_ordinary_policy(seed: int, admission: str) -> None:
    """Nothing shared, one step in flight, blocks chunk by chunk or whole prompts reserved: two independent accounts of one
    engine."""
    rows, device = random_rows(seed), TokenDevice(0.01, 1e-4)
    counted, _ = play(rows, 40, budget=128, device=device, admission=admission)
    named, _ = play(rows, 40, budget=128, device=device, admission=admission,
                    paging=Paging(False, admission == "reserve", False, 1))
    assert counted.requests["preemptions"].sum() > 5
    a, b = worlds.times(counted), worlds.times(named)
    assert {i: pytest.approx(v, abs=1e-9) for i, v in a.items()} == b
    assert counted.requests["preemptions"].sum() == named.requests["preemptions"].sum()
    assert np.average(counted.itl_s, weights=counted.itl_counts) == pytest.approx(
        np.average(named.itl_s, weights=named.itl_counts))


@pytest.mark.parametrize("seed", range(6))
def test_random_worlds_keep_the_invariants(seed: int) -> None:
    """Every option, a crowded cache, prefixes shared at random: checked after every boundary (debug), all finish."""
    rng = np.random.default_rng(100 + seed)
    rows = random_rows(200 + seed)
    shared: dict[int, tuple[int, int]] = {}
    for i in range(1, len(rows)):
        donor = int(rng.integers(0, i))
        most = min(rows[i][1], rows[donor][1]) // 16
        if most and rng.random() < 0.6:
            shared[i] = (donor, int(rng.integers(1, most + 1)))
    options = {"prefix_cache": True, "admission": ("check", "chunk", "reserve")[seed % 3], "steps_in_flight": 1 + seed % 2,
               "resume": "front"}
    outcome, _ = play(rows, 30, budget=128, device=TokenDevice(0.01, 1e-4), shared=shared, **options)
    assert (outcome.requests["generated_tokens"] == outcome.requests["output_tokens"]).all()
    assert outcome.itl_counts.sum() == sum(o - 1 for _, _, o in rows)
    again, _ = play(rows, 30, budget=128, device=TokenDevice(0.01, 1e-4), shared=shared, **options)
    assert worlds.times(again) == worlds.times(outcome)


def test_a_recorded_run_replays_into_a_fresh_policy() -> None:
    """States as they were, decisions as they were: the policy remembers nothing and changes nothing."""
    options = {"max_num_seqs": 8, "prefix_cache": True, "admission": "check", "steps_in_flight": 2}
    policy = Vllm(PolicyContext(MODELS["llama-3.1-8b"], GPUS["a100-80gb"], SplitTable.every(108), 0.2, None, options), 128)
    asked = 0

    def record(kind: str, what: Any) -> None:
        nonlocal asked
        if kind == "next_step":
            lane, state, now, decision = what
            before = deepcopy(state.blocks)
            assert policy.next_step(lane, state, now) == decision
            for name in PrefixKvCache.__slots__:
                assert getattr(state.blocks, name) == getattr(before, name)
            asked += 1

    simulate(worlds.config("vllm-128", device__kv_tokens=640, policy__options=options), device=TokenDevice(0.01, 1e-4),
             workload=worlds.workload(random_rows(7)), record=record)
    assert asked > 100
