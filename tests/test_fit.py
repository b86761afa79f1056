"""The fit finds what it should on made-up tables, refuses impossible ones, and is repeatable on the real ones."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bullet.catalog.gpus import get_gpu
from bullet.config import DeviceConfig
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import load_device
from bullet.profiles import forms as fit

pytest.importorskip("scipy")

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
DATA = ROOT.parent / "shared" / "data"
PROFILE = ROOT / "profiles" / "a100-80gb" / "llama-3.1-8b"
A100 = get_gpu("a100-80gb")


def test_errors_are_relative_and_absolute_in_sign() -> None:
    error = fit.FitError.of(np.array([1.1, 0.8, 1.0]), np.ones(3))
    assert (error.rows, error.median, error.worst) == (3, pytest.approx(0.1), pytest.approx(0.2))
    assert error.as_dict() == {"rows": 3, "median": 0.1, "p90": 0.18, "worst": 0.2}


def test_the_gemm_fit_finds_its_own_model() -> None:
    truth = np.array([0.8, 0.7, 0.65, 0.6, 0.75, 4e-6, 2e-6])
    shapes = [(m, n, k) for m in (1, 16, 64, 100, 200, 400, 777, 1024, 1500, 3000, 8192)
              for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))]
    blank = [fit.Gemm(*shape, 0.0) for shape in shapes]
    seconds = fit.gemm_seconds(blank, truth, A100)
    rows = [dataclasses.replace(g, seconds=float(s)) for g, s in zip(blank, seconds, strict=True)]
    # Parameters of tiles that are seldom chosen are loose; what must come back are the seconds.
    assert fit.FitError.of(fit.gemm_seconds(rows, fit.fit_gemm(rows, A100), A100), seconds).p90 < 0.02


def test_attention_fits_find_their_own_models() -> None:
    batch, tokens = (np.array(x, dtype=float).ravel() for x in np.meshgrid([1, 4, 16], [64, 512, 2048, 8192]))
    seconds = fit.prefill_attention_seconds(batch, tokens, 32, 128, np.array([0.6, 200.0, 1e-5]), A100)
    found = fit.fit_prefill_attention(batch, tokens, seconds, 32, 128, A100)
    assert found == pytest.approx([0.6, 200.0, 1e-5], rel=0.02)
    moved = 4096.0 * batch * tokens
    seconds = fit.decode_attention_seconds(batch, moved, np.array([0.8, 1.5e-5, 3e-7]), A100)
    found = fit.fit_decode_attention(batch, moved, seconds, A100)
    assert found[:2] == pytest.approx([0.8, 1.5e-5], rel=0.02)


def test_decode_attention_takes_the_longer_of_cache_and_sequences() -> None:
    # 2039e9 bytes at half the data sheet's bandwidth: 2 s; 10 sequences of 0.1 s: 1 s, 30: 3 s; and an overhead of 1 s.
    seconds = fit.decode_attention_seconds(np.array([10.0, 30.0]), np.full(2, 2039e9), np.array([0.5, 1.0, 0.1]), A100)
    assert seconds == pytest.approx([3.0, 4.0])


def test_the_other_fits_find_their_own_models() -> None:
    bytes_ = np.geomspace(1e4, 1e9, 12)
    shares, overhead_s = fit.fit_rowwise({"a": (bytes_, fit.rowwise_seconds(bytes_, 0.5, 3e-6, A100)),
                                          "b": (bytes_, fit.rowwise_seconds(bytes_, 0.8, 3e-6, A100))}, A100)
    assert (shares["a"], shares["b"], overhead_s) == (pytest.approx(0.5, rel=1e-3), pytest.approx(0.8, rel=1e-3),
                                                      pytest.approx(3e-6, rel=1e-2))
    share = np.linspace(0.1, 1.0, 10)
    assert fit.fit_bandwidth_curve(share, fit.bandwidth_curve(share, 0.4, 3.0)) == pytest.approx([0.4, 3.0], rel=1e-2)

    def stretch(slope: float, cap: float) -> np.ndarray:  # all compute: seconds relative to all SMs
        return 1 / (share * np.minimum(cap, 1 + slope * (1 - share)))

    assert fit.fit_rate_curve(stretch, stretch(0.4, 1.2)) == pytest.approx([0.4, 1.2], rel=1e-2)
    sent = np.geomspace(1e4, 1e8, 12)
    found = fit.fit_all_reduce(sent, fit.all_reduce_seconds(sent, 0.5, 8e-6, A100), A100)
    assert found == pytest.approx([0.5, 8e-6], rel=1e-2)


def test_the_bandwidth_curve_is_that_of_the_device() -> None:
    device = load_device(DeviceConfig())
    c = device.coefficients
    share = np.arange(1, 109) / 108
    assert fit.bandwidth_curve(share, c.bandwidth_knee, c.bandwidth_sharpness) == pytest.approx(
        [device.bandwidth_share(n) for n in range(1, 109)], rel=1e-12)
    assert device.bandwidth_share(108) == 1.0


def test_the_fit_and_the_device_time_a_gemm_alike() -> None:
    """The device's GEMM of the fitted shapes is the fit's own: nothing is lost on the way through fit.json."""
    device = load_device(DeviceConfig())
    c = device.coefficients
    parameters = np.array([e for _, _, e in c.gemm_tiles]
                          + [c.gemm_bandwidth, c.gemm_overhead_s, c.gemm_block_overhead_s])
    head = DeviceModel(device.model, device.gpu, c).decode_work(40, 40).head
    assert head is not None
    lm_head = fit.gemm_seconds([fit.Gemm(40, 128256, 4096, 0.0)], parameters, A100)[0]
    ((tiles, moved_s),) = head.gemms
    assert max(tiles.whole_s, moved_s) + c.gemm_overhead_s == pytest.approx(lm_head, rel=1e-9)


def test_the_shipped_fit_says_what_it_is() -> None:
    fitted = json.loads((PROFILE / "fit.json").read_text())
    assert fitted["source"] == "fitted"
    assert fitted["notes"]["parameters"] == 24
    errors = fitted["notes"]["errors"]
    assert errors["gemm_left_out:all"]["median"] < 0.05
    assert errors["gemm_left_out:all"]["p90"] < 0.15
    assert {"fit.json", "SOURCE.md", "samples.parquet"} <= {p.name for p in PROFILE.iterdir()}
    page = (PROFILE / "SOURCE.md").read_text()
    # Unfitted: 13B decode steps against SMs, of which neither the kernels nor the curve saw a row.
    assert errors["decode_step_stretch_left_out:13b"]["median"] < 0.07
    for name in ("vidur", "aiconfigurator", "MuxServe", "MIT", "Apache-2.0"):
        assert name in page


def test_the_script_says_in_one_line_what_is_missing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "experiments/fit_a100.py"), "--data", str(tmp_path / "none")],
                          capture_output=True, text=True, check=False, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--data" in done.stderr


@pytest.mark.skipif(not (DATA / "kernels").is_dir(), reason="the measured tables are not here")
def test_the_shipped_fit_is_repeatable_to_the_byte(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "experiments/fit_a100.py"), "--data", str(DATA), "--out", str(tmp_path)],
                   check=True, capture_output=True, cwd=ROOT, env=ENVIRONMENT)
    assert (tmp_path / "fit.json").read_bytes() == (PROFILE / "fit.json").read_bytes()
