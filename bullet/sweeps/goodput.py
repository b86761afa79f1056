"""Goodput: the highest rate whose attainment reaches the goal, by bisection, each seed for itself; and capacity at saturation.

Another rate scales the same gaps and leaves the lengths alone, so that a seed's attainment falls almost steadily with the rate,
and policies are compared seed by seed. All probes are full runs on a common grid of rates, in the same cache as sweeps'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bullet.config import Config, RunConfig, configuration
from bullet.errors import BulletError, ConfigError, require
from bullet.files import Claim, write_json, write_text
from bullet.results import metrics
from bullet.results.tables import csv_text
from bullet.signals import Say, silent
from bullet.sweeps.axes import Cell, with_values
from bullet.sweeps.bound import estimated_capacity
from bullet.sweeps.cache import Cache, key_of
from bullet.sweeps.intervals import Estimate, interval, paired
from bullet.sweeps.pool import Pool, Progress
from bullet.sweeps.sweep import POLICY, RATE, SEED, checked, make_pool

SEEDS = 4
TIME_SCALE, RATE_SCALE = "workload.time_scale", "workload.rate_scale"
FIRST_SHARE = 0.8
"""Of the estimated capacity: where the first seed's search begins; the others begin where it ended."""
LOWEST, HIGHEST = 1 / 64, 64.0
"""Of the start: beyond, no rate meets the goal, or every one does."""


@dataclass
class Search:
    """One seed's: rates are whole powers ``(1 + tolerance)^k``. ``tried``: attainment by k."""

    tolerance: float
    goal: float
    start: int
    step: int
    tried: dict[int, float] = field(default_factory=dict)

    def rate(self, k: int) -> float:
        """Six digits, the same for every search of this tolerance: what one has run another finds in the cache."""
        return float(f"{(1 + self.tolerance) ** k:.6g}")

    @property
    def low(self) -> int | None:
        """The highest rate that met the goal."""
        return max((k for k, value in self.tried.items() if value >= self.goal), default=None)

    @property
    def high(self) -> int | None:
        """The lowest rate above it that missed the goal: the definition asks for the last crossing."""
        low = self.low
        return min((k for k, value in self.tried.items() if value < self.goal and (low is None or k > low)), default=None)

    @property
    def crosses(self) -> bool:
        """Whether the goal was met at one rate and missed at a higher one."""
        return self.low is not None and self.high is not None

    def next(self) -> int | None:
        """What to try; ``None``: the crossing is known to one step, or there is none within reach."""
        low, high = self.low, self.high
        reach = math.log(1 + self.tolerance)
        if low is not None and high is not None:
            return (low + high) // 2 if high - low > 1 else None
        if not self.tried:
            return self.start
        stride = self.step * 2 ** (len(self.tried) - 1)
        if low is not None:
            return low + stride if (low - self.start) * reach < math.log(HIGHEST) else None
        assert high is not None
        return high - stride if (high - self.start) * reach > math.log(LOWEST) else None

    @property
    def value(self) -> float | None:
        """The rate at which attainment passes the goal, linear between the two rates beside it; of a search that met the goal
        at every rate, the highest tried, a lower bound; ``None`` where no rate met it."""
        near = [k for k in (self.low, self.high) if k is not None]
        return metrics.goodput([self.rate(k) for k in near], [self.tried[k] for k in near], self.goal)

    def expected(self) -> int:
        """Runs still to come, for the estimate of the time left."""
        low, high = self.low, self.high
        if low is not None and high is not None:
            return math.ceil(math.log2(max(1, high - low)))
        return 0 if self.next() is None else 3 + self.step.bit_length()


@dataclass(frozen=True)
class Found:
    """One policy's goodput: ``values`` by seed (``None``: no rate met the goal), ``mean`` with its interval where all have one.
    Where the first seed has no crossing the others are not tried.

    ``at_least``: some seed met the goal at every rate tried. ``best``: (rate, attainment) of the best run, for when none did.
    """

    policy: str
    values: tuple[float | None, ...]
    at_least: bool
    best: tuple[float, float]
    runs: int
    error: str | None = None

    @property
    def mean(self) -> Estimate | None:
        have = [value for value in self.values if value is not None]
        return interval(have) if have and len(have) == len(self.values) and self.error is None else None


@dataclass(frozen=True)
class Goodput:
    """Of each policy, in the order asked; ``probes``: every run that the answers rest on."""

    base: RunConfig
    goal: float
    reading: str
    tolerance: float
    axis: str
    found: tuple[Found, ...]
    probes: tuple[Mapping[str, Any], ...]

    def difference(self, one: Found, other: Found) -> Estimate | None:
        """``one`` less ``other``, paired by seed."""
        pairs = [(a, b) for a, b in zip(one.values, other.values, strict=False) if a is not None and b is not None]
        return paired([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None

    def text(self) -> str:
        """A policy a row; those that no rate satisfies with the best that can be had."""
        unit = {RATE: "req/s", RATE_SCALE: "x its rates"}.get(self.axis, "x recorded speed")
        seeds = max(len(one.values) for one in self.found)
        first = self.found[0]
        workload = self.base.workload
        many = f"mean of {seeds} seeds ± half of the 95 % interval" if seeds > 1 else "one seed"
        head = [f"simulated on {self.base.device.gpu}, {self.base.device.model}; {workload.trace}, "
                f"{workload.num_requests or 'all'} requests",
                f"goodput: highest rate with attainment ({self.reading}) >= {self.goal:g}, to {self.tolerance:.2g}; {many}"]
        rows = [["policy", unit, "by seed", f"less {first.policy}", "runs"]]
        for one in self.found:
            if one.mean is None:
                why = one.error or f"no rate: best is {one.best[1]:.3f} at {one.best[0]:.3g}"
                rows.append([one.policy, why, "", "", str(one.runs)])
                continue
            gap = None if one is first else self.difference(one, first)
            low, high = min(filter(None, one.values)), max(filter(None, one.values))
            digits = ".3f" if low < 1 else ".2f"
            rows.append([one.policy, (">= " if one.at_least else "") + one.mean.text(digits), f"{low:.3g} - {high:.3g}",
                         "" if gap is None else gap.text(f"+{digits}"), str(one.runs)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join([*head, "", *lines])

    def write(self, folder: Path) -> None:
        """``goodput.txt``, ``goodput.json``, ``probes.csv``."""
        write_text(folder / "goodput.txt", self.text() + "\n")
        write_json(folder / "goodput.json", [
            {"policy": one.policy, "source": "simulated", "goal": self.goal, "reading": self.reading, "axis": self.axis,
             "goodput": None if one.mean is None else one.mean.mean, "at_least": one.at_least,
             "half_width_95": None if one.mean is None else one.mean.half_width, "by_seed": list(one.values),
             "best_rate": one.best[0], "best_attainment": one.best[1], "runs": one.runs, "error": one.error}
            for one in self.found])
        columns = [POLICY, SEED, self.axis, "attainment", "key"]
        write_text(folder / "probes.csv", csv_text(columns, [[row[name] for name in columns] for row in self.probes]))


def goodput(config: Config, policies: Sequence[str] | None = None, *, goal: float = 0.9, reading: str = "mean_length",
            seeds: int = SEEDS, tolerance: float = 0.02, out: str | Path | None = None, cache: Cache | str | Path | None = None,
            jobs: int | None = None, ray: str | None = None, progress: Callable[[Progress], None] | None = None,
            say: Say = silent) -> Goodput:
    """The highest rate at which a share ``goal`` of the requests meets both objectives, for each policy (default: the
    configuration's), on the same requests; seeds 0 to ``seeds`` - 1. With recorded arrivals: the highest ``time_scale``; with
    phases or a profile, the highest ``rate_scale``.

    A policy that no rate satisfies is told with the best attainment there is; other arguments as of :func:`sweep`.
    """
    require(0 < goal <= 1, "goal", goal, "more than 0, 1 at most")
    require(0.001 <= tolerance <= 0.5, "tolerance", tolerance, "0.001 to 0.5")
    require(seeds >= 1, "seeds", seeds, "1 or more")
    base = configuration(config)
    names = [base.policy.name] if policies is None else list(policies)
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"policies {','.join(names)!r}: must name each policy once, separated by commas")
    if base.workload.arrivals == "closed":
        raise ConfigError("goodput: needs arrivals at a rate: a closed loop (--concurrency) has none")
    axis = rate_axis(base)
    prepared = {cell.place[POLICY]: cell.config for cell in checked([Cell({POLICY: name}, with_values(base, {POLICY: name}))
                                                                    for name in names])}
    with nullcontext() if out is None else Claim(Path(out)) as claim:
        result = _search(base, axis, prepared, seeds, goal, reading, tolerance, make_pool(cache, jobs, ray, None, say), progress)
        if claim is not None:
            result.write(claim.folder)
    return result


def rate_axis(config: RunConfig) -> str:
    """The key that a workload's load is set by."""
    if config.workload.arrivals == "recorded":
        return TIME_SCALE
    return RATE if config.workload.rate_req_per_s is not None else RATE_SCALE


def at_rate(config: RunConfig, req_per_s: float) -> float:
    """The value of ``rate_axis`` at which requests come at that rate on average, drawn arrivals only."""
    if rate_axis(config) == RATE:
        return req_per_s
    from bullet.workload.schedule import mean_rate

    mean = mean_rate(config.workload)
    assert mean, "phases and profiles have a rate"
    return req_per_s / mean * config.workload.rate_scale


def _search(base: RunConfig, axis: str, prepared: Mapping[str, RunConfig], seeds: int, goal: float, reading: str,
            tolerance: float, pool: Pool, progress: Callable[[Progress], None] | None) -> Goodput:
    """All searches at once, a probe of each a round."""
    names = list(prepared)
    start = round(math.log(FIRST_SHARE * _start(base, axis)) / math.log(1 + tolerance))
    first_step, next_step = max(1, round(0.16 / tolerance)), max(1, round(0.05 / tolerance))
    searches = {(name, 0): Search(tolerance, goal, start, first_step) for name in names}
    errors: dict[str, str] = {}
    probes: list[dict[str, Any]] = []
    seconds: list[float] = []
    while True:
        for name in names:
            ended = searches[name, 0]
            if name in errors or (name, 1) in searches or ended.next() is not None:
                continue
            if ended.crosses:  # else other seeds would find no crossing either
                near = ended.low or 0  # k itself may be 0
                searches |= {(name, seed): Search(tolerance, goal, near, next_step) for seed in range(1, seeds)}
        asked = {at: k for at, search in searches.items() if at[0] not in errors and (k := search.next()) is not None}
        if not asked:
            break
        configs = {at: with_values(prepared[at[0]], {axis: searches[at].rate(k), SEED: at[1]}) for at, k in asked.items()}
        keys = {at: key_of(one) for at, one in configs.items()}
        records = pool.run({keys[at]: one for at, one in configs.items()})
        for (name, seed), k in asked.items():
            record, search = records[keys[name, seed]], searches[name, seed]
            if "error" in record:
                errors[name] = record["error"]
                continue
            search.tried[k] = met = float(record["figures"][f"slo_attainment_{reading}"])
            seconds.append(record["seconds"])
            probes.append({POLICY: name, SEED: seed, axis: search.rate(k), "attainment": met, "key": keys[name, seed]})
        if progress is not None:
            progress(_progress(searches, names, seeds, len(probes), seconds, pool))
    found = []
    for name in names:
        mine = [searches[name, seed] for seed in range(seeds) if (name, seed) in searches]
        tried = [(search.rate(k), value) for search in mine for k, value in search.tried.items()]
        found.append(Found(name, tuple(search.value for search in mine),
                           any(search.high is None for search in mine), max(tried, key=lambda pair: pair[1], default=(0.0, 0.0)),
                           len(tried), errors.get(name)))
    return Goodput(base, goal, reading, tolerance, axis, tuple(found), tuple(probes))


def _progress(searches: Mapping[tuple[str, int], Search], names: Sequence[str], seeds: int, done: int, seconds: Sequence[float],
              pool: Pool) -> Progress:
    left = sum(search.expected() for search in searches.values())
    firsts = [searches[name, 0] for name in names if (name, 1) not in searches]
    left += 4 * (seeds - 1) * sum(one.next() is not None or one.crosses for one in firsts)
    return Progress(done, done + left, left * sum(seconds) / max(1, len(seconds)) / pool.workers)


def _start(base: RunConfig, axis: str) -> float:
    """Where a search begins: a guess, on which no answer rests."""
    if axis == TIME_SCALE:
        return base.workload.time_scale / FIRST_SHARE
    try:
        return at_rate(base, estimated_capacity(base))
    except BulletError:  # a device that knows no phase alone
        return base.workload.rate_req_per_s or base.workload.rate_scale


@dataclass(frozen=True)
class Capacity:
    """A policy at saturation. ``req_per_s``: mean over seeds; ``whole``: requests waited throughout in every run, so it is a
    capacity and not the rate that was offered; ``mix``: mean tokens of what was served then over the mean of all requests."""

    policy: str
    req_per_s: Estimate
    by_seed: tuple[float, ...]
    whole: bool
    mix: float


def capacity(config: Config, policies: Sequence[str] | None = None, *, seeds: int = SEEDS, overload: float = 1.5,
             cache: Cache | str | Path | None = None, jobs: int | None = None, ray: str | None = None,
             progress: Callable[[Progress], None] | None = None, say: Say = silent) -> dict[str, Capacity]:
    """Requests per second that each policy serves while requests always wait, so that a load can be stated as a share of it.

    Offered: ``overload`` times the estimate of the device's own rate, whatever the configuration's; the figure is
    ``saturation.throughput``, from the first to the last quarter of the finishes. Ask for some thousand requests: the batch must
    have filled by the first quarter. Other arguments as of :func:`sweep`.
    """
    require(1 <= overload <= 100, "overload", overload, "1 to 100")
    base = configuration(config)
    if base.workload.arrivals in ("recorded", "closed"):
        raise ConfigError(f"capacity: needs arrivals drawn at a rate, not {base.workload.arrivals} ones")
    names = [base.policy.name] if policies is None else list(policies)
    axis, rate = rate_axis(base), float(f"{at_rate(base, overload * estimated_capacity(base)):.3g}")
    cells = checked([Cell({POLICY: name, SEED: seed}, with_values(base, {POLICY: name, SEED: seed, axis: rate}))
                     for name in names for seed in range(seeds)])
    keys = [key_of(cell.config) for cell in cells]
    records = make_pool(cache, jobs, ray, progress, say).run(dict(zip(keys, (cell.config for cell in cells), strict=True)))
    result = {}
    for name in names:
        mine = [records[key] for cell, key in zip(cells, keys, strict=True) if cell.place[POLICY] == name]
        wrong = next((record["error"] for record in mine if "error" in record), None)
        figures = [record.get("figures", {}) for record in mine]
        rates = [one.get("saturation.throughput") for one in figures]
        if wrong is not None or any(one is None for one in rates):
            raise ConfigError(f"{name}: no capacity: {wrong or 'too few requests finished'}")
        result[name] = Capacity(name, interval(rates), tuple(rates), all(one["saturation.whole"] for one in figures),
                                sum(one["saturation.mix"] for one in figures) / len(figures))
    return result
