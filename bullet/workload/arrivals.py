"""When requests arrive: one random stream per purpose, so that changing the rate leaves the lengths alone."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from bullet.config import WorkloadConfig
from bullet.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from bullet.workload.schedule import Rates

LEAST_CV, MOST_CV = 1e-3, 1e2
"""Gamma arrivals outside are as good as constant, or so bursty that nearly every gap is below a double's least."""
LATEST_ARRIVAL_S = 1e9
"""A double near 10^9 s (30 years) holds 0.1 us; much later a step would take no time at all."""


def stream(seed: int, purpose: str, replica: int = 0) -> np.random.Generator:
    """The random generator of one purpose in one run: same three arguments, same numbers.

    ``seed`` and ``replica`` are 0 or more. Purposes are independent: drawing more of one changes nothing in another.
    """
    return np.random.default_rng(np.random.SeedSequence([seed, replica, crc32(purpose.encode())]))


def unit_arrivals(config: WorkloadConfig, count: int, seed: int, replica: int = 0) -> NDArray[np.float64]:
    """``count`` arrival times at one request per unit of time, the first one gap after 0; shape (count,), never decreasing.

    Gaps have the mean 1: exponential (``poisson``), all equal (``constant``) or gamma with the coefficient of variation
    ``config.cv`` (1: Poisson again). Raises :class:`ConfigError` for a CV that cannot be computed with.
    """
    rng = stream(seed, "arrivals", replica)
    if config.arrivals == "poisson":
        return np.cumsum(rng.standard_exponential(count))
    if config.arrivals == "constant":
        return np.arange(1, count + 1, dtype=np.float64)
    assert config.arrivals == "gamma", config.arrivals
    if not LEAST_CV <= config.cv <= MOST_CV:
        raise ConfigError(f"workload.cv = {config.cv!r}: must be {LEAST_CV:g} to {MOST_CV:g}")
    shape = config.cv**-2
    gaps: NDArray[np.float64] = rng.standard_gamma(shape, count) / shape
    return np.cumsum(gaps)


def draw_arrivals(config: WorkloadConfig, count: int, seed: int, replica: int = 0) -> NDArray[np.float64]:
    """``count`` arrival times in seconds at ``config.rate_req_per_s``; another rate scales the same gaps.

    Raises :class:`ConfigError` if the CV or the resulting times cannot be computed with.
    """
    rate = config.rate_req_per_s
    assert rate is not None, "WorkloadConfig lets no drawn arrivals through without a rate"
    # Divided at the end: a constant rate then accumulates no rounding.
    with np.errstate(over="ignore"):
        times: NDArray[np.float64] = unit_arrivals(config, count, seed, replica) / rate
    if not times[-1] <= LATEST_ARRIVAL_S:
        raise ConfigError(f"workload.rate_req_per_s (--rate) = {rate!r}: too small: the last of {count} requests would arrive "
                          f"after {times[-1]:.3g} s, must be {LATEST_ARRIVAL_S:g} at most")
    return times


def scheduled_arrivals(config: WorkloadConfig, rates: Rates, count: int, seed: int,
                       replica: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """``count`` arrival times in seconds under rates that change, and the phase of each; :class:`ConfigError` as above."""
    times, phases = rates.at(unit_arrivals(config, count, seed, replica))
    if not times[-1] <= LATEST_ARRIVAL_S:
        raise ConfigError(f"workload.rate_scale (--rate-scale) = {config.rate_scale!r}: too small: the last of {count} requests "
                          f"would arrive after {times[-1]:.3g} s, must be {LATEST_ARRIVAL_S:g} at most")
    return times, phases


def draw_thinks(config: WorkloadConfig, count: int, seed: int, replica: int = 0) -> NDArray[np.float64]:
    """How long a client thinks before each of ``count`` requests, seconds, in the order in which they begin to think."""
    mean = config.think_time_s
    if config.think == "constant" or mean == 0:
        return np.full(count, mean)
    return stream(seed, "thinks", replica).standard_exponential(count) * mean


def recorded_arrivals(recorded: NDArray[np.float64] | None, config: WorkloadConfig) -> NDArray[np.float64]:
    """The trace's own times in seconds, the first row at 0, ``config.time_scale`` times as fast.

    Raises :class:`TraceError` if the trace has no times, :class:`ConfigError` if the scale sends them out of range.
    """
    if recorded is None:
        raise TraceError(f"{config.trace}: has no arrival times: draw them (--arrivals poisson, constant or gamma, "
                         "with --rate), or name their column in a file of your own by workload.arrival_column")
    with np.errstate(over="ignore"):
        times: NDArray[np.float64] = (recorded - recorded[0]) / config.time_scale
    if not times[-1] <= LATEST_ARRIVAL_S:
        raise ConfigError(f"workload.time_scale (--time-scale) = {config.time_scale!r}: too small: the last request would arrive "
                          f"after {times[-1]:.3g} s, must be {LATEST_ARRIVAL_S:g} at most")
    return times
