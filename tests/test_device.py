"""The simulated device on made-up coefficients whose seconds can be worked out by hand."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet.config import GPUS, MODELS, DeviceConfig, GpuSpec, ModelSpec
from bullet.device import DeviceCoefficients, DeviceModel, StepWork, _Row, kv_capacity_tokens, load_device
from bullet.errors import ConfigError, ProfileError
from bullet.state import SplitTable

# Ten SMs, 100 bytes/s, every efficiency 1, bandwidth in proportion to SMs far below the knee of 1.
GPU = GpuSpec("toy", 10, 1000.0, 100.0, 10**6, 0, (8, 0), 1.0, 5, "made up")
MODEL = ModelSpec("toy", 2, 8, 16, 4, 2, 2, 32, 64)
PLAIN = DeviceCoefficients(
    "fitted", ((128, 256, 1.0),), 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, {"norm": 1.0, "rope": 1.0, "act": 1.0}, 0.0,
    rate_slope=0.0, rate_cap=1.0, bandwidth_knee=1.0, bandwidth_sharpness=1.0, contention_loss=0.0)
REAL = load_device(DeviceConfig())


def step(compute: tuple[float, int] = (0.0, 0), bytes_s: float = 0.0, bytes_: float = 0.0) -> StepWork:
    """One kernel: (seconds a block, blocks), seconds of its bytes on the whole device."""
    row = _Row(((compute[0], compute[1], bytes_s),), 0.0, 0.0, 0.0, bytes_)
    return StepWork(1, row, None, (), 0.0, 0.0, 0.0, bytes_)


def toy(**changes: object) -> DeviceModel:
    keywords = {k: changes.pop(k) for k in ("shared_prefill_share", "contention_scale") if k in changes}
    return DeviceModel(MODEL, GPU, dataclasses.replace(PLAIN, **changes), **keywords)  # type: ignore[arg-type]


def test_waves_stretch_compute_only() -> None:
    device = toy()
    # 12 blocks of 1 s: 2 waves on 10 SMs, 3 on 5, 12 on 1; memory waits for bandwidth: 1/2 at 5 of 10 on this curve
    # ((0.5)^-1 + 1)^-1 / (1^-1 + 1)^-1 = (1/3) / (1/2) = 2/3 of the full bandwidth.
    assert [device.solo_seconds(step((1.0, 12)), p) for p in (10, 5, 1)] == [2.0, 3.0, 12.0]
    assert device.solo_seconds(step(bytes_s=2.0, bytes_=200.0), 5) == pytest.approx(3.0)


def test_few_busy_sms_run_faster_each() -> None:
    device = toy(rate_slope=0.5, rate_cap=1.2)
    assert device.solo_seconds(step((1.0, 10)), 10) == 1.0
    assert device.solo_seconds(step((1.0, 8)), 8) == pytest.approx(1 / 1.1)  # 1 + 0.5 (1 - 0.8)
    assert device.solo_seconds(step((1.0, 2)), 2) == pytest.approx(1 / 1.2)  # capped


def test_max_min_sharing_by_hand() -> None:
    # Peak 100 bytes/s. Alone on its SMs prefill would draw 30, decode 90: prefill keeps its 30, decode gets 70.
    slow = toy()._slowdowns(30.0, 90.0)
    assert slow == (1.0, pytest.approx(90 / 70))
    # Both over half: half each.
    assert toy()._slowdowns(80.0, 60.0) == (pytest.approx(80 / 50), pytest.approx(60 / 50))
    # With a loss of 0.2 each also suffers from what the other draws: 1 / (1 - 0.2 x 0.7) and 90 / (70 (1 - 0.2 x 0.3)).
    assert toy(contention_loss=0.2)._slowdowns(30.0, 90.0) == (pytest.approx(1 / 0.86), pytest.approx(90 / (70 * 0.94)))
    assert toy(contention_loss=0.2)._slowdowns(0.0, 90.0) == (1.0, 1.0)  # nothing beside, nothing lost
    assert toy(contention_loss=0.2, contention_scale=0.0)._slowdowns(30.0, 40.0) == (1.0, 1.0)


def test_corun_by_hand() -> None:
    # Bandwidth almost flat (knee 0.001), so 5 SMs draw all 100 bytes/s. Prefill computes for 2 s (10 blocks, 5 SMs) and
    # moves 20 bytes; decode moves 100 bytes in 1 s. u = 10 and 100: grants 10 and 90, decode takes 100 / 90 s.
    device = toy(bandwidth_knee=0.001)
    prefill, decode = step((1.0, 10), 0.2, 20.0), step((0.0, 0), 1.0, 100.0)
    p_s, d_s = device.corun_seconds(prefill, 5, decode, 5)
    assert p_s == pytest.approx(2.0)
    assert d_s == pytest.approx(100 / 90, rel=1e-3)


def test_shared_sms_divide_time() -> None:
    # Both hold all 10 SMs: each has 5 effective ones. One wave on the SMs it holds, at half the speed.
    device = toy()
    work = step((1.0, 10))
    assert device.corun_seconds(work, 10, work, 10) == (pytest.approx(2.0), pytest.approx(2.0))
    p_s, d_s = toy(shared_prefill_share=0.75).corun_seconds(work, 10, work, 10)
    assert (p_s, d_s) == (pytest.approx(1 / 0.75), pytest.approx(1 / 0.25))


works = st.tuples(st.integers(1, 3000), st.integers(1, 300), st.integers(1, 100_000))


@settings(max_examples=60)
@given(works, st.integers(1, 107), st.integers(1, 108))
def test_company_never_helps(shape: tuple[int, int, int], p: int, d: int) -> None:
    tokens, seqs, context = shape
    prefill = REAL.prefill_work([(tokens, 0)], 4, logits_seqs=0)
    decode = REAL.decode_work(seqs, context + seqs)
    p_s, d_s = REAL.corun_seconds(prefill, p, decode, d)
    assert p_s >= REAL.solo_seconds(prefill, p) * (1 - 1e-12)
    assert d_s >= REAL.solo_seconds(decode, d) * (1 - 1e-12)


@settings(max_examples=40)
@given(works, st.integers(1, 108))
def test_cached_and_uncached_agree_to_the_last_bit(shape: tuple[int, int, int], sms: int) -> None:
    tokens, seqs, context = shape
    plain = DeviceModel(REAL.model, REAL.gpu, REAL.coefficients, cache=False)
    for build in (lambda d: d.prefill_work([(tokens, 7)], 32, logits_seqs=1), lambda d: d.decode_work(seqs, context),
                  lambda d: d.hybrid_work([(tokens, 0)], seqs, context, logits_seqs=seqs)):
        assert REAL.solo_seconds(build(REAL), sms) == plain.solo_seconds(build(plain), sms)


@settings(max_examples=30)
@given(works)
def test_all_splits_at_once_agree_with_one_at_a_time(shape: tuple[int, int, int]) -> None:
    tokens, seqs, context = shape
    splits = SplitTable.every(108)
    prefill, decode = REAL.prefill_work([(tokens, 0)], 32, logits_seqs=1), REAL.decode_work(seqs, context + seqs)
    p_all = REAL.prefill_seconds_all(prefill, splits, decode)
    d_all = REAL.decode_seconds_all(decode, splits, prefill)
    for i, d in enumerate(splits.decode_sms.tolist()):
        assert (p_all[i], d_all[i]) == pytest.approx(REAL.corun_seconds(prefill, 108 - d, decode, d), rel=1e-12)
    assert (p_all[-1], d_all[-1]) == pytest.approx((REAL.solo_seconds(prefill, 108), REAL.solo_seconds(decode, 108)), rel=1e-12)
    assert REAL.prefill_seconds_all(prefill, splits, None)[0] == pytest.approx(REAL.solo_seconds(prefill, 106), rel=1e-12)


def test_layers_add_up_and_the_head_runs_once() -> None:
    whole = REAL.solo_seconds(REAL.prefill_work([(700, 0)], 32, logits_seqs=1), 108)
    parts = sum(REAL.solo_seconds(REAL.prefill_work([(700, 0)], 4, logits_seqs=int(i == 7)), 108) for i in range(8))
    assert parts == pytest.approx(whole, rel=1e-12)


@settings(max_examples=40)
@given(st.integers(1, 20_000))
def test_nothing_beats_the_bound(tokens: int) -> None:
    work = REAL.prefill_work([(tokens, 0)], 32, logits_seqs=1)
    assert REAL.min_prefill_seconds(tokens) <= min(REAL.solo_seconds(work, p) for p in (54, 84, 108))


def test_more_sms_help_large_work_throughout() -> None:
    work = REAL.prefill_work([(16384, 0)], 32, logits_seqs=1)
    times = np.array([REAL.solo_seconds(work, p) for p in range(12, 109, 12)])
    assert np.all(np.diff(times) < 0)
    # MuxServe's A100: 2.65 x at 30 % of the SMs, 1.26 x at 70 % (fitted on these, so within a few percent).
    assert REAL.solo_seconds(work, 32) / times[-1] == pytest.approx(2.65, rel=0.06)


def test_tensor_parallel_shrinks_a_step_and_pays_for_the_network() -> None:
    big = MODELS["llama-3.1-70b"]
    one, eight = (DeviceModel(big, GPUS["a100-80gb"], REAL.coefficients, tensor_parallel=t) for t in (1, 8))
    a, b = (d.solo_seconds(d.prefill_work([(2048, 0)], 80, logits_seqs=1), 108) for d in (one, eight))
    assert a / 8 < b < a / 3
    with pytest.raises(ConfigError, match="tensor_parallel = 7"):
        DeviceModel(big, GPUS["a100-80gb"], REAL.coefficients, tensor_parallel=7)


def test_kv_capacity_by_hand() -> None:
    config = DeviceConfig(memory_utilization=0.5, reserve_bytes=100)
    small = dataclasses.replace(GPU, mem_bytes=20_000)
    # Half of 20,000 less weights and reserve, over 32 bytes a token, down to blocks of 16.
    free = 10_000 - MODEL.weight_bytes - 100
    assert kv_capacity_tokens(MODEL, small, config) == free // MODEL.kv_bytes_per_token // 16 * 16
    with pytest.raises(ConfigError, match="leave no room for KV"):
        kv_capacity_tokens(MODELS["llama-3.1-70b"], GPUS["a100-80gb"], DeviceConfig())


def test_a_device_says_where_its_numbers_come_from() -> None:
    assert REAL.coefficients.source == "fitted"
    assert load_device(DeviceConfig(model="qwen3-32b")).coefficients.source == "fitted on llama-3.1-8b's shapes"
    h100 = load_device(DeviceConfig(gpu="h100"))
    assert h100.coefficients.source == "analytic"
    assert "not measured on this GPU" in h100.coefficients.notes["basis"]


def test_coefficients_round_trip_and_refuse_strangers(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    path.write_text(REAL.coefficients.to_json())
    assert DeviceCoefficients.from_json(path).to_json() == REAL.coefficients.to_json()
    path.write_text(REAL.coefficients.to_json().replace('"rate_cap"', '"rate_hat"'))
    with pytest.raises(ProfileError, match="rate_cap missing"):
        DeviceCoefficients.from_json(path)
    path.write_text("{")
    with pytest.raises(ProfileError, match="cannot be read"):
        DeviceCoefficients.from_json(path)
