"""All validations in one table: entries made up, and the command's mistakes."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from bullet.cli.sim import main as sim
from bullet.errors import ProfileError
from bullet.results.plots import plot_points, save
from bullet.validation import everything
from bullet.validation.everything import Entry, Row
from bullet.validation.recorded import shipped


def made_up() -> list[Entry]:
    def good(progress: Callable[[int], None], folder: Path) -> list[Row]:
        progress(2)
        save(plot_points({"a": [(1.0, 1.1)]}, "t"), folder / "validate.png")
        return [
            Row("card", "TTFT <mean>", 2.0, 1.5, -0.25, "host time 0"),
            Row("card", "15 statistics", None, None, 0.004, "nothing"),
        ]

    def bad(progress: Callable[[int], None], folder: Path) -> list[Row]:
        raise ProfileError("its data are gone")

    absent = Entry("theirs", 0, bad, "no licence: bring theirs.csv with --data DIR")
    return [Entry("card", 2, good), Entry("a/b", 1, bad), absent]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "entries", lambda jitters, data=None: made_up())


def test_one_table_and_one_page(few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out", tmp_path / "page.html"
    assert sim(["validate", "--quiet", "--out", str(out), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].split("  ")[0] == "run"
    assert lines[2].split() == ["card", "TTFT", "<mean>", "2,000", "1,500", "-25.0", "host", "time", "0"]
    assert lines[3].split() == ["card", "15", "statistics", "+0.4", "nothing"]
    assert lines[4:6] == ["skipped: a/b: its data are gone", "skipped: theirs: no licence: bring theirs.csv with --data DIR"]
    with open(out / "validate.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["what"], row["measured_s"], row["error"]) for row in rows] == [
        ("TTFT <mean>", "2.0", "-0.25"),
        ("15 statistics", "", "0.004"),
    ]
    text = page.read_text()
    assert text == (out / "validate.html").read_text()
    assert "TTFT &lt;mean&gt;" in text
    assert text.count("data:image/png;base64,") == 1
    assert "Skipped: a/b: its data are gone" in text
    assert "Skipped: theirs: no licence" in text


def test_what_is_at_hand_is_in_it() -> None:
    names = [entry.name for entry in everything.entries(2)]
    assert names == [*sorted(shipped()), "serving", "serving, not shipped"]
    assert {"rtx4090", "rtxpro6000"} <= set(names)
    assert [entry.name for entry in everything.entries(2) if entry.missing] == ["serving, not shipped"]


def test_a_group_is_one_line_with_its_median_and_its_largest_error() -> None:
    rows = [
        Row("card", "TTFT mean", 0.040, 0.030, -0.25, "host time 0"),
        *(Row("card", f"{n} req/s", 2.0, 2.0 * (1 + error), error, "host time 0", "engine ttft")
          for n, error in ((1, 0.10), (2, -0.30), (4, -0.02))),
        Row("card", "8 req/s", 2.0, 2.0, 0.0, "host time 1 ms", "engine ttft"),
    ]
    assert everything.summary(rows) == [
        ["card", "TTFT mean", "1", "40", "30", "-25.0", "", "host time 0"],
        ["card", "engine ttft", "3", "", "", "-2.0", "-30.0", "host time 0"],
        ["card", "engine ttft", "1", "2,000", "2,000", "+0.0", "", "host time 1 ms"],
    ]


def test_a_recorded_run_s_rows_are_its_own_figures(tmp_path: Path) -> None:
    entry = everything.entries(0)[0]
    told: list[int] = []
    rows = entry.make(told.append, tmp_path)
    assert sum(told) == entry.runs
    assert len(rows) == 10
    for row in rows:
        if row.measured_s is not None and row.simulated_s is not None:
            assert row.error == pytest.approx(row.simulated_s / row.measured_s - 1)
    assert [row.what for row in rows[:2]] == ["TTFT mean, tables alone", "TPOT mean, tables alone"]
    assert abs(rows[3].error) < 0.02
    assert (tmp_path / "validate.png").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ingredients"], "name it"),
        (["--jitters", "-1"], "0 to 1000"),
        (["rtx4090", "--html", "x.html"], "only without a target"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(["validate", *words, "--quiet", "--out", str(tmp_path / "o")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err
    assert not (tmp_path / "o").exists()


def test_a_page_that_is_there_is_kept(few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.html").write_text("mine")
    assert sim(["validate", "--quiet", "--out", str(tmp_path / "o"), "--html", str(tmp_path / "page.html")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "page.html").read_text() == "mine"
