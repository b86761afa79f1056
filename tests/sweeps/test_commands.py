"""bullet-sim sweep, goodput and bound: from flags and files to what is printed and written; mistakes in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bullet.cli.sim import main

SMALL = ("--num-requests", "15", "--jobs", "1", "--quiet")


def sim(tmp_path: Path, *args: str) -> int:
    return main([*args, *SMALL, "--cache", str(tmp_path / "cache")])


def test_flags_make_axes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert sim(tmp_path, "sweep", "--policies", "vllm-1024, static-96", "--rates", "4:5", "--seeds", "2", "--axis",
               "slo.tpot_s=0.1,0.2", "--zip", "device.contention_scale=[1.0, 0.5]", "device.noise_std=0,0.1",
               "--out", str(out)) == 0
    printed = capsys.readouterr().out
    table = pq.read_table(out / "runs.parquet")
    assert table.num_rows == 2 * 2 * 2 * 2 * 2
    assert set(zip(*(table[name].to_pylist() for name in ("device.contention_scale", "device.noise_std")), strict=True)) == {
        (1.0, 0), (0.5, 0.1)}
    assert printed.startswith("simulated on a100-80gb (device model: fitted), llama-3.1-8b; azure-code; mean of 2 seeds ± half")
    assert (out / "sweep.txt").read_text() in printed + "\n"
    assert "32 runs in " in printed
    assert sorted(path.name for path in out.iterdir()) == ["base.toml", "plots", "points.csv", "runs.csv", "runs.parquet",
                                                           "sweep.txt"]
    assert len(list((out / "plots").iterdir())) == 2 * 2  # one a place on the axes that are neither rate nor policy


def test_a_file_makes_axes_and_flags_are_over_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.toml"
    path.write_text('[workload]\ntrace = "sharegpt"\n[policy]\nname = "naive"\n'
                    '[axes]\nworkload.rate_req_per_s = "1:9"\nseed = [0, 3]\n')
    assert sim(tmp_path, "sweep", str(path), "--rates", "4,6", "--no-report", "--out", str(tmp_path / "out")) == 0
    table = pq.read_table(tmp_path / "out" / "runs.parquet")
    assert table["workload.rate_req_per_s"].to_pylist() == [4, 4, 6, 6]
    assert table["seed"].to_pylist() == [0, 3, 0, 3]
    assert set(table["system"].to_pylist()) == {"naive"}
    assert "plots" not in {path.name for path in (tmp_path / "out").iterdir()}
    assert "4 runs in" in capsys.readouterr().out
    assert sim(tmp_path, "sweep", str(path), "--rates", "6,4", "--no-report", "--out", str(tmp_path / "again")) == 0
    assert ", 4 of them from the cache" in capsys.readouterr().out


@pytest.mark.parametrize(("args", "says"), [
    ((), "nothing to go through"), (("--rates", "8:2:0.5"), "goes nowhere"), (("--axis", "workload.rat=1:2"), "'workload.rat'"),
    (("--axis", "seed"), "--axis 'seed': must read key.subkey=VALUES"), (("--rates", "1:2", "--rate", "3"), "is an axis"),
    (("--axis", "seed=1,2", "--seeds", "2"), "seed is an axis already"),
    (("--seeds", "2", "--seed", "1"), "--seed 1: seed is an axis"), (("none.toml",), "none.toml: cannot be read"),
    (("none.toml", "--config", "x.toml"), "is the configuration already"),
    (("--zip", "seed=1,2", "slo.tpot_s=1"), "differ in length"), (("--policies", "bullet,bullet"), "stands there twice"),
    (("--rates", "1:2", "--jobs", "0"), "jobs = 0")])
def test_mistakes_are_one_line_and_leave_nothing(args: tuple[str, ...], says: str, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *args, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("bullet-sim: error: ")
    assert says in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("args", "says"), [
    (("goodput", "--policies", ""), "policies '': must name each policy once"),
    (("bound", "--policies", ""), "--policies '': must name each policy once"),
    (("bound", "--best", "3", "--policies", ","), "--policies ',': must name each policy once")])
def test_an_empty_list_of_policies_is_no_default(args: tuple[str, ...], says: str, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*args, "--num-requests", "40", "--quiet", "--cache", str(tmp_path / "cache")]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert says in said.err


@pytest.mark.parametrize("args", [("--ttft", "-5ms"), ("--ttft=-5ms",), ("--tpot", "-0.5s"), ("--think-time", "-1s")])
def test_a_time_before_zero_is_told_as_such(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["goodput", *args])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "': must not be negative" in said


def test_a_run_that_fails_is_told_and_the_rest_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("from bullet.policies.static import Static\nclass Bad(Static):\n"
                                      "    def __init__(self, c):\n        super().__init__(c, 96)\n"
                                      "    def next_step(self, *a):\n        return 1 / 0\n")
    assert sim(tmp_path, "sweep", "--policies", f"static-96,{tmp_path}/mine.py:Bad", "--out", str(tmp_path / "out")) == 2
    printed = capsys.readouterr()
    assert "ZeroDivisionError" in printed.err
    assert printed.err.count("\n") == 1
    assert "static-96" in printed.out


def test_progress_into_a_file_is_a_line_a_tenth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--axis", "seed=0:3", "--policies", "vllm-1024", "--num-requests", "5", "--jobs", "1", "--cache",
                 str(tmp_path / "cache"), "--out", str(tmp_path / "out"), "--no-report"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" runs")[0] for line in lines] == [f"sweep: {n} of 4" for n in range(1, 5)]
    assert lines[-1] == "sweep: 4 of 4 runs, about 0 s left"


def test_goodput_prints_a_row_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert sim(tmp_path, "goodput", "--policies", "vllm-1024,static-96", "--seeds", "1", "--tolerance", "0.2", "--out",
               str(out)) == 0
    printed = capsys.readouterr().out
    assert "goodput: highest rate with attainment (mean_length) >= 0.9, to 0.2; one seed" in printed
    assert [line.split()[0] for line in printed.splitlines()[5:7]] == ["vllm-1024", "static-96"]
    assert sorted(path.name for path in out.iterdir()) == ["goodput.json", "goodput.txt", "probes.csv"]


def test_an_objective_out_of_reach_says_the_best_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(tmp_path, "goodput", "--policies", "vllm-1024", "--seeds", "2", "--set", "slo.tpot_s=0.001", "--tolerance",
               "0.5") == 0
    assert "no rate: best is 0." in capsys.readouterr().out


def test_bound_prints_the_three_and_what_is_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bound", "--num-requests", "100", "--policies", "vllm-1024", "--seeds", "1", "--jobs", "1", "--quiet", "--cache",
                 str(tmp_path / "cache")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0].partition(" (")[0] for line in lines[2:5]] == [
        "time-slicing", "best fixed split", "fluid bound"]
    assert lines[-1].split()[0] == "vllm-1024"
    assert lines[-1].split()[2] == "req/s"
    assert main(["bound", "--rate", "5"]) == 2
    assert "--rate 5.0: has no effect on bound" in capsys.readouterr().err


def test_a_comparison_says_what_share_of_the_bound_it_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default, below the table, on the page and in the folder; over seeds their mean; not where it means nothing."""
    args = ["compare", "--policies", "vllm-1024,static-96", "--num-requests", "30", "--no-report", "--quiet"]
    share = re.compile(r"share of the fluid bound, [\d.]+ req/s \(one phase at a time [\d.]+\): offered [\d.]+%, "
                       r"vllm-1024 [\d.]+%, static-96 [\d.]+%\. Short of saturation that is the load; lock-step systems may "
                       r"exceed it\.")
    assert main([*args, "--out", str(tmp_path / "out")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert share.search(printed), printed
    assert share.search(" ".join((tmp_path / "out" / "comparison.txt").read_text().split()))
    assert main([*args, "--no-bound", "--out", str(tmp_path / "none")]) == 0
    assert "fluid bound" not in capsys.readouterr().out
    assert main([*args, "--seeds", "2", "--out", str(tmp_path / "seeds")]) == 0
    assert re.search(r"share of the fluid bound, [\d.]+ ± [\d.]+ req/s: offered [\d.]+ ± [\d.]+ %, vllm-1024 ",
                     " ".join((tmp_path / "seeds" / "seeds.txt").read_text().split()))
    capsys.readouterr()
    closed = ["--arrivals", "closed", "--concurrency", "4"]
    assert main([*args, *closed, "--out", str(tmp_path / "closed")]) == 0
    assert "fluid bound" not in capsys.readouterr().out
    assert main([*args, *closed, "--bound", "--out", str(tmp_path / "asked")]) == 0
    assert "share of the fluid bound: not known: a closed loop sends as fast as it is served" in " ".join(
        capsys.readouterr().out.split())
