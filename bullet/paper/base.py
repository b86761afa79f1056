"""What a figure of the paper is here: what it needs, what it draws, and what it says about the paper's own numbers.

A figure is a module ``NAME.py`` and a file ``NAME.toml`` beside it: ``title``, ``source`` (what ours is: analytic, simulated,
measured), ``paper`` (what the paper's is: stated in its text, digitised, not at hand), and, where runs are needed, ``[[sweep]]``
tables, each a configuration with ``[sweep.axes]``, which is what ``bullet-sim sweep`` reads. The module has one function,
``make(runs) -> Drawn``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bullet.config import RunConfig, dotted, load_run_config
from bullet.door import read_toml
from bullet.errors import ConfigError
from bullet.sweeps.axes import Cell, cells
from bullet.sweeps.intervals import Estimate, interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

HERE = Path(__file__).parent
MET, NEAR, OFF = "met", "near", "off"
SEED = "seed"
RATIO = " x"


@dataclass(frozen=True)
class Check:
    """A relation of the paper beside ours. ``how``: what was asked of it (a tolerance, a direction). ``cause``: where it is not
    met, why: shown, or *not known*."""

    what: str
    paper: str
    ours: str
    verdict: str
    how: str
    cause: str = ""


def within(
    what: str,
    paper: float,
    ours: float,
    tolerance: float,
    form: str = ".2f",
    *,
    precision: float = 0.0,
    cause: str = "",
    unit: str = "",
) -> Check:
    """A number beside a number: met within ``tolerance`` (relative) and the precision of its reading (absolute), near within
    twice that. A ratio (``unit`` " x") on the other side of 1 is off, however close."""
    room = tolerance * abs(paper) + precision
    apart = abs(ours - paper)
    verdict = MET if apart <= room * (1 + 1e-9) else NEAR if apart <= 2 * room * (1 + 1e-9) else OFF
    if unit == RATIO and (ours - 1) * (paper - 1) < 0:
        verdict = OFF
    said = f"{paper:{form}}" + (f" ± {precision:{form}}" if precision else "")
    return Check(
        what, f"{said}{unit}", f"{ours:{form}}{unit}", verdict, f"within {tolerance:.0%}", "" if verdict == MET else cause
    )


def relation(
    what: str, paper: str, ours: str, holds: bool, *, near: bool = False, how: str = "direction", cause: str = ""
) -> Check:
    """What holds or does not."""
    return Check(what, paper, ours, MET if holds else NEAR if near else OFF, how, "" if holds else cause)


@dataclass(frozen=True)
class Drawn:
    """A figure made: the canvas, its data (a row a point, columns named with their units), and what it says about the paper's."""

    canvas: Canvas | None
    rows: Sequence[Mapping[str, Any]]
    checks: Sequence[Check] = ()
    note: str = ""


@dataclass(frozen=True)
class Runs:
    """The runs of a figure, by their places on the axes."""

    rows: Sequence[Mapping[str, Any]] = ()
    seeds: int = 1
    requests: int = 0

    def where(self, **places: Any) -> list[Mapping[str, Any]]:
        """Rows at these places; two underscores in a name stand for a dot: ``policy__name`` is ``policy.name``."""
        named = {key.replace("__", "."): value for key, value in places.items()}
        return [row for row in self.rows if all(row.get(key) == value for key, value in named.items())]

    def estimate(self, figure: str, **places: Any) -> Estimate:
        """A figure's mean over seeds, with its 95 % interval; :class:`ConfigError` where no run has it."""
        found = {row[SEED]: float(row[figure]) for row in self.where(**places) if row.get(figure) is not None}
        if not found:
            raise ConfigError(f"no run at {places} has {figure}")
        return interval(list(found.values()))

    def mean(self, figure: str, **places: Any) -> float:
        return self.estimate(figure, **places).mean

    def values(self, key: str) -> list[Any]:
        """The values of an axis, in their order."""
        return list(dict.fromkeys(row[key] for row in self.rows if key in row))


@dataclass(frozen=True)
class Figure:
    """One of ``FIGURES``, read from its TOML."""

    name: str
    about: Mapping[str, Any] = field(repr=False)

    @property
    def title(self) -> str:
        return str(self.about["title"])

    @property
    def source(self) -> str:
        return str(self.about["source"])

    @property
    def paper(self) -> str:
        return str(self.about["paper"])

    @property
    def swept(self) -> bool:
        """Whether it needs runs."""
        return bool(self.about.get("sweep"))

    @property
    def most_seeds(self) -> int:
        """Of its runs, however many are asked for: what is long is run on fewer."""
        return int(self.about.get("seeds", 10**6))

    @cached_property
    def _sweeps(self) -> list[tuple[RunConfig, dict[str, Any]]]:
        found = []
        for table in self.about.get("sweep", ()):
            raw = dict(table)
            axes = raw.pop("axes")
            keys = {key: value.format(here=HERE) if isinstance(value, str) else value for key, value in dotted(raw).items()}
            found.append((load_run_config(None, keys), dotted(axes)))
        return found

    def cells(self, seeds: int, requests: int | None = None) -> list[Cell]:
        """Its runs, over seeds 0 to ``seeds`` - 1; ``requests``: another length of each."""
        found = []
        for base, axes in self._sweeps:
            more = {} if requests is None else {"workload.num_requests": [requests]}
            found += cells(base, {**axes, **more, SEED: list(range(seeds))})
        return found

    def make(self, runs: Runs) -> Drawn:
        drawn: Drawn = importlib.import_module(f"bullet.paper.{self.name}").make(runs)
        return drawn


def names() -> list[str]:
    """All figures, in the paper's order."""
    return [path.stem for path in sorted(HERE.glob("*.toml"), key=lambda path: (path.stem[:3] != "fig", path.stem))]


def load(name: str) -> Figure:
    """By name; :class:`ConfigError` says which there are."""
    if name not in names():
        raise ConfigError(f"figure {name!r}: there is none: must be one of {', '.join(names())}, or fidelity")
    return Figure(name, read_toml(HERE / f"{name}.toml", ConfigError))
