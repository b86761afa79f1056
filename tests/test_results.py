"""Rows go in, the same rows come out: whole, stopped, killed; nothing overwritten, equal runs equal to the byte."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bullet import files
from bullet.config import RunConfig
from bullet.errors import ResultsError
from bullet.results import columns, folder
from bullet.results.columns import REQUEST_COLUMNS, STEP_COLUMNS, RequestTable, RunOutcome, StepTable
from bullet.results.folder import RunWriter, load_run


def step(i: int, predicted_s: float | None = 0.5) -> tuple[Any, ...]:
    lane = ("prefill", "decode")[i % 2]
    return (i, lane, lane, float(i), i + 0.5, 96, 100, 0, 7 * i, 0, 4, predicted_s, 0.5, 0.25, 12, 3, 40, 96, 12, f"why-{i % 3}")


def request(i: int, status: str = "finished") -> tuple[Any, ...]:
    done = status == "finished"
    return (i, 0.1 * i, 10, 4, status, "" if done else "over_context", 0.5 if done else None, 1.0 if done else None,
            2.0 if done else None, 4 if done else 0, 0, 0.03, 0.02)


def outcome(writer: RunWriter) -> RunOutcome:
    steps, requests = writer.tables()
    return RunOutcome(RunConfig(), "toy", steps, requests, np.empty(0), np.empty(0, dtype=np.int64), {"idle": 1.0}, 1.0, 1, 1, 0,
                      0, 0.0, 0.1, {"gpu": "toy", "model": "tiny", "source": "fitted"})


def write(folder: Path, steps: int = 10, part_rows: int = 4) -> None:
    with RunWriter(folder, part_rows=part_rows) as writer:
        writer.resolved(RunConfig())
        for i in range(steps):
            writer.step(step(i, None if i == 2 else 0.5))
        writer.request(request(0))
        writer.request(request(1, "rejected"))
        writer.close(outcome(writer), {"offered": 2}, {"wall_s": 1.0})


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.summary == {"complete": True, "offered": 2}
    assert run.config == RunConfig()
    assert run.steps["step"].tolist() == list(range(10))
    assert run.steps["lane"].tolist() == ["prefill", "decode"] * 5
    assert run.steps["reason"][4] == "why-1"
    assert [i for i, x in enumerate(run.steps["predicted_s"]) if np.isnan(x)] == [2]
    assert run.requests["status"].tolist() == ["finished", "rejected"]
    assert np.isnan(run.requests["finish_s"]).tolist() == [False, True]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.toml", "requests.parquet", "steps.parquet",
                                                                    "summary.json", "timing.json"]


def test_the_files_state_their_source_and_types(tmp_path: Path) -> None:
    write(tmp_path / "run")
    for name, expected in (("steps", STEP_COLUMNS), ("requests", REQUEST_COLUMNS)):
        schema = pq.read_schema(tmp_path / "run" / f"{name}.parquet")
        assert schema.names == list(expected)
        assert {k: v for k, v in schema.metadata.items() if k != b"ARROW:schema"} == {
            b"source": b"simulated", b"gpu": b"a100-80gb", b"model": b"llama-3.1-8b", b"policy": b"bullet",
            b"device_source": b"fitted"}
    # A null is a null to other readers too, not a NaN.
    assert pq.read_table(tmp_path / "run" / "steps.parquet")["predicted_s"].null_count == 1


def test_equal_rows_equal_bytes_however_they_were_cut(tmp_path: Path) -> None:
    for name, part_rows in (("a", 3), ("b", 3), ("c", 1000)):
        write(tmp_path / name, part_rows=part_rows)
    for file in ("steps.parquet", "requests.parquet", "config.toml", "summary.json"):
        assert len({(tmp_path / name / file).read_bytes() for name in "abc"}) == 1, file


def test_no_rows_at_all(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.resolved(RunConfig())
        writer.close(outcome(writer), {}, {})
    run = load_run(tmp_path / "run")
    assert (len(run.steps), len(run.requests)) == (0, 0)


@pytest.mark.parametrize(("error", "why"), [(KeyboardInterrupt(), "interrupted"), (ValueError("odd"), "ValueError: odd")])
def test_a_stopped_run_keeps_its_rows_and_says_so(error: BaseException, why: str, tmp_path: Path) -> None:
    def stopped() -> None:
        with RunWriter(tmp_path / "run", part_rows=4) as writer:
            writer.resolved(RunConfig())
            for i in range(7):
                writer.step(step(i))
            writer.request(request(0))
            writer.request(request(1, "unfinished"))
            raise error

    with pytest.raises(type(error)):
        stopped()
    run = load_run(tmp_path / "run")
    assert run.summary == {"complete": False, "why": why, "source": "simulated", "offered": 2, "finished": 1, "rejected": 0,
                           "unfinished": 1}
    assert run.steps["step"].tolist() == list(range(7))
    assert not (tmp_path / "run" / "parts").exists()


def test_a_killed_run_is_read_from_its_parts(tmp_path: Path) -> None:
    """As after SIGKILL: the writer is dropped without a word."""
    writer = RunWriter(tmp_path / "run", part_rows=4)
    writer.resolved(RunConfig())
    for i in range(11):
        writer.step(step(i))
    del writer
    run = load_run(tmp_path / "run")
    assert run.summary["complete"] is False
    assert "killed" in run.summary["why"]
    assert run.steps["step"].tolist() == list(range(8))
    assert len(run.requests) == 0


def test_a_run_that_never_began_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wrong option"), RunWriter(tmp_path / "run"):
        raise ValueError("wrong option")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="wrong option"), RunWriter(tmp_path / "mine"):
        raise ValueError("wrong option")
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]  # it was there before


def test_a_requested_stop_lands_on_the_next_step(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", part_rows=4)
    writer.step(step(0))
    writer.request_stop()
    writer.request(request(0))  # a request's row never stops a run: its step is not over
    with pytest.raises(KeyboardInterrupt):
        writer.step(step(1))
    assert writer.abort("interrupted") == {"offered": 1, "finished": 1, "rejected": 0, "unfinished": 0}
    assert len(folder.read_table(tmp_path / "run" / "steps.parquet", StepTable)) == 2


def test_a_failure_after_the_merge_does_not_lose_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = files.write_json

    def full_disk(path: Path, value: Any) -> None:
        if path.name == "timing.json":
            raise ResultsError(f"{path}: cannot be written (No space left on device)")
        plain(path, value)

    monkeypatch.setattr(folder, "write_json", full_disk)
    with pytest.raises(ResultsError, match="No space left"):
        write(tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.summary["complete"] is False
    assert len(run.steps) == 10


def test_a_full_disk_is_the_error_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full_disk)
    with pytest.raises(ResultsError, match=r"steps-00000.parquet: cannot be written \(No space left on device\)"):
        write(tmp_path / "run")


def test_a_full_disk_is_not_kept_full_by_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(self: Path, text: str, **_: Any) -> None:
        self.write_bytes(text.encode()[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(ResultsError, match="No space left"):
        files.write_text(tmp_path / "a.json", "{}  ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_while_rows_are_saved_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         number: signal.Signals) -> None:
    plain, before = folder.write_parquet, signal.getsignal(number)

    def impatient(*args: Any) -> None:
        signal.raise_signal(number)
        plain(*args)

    monkeypatch.setattr(folder, "write_parquet", impatient)

    def stopped() -> None:
        with RunWriter(tmp_path / "run") as writer:
            writer.resolved(RunConfig(), 3)
            writer.step(step(0))
            writer.request(request(0))
            raise KeyboardInterrupt("the first")

    with pytest.raises(KeyboardInterrupt, match="the first"):
        stopped()
    assert signal.getsignal(number) is before
    run = load_run(tmp_path / "run")
    assert (len(run.steps), len(run.requests), run.summary["unfinished"]) == (1, 1, 2)


def test_requests_without_a_row_are_unfinished(tmp_path: Path) -> None:
    """A second Ctrl-C may come before all rows are written: the summary still accounts for all that was offered."""
    writer = RunWriter(tmp_path / "run")
    writer.resolved(RunConfig(), 5)
    writer.request(request(0))
    assert writer.abort("interrupted") == {"offered": 5, "finished": 1, "rejected": 0, "unfinished": 4}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(ResultsError, match="run: exists already"):
        RunWriter(tmp_path / "run")
    assert {p: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ResultsError, match="file: exists already"):
        RunWriter(tmp_path / "file")
    with pytest.raises(ResultsError, match="cannot be written"):
        RunWriter(tmp_path / "file" / "below")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")


@pytest.mark.parametrize(("name", "content", "words"), [
    ("summary.json", None, "summary.json: cannot be read"), ("summary.json", "{", "cannot be read as the summary"),
    ("summary.json", "[]", "must hold one JSON object"), ("steps.parquet", None, "steps.parquet: no such file"),
    ("requests.parquet", "text", "requests.parquet: cannot be read as parquet")])
def test_what_cannot_be_read_is_named(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    write(tmp_path / "run")
    path = tmp_path / "run" / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ResultsError, match=words):
        load_run(tmp_path / "run")


def test_another_table_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "run")
    with pytest.raises(ResultsError, match="no column id, arrival_s"):
        folder.read_table(tmp_path / "run" / "steps.parquet", RequestTable)
    table = pq.read_table(tmp_path / "run" / "steps.parquet")
    pq.write_table(table.set_column(1, "lane", table["sms"]), tmp_path / "odd.parquet")
    with pytest.raises(ResultsError, match="not of the type"):
        folder.read_table(tmp_path / "odd.parquet", StepTable)


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "x.json", {"a": float("nan")})
    files.write_json(tmp_path / "x.json", {"a": None})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None}


def test_pandas_stays_out(tmp_path: Path) -> None:
    """A third of a second, where it is installed."""
    code = (f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from pathlib import Path\n"
            f"from tests.test_results import write; write(Path({str(tmp_path / 'run')!r}))\n"
            "print([m for m in ('pandas', 'matplotlib') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_steps_in_files_read_as_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run's steps stay in their part files and then in the merged one; batches are cut at the same rows everywhere."""
    monkeypatch.setattr(columns, "BATCH_ROWS", 6)
    monkeypatch.setattr(folder, "BATCH_ROWS", 6)
    monkeypatch.setattr(folder, "KEPT_ROWS", 0)
    rows = [step(i, None if i % 5 == 2 else 0.5) for i in range(22)]
    memory = StepTable.from_rows(rows)
    with RunWriter(tmp_path / "run", part_rows=4) as writer:
        writer.resolved(RunConfig())
        for row in rows:
            writer.step(row)
        stored = writer.tables()[0]
        for moment in ("in part files", "merged"):
            assert isinstance(stored, folder.StoredSteps)
            assert len(stored) == 22, moment
            for name in STEP_COLUMNS:
                assert np.array_equal(stored[name], memory[name], equal_nan=STEP_COLUMNS[name] == "f8"), (moment, name)
            mine, other = (list(table.batches("step", "lane")) for table in (stored, memory))
            assert [b["step"].tolist() for b in mine] == [b["step"].tolist() for b in other], moment
            assert [len(b["lane"]) for b in mine] == [6, 6, 6, 4], moment
            if moment == "in part files":
                writer.close(outcome(writer), {}, {})
    assert pq.ParquetFile(tmp_path / "run" / "steps.parquet").num_row_groups == 4
    assert load_run(tmp_path / "run").steps["reason"].tolist() == memory["reason"].tolist()


@pytest.mark.parametrize("kept_rows", [0, 5, 100])
def test_many_requests_come_back_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_rows: int) -> None:
    monkeypatch.setattr(folder, "KEPT_ROWS", kept_rows)
    with RunWriter(tmp_path / "run", part_rows=3) as writer:
        writer.resolved(RunConfig())
        for i in range(8):
            writer.request(request(i, "rejected" if i == 4 else "finished"))
        for _ in range(2):  # asking twice changes nothing
            assert writer.tables()[1]["id"].tolist() == list(range(8))
        assert writer.abort("stopped")["rejected"] == 1
    assert load_run(tmp_path / "run").requests["status"].tolist() == ["finished"] * 4 + ["rejected"] + ["finished"] * 3
