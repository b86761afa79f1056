"""Rates that change: phases of several traces in turns, and profiles of the rate over time.

An arrival process of rate 1 is drawn as ever (Poisson, constant or gamma gaps), and its time is stretched: its n-th request
comes when the rates have made up as many requests, ``Λ(t) = integral of the rate up to t``. With Poisson gaps that is the Poisson
process of these rates; gamma gaps keep their burstiness relative to the rate of the moment. Everything repeats after a cycle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bullet.config import WorkloadConfig, is_phased
from bullet.errors import ConfigError
from bullet.units import parse_time_s

PHASES_TEXT = "TRACE@RATE/TIME,TRACE@RATE/TIME,.. (azure-code@5/60s,sharegpt@14/60s)"
PROFILES = {"sine": "sine:LOW:HIGH:PERIOD (sine:4.8:19:360s: from the mean up first)",
            "steps": "steps:RATE/TIME,RATE/TIME,.. (steps:5/60s,18/30s)"}
MOST_RATE = 1e6
MOST_PHASES = 1000
BISECTIONS = 60
"""Of an interval that a double halves 53 times."""


class Phase(NamedTuple):
    """A trace, its arrival rate, and for how long."""

    trace: str
    rate_req_per_s: float
    seconds: float


class Rates(Protocol):
    """A rate over time that repeats every ``cycle_s`` seconds."""

    cycle_s: float
    mean_req_per_s: float

    def at(self, count: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """When ``count`` requests have come (seconds, never decreasing where ``count`` is not), and in which phase; shapes as
        given."""


class Steps:
    """One rate after the other."""

    def __init__(self, rates: Sequence[float], seconds: Sequence[float]) -> None:
        self.rates, self.seconds = np.array(rates, dtype=float), np.array(seconds, dtype=float)
        self.cycle_s = float(self.seconds.sum())
        self.ends = np.cumsum(self.rates * self.seconds)  # requests by the end of each
        self.starts_s = np.cumsum(self.seconds) - self.seconds
        self.mean_req_per_s = float(self.ends[-1]) / self.cycle_s

    def at(self, count: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        cycles = np.floor(count / self.ends[-1])
        left = count - cycles * self.ends[-1]
        # The first phase that ends with more: a pause has none of its own. The last one with any takes what rounding leaves over.
        last = int(np.flatnonzero(self.rates)[-1])
        which = np.minimum(np.searchsorted(self.ends, left, side="right"), last)
        into = (left - (self.ends - self.rates * self.seconds)[which]) / self.rates[which]
        times = cycles * self.cycle_s + self.starts_s[which] + np.clip(into, 0.0, self.seconds[which])
        return np.maximum.accumulate(times), which


class Sine:
    """``mean + (high - mean) sin(2 pi t / period)``."""

    def __init__(self, low: float, high: float, period_s: float) -> None:
        self.cycle_s = period_s
        self.mean_req_per_s, self.swing = (low + high) / 2, (high - low) / 2

    def at(self, count: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        whole = self.mean_req_per_s * self.cycle_s
        cycles = np.floor(count / whole)
        left = count - cycles * whole
        turn = 2 * math.pi / self.cycle_s
        low, high = np.zeros_like(left), np.full_like(left, self.cycle_s)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            short = self.mean_req_per_s * middle + self.swing / turn * (1 - np.cos(turn * middle)) < left
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        return np.maximum.accumulate(cycles * self.cycle_s + high), np.zeros(len(left), dtype=np.int64)


def parse_phases(text: str) -> tuple[Phase, ...]:
    """:class:`ConfigError` names the phase that is wrong, and how phases are written."""
    phases = []
    for part in text.split(","):
        trace, at, rest = part.strip().rpartition("@")
        if not at or not trace or "/" not in rest:
            raise ConfigError(f"workload.trace (--trace) = {text!r}: {part.strip()!r} is no phase: must read "
                              f" {PHASES_TEXT}")
        rate, seconds = _rate_and_time(rest, f"workload.trace (--trace): phase {part.strip()!r}")
        phases.append(Phase(trace, rate, seconds))
    _some_rate([phase.rate_req_per_s for phase in phases], "workload.trace (--trace)", text)
    return tuple(phases)


def parse_profile(text: str) -> Rates:
    """A rate profile by its name; :class:`ConfigError` lists the names."""
    where = "workload.rate_profile (--rate-profile)"
    kind, _, rest = text.partition(":")
    if kind == "steps" and rest:
        pairs = [_rate_and_time(part.strip(), f"{where}: step {part.strip()!r}") for part in rest.split(",")]
        _some_rate([rate for rate, _ in pairs], where, text)
        return Steps(*zip(*pairs, strict=True))
    if kind == "sine" and rest.count(":") == 2:
        low, high, period = rest.split(":")
        least, most = (_number(value, f"{where} = {text!r}") for value in (low, high))
        if not least < most:
            raise ConfigError(f"{where} = {text!r}: the lowest rate {low} must be less than the highest, {high}")
        return Sine(least, most, _seconds(period, f"{where} = {text!r}"))
    raise ConfigError(f"{where} = {text!r}: must be " + " or ".join(PROFILES.values()))


def rates_of(config: WorkloadConfig) -> tuple[Rates, tuple[Phase, ...]] | None:
    """The rates that a configuration's phases or profile make, and its phases; ``None`` where it has one rate for all time."""
    scale = config.rate_scale
    if is_phased(config.trace):
        phases = parse_phases(config.trace)
        return Steps([scale * p.rate_req_per_s for p in phases], [p.seconds for p in phases]), phases
    if config.rate_profile is None:
        return None
    rates = parse_profile(config.rate_profile)
    if isinstance(rates, Sine):
        rates.mean_req_per_s, rates.swing = rates.mean_req_per_s * scale, rates.swing * scale
        return rates, ()
    assert isinstance(rates, Steps)
    return Steps((scale * rates.rates).tolist(), rates.seconds.tolist()), ()


def mean_rate(config: WorkloadConfig) -> float | None:
    """Requests per second on average over a cycle; of one rate, that; ``None`` where arrivals are recorded or follow the run."""
    if config.arrivals in ("recorded", "closed"):
        return None
    found = rates_of(config)
    return config.rate_req_per_s if found is None else found[0].mean_req_per_s


def _rate_and_time(text: str, where: str) -> tuple[float, float]:
    rate, _, time = text.partition("/")
    return _number(rate, where), _seconds(time, where)


def _number(text: str, where: str) -> float:
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,12})?", text.strip()) or float(text) > MOST_RATE:
        raise ConfigError(f"{where}: {text!r} must be a rate, 0 to 10^6 requests per second")
    return float(text)


def _seconds(text: str, where: str) -> float:
    seconds = parse_time_s(text)
    if seconds is None:
        raise ConfigError(f"{where}: {text!r} must be a time with its unit (60s, 5min; ns, us, ms, s, min, h)")
    if not 1e-3 <= seconds <= 1e7:
        raise ConfigError(f"{where}: lasts {text}: must last 1ms to 10^7 s")
    return seconds


def _some_rate(rates: Sequence[float], where: str, text: str) -> None:
    if not any(rates):
        raise ConfigError(f"{where} = {text!r}: all rates are 0: one must be positive")
    if len(rates) > MOST_PHASES:
        raise ConfigError(f"{where}: has {len(rates):,} phases: must be {MOST_PHASES:,} at most")
