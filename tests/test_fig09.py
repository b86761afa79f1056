"""The two-sample script: exact where alpha is linear in SMs, and one line where the sweeps are missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bullet import work
from bullet.catalog.gpus import get_gpu
from experiments.findings.fig09 import LLAMA, eq1_seconds, kernel_theory, predict

ROOT = Path(__file__).parents[1]


def test_eq_1_by_hand() -> None:
    a100 = get_gpu("a100-80gb")
    compute = work.KernelWork("c", 312e12, 1.0, 1)
    memory = work.KernelWork("m", 1.0, 2039e9, 1)
    assert eq1_seconds([compute, memory], 108, a100) == pytest.approx(2.0)
    assert eq1_seconds([compute], 27, a100) == pytest.approx(4.0)  # a quarter of the SMs
    assert eq1_seconds([memory], 54, a100) == pytest.approx(1.0)  # N_d is 30: bandwidth is whole above it
    assert eq1_seconds([memory], 15, a100) == pytest.approx(2.0)


def test_two_samples_give_the_rest_of_a_linear_alpha() -> None:
    theory = kernel_theory("gemm")
    shape = (4096, 6144, 4096)
    times = {p: (1.5 - 0.002 * p) * theory(shape, p) for p in (8, 32, 64, 96, 132)}
    guess = predict(times, lambda p: theory(shape, p), (32, 132))
    assert guess == pytest.approx({p: times[p] for p in (8, 64, 96)})  # between and beyond the samples
    constant = predict(times, lambda p: theory(shape, p), (132,))
    assert constant[8] / times[8] == pytest.approx((1.5 - 0.264) / (1.5 - 0.016))
    assert LLAMA.name == "llama-3.1-8b"


def test_without_the_sweeps_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.findings.fig09", "--sm-data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert done.stderr.startswith("fig09: error:")
    assert done.stderr.count("\n") == 1
