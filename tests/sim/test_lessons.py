"""What users of other simulators report (shared notes, "lessons"), each line that applies here as a test that names it.

Elsewhere: refusing by name and stuck runs in test_driver.py and test_invariants.py; timestamps' origin and units in
tests/workload; provenance, versions and budgets of profiles (vidur#72, sarathi-serve#55) in tests/runtime and test_tables.py;
a GPU from its data sheet alone, labelled analytic (vidur#8), in test_device.py; errors for each GPU (aiconfigurator#1205) in
test_fit_profile.py.
"""

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.config import DeviceConfig
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import kv_capacity_tokens
from bullet.policies import describe
from bullet.results.columns import RunOutcome
from bullet.results.metrics import summarise
from bullet.results.tables import comparison_table
from bullet.results.timeline import perfetto_events
from bullet.sim.run import simulate
from bullet.state import DECODE, PREFILL, DecodeStep, PrefillStep, Step, SystemState, Wait
from tests.checks import finished, step_rows
from tests.worlds import A100, FixedDevice, config, run, run_with, workload

FAMILIES = ("bullet", "bullet-literal", "bullet-plus", "static-96", "naive", "sglang-pdmux", "muxwise", "sglang-512",
            "sglang-512-mixed", "vllm-512")
RNG = np.random.default_rng(2)
# About the device's speed, so that lanes overlap and queues form.
LOAD = [(float(t), int(p), int(o)) for t, p, o in zip(
    np.cumsum(RNG.exponential(0.12, 60)), RNG.choice([50, 800, 3000], 60), RNG.choice([1, 30, 150], 60), strict=True)]

SHARES = ("bullet", "static-96", "naive")
ALL = ("bullet", "static-96", "naive", "vllm-512", "sglang-512", "sglang-512-mixed")
KNOBS = {  # knob: (another value, the policies whose steps it changes; the others' must not move by a bit)
    "device__shared_prefill_share": (0.9, ("bullet", "static-96", "naive")),  # free tails share SMs for a moment
    "device__contention_scale": (3.0, SHARES),
    "device__publish_delay_s": (0.1, ("bullet",)),
    "device__reconfigure_s": (0.01, ("bullet", "static-96")),  # naive always holds all SMs
    "device__host_launch_s": (0.001, ALL),
    "device__device_launch_s": (0.001, ALL),
    "device__noise_std": (0.1, ALL),
    "device__tensor_parallel": (2, ALL),
    "device__gpu": ("h100", ALL),
    "device__kv_tokens": (4_000, ALL),
    "slo__tpot_s": (0.03, ("bullet",)),
    "slo__ttft_s_per_token": (1e-4, ("bullet",)),
    "slo__ttft_slo_policy": ("per_request", ("bullet",)),
    "policy__estimator": ("oracle", ("bullet",)),
    "policy__estimator_error": (1.5, ("bullet",)),
    "policy__recalibrate": (False, ("bullet",)),
    "debug": (True, ()),
    "device__memory_utilization": (0.5, ()),  # kv_tokens is given
}


# A tight TPOT objective: what decode publishes makes a difference.
BASE = {"debug": False, "device__kv_tokens": 100_000, "slo__tpot_s": 0.05}


def steps_of(name: str, **overrides: Any) -> list[tuple[Any, ...]]:
    return step_rows(simulate(config(name, **{**BASE, **overrides}), workload=workload(LOAD)))


@pytest.fixture(scope="module")
def base() -> dict[str, list[tuple[Any, ...]]]:
    return {name: steps_of(name) for name in ALL}


@pytest.mark.parametrize("knob", KNOBS)
def test_each_knob_changes_what_it_should_and_nothing_else(knob: str, base: dict[str, list[tuple[Any, ...]]]) -> None:
    """DistServe#13, #32: prefill's tensor parallelism passed as decode's."""
    value, changed = KNOBS[knob]
    for name in ALL:
        assert (steps_of(name, **{knob: value}) != base[name]) == (name in changed), name


@pytest.mark.parametrize(("name", "options"), [("vllm-512", {"admission": "reserve"}), ("sglang-512", {}),
                                               ("sglang-512-mixed", {})])
def test_a_chunked_prompt_reserves_all_its_blocks_at_admission(name: str, options: dict[str, str]) -> None:
    """dynamo#9718: over-admits chunked prefills, then thrashes.

    Two prompts of 4,000 tokens (250 blocks) in a cache of 400: the second waits until the first has finished, although
    for most of the time far fewer tokens are computed.
    """
    outcome = run(name, [(0.0, 4000, 20), (0.0, 4000, 20)], device__kv_tokens=6_400, policy__options=options)
    first, second = (finished(outcome)[i] for i in (0, 1))
    assert second["admitted_s"] >= first["finish_s"]
    assert (first["preemptions"], second["preemptions"]) == (0, 0)
    assert outcome.steps["kv_used_blocks"][0] == 250  # after the first chunk of 512 tokens


class HeldBack:
    """Prefills one prompt at a time; decodes only from t = 10 on."""

    lanes = (PREFILL, DECODE)

    def next_step(self, lane: str, state: SystemState, now_s: float) -> Step | Wait:
        if lane == DECODE:
            return Wait(10.0) if now_s < 10.0 else DecodeStep(54)
        return PrefillStep(54, 32, (state.queue[0].id,))

    def observe(self, step: Step, elapsed_s: float) -> None:
        pass


def test_waits_between_tokens_count_in_tpot_and_in_goodput() -> None:
    """aisimulate#109: TPOT left out queueing, goodput read 4/4 instead of 1/4.

    Prompts end at 1, 2, 3, 4 s. Decode begins at 10 and takes 1 s: tokens at 11, 12, 13. Request 3 has one token. The
    others: TPOT = (13 - 1) / 3, (13 - 2) / 3, (13 - 3) / 3 s, all over 1.5 s though each step took 1 s.
    """
    outcome = run_with(HeldBack(), [(0.0, 10, 4), (0.0, 10, 4), (0.0, 10, 4), (0.0, 10, 1)],
                       device=FixedDevice(lambda kind, tokens, sms: 1.0), slo__tpot_s=1.5, slo__ttft_s_per_token=1.0)
    summary = summarise(outcome)
    assert summary["mean_tpot_ms"] == pytest.approx(1000 * (12 + 11 + 10) / 9)
    assert summary["slo_attainment_per_request"] == 0.25
    assert summary["max_itl_ms"] == pytest.approx(10_000)  # request 0, from 1 to 11
    assert summary["mean_itl_ms"] == pytest.approx(1000 * (10 + 9 + 8 + 6 * 1) / 9)


@pytest.mark.parametrize("name", FAMILIES)
def test_under_memory_pressure_metrics_are_the_requests_own(name: str) -> None:
    """Vidur: P99 TPOT of 48.0 ms where the requests' lengths give 34.5; inference-sim#1095: gaps counted twice."""
    # SGLang sets room aside for what requests may generate: announced short, they outgrow it.
    options = {"assumed_new_tokens": 16} if name.startswith("sglang") else {}
    outcome = run(name, [(0.3 * (i // 10), 300, 250) for i in range(30)], device__kv_tokens=4_000, policy__options=options)
    done = list(finished(outcome).values())
    assert len(done) == 30
    assert sum(row["preemptions"] for row in done) > 0
    assert all(row["generated_tokens"] == 250 for row in done)
    summary = summarise(outcome)
    tpot = [(row["finish_s"] - row["first_token_s"]) / 249 for row in done]
    assert summary["p99_tpot_ms"] == pytest.approx(1000 * np.percentile(tpot, 99))
    # Every request has 249 gaps, whose mean is its TPOT: so the mean over all gaps is the mean TPOT.
    assert summary["mean_itl_ms"] == pytest.approx(1000 * np.mean(tpot))
    assert summary["preemptions"] == sum(row["preemptions"] for row in done)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_overloaded_run_serves_everything_and_counts_the_waiting(name: str) -> None:
    """inference-sim#1121: a silent 300 s timeout inflates throughput 45 times; Frontier loses 48 of 512 in decode.

    512 requests at once: minutes of work. Work conservation bounds what may come out: the last one cannot finish before
    all tokens were prefilled at the device's best speed.
    """
    rows = [(0.0, 4000, 2 + i % 3) for i in range(512)]
    outcome = run(name, rows, debug=False)
    summary = summarise(outcome)
    assert (summary["offered"], summary["completed"], summary["rejected"], summary["unfinished"]) == (512, 512, 0, 0)
    least_s = 512 * A100.min_prefill_seconds(4000)
    assert summary["duration"] > least_s > 100
    assert summary["request_throughput"] == pytest.approx(512 / summary["duration"])


@pytest.mark.parametrize("name", ["vllm-512", "sglang-512", "static-96", "bullet"])
def test_the_origin_of_time_does_not_matter(name: str) -> None:
    """inference-sim#1606: epoch and relative times mixed. All 2^20 s (12 days) later: the same run, 2^20 s later.

    Half an ulp at 2^20 is 6e-11 s; policies compare times, so only what rounding cannot reach is compared.
    """
    shift_s = 2.0**20
    rows = [(0.5 * i, 900, 5 + i % 7) for i in range(20)]
    early, late = run(name, rows), run(name, [(t + shift_s, p, o) for t, p, o in rows])
    assert len(early.steps) == len(late.steps)
    for column in ("arrival_s", "admitted_s", "first_token_s", "finish_s"):
        assert late.requests[column] - shift_s == pytest.approx(early.requests[column], abs=1e-6)
    assert late.span_s == pytest.approx(early.span_s, abs=1e-6)
    for key in ("queue_integral_s", "wait_sum_s"):
        assert late.device[key] == pytest.approx(early.device[key], abs=1e-5)
    for key, value in early.sm_seconds.items():
        assert late.sm_seconds[key] == pytest.approx(value, abs=1e-3)


def test_cache_blocks_are_worth_their_bytes() -> None:
    """LLMServingSim#29: bytes multiplied twice. Here 2 x 32 layers x 8 heads x 128 x 2 bytes = 131,072 a token."""
    model, gpu = get_model("llama-3.1-8b"), get_gpu("a100-80gb")
    assert model.kv_bytes_per_token == 131_072
    half, whole = (kv_capacity_tokens(model, gpu, dataclasses.replace(DeviceConfig(), reserve_bytes=reserve))
                   for reserve in (2**30 + 131_072 * 16_000, 2**30))
    assert whole - half == pytest.approx(16_000, abs=16)
    outcome = run("vllm-512", [(0.0, 33, 2)])
    assert outcome.steps["kv_used_blocks"].tolist() == [3, 3]  # ceil(33 / 16); the second token's cache fits the third


@pytest.mark.parametrize(("policy", "uncoupled"), [("static-96", False), ("static-54", False), ("static-96", True)])
def test_company_costs_time(policy: str, uncoupled: bool) -> None:
    """apex_plus#8: profiled alone, run together. Beside a prefill, decode takes longer than alone on the same SMs.

    Three couplings: clocks fall as more SMs are busy, the two share the bandwidth, and some of it is lost. A long prefill
    and a decode at batch 1 leave bandwidth over, so without the first and the last company costs nothing at all.
    """
    device = A100
    if uncoupled:
        alone = dataclasses.replace(A100.coefficients, rate_slope=0.0, contention_loss=0.0)
        device = DeviceModel(A100.model, A100.gpu, alone)
    steps = run(policy, [(0.0, 16, 120), (0.05, 8000, 1)], policy__options={"free_tails": False},
                device__reconfigure_s=0.0, device=device).steps
    decode = steps["lane"] == DECODE
    together = decode & (steps["corun_s"] > 0.99 * steps["actual_s"])
    alone_only = decode & (steps["corun_s"] == 0)
    assert together.sum() > 3
    assert alone_only.sum() > 3
    # The context grows by a token of 128 kB a step; 16 GB are moved: under 1e-3 over 120 steps.
    ratio = steps["actual_s"][together].min() / steps["actual_s"][alone_only].max()
    if uncoupled:
        assert ratio == pytest.approx(1.0, abs=1e-3)
    else:
        assert ratio > 1.04  # a slower clock costs a kernel time where it has waves to lose (bullet/devices/terms.py)


@pytest.mark.parametrize(("name", "engine"), [("vllm-N", r"vLLM \d+\.\d+\.\d+ \(V1\)"), ("sglang-N", r"SGLang \d+\.\d+\.\d+")])
def test_a_policy_names_the_engine_and_the_version_that_it_models(name: str, engine: str) -> None:
    """vidur#60: P50 700 % off a newer vLLM. (A trace that exceeds the context is refused by name: test_invariants.py.)"""
    assert re.match(engine, dict(describe())[name])


@pytest.mark.parametrize("name", ["vllm-512", "sglang-512", "static-96", "naive"])
def test_host_gaps_are_a_parameter_of_their_own(name: str) -> None:
    """vidur#51: CPU overhead cannot be profiled. Here it is seconds a step, in nothing else: 1 ms more of it, and each of a
    request's steps takes 1 ms more; a prefill cut by layers has its share in each, 1 ms in all.

    One request at a time: a chunk of 300 tokens (or 32 layers), then 19 iterations.
    """
    rows = [(10.0 * i, 300, 20) for i in range(3)]
    device = DeviceModel(A100.model, A100.gpu, dataclasses.replace(
        A100.coefficients, host_gap_s=A100.coefficients.host_gap_s + 1e-3))
    before, after = (finished(run(name, rows, device=d)) for d in (A100, device))
    for i in before:
        assert after[i]["first_token_s"] - before[i]["first_token_s"] == pytest.approx(1e-3, abs=1e-9)
        assert after[i]["finish_s"] - before[i]["finish_s"] == pytest.approx(20e-3, abs=1e-9)


def test_errors_that_cancel_in_sums_show_in_their_own_figures() -> None:
    """LLMServingSim#59: TTFT -87.5 %, TPOT +173.5 %, end to end only -14.7 %: each metric is printed by itself.

    Prefill 8 s, 10 iterations of 0.8 s; against prefill 1 s and iterations of 1.5 s: 16 s end to end in both.
    """
    def outcome(prefill_s: float, decode_s: float) -> RunOutcome:
        seconds = FixedDevice(lambda kind, tokens, sms: prefill_s if kind == "prefill" else decode_s)
        return run("static-54", [(0.0, 10, 11)], device=seconds)

    real, wrong = (summarise(outcome(*each)) for each in ((8.0, 0.8), (1.0, 1.5)))
    assert real["mean_e2el_ms"] == pytest.approx(wrong["mean_e2el_ms"]) == pytest.approx(16_000)
    assert wrong["mean_ttft_ms"] / real["mean_ttft_ms"] == pytest.approx(1 / 8)
    assert wrong["mean_tpot_ms"] / real["mean_tpot_ms"] == pytest.approx(1.5 / 0.8)
    shown = [line.split() for line in comparison_table([real, wrong], 150).splitlines() if line.startswith("static-54")]
    assert [("8000" in row, "800.0" in row, "1000" in row, "1500.0" in row) for row in shown] == [
        (True, True, False, False), (False, False, True, True)]


def test_sweeps_over_the_split_and_a_timeline_show_where_the_lanes_overlap() -> None:
    """vidur#79: wants sweeps over the split; sglang discussion 33652: where do kernels really overlap?

    Every split of a sweep holds the SMs it says. The timeline's bars of both lanes overlap for as long as the steps' rows
    say, second by second; a lock-step system has one lane and no overlap.
    """
    for name in ("static-24", "static-54", "static-96", "vllm-512"):
        outcome = run(name, LOAD[:30], policy__options={"free_tails": False} if name != "vllm-512" else {})
        steps = outcome.steps
        if name != "vllm-512":
            prefill_sms = int(name.removeprefix("static-"))
            assert set(steps["sms"][steps["lane"] == PREFILL].tolist()) == {prefill_sms}
            assert set(steps["sms"][steps["lane"] == DECODE].tolist()) == {108 - prefill_sms}
        bars: dict[int, list[tuple[float, float]]] = {}
        for event in map(json.loads, perfetto_events(steps, "GPU")):
            if event["ph"] == "X":
                bars.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
        overlap_us = sum(max(0.0, min(end_a, end_b) - max(a, b)) for a, end_a in bars.get(1, []) for b, end_b in bars.get(2, []))
        decode = steps["lane"] == DECODE
        assert overlap_us / 1e6 == pytest.approx(steps["corun_s"][decode].sum(), abs=1e-5)
        assert (overlap_us > 1e6) == (name != "vllm-512")
