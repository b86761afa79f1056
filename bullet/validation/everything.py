"""``bullet-sim validate`` without a name: every recorded run and every serving point that is at hand, in one table and on one
page.

A recorded run gives the means of TTFT, TPOT and latency and its 15 statistics in sum, on kernel tables alone and in full
(what that assumes stands beside); a serving point the metrics that it was measured by.

To add a validation, add an :class:`Entry` in :func:`entries`: a name, how many simulations it runs, and a function that gets
``progress`` (called with the number of simulations just done) and a folder of its own, writes ``validate.png`` there if it has a
picture, and returns :class:`Row` s. Rows with the same ``run`` and ``group`` are one line of docs/validation.md
(:func:`summary`). An entry whose data are not at hand says in ``missing`` what they are and how to bring them: it is listed as
skipped, and nothing fails."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bullet.errors import BulletError
from bullet.files import write_text
from bullet.results.page import html_table
from bullet.results.tables import csv_text
from bullet.validation import comparison, recorded, serving, serving_points
from bullet.validation.calibration import LEFT_OUT

ASSUMED = {"static": "", "sharegpt": "; lengths drawn", "constant": "; equal lengths"}
"""Kind of point -> what its requests assume."""
MEANS = ("ttft_mean", "tpot_mean", "latency_mean")
HEAD = ("run", "what", "measured, ms", "simulated, ms", "error, %", "assumed")
SUMMARY_HEAD = ("run", "what", "points", "measured, ms", "simulated, ms", "error, % (median)", "largest", "assumed")


class Row(NamedTuple):
    """One line. Seconds; ``measured_s`` and ``simulated_s`` are ``None`` where the line sums errors up; ``error`` relative.
    ``group``: what it is summed up under, by default ``what``."""

    run: str
    what: str
    measured_s: float | None
    simulated_s: float | None
    error: float
    assumed: str
    group: str = ""


@dataclass(frozen=True)
class Entry:
    """``runs``: the sum of what :meth:`make` reports as progress; it writes its picture into the folder that it is given.
    ``missing``: data that are not at hand, and how to bring them; then it is not made."""

    name: str
    runs: int
    make: Callable[[Callable[[int], None], Path], list[Row]]
    missing: str = ""


def entries(jitters: int, data: Path | None = None) -> list[Entry]:
    """Recorded runs first, in the order of their names; ``data``: a folder with serving points that cannot be shipped."""
    found = [Entry(target, comparison.runs_of(jitters, ()), _recorded(target, jitters)) for target in sorted(recorded.shipped())]
    points = serving_points.shipped()
    found.append(serving_entry("serving", points))
    others = [] if data is None else serving_points.unlicensed(data)
    missing = "" if others else (f"{serving_points.UNLICENSED_SOURCE}: bring {serving_points.UNLICENSED_FILE} in a folder, and "
                                 "name it with --data DIR")
    return [*found, serving_entry("serving, not shipped", others, missing)]


def serving_entry(name: str, points: Sequence[serving_points.Point], missing: str = "") -> Entry:
    """An entry of serving points."""
    return Entry(name, serving.runs_of(points), _serving(points), missing)


def _recorded(target: str, jitters: int) -> Callable[[Callable[[int], None], Path], list[Row]]:
    def make(progress: Callable[[int], None], picture: Path) -> list[Row]:
        v = comparison.validate(recorded.load_recorded(target), seeds=range(jitters), progress=progress)
        comparison.draw(picture, v)
        one = "one_run" if not jitters else "mean"
        rows = []
        for how, statistics, assumed in (
                ("tables alone", v.summary["tables_alone"]["statistics"], "host time 0"),
                ("in full", v.summary["statistics"], f"host time 0; one factor from the first {LEFT_OUT} requests' TPOT")):
            measured, simulated, error = (statistics[key] for key in ("measured_s", f"{one}_s", f"{one}_error"))
            assumed = "; ".join([assumed, *v.recorded.assumed])
            rows += [Row(target, f"{comparison.label(name)}, {how}", measured[name], simulated[name], error[name], assumed)
                     for name in MEANS]
            rows += [Row(target, f"15 statistics, mean absolute, {how}", None, None, statistics[f"{one}_mean_absolute"], assumed),
                     Row(target, f"15 statistics, largest, {how}", None, None, statistics[f"{one}_largest"]["error"], assumed)]
        return rows

    return make


def _serving(points: Sequence[serving_points.Point]) -> Callable[[Callable[[int], None], Path], list[Row]]:
    def make(progress: Callable[[int], None], picture: Path) -> list[Row]:
        v = serving.validate(points, progress)
        serving.draw(picture, v)
        rows = []
        for point in v["points"]:
            found: Mapping[str, Any] = next(iter(point["workloads"].values()))
            assumed = f"host time 0; fitted device{ASSUMED[point['kind']]}"
            gpu, name, simulated, error = (f"serving, {point['gpu']}", point["point"], found["simulated_s"], found["error"])
            other = v["engines"][point["engine"]]["reported_only"]
            rows += [Row(gpu, f"{name} {metric}", measured_s, simulated[metric], error[metric],
                         f"{assumed}; not judged: {other[metric]}" if metric in other else assumed,
                         " ".join(filter(None, (point["engine"], point["group"], metric))))
                     for metric, measured_s in point["measured_s"].items()]
        return rows

    return make


@dataclass(frozen=True)
class Found:
    """Rows by entry, why an entry has none, and where its picture is."""

    rows: Mapping[str, Sequence[Row]]
    skipped: Mapping[str, str]
    pictures: Mapping[str, Path]


def validate(wanted: Sequence[Entry], folder: Path, progress: Callable[[int], None]) -> Found:
    """All of them; one whose data are not at hand or not sound is skipped, and said."""
    rows: dict[str, list[Row]] = {}
    skipped: dict[str, str] = {}
    pictures: dict[str, Path] = {}
    for entry in wanted:
        if entry.missing:
            skipped[entry.name] = entry.missing
            continue
        own = folder / entry.name.replace("/", "-")
        own.mkdir()
        try:
            rows[entry.name] = entry.make(progress, own)
        except BulletError as exc:
            skipped[entry.name] = str(exc)
            continue
        if (own / "validate.png").is_file():
            pictures[entry.name] = own / "validate.png"
    return Found(rows, skipped, pictures)


def _ms(value_s: float | None) -> str:
    return "" if value_s is None else f"{value_s * 1e3:,.4g}" if value_s < 1 else f"{value_s * 1e3:,.0f}"


def cells(row: Row) -> list[str]:
    """A row as text."""
    return [row.run, row.what, _ms(row.measured_s), _ms(row.simulated_s), f"{100 * row.error:+.1f}", row.assumed]


def table(found: Found) -> str:
    """One table; below it what was skipped."""
    body = [cells(row) for rows in found.rows.values() for row in rows]
    widths = [max(map(len, column)) for column in zip(HEAD, *body, strict=True)]
    left = (0, 1, 5)
    lines = ["  ".join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
                       ).rstrip() for row in [HEAD, *body]]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join([*lines, *(f"skipped: {name}: {why}" for name, why in found.skipped.items())]) + "\n"


def summary(rows: Sequence[Row]) -> list[list[str]]:
    """One line a group, under :data:`SUMMARY_HEAD`: of several points the median error and the largest, both with their sign."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.run, row.group or row.what, row.assumed), []).append(row)
    lines = []
    for (run, what, assumed), of in groups.items():
        errors = [row.error for row in of]
        times = [_ms(of[0].measured_s), _ms(of[0].simulated_s)] if len(of) == 1 else ["", ""]
        largest = f"{100 * max(errors, key=abs):+.1f}" if len(of) > 1 else ""
        lines.append([run, what, str(len(of)), *times, f"{100 * median(errors):+.1f}", largest, assumed])
    return lines


def markdown(found: Found) -> str:
    """:func:`summary` of all, for a page; below it what was skipped."""
    body = [line for rows in found.rows.values() for line in summary(rows)]
    table = ["| " + " | ".join(line) + " |" for line in [SUMMARY_HEAD, ["---"] * len(SUMMARY_HEAD), *body]]
    return "\n".join([*table, *(f"\nskipped: {name}: {why}" for name, why in found.skipped.items())]) + "\n"


def page(found: Found) -> str:
    """One HTML file that holds its pictures."""
    parts = []
    for name, rows in found.rows.items():
        parts.append(f"<h2>{html.escape(name)}</h2>")
        if name in found.pictures:
            data = base64.b64encode(found.pictures[name].read_bytes()).decode()
            parts.append(f'<img alt="{html.escape(name)}: measured and simulated" src="data:image/png;base64,{data}">')
        parts.append(f"<div class=table>{html_table(HEAD, [cells(row) for row in rows])}</div>")
    parts += [f"<p>Skipped: {html.escape(name)}: {html.escape(why)}</p>" for name, why in found.skipped.items()]
    style = ("body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}.table{overflow-x:auto}"
             "table{border-collapse:collapse;font-size:13px}td,th{padding:.2em .6em;border-bottom:1px solid #ddd;text-align:left;"
             "white-space:nowrap}td:nth-child(n+3):nth-child(-n+5){text-align:right}td:last-child{white-space:normal}img{max-width:100%}"
             "@media(max-width:600px){table{font-size:11px}td,th{white-space:normal;padding:.2em .3em}"
             "td:last-child{white-space:nowrap}}")
    return ('<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>Simulated beside measured</title><style>{style}</style></head><body><h1>Simulated beside measured</h1>"
            f"<p>Measured by others; simulated here. What each line assumes stands beside "
            f"it.</p>{''.join(parts)}</body></html>\n")


def write(folder: Path, found: Found) -> str:
    """``validate.txt``, ``validate.csv``, ``validate.html``; returns the text."""
    text = table(found)
    write_text(folder / "validate.txt", text)
    write_text(folder / "validate.csv", csv_text(Row._fields, [row for rows in found.rows.values() for row in rows]))
    write_text(folder / "validate.html", page(found))
    return text
