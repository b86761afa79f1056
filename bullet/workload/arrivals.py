"""When requests arrive: one random stream per purpose, so that changing the rate leaves the lengths alone."""

from __future__ import annotations

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from bullet.config import WorkloadConfig
from bullet.errors import TraceError

Array = NDArray[np.float64]


def stream(seed: int, purpose: str, replica: int = 0) -> np.random.Generator:
    """A generator for one purpose of one run."""
    return np.random.default_rng(np.random.SeedSequence([seed, replica, crc32(purpose.encode())]))


def draw_arrivals(config: WorkloadConfig, count: int, seed: int) -> Array:
    """``count`` arrival times in seconds, the first at one drawn gap from 0; shape (count,).

    Gaps: exponential (Poisson arrivals), constant, or gamma with coefficient of variation ``cv``, mean 1 / rate.
    """
    assert config.rate_req_per_s is not None
    mean_s = 1 / config.rate_req_per_s
    rng = stream(seed, "arrivals")
    if config.arrivals == "poisson":
        gaps = rng.exponential(mean_s, count)
    elif config.arrivals == "constant":
        gaps = np.full(count, mean_s)
    else:
        shape = config.cv**-2
        gaps = rng.gamma(shape, mean_s / shape, count)
    arrivals: Array = np.cumsum(gaps)
    return arrivals


def recorded_arrivals(recorded: Array | None, config: WorkloadConfig, where: str) -> Array:
    """The trace's own times from 0, ``time_scale`` times as fast."""
    if recorded is None:
        raise TraceError(f"{where}: has no arrival times: use --arrivals poisson, constant or gamma with a --rate, or name "
                         "its column by workload.arrival_column")
    times: Array = (recorded - recorded[0]) / config.time_scale
    return times
