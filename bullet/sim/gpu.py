"""Work in flight on one simulated device.

Each lane executes at most one step. A step keeps the SMs it was launched with; how fast it goes depends on what
runs beside it, so when its co-runner changes (starts, ends) the *fraction left* is kept and timed anew::

    time     t0          t1                t2
    lane A   |-- alone --|-- beside B1 ----|-- beside B2 ...
    left     1 -> 1 - (t1 - t0)/T_alone -> less (t2 - t1)/T_beside_B1 -> ...

Several boundaries at one instant are settled once, after the last launch.
"""

from __future__ import annotations

from bullet.device import DeviceModel, StepWork
from bullet.state import DECODE, HYBRID, PREFILL, Step


class Flight:
    """One step on the device. ``extra_s`` (reconfiguration) is spent whatever runs beside it."""

    __slots__ = ("corun_s", "corun_sms", "duration_s", "end_s", "extra_s", "factor", "left", "serial", "since_s", "sms",
                 "start_s", "step", "work")

    def __init__(self, serial: int, step: Step, work: StepWork, sms: int, start_s: float, extra_s: float,
                 factor: float) -> None:
        self.serial = serial
        self.step = step
        self.work = work
        self.sms = sms
        self.start_s = start_s
        self.extra_s = extra_s
        self.factor = factor  # noise multiplies every duration of this step
        self.left = 1.0
        self.since_s = start_s
        self.duration_s: float | None = None
        self.end_s: float | None = None
        self.corun_s = 0.0
        self.corun_sms = 0

    def retime(self, now_s: float, seconds: float) -> None:
        """From now on the whole step would take ``seconds`` (noise and extra come on top)."""
        duration = seconds * self.factor + self.extra_s
        if duration == self.duration_s:
            return  # nothing changed: keep the end exact
        if self.duration_s is not None:
            self.left -= (now_s - self.since_s) / self.duration_s
            if self.left < 0.0:  # rounding at the very end of a step
                self.left = 0.0
        self.since_s = now_s
        self.duration_s = duration
        self.end_s = now_s + self.left * duration


class SimulatedGpu:
    """One device (or tensor-parallel group) with its lanes' flights and the account of its SM-seconds (I5)."""

    def __init__(self, device: DeviceModel) -> None:
        self.device = device
        self.num_sms = device.num_sms
        self.flights: dict[str, Flight] = {}
        self.sm_seconds = {"prefill_only": 0.0, "decode_only": 0.0, "hybrid": 0.0, "shared": 0.0, "idle": 0.0}
        self._accounted_s: float | None = None
        self._pair: tuple[int, int] = (-1, -1)
        self._serial = 0

    def launch(self, lane: str, step: Step, work: StepWork, now_s: float, extra_s: float = 0.0,
               factor: float = 1.0) -> Flight:
        """Start a step; it has no end until :meth:`settle`."""
        assert lane not in self.flights, f"{lane} is busy"
        self._serial += 1
        flight = self.flights[lane] = Flight(self._serial, step, work, step.sms, now_s, extra_s, factor)
        return flight

    def finish(self, lane: str) -> Flight:
        """Take a step off the device."""
        return self.flights.pop(lane)

    def settle(self, now_s: float) -> None:
        """Time anew what changed its co-runner."""
        flights = self.flights
        hybrid = flights.get(HYBRID)
        if hybrid is not None:
            if hybrid.end_s is None:
                hybrid.retime(now_s, self.device.solo_seconds(hybrid.work, hybrid.sms))
            return
        a, b = flights.get(PREFILL), flights.get(DECODE)
        pair = (a.serial if a is not None else -1, b.serial if b is not None else -1)
        if pair == self._pair:
            return
        self._pair = pair
        if a is not None and b is not None:
            seconds_a, seconds_b = self.device.corun_seconds(a.work, a.sms, b.work, b.sms)
            a.retime(now_s, seconds_a)
            b.retime(now_s, seconds_b)
            a.corun_sms = a.corun_sms or b.sms
            b.corun_sms = b.corun_sms or a.sms
        else:
            alone = a or b
            if alone is not None:
                alone.retime(now_s, self.device.solo_seconds(alone.work, alone.sms))

    def account(self, now_s: float) -> None:
        """Book the SM-seconds since the last call: to be called before flights change."""
        last, self._accounted_s = self._accounted_s, now_s
        if last is None or now_s == last:
            return
        span = now_s - last
        total, books = self.num_sms, self.sm_seconds
        hybrid = self.flights.get(HYBRID)
        if hybrid is not None:
            books["hybrid"] += hybrid.sms * span
            books["idle"] += (total - hybrid.sms) * span
            return
        a, b = self.flights.get(PREFILL), self.flights.get(DECODE)
        p = a.sms if a is not None else 0
        d = b.sms if b is not None else 0
        shared = p + d - total
        if shared > 0:
            books["shared"] += shared * span
            p -= shared
            d -= shared
        else:
            books["idle"] -= shared * span
        books["prefill_only"] += p * span
        books["decode_only"] += d * span
        if a is not None and b is not None:
            a.corun_s += span
            b.corun_s += span

    def next_end_s(self) -> float:
        """When the next step ends; infinity if nothing runs."""
        end = float("inf")
        for flight in self.flights.values():
            assert flight.end_s is not None
            if flight.end_s < end:
                end = flight.end_s
        return end
