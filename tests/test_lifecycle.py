"""One life cycle and one boundary: signals, output, folders, plots and users' policies, of every command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bullet import files, signals
from bullet.cli import profile, sim
from bullet.config import RunConfig
from bullet.errors import ResultsError
from bullet.files import Claim
from bullet.results import folder, page
from bullet.results.folder import RunWriter, load_run
from bullet.signals import Stopped

SMALL = ["--policy", "vllm-512", "--num-requests", "40", "--quiet", "--no-report"]
ALL = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped by SIGTERM"),
       (signal.SIGHUP, 129, "stopped by SIGHUP")]
PROGRAM = "import sys; from bullet.cli.{} import main; sys.exit(main())"


def child(*arguments: object, which: str = "sim", environment: dict[str, str] | None = None, **options: Any) -> Any:
    """A command in a process of its own, to be talked to."""
    return subprocess.Popen([sys.executable, "-c", PROGRAM.format(which), *map(str, arguments)],
                            env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL,
                            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options})


def accounted(out: Path, offered: int) -> dict[str, Any]:
    """The summary of a stopped run, which adds up and agrees with its rows."""
    run = load_run(out)
    summary: dict[str, Any] = run.summary
    status = run.requests["status"].tolist()
    assert summary["offered"] == offered == summary["finished"] + summary["rejected"] + summary["unfinished"]
    assert status.count("finished") == summary["finished"]
    assert len(set(run.requests["id"].tolist())) == len(status)
    return summary


# ------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(("number", "status", "words"), ALL)
@pytest.mark.parametrize("which", range(6))
def test_a_signal_while_a_run_closes_loses_nothing(number: int, status: int, words: str, which: int, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """At each file that the closing run writes: the run is whole, and the command ends by the signal."""
    written: list[str] = []
    rename = os.replace

    def replace(source: Any, target: Any) -> None:
        name = Path(target).name
        if name in ("config.toml", "summary.json") and len(written) < 2:  # before the first step
            written.append(name)
        elif len(written) >= 2:
            if len(written) == 2 + which:
                signal.raise_signal(number)
            written.append(name)
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    code = sim.main(["run", *SMALL, "--out", str(tmp_path / "o")])
    assert written[2:] == ["steps.parquet", "requests.parquet", "timing.json", "summary.json"]
    if which > 3:  # there is no such file: no signal came
        assert code == 0
        return
    assert code == status
    assert capsys.readouterr().err == f"bullet-sim: {words}; finished runs are kept in {tmp_path / 'o'}/\n"
    run = load_run(tmp_path / "o")
    assert run.summary["complete"] is True
    assert len(run.requests) == 40
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == ["config.toml", "requests.parquet", "steps.parquet",
                                                                  "summary.json", "timing.json"]


@pytest.mark.parametrize(("number", "status", "words"), ALL)
def test_signals_before_between_and_after_are_heard(number: int, status: int, words: str, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    from bullet import api

    def struck(*_: Any) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(api, "load_workload", struck)
    assert sim.main(["run", *SMALL, "--out", str(tmp_path / "o")]) == status
    assert capsys.readouterr().err == f"bullet-sim: {words}; nothing was written\n"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setattr(page, "write_run_report", struck)
    assert sim.main(["run", *SMALL[:-1], "--out", str(tmp_path / "o")]) == status
    out, err = capsys.readouterr()
    assert "simulated on A100-80GB" in out  # the table comes before the plots
    assert err == f"bullet-sim: {words}; finished runs are kept in {tmp_path / 'o'}/\n"
    assert signal.getsignal(number) is before


LOOP = """
from bullet.policies.vllm import Vllm
class Loop(Vllm):
    asked = 0
    def __init__(self, context): super().__init__(context, 512)
    def next_step(self, lane, state, now_s):
        self.asked += 1
        if self.asked == 30:
            print("looping", flush=True)
            while True: pass
        return super().next_step(lane, state, now_s)
"""


@pytest.mark.parametrize(("number", "status", "words"), ALL)
def test_a_policy_that_loops_is_said_and_stopped(number: int, status: int, words: str, tmp_path: Path) -> None:
    """The first signal says what it waits for; the second ends it, every request accounted for."""
    (tmp_path / "p.py").write_text(LOOP)
    process = child("run", "--policy", f"{tmp_path}/p.py:Loop", "--num-requests", 40, "--quiet", "--no-report", "--out",
                    tmp_path / "o")
    with process:
        assert any(line == "looping\n" for line in process.stdout)
        process.send_signal(number)
        assert process.stderr.readline() == (
            f"bullet-sim: {words}, stops after the present step: policy '{tmp_path}/p.py:Loop' has not answered for 1 s: again "
            "stops it there\n")
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert err.startswith(f"bullet-sim: {words}; rows so far are kept in {tmp_path / 'o'}/")
    assert err.count("\n") == 1
    assert accounted(tmp_path / "o", 40)["why"] == "interrupted"


def test_a_signal_that_somebody_swallowed_is_not_forgotten() -> None:
    """No run begins after a stop was heard, whatever caught the exception on its way."""
    with signals.listening("test"):
        with suppress(KeyboardInterrupt):  # as a library's bare except might
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped, match="stopped by SIGTERM"):
            RunWriter(Path("nowhere"))
    assert not Path("nowhere").exists()


def test_what_is_held_is_whole_and_then_the_signal_is_carried_out() -> None:
    done = []

    def write(number: int) -> None:
        with signals.held():
            with signals.held():
                signal.raise_signal(number)
                done.append("inner")
            done.append("outer")
        done.append("never")

    with signals.listening("test"), pytest.raises(Stopped) as caught:
        write(signal.SIGHUP)
    assert signals.exit_status(caught.value) == 129
    with pytest.raises(KeyboardInterrupt):  # without a handler: Python's own
        write(signal.SIGINT)
    assert done == ["inner", "outer"] * 2


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    """nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.listening("test"):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_measured_rows_are_on_the_disk_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old rows go when nothing runs, or in any case before 5 s; then SIGKILL costs no more than those since."""
    from tests.test_results import request, step

    now = [100.0]
    monkeypatch.setattr(folder.time, "monotonic", lambda: now[0])
    writer = RunWriter(tmp_path / "o", source="measured")
    writer.resolved(RunConfig(), 3)
    writer.step(step(0))
    writer.request(request(0))
    for at, busy, rows in ((101.9, False, 0), (102.1, True, 0), (102.1, False, 1), (103.0, False, 1), (106.2, True, 1)):
        now[0] = at
        assert writer.poll(busy) is False
        assert len(list((tmp_path / "o" / "parts").glob("steps-*"))) == rows, at
    writer.step(step(1))
    now[0] = 110.3
    writer.poll(True)
    assert max(folder.IDLE_S, folder.MOST_S) < 5
    run = load_run(tmp_path / "o")
    assert (len(run.steps), len(run.requests)) == (2, 1)
    writer.abort("test")


# ------------------------------------------------------------------------------------------- output


@pytest.mark.parametrize("to", ["closed", "full", "gone", "no stderr"])
def test_output_that_closes_stops_no_work(to: str, tmp_path: Path) -> None:
    end, gone = os.pipe()
    os.close(end)
    options: dict[str, Any] = {
        "closed": {"stdout": None, "preexec_fn": lambda: os.close(1)}, "gone": {"stdout": gone},
        "full": {"stdout": os.open("/dev/full", os.O_WRONLY)},
        "no stderr": {"stderr": None, "preexec_fn": lambda: os.close(2)}}[to]
    process = child("run", *SMALL, "--out", tmp_path / "o", **options)
    _, err = process.communicate(timeout=120)
    os.close(gone)
    assert process.returncode == 0
    assert (err or "") == ("bullet-sim: standard output cannot be written (No space left on device): the work goes on\n"
                           if to == "full" else "")
    assert load_run(tmp_path / "o").summary["complete"] is True


def test_a_fit_that_nobody_reads_is_written(tmp_path: Path) -> None:
    assert profile.main(["sweep", "--device", "simulated", "--splits", "112+20", "--budget-s", "30", "--out",
                         str(tmp_path / "s")]) == 0
    end, gone = os.pipe()
    os.close(end)
    process = child("fit", tmp_path / "s", "--out", tmp_path / "f", which="profile", stdout=gone)
    _, err = process.communicate(timeout=120)
    os.close(gone)
    assert (process.returncode, err) == (0, "")
    assert sorted(p.name for p in (tmp_path / "f").iterdir()) == ["SOURCE.md", "fit.json"]


def test_a_locale_that_cannot_spell_a_path(tmp_path: Path) -> None:
    out = tmp_path / "ö"
    process = child("run", *SMALL, "--out", out, environment={"PYTHONIOENCODING": "ascii"})
    text, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "\\xf6/:" in text
    assert load_run(out).summary["complete"] is True


@pytest.mark.parametrize(("out", "words"), [("o\udcff", "is not UTF-8"), ("o", "there is no present folder"),
                                            (None, "there is no present folder")])
def test_a_folder_that_nobody_can_name_is_one_line(out: str | None, words: str, tmp_path: Path) -> None:
    where = tmp_path / "here"
    where.mkdir()
    process = child("run", *SMALL, *(["--out", out] if out else []), cwd=where,
                    environment={"PYTHONPATH": str(Path(files.__file__).parents[1])},
                    preexec_fn=None if out and not out.isascii() else where.rmdir)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.count("\n") == 1
    assert words in err


# ------------------------------------------------------------------------------------------- plots


def test_a_notebooks_backend_is_not_heard(tmp_path: Path) -> None:
    process = child("compare", "--quiet", "--num-requests", 10, "--policies", "vllm-512,vllm-1024", "--out", tmp_path / "o",
                    environment={"MPLBACKEND": "module://no_such_package.backend_inline"})
    text, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")
    assert "vllm-1024" in text
    assert (tmp_path / "o" / "plots" / "comparison.png").is_file()


def test_a_plot_that_fails_costs_neither_the_table_nor_the_next_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("backend")

    monkeypatch.setattr(page, "plot_cdfs", fails)
    assert sim.main(["compare", "--quiet", "--num-requests", "10", "--policies", "vllm-512,vllm-1024", "--out",
                     str(tmp_path / "o")]) == 0
    out, err = capsys.readouterr()
    assert out.index("vllm-512") < out.index("vllm-1024") < out.index("written to")
    assert err == "bullet: no plots or page: KeyError: 'backend'\n" * 3  # of each run and of the comparison
    for name in ("vllm-512", "vllm-1024"):
        assert load_run(tmp_path / "o" / name).summary["complete"] is True


# ------------------------------------------------------------------------------------------- compare resumes

COMPARE = ["compare", "--policies", "vllm-512,vllm-1024,vllm-2048", "--num-requests", "20", "--quiet", "--no-report"]


def stop_in(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A SIGTERM in the first step of the run of that number."""
    begun: list[int] = []
    plain = RunWriter.step

    def step(self: RunWriter, row: tuple[Any, ...]) -> None:
        if row[0] == 0:
            begun.append(1)
            if len(begun) == number:
                signal.raise_signal(signal.SIGTERM)
        plain(self, row)

    monkeypatch.setattr(RunWriter, "step", step)


def test_a_comparison_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert sim.main([*COMPARE, "--out", str(tmp_path / "whole")]) == 0
    table = capsys.readouterr().out.partition("\nwritten to")[0]
    out = tmp_path / "o"
    with monkeypatch.context() as patch:
        stop_in(patch, 2)
        assert sim.main([*COMPARE, "--out", str(out)]) == 143
    assert load_run(out / "vllm-512").summary["complete"] is True
    accounted(out / "vllm-1024", 20)
    kept = (out / "vllm-512" / "timing.json").read_bytes()
    capsys.readouterr()
    for changed, words in ((["--seed", "1"], "of another configuration (seed = 1 is asked for now)"),
                           (["--policies", "vllm-1024,vllm-2048"], "vllm-512, which is none of --policies")):
        assert sim.main([*COMPARE, *changed, "--out", str(out)]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1
    assert sim.main([*COMPARE, "--out", str(out)]) == 0
    assert capsys.readouterr().out.partition("\nwritten to")[0] == table
    assert (out / "vllm-512" / "timing.json").read_bytes() == kept  # not run again
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file() and path.name != "timing.json":
            assert (out / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes(), path
    assert sim.main([*COMPARE, "--out", str(out)]) == 2  # it is whole now
    assert "exists already" in capsys.readouterr().err


def test_a_stopped_run_with_somebody_elses_file_is_not_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        stop_in(patch, 1)
        assert sim.main([*COMPARE, "--out", str(tmp_path / "o")]) == 143
    (tmp_path / "o" / "vllm-512" / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert sim.main([*COMPARE, "--out", str(tmp_path / "o")]) == 2
    assert "notes.txt: is no file of the stopped run" in capsys.readouterr().err
    assert (tmp_path / "o" / "vllm-512" / "requests.parquet").is_file()


# ------------------------------------------------------------------------------------------- folders


def test_a_folder_is_one_commands_alone(tmp_path: Path) -> None:
    with Claim(tmp_path / "a" / "b"):
        with pytest.raises(ResultsError, match="b: another command is writing there"):
            Claim(tmp_path / "a" / "b")
        (tmp_path / "a" / "b" / "file").write_text("x")
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["file"]
    with pytest.raises(ResultsError, match="exists already"):
        Claim(tmp_path / "a" / "b")
    with Claim(tmp_path / "a" / "b", resumes="file") as claim:
        assert claim.found == {"file"}
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["file"]


def test_what_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="refused"), Claim(tmp_path / "a" / "b" / "c"):
        raise ValueError("refused")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="refused"), Claim(tmp_path / "mine"):
        raise ValueError("refused")
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_of_many_that_want_one_folder_one_has_it(tmp_path: Path) -> None:
    """Five at once, a hundred times: the lock and not luck decides."""
    for turn in range(100):
        won: list[Claim] = []
        lost: list[str] = []
        gate = threading.Barrier(5)

        def take(path: Path = tmp_path / str(turn), won: list[Claim] = won, lost: list[str] = lost,
                 gate: threading.Barrier = gate) -> None:
            gate.wait()
            try:
                won.append(Claim(path))
            except ResultsError as exc:
                lost.append(str(exc))

        threads = [threading.Thread(target=take) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 4), lost
        assert all("another command is writing there" in line for line in lost)
        won[0].release()


@pytest.mark.parametrize("command", [["run", *SMALL], ["validate", "rtx4090", "--jitters", "0", "--quiet"]])
def test_three_commands_into_one_folder(command: list[str], tmp_path: Path) -> None:
    processes = [child(*command, "--out", tmp_path / "o") for _ in range(3)]
    ends = [(process.communicate(timeout=240)[1], process.returncode) for process in processes]
    assert sorted(code for _, code in ends) == [0, 2, 2]
    for err, code in ends:
        assert err.count("\n") == (1 if code else 0)
        assert code == 0 or "another command is writing there" in err or "exists already" in err
    assert not (tmp_path / "o" / ".lock").exists()


@pytest.mark.parametrize("name", ["summary.txt", "plan.txt", "check.json", "other"])
def test_a_sweep_does_not_write_over_a_users_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text("mine")
    assert profile.main(["sweep", "--device", "simulated", "--budget-s", "5", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "exists already and is not an empty folder" in err
    assert err.count("\n") == 1
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, "mine")]


# ------------------------------------------------------------------------------------------- the boundary


def test_what_nobody_foresaw_is_one_line_with_a_traceback_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("odd\nthing")

    monkeypatch.setattr("bullet.sim.run.Simulation.run", breaks)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert sim.main(["run", *SMALL, "--out", str(tmp_path / "o")]) == 1
    err = capsys.readouterr().err
    (kept,) = tmp_path.glob("bullet-sim-*-traceback.txt")
    assert err == (f"bullet-sim: failed, which is a mistake of ours: RuntimeError: odd thing; traceback in {kept}; rows so far "
                   f"are kept in {tmp_path / 'o'}/ (0 of 40 requests finished)\n")
    assert "in breaks" in kept.read_text()
    assert sim.main(["run", *SMALL, "--debug", "--out", str(tmp_path / "p")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last)")
    assert "RuntimeError: odd\nthing" in err
    assert len(list(tmp_path.glob("*-traceback.txt"))) == 1


POLICY = """
import os, sys
print("executed", flush=True)
from bullet.policies.vllm import Vllm
from bullet.state import HybridStep
class Bad(Vllm):
    {attribute}
    def __init__(self, context):
        {init}super().__init__(context, 512)
        self.asked = 0
    def next_step(self, lane, state, now_s{more}):
        self.asked += 1
        if self.asked == 30:
            {act}
        return super().next_step(lane, state, now_s)
    def observe(self, step, elapsed_s):
        {observe}super().observe(step, elapsed_s)
"""
PLAIN = {"attribute": "x = 1", "init": "", "more": "", "act": "pass", "observe": ""}


@pytest.mark.parametrize(("part", "text", "line", "words"), [
    ("act", "1 / 0", 14, "its next_step failed: ZeroDivisionError: division by zero"),
    ("act", "sys.exit(0)", 14, "its next_step failed: SystemExit: 0"),
    ("act", "sys.exit()", 14, "its next_step failed: SystemExit"),
    ("act", "raise MemoryError", 14, "its next_step failed: MemoryError"),
    ("act", "return HybridStep", 11, "was answered <class 'bullet.state.decisions.HybridStep'>: must be a HybridStep or a Wait"),
    ("act", "return 7", 11, "was answered 7: must be a HybridStep or a Wait"),
    ("act", "state.kv.free_blocks -= 1", 11, "its next_step changed the state (KV blocks): it may only read it"),
    ("act", "state.target = (7, 7)", 14, "its next_step changed the state (SystemState: target = (7, 7)): it may only read it"),
    ("act", "return (super().next_step(lane, state, now_s), state.queue.known_tokens.append(1))[0]", 11, "the state (queue)"),
    ("act", "state.decode.requests.popitem()", 11, "changed the state (decode batch)"),
    ("act", "state.decode.first_token_s[0] += 1", 11, "changed the state (decode batch)"),
    ("act", "state.decode.residues[3] += 1", 11, "changed the state (decode batch)"),
    ("act", "state.in_flight['prefill'] = None", 11, "changed the state (in flight)"),
    ("act", "state.queue.append(next(iter(state.decode.requests.values())))", 14, ": place = "),
    ("act", "state.decode.advance()", 11, "changed the state (decode batch)"),
    ("act", "list(state.in_flight.values()) and vars(state).update(target=(7, 7)) or vars(state).update(target=(7, 7))", 11,
     "changed the state (target)"),
    ("act", "state.chunked.append(None)", 15, "its next_step failed: AttributeError"),
    ("act", "next(iter(state.decode.requests.values())).generated += 3", 14, ": generated = 4): it may only read it"),
    ("act", "next(iter(state.decode.requests.values())).prompt_tokens = 3", 14, ": prompt_tokens = 3): it may only read it"),
    ("more", ", extra", 11, "its next_step failed: TypeError"),
    ("observe", "raise KeyError(3); ", 17, "its observe failed: KeyError: 3"),
    ("init", "sys.exit(0); ", 9, "could not be built: SystemExit: 0"),
    ("attribute", "lanes = None", None, "is not a policy: it needs lanes"),
    ("attribute", "lanes = ('prefill',)", None, "lanes = ('prefill',): must be ('prefill', 'decode') or ('hybrid',)")])
def test_a_users_policy_that_fails_is_told_with_its_line(part: str, text: str, line: int | None, words: str, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.py"
    path.write_text(POLICY.format(**{**PLAIN, part: text}))
    arguments = ["run", "--policy", f"{path}:Bad", "--num-requests", "40", "--quiet", "--no-report"]
    assert sim.main([*arguments, "--out", str(tmp_path / "o")]) == 2
    out, err = capsys.readouterr()
    assert out.count("executed") == 1
    assert err.count("\n") == 1
    assert words in err
    if line is not None:
        assert err.startswith(f"bullet-sim: error: {path}:{line}: policy '{path}:Bad'")
    if part in ("act", "more", "observe"):
        assert ": at t = " in err
        assert f"; rows so far are kept in {tmp_path / 'o'}/" in err
        accounted(tmp_path / "o", 40)
    else:
        assert not (tmp_path / "o").exists()
    assert sim.main([*arguments, "--debug", "--out", str(tmp_path / "again")]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_policy_that_goes_elsewhere_does_not_take_the_rows_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.py").write_text(POLICY.format(**{**PLAIN, "act": "os.chdir('/')"}))
    assert sim.main(["compare", "--policies", "p.py:Bad,vllm-512", "--num-requests", "40", "--quiet", "--out", "o"]) == 0
    assert load_run(tmp_path / "o" / "vllm-512").summary["complete"] is True
    assert (tmp_path / "o" / "report.html").is_file()


def test_temporary_names_of_two_processes_differ(tmp_path: Path) -> None:
    with files.whole_file(tmp_path / "a") as temporary:
        assert temporary.name == f"a.{os.getpid()}.tmp"
        temporary.write_text("x")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_every_command_has_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    commands: list[tuple[Callable[[list[str]], int], str]] = [
        *((sim.main, name) for name in ("run", "compare", "validate", "list")),
        *((profile.main, name) for name in ("check", "sweep", "gpu", "table", "import", "fit", "show"))]
    for main, name in commands:
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0
        assert "--debug" in capsys.readouterr().out, name

