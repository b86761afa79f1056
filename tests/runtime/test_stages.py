"""All parts in processes of their own: order, deadlines, what a lost device costs, what is archived."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from bullet.cli import measure as profile_cli
from bullet.errors import ConfigError
from bullet.gpu.splits import Split
from bullet.profiler import stages
from bullet.profiler.bench import DeviceLostError, PointError
from bullet.profiler.evidence import read_evidence
from bullet.profiler.plan import Point
from bullet.profiler.progress import Progress, tier_line
from bullet.profiler.session import Target
from bullet.profiler.shapes import decode, prefill
from bullet.profiles.journal import read_journal

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
A, B = prefill("engine_prefill_layer", 512), decode("engine_decode_layer", 8, 1024)


def fake_python(folder, root=ROOT):
    """A python on which the card is faked, and what its processes need in their environment."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {root / "tests" / "runtime" / "on_fakes.py"} "$@"\n')
    python.chmod(0o755)
    return str(python), {**os.environ, "FAKES_PYTHON": str(python),
                         "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))}


def on_fakes(python, environment, out, budget_s):
    """All parts but the engine on the faked card, one split, in processes of their own."""
    done = subprocess.run([python, "-m", "bullet.cli.profile", "stages", "--no-engine", "--splits", "112+20", "--budget-s",
                           budget_s, "--out", str(out)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def run_with(codes, calls):
    """Stands in for a process: the next status of its part."""
    def run(command, limit_s, tick, *, log=None, grace_s=20.0):
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
                            run=run_with({"corun": [3, -11, 0], "own": [3] * 6}, calls))
    assert [part for part, _, _ in calls] == ["corun"] * 3 + ["own"] * 6
    assert outcome.status == 3
    assert "ended with status 3: rows until there are kept; once more in a fresh process" in said[0]


def test_after_a_crash_the_rows_get_their_table_and_it_says_which_tiers_are_whole(tmp_path):
    """Nobody else would: the process that was to write it is gone."""
    assert profile_cli.main(["sweep", "--device", "simulated", "--splits", "112+20", "--out", str(tmp_path)]) == 0
    for name in ("summary.txt", "samples.parquet"):
        (tmp_path / name).unlink()
    progress = Progress(tmp_path / "progress.json")
    progress.end({"co-run matrix": (24, 24), "controls": (3, 22), "SM axis": (0, 33)})
    progress.begin(Point("solo", None, "full", A))
    calls: list = []
    outcome = stages.stages(Target("cuda"), tmp_path, budget_s=600, engine=False,
                            run=run_with({"corun": [-9, -11, 1, 1], "own": [0]}, calls))
    assert [part for part, _, _ in calls] == ["corun"] * 4 + ["own"]  # the same unforeseen end twice is enough
    assert "whole: co-run matrix; begun: controls 3 of 22; not begun: SM axis" in outcome.lines
    assert (tmp_path / "samples.parquet").exists()
    assert Progress(tmp_path / "progress.json").lost == [Point("solo", None, "full", A).key]


def test_what_is_to_be_repaired_ends_it_and_so_does_a_signal(tmp_path):
    calls: list = []
    assert stages.stages(Target("cuda"), tmp_path, budget_s=600, run=run_with({"corun": [2]}, calls)).status == 2
    assert len(calls) == 1
    with pytest.raises(KeyboardInterrupt):
        stages.stages(Target("cuda"), tmp_path, budget_s=600, run=run_with({"corun": [130]}, calls))
    with pytest.raises(ConfigError, match="need at least 60 s"):
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


def test_what_the_engine_left_before_is_not_written_over(tmp_path):
    """Done before: it stays. Cut before: it lies in the new archive, whatever becomes of that."""
    calls: list = []
    archive = tmp_path / "engine.tar.gz"
    for code in (1, 0, 0):
        stages._engine(tmp_path, 100.0, [], stages.Outcome(), lambda line: None, run_with({"engine": [code]}, calls))
    assert len(calls) == 2
    with tarfile.open(archive) as tar:
        assert sorted(tar.getnames()) == ["before.tar.gz", "status.txt"]
        assert tar.extractfile("status.txt").read() == b"0\n"
        with tarfile.open(fileobj=tar.extractfile("before.tar.gz")) as before:
            assert before.extractfile("status.txt").read() == b"1\n"
    archive.write_bytes(archive.read_bytes()[:60])
    assert not stages._finished(archive)


def test_a_part_without_time_is_said_and_one_that_overran_costs_the_others_nothing(tmp_path):
    calls: list = []
    said: list[str] = []
    outcome = stages.stages(Target("cuda"), tmp_path, budget_s=60, started_s=time.monotonic() - 12, say=said.append,
                            run=run_with({"own": [0], "engine": [0]}, calls))
    assert said[0] == "no process for part corun: 18 s are left, 20 needed"
    assert [part for part, _, _ in calls] == ["own"]
    assert said[-1] == "no engine: 42 s are left, 60 needed"
    assert outcome.status == 0
    calls.clear()
    clock = [0.0]

    def overruns(command, limit_s, tick, **options):
        clock[0] += limit_s + 1
        return run_with({"corun": [130], "own": [0]}, calls)(command, limit_s, tick)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages.time, "monotonic", lambda: clock[0])
        outcome = stages.stages(Target("cuda"), tmp_path, budget_s=600, engine=False, say=said.append, run=overruns)
    assert [part for part, _, _ in calls] == ["corun", "own"]
    assert "part corun was interrupted at the end of its time" in said
    assert outcome.status == 0


def test_a_process_that_does_not_heed_the_interrupt_is_killed(tmp_path):
    code = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun', flush=True)\ntime.sleep(60)"
    began = time.monotonic()
    assert stages.run_process([sys.executable, "-c", code], 1.0, lambda: None, log=tmp_path / "log", grace_s=0.5) == -9
    assert time.monotonic() - began < 10


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
    assert {p.name for p in out.iterdir()} == {"check.json", "samples.jsonl", "samples.parquet", "summary.txt"}
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


def test_a_crash_or_a_hang_is_laid_at_once_to_what_was_under_way(tmp_path):
    """Our own process that ended without a word was not cut from outside: no second try."""
    path, point = tmp_path / "progress.json", Point("solo", None, "full", A)
    Progress(path).begin(point)
    assert Progress(path).settle()
    assert not Progress(path).allows(point)
    assert not Progress(path).settle()  # nothing is under way any more
    (tmp_path / "progress.json").unlink()
    assert not Progress(path).settle()
    assert not path.exists()


def _ends(progress, name, error):
    with progress.within(name):
        assert json.loads(progress.path.read_text())["now"] == name
        raise error


def test_a_trial_that_loses_the_device_costs_no_point_and_is_not_repeated(tmp_path):
    path, point = tmp_path / "progress.json", Point("solo", None, "full", A)
    for name, tries in (("evidence", 1), ("gemm", 1), ("proof", 2)):
        for _ in range(tries):
            progress = Progress(path)
            assert progress.spoilt(name) == ""
            progress.begin(point)
            with pytest.raises(DeviceLostError):
                _ends(progress, name, DeviceLostError("gone"))
            progress.end({}, lost=True)  # as the sweep does then
        assert "a process ended in" in Progress(path).spoilt(name)
    assert Progress(path).allows(point)
    with pytest.raises(PointError):
        _ends(progress, "layers", PointError("no such kernel"))
    assert json.loads(path.read_text())["now"] is None


def test_what_is_particular_about_lost_points_is_left_out_before_their_layers_are(tmp_path):
    """cuBLAS told twice, one load twice: the layers themselves are not to blame."""
    progress = Progress(tmp_path / "progress.json")
    told = [Point("corun", Split(112, 20), "both", A._replace(tokens=n), B, told=True) for n in (512, 1024, 2048)]
    spin = [Point("control", Split(112, 20), "decode", B._replace(batch=n), control="tensor_spin") for n in (8, 16, 32)]
    for point in (told[0], spin[0]):
        progress.begin(point)
        progress.end({}, lost=True)
    assert progress.suspects() == set()
    assert progress.allows(told[2])
    for point in (told[1], spin[1]):
        progress.begin(point)
        progress.end({}, lost=True)
    assert progress.suspects() == {"told", "tensor_spin"}
    assert not progress.allows(told[2])
    assert not progress.allows(spin[2])
    assert progress.allows(dataclasses.replace(told[0], told=False))
    assert progress.allows(dataclasses.replace(spin[2], control="idle"))
    prio = Point("corun", None, "both", A, B, sharing="priority")
    for tokens in (1, 2):
        progress.begin(dataclasses.replace(prio, shape=A._replace(tokens=tokens)))
        progress.end({}, lost=True)
    assert not progress.allows(prio)
    assert progress.allows(dataclasses.replace(prio, sharing="plain"))


def test_which_tiers_are_whole_is_said():
    assert tier_line({"co-run matrix": (144, 144), "controls": (3, 38), "SM axis": (0, 143), "checks": (0, 0)}) == (
        "whole: co-run matrix; begun: controls 3 of 38; not begun: SM axis")
    assert tier_line({"a": (0, 2)}) == "whole: no tier; not begun: a"


def test_engine_archive_is_kept_when_the_command_is_cut(tmp_path, monkeypatch):
    """What was there at the last archive is under OUT, whatever comes then."""
    def cut(command, limit_s, tick, *, log=None, grace_s=20.0):
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
    python, environment = fake_python(tmp_path)
    out = tmp_path / "out"
    environment |= {"FAKES_FAIL_AT": "600", "FAKES_LOST": str(tmp_path / "lost")}
    done = on_fakes(python, environment, out, "240")
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
    assert sorted(p.name for p in out.rglob("*")) == ["check.json", "graphs.jsonl.gz", "progress.json",
                                                      "samples.jsonl", "samples.parquet", "summary.txt"]


@pytest.mark.skipif(shutil.which("make") is None or shutil.which("git") is None or not (ROOT / ".git").exists(),
                    reason="needs make, git and a repository to clone")
@pytest.mark.parametrize("card", ["simulated", "fakes"])
def test_the_documented_command_runs_from_a_fresh_clone(tmp_path, card):
    """The line of docs/profiling.md, with less time and one split; all that it leaves is under OUT, in at most eight files."""
    if card == "fakes":
        pytest.importorskip("torch")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True, capture_output=True)
    command = "make gpu BUDGET_S=600 OUT=runs/gpu"
    assert f"\n{command} " in (clone / "docs" / "profiling.md").read_text(encoding="utf-8")
    python, environment = (sys.executable, dict(os.environ)) if card == "simulated" else fake_python(tmp_path, clone)
    environment.pop("PYTHONPATH", None)
    further = "--allow-busy" if card == "fakes" else "--device simulated"
    done = subprocess.run([*command.replace("BUDGET_S=600", "BUDGET_S=180").split(), f"GPU_PYTHON={python}",
                           f"GPU_ARGS={further} --splits 112+20"], cwd=clone, env=environment, capture_output=True, text=True,
                          timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "whole: co-run matrix" in done.stdout
    files = {str(p.relative_to(clone / "runs" / "gpu")) for p in (clone / "runs" / "gpu").rglob("*")}
    wanted = {"check.json", "samples.jsonl", "samples.parquet", "summary.txt"}
    if card == "fakes":
        wanted |= {"graphs.jsonl.gz", "progress.json", "engine.tar.gz"}
        with tarfile.open(clone / "runs" / "gpu" / "engine.tar.gz") as tar:
            assert sorted(tar.getnames()) == ["engine.txt", "engine/steps.json", "status.txt"]
    assert files == wanted
    left = subprocess.run(["git", "status", "--porcelain", "--ignored"], cwd=clone, capture_output=True, text=True, check=True)
    assert {line.split()[-1] for line in left.stdout.splitlines() if "__pycache__" not in line} == {"runs/"}


def test_a_process_that_crashes_leaves_its_rows_a_table_and_the_next_goes_on(tmp_path):
    """A segmentation fault in mid-sweep: no word of its own. What it was at is left out at once, and no row is lost."""
    pytest.importorskip("torch")
    python, environment = fake_python(tmp_path)
    out = tmp_path / "out"
    environment |= {"FAKES_FAIL_AT": "300", "FAKES_LOST": str(tmp_path / "lost"), "FAKES_CRASH": "1"}
    done = on_fakes(python, environment, out, "120")
    assert "part corun ended with status -11: rows until there are kept; once more in a fresh process" in done.stdout
    progress = json.loads((out / "progress.json").read_text())
    (lost,) = progress["lost"]
    assert (progress["now"], progress["cut"]) == (None, [])
    _, rows, _ = read_journal(out / "samples.jsonl")
    assert len({r["id"] for r in rows}) == len(rows)
    assert sum(r["run"] == 0 for r in rows) > 20
    assert all(f"|{lost}|" not in r["id"] for r in rows if r["run"] > 0)  # an earlier visit of it stays


def test_when_the_command_is_killed_outright_its_process_ends_too_and_the_same_command_resumes(tmp_path):
    """SIGKILL for the command alone, as from a machine that has run out of patience: its child closes the device and goes."""
    pytest.importorskip("torch")
    python, environment = fake_python(tmp_path)
    out = tmp_path / "out"
    command = [python, "-m", "bullet.cli.profile", "sweep", "--part", "corun", "--splits", "112+20", "--budget-s", "100"]
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from bullet.profiler.stages import run_process; "
            f"run_process({[*command, '--out', str(out)]!r}, 100.0, lambda: None)")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        for line in parent.stdout:
            if line.startswith("Plan: "):
                break
        while not (out / "samples.jsonl").exists() or (out / "samples.jsonl").stat().st_size < 20_000:
            time.sleep(0.01)
        parent.kill()
        rest = parent.stdout.read()  # until the child has closed its end too
    assert "left: the same command resumes" in rest
    assert not (out / ".lock").exists()
    kept = read_journal(out / "samples.jsonl")[1]
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_journal(out / "samples.jsonl")[1]
    assert rows[:len(kept)] == kept
    assert len({r["id"] for r in rows}) == len(rows) > len(kept)


def test_killed_at_random_moments_and_resumed_until_it_is_whole(tmp_path):
    """kill -9 after 0.2 to 4 s, wherever that is, five times: start-up, proof, a row half written, closing. Then to the end:
    every row once, the files that there should be, and the matrix whole but for what was cut twice."""
    pytest.importorskip("torch")
    python, environment = fake_python(tmp_path)
    out = tmp_path / "out"
    command = [python, "-m", "bullet.cli.profile", "sweep", "--part", "corun", "--splits", "112+20", "--budget-s", "100", "--out",
               str(out)]
    generator, before = random.Random(5), 0
    for _ in range(5):
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL) as process:
            started = time.monotonic()
            while process.poll() is None and (time.monotonic() < started + 3 and not (out / ".lock").exists()):
                time.sleep(0.01)
            time.sleep(generator.uniform(0, 1.5))
            process.kill()
        if (out / "samples.jsonl").exists():
            rows = read_journal(out / "samples.jsonl")[1]
            assert len(rows) >= before
            before = len(rows)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_journal(out / "samples.jsonl")[1]
    assert len({r["id"] for r in rows}) == len(rows)
    progress = json.loads((out / "progress.json").read_text())
    done_, planned = progress["tiers"]["co-run matrix"]
    assert planned - done_ <= sum(key.startswith("corun|112+20|") for key in progress["lost"])
    assert sorted(p.name for p in out.rglob("*")) == ["check.json", "graphs.jsonl.gz", "progress.json", "samples.jsonl",
                                                      "samples.parquet", "summary.txt"]
    read_evidence(out / "graphs.jsonl.gz")
