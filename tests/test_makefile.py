"""``make gpu``: the sweep first, then the engine in what the budget leaves, and no failure of the one at the other's cost."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None or shutil.which("timeout") is None, reason="needs make and timeout")


def make_gpu(tmp_path: Path, *variables: str, sweep: int = 0, engine: int = 0) -> tuple[int, list[list[str]]]:
    """Exit status, and the commands that a stand-in for python was called with."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
                      f'case "$2" in *cli.profile) exit {sweep};; *) exit {engine};; esac\n')
    python.chmod(0o755)
    done = subprocess.run(["make", "-s", "gpu", f"GPU_PYTHON={python}", f"OUT={tmp_path}/gpu", *variables], cwd=ROOT,
                          capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, [line.split() for line in (tmp_path / "calls").read_text().splitlines()]


def budget(call: list[str]) -> int:
    return int(call[call.index("--budget-s") + 1])


def test_the_engine_comes_after_the_sweep_and_within_the_same_budget(tmp_path: Path) -> None:
    status, (sweep, engine) = make_gpu(tmp_path, "BUDGET_S=300", "GPU_ARGS=--allow-busy --seed 3")
    assert status == 0
    assert sweep[:3] == ["-m", "bullet.cli.profile", "gpu"]
    assert sweep[-3:] == ["--allow-busy", "--seed", "3"]
    assert engine[:5] == ["-m", "bullet.cli.run", "validate", "--device", "cuda"]
    assert "--allow-busy" in engine
    assert "--seed" not in engine
    assert (budget(sweep), budget(engine)) == (180, 120)
    assert engine[-1].startswith(f"{tmp_path}/gpu-engine-")


def test_an_engine_that_fails_leaves_the_sweeps_status(tmp_path: Path) -> None:
    status, calls = make_gpu(tmp_path, engine=2)
    assert (status, len(calls)) == (0, 2)


def test_after_a_sweep_that_failed_there_is_no_engine(tmp_path: Path) -> None:
    status, calls = make_gpu(tmp_path, sweep=3)
    assert status != 0
    assert len(calls) == 1


@pytest.mark.parametrize(("variables", "left"), [(("ENGINE_S=0",), 240), (("BUDGET_S=100",), 100)])
def test_no_time_no_engine(tmp_path: Path, variables: tuple[str, ...], left: int) -> None:
    status, calls = make_gpu(tmp_path, *variables)
    assert status == 0
    assert [budget(call) for call in calls] == [left]
