"""Requests in an order that is kept: sections, cut into blocks that know their work and the extremes of their columns."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bullet.estimators.base import Estimator
from bullet.state import Request

BLOCK = 256
DEADLINE, ARRIVAL, SLO, TOKENS = range(4)
"""Rows of a block's columns."""

Floats = NDArray[np.float64]
Key = Any
"""Of a section: the place in the queue, or (seconds, place)."""


class Written(Protocol):
    """Q written out in order of service: queue.py's own way to answer."""

    def margin(self, index: int, now_s: float) -> float:
        """As :meth:`LongRanked.margin`."""

    def reaches(self, ratio: float, index: int, now_s: float, ahead_s: float, others: Sequence[float] = ()) -> bool:
        """As :meth:`LongRanked.reaches`."""


class Owner(Protocol):
    """What is asked of queue.py's ``ServiceOrder``."""

    estimator: Estimator
    options: Mapping[str, Any]
    full: int
    table: Floats

    @property
    def lengths(self) -> int:
        """Rows of ``table`` that are filled in."""

    def row_for(self, length: int) -> int:
        """Row of ``table``."""

    def alone_at(self, length: int, index: int) -> float:
        """Uncorrected seconds of a prompt alone."""

    def written_out(self, version: int, requests: list[Request], started: int) -> Written:
        """Requests in order of service, of which the first ``started`` have their first token."""


class Block:
    """Neighbours in a section: columns deadline, arrival, SLO and tokens (shape (4, n)), and rows of the table of seconds."""

    __slots__ = ("columns", "keys", "requests", "rows")

    def __init__(self, keys: list[Key], requests: list[Request], columns: Floats, rows: NDArray[np.intp]) -> None:
        self.keys, self.requests, self.columns, self.rows = keys, requests, columns, rows

    def extremes(self) -> tuple[Floats, Floats]:
        """Least and most of each column."""
        return self.columns.min(axis=1), self.columns.max(axis=1)

    def without(self, ids: set[int]) -> Block:
        """Those that are not among ``ids``."""
        kept = [i for i, request in enumerate(self.requests) if request.id not in ids]
        return Block([self.keys[i] for i in kept], [self.requests[i] for i in kept], self.columns[:, kept], self.rows[kept])


class Section:
    """Requests in the order of their keys, in blocks; arrays over blocks for bounds."""

    def __init__(self, own: Owner) -> None:
        self.own = own
        self.fill([])

    def make(self, keys: list[Key], requests: list[Request]) -> Block:
        """A block of these."""
        columns = np.array([(r.arrival_s + r.ttft_slo_s, r.arrival_s, r.ttft_slo_s, r.known_tokens) for r in requests]).T
        rows = np.array([self.own.row_for(r.known_tokens) for r in requests], dtype=np.intp)
        return Block(keys, requests, columns.reshape(4, len(requests)), rows)

    def fill(self, entries: list[tuple[Key, Request]]) -> None:
        """Hold these instead, which are sorted."""
        parts = [entries[i : i + BLOCK] for i in range(0, len(entries), BLOCK)]
        self._hold([self.make([key for key, _ in part], [request for _, request in part]) for part in parts])

    def _hold(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        self.lasts = [block.keys[-1] for block in blocks]
        self.extremes = np.empty((2, 4, len(blocks)))
        self.counts = np.empty(len(blocks))
        self._loose = np.zeros(len(blocks), dtype=bool)  # of what has left since: extremes that hold, and may be narrower
        self._sums = np.full((self.own.table.shape[1], len(blocks)), math.nan)
        for b in range(len(blocks)):
            self._changed(b)

    def turn(self, index: int) -> None:
        """Sort by seconds on another split."""
        if not self.blocks:
            return
        requests = [request for block in self.blocks for request in block.requests]
        columns = np.concatenate([block.columns for block in self.blocks], axis=1)
        rows = np.concatenate([block.rows for block in self.blocks])
        seconds = self.own.table[rows, index]
        order = np.lexsort((np.array([request.place for request in requests]), seconds))
        columns, rows, seconds = columns[:, order], rows[order], seconds[order]
        requests = [requests[i] for i in order.tolist()]
        keys = [(s, r.place) for s, r in zip(seconds.tolist(), requests, strict=True)]
        self._hold([Block(keys[i : i + BLOCK], requests[i : i + BLOCK], columns[:, i : i + BLOCK], rows[i : i + BLOCK])
                    for i in range(0, len(keys), BLOCK)])

    def _changed(self, b: int, loose: bool = False) -> None:
        block = self.blocks[b]
        if not loose:
            self.extremes[:, :, b] = block.extremes()
        self._loose[b] = loose
        self.counts[b] = len(block.keys)
        self._sums[:, b] = math.nan

    def longest_tokens(self) -> int:
        """Of the longest prompt; 0 if there is none."""
        if not self.blocks:
            return 0
        for b in np.flatnonzero(self._loose):
            self.extremes[:, :, b] = self.blocks[b].extremes()
        self._loose[:] = False
        return int(self.extremes[1, TOKENS].max())

    def sums(self, index: int) -> Floats:
        """Uncorrected seconds of each block under one split; -1: the least of them, request by request."""
        sums: Floats = self._sums[index]
        for b in np.flatnonzero(np.isnan(sums)):
            sums[b] = self.own.table[self.blocks[b].rows, index].sum()
        return sums

    def find(self, key: Key) -> int:
        """The block that holds, or would take, a key."""
        b = bisect_left(self.lasts, key)
        return b if b < len(self.lasts) else b - 1

    def add(self, key: Key, request: Request) -> None:
        """Enter one request."""
        if not self.blocks:
            self.fill([(key, request)])
            return
        b = self.find(key)
        block, new = self.blocks[b], self.make([key], [request])
        at = bisect_left(block.keys, key)
        block.keys.insert(at, key)
        block.requests.insert(at, request)
        block.columns = np.concatenate((block.columns[:, :at], new.columns, block.columns[:, at:]), axis=1)
        block.rows = np.concatenate((block.rows[:at], new.rows, block.rows[at:]))
        if len(block.keys) > 2 * BLOCK:
            right = Block(block.keys[BLOCK:], block.requests[BLOCK:], block.columns[:, BLOCK:].copy(), block.rows[BLOCK:].copy())
            left = Block(block.keys[:BLOCK], block.requests[:BLOCK], block.columns[:, :BLOCK].copy(), block.rows[:BLOCK].copy())
            self.blocks[b : b + 1] = left, right
            self.lasts[b : b + 1] = left.keys[-1], right.keys[-1]
            self.extremes = np.insert(self.extremes, b, 0.0, axis=2)
            self.counts, self._sums = np.insert(self.counts, b, 0.0), np.insert(self._sums, b, math.nan, axis=1)
            self._loose = np.insert(self._loose, b, False)
            self._changed(b + 1)
        else:
            self.lasts[b] = block.keys[-1]
        self._changed(b)

    def remove(self, key: Key) -> None:
        """Take one request out."""
        b = self.find(key)
        block = self.blocks[b]
        at = bisect_left(block.keys, key)
        assert block.keys[at] == key, f"{key} is not where it should be"
        del block.keys[at], block.requests[at]
        if not block.keys:
            del self.blocks[b], self.lasts[b]
            self.extremes, self.counts = np.delete(self.extremes, b, axis=2), np.delete(self.counts, b)
            self._sums, self._loose = np.delete(self._sums, b, axis=1), np.delete(self._loose, b)
            return
        if at == 0:
            block.columns, block.rows = block.columns[:, 1:], block.rows[1:]
        else:
            block.columns = np.concatenate((block.columns[:, :at], block.columns[:, at + 1 :]), axis=1)
            block.rows = np.concatenate((block.rows[:at], block.rows[at + 1 :]))
        self.lasts[b] = block.keys[-1]
        self._changed(b, loose=True)


def statistic(counts: Floats, low: Floats, high: Floats, k: int, within: Any, against: float | None) -> float:
    """The k-th smallest (from 0) of all values. Block b has ``counts[b]``, between ``low[b]`` and ``high[b]``; ``within(b)`` are
    these. With ``against``: plus or minus infinity if the bounds alone tell on which side of it the value is.
    """
    if against is None:  # mostly values fall from block to block: then it lies in this one
        behind = counts[::-1].cumsum()
        j = int(behind.searchsorted(k, side="right"))
        b, own = len(counts) - 1 - j, k - (int(behind[j - 1]) if j else 0)
        value = float(np.partition(within(b), own)[own])
        if (not b or low[:b].min() > value) and (not j or high[b + 1 :].max() < value):
            return value
    held = np.flatnonzero(counts)
    if len(held) < len(counts):
        part = within
        counts, low, high, within = counts[held], low[held], high[held], lambda b: part(int(held[b]))
    if against is not None:
        if float(counts[~(low > against)].sum()) <= k:
            return math.inf
        if float(counts[high < against].sum()) > k:
            return -math.inf
    least, most = kth_bound(counts, low, k), kth_bound(counts, high, k)
    below = high < least
    k -= int(counts[below].sum())
    values = np.concatenate([within(int(b)) for b in np.flatnonzero(~below & (low <= most))])
    return float(np.partition(values, k)[k])


def kth_bound(counts: Floats, values: Floats, k: int) -> float:
    """The k-th smallest (from 0) of ``counts[b]`` times ``values[b]`` each."""
    if (values[1:] <= values[:-1]).all():  # as slacks in order of service mostly are: no need to sort
        return float(values[-1 - int(counts[::-1].cumsum().searchsorted(k, side="right"))])
    order = values.argsort()
    return float(values[order[counts[order].cumsum().searchsorted(k, side="right")]])
