"""Does adapting pay: the best fixed split of each place in hindsight, and the paired gain over it, by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from bullet.config import load_run_config
from experiments.adapting import STEADY, WORKLOADS, cell, keys_of, table

ROOT = Path(__file__).parents[1]


def test_the_best_fixed_split_and_the_gain_over_it() -> None:
    found = cell("w", 0.1, {0: {0: 0.9, 1: 0.7}, 12: {0: 0.6, 1: 0.4}, 24: {0: 0.8, 1: 0.5}, 36: {0: 0.5, 1: 0.8}})
    # Means: 12 .5, 24 .65, 36 .65: of equals the smaller share. Gains by seed: .1 and .2.
    assert found.fixed_sms == 24
    assert found.fixed.mean == pytest.approx(0.65)
    assert found.adaptive.mean == pytest.approx(0.8)
    assert found.gain.mean == pytest.approx(0.15)
    # Student's t of one degree of freedom is 12.706; the deviation of .1 and .2 is .0707, over the root of 2 .05.
    assert found.gain.half_width == pytest.approx(12.706 * 0.05, rel=1e-4)


def test_a_column_an_objective() -> None:
    one = {0: {0: 0.9, 1: 0.7}, 12: {0: 0.6, 1: 0.4}}
    lines = table([cell("w", 0.05, one), cell("w", 0.15, one)]).splitlines()
    assert lines[0].index("TPOT 150 ms") < lines[0].index("TPOT 50 ms")
    assert lines[2].startswith("w ")
    assert lines[2].count("+0.300 ± 0.000") == 2


@pytest.mark.parametrize("name", [*STEADY, *WORKLOADS])
def test_every_workload_is_a_configuration(name: str) -> None:
    load_run_config(None, keys_of(name))


def test_the_script_writes_table_and_plot(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, ROOT / "experiments" / "adapting.py", "--workloads", "turns-fast", "--requests", "60",
                           "--seeds", "1", "--jobs", "1", "--no-drift", "--cache", tmp_path / "cache", "--out", out],
                          capture_output=True, text=True, check=False, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""})
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {"adapting.txt", "adapting.csv", "adapting.png"}
    assert (out / "adapting.csv").read_text().count("turns-fast") == 4
