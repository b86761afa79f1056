"""Run the kernels' value tests under Triton's interpreter, each file in a fresh process: Triton decides at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

HERE = Path(__file__).parent
NUMPY = "ignore:Conversion of an array:DeprecationWarning"
"""Triton 3.6's interpreter turns one-element arrays into scalars, which numpy 2.3 warns of and 2.4 refuses."""
CASES = sorted((HERE / "interpreted").glob("cases_*.py"))


def test_the_cases_are_there():
    assert {p.stem for p in CASES} == {f"cases_{name}" for name in (
        "bounded_grid", "decode_attention", "engine", "prefill_attention", "rowwise")}


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_interpreted(path):
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", NUMPY, str(path)],
                          env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, cwd=HERE.parents[1],
                          text=True, capture_output=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
