"""The simulator against the brute-force engine of tests/reference.py: every token's time, to 1e-9."""

import dataclasses

import numpy as np
import pytest

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.config import resolve_slo
from bullet.devices.fitted import DeviceModel
from bullet.estimators.make import make_estimator
from bullet.policies import make_policy, needs_estimator
from bullet.policies.base import PolicyContext
from bullet.sim.run import simulate
from bullet.state import SplitTable
from bullet.workload import load_workload
from tests.reference import SglangWalk, VllmWalk, two_lane, units
from tests.worlds import A100, config, workload

COUNT = 1500
PLAIN = DeviceModel(A100.model, A100.gpu, A100.coefficients, cache=False)


def rows(trace: str, rate: float, seed: int = 3) -> list[tuple[float, int, int]]:
    c = config(workload__trace=trace, workload__rate_req_per_s=rate, workload__num_requests=COUNT + 40)
    w = load_workload(c.workload, seed)
    found = [(float(a), int(p), int(o)) for a, p, o in zip(w.arrival_s, w.prompt_tokens, w.output_tokens, strict=True)
             if p + o < 12_000]
    return found[:COUNT]


def compare(outcome, tokens: dict[int, list[float]], preemptions: dict[int, int]) -> None:  # type: ignore[no-untyped-def]
    r = outcome.requests
    assert len(r) == len(tokens)
    for i, first, last, made, preempted in zip(r["id"].tolist(), r["first_token_s"].tolist(), r["finish_s"].tolist(),
                                               r["generated_tokens"].tolist(), r["preemptions"].tolist(), strict=True):
        assert first == pytest.approx(tokens[i][0], abs=1e-9)
        assert last == pytest.approx(tokens[i][-1], abs=1e-9)
        assert (made, preempted) == (len(tokens[i]), preemptions[i])
    gaps = np.sort(np.concatenate([np.diff(t) for t in tokens.values()]))
    ours = np.sort(np.repeat(outcome.itl_s, outcome.itl_counts))
    assert len(ours) == len(gaps)
    assert np.abs(ours - gaps).max() < 1e-9


@pytest.mark.parametrize(("policy", "trace", "rate", "kv_tokens", "preempts"), [
    ("vllm-1024", "azure-conv", 6.45, 400_000, False), ("vllm-512", "sharegpt", 12.0, 60_000, True),
    ("sglang-1024", "azure-code", 4.0, 400_000, False), ("sglang-2048", "sharegpt", 12.0, 16_000, True),
    ("sglang", "azure-code", 4.0, 400_000, False), ("sglang-1024-mixed", "sharegpt", 9.0, 16_000, True)])
def test_chunked(policy: str, trace: str, rate: float, kv_tokens: int, preempts: bool) -> None:
    load = rows(trace, rate)
    engine = (VllmWalk if policy.startswith("vllm") else SglangWalk)(PLAIN, kv_tokens // 16, int([*policy.split("-"), 10**9][1]))
    if policy.endswith("mixed"):
        engine.mixed = True  # type: ignore[union-attr]
    walked = engine.run(load)
    outcome = simulate(config(policy, debug=False, device__kv_tokens=kv_tokens), workload=workload(load))
    compare(outcome, {w.id: w.tokens for w in walked}, {w.id: w.preemptions for w in walked})
    assert preempts == any(w.preemptions for w in walked)


@pytest.mark.parametrize(("policy", "trace", "rate", "kv_tokens", "more"), [
    ("bullet", "azure-conv", 6.45, 400_000, {}),
    ("bullet", "sharegpt", 12.0, 24_000, {"device__publish_delay_s": 0.005}),
    ("bullet-literal", "azure-code", 5.0, 100_000, {}),
    ("sglang-pdmux", "azure-code", 5.0, 60_000, {}),
    ("muxwise", "azure-code", 5.0, 60_000, {}),
    ("bullet-literal", "sharegpt", 12.0, 24_000, {"device__reconfigure_s": 0.001}),
    ("static-96", "sharegpt", 12.0, 24_000, {"device__reconfigure_s": 0.001}),
    ("naive", "azure-code", 5.0, 400_000, {}),
    ("naive", "sharegpt", 12.0, 24_000, {})])
def test_two_lanes(policy: str, trace: str, rate: float, kv_tokens: int, more: dict[str, float]) -> None:
    load = rows(trace, rate)
    c = config(policy, debug=False, device__kv_tokens=kv_tokens, workload__trace=trace, **more)
    w = workload(load)
    slo = resolve_slo(c.slo, trace, w.mean_prompt_tokens)
    assert slo.tpot_s is not None
    assert slo.ttft_s_per_token is not None
    splits = SplitTable.every(108)
    model, gpu = get_model("llama-3.1-8b"), get_gpu("a100-80gb")
    estimator = None
    if needs_estimator(policy):
        estimator = make_estimator("srm", device=PLAIN, model=model, gpu=gpu, splits=splits, seed=0)
    brute = make_policy(policy, PolicyContext(model, gpu, splits, slo.tpot_s, estimator))
    found = two_lane(brute, PLAIN, splits, kv_tokens // 16, load, slo.ttft_s_per_token * w.mean_prompt_tokens,
                     c.device.publish_delay_s, c.device.reconfigure_s)
    outcome = simulate(c, workload=w)
    compare(outcome, {i: t for i, (t, _) in found.items()}, {i: p for i, (_, p) in found.items()})
    assert (kv_tokens == 24_000) == any(p for _, p in found.values())


@pytest.mark.parametrize(("policy", "window", "layers", "kv_tokens"), [
    ("vllm-512", 200, 20, 16_000), ("vllm-512", 128, 32, 1_600), ("sglang-1024", 1000, 16, 9_600),
    ("sglang-1024-mixed", 1000, 16, 9_600), ("static-96", 200, 20, 9_600), ("bullet", 1000, 16, 9_600), ("naive", 100, 32, 960)])
def test_windows(policy: str, window: int, layers: int, kv_tokens: int) -> None:
    """Layers with a window: blocks by walking, contexts one by one, preemptions forced by a small cache."""
    load = rows("sharegpt", 14.0)[:300]
    model = dataclasses.replace(A100.model, window_tokens=window, window_layers=layers)
    plain, device = (DeviceModel(model, A100.gpu, A100.coefficients, cache=cache) for cache in (False, True))
    c = config(policy, debug=True, device__kv_tokens=kv_tokens, workload__trace="sharegpt")
    w = workload(load)
    slo = resolve_slo(c.slo, "sharegpt", w.mean_prompt_tokens)
    assert slo.tpot_s is not None
    assert slo.ttft_s_per_token is not None
    splits = SplitTable.every(108)
    estimator = None
    if needs_estimator(policy):
        estimator = make_estimator("srm", device=plain, model=model, gpu=A100.gpu, splits=splits, seed=0)
    made, brute = (make_policy(policy, PolicyContext(model, A100.gpu, splits, slo.tpot_s, estimator)) for _ in range(2))
    if policy.startswith(("vllm", "sglang")):
        engine = (VllmWalk if policy.startswith("vllm") else SglangWalk)(
            plain, kv_tokens // 16 * units(model), int(policy.split("-")[1]))
        if policy.endswith("mixed"):
            engine.mixed = True  # type: ignore[union-attr]
        walked = engine.run(load)
        tokens, preemptions = {r.id: r.tokens for r in walked}, {r.id: r.preemptions for r in walked}
    else:
        found = two_lane(brute, plain, splits, kv_tokens // 16, load, slo.ttft_s_per_token * w.mean_prompt_tokens,
                         c.device.publish_delay_s, c.device.reconfigure_s)
        tokens, preemptions = {i: t for i, (t, _) in found.items()}, {i: p for i, (_, p) in found.items()}
    if estimator is not None:
        estimator = make_estimator("srm", device=plain, model=model, gpu=A100.gpu, splits=splits, seed=0)
        made = make_policy(policy, PolicyContext(model, A100.gpu, splits, slo.tpot_s, estimator))
    outcome = simulate(c, workload=w, device=device, policy=made)
    compare(outcome, tokens, preemptions)
    assert any(preemptions.values())
