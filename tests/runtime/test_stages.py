"""All parts in processes of their own: order, deadlines, what a lost device costs, what is archived."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from bullet.cli import measure as profile_cli
from bullet.errors import ConfigError
from bullet.profiler import stages
from bullet.profiler.evidence import read_evidence
from bullet.profiler.plan import Point
from bullet.profiler.progress import Progress, tier_line
from bullet.profiler.session import Target
from bullet.profiler.shapes import decode, prefill
from bullet.profiles.journal import read_journal

HERE = Path(__file__).resolve().parent
A, B = prefill("engine_prefill_layer", 512), decode("engine_decode_layer", 8, 1024)


def run_with(codes, calls):
    """Stands in for a process: the next status of its part."""
    def run(command, limit_s, tick):
        part = command[command.index("--part") + 1] if "--part" in command else "engine"
        calls.append((part, limit_s, list(command)))
        tick()
        return codes[part].pop(0)
    return run


def test_parts_run_in_order_each_within_its_share(tmp_path):
    calls: list = []
    outcome = stages.stages(Target("cuda"), tmp_path / "out", budget_s=600, arguments=["--allow-busy"],
                            started_s=time.monotonic(), run=run_with({"corun": [0], "own": [0], "engine": [1]}, calls))
    assert [part for part, _, _ in calls] == ["corun", "own", "engine"]
    assert [round(limit_s / 10) for _, limit_s, _ in calls] == [30, 38, 59]
    assert all("--allow-busy" in command for part, _, command in calls if part != "engine")
    assert outcome.status == 0  # the engine's failure costs nothing of the sweep
    assert outcome.statuses == {"corun": [0], "own": [0], "engine": [1]}
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["engine.tar.gz"]


def test_a_part_that_loses_the_device_goes_on_in_a_fresh_process_and_the_next_comes_after_it(tmp_path):
    calls: list = []
    said: list[str] = []
    outcome = stages.stages(Target("cuda"), tmp_path, budget_s=600, engine=False, say=said.append,
                            run=run_with({"corun": [3, -11, 0], "own": [3, 3, 3, 3]}, calls))
    assert [part for part, _, _ in calls] == ["corun"] * 3 + ["own"] * 4
    assert outcome.status == 3
    assert "ended with status 3: rows until there are kept; once more in a fresh process" in said[0]


def test_what_is_to_be_repaired_ends_it_and_so_does_a_signal(tmp_path):
    calls: list = []
    assert stages.stages(Target("cuda"), tmp_path, budget_s=600, run=run_with({"corun": [2]}, calls)).status == 2
    assert len(calls) == 1
    with pytest.raises(KeyboardInterrupt):
        stages.stages(Target("cuda"), tmp_path, budget_s=600, run=run_with({"corun": [130]}, calls))
    with pytest.raises(ConfigError, match="need at least 40 s"):
        stages.stages(Target("cuda"), tmp_path, budget_s=30)


def test_an_archive_is_whole_at_any_time_and_leaves_out_what_can_be_made_again(tmp_path):
    folder, archive = tmp_path / "work", tmp_path / "engine.tar.gz"
    (folder / "engine" / "real").mkdir(parents=True)
    (folder / "engine" / "real" / "requests.parquet").write_bytes(b"x" * 100)
    (folder / "engine" / "real" / "trace.json").write_bytes(bytes(i * 7919 % 251 for i in range(40_000)))
    (folder / "link").symlink_to(folder)
    stages.pack(folder, archive)
    with tarfile.open(archive) as tar:
        assert sorted(tar.getnames()) == ["engine/real/requests.parquet", "engine/real/trace.json"]
    stages.pack(folder, archive, limit_bytes=300)
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["engine/real/requests.parquet"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine.tar.gz", "work"]


def test_a_process_is_interrupted_at_its_limit_and_its_words_are_kept(tmp_path):
    code = "import time\nprint('begun', flush=True)\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    raise SystemExit(7)"
    ticks: list[int] = []
    status = stages.run_process([sys.executable, "-c", code], 2.0, lambda: ticks.append(1), log=tmp_path / "log")
    assert status == 7
    assert "begun" in (tmp_path / "log").read_text()


def test_all_of_it_on_the_simulators_device(tmp_path, capfd):
    out = tmp_path / "out"
    assert profile_cli.main(["stages", "--device", "simulated", "--splits", "112+20", "--budget-s", "200",
                             "--out", str(out)]) == 0
    text = capfd.readouterr().out
    assert "whole: co-run matrix" in text
    assert {p.name for p in out.iterdir()} == {"check.json", "plan.txt", "samples.jsonl", "samples.parquet", "summary.txt"}
    tiers = {json.loads(line).get("tier") for line in (out / "samples.jsonl").read_text().splitlines()}
    assert {"co-run matrix", "SM axis", "finer co-run matrix"} <= tiers


# ------------------------------------------------------------------------------------------- progress


def test_a_point_that_lost_the_device_is_not_tried_again(tmp_path):
    path = tmp_path / "progress.json"
    corun, solo = Point("corun", None, "both", A, B), Point("solo", None, "full", A)
    progress = Progress(path)
    progress.begin(corun)
    progress.end({"SM axis": (1, 2)}, lost=True)
    again = Progress(path)
    assert not again.allows(corun)
    assert again.allows(solo)
    assert again.suspects() == set()  # which of the two it was is not known
    again.begin(solo)
    again.end({}, lost=True)
    assert Progress(path).suspects() == {"engine_prefill_layer"}
    assert not Progress(path).allows(Point("solo", None, "full", A._replace(tokens=4096)))
    assert Progress(path).allows(Point("solo", None, "full", B))


def test_a_point_that_was_cut_is_tried_once_more(tmp_path):
    path, point = tmp_path / "progress.json", Point("solo", None, "full", A)
    first = Progress(path)
    first.begin(point)
    first.end({})  # not yet on disk: a process that is cut between two points has one too many there
    second = Progress(path)
    assert second.allows(point)
    second.begin(point)
    assert not Progress(path).allows(point)
    path.write_text("{ half")
    assert Progress(path).allows(point)


def test_which_tiers_are_whole_is_said():
    assert tier_line({"co-run matrix": (144, 144), "controls": (3, 38), "SM axis": (0, 143), "checks": (0, 0)}) == (
        "whole: co-run matrix; begun: controls 3 of 38; not begun: SM axis")
    assert tier_line({"a": (0, 2)}) == "whole: no tier; not begun: a"


def test_engine_archive_is_kept_when_the_command_is_cut(tmp_path, monkeypatch):
    """What was there at the last archive is under OUT, whatever comes then."""
    def cut(command, limit_s, tick, log=None):
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir()
        (folder / "steps.json").write_text("{}")
        tick()
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "run_process", cut)
    with pytest.raises(KeyboardInterrupt):
        stages._engine(tmp_path, 100.0, [], stages.Outcome(), lambda line: None, cut)
    with tarfile.open(tmp_path / "engine.tar.gz") as tar:
        assert tar.getnames() == ["engine/steps.json"]


def test_all_parts_on_a_faked_card_of_which_one_loses_the_device(tmp_path):
    """Real processes, one after the other, each with a faked card of its own; the 600th launch is a sticky fault. The part goes
    on in a fresh process without the point in which that was, the next part resumes, and every row is there once."""
    pytest.importorskip("torch")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "on_fakes.py"} "$@"\n')
    python.chmod(0o755)
    out, root = tmp_path / "out", HERE.parents[1]
    environment = {**os.environ, "FAKES_PYTHON": str(python), "FAKES_FAIL_AT": "600", "FAKES_LOST": str(tmp_path / "lost"),
                   "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))}
    done = subprocess.run([str(python), "-m", "bullet.cli.profile", "stages", "--no-engine", "--splits", "112+20", "--budget-s",
                           "240", "--out", str(out)], cwd=root, env=environment, capture_output=True, text=True, timeout=300,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the GPU answers no more" in done.stderr
    assert "part corun ended with status 3: rows until there are kept; once more in a fresh process" in done.stdout
    progress = json.loads((out / "progress.json").read_text())
    (lost,) = progress["lost"]
    assert (progress["now"], progress["cut"]) == (None, [])
    _, rows, _ = read_journal(out / "samples.jsonl")
    assert len({r["id"] for r in rows}) == len(rows)
    assert {r["run"] for r in rows} == {0, 1, 2}
    assert {r["tier"] for r in rows if r["run"] == 2} >= {"own kernels"}
    assert not {r["tier"] for r in rows if r["run"] < 2} & {"own kernels"}
    assert all(f"|{lost}|" not in r["id"] for r in rows)
    summary = (out / "summary.txt").read_text()
    assert f"left out, since the device was lost there: {lost}" in summary
    assert "whole: co-run matrix, controls, checks, SM axis, own kernels" in summary
    assert "Where kernels ran: " in summary
    assert read_evidence(out / "graphs.jsonl.gz")
    assert sorted(p.name for p in out.rglob("*")) == ["check.json", "graphs.jsonl.gz", "plan.txt", "progress.json",
                                                      "samples.jsonl", "samples.parquet", "summary.txt"]
