"""Steady state: windows, levels and trends by hand; queues whose theory is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from bullet.results.columns import RequestTable
from bullet.sweeps.steady import Trend, growth, level, saturation_figures, steady_figures, trend, window

NAN = math.nan


def requests(arrival: Sequence[float], admitted: Sequence[float], first: Sequence[float], finish: Sequence[float], *,
             output: int = 11, prompt: int = 100, status: Sequence[str] | None = None) -> RequestTable:
    rows = [(i, a, prompt, output, "finished" if status is None else status[i], "", b, c, d, output, 0, 1.0, 1.0)
            for i, (a, b, c, d) in enumerate(zip(arrival, admitted, first, finish, strict=True))]
    table: RequestTable = RequestTable.from_rows(rows)
    return table


def queue_of(arrival: np.ndarray, service_s: np.ndarray) -> RequestTable:
    """One server, first come first served: waits until it is served, the first token is at its start."""
    start, free = np.empty(len(arrival)), 0.0
    for i, (a, s) in enumerate(zip(arrival, service_s, strict=True)):
        start[i] = max(a, free)
        free = start[i] + s
    return requests(arrival.tolist(), start.tolist(), start.tolist(), (start + service_s).tolist())


def test_the_window_leaves_out_both_ends_of_the_arrivals() -> None:
    table = requests([10, 60, 110], [10, 60, 110], [11, 61, 111], [500, 501, 502])
    assert window(table, 0.2, 0.1) == (30.0, 100.0)
    assert window(table, 0, 0) == (10.0, 110.0)


def test_levels_are_exact_means_of_bins() -> None:
    # Waiting: 0 to 4, 1 to 2, and one that is never admitted from 3 on; a rejected one never waits.
    table = requests([0, 1, 3, 0], [4, 2, NAN, NAN], [4, 2, NAN, NAN], [6, 2.5, NAN, NAN],
                     status=["finished", "finished", "unfinished", "rejected"])
    assert level(table, "queue", np.array([0.0, 2.0, 4.0, 8.0])).tolist() == [1.5, 1.5, 1.0]
    assert level(table, "batch", np.array([0.0, 2.0, 4.0, 8.0])).tolist() == [0.0, 0.25, 0.5]


def test_a_straight_line_has_no_scatter() -> None:
    assert trend(np.array([1.0, 2.0, 3.0, 4.0])) == Trend(2.5, 3.0, 0.0)
    flat = trend(np.array([1.0, 3.0, 3.0, 1.0]))
    assert (flat.mean, flat.rise) == (2.0, 0.0)
    assert not flat.significant


def test_half_the_width_of_a_rise_is_that_of_least_squares() -> None:
    # Places -1, 0, 1; slope 0.5; what is left: 1/2, -1, 1/2, so the error is sqrt(1.5 / 1 / 2), t of one degree 12.706.
    found = trend(np.array([1.0, 0.0, 2.0]))
    assert found.rise == 1.0
    assert found.half_width == pytest.approx(2 * 12.7062 * math.sqrt(0.75), rel=1e-4)


@pytest.mark.parametrize(("queue", "batch", "arrivals", "says"), [
    (Trend(5, 30, 10), Trend(50, 1, 5), 1000, "growing"), (Trend(5, 30, 40), Trend(50, 1, 5), 1000, "stationary"),
    (Trend(5, 19, 10), Trend(50, 1, 5), 1000, "stationary"), (Trend(0, 0, 0), Trend(50, 20, 5), 1000, "growing"),
    (Trend(5, -30, 10), Trend(50, 1, 5), 1000, "falling"), (Trend(5, 30, 10), Trend(50, 1, 5), 199, None)])
def test_growth_needs_size_and_significance(queue: Trend, batch: Trend, arrivals: int, says: str | None) -> None:
    assert growth(queue, batch, arrivals) == says


def test_a_queue_with_constant_service_waits_as_theory_says() -> None:
    # M/D/1, 1 s of service: mean wait = load / (2 (1 - load)); the mean queue is rate x wait (Little).
    rng = np.random.default_rng(1)
    table = queue_of(np.cumsum(rng.exponential(1 / 0.6, 40_000)), np.ones(40_000))
    figures = steady_figures(table, 1.0)
    assert figures["steady.mean_ttft_ms"] == pytest.approx(750, rel=0.05)
    assert figures["steady.queue_mean"] == pytest.approx(0.6 * 0.75, rel=0.05)
    assert figures["steady.batch_mean"] == pytest.approx(0.6, rel=0.03)
    assert figures["steady.throughput"] == pytest.approx(0.6, rel=0.02)
    assert figures["steady.growth"] == "stationary"
    assert figures["steady.mean_tpot_ms"] == pytest.approx(100)  # 1 s over ten gaps


@pytest.mark.parametrize("seed", range(5))
def test_an_overloaded_queue_grows_and_shows_its_capacity(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = queue_of(np.cumsum(rng.exponential(1 / 1.2, 2_000)), np.ones(2_000))
    figures = steady_figures(table, 1.0)
    assert figures["steady.growth"] == "growing"
    # Arrives 0.2 faster than it is served: over the window 0.2 / 1.2 of the arrivals.
    assert figures["steady.queue_rise"] == pytest.approx(figures["steady.offered"] / 6, rel=0.25)
    found = saturation_figures(table)
    assert found["saturation.throughput"] == pytest.approx(1.0)
    assert found["saturation.whole"]
    assert found["saturation.mix"] == 1.0


def test_an_idle_system_shows_no_capacity() -> None:
    table = queue_of(np.arange(400.0) * 2, np.ones(400))
    found = saturation_figures(table)
    assert found == {"saturation.throughput": pytest.approx(0.5), "saturation.whole": False, "saturation.mix": 1.0}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_requests_have_few_figures(count: int) -> None:
    times = [1.0] * count
    figures = steady_figures(requests(times, times, times, times), 1.0) | saturation_figures(requests(times, times, times, times))
    assert {name: figures[name] for name in ("steady.throughput", "steady.growth", "saturation.throughput")} == {
        "steady.throughput": None, "steady.growth": None, "saturation.throughput": None}
