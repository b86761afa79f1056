"""Figures made: their runs through the pool and its cache, one figure after the other, each written as soon as it is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bullet.errors import BulletError, ConfigError
from bullet.files import write_text
from bullet.paper import base, style
from bullet.paper.base import Drawn, Figure, Runs
from bullet.results.tables import csv_text
from bullet.sweeps.cache import key_of
from bullet.sweeps.pool import Pool
from bullet.sweeps.sweep import checked

SEEDS = 5
FIDELITY = "fidelity"


@dataclass(frozen=True)
class Made:
    """A figure on disk: ``figure`` and what it drew, or why it could not."""

    figure: Figure
    drawn: Drawn | None
    error: str = ""


def wanted(names: Sequence[str]) -> list[Figure]:
    """The figures of these names, in the paper's order, each once; none, or ``fidelity``: all. ``fig5`` and ``5`` are ``fig05``.

    :class:`ConfigError` says which there are.
    """
    known = base.names()
    if not names or FIDELITY in names:
        return [base.load(name) for name in known]
    asked = set()
    for name in names:
        plain = name.lower().replace("fig.", "fig").replace(" ", "")
        digits = plain.removeprefix("fig")
        plain = f"fig{int(digits):02d}" if digits.isdecimal() else plain
        if plain not in known:
            raise ConfigError(f"figure {name!r}: there is none: must be one of {', '.join(known)}, or {FIDELITY}")
        asked.add(plain)
    return [base.load(name) for name in known if name in asked]


def runs_of(figure: Figure, pool: Pool, seeds: int, requests: int | None) -> Runs:
    """A figure's runs, from the cache or made now; :class:`BulletError` names the first that failed."""
    seeds = min(seeds, figure.most_seeds)
    cells = figure.cells(seeds, requests)
    if not cells:
        return Runs()
    cells = checked(cells)
    keys = [key_of(cell.config) for cell in cells]
    records = pool.run(dict(zip(keys, (cell.config for cell in cells), strict=True)))
    rows: list[Mapping[str, Any]] = []
    for cell, key in zip(cells, keys, strict=True):
        record = records[key]
        if "figures" not in record:
            raise BulletError(f"{figure.name}: {dict(cell.place)}: {record['error']}")
        config = cell.config
        place = {
            "workload.trace": config.workload.trace,
            "device.model": config.device.model,
            "device.gpu": config.device.gpu,
            "device.shared_prefill_share": config.device.shared_prefill_share,
        }
        rows.append({**place, **record["figures"], **cell.place})
    return Runs(rows, seeds, cells[0].config.workload.num_requests or 0)


def write(folder: Path, figure: Figure, drawn: Drawn, dpi: int) -> None:
    """``NAME.csv``, ``NAME.png``, ``NAME.pdf``."""
    columns = list(dict.fromkeys(key for row in drawn.rows for key in row))
    write_text(folder / f"{figure.name}.csv", csv_text(columns, ([row.get(key) for key in columns] for row in drawn.rows)))
    assert drawn.canvas is not None
    style.save(drawn.canvas, folder / figure.name, dpi)


def draw(name: str, runs: Runs, folder: Path, dpi: int) -> Made:
    """One figure made and written."""
    figure = base.load(name)
    try:
        with style.applied():
            drawn = figure.make(runs)
            write(folder, figure, drawn, dpi)
        return Made(figure, dataclasses.replace(drawn, canvas=None))
    except BulletError as exc:
        return Made(figure, None, str(exc))


def make(
    figures: Sequence[Figure],
    folder: Path,
    pool: Pool,
    *,
    seeds: int = SEEDS,
    requests: int | None = None,
    dpi: int = style.DPI,
    told: Callable[[Made], None] | None = None,
) -> list[Made]:
    """All of them into ``folder``, which is there: first those that need no runs, side by side. One that cannot be made (a
    missing extra, a run that fails) keeps no other back."""
    found: dict[str, Made] = {}

    def done(one: Made) -> None:
        found[one.figure.name] = one
        if told is not None:
            told(one)

    for one in pool.over_cores(draw, [(figure.name, Runs(), folder, dpi) for figure in figures if not figure.swept]):
        done(one)
    for figure in figures:
        if figure.swept:
            try:
                done(draw(figure.name, runs_of(figure, pool, seeds, requests), folder, dpi))
            except BulletError as exc:
                done(Made(figure, None, str(exc)))
    return [found[figure.name] for figure in figures]
