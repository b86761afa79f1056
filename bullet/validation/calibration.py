"""The graph factor: what CUDA graphs and compilation spare, which the kernel tables were measured without."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bullet.devices.table_skew import LEAST, MOST
from bullet.errors import ConfigError, ProfileError
from bullet.validation.recorded import Recorded
from bullet.validation.replay import Replay, Scenario, replay

LEFT_OUT = 30
"""The first requests: the graph factor comes from them alone, and statistics are also given without them."""
OTHER_CHOICES = (60, None)
"""What else the factor could be taken from, printed beside it and used for nothing (None: all, which is circular)."""
PRECISION = 1e-4
"""Of the graph factor: how near its requests' mean TPOT comes, or how narrow a jump of it is bracketed."""
MOST_RUNS = 25
"""For one factor: halving the widest bracket to the precision takes some 14."""


@dataclass(frozen=True)
class Calibration:
    """A graph factor and what it rests on: the first ``requests``, in ``runs`` runs. ``standard_error``: of the factor, from the
    scatter of those requests' TPOT about the simulated ones. ``one``: the last run, with a factor within the precision."""

    factor: float
    requests: int
    standard_error: float
    runs: int
    one: Replay


def calibrate(recorded: Recorded, requests: int = LEFT_OUT, *, skew: bool = True) -> Calibration:
    """The factor on graphed steps with which the simulated mean TPOT of the first ``requests`` is the measured one.

    One run with arrivals as sent for each try, by false position (Illinois), so the same every time. If the mean jumps over
    the measured one (some request is preempted or is not), the side of the jump that is nearer.
    """
    if not 2 <= requests <= len(recorded):
        raise ConfigError(f"a graph factor from {requests} requests: must be 2 to {len(recorded)}")
    real = recorded.per_request()["tpot"][:requests]
    tried: list[tuple[float, float, Replay]] = []  # factor, mean TPOT over the measured one less 1, run

    def off(factor: float) -> float:
        run = replay(recorded, Scenario("calibration", skew=skew, graph_factor=factor))
        ours = run.per_request()["tpot"][:requests]
        tried.append((factor, float(ours.mean() / real.mean() - 1), run))
        return tried[-1][1]

    low = high = 1.0
    at_low = at_high = off(1.0)
    while at_low > 0 or at_high < 0:  # on, past where it would be if TPOT went with the factor
        if low <= LEAST or high >= MOST:
            raise ProfileError(f"{recorded.target}: the first {requests} requests ask for a graph factor beyond {LEAST} to "
                               f"{MOST}: are tables and run of one engine?")
        if at_low > 0:
            high, at_high = low, at_low
            low = max(LEAST, low / (1 + at_low) ** 1.5)
            at_low = off(low)
        else:
            low, at_low = high, at_high
            high = min(MOST, high / (1 + at_high) ** 1.5)
            at_high = off(high)
    side = 0
    while min(abs(t[1]) for t in tried) > PRECISION and high - low > PRECISION and len(tried) < MOST_RUNS:
        share = at_low / (at_low - at_high)
        factor = low + min(max(share, 0.05), 0.95) * (high - low)
        here = off(factor)
        if here < 0:
            low, at_low = factor, here
            at_high /= 2 if side < 0 else 1
        else:
            high, at_high = factor, here
            at_low /= 2 if side > 0 else 1
        side = -1 if here < 0 else 1
    factor, _, run = min(tried, key=lambda t: abs(t[1]))
    ours = run.per_request()["tpot"][:requests]
    scatter = np.std(real - ours, ddof=1) / requests ** 0.5 / ours.mean()
    return Calibration(factor, requests, float(factor * scatter), len(tried), run)
