"""The paper's figures: what is asked of ours, verdicts, the paper's own numbers, what is written, and mistakes of the user's."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bullet.cli.sim import main
from bullet.errors import BulletError, ConfigError
from bullet.paper import base, digitised, fidelity, fig05, make, style, table2
from bullet.paper.base import MET, NEAR, OFF, Check, Drawn, Figure, Runs, relation, within
from bullet.paper.digitised import Point
from bullet.paper.make import Made
from bullet.sweeps.cache import Cache
from bullet.sweeps.pool import Pool

ALL = (
    "fig02",
    "fig03",
    "fig05",
    "fig08",
    "fig09",
    "fig10",
    "fig11",
    "fig14",
    "fig15",
    "fig16",
    "fig17",
    "fig18",
    "fig20",
    "fig21",
    "fig22",
    "fig23",
    "goodput",
    "measured",
    "table2",
    "table5",
)
SWEPT = ("fig15", "fig16", "fig17", "fig18", "fig20", "fig21", "fig22", "fig23", "goodput")


def test_there_is_one_of_each() -> None:
    assert tuple(base.names()) == ALL
    for name in ALL:
        figure = base.load(name)
        assert figure.title
        assert figure.source
        assert bool(figure.cells(1)) == (name in SWEPT)


@pytest.mark.parametrize(
    ("asked", "found"),
    [([], ALL), (["fidelity"], ALL), (["table2", "fig5", "5", "FIG05"], ("fig05", "table2")), (["Fig. 15"], ("fig15",))],
)
def test_names_are_read_as_people_write_them(asked: list[str], found: tuple[str, ...]) -> None:
    assert tuple(figure.name for figure in make.wanted(asked)) == found


@pytest.mark.parametrize("name", ["fig1", "fig99", "", "table", "../fig05"])
def test_a_figure_that_there_is_not(name: str) -> None:
    with pytest.raises(ConfigError, match=r"there is none: must be one of fig02, .*, table5, or fidelity$"):
        make.wanted([name])


@pytest.mark.parametrize(
    ("ours", "verdict"), [(10, MET), (11, MET), (11.5, MET), (12, NEAR), (13, NEAR), (13.1, OFF), (5, OFF)]
)
def test_a_number_is_met_within_its_tolerance_and_reading(ours: float, verdict: str) -> None:
    """10 % of 10 and a reading of half a unit: met to 1.5, near to 3."""
    check = within("w", 10, ours, 0.1, precision=0.5, cause="c")
    assert check.verdict == verdict
    assert check.cause == ("" if verdict == MET else "c")


def test_a_ratio_on_the_other_side_of_one_is_off() -> None:
    assert within("w", 1.05, 0.99, 0.2, unit=base.RATIO).verdict == OFF
    assert within("w", 1.05, 1.0, 0.2, unit=base.RATIO).verdict == MET
    assert within("w", 1.05, 0.99, 0.2).verdict == MET


def test_a_relation_holds_or_not() -> None:
    assert relation("r", "p", "o", True, cause="c") == Check("r", "p", "o", MET, "direction", "")
    assert relation("r", "p", "o", False, near=True, cause="c").verdict == NEAR
    assert relation("r", "p", "o", False, cause="c") == Check("r", "p", "o", OFF, "direction", "c")


def point(value: float | None, precision: float = 0.0) -> Point:
    return Point(value, None if value is not None else 6.0, precision)


def test_only_pairs_count_that_the_reading_tells_apart() -> None:
    """a < b; c within the readings of b; d off the axes, above all: pairs ab, ac, ad, bd, cd."""
    theirs = {"a": point(1.0, 0.1), "b": point(2.0, 0.2), "c": point(2.3, 0.2), "d": point(None)}
    assert digitised.pairs_agree({"a": 1, "b": 2, "c": 3, "d": 4}, theirs) == (5, 5)
    assert digitised.pairs_agree({"a": 1, "b": 3, "c": 2, "d": 4}, theirs) == (5, 5)
    assert digitised.pairs_agree({"a": 4, "b": 3, "c": 2, "d": 1}, theirs) == (0, 5)
    assert digitised.pairs_agree({"a": 1, "b": 1, "c": 3, "d": 4}, theirs) == (4, 5)
    assert digitised.pairs_agree({"d": 1, "e": 2}, {"d": point(None), "e": point(None)}) == (0, 0)


def test_the_papers_numbers_are_there() -> None:
    paper = digitised.llama8b()
    assert paper["sharegpt", "mean_TTFT_s", "vllm-1024", 10.0] == Point(0.248, None, 0.12)
    assert paper["sharegpt", "mean_TTFT_s", "vllm-1024", 14.0] == Point(
        None, 6.0, paper["sharegpt", "mean_TTFT_s", "vllm-1024", 14.0][2]
    )
    assert digitised.goodputs()["azure-code", "bullet"] == (4.42, 0.02)
    assert len(digitised.goodputs()) == 11
    assert digitised.large("Llama3.1-70B_8xH100_Splitwise")["vLLM", 4.0] == Point(54.5, None, 2.5)


def test_table_2_is_the_papers_in_its_columns_of_tiles() -> None:
    ours = table2.table(108)
    for tokens, row in table2.PAPER.items():
        assert [round(value, 1) for value in ours[tokens][: table2.EXACT]] == list(row[: table2.EXACT])


def test_fig_5_by_hand() -> None:
    drawn = base.load("fig05").make(Runs())
    ones = [row for row in drawn.rows if row["chunk_tokens"] == 1024]
    assert len(ones) == 16
    total = {chunk: sum(row["seconds"] for row in drawn.rows if row["chunk_tokens"] == chunk) for chunk in (1024, 2048, 16384)}
    found = {check.what: float(check.ours) for check in drawn.checks}
    assert found["Fig. 5: 1k chunks, time beyond the whole prompt's"] == pytest.approx(total[1024] / total[16384] - 1, abs=0.005)
    assert found["Fig. 5: 1k chunks, last to first"] == pytest.approx(ones[-1]["seconds"] / ones[0]["seconds"], abs=0.005)
    assert found["Fig. 5: mean chunk, 2k to 1k"] == pytest.approx(2 * total[2048] / total[1024], abs=0.005)
    assert fig05.absolute("w", 1.0, 1.1, 0.1).verdict == MET
    assert fig05.absolute("w", 1.0, 1.15, 0.1).verdict == NEAR
    assert fig05.absolute("w", 1.0, 1.25, 0.1).verdict == OFF


def test_runs_are_found_by_their_places() -> None:
    runs = Runs([{"policy.name": p, "seed": s, "x": x} for p, s, x in (("a", 0, 1.0), ("a", 1, 3.0), ("b", 0, 5.0))], 2)
    assert runs.mean("x", policy__name="a") == 2.0
    assert runs.estimate("x", policy__name="a").seeds == 2
    assert runs.values("policy.name") == ["a", "b"]
    with pytest.raises(ConfigError, match="no run"):
        runs.mean("x", policy__name="c")


@pytest.mark.parametrize("name", SWEPT)
def test_a_swept_figure_from_short_runs(name: str, tmp_path: Path) -> None:
    """Its curves, its data and its checks; of short runs, so that no verdict means anything."""
    figure = base.load(name)
    few = Figure(name, {**figure.about, "sweep": [thinned(table) for table in figure.about["sweep"]]})
    runs = make.runs_of(few, Pool(Cache(tmp_path / "cache"), 1), 1, 20)
    with style.applied():
        drawn = few.make(runs)
        make.write(tmp_path, few, drawn, 60)
    with open(tmp_path / f"{name}.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(drawn.rows) > 0
    assert (tmp_path / f"{name}.png").stat().st_size > 2000
    assert (tmp_path / f"{name}.pdf").read_bytes()[:5] == b"%PDF-"
    assert drawn.checks
    assert all(check.cause for check in drawn.checks if check.verdict != MET)


def thinned(table: Mapping[str, Any]) -> dict[str, Any]:
    """The first and last rate of many: enough to draw a curve."""
    axes = dict(table["axes"])
    rates = axes["workload.rate_req_per_s"]
    keep = [20] if 20 in rates else [rates[0], rates[-1]] if len(rates) > 3 else rates
    return {**table, "axes": {**axes, "workload.rate_req_per_s": keep}}


def drawn_of(*checks: Check) -> Drawn:
    with style.applied():
        canvas, _ = style.canvas(2, 1)
    return Drawn(canvas, [{"x": 1}], checks, "A note.")


def test_the_page_counts_and_says_causes(tmp_path: Path) -> None:
    good, bad = base.load("fig05"), base.load("table2")
    made = [
        Made(good, drawn_of(relation("first", "a|b", "1", True), relation("second", "2", "3", False, cause="because <x>"))),
        Made(bad, None, "no way"),
    ]
    make.write(tmp_path, good, made[0].drawn, 60)  # type: ignore[arg-type]
    fidelity.write(made, 3, tmp_path)
    text = (tmp_path / "fidelity.md").read_text()
    assert "1 met, 0 near, 1 off" in text
    assert "| ● met | first | a\\|b | 1 | direction |" in text
    assert "- ○ second: 3 (paper: 2). because <x>" in text
    assert "Not made: no way" in text
    page = (tmp_path / "fidelity.html").read_text()
    assert "because &lt;x&gt;" in page
    assert page.count("data:image/png;base64,") == 1


def test_equal_figures_equal_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        with style.applied():
            make.write(tmp_path / folder, base.load("table2"), base.load("table2").make(Runs()), 60)
    for suffix in ("png", "pdf", "csv"):
        assert (tmp_path / "a" / f"table2.{suffix}").read_bytes() == (tmp_path / "b" / f"table2.{suffix}").read_bytes()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["figures", "table2", "--dpi", "60", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "fidelity.html",
        "fidelity.md",
        "table2.csv",
        "table2.pdf",
        "table2.png",
    ]
    assert re.match(r"1 of 1 figures; relations of the paper: \d+ met, \d+ near, \d+ off\n", capsys.readouterr().out)
    assert main(["figures", "table2", "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["figures", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(ALL)


@pytest.mark.parametrize(
    "words", [["fig99"], ["table2", "--seeds", "0"], ["table2", "--dpi", "5"], ["table2", "--num-requests", "0"]]
)
def test_mistakes_are_one_line_and_leave_nothing(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["figures", *words, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_one_that_fails_keeps_no_other_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Figure.make

    def fails(self: Figure, runs: Runs) -> Drawn:
        if self.name == "fig05":
            raise BulletError("needs what is not there")
        return real(self, runs)

    monkeypatch.setattr(Figure, "make", fails)
    assert main(["figures", "fig05", "table2", "--dpi", "60", "--jobs", "1", "--out", str(tmp_path / "out")]) == 2
    assert "bullet-sim: error: fig05: needs what is not there" in capsys.readouterr().err
    assert (tmp_path / "out" / "table2.png").exists()


def test_ctrl_c_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = Figure.make

    def stops(self: Figure, runs: Runs) -> Drawn:
        if self.name == "table2":
            raise KeyboardInterrupt
        return real(self, runs)

    monkeypatch.setattr(Figure, "make", stops)
    assert main(["figures", "fig05", "table2", "--dpi", "60", "--jobs", "1", "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"what was written is in {tmp_path / 'out'}/")
    assert (tmp_path / "out" / "fig05.csv").exists()


def test_a_missing_extra_is_named() -> None:
    def missing() -> object:
        raise ImportError

    with pytest.raises(BulletError, match=r"^scikit-learn is not installed: pip install 'bullet-llm\[fit\]' brings it$"):
        style.needs("fit", "scikit-learn", missing)
