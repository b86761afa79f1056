"""The simulated device on made-up coefficients whose seconds can be worked out by hand."""

import dataclasses
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet import work
from bullet.catalog.gpus import GPUS, GpuSpec
from bullet.catalog.models import MODELS, ModelSpec
from bullet.config import DeviceConfig
from bullet.devices.coefficients import DeviceCoefficients
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import kv_capacity_tokens, load_device
from bullet.devices.terms import FittedWork, Row, Tiles
from bullet.errors import ConfigError, ProfileError
from bullet.state import SplitTable

# Ten SMs, 100 bytes/s, every efficiency 1, bandwidth in proportion to SMs far below the knee of 1.
GPU = GpuSpec("toy", 10, 1000.0, 100.0, 10**6, 0, (8, 0), 1.0, 5, "made up")
MODEL = ModelSpec("toy", 2, 8, 16, 4, 2, 2, 32, 64)
PLAIN = DeviceCoefficients(
    "fitted", ((128, 256, 1.0),), 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0,
    {"norm": 1.0, "rope": 1.0, "act": 1.0, "embedding": 1.0}, 0.0,
    rate_slope=0.0, rate_cap=1.0, bandwidth_knee=1.0, bandwidth_sharpness=1.0, contention_loss=0.0)
REAL = load_device(DeviceConfig())


def step(compute: tuple[float, int] = (0.0, 0), bytes_s: float = 0.0, bytes_: float = 0.0,
         on: DeviceModel | None = None) -> FittedWork:
    """One kernel: (seconds a block, blocks), seconds of its bytes on the whole device. ``on``: whose clocks, else all alike."""
    row = Row(((Tiles((compute,), [1.0] * 11 if on is None else on._rate), bytes_s),), 0.0, 0.0, bytes_)
    return FittedWork(1, row, None, (), 0.0, 0.0, bytes_)


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
    assert device.solo_seconds(step((1.0, 10), on=device), 10) == 1.0
    # Two waves, as on up to 15 SMs: of which there are 10.
    assert device.solo_seconds(step((1.0, 16), on=device), 8) == pytest.approx(2.0)
    assert device.solo_seconds(step((1.0, 40), on=device), 8) == pytest.approx(5 / (1 + 0.5 * (1 - 0.9)))  # five, as on 9: 1.05
    assert device.solo_seconds(step((1.0, 40), on=device), 2) == pytest.approx(20 / 1.2)  # capped


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
    for gpu in ("h100", "rtx4090"):
        assert load_device(DeviceConfig(gpu=gpu)).coefficients.source == "fitted"
    h200 = load_device(DeviceConfig(gpu="h200"))
    assert h200.coefficients.source == "analytic, h100's efficiencies"
    assert "not measured on this GPU" in h200.coefficients.notes["basis"]


def test_coefficients_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    path.write_text(REAL.coefficients.to_json())
    again = DeviceCoefficients.from_json(path)
    assert again == REAL.coefficients
    assert again.to_json() == REAL.coefficients.to_json()


@pytest.mark.parametrize(("key", "value", "message"), [
    ("rate_hat", 1.0, "unknown key 'rate_hat'"),
    ("rate_cap", None, "'rate_cap' is missing"),
    ("rate_cap", 0.5, "rate_cap = 0.5: must be 1 to 10 (times the rate with all SMs busy)"),
    ("rate_cap", True, "rate_cap = True"),
    ("rate_cap", "1", "rate_cap = '1'"),
    ("rate_cap", [1.2], "rate_cap = [1.2]"),
    ("rate_slope", 1e9, "rate_slope = 1000000000.0: must be 0 to 10"),
    ("bandwidth_sharpness", 1e9, "bandwidth_sharpness = 1000000000.0: must be 0.1 to 100"),
    ("bandwidth_sharpness", 1e-300, "bandwidth_sharpness = 1e-300: must be 0.1 to 100"),
    ("bandwidth_knee", 0, "bandwidth_knee = 0.0: must be 0.001 to 1"),
    ("prefill_attention_extra_keys", 1e6, "prefill_attention_extra_keys = 1000000.0: must be 0 to 10000 (keys a query row)"),
    ("gemm_overhead_s", -1e-6, "gemm_overhead_s = -1e-06: must be 0 to 0.1 (seconds)"),
    ("host_gap_s", float("nan"), "cannot be read as a fit (NaN is no number)"),
    ("link_efficiency", float("inf"), "cannot be read as a fit (Infinity is no number)"),
    ("gemm_tiles", [], "gemm_tiles = []: must be"),
    ("gemm_tiles", [[128, 256, 1.5]], "gemm_tiles = [(128, 256, 1.5)]: must be"),
    ("gemm_tiles", [[10**9, 256, 0.5]], "whole numbers of 1 to 4096, and 0.001 to 1"),
    ("gemm_tiles", [[128, 256]], "gemm_tiles[0] = [128, 256]: must be a list of length 3"),
    ("rowwise_bandwidth", {"norm": 1.0}, "rowwise_bandwidth = {'norm': 1.0}: must be a table of act, embedding"),
    ("source", 3, "source = 3: must be text"),
    ("gemm_bandwidth", 5, "gemm_bandwidth = 5.0: must be 0.001 to 1 (a share of the data sheet's peak"),
    ("decode_attention_bandwidth", 1e-9, "decode_attention_bandwidth = 1e-09: must be 0.001 to 1"),
    ("prefill_attention_efficiency", 1.01, "prefill_attention_efficiency = 1.01: must be 0.001 to 1"),
    ("contention_loss", 7, "contention_loss = 7.0: must be 0 to 1 (a share)"),
    ("gemm_overhead_s", 4.1, "gemm_overhead_s = 4.1: must be 0 to 0.1 (seconds); are these seconds?"),
    ("notes", [], "notes = []: must be a table of keys"),
    ("notes", {"assumed": 5}, "notes.assumed = 5: must be a list"),
    ("notes", {"fitted_on": {"gemm": 3}}, "notes.fitted_on[...] = {'gemm': 3}: must be text"),
    ("notes", {"errors": {"gemm": {"median": 0.1}}}, "notes.errors[...].rows is missing"),
    ("notes", {"waves": True}, "notes.waves = True: must be a table of keys"),
])
def test_a_fit_with_a_wrong_value_is_refused_by_name(tmp_path: Path, key: str, value: object, message: str) -> None:
    raw = json.loads(REAL.coefficients.to_json())
    del raw["notes"]
    if value is None:
        del raw[key]
    else:
        raw[key] = value
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ProfileError, match=re.escape(message)) as caught:
        DeviceCoefficients.from_json(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_fit_that_is_not_an_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "fit.json").write_text(text)
    with pytest.raises(ProfileError, match=r"fit\.json"):
        DeviceCoefficients.from_json(tmp_path / "fit.json")
    with pytest.raises(ProfileError, match="cannot be read"):
        DeviceCoefficients.from_json(tmp_path / "absent.json")


def test_a_step_holds_the_operations_and_bytes_of_its_kernels() -> None:
    """The device builds attention from slopes, not kernel objects: the totals are those of work.py."""
    pieces, seqs, context = [(700, 0), (130, 900)], 5, 4321
    coefficients = dataclasses.replace(REAL.coefficients, prefill_attention_extra_keys=0.0)
    for tp in (1, 2):
        device = DeviceModel(REAL.model, REAL.gpu, coefficients, tensor_parallel=tp)
        step = device.hybrid_work(pieces, seqs, context, logits_seqs=6)
        kernels = work.layer_kernels(REAL.model, pieces, seqs, context, tp)
        head = work.head_kernels(REAL.model, 6, tp)
        assert step.bytes == pytest.approx(32 * sum(k.bytes for k in kernels) + sum(k.bytes for k in head)
                                           + work.embedding_bytes(REAL.model, 835), rel=1e-12)
        (block_s, blocks, _), _ = step.attention
        operations = block_s * blocks * coefficients.prefill_attention_efficiency * REAL.gpu.peak_flops / REAL.gpu.num_sms
        assert operations == pytest.approx(work.prefill_attention(REAL.model, pieces, tp).flops, rel=1e-12)


def test_the_embedding_runs_once_a_step() -> None:
    slow = dict(PLAIN.rowwise_bandwidth, embedding=0.5)
    seconds = [toy(rowwise_bandwidth=speeds) for speeds in (PLAIN.rowwise_bandwidth, slow)]
    fast_s, slow_s = (d.solo_seconds(d.prefill_work([(3, 0)], 2, logits_seqs=0), 10) for d in seconds)
    # Three rows of eight two-byte numbers read and written: 96 bytes at 100 a second, once for both layers.
    assert slow_s - fast_s == pytest.approx(0.96)


def test_a_bound_by_bytes_gemm_takes_the_tile_with_least_arithmetic() -> None:
    """Decode: a wide tile is as fast on the whole device, but its padding would show on few SMs."""
    device = toy(gemm_tiles=((128, 256, 1.0), (64, 64, 1.0)))
    tiles, moved_s = device.gemm_term(work.gemm("g", 1, 256, 2, 2))
    # ceil(256 / 64) blocks of the small one, or a single wide one of eight times the arithmetic.
    small, wide = (2.0 * rows * columns * 2 * 10 / 1000 for rows, columns in ((64, 64), (128, 256)))
    assert tiles.choices == ((wide, 1), (small, 4))
    assert moved_s > 0
    assert [tiles.seconds(sms, 0) for sms in (10, 4, 2, 1)] == [small, small, 2 * small, 4 * small]


def test_a_tile_is_chosen_for_the_sms_at_hand() -> None:
    """Of 512 columns: 2 blocks of a wide tile or 8 of a small one, an eighth of its work and less efficient. On 8 SMs or 4 the
    small one is faster; on 2 its four waves of 1.25 / 8 are still faster than the wide one's single 1; on 1 too."""
    device = toy(gemm_tiles=((128, 256, 1.0), (128, 64, 0.8)))
    tiles, _ = device.gemm_term(work.gemm("g", 128, 512, 2, 2))
    (wide, _), (small, _) = tiles.choices
    assert [blocks for _, blocks in tiles.choices] == [2, 8]
    assert small == pytest.approx(wide / 4 / 0.8)
    # Waves of the small one: 1, 2, 4, 8; of the wide one 1 down to 2 SMs.
    found = [tiles.seconds(sms, 0) for sms in (8, 4, 2, 1)]
    assert found == pytest.approx([small, 2 * small, min(4 * small, wide), min(8 * small, 2 * wide)])
    assert found[2] == wide  # 4 x 0.3125 = 1.25 of it


def test_equal_waves_take_equal_time() -> None:
    """8 blocks keep 8 SMs busy on 8 SMs, on 9 and on 10: clocks are those of the whole device on each. On 7 two waves are needed,
    as on 4 to 7: there 3 SMs at least have nothing to do."""
    device = toy(rate_slope=0.5, rate_cap=1.4)
    assert [device.solo_seconds(step((1.0, 8), on=device), p) for p in (10, 9, 8)] == [1.0, 1.0, 1.0]
    assert [device.solo_seconds(step((1.0, 8), on=device), p) for p in (7, 5, 4)] == [pytest.approx(2 / (1 + 0.5 * 0.3))] * 3
    assert device.solo_seconds(step((1.0, 8), on=device), 1) == pytest.approx(8 / 1.4)  # on 1 SM alone: 1.45, capped


fits = st.builds(
    lambda slope, cap, knee, sharpness, efficiencies, block_s: dataclasses.replace(
        REAL.coefficients, rate_slope=slope, rate_cap=cap, bandwidth_knee=knee, bandwidth_sharpness=sharpness,
        gemm_block_overhead_s=block_s, gemm_tiles=tuple((rows, columns, share) for (rows, columns, _), share in zip(
            REAL.coefficients.gemm_tiles, efficiencies, strict=True))),
    st.floats(0, 0.5), st.floats(1, 1.3), st.floats(0.1, 1.0), st.floats(0.5, 10), st.tuples(*[st.floats(0.5, 1)] * 4),
    st.floats(0, 5e-6))
"""Coefficients about those that fits find."""
served = st.tuples(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(GPUS)), fits)


def made(chosen: tuple[str, str, DeviceCoefficients]) -> DeviceModel:
    model, gpu, coefficients = chosen
    return DeviceModel(MODELS[model], GPUS[gpu], coefficients)


@settings(max_examples=60, deadline=None)
@given(served, works)
def test_no_step_takes_longer_on_more_sms(chosen: tuple[str, str, DeviceCoefficients], shape: tuple[int, int, int]) -> None:
    """Alone, on any model and card."""
    device, (tokens, seqs, context) = made(chosen), shape
    n = device.num_sms
    steps = [device.prefill_work([(tokens, 0)], 1, logits_seqs=1), device.decode_work(seqs, seqs + context),
             device.hybrid_work([(tokens, 0)], seqs, seqs + context, logits_seqs=seqs)]
    for one in steps:
        seconds = [device.solo_seconds(one, sms) for sms in range(1, n + 1)]
        assert all(more <= fewer * (1 + 1e-12) for fewer, more in pairwise(seconds))


@pytest.mark.parametrize("gpu", ["a100-80gb", "h100", "rtx4090"])
def test_beside_another_step_more_sms_cost_little(gpu: str) -> None:
    """Contention is of averages (docs/model.md): on more SMs a step draws more bandwidth on average over its kernels and is
    throttled as a whole, also those kernels that drew as much before. Largest rise found over what fewer SMs took: 4.8 %."""
    device, rng = load_device(DeviceConfig(gpu=gpu)), np.random.default_rng(0)
    n = device.num_sms
    for _ in range(100):
        tokens, cached, seqs, context = (int(rng.choice(values)) for values in (
            (1, 16, 100, 300, 1000, 4000, 16000), (0, 500, 4000), (1, 8, 64, 256), (100, 1000, 4000)))
        prefill, decode = device.prefill_work([(tokens, cached)], 1, logits_seqs=1), device.decode_work(seqs, seqs * context)
        held = int(rng.integers(1, n - 2))
        free = range(1, n - held + 1)
        for seconds in ([device.corun_seconds(prefill, p, decode, held)[0] for p in free],
                        [device.corun_seconds(prefill, held, decode, d)[1] for d in free]):
            assert (np.array(seconds) <= 1.05 * np.minimum.accumulate(seconds)).all()


@settings(max_examples=40, deadline=None)
@given(served, st.integers(1, 4000), st.integers(1, 400), st.data())
def test_more_tokens_take_longer(chosen: tuple[str, str, DeviceCoefficients], tokens: int, seqs: int,
                                 data: st.DataObject) -> None:
    """But for attention where a tile of 128 query rows is begun: its blocks are twice as many and on average half as long."""
    device = made(chosen)
    if device.model.num_experts:
        return  # which experts a token meets is a mean, and blocks are rounded
    sms = data.draw(st.integers(1, device.num_sms))

    def prefill(count: int) -> float:
        return device.solo_seconds(device.prefill_work([(count, 0)], 1, logits_seqs=1), sms)

    longer = tokens + data.draw(st.integers(1, 300))
    slack = 0.0 if -(-longer // 128) == -(-tokens // 128) else 0.03
    assert prefill(longer) >= prefill(tokens) * (1 - slack - 1e-12)
    context = 500 * seqs
    more = device.solo_seconds(device.decode_work(seqs + 1, context + 500), sms)
    assert more >= device.solo_seconds(device.decode_work(seqs, context), sms) * (1 - 1e-12)


def test_decode_attention_waits_for_the_longer_of_cache_and_sequences() -> None:
    device = toy(decode_attention_seq_s=50.0)
    plain = toy()
    short, long = device.decode_work(3, 3), device.decode_work(3, 300_000)
    # 150 s a layer of working off three sequences; the cache of 300,000 tokens takes longer still and hides it.
    hidden = device.solo_seconds(long, 10) - plain.solo_seconds(plain.decode_work(3, 300_000), 10)
    assert hidden == pytest.approx(0.0, abs=1e-6)
    attention_s = work.decode_attention(MODEL, 3, 3).bytes / 100
    assert (device.solo_seconds(short, 10) - plain.solo_seconds(plain.decode_work(3, 3), 10)
            == pytest.approx(2 * (150 - attention_s)))
    assert short.bytes == plain.decode_work(3, 3).bytes


def test_all_reduces_cost_their_bytes_and_an_overhead() -> None:
    free, dear, slow = (DeviceModel(MODEL, GPU, dataclasses.replace(PLAIN, **change), tensor_parallel=2)
                        for change in ({}, {"all_reduce_overhead_s": 3.0}, {"link_efficiency": 0.5}))
    base, extra, half = (d.solo_seconds(d.decode_work(1, 1), 10) for d in (free, dear, slow))
    assert extra - base == pytest.approx(2 * 2 * 3.0)  # two layers, two a layer
    # Two GPUs send the 16 bytes of the hidden state once per all-reduce (2 (t - 1) / t = 1), over 1 byte/s.
    assert half - base == pytest.approx(2 * 2 * 16)


def test_a_host_gap_is_added_once_a_step() -> None:
    device = toy(host_gap_s=7.0)
    gap = device.solo_seconds(device.decode_work(2, 9), 10) - toy().solo_seconds(toy().decode_work(2, 9), 10)
    assert gap == pytest.approx(7.0)
    quarter = device.prefill_work([(9, 0)], 1, logits_seqs=0)  # one of two layers: half of a step's
    assert device.solo_seconds(quarter, 10) - toy().solo_seconds(quarter, 10) == 0  # it is in the work, not the device
    assert quarter.fixed_s == 3.5


@settings(max_examples=40)
@given(works, st.integers(1, 108), st.integers(1, 108))
def test_cached_and_uncached_pairs_agree_to_the_last_bit(shape: tuple[int, int, int], p: int, d: int) -> None:
    tokens, seqs, context = shape
    plain = DeviceModel(REAL.model, REAL.gpu, REAL.coefficients, cache=False)
    pairs = [(m.prefill_work([(tokens, 0)], 4, logits_seqs=0), m.decode_work(seqs, context)) for m in (REAL, plain)]
    REAL.corun_seconds(*(pairs[0][0], d, pairs[0][1], p))  # another split first, so that a stale answer would show
    assert REAL.corun_seconds(pairs[0][0], p, pairs[0][1], d) == plain.corun_seconds(pairs[1][0], p, pairs[1][1], d)


@settings(max_examples=40)
@given(st.integers(1, 3000), st.integers(1, 107))
def test_bandwidth_never_falls_with_sms(context: int, sms: int) -> None:
    """Waves may: a kernel of 12 blocks gains nothing from the eleventh SM and loses clock speed to it."""
    step_of = REAL._inverse_bandwidth
    assert step_of[sms + 1] <= step_of[sms]
    alone = dataclasses.replace(REAL.coefficients, rate_slope=0.0)
    device = DeviceModel(REAL.model, REAL.gpu, alone)
    decode = device.decode_work(4, 4 * context)
    assert device.solo_seconds(decode, sms + 1) <= device.solo_seconds(decode, sms) * (1 + 1e-12)


def test_more_gpus_than_kv_heads_repeat_them() -> None:
    """Llama-3.1-8B has 8 KV heads: 16 GPUs hold one each, twice over, so a token costs each GPU as much as with 8."""
    model, gpu = MODELS["llama-3.1-8b"], GPUS["a100-80gb"]
    eight, sixteen = (kv_capacity_tokens(model, gpu, DeviceConfig(tensor_parallel=t, reserve_bytes=0)) for t in (8, 16))
    weights = model.weight_bytes / 16  # of each GPU, saved by the second eight
    assert sixteen - eight == pytest.approx(weights / (model.kv_bytes_per_token / 8), abs=16)
    odd = dataclasses.replace(model, num_heads=24, num_kv_heads=8, intermediate_size=14336 * 3)
    with pytest.raises(ConfigError, match="8 KV heads, or be a multiple"):
        DeviceModel(odd, gpu, REAL.coefficients, tensor_parallel=12)
