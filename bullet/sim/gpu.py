"""Work in flight on one simulated device.

Each lane executes at most one step. A step keeps the SMs it was launched with; how fast it goes depends on what
runs beside it, so when its co-runner changes (starts, ends) the *fraction left* is kept and timed anew::

    time     t0          t1                t2
    lane A   |-- alone --|-- beside B1 ----|-- beside B2 ...
    left     1 -> 1 - (t1 - t0)/T_alone -> less (t2 - t1)/T_beside_B1 -> ...

Several boundaries at one instant are settled once, after the last launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bullet.devices.base import Device
from bullet.state import DECODE, HYBRID, PREFILL, Step

INFINITY = float("inf")


class Flight:
    """One step on the device. ``work``: as the device's own methods made it.

    ``extra_s`` (reconfiguration) is spent whatever runs beside it; ``factor``, noise, multiplies every duration of this step;
    ``row`` is what its row in steps.parquet says of its launch.
    """

    __slots__ = ("corun_s", "corun_sms", "duration_s", "end_s", "extra_s", "factor", "left", "row", "since_s", "sms",
                 "start_s", "step", "work")

    def __init__(self, step: Step, work: Any, start_s: float, extra_s: float, factor: float,
                 row: tuple[int, ...]) -> None:
        self.step = step
        self.work = work
        self.sms = step.sms
        self.start_s = self.since_s = start_s
        self.extra_s = extra_s
        self.factor = factor
        self.row = row
        self.left = 1.0
        self.duration_s = 0.0  # 0: not timed yet
        self.end_s = INFINITY
        self.corun_s = 0.0
        self.corun_sms = 0

    def retime(self, now_s: float, seconds: float) -> None:
        """From now on the whole step would take ``seconds`` (noise and extra come on top)."""
        duration, before = seconds * self.factor + self.extra_s, self.duration_s
        if duration == before:
            return  # nothing changed: keep the end exact
        if before:
            left = self.left - (now_s - self.since_s) / before
            self.left = left if left > 0.0 else 0.0  # rounding at the very end of a step
        self.since_s = now_s
        self.duration_s = duration
        self.end_s = now_s + self.left * duration


class HybridFlight:
    """A step of a lock-step system: it has no co-runner, so its end is known at its launch."""

    __slots__ = ("end_s", "row", "sms", "start_s", "step")
    corun_s = 0.0
    corun_sms = 0

    def __init__(self, step: Step, start_s: float, end_s: float, row: tuple[int, ...]) -> None:
        self.step = step
        self.sms = step.sms
        self.start_s = start_s
        self.end_s = end_s
        self.row = row


class SimulatedGpu:
    """One device (or tensor-parallel group), what each lane has in flight, and the account of its SM-seconds (I5)."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.num_sms = device.num_sms
        self.prefill: Flight | None = None
        self.decode: Flight | None = None
        self.hybrid: HybridFlight | None = None
        self.shared_sm_s = 0.0  # SM-seconds that two flights held beyond N together
        self._timed: tuple[Flight | None, Flight | None] = (None, None)

    def sm_seconds(self, span_s: float, held_sm_s: Mapping[str, float]) -> dict[str, float]:
        """SM-seconds of ``span_s`` seconds by use (I5), once nothing is in flight; ``held_sm_s``: what the lanes' steps held."""
        shared = self.shared_sm_s
        prefill, decode, hybrid = (held_sm_s.get(lane, 0.0) for lane in (PREFILL, DECODE, HYBRID))
        return {"prefill_only": prefill - shared, "decode_only": decode - shared, "hybrid": hybrid, "shared": shared,
                "idle": self.num_sms * span_s - (prefill + decode - shared) - hybrid}

    def part(self, flight: Flight, other: Flight, now_s: float) -> None:
        """``flight`` ends: book what it and the other have had together."""
        together_s = now_s - (flight.start_s if flight.start_s > other.start_s else other.start_s)
        flight.corun_s += together_s
        other.corun_s += together_s
        excess = flight.sms + other.sms - self.num_sms
        if excess > 0:
            self.shared_sm_s += excess * together_s

    def settle(self, now_s: float) -> float:
        """Time anew what changed its co-runner; returns when the next step ends, infinity if nothing runs."""
        a, b = self.prefill, self.decode
        timed_a, timed_b = self._timed
        if a is not timed_a or b is not timed_b:
            self._timed = (a, b)
            if a is not None and b is not None:
                seconds_a, seconds_b = self.device.corun_seconds(a.work, a.sms, b.work, b.sms)
                a.retime(now_s, seconds_a)
                b.retime(now_s, seconds_b)
                if not a.corun_sms:
                    a.corun_sms = b.sms
                if not b.corun_sms:
                    b.corun_sms = a.sms
            else:
                alone = a or b
                if alone is not None:
                    alone.retime(now_s, self.device.solo_seconds(alone.work, alone.sms))
        end_s = INFINITY if a is None else a.end_s
        return end_s if b is None or end_s < b.end_s else b.end_s
