"""A sweep: a configuration over axes, each run once, one tidy table; docs/sweeps.md is its manual."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bullet import policies as known_policies
from bullet.config import Config, RunConfig, WorkloadConfig, configuration, to_toml
from bullet.devices.load import load_device
from bullet.errors import ConfigError, require
from bullet.files import Claim, safe_name, write_text
from bullet.parquet import write_table
from bullet.policies.sharing import share_options
from bullet.results import plots
from bullet.results.page import drawn
from bullet.results.tables import csv_text
from bullet.signals import Say, silent
from bullet.sweeps import axes as axes_of
from bullet.sweeps.axes import Axes, Cell
from bullet.sweeps.bound import CAVEAT, Limit, limit_of
from bullet.sweeps.cache import DEFAULT, Cache, code_digest, key_of
from bullet.sweeps.intervals import Estimate, interval, paired
from bullet.sweeps.measure import device_of, workload_of
from bullet.sweeps.pool import Pool, Progress
from bullet.version import VERSION
from bullet.workload import load_workload, resolved

RATE, POLICY, SEED = "workload.rate_req_per_s", "policy.name", "seed"
BOUND, SHARE = "fluid_bound_req_per_s", "fluid_bound_share"
PANELS = (("slo_attainment_mean_length", "SLO attainment (mean length)", 1.0), ("mean_ttft_ms", "mean TTFT (s)", 1e-3),
          ("p99_ttft_ms", "P99 TTFT (s)", 1e-3), ("mean_tpot_ms", "mean TPOT (ms)", 1.0), ("p99_tpot_ms", "P99 TPOT (ms)", 1.0),
          ("request_throughput", "throughput (requests/s)", 1.0))
POINTS = (*(f"{part}_{name}_ms" for name in ("ttft", "tpot") for part in ("mean", "p90", "p99")), "request_throughput", SHARE,
          "slo_attainment_mean_length", "slo_attainment_per_request", "steady.slo_attainment_mean_length", "steady.mean_ttft_ms",
          "steady.p99_ttft_ms", "steady.mean_tpot_ms", "steady.throughput")
"""Figures of points.csv."""
MOST_FIGURES = 24


@dataclass(frozen=True)
class Sweep:
    """What came of it. ``rows``: one dictionary a run: its place on the axes, ``seed``, ``key`` (its name in the cache),
    ``error`` (``None``, or why it has no figures), then every figure of summary.json, ``steady.*``, ``saturation.*`` and, where
    it is known, the fluid bound and the share of it that was finished a second."""

    base: RunConfig
    axes: tuple[str, ...]
    rows: Sequence[Mapping[str, Any]]

    @cached_property
    def table(self) -> Any:
        """The rows as a pyarrow table (``.to_pandas()``), a column a figure."""
        import pyarrow as pa

        names = list(dict.fromkeys(name for row in self.rows for name in row))
        # A whole number among floats is one of them: 8 is written as 8.0, whichever row comes first.
        columns = {}
        for name in names:
            cells = [row.get(name) for row in self.rows]
            kinds = {type(cell) for cell in cells if cell is not None}
            if kinds == {int, float}:
                cells = [None if cell is None else float(cell) for cell in cells]
            elif len(kinds) > 1:
                cells = [None if cell is None else str(cell) for cell in cells]
            columns[name] = cells
        notes = {"source": "simulated", "version": VERSION, "code": code_digest(), "axes": json.dumps(list(self.axes)),
                 "base": to_toml(self.base)}
        return pa.table(columns).replace_schema_metadata(notes)

    @property
    def errors(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["error"] is not None]

    def points(self, figure: str) -> list[tuple[dict[str, Any], Estimate]]:
        """A figure's mean over seeds at each place on the other axes, with its 95 % interval; places without a value left out."""
        return [(place, interval(list(found.values()))) for place, found in self._by_seed(figure) if found]

    def differences(self, figure: str, baseline: Any, axis: str = POLICY) -> list[tuple[dict[str, Any], Estimate]]:
        """``figure`` less that of the run with ``axis`` = ``baseline``, paired by seed: mean and 95 % interval at each place.

        Seeds that either lacks are left out of that place. :class:`ConfigError` where no run has the baseline.
        """
        found = self._by_seed(figure)
        bases = [(place, values) for place, values in found if place.get(axis) == baseline]
        if not bases:
            raise ConfigError(f"differences: no run has {axis} = {baseline!r}")
        result = []
        for place, ours in found:
            rest = {key: value for key, value in place.items() if key != axis}
            theirs = next((values for other, values in bases if {k: v for k, v in other.items() if k != axis} == rest), {})
            seeds = [seed for seed in ours if seed in theirs]
            if place.get(axis) != baseline and seeds:
                result.append((place, paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])))
        return result

    def _by_seed(self, figure: str) -> list[tuple[dict[str, Any], dict[int, float]]]:
        if not any(figure in row for row in self.rows) and not all(row["error"] for row in self.rows):
            near = sorted({name for row in self.rows for name in row if figure.rpartition(".")[2] in name})
            raise ConfigError(f"no figure {figure!r}" + (f"; there are: {', '.join(near)}" if near else " (docs/results.md)"))
        places: list[tuple[dict[str, Any], dict[int, float]]] = []
        for row in self.rows:
            place = {key: row[key] for key in self.axes if key != SEED}
            values = next((values for other, values in places if other == place), None)
            if values is None:
                places.append((place, values := {}))
            if row.get(figure) is not None:
                values[row[SEED]] = float(row[figure])
        return places

    def text(self, figures: Sequence[str] = ("slo_attainment_mean_length", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
                                             "request_throughput", SHARE)) -> str:
        """Means over seeds and half widths of their 95 % intervals, aligned; a place a row. The share of the fluid bound is left
        out where no run has it."""
        figures = [name for name in figures if name != SHARE or any(SHARE in row for row in self.rows)]
        keys = [key for key in self.axes if key != SEED]
        forms = {figure: ".0f" if "ttft" in figure else ".1f" if figure.endswith("_ms") else ".3f" for figure in figures}
        means = {figure: [(place, value.text(forms[figure])) for place, value in self.points(figure)] for figure in figures}
        places = [place for place, _ in self._by_seed(figures[0])]
        seeds = len({row[SEED] for row in self.rows})
        body = [[*(str(place[key]) for key in keys),
                 *(next((text for other, text in means[figure] if other == place), "-") for figure in figures)]
                for place in places]
        head = [*(key.rpartition(".")[2] if key != POLICY else "policy" for key in keys), *figures]
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        lines = ["  ".join(cell.ljust(w) if i < len(keys) else cell.rjust(w)
                           for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in [head, *body]]
        lines.insert(1, "-" * max(map(len, lines)))
        source = next((f"simulated on {row['gpu']} (device model: {row['device_source']}), {row['model']}" for row in self.rows
                       if row["error"] is None), "nothing ran to its end")
        how = "one seed" if seeds == 1 else f"mean of {seeds} seeds ± half of the 95 % interval"
        caveat = ["", f"{SHARE}: of what the device could finish a second. {CAVEAT}"] if SHARE in figures else []
        return "\n".join([f"{source}; {self.base.workload.trace}; {how}", "", *lines, *caveat])

    def write(self, folder: Path, report: bool = True) -> None:
        """``runs.parquet``, ``runs.csv``, ``points.csv``, ``base.toml``, ``sweep.txt``, and with ``report`` ``plots/``."""
        write_table(folder / "runs.parquet", self.table)
        columns = self.table.column_names
        write_text(folder / "runs.csv", csv_text(columns, ([row.get(name) for name in columns] for row in self.rows)))
        keys = [key for key in self.axes if key != SEED]
        lines = [[*(place[key] for key in keys), figure, value.mean, value.half_width, value.seeds]
                 for figure in POINTS if any(figure in row for row in self.rows) for place, value in self.points(figure)]
        write_text(folder / "points.csv", csv_text([*keys, "figure", "mean", "half_width_95", "seeds"], lines))
        write_text(folder / "base.toml", to_toml(self.base))
        write_text(folder / "sweep.txt", self.text() + "\n")
        if report and len(self.errors) < len(self.rows):
            drawn(lambda: self.draw(folder / "plots"))

    def draw(self, folder: Path) -> None:
        """Its figures, as PNG."""
        for name, figure in self.figures():
            plots.save(figure, folder / name)

    def figures(self) -> Iterable[tuple[str, Any]]:
        """Figures with 95 % bands against the rate (else the first axis of numbers that varies), one curve a policy; one figure
        for each place on the axes that are neither, 24 at most. None where no axis of numbers varies."""
        varying = [key for key in axes_of.varying(self.rows_places()) if key != SEED]
        numbers = [key for key in varying if all(isinstance(row[key], int | float) for row in self.rows)]
        if not numbers:
            return
        x = RATE if RATE in numbers else numbers[0]
        curve = POLICY if POLICY in varying else next((key for key in varying if key != x), None)
        rest = [key for key in varying if key not in (x, curve)]
        panels = {figure: self.points(figure) for figure, _, _ in PANELS}
        places = []
        for row in self.rows:
            place = {key: row[key] for key in rest}
            if place not in places:
                places.append(place)
        for number, place in enumerate(places[:MOST_FIGURES]):
            drawn = []
            for figure, title, factor in PANELS:
                curves: dict[str, list[tuple[float, float, float | None]]] = {}
                for at, value in panels[figure]:
                    if all(at[key] == place[key] for key in rest):
                        half = None if value.half_width is None else value.half_width * factor
                        curves.setdefault(str(at[curve]) if curve else "", []).append((at[x], value.mean * factor, half))
                drawn.append((title, {name: sorted(points, key=lambda p: p[0]) for name, points in curves.items()}))
            where = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in place.items())
            first = next(row for row in self.rows if row["error"] is None)
            title = f"simulated on {first['gpu']}, {first['model']}; {self.base.workload.trace}{'; ' if where else ''}{where}"
            name = safe_name(where.replace(" ", "-").replace(",", "")) if where else "rate"
            yield f"{number:02d}-{name[:60]}.png" if rest else f"{x.rpartition('.')[2]}.png", plots.plot_bands(
                drawn, x.rpartition(".")[2].replace("rate_req_per_s", "requests per second"), title)

    def rows_places(self) -> list[dict[str, Any]]:
        return [{key: row[key] for key in self.axes} for row in self.rows]


def checked(cells: Sequence[Cell]) -> list[Cell]:
    """Whatever can be known to be wrong before the first run: names of policies, their options, traces, devices. Each policy
    gets those of the options that it has, as in a comparison; one that none has is refused."""
    from bullet.sim.run import simulate

    for name in dict.fromkeys(cell.config.policy.name for cell in cells):
        known_policies.check_name(name)
    devices = {config: load_device(config) for config in dict.fromkeys(cell.config.device for cell in cells)}
    whole: dict[WorkloadConfig, WorkloadConfig] = {}
    for cell in cells:
        if cell.config.workload not in whole:
            workload = load_workload(cell.config.workload, cell.config.seed)
            whole[cell.config.workload] = resolved(cell.config.workload, workload)
    kinds: dict[str, RunConfig] = {}
    for cell in cells:
        kinds.setdefault(_kind(cell.config), cell.config)
    nothing = dataclasses.replace(workload, arrival_s=workload.arrival_s[:0], prompt_tokens=workload.prompt_tokens[:0],
                                  output_tokens=workload.output_tokens[:0], shared_prefix=None, closed=None)
    shared = dict(zip(kinds, share_options(list(kinds.values()), lambda config: simulate(
        config, workload=nothing, device=devices[config.device])), strict=True))
    return [dataclasses.replace(cell, config=dataclasses.replace(
        cell.config, policy=shared[_kind(cell.config)].policy, workload=whole[cell.config.workload])) for cell in cells]


def _shares(cells: Sequence[Cell], records: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """``BOUND`` of each run that has figures, and ``SHARE``, what it finished a second of that, drain included; nothing where it
    is not known (:mod:`bullet.sweeps.bound`). Rates and policies share a bound, so few are worked out."""
    limits: dict[tuple[Any, ...], Limit] = {}
    found: list[dict[str, float]] = []
    for cell, record in zip(cells, records, strict=True):
        rate = record.get("figures", {}).get("request_throughput")
        known = None
        if rate is not None:
            config = cell.config
            workload = workload_of(config.workload, config.seed)
            same = (config.device, workload.prompt_tokens.tobytes(), workload.output_tokens.tobytes(), workload.closed is None,
                    bool(workload.shared_prefix))
            if same not in limits:
                limits[same] = limit_of(config, workload, device_of(config.device))
            known = limits[same].bound
        found.append({} if known is None else {BOUND: known.fluid.req_per_s, SHARE: rate / known.fluid.req_per_s})
    return found


def _kind(config: RunConfig) -> str:
    """What tells apart how a policy is built."""
    return repr((config.policy, config.device, config.slo))


def make_pool(cache: Cache | str | Path | None, jobs: int | None, ray: str | None, progress: Callable[[Progress], None] | None,
              say: Say) -> Pool:
    """A pool over a cache, which a folder stands for."""
    require(jobs is None or jobs >= 1, "jobs", jobs, "1 or more")
    return Pool(cache if isinstance(cache, Cache) else Cache(Path(DEFAULT if cache is None else cache)), jobs, ray, progress, say)


def sweep(config: Config, axes: Axes, *, zipped: Sequence[Axes] = (), seeds: int | None = None, out: str | Path | None = None,
          report: bool = True, cache: Cache | str | Path | None = None, jobs: int | None = None, ray: str | None = None,
          progress: Callable[[Progress], None] | None = None, say: Say = silent) -> Sweep:
    """Run ``config`` at every combination of ``axes``: ``sweep({"workload.trace": "sharegpt"}, {"policy.name": ["bullet",
    "vllm-1024"], "workload.rate_req_per_s": "10:20:2"}, seeds=8)``.

    ``axes``: dotted key -> a list, or a range as text, both ends included. ``zipped``: groups of axes that go in step. ``seeds``:
    0 to that many. Results stay in ``cache`` (default runs/cache), so the same again, or after a kill, runs only what is
    missing. ``jobs``: processes, a core each unless said; ``ray``: a cluster's address. ``out``: a fresh folder for the table and
    plots. :class:`~bullet.errors.BulletError` before anything is run; a run that fails is a row with ``error``.
    """
    given = dict(axes)
    if seeds is not None:
        if SEED in given or any(SEED in group for group in zipped):
            raise ConfigError("seeds: seed is an axis already")
        require(seeds >= 1, "seeds", seeds, "1 or more")
        given[SEED] = list(range(seeds))
    base = configuration(config)
    wanted = checked(axes_of.cells(base, given, zipped))
    with nullcontext() if out is None else Claim(Path(out)) as claim:
        pool = make_pool(cache, jobs, ray, progress, say)
        keys = [key_of(cell.config) for cell in wanted]
        records = pool.run(dict(zip(keys, (cell.config for cell in wanted), strict=True)))
        names = tuple(dict.fromkeys(key for cell in wanted for key in cell.place))
        rows = [{**cell.place, SEED: cell.config.seed, "key": key, "error": records[key].get("error"),
                 **records[key].get("figures", {}), **share, **cell.place}
                for cell, key, share in zip(wanted, keys, _shares(wanted, [records[key] for key in keys]), strict=True)]
        result = Sweep(base, names if SEED in names else (*names, SEED), rows)
        if claim is not None:
            result.write(claim.folder, report)
    return result


