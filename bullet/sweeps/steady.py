"""Steady state: a run without its warm-up and drain, whether batch and queue stand still or grow, and the rate at saturation.

All from a run's requests. A request waits from its arrival to its admission and is in the batch from its first token to its last;
that a preempted one waits again is not seen here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bullet.results import metrics
from bullet.results.columns import RequestTable
from bullet.results.student import student_t

Array = NDArray[np.float64]
WARM_UP, DRAIN = 0.2, 0.1
"""Shares of the time of arrivals that are cut at either end."""
BINS = 20
LEAST_REQUESTS = 200
"""In the window; of fewer, nothing is said about growth."""
QUEUE_GROWS, BATCH_GROWS = 0.02, 0.25
"""A queue grows that takes in this share of the arrivals; a batch, that rises by this share of its mean."""
SATURATED = (0.25, 0.75)
"""Shares of all finishes between which the rate at saturation is taken."""


class Window(NamedTuple):
    """Seconds of a run."""

    start_s: float
    end_s: float

    def holds(self, times: Array) -> NDArray[np.bool_]:
        return np.asarray((times >= self.start_s) & (times < self.end_s))


class Trend(NamedTuple):
    """A level over a window: its mean, how much the straight line through its bins rises from end to end, and half the width
    of that rise's 95 % interval."""

    mean: float
    rise: float
    half_width: float

    @property
    def significant(self) -> bool:
        return abs(self.rise) > self.half_width


def chosen(requests: RequestTable, which: NDArray[np.bool_]) -> RequestTable:
    """Some of the rows."""
    return RequestTable({name: requests[name][which] for name in requests.columns})


def window(requests: RequestTable, warm_up: float = WARM_UP, drain: float = DRAIN) -> Window:
    """The time of arrivals without its first and last shares. What comes later is drain: nothing arrives any more."""
    assert 0 <= warm_up < 1 - drain <= 1, f"warm-up {warm_up} and drain {drain} leave nothing"
    first, last = (float(f(requests["arrival_s"])) for f in (np.min, np.max)) if len(requests) else (0.0, 0.0)
    return Window(first + warm_up * (last - first), last - drain * (last - first))


def _levels(enter: Array, leave: Array, edges: Array) -> Array:
    """How many are inside, averaged over each bin: exact, from the time each has been inside by each edge."""
    total = np.clip(edges[:, None] - enter[None, :], 0.0, (leave - enter)[None, :]).sum(axis=1)
    result: Array = np.diff(total) / np.diff(edges)
    return result


def level(requests: RequestTable, which: str, edges: Array) -> Array:
    """``queue`` (arrived, not admitted) or ``batch`` (past the first token, not finished), mean of each bin; shape (bins,)."""
    enter, leave = (requests[name] for name in (("arrival_s", "admitted_s") if which == "queue" else
                                                 ("first_token_s", "finish_s")))
    there = ~np.isnan(enter) & (requests["status"] != "rejected")
    return _levels(enter[there], np.where(np.isnan(leave[there]), np.inf, leave[there]), edges)


def trend(levels: Array) -> Trend:
    """A straight line through the means of equal bins, least squares."""
    count = len(levels)
    assert count > 2, f"a trend of {count} bins"
    place = np.arange(count) - (count - 1) / 2
    spread = float(place @ place)
    slope = float(place @ levels) / spread
    left = levels - levels.mean() - slope * place
    deviation = float(np.sqrt(left @ left / (count - 2) / spread))
    return Trend(float(levels.mean()), slope * (count - 1), student_t(count - 2) * deviation * (count - 1))


def growth(queue: Trend, batch: Trend, arrivals: int) -> str | None:
    """``growing`` where the queue takes in a share of the arrivals or the batch rises, each beyond its own scatter; ``falling``
    where one of them falls so; else ``stationary``. ``None``: too few requests to tell."""
    if arrivals < LEAST_REQUESTS:
        return None
    signs = [np.sign(t.rise) for t, least in ((queue, QUEUE_GROWS * arrivals), (batch, BATCH_GROWS * batch.mean))
             if t.significant and abs(t.rise) >= least]
    return "stationary" if not signs else "growing" if max(signs) > 0 else "falling"


def steady_figures(requests: RequestTable, tpot_slo_s: float, warm_up: float = WARM_UP, drain: float = DRAIN) -> dict[str, Any]:
    """Figures of the window, ``steady.*``; docs/sweeps.md says what each one is. ``None`` where there is nothing to tell."""
    cut = window(requests, warm_up, drain)
    inside = chosen(requests, cut.holds(requests["arrival_s"]))
    seconds = cut.end_s - cut.start_s
    figures: dict[str, Any] = {"start_s": cut.start_s, "end_s": cut.end_s, "offered": len(inside)}
    figures["throughput"] = float(cut.holds(requests["finish_s"]).sum()) / seconds if seconds > 0 else None
    for reading in metrics.READINGS:
        met = metrics.attained(inside, reading, tpot_slo_s)
        figures[f"slo_attainment_{reading}"] = float(met.mean()) if len(met) else None
    for name, values in (("ttft", metrics.ttft_s(inside)), ("tpot", metrics.tpot_s(inside)), ("e2el", metrics.e2e_s(inside))):
        figures[f"mean_{name}_ms"] = float(values.mean() * 1e3) if len(values) else None
        for percent in (50, 90, 99):
            figures[f"p{percent}_{name}_ms"] = float(np.percentile(values, percent) * 1e3) if len(values) else None
    trends: dict[str, Trend] = {}
    if seconds > 0:
        edges = np.linspace(cut.start_s, cut.end_s, BINS + 1)
        trends = {which: trend(level(requests, which, edges)) for which in ("queue", "batch")}
    for which in ("queue", "batch"):
        line = trends.get(which)
        figures |= {f"{which}_{name}": None if line is None else getattr(line, name) for name in Trend._fields}
    figures["growth"] = growth(trends["queue"], trends["batch"], len(inside)) if trends else None
    return {f"steady.{name}": value for name, value in figures.items()}


def saturation_figures(requests: RequestTable) -> dict[str, Any]:
    """Finishes per second between the first and the last quarter of all finishes, ``saturation.throughput``; a capacity where
    requests waited throughout, ``saturation.whole``. ``saturation.mix``: mean tokens of what finished then, over the mean of
    all; far from 1 the policy chose cheap (or dear) requests first, and the rate is not that of the workload."""
    finish = np.sort(requests["finish_s"][requests["status"] == "finished"])
    low, high = (int(share * len(finish)) for share in SATURATED)
    figures: dict[str, Any] = {"throughput": None, "whole": None, "mix": None}
    if high > low and finish[high] > finish[low]:
        during = Window(float(finish[low]), float(finish[high]))
        figures["throughput"] = (high - low) / (during.end_s - during.start_s)
        waiting = level(requests, "queue", np.linspace(*during, BINS + 1))
        figures["whole"] = bool(waiting.min() >= 1)
        tokens = requests["prompt_tokens"] + requests["output_tokens"]
        figures["mix"] = float(tokens[during.holds(requests["finish_s"])].mean() / tokens.mean())
    return {f"saturation.{name}": value for name, value in figures.items()}
