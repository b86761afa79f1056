"""``make gpu``: one command, its budget and its folder handed on, nothing written beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
ENVIRON = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
"""The suite is itself run by make, whose level and flags would have an inner one say which folder it enters."""


def make(tmp_path: Path, target: str, *variables: str, status: int = 0) -> tuple[int, list[list[str]]]:
    """Exit status, and the commands that a stand-in for python was called with."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexit {status}\n')
    python.chmod(0o755)
    done = subprocess.run(["make", "-s", target, f"GPU_PYTHON={python}", f"OUT={tmp_path}/gpu", *variables], cwd=ROOT,
                          env=ENVIRON, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, [line.split() for line in (tmp_path / "calls").read_text().splitlines()]


def test_all_parts_are_one_command_within_one_budget(tmp_path: Path) -> None:
    status, (call,) = make(tmp_path, "gpu", "BUDGET_S=300")
    assert status == 0
    assert call == ["-m", "bullet.cli.profile", "stages", "--budget-s", "300", "--out", f"{tmp_path}/gpu", "--allow-busy"]


def test_further_options_and_the_status_pass_through(tmp_path: Path) -> None:
    status, (call,) = make(tmp_path, "gpu", "GPU_ARGS=--device simulated --no-engine", status=3)
    assert status != 0
    assert call[-3:] == ["--device", "simulated", "--no-engine"]


def test_the_plan_needs_no_card(tmp_path: Path) -> None:
    status, (call,) = make(tmp_path, "gpu-plan")
    assert status == 0
    assert call[:6] == ["-m", "bullet.cli.profile", "stages", "--plan-only", "--gpu", "h200"]


def test_the_demo_says_what_to_open_and_what_to_try_next(tmp_path: Path) -> None:
    """A stand-in for the environment that the Makefile would set up, and for the command."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    command = tmp_path / "venv" / "bin" / "bullet-sim"
    command.write_text('#!/bin/sh\necho "called $@"\n')
    command.chmod(0o755)
    (tmp_path / "venv" / ".base").touch()
    done = subprocess.run(["make", "demo", f"VENV={tmp_path}/venv"], cwd=ROOT, env=ENVIRON, capture_output=True, text=True,
                          timeout=60, check=True)
    called, _, *rest = done.stdout.splitlines()
    folder = called.rpartition(" ")[2]
    assert called.startswith("called compare --trace azure-code --rate 5 ")
    assert [line.split()[:2] for line in (rest[0], rest[2])] == [["open", f"{folder}/report.html"], ["try", "next"]]
    assert "pip" not in done.stdout + done.stderr
