"""docs/validation.md opens with what `docs/make_validation.py` writes, and that is what is simulated now."""

from __future__ import annotations

from pathlib import Path

from bullet.validation import everything, serving_points
from bullet.validation.recorded import shipped
from docs import make_validation


def page_lines() -> list[str]:
    return [line for line in make_validation.parts()[1].splitlines() if line.startswith("| ")]


def test_the_page_opens_with_its_table_and_has_every_group_of_points() -> None:
    before, table, _ = make_validation.parts()
    assert len(before.splitlines()) < 15
    assert table
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page_lines()]
    groups: dict[tuple[str, str], int] = {}
    for point in serving_points.shipped():
        for metric in point.measured:
            key = (f"serving, {point.gpu}", f"{point.engine} {metric}")
            groups[key] = groups.get(key, 0) + 1
    shown = {(run, what): int(points) for run, what, points, *_ in cells[2:]}
    assert {key: shown.get(key) for key in groups} == groups
    assert set(shipped()) <= {run for run, *_ in cells}


def test_the_page_s_figures_are_the_simulator_s(tmp_path: Path) -> None:
    """The two points that take a moment; the whole page takes minutes."""
    points = [point for point in serving_points.shipped() if point.engine == "vLLM CI 2024"]
    rows = everything.serving_entry("quick", points).make(lambda _: None, tmp_path)
    lines = ["| " + " | ".join(line) + " |" for line in everything.summary(rows)]
    assert len(lines) == 2
    assert [line for line in lines if line not in page_lines()] == []


def test_the_page_is_short() -> None:
    assert len(make_validation.PAGE.read_text(encoding="utf-8").splitlines()) < 150
