"""The published model by hand; calibration, contention and online learning."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullet import work
from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.config import DeviceConfig
from bullet.devices.load import load_device
from bullet.errors import ConfigError, ProfileError
from bullet.estimators.base import Sample
from bullet.estimators.make import make_estimator
from bullet.estimators.recalibration import Recalibration
from bullet.estimators.roofline import srm_seconds
from bullet.estimators.sampling import SampledState, calibration_states, sample_device
from bullet.estimators.srm import Srm, along_sms
from bullet.piecewise import linear
from bullet.state import DECODE, PREFILL, SplitTable
from tests.worlds import A100

SPLITS = SplitTable.every(108)


def make(name: str = "srm", **options: object):  # type: ignore[no-untyped-def]
    return make_estimator(name, device=A100, model=A100.model, gpu=A100.gpu, splits=SPLITS, seed=0, **options)  # type: ignore[arg-type]


def test_equation_1_by_hand() -> None:
    """120 flops, 60 bytes. On 2 of 4 SMs with C_peak 40 and D_peak 30, N_d = 3: C = 20, D = 20: max(6, 3) = 6 s. On 1: C = 10,
    D = 10: max(12, 6). A memory-bound kernel (6 flops, 60 bytes) on 2: 3 s; on 4, past N_d: 2 s."""
    compute, bandwidth = np.array([10.0, 20.0, 40.0]), np.array([10.0, 20.0, 30.0])
    kernel = work.KernelWork("k", 120, 60, 1)
    assert srm_seconds([kernel], compute, bandwidth).tolist() == [12.0, 6.0, 3.0]
    assert srm_seconds([work.KernelWork("m", 6, 60, 1)], compute, bandwidth).tolist() == [6.0, 3.0, 2.0]
    assert srm_seconds([kernel, kernel], compute, bandwidth)[1] == 12.0


def test_interpolation_and_linear_extrapolation() -> None:
    values = [np.array([1.0]), np.array([3.0]), np.array([4.0])]
    assert [float(linear(x, [0.0, 2.0, 4.0], values)[0]) for x in (-1.0, 0.0, 1.0, 3.0, 6.0)] == [0.0, 1.0, 2.0, 3.5, 5.0]
    # Two samples along the SM axis (Fig. 9): 1.5 at 54, 1.2 at 108.
    assert along_sms(np.array([27, 54, 81, 108]), {54: 1.5, 108: 1.2}).tolist() == pytest.approx([1.65, 1.5, 1.35, 1.2])


def test_alpha_makes_samples_exact() -> None:
    """Decode alone, prefill alone on all N, and (over the decode batches beside it) prefill on a split."""
    samples = sample_device(A100, calibration_states(A100, SPLITS), seed=0, noise_std=0.0)
    srm = Srm(A100.model, A100.gpu, SPLITS, samples, recalibrate=False)
    beside: dict[tuple[int, int], list[float]] = {}
    for s in samples:
        own = np.append(SPLITS.prefill_sms if s.kind == PREFILL else SPLITS.decode_sms, 108)
        index = int(np.flatnonzero(own == s.sms)[0])
        if s.kind == PREFILL and s.corun_sms:
            beside.setdefault((s.tokens, index), []).append(s.seconds)
        elif s.kind == DECODE and not s.corun_sms:
            assert srm.decode_at(s.tokens, s.context_tokens, 0, index) == pytest.approx(s.seconds, rel=1e-9)
        elif s.kind == PREFILL and s.sms == 108:
            assert srm.prefill_at((s.tokens,), None, index) == pytest.approx(s.seconds, rel=1e-9)
    assert len(beside) == 15
    for (tokens, index), seconds in beside.items():
        mean_s = float(np.exp(np.mean(np.log(seconds))))
        assert srm.prefill_at((tokens,), None, index) == pytest.approx(mean_s, rel=1e-9)


def test_one_alpha_and_one_share_are_recovered_everywhere() -> None:
    """Samples made by alpha = 1.5 and D_{p,sl} = 0.6 D_p: states never sampled come out, inside and outside."""
    model, gpu, reference = A100.model, A100.gpu, make()

    def prefill_s(tokens: tuple[int, ...], sms: int) -> float:
        return 1.5 * reference.roofline.prefill_seconds(tokens, sms)

    def decode_s(seqs: int, mean: int, sms: int, share: float) -> float:
        return 1.5 * reference.roofline.decode_seconds(seqs, seqs * mean, sms, share)

    samples = [Sample(PREFILL, sms, t, 0, prefill_s((t,), sms)) for t in (256, 4096) for sms in (54, 108)]
    for seqs in (8, 64):
        for mean in (256, 4096):
            samples += [Sample(DECODE, sms, seqs, seqs * mean, decode_s(seqs, mean, sms, 1.0)) for sms in (12, 108)]
            samples += [Sample(DECODE, sms, seqs, seqs * mean, decode_s(seqs, mean, sms, 0.6), 108 - sms, tokens)
                        for sms in (12, 54) for tokens in (512, 2048)]
    srm = Srm(model, gpu, SPLITS, samples, recalibrate=False)
    for seqs, mean, tokens, index in ((8, 256, 512, 5), (20, 900, 700, 11), (100, 6000, 9000, 40), (3, 50, 64, 0)):
        d = int(SPLITS.decode_sms[index])
        beside, alone = (srm.decode_at(seqs, seqs * mean, beside, index) for beside in (tokens, 0))
        assert beside == pytest.approx(decode_s(seqs, mean, d, 0.6), rel=1e-6)
        assert alone == pytest.approx(decode_s(seqs, mean, d, 1.0), rel=1e-9)
        assert srm.prefill_at((tokens, 7), None, index) == pytest.approx(prefill_s((tokens, 7), 108 - d), rel=1e-9)
    blind = Srm(model, gpu, SPLITS, samples, recalibrate=False, blind=True)
    assert blind.decode_at(20, 18_000, 700, 11) == srm.decode_at(20, 18_000, 0, 11)


def test_the_bandwidth_line_and_the_ridge() -> None:
    """N_d = 30 of 108: C_p / D_p is constant up to 30 SMs, and grows with C_p beyond."""
    srm = make()
    peak = A100.gpu.peak_flops / A100.gpu.mem_bytes_per_s
    on = {int(p): srm.ridge(i) for i, p in enumerate(SPLITS.prefill_sms)}
    assert on[54] == pytest.approx(peak / 2)
    assert srm.ridge(SPLITS.full) == pytest.approx(peak)
    assert on[6] == pytest.approx(on[30]) == pytest.approx(peak * 30 / 108)
    # Two prompts of one token: weights are read once for both, 2 operations a weight each, 2 bytes a weight.
    assert srm.prefill_intensity((1, 1)) == pytest.approx(2.0, rel=0.02)
    assert srm.prefill_intensity((4096,)) > peak


def test_repeated_samples_are_averaged() -> None:
    """A sweep repeats: two runs 1 % to either side count as their geometric mean."""
    samples = sample_device(A100, calibration_states(A100, SPLITS), seed=0)
    twice = [s._replace(seconds=s.seconds * factor) for s in samples for factor in (1.01, 1 / 1.01)]
    once, mean = (Srm(A100.model, A100.gpu, SPLITS, found) for found in (samples, twice))
    assert mean.decode_at(30, 30_000, 0, 9) == pytest.approx(once.decode_at(30, 30_000, 0, 9), rel=1e-9)
    assert mean.prefill_at((900,), None, 9) == pytest.approx(once.prefill_at((900,), None, 9), rel=1e-9)


def test_tensor_parallel_counts_one_gpus_share_and_the_network() -> None:
    """70B on 8 GPUs: alpha must stay where it is allowed to be (above MIN_ALPHA), the prediction near the device."""
    device = load_device(DeviceConfig(model="llama-3.1-70b", tensor_parallel=8))
    srm = make_estimator("srm", device=device, model=device.model, gpu=device.gpu, splits=SPLITS, seed=0)
    decode = device.decode_work(40, 40 * 900)
    for tokens in (700, 3000):
        prefill = device.prefill_work([(tokens, 0)], 80, logits_seqs=1)
        for index in (5, 20, 40):
            d = int(SPLITS.decode_sms[index])
            prefill_s, decode_s = device.corun_seconds(prefill, 108 - d, decode, d)
            assert srm.prefill_at((tokens,), None, index) == pytest.approx(prefill_s, rel=0.15)
            assert srm.decode_at(40, 40 * 900, tokens, index) == pytest.approx(decode_s, rel=0.25)


def test_contention_slows_decode_and_blind_does_not_see_it() -> None:
    srm, blind = make(), make("srm-blind")
    alone, beside = srm.decode_seconds(64, 64 * 800, 0), srm.decode_seconds(64, 64 * 800, 2048)
    assert np.all(beside >= alone * 0.97)  # 3 %: few and noisy samples
    assert beside[6] > alone[6] * 1.03
    assert beside[-1] == alone[-1]  # alone on all SMs nothing runs beside it
    assert np.array_equal(blind.decode_seconds(64, 64 * 800, 0), blind.decode_seconds(64, 64 * 800, 2048))
    # Prefill needs only eq. 2.
    assert np.array_equal(srm.prefill_seconds((900,), (64, 50_000)), srm.prefill_seconds((900,), None))


def test_the_estimator_beats_the_blind_one_on_the_device() -> None:
    """Against co-running states that it did not sample; simulated, and so circular in part: the shape only."""
    errors = {}
    for name in ("srm", "srm-blind", "oracle"):
        estimator = make(name, recalibrate=False)
        found = []
        for tokens in (700, 3000):
            prefill = A100.prefill_work([(tokens, 0)], 32, logits_seqs=1)
            for seqs in (16, 90):
                for index in (5, 12, 20):
                    d = int(SPLITS.decode_sms[index])
                    _, truth = A100.corun_seconds(prefill, 108 - d, A100.decode_work(seqs, seqs * 500), d)
                    found.append(abs(estimator.decode_at(seqs, seqs * 500, tokens, index) / truth - 1))
        errors[name] = float(np.mean(found))
    assert errors["oracle"] < 1e-9
    assert errors["srm"] < min(0.1, errors["srm-blind"])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 5000), st.integers(0, 20_000), st.integers(0, 53), st.booleans())
def test_one_element_equals_all_to_the_last_bit(seqs: int, mean: int, beside: int, index: int, learned: bool) -> None:
    srm = make()
    if learned:
        srm.observe(DECODE, 12, 0.1, 0.13)
        srm.observe(PREFILL, 96, 0.1, 0.08)
    assert srm.decode_at(seqs, seqs * mean, beside, index) == srm.decode_seconds(seqs, seqs * mean, beside)[index]
    assert srm.prefill_at((mean, 7), None, index) == srm.prefill_seconds((mean, 7), None)[index]
    assert srm.prefill_at((mean,), None, index) == srm.prefill_base(mean)[index] * srm.prefill_correction(index)
    again = make()  # nothing cached yet
    if not learned:
        assert again.decode_at(seqs, seqs * mean, beside, index) == srm.decode_at(seqs, seqs * mean, beside, index)


def test_online_learning_converges_from_30_percent_wrong() -> None:
    """Within 3 % after 23 observations of one bucket (0.9^23 ln 1.3 = 0.023); buckets never seen follow the phase."""
    right, wrong = make(recalibrate=False), make(error=1.3)

    def learn(times: int) -> None:
        for _ in range(times):
            predicted = wrong.decode_at(50, 40_000, 0, 5)
            wrong.observe(DECODE, 12, predicted, right.decode_at(50, 40_000, 0, 5))

    learn(23)
    assert wrong.decode_at(50, 40_000, 0, 5) == pytest.approx(right.decode_at(50, 40_000, 0, 5), rel=0.03)
    learn(37)
    assert wrong.decode_at(50, 40_000, 0, 30) == pytest.approx(right.decode_at(50, 40_000, 0, 30), rel=0.05)
    assert wrong.prefill_at((500,), None, 0) == pytest.approx(1.3 * right.prefill_at((500,), None, 0))  # another phase
    off = make(error=1.3, recalibrate=False)
    off.observe(DECODE, 12, 1.0, 5.0)
    assert off.decode_at(50, 40_000, 0, 5) == pytest.approx(1.3 * right.decode_at(50, 40_000, 0, 5))


def test_learning_does_not_oscillate() -> None:
    learner = Recalibration(SPLITS)
    factors = []
    for _ in range(100):
        factor = learner.of[DECODE].factor[learner.bucket(12)]
        factors.append(factor)
        learner.observe(DECODE, 12, 0.2 * factor, 0.1)  # the truth is half of what is predicted
    assert np.all(np.diff(factors) <= 0)
    assert factors[-1] == pytest.approx(0.5, rel=0.01)
    assert math.isclose(float(learner.over_splits(DECODE)[5]), factors[-1], rel_tol=0.02)


def test_the_same_seed_gives_the_same_samples() -> None:
    a, b, c = (sample_device(A100, calibration_states(A100, SPLITS), seed=seed) for seed in (1, 1, 2))
    assert a == b != c
    assert {s.source for s in a} == {"simulated"}
    assert len(a) < 250  # 66 states alone and 90 pairs; the paper checks against 7,360


def test_samples_of_a_state_are_the_devices_own_times() -> None:
    """Without noise: both sides of a pair, a prefill over a past, and one layer without LM head; in order, repeated."""
    pair = SampledState(((64, 0), (64, 0)), 84, 8, 8 * 512, 24)
    tail, one = SampledState(((256, 1024),), 108), SampledState(num_seqs=8, context_tokens=8 * 512, decode_sms=24, layers=1)
    samples = sample_device(A100, [pair, tail, one], seed=0, noise_std=0.0, repeats=2)
    prefill, decode = A100.prefill_work([(64, 0), (64, 0)], 32, logits_seqs=2), A100.decode_work(8, 8 * 512)
    prefill_s, decode_s = A100.corun_seconds(prefill, 84, decode, 24)
    tail_s = A100.solo_seconds(A100.prefill_work([(256, 1024)], 32, logits_seqs=1), 108)
    assert samples[0] == samples[2] == Sample(DECODE, 24, 8, 8 * 512, decode_s, 84, 128)
    assert samples[1] == samples[3] == Sample(PREFILL, 84, 128, 0, prefill_s, 24, 8)
    assert samples[4] == samples[5] == Sample(PREFILL, 108, 256, 1024, tail_s)
    # 32 such layers and an LM head are the iteration.
    layer_s, whole_s = samples[6].seconds, A100.solo_seconds(decode, 24)
    assert samples[6] == samples[7] == Sample(DECODE, 24, 8, 8 * 512, layer_s)
    assert 0 < whole_s - 32 * layer_s < 4 * layer_s
    noisy = sample_device(A100, [one], seed=0, noise_std=0.03, repeats=2000)
    logs = np.log([s.seconds / layer_s for s in noisy])
    assert abs(logs.mean()) < 4 * 0.03 / math.sqrt(2000)
    assert logs.std() == pytest.approx(0.03, rel=0.1)
    with pytest.raises(ProfileError, match="needs a prefill or a decode"):
        sample_device(A100, [SampledState()], seed=0)


def test_bad_samples_and_names_are_refused() -> None:
    model, gpu = ModelSpec("t", 2, 8, 16, 4, 2, 2, 32, 64), GpuSpec("g", 108, 1e12, 1e9, 10**9, 0, (8, 0), 1.0, 30, "made up")
    with pytest.raises(ProfileError, match="no decode alone"):
        Srm(model, gpu, SPLITS, [Sample(PREFILL, 54, 100, 0, 0.1)])
    with pytest.raises(ProfileError, match="no prefill alone"):
        Srm(model, gpu, SPLITS, [Sample(DECODE, 54, 4, 100, 0.1)])
    with pytest.raises(ProfileError, match="seconds must be positive"):
        Srm(model, gpu, SPLITS, [Sample(PREFILL, 54, 100, 0, 0.0)])
    alone = [s for s in sample_device(A100, calibration_states(A100, SPLITS), seed=0) if not s.corun_sms]
    with pytest.raises(ProfileError, match="no decode beside a prefill"):
        Srm(A100.model, A100.gpu, SPLITS, alone)
    Srm(A100.model, A100.gpu, SPLITS, alone, blind=True)
    with pytest.raises(ProfileError, match="must cover every"):
        Srm(A100.model, A100.gpu, SPLITS, [s for s in alone if s.context_tokens != 8 * 256], blind=True)
    with pytest.raises(ConfigError, match="unknown estimator"):
        make("psychic")
