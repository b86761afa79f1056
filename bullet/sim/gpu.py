"""Work in flight on one simulated device.

Each lane executes at most one step. A step keeps the SMs it was launched with; how fast it goes depends on what
runs beside it, so when its co-runner changes (starts, ends) the *fraction left* is kept and timed anew::

    time     t0          t1                t2
    lane A   |-- alone --|-- beside B1 ----|-- beside B2 ...
    left     1 -> 1 - (t1 - t0)/T_alone -> less (t2 - t1)/T_beside_B1 -> ...

Several boundaries at one instant are settled once, after the last launch.
"""

from __future__ import annotations

from typing import Any

from bullet.device import DeviceModel
from bullet.state import Step

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

    def __init__(self, device: DeviceModel) -> None:
        self.device = device
        self.num_sms = device.num_sms
        self.prefill: Flight | None = None
        self.decode: Flight | None = None
        self.hybrid: HybridFlight | None = None
        self._held_s: dict[tuple[int, int, int], float] = {}  # seconds, by the SMs that prefill, decode, hybrid held
        self._accounted_s = -1.0
        self._timed: tuple[Flight | None, Flight | None] = (None, None)

    @property
    def sm_seconds(self) -> dict[str, float]:
        """SM-seconds so far."""
        books = {"prefill_only": 0.0, "decode_only": 0.0, "hybrid": 0.0, "shared": 0.0, "idle": 0.0}
        for (p, d, hybrid), span in self._held_s.items():
            shared = max(0, p + d - self.num_sms)
            books["prefill_only"] += (p - shared) * span
            books["decode_only"] += (d - shared) * span
            books["hybrid"] += hybrid * span
            books["shared"] += shared * span
            books["idle"] += (self.num_sms - (p + d - shared) - hybrid) * span
        return books

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

    def account(self, now_s: float) -> None:
        """Book the time since the last call: to be called before flights change."""
        span = now_s - self._accounted_s
        if span == 0.0:
            return
        first, self._accounted_s = self._accounted_s < 0.0, now_s
        if first:
            return
        a, b = self.prefill, self.decode
        if a is None:
            key = (0, 0 if b is None else b.sms, 0)
        elif b is None:
            key = (a.sms, 0, 0)
        else:
            a.corun_s += span
            b.corun_s += span
            key = (a.sms, b.sms, 0)
        held = self._held_s
        held[key] = held.get(key, 0.0) + span

    def account_hybrid(self, now_s: float) -> None:
        """The same for the one lane of a lock-step system."""
        span = now_s - self._accounted_s
        if self._accounted_s >= 0.0 and span:
            key = (0, 0, 0 if self.hybrid is None else self.hybrid.sms)
            self._held_s[key] = self._held_s.get(key, 0.0) + span
        self._accounted_s = now_s
