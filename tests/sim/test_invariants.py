"""DESIGN's numbered invariants under random traces and configurations, and what other simulators got wrong."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet.errors import ConfigError, NoProgressError
from bullet.estimators.make import make_estimator
from bullet.policies import make_policy
from bullet.policies.base import PolicyContext
from bullet.results.folder import RunWriter
from bullet.sim.run import simulate
from bullet.state import HYBRID, Chunk, HybridStep, SplitTable, Step, SystemState, Wait
from tests.worlds import A100, config, run, run_with, workload

POLICIES = ("bullet", "bullet-literal", "bullet-plus", "static-96", "static-54", "naive", "sglang-pdmux", "muxwise",
            "sglang", "sglang-512", "sglang-1024-mixed", "vllm-512")

requests = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 3000), st.integers(1, 60)), min_size=1, max_size=25).map(
    sorted)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(requests, st.sampled_from(POLICIES), st.sampled_from((3_200, 6_400, 400_000)), st.sampled_from((0.0, 0.00021, 0.02)),
       st.sampled_from((0.0, 0.1)), st.sampled_from((0.25, 0.5, 0.95)), st.sampled_from(("srm", "srm-blind", "oracle")))
def test_nothing_vanishes(rows: list[tuple[float, int, int]], policy: str, kv_tokens: int, delay_s: float, noise: float,
                          share: float, estimator: str) -> None:
    outcome = run(policy, rows, device__kv_tokens=kv_tokens, device__publish_delay_s=delay_s, device__noise_std=noise,
                  device__shared_prefill_share=share, policy__estimator=estimator)
    r, steps = outcome.requests, outcome.steps
    done = r["status"] == "finished"
    # I1, I2: each request once, finished with its true length or rejected by name.
    assert sorted(r["id"].tolist()) == list(range(len(rows)))
    assert all(r["reason"][~done] == "over_kv_capacity")
    assert np.array_equal(r["generated_tokens"][done], r["output_tokens"][done])
    for prompt, output, status in zip(r["prompt_tokens"], r["output_tokens"], r["status"], strict=True):
        assert (status == "rejected") == (-(-(prompt + output - 1) // 16) > kv_tokens // 16)
    # I3 (noise of 10 % may cut a step short), I6.
    if not noise:
        for arrival, first, prompt in zip(r["arrival_s"][done], r["first_token_s"][done], r["prompt_tokens"][done], strict=True):
            assert first - arrival >= A100.min_prefill_seconds(int(prompt)) * (1 - 1e-9)
    assert np.all(r["finish_s"][done] >= r["first_token_s"][done])
    assert np.all(steps["end_s"] > steps["start_s"])
    assert np.all(np.diff(steps["end_s"]) >= 0)
    # I5: SM-seconds add up to N x span. I11: queue integral = sum of waits. Gaps: one for each token but the first.
    assert sum(outcome.sm_seconds.values()) == pytest.approx(outcome.num_sms * outcome.span_s, rel=1e-6, abs=1e-9)
    assert outcome.device["queue_integral_s"] == pytest.approx(outcome.device["wait_sum_s"], rel=1e-6, abs=1e-9)
    assert outcome.itl_counts.sum() == (r["generated_tokens"][done] - 1).sum()
    assert (outcome.itl_s * outcome.itl_counts).sum() == pytest.approx((r["finish_s"] - r["first_token_s"])[done].sum())
    # One step at a time in a lane.
    for lane in set(steps["lane"].tolist()):
        chosen = steps["lane"] == lane
        order = np.argsort(steps["start_s"][chosen])
        assert np.all(steps["end_s"][chosen][order][:-1] <= steps["start_s"][chosen][order][1:])


@pytest.mark.parametrize("policy", POLICIES)
def test_one_prompt_larger_than_the_cache_is_rejected_and_the_rest_finish(policy: str) -> None:
    """LESSONS: three simulators hang on it, one exits 0 with 1 of 3 done."""
    outcome = run(policy, [(0.0, 100, 5), (0.1, 5000, 5), (0.2, 100, 5)], device__kv_tokens=1600)
    found = dict(zip(outcome.requests["id"].tolist(), outcome.requests["status"].tolist(), strict=True))
    assert found == {0: "finished", 1: "rejected", 2: "finished"}


def test_a_prompt_over_the_context_is_rejected_by_name() -> None:
    """vidur#60: a trace exceeds the context."""
    outcome = run("vllm-1024", [(0.0, 131_000, 100), (0.0, 10, 2)])
    assert sorted(outcome.requests["reason"].tolist()) == ["", "over_context"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_of_exactly_the_cache_is_served(policy: str) -> None:
    outcome = run(policy, [(0.0, 1000, 24), (0.0, 16, 3)], device__kv_tokens=1024)  # 1,023 tokens need 64 blocks of 64
    assert outcome.requests["status"].tolist() == ["finished", "finished"]


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_at_time_zero_and_all_at_once(policy: str) -> None:
    """splitwise-sim fails on a request at t = 0."""
    outcome = run(policy, [(0.0, 50, 1)] * 5 + [(0.0, 700, 7)] * 5)
    assert set(outcome.requests["status"].tolist()) == {"finished"}


def test_no_requests_is_no_error() -> None:
    assert len(run("bullet", []).requests) == 0


@pytest.mark.parametrize("policy", ["vllm-512", "sglang-512-mixed", "static-96", "bullet"])
def test_tpot_counts_preemption_and_itl_counts_each_gap_once(policy: str) -> None:
    """inference-sim#1095, aisimulate#109: metrics from timestamps, waits between tokens included."""
    rows = [(0.0, 400, 300)] * 8
    options = {"assumed_new_tokens": 16} if policy.startswith("sglang") else {}  # else it sets enough aside
    outcome = run(policy, rows, device__kv_tokens=3_840, policy__options=options)
    r = outcome.requests
    assert r["preemptions"].sum() > 0
    assert outcome.itl_counts.sum() == 8 * 299
    assert (outcome.itl_s * outcome.itl_counts).sum() == pytest.approx((r["finish_s"] - r["first_token_s"]).sum())


# ------------------------------------------------------------------------------- policies that misbehave


class Bad:
    """Serves nothing; subclasses misbehave in one way each."""

    lanes: tuple[str, ...] = (HYBRID,)

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
        return Wait()

    def observe(self, step: Step, elapsed_s: float) -> None:
        pass


class Past(Bad):
    def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
        return Wait(now_s)


class Greedy(Bad):
    def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
        return HybridStep(109, (Chunk(state.queue[0].id, 10, 0),), False)


class Restless(Bad):
    """Evicts its only prompt before each chunk: LLMServingSim#55, inference-sim#1057, endless eviction."""

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
        if state.chunked:
            victim = state.chunked[0].id
            return HybridStep(108, (Chunk(victim, 10, 0),), False, preempt=(victim,))
        return HybridStep(108, (Chunk(state.queue[0].id, 10, 0),), False)


@pytest.mark.parametrize(("policy", "message"), [
    (Bad(), "makes no progress.*0 of 1 requests closed, 1 waiting.*KV"), (Past(), "already past"),
    (Greedy(), "asked for 109 SMs"),
    (Restless(), "preemptions without one new token")])
def test_a_stuck_run_stops_and_shows_its_state(policy: Any, message: str) -> None:
    with pytest.raises(NoProgressError, match=message):
        run_with(policy, [(0.0, 100, 2)], debug=False)


def test_lanes_must_be_known() -> None:
    policy = Bad()
    policy.lanes = ("up", "down")
    with pytest.raises(ConfigError, match="lanes"):
        run_with(policy, [(0.0, 100, 2)])


# ------------------------------------------------------------------------------------ determinism, replay

LOAD = [(0.05 * i, 200 + 137 * (i % 11), 1 + 7 * (i % 13)) for i in range(120)]


@pytest.mark.parametrize("policy", ["bullet", "vllm-512", "static-84"])
def test_same_seed_same_bytes_cached_or_not(policy: str, tmp_path: Path) -> None:
    """I7; SPEED's trap: a stale cache shows as a difference here."""
    plain = type(A100)(A100.model, A100.gpu, A100.coefficients, cache=False)
    for name, device in (("a", A100), ("b", A100), ("c", plain)):
        c = config(policy, debug=False, device__noise_std=0.05, device__kv_tokens=12_800)
        writer = RunWriter(tmp_path / name, part_rows=50)
        outcome = simulate(c, workload=workload(LOAD), device=device, writer=writer)
        writer.close(outcome, {}, {})
    for file in ("requests.parquet", "steps.parquet", "config.toml"):
        found = {(tmp_path / name / file).read_bytes() for name in "abc"}
        assert len(found) == 1, file


def test_noise_belongs_to_a_lane_and_a_step() -> None:
    """Another policy's extra steps in one lane do not shift the noise of the other."""
    quiet, noisy = (run("static-96", LOAD[:30], device__noise_std=n) for n in (0.0, 0.1))
    assert noisy.steps["actual_s"].tolist() != quiet.steps["actual_s"].tolist()
    again = run("static-96", LOAD[:30], device__noise_std=0.1)
    assert noisy.steps["actual_s"].tolist() == again.steps["actual_s"].tolist()


@pytest.mark.parametrize("name", ["bullet", "bullet-literal", "static-96", "sglang-512"])
def test_recorded_states_replay_into_a_fresh_policy(name: str) -> None:
    """Honesty rule 3; and a policy leaves the state as it found it."""
    record: list[tuple[str, Any]] = []
    splits = SplitTable.every(108)

    def fresh() -> Any:
        estimator = make_estimator("srm", device=A100, model=A100.model, gpu=A100.gpu, splits=splits, seed=0)
        return make_policy(name, PolicyContext(A100.model, A100.gpu, splits, 0.15, estimator))

    live = fresh()

    class Recorded:
        lanes = live.lanes

        def next_step(self, lane: str, state: SystemState, now_s: float) -> Any:
            before = copy.deepcopy(state)
            decision = live.next_step(lane, state, now_s)
            record.append(("next_step", (lane, before, now_s, decision)))
            assert state.queue.version == before.queue.version
            assert state.decode.version == before.decode.version
            assert state.kv.free_blocks == before.kv.free_blocks
            return decision

        def observe(self, step: Step, elapsed_s: float) -> None:
            record.append(("observe", (step, elapsed_s)))
            live.observe(step, elapsed_s)

    run_with(Recorded(), LOAD[:60], device__kv_tokens=12_800)
    again = fresh()
    decisions = 0
    for kind, arguments in record:
        if kind == "observe":
            again.observe(*arguments)
        else:
            lane, state, now_s, decision = arguments
            assert again.next_step(lane, state, now_s) == decision
            decisions += 1
    assert decisions > 100
