"""Cells of a trace as numbers: token counts, times and what a status says; wrong ones refused by file, line and column."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bullet.errors import TraceError

Cells = Sequence[Any] | NDArray[Any]
"""A column of some rows: text of a CSV, values of JSON, or numbers of a Parquet file."""

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
MOST_TOKENS = 10**9
"""Above every context length there is: what is larger is a wrong column or a broken file."""
YEAR_S = 366 * 86400.0
LATEST_S = 1e11
"""Seconds since 1970 until the year 5138: a later time is in another unit (today in milliseconds is 1.7e12)."""
EXACT = 2**53
"""Whole numbers up to here are doubles."""
SHOWN_CHARACTERS = 60

_DATE = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?"
                   r"(Z|[+-][0-9]{2}:?[0-9]{2})?")
_PLAIN_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?")


def number(value: object) -> int | float | None:
    """An integer where it is written as one, else a float; ``None`` if it is no number."""
    if isinstance(value, str):
        if "_" in value or not value.isascii():  # Python takes 1_000 and other scripts' digits; trace formats do not
            return None
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value


def shown(value: object) -> str:
    """A value for a message of one line."""
    if value is None:
        return "missing"
    if isinstance(value, str) and not value.strip():
        return "empty"
    try:
        text = repr(value.item() if isinstance(value, np.generic) else value)
    except ValueError:  # an integer too long for Python to print
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def listed(names: Sequence[str]) -> str:
    text = ", ".join(repr(name)[1:-1] for name in names)
    return text if len(text) <= 4 * SHOWN_CHARACTERS else text[: 4 * SHOWN_CHARACTERS - 3] + "..."


def whole_numbers(cells: Cells) -> NDArray[np.int64] | None:
    """The column if every cell is plainly a whole number that 64 bits hold; else ``None``, and each is looked at."""
    if isinstance(cells, np.ndarray):
        return cells.astype(np.int64) if cells.dtype.kind in "iu" and (cells.dtype != np.uint64) else None
    kinds = set(map(type, cells))
    if kinds == {str}:
        text = "".join(cells)
        if "_" in text or not text.isascii():
            return None
    elif kinds != {int}:
        return None
    try:
        return np.array(list(map(int, cells)), dtype=np.int64)
    except (ValueError, OverflowError):
        return None


def tokens(where: Where, column: str, cells: Cells) -> NDArray[np.int64]:
    """Token counts, 0 where there is none (zero, empty or missing: a failed request, or a mistake that the caller names)."""
    counts = whole_numbers(cells)
    if counts is not None and len(counts) and counts.min() >= 0 and counts.max() <= MOST_TOKENS:
        return counts
    found = np.empty(len(cells), dtype=np.int64)
    for i, value in enumerate(cells):
        count = 0 if absent(value) else number(value)
        if isinstance(count, float) and count.is_integer():
            count = int(count)  # 12.0, as tools write whole numbers in a column that had gaps
        if not isinstance(count, int) or not 0 <= count <= MOST_TOKENS:
            raise TraceError(f"{where(i)}: {not_tokens(column, value)}")
        found[i] = count
    return found


def absent(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def not_tokens(column: str, value: object) -> str:
    return f"{column} = {shown(value)}: must be a whole number of tokens, 1 to 10^9"


class Where:
    """Names a cell's place: the file and the line on which its row starts (the row's number where there are no lines)."""

    def __init__(self, path: Path, lines: Sequence[int]) -> None:
        self.path, self.lines = path, lines

    def __call__(self, i: int) -> str:
        return f"{self.path}:{self.lines[i]}"


class _Time(NamedTuple):
    """A time on the trace's own axis: ``value / per_second`` seconds, from 1970 for a date.

    Integers stay integers until the first row's time is taken off: a double holds today's epoch to 0.2 us only, and
    Azure's times have seven digits.
    """

    kind: str
    value: int | float
    per_second: int


def _time(where: str, column: str, value: object, per_second: int, latest: float) -> _Time:
    found = number(value)
    if found is not None:
        # Compared unscaled: an integer of a thousand digits cannot be made a double.
        if 0 <= found <= latest:
            return _Time("number", found, per_second)
        if found > 0 and found != math.inf:
            raise TraceError(f"{where}: {column} = {shown(value)}: after the year 5000: is workload.arrival_unit right?")
    match = _DATE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        day, clock, fraction, offset = match.groups()
        try:
            whole = datetime.fromisoformat(f"{day}T{clock}{offset or '+00:00'}")
        except ValueError as exc:
            raise TraceError(f"{where}: {column} = {shown(value)}: not a date ({exc})") from None
        nanoseconds = int(whole.timestamp()) * 10**9 + int((fraction or "").ljust(9, "0"))
        return _Time("date with offset" if offset else "date", nanoseconds, 10**9)
    raise TraceError(f"{where}: {column} = {shown(value)}: must be a number, 0 or more (workload.arrival_unit), or a date "
                     'YYYY-MM-DD HH:MM:SS.fffffff; workload.arrival_column = "" leaves the column out')


class Clock:
    """One column of times, batch by batch, in seconds since its first row.

    ``unit``: of numbers; ``None`` where nothing states it, and the values stay as they are written (no check but their order
    applies to them). ``ordered``: times must not decrease.
    """

    def __init__(self, column: str, unit: str | None, ordered: bool = True) -> None:
        self.column, self.unit, self.ordered = column, unit, ordered
        self.per_second = PER_SECOND[unit or "s"]
        self.latest = LATEST_S * PER_SECOND[unit or "ns"]
        self.kind: str | None = None
        self.first: int | float = 0
        self.before_s = 0.0
        self.parts: list[NDArray[np.float64]] = []
        self.shown = ("", "")

    @property
    def stated(self) -> bool:
        """Whether a second is known: by the unit, or because the times are dates."""
        return self.unit is not None or (self.kind or "").startswith("date")

    def add(self, where: Where, cells: Cells) -> None:
        if not len(cells):
            return
        kind, at_s = self._fast(cells) or self._each(where, cells)
        self.kind = self.kind or kind
        steps = np.diff(at_s, prepend=self.before_s)
        if self.stated:
            late = (abs(steps) > YEAR_S) | (at_s > YEAR_S)
            if late.any():
                raise TraceError(f"{self._at(where, cells, int(late.argmax()))} lies more than a year from the rows above: epoch "
                                 "and relative times are mixed, or workload.arrival_unit is wrong")
        if self.ordered and (steps < 0).any():
            raise TraceError(f"{self._at(where, cells, int((steps < 0).argmax()))} is before the row above: times must not "
                             "decrease (sort the trace by time)")
        self.before_s = float(at_s[-1])
        self.shown = (self.shown[0] or shown(cells[0]), shown(cells[-1]))
        self.parts.append(at_s)

    def _at(self, where: Where, cells: Cells, i: int) -> str:
        return f"{where(i)}: {self.column} = {shown(cells[i])}"

    def _fast(self, cells: Cells) -> tuple[str, NDArray[np.float64]] | None:
        """A column of whole numbers, or of dates of UTC, all sound."""
        values: NDArray[np.int64] | None = None
        kind, per_second = "number", self.per_second
        if not isinstance(cells, np.ndarray) and isinstance(cells[0], str) and cells[0][4:5] == "-":
            if set(map(type, cells)) != {str}:
                return None
            offset = next((text for text in ("Z", "+00:00", "+0000") if cells[0].endswith(text)), "")
            if offset:
                if not all(cell.endswith(offset) for cell in cells):
                    return None
                cells = [cell.removesuffix(offset) for cell in cells]
            if not all(map(_PLAIN_DATE.fullmatch, cells)) or min(cells) < "1678" or max(cells) > "2262":  # 64 bits of nanoseconds
                return None
            try:
                values = np.array(cells, dtype="datetime64[ns]").astype(np.int64)
            except ValueError:
                return None
            kind, per_second = "date with offset" if offset else "date", 10**9
        else:
            values = whole_numbers(cells)
            if values is None or values.min() < 0 or values.max() > self.latest:
                return None
        if self.kind is None:
            self.first = int(values[0])
        elif self.kind != kind or not isinstance(self.first, int):
            return None
        if max(abs(int(values.max()) - self.first), abs(int(values.min()) - self.first)) >= EXACT:
            return None
        at_s: NDArray[np.float64] = (values - self.first) / per_second
        return kind, at_s

    def _each(self, where: Where, cells: Cells) -> tuple[str, NDArray[np.float64]]:
        at_s = np.empty(len(cells))
        kind = self.kind
        for i, value in enumerate(cells):
            time = _time(where(i), self.column, value, self.per_second, self.latest)
            if kind is None:
                kind, self.first = time.kind, time.value
            if time.kind != kind:
                raise TraceError(f"{self._at(where, cells, i)} is a {time.kind}, the first row's a {kind}: times must be of one "
                                 "kind")
            at_s[i] = (time.value - self.first) / time.per_second
        assert kind is not None
        return kind, at_s

    def seconds(self) -> NDArray[np.float64]:
        """All rows; in the column's own numbers where no unit is stated."""
        return np.concatenate(self.parts) if self.parts else np.empty(0)
