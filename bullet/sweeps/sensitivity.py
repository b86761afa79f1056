"""Does the winner of a comparison change within what is not known? Each unknown to the ends of its range alone, and all
together.

The *lead* is the figure of the system that wins at the configuration's own values, less the best other's at the same place,
seed by seed, so that a positive lead is a win whatever the figure's direction. Where the mean lead changes sign between the
configuration's value and an end, the value at which it does is found by bisection, on the same seeds. Together: points of a
Latin hypercube over all ranges, the same for each system."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bullet.config import Config, RunConfig, configuration, to_toml, trace_name
from bullet.errors import BulletError, ConfigError, require
from bullet.files import Claim, write_json, write_text
from bullet.results import plots
from bullet.results.page import drawn, write_text_page
from bullet.results.tables import csv_text
from bullet.signals import Say, silent
from bullet.sweeps.axes import Cell, with_values
from bullet.sweeps.cache import Cache, key_of
from bullet.sweeps.intervals import Estimate, paired
from bullet.sweeps.pool import Pool, Progress
from bullet.sweeps.sweep import checked, make_pool

FIGURE = "slo_attainment_mean_length"
SEEDS, TOGETHER, HALVINGS = 4, 8, 5


@dataclass(frozen=True)
class Unknown:
    """A key of the configuration that no measurement fixes, and between what it may lie."""

    key: str
    low: float
    high: float
    why: str = "as given"

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2].replace("_", " ")


UNKNOWNS = (
    Unknown("device.contention_scale", 0.0, 2.0, "the loss beside another phase, 0.2, is assumed: nothing public measures it"),
    Unknown("device.bandwidth_scale", 0.9, 1.1, "decode attention left out of the fit: nine of ten rows within 13 %"),
    Unknown("device.host_step_s", 0.0, 0.002, "assumed 0; measured servers on A100 are 2 to 16 % slower a token than simulated"),
    Unknown("device.shared_prefill_share", 0.1, 0.9, "who gets an SM that both phases hold is assumed, half each"),
    Unknown("policy.estimator_error", 0.7, 1.4, "first predictions too short or too long; a running correction is on by default"),
    Unknown("device.noise_std", 0.0, 0.07, "the paper has 95 % of latencies within 6.8 % of their mean: 0.034, twice that"),
)


def less_is_better(figure: str) -> bool:
    """Times and what is lost are; shares and rates are not."""
    return figure.endswith(("_ms", "_s")) or figure.rpartition(".")[2] in ("rejected", "unfinished", "preemptions")


@dataclass(frozen=True)
class Place:
    """Values of unknowns, and what came of them: by system its mean, the winner's lead over the best other, whether it wins."""

    values: Mapping[str, float]
    means: Mapping[str, float]
    lead: Estimate
    rival: str

    @property
    def wins(self) -> bool:
        return self.lead.mean >= 0


@dataclass(frozen=True)
class Swing:
    """An unknown alone: at its low and its high end; ``crossing``: the values at which the winner changes."""

    unknown: Unknown
    ends: tuple[Place, Place]
    crossing: tuple[float, ...]

    @property
    def width(self) -> float:
        return abs(self.ends[1].lead.mean - self.ends[0].lead.mean)


@dataclass(frozen=True)
class Sensitivity:
    """``swings``: widest first. ``together``: all unknowns at once."""

    base: RunConfig
    figure: str
    seeds: int
    winner: str
    at: Place
    own: Mapping[str, float]
    swings: Sequence[Swing]
    together: Sequence[Place]
    source: str

    @cached_property
    def _factor(self) -> tuple[float, str]:
        return (1.0, ".1f") if self.figure.endswith("_ms") else (1.0, ".4f") if self.figure.endswith("_s") else (1.0, ".3f")

    def text(self) -> str:
        """One table, and what it says."""
        form = self._factor[1]
        head = ["unknown", "from", "to", "lead at low", "at high", "winner changes at"]
        rows = [[swing.unknown.key, f"{swing.unknown.low:g}", f"{swing.unknown.high:g}",
                 *(f"{end.lead.text('+' + form)}{'' if end.wins else f' ({end.rival})'}" for end in swing.ends),
                 ", ".join(f"{value:.3g}" for value in swing.crossing) or "-"] for swing in self.swings]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
                 for row in [head, *rows]]
        lines.insert(1, "-" * max(map(len, lines)))
        changed = [swing for swing in self.swings if swing.crossing]
        said = [f"{self.source}; {self.base.workload.trace}; {self.figure}, "
                f"{'less' if less_is_better(self.figure) else 'more'} is "
                f"better; {self.seeds} seeds",
                f"winner: {self.winner}, {self.means(self.at)}; its lead: {self.at.lead.text('+' + form)} over "
                f"{self.at.rival}" + (": a tie, the first named is taken for the winner" if self.at.lead.mean == 0 else ""), "",
                *lines, ""]
        said.append("alone, none of these changes the winner" if not changed else
                    "alone, the winner changes by " + ", ".join(swing.unknown.key for swing in changed))
        if self.together:
            lost = [place for place in self.together if not place.wins]
            worst = min(self.together, key=lambda place: place.lead.mean)
            said.append(f"together ({len(self.together)} points over all ranges): {self.winner} wins at "
                        f"{len(self.together) - len(lost)}; its least lead {worst.lead.text('+' + form)} over {worst.rival}")
        said += ["", "lead: the winner less the best other, mean of paired seeds ± half of the 95 % interval; positive is a win.",
                 "Ranges are of what is not known, not of what is likely:",
                 *(f"  {swing.unknown.key}: {swing.unknown.why}" for swing in self.swings)]
        return "\n".join(said)

    def means(self, place: Place) -> str:
        return ", ".join(f"{name} {value:{self._factor[1]}}" for name, value in place.means.items())

    def rows(self) -> list[dict[str, Any]]:
        """A row a place: how it was reached, the values, means of systems, the lead."""
        places = [("base", self.at), *((f"{swing.unknown.key} {side}", end) for swing in self.swings
                                       for side, end in zip(("low", "high"), swing.ends, strict=True)),
                  *((f"together {i}", place) for i, place in enumerate(self.together))]
        return [{"place": name, **{key: place.values.get(key, self.own[key]) for key in self.own},
                 **{f"mean.{system}": value for system, value in place.means.items()}, "rival": place.rival,
                 "lead": place.lead.mean, "lead_half_width_95": place.lead.half_width} for name, place in places]

    def tornado(self) -> Any:
        """Leads from low to high, the widest on top; left of the line the winner has changed."""
        return plots.plot_tornado([(swing.unknown.key, f"{swing.unknown.low:g}", f"{swing.unknown.high:g}",
                                    swing.ends[0].lead.mean, swing.ends[1].lead.mean) for swing in self.swings],
                                  self.at.lead.mean, [place.lead.mean for place in self.together],
                                  f"lead of {self.winner} over the best other, {self.figure}",
                                  f"{self.source}; {self.base.workload.trace}; {self.seeds} seeds")

    def write(self, folder: Path, report: bool = True) -> None:
        """``sensitivity.txt``, ``sensitivity.csv``, ``sensitivity.json``, ``base.toml`` and, with ``report``, ``tornado.png``
        and ``sensitivity.html``."""
        rows = self.rows()
        write_text(folder / "sensitivity.txt", self.text() + "\n")
        write_text(folder / "sensitivity.csv", csv_text(list(rows[0]), [list(row.values()) for row in rows]))
        write_json(folder / "sensitivity.json", {
            "figure": self.figure, "winner": self.winner, "seeds": self.seeds, "source": self.source,
            "unknowns": [{**dataclasses.asdict(s.unknown), "lead_low": s.ends[0].lead.mean, "lead_high": s.ends[1].lead.mean,
                          "winner_changes_at": list(s.crossing)} for s in self.swings], "places": rows})
        write_text(folder / "base.toml", to_toml(self.base))
        if report:
            drawn(lambda: self._draw(folder))

    def _draw(self, folder: Path) -> None:
        plots.save(self.tornado(), folder / "tornado.png")
        title = f"Does {self.winner} stay the winner on {trace_name(self.base.workload.trace)}?"
        write_text_page(folder / "sensitivity.html", title, self.source, self.text(),
                        "The winner's lead at both ends of each unknown", folder / "tornado.png", to_toml(self.base))


def latin(points: int, unknowns: Sequence[Unknown], seed: int = 0) -> list[dict[str, float]]:
    """A Latin hypercube: along each unknown one point in each of ``points`` equal parts of its range."""
    rng = np.random.default_rng(seed)
    columns = {u.key: (rng.permutation(points) + rng.random(points)) / points * (u.high - u.low) + u.low for u in unknowns}
    return [{key: float(values[i]) for key, values in columns.items()} for i in range(points)]


class _Search:
    """Runs at places, by system and seed, and the lead there."""

    def __init__(self, base: RunConfig, names: Sequence[str], figure: str, seeds: int, pool: Pool) -> None:
        self.base, self.names, self.figure, self.seeds, self.pool = base, names, figure, seeds, pool
        self.sign = -1.0 if less_is_better(figure) else 1.0
        self.source = ""

    def runs(self, places: Sequence[Mapping[str, float]]) -> list[dict[str, list[float]]]:
        """Of each place, by system, the figure of each seed."""
        cells = checked([Cell({}, with_values(self.base, {**place, "policy.name": name, "seed": seed}, "--vary"))
                         for place in places for name in self.names for seed in range(self.seeds)])
        keys = [key_of(cell.config) for cell in cells]
        records = self.pool.run(dict(zip(keys, (cell.config for cell in cells), strict=True)))
        values = iter(keys)
        found = []
        for place in places:
            by_system: dict[str, list[float]] = {}
            for name in self.names:
                for seed in range(self.seeds):
                    record = records[next(values)]
                    if "figures" not in record:
                        raise BulletError(f"{name}, seed {seed}, {dict(place)}: {record['error']}")
                    figures = record["figures"]
                    self.source = self.source or (f"simulated on {figures['gpu']} (device model: {figures['device_source']}), "
                                                  f"{figures['model']}")
                    if figures.get(self.figure) is None:
                        near = ", ".join(sorted(key for key in figures if self.figure.rpartition(".")[2] in key))
                        raise ConfigError(f"--figure {self.figure!r}: a run has none" + (f"; there are: {near}" if near else ""))
                    by_system.setdefault(name, []).append(self.sign * float(figures[self.figure]))
            found.append(by_system)
        return found

    def place(self, values: Mapping[str, float], runs: Mapping[str, list[float]], winner: str) -> Place:
        means = {name: float(np.mean(found)) for name, found in runs.items()}
        rival = max((name for name in means if name != winner), key=lambda name: means[name])
        return Place(values, {name: self.sign * mean for name, mean in means.items()}, paired(runs[winner], runs[rival]), rival)


def sensitivity(config: Config, policies: Sequence[str], *, figure: str = FIGURE, unknowns: Sequence[Unknown] = UNKNOWNS,
                seeds: int = SEEDS, together: int = TOGETHER, out: str | Path | None = None, report: bool = True,
                cache: Cache | str | Path | None = None, jobs: int | None = None, ray: str | None = None,
                progress: Callable[[Progress], None] | None = None, say: Say = silent) -> Sensitivity:
    """Whether the winner among ``policies`` by ``figure`` changes within ``unknowns``, one by one and ``together`` (how many
    points; 0: none). Runs are cached as a sweep's. :class:`~bullet.errors.BulletError` where anything cannot be run."""
    names = list(dict.fromkeys(policies))
    require(len(names) >= 2, "--policies", ",".join(names), "two systems or more: a winner and others")
    require(seeds >= 1, "--seeds", seeds, "1 or more")
    require(0 <= together <= 1000, "--together", together, "0 to 1000")
    if not unknowns:
        raise ConfigError("--vary: nothing is varied")
    base = configuration(config)
    own = {}
    for unknown in unknowns:
        where = f"--vary {unknown.key}={unknown.low:g}:{unknown.high:g}"
        if not unknown.low < unknown.high:
            raise ConfigError(f"{where}: goes nowhere: must read KEY=LOW:HIGH, LOW under HIGH")
        with_values(base, {unknown.key: unknown.low}, where)
        own[unknown.key] = _value(base, unknown.key)
    with nullcontext() if out is None else Claim(Path(out)) as claim:
        search = _Search(base, names, figure, seeds, make_pool(cache, jobs, ray, progress, say))
        draws = latin(together, unknowns)
        ends = [{unknown.key: end} for unknown in unknowns for end in (unknown.low, unknown.high)]
        first, *rest = search.runs([{}, *ends, *draws])
        winner = max(names, key=lambda name: float(np.mean(first[name])))
        at = search.place({}, first, winner)
        found = [search.place(values, runs, winner) for values, runs in zip([*ends, *draws], rest, strict=True)]
        swings = []
        for i, unknown in enumerate(unknowns):
            low, high = found[2 * i:2 * i + 2]
            swings.append(Swing(unknown, (low, high), _crossings(search, unknown, own[unknown.key], (low, high), winner)))
        swings.sort(key=lambda swing: -swing.width)
        result = Sensitivity(base, figure, seeds, winner, at, own, swings, found[2 * len(unknowns):], search.source)
        if claim is not None:
            result.write(claim.folder, report)
    return result


DEFAULTS = {"device.shared_prefill_share": 0.5}
"""Of keys whose ``None`` stands for the profile's value, which has none: *assumed*."""


def _value(config: RunConfig, key: str) -> float:
    """The configuration's own, a number."""
    node: Any = dataclasses.asdict(config)
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    value = DEFAULTS.get(key) if node is None else node
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"--vary {key}: is {value!r} in the configuration: a number must stand there to be varied")
    return float(value)


def _crossings(search: _Search, unknown: Unknown, own: float, ends: tuple[Place, Place], winner: str) -> tuple[float, ...]:
    """Where the mean lead changes sign between the configuration's value and each end, to 1 / 2^HALVINGS of that way."""
    found = []
    for value, end in zip((unknown.low, unknown.high), ends, strict=True):
        if end.wins:
            continue
        wins, loses = own, value
        for _ in range(HALVINGS):
            middle = (wins + loses) / 2
            place = search.place({unknown.key: middle}, search.runs([{unknown.key: middle}])[0], winner)
            wins, loses = (middle, loses) if place.wins else (wins, middle)
        found.append((wins + loses) / 2)
    return tuple(found)


def read_unknown(text: str) -> Unknown:
    """``KEY=LOW:HIGH``."""
    key, equals, ends = text.partition("=")
    low, colon, high = ends.partition(":")
    try:
        if not (equals and colon):
            raise ValueError
        return Unknown(key.strip(), float(low), float(high), next((u.why for u in UNKNOWNS if u.key == key.strip()), "as given"))
    except ValueError:
        raise ConfigError(f"--vary {text!r}: must read KEY=LOW:HIGH, such as device.contention_scale=0:2") from None


def with_changes(changes: Sequence[str], only: bool) -> tuple[Unknown, ...]:
    """The default unknowns, with what ``--vary`` says of them and besides; ``only``: nothing but that."""
    given = {unknown.key: unknown for unknown in map(read_unknown, changes)}
    if only:
        return tuple(given.values())
    return (*(given.pop(unknown.key, unknown) for unknown in UNKNOWNS), *given.values())

