"""Parts of a workload: the window of a trace that is used, and the start of a run that its statistics leave out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bullet.errors import ConfigError, TraceError
from bullet.units import parse_time_s

WINDOW_TEXT = ("FROM:TO, rows from 1, both ends in (151:300), or times since the first row, TO left out (10min:20min, 90s:); "
               "units ns, us, ms, s, min, h; an end left empty is the trace's")
WARMUP_TEXT = "a number of requests (100) or a time since the first arrival (30s, 5min)"


class Window(NamedTuple):
    """``first`` to ``last``: rows from 1, both in, or seconds since the first row, the last left out; ``None``: no bound."""

    text: str
    timed: bool
    first: float | None
    last: float | None

    @classmethod
    def parse(cls, text: str) -> Window:
        """:class:`ConfigError` says how it is written."""
        ends = [part.strip() for part in text.split(":")]
        rows = [int(e) if e.isascii() and e.isdecimal() and len(e) < 16 else None for e in ends]
        times = [parse_time_s(e) for e in ends]
        given = [e for e in ends if e]
        if len(ends) == 2 and given:
            for timed, values in ((False, rows), (True, times)):
                if all((v is not None) == bool(e) for v, e in zip(values, ends, strict=True)):
                    first, last = values
                    least = (first is None or timed or first >= 1) and (
                        first is None or last is None or (first < last if timed else first <= last))
                    if least and (last is None or last > 0):
                        return cls(text, timed, first, last)
        raise ConfigError(f"workload.window (--window) = {text!r}: must be {WINDOW_TEXT}")

    def of(self, rows: int, arrival_s: NDArray[np.float64] | None, name: str) -> tuple[NDArray[np.bool_], str]:
        """Which rows are in it, and the window in words; :class:`TraceError` if none is, or if there are no times to go by."""
        if self.timed:
            if arrival_s is None:
                raise TraceError(f"{name}: has no times of a known unit for workload.window (--window) = {self.text!r}: give "
                                 "rows (151:300)")
            at = arrival_s - arrival_s.min()
            keep = (at >= (self.first or 0.0)) & (at < (np.inf if self.last is None else self.last))
            words, held = f"{self.text}", f"{float(at.max()):.6g} s long"
        else:
            row = np.arange(1, rows + 1)
            keep = (row >= (self.first or 1)) & (row <= (rows if self.last is None else self.last))
            words, held = f"rows {self.text}", f"{rows:,} rows long"
        if not keep.any():
            raise TraceError(f"{name}: no request in workload.window (--window) = {self.text!r}: the trace is {held}")
        return keep, words


def warmup_of(warmup: str) -> tuple[int | None, float]:
    """How many requests it is, or (``None``) how many seconds since the first arrival; :class:`ConfigError` if neither."""
    text = warmup.strip()
    if text.isascii() and text.isdecimal() and len(text) < 16:
        return int(text), 0.0
    seconds = parse_time_s(text)
    if seconds is None:
        raise ConfigError(f"workload.warmup (--warmup) = {warmup!r}: must be {WARMUP_TEXT}")
    return None, seconds


def counted_from(warmup: str | None, ids: NDArray[np.int64], arrival_s: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which requests count in the statistics: those after the warm-up."""
    if warmup is None:
        return np.ones(len(ids), dtype=bool)
    count, seconds = warmup_of(warmup)
    if count is not None:
        return ids >= count
    start = float(arrival_s.min()) if len(arrival_s) else 0.0
    return arrival_s >= start + seconds
