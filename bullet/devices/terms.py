"""A step in the terms of the fitted device: each kernel's blocks and bytes, independent of SMs, and their seconds on some.

    kernel seconds = max(ceil(q / sms) * c / rate,  m * inverse)

``rate``: an SM's speed over that with all SMs busy. ``inverse``: 1 / the share of the device's bandwidth that the step draws,
contention included. A GEMM has a (c, q) for each tile and takes the one that computes fastest on the SMs at hand.

``rate`` counts busy SMs. Where more SMs take as many waves they keep no more of them busy, so that the speed is the same: that on
the most SMs with as many waves. Hence no kernel takes longer on more SMs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Blocks = tuple[float, int]
"""(c, q): seconds of one block on one SM with all SMs busy, blocks."""

Attention = tuple[float, int, float]
"""(c, q, m): of the only tile; seconds of the bytes at full bandwidth."""

Curve = tuple[list[float], list[float], list[float]]
"""Seconds of a row against ``x``, the price of a byte (1 / share of bandwidth): convex, piecewise linear. Corners, and
before each of them and after the last: seconds at 0, and seconds per unit of ``x``."""


def compute_seconds(tiles: Sequence[Blocks], sms: int, beside: int, rates: Sequence[float]) -> float:
    """Of the quickest tile. ``beside``: busy SMs of the chip besides; ``rates``: by all busy SMs, 1 when that is the device."""
    whole = sms + beside >= len(rates) - 1
    best = math.inf
    for block_s, blocks in tiles:
        waves = -(-blocks // sms)
        seconds = waves * block_s
        if not whole and waves > 1:
            most = -(-blocks // (waves - 1)) - 1 + beside
            if most < len(rates) - 1:
                seconds /= rates[most]
        if seconds < best:
            best = seconds
    return best


class Tiles:
    """A GEMM's blocks in each tile that is fastest on some SMs. Rows that fill the same tiles share it, and its answers."""

    __slots__ = ("_found", "_rates", "choices", "whole_s")

    def __init__(self, choices: tuple[Blocks, ...], rates: Sequence[float]) -> None:
        self.choices = choices
        self._rates = rates
        self._found: dict[int, float] = {}
        self.whole_s = compute_seconds(choices, len(rates) - 1, 0, rates)

    def seconds(self, sms: int, beside: int) -> float:
        """Of the quickest of them, see :func:`compute_seconds`."""
        n = len(self._rates)
        key = sms * n + (beside if sms + beside < n - 1 else n - 1)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = compute_seconds(self.choices, sms, beside, self._rates)
        return found


Term = tuple[Tiles, float]
"""(tiles, m): seconds of the bytes at full bandwidth."""


def _compute_seconds_all(tiles: Sequence[Blocks], sms: NDArray[np.int64], beside: Any, rates: NDArray[np.float64]) -> Any:
    """The same over arrays of SMs."""
    best: Any = math.inf
    for block_s, blocks in tiles:
        waves = -(-blocks // sms)
        most = np.where(waves > 1, -(-blocks // np.maximum(waves - 1, 1)) - 1 + beside, len(rates) - 1)
        best = np.minimum(best, waves * block_s / rates[np.minimum(np.maximum(most, sms + beside), len(rates) - 1)])
    return best


class Row:
    """Kernels that depend on one count alone (tokens, or sequences): built once per count, exact."""

    __slots__ = ("bytes", "curves", "fixed_s", "gemms", "row_s", "solo_s")

    def __init__(self, gemms: tuple[Term, ...], row_s: float, fixed_s: float, bytes_: float) -> None:
        self.gemms = gemms
        self.row_s = row_s
        self.fixed_s = fixed_s
        self.bytes = bytes_
        self.solo_s: dict[int, float] = {}
        self.curves: dict[tuple[int, int, float], Curve] = {}

    def gemm_sm_s(self) -> float:
        """SM seconds that its GEMMs' blocks fill, of the tile that fills the least."""
        return sum(min(block_s * blocks for block_s, blocks in tiles.choices) for tiles, _ in self.gemms)

    def whole_seconds(self, inverse: float) -> float:
        """Seconds alone on the whole device; ``inverse``: 1 / share of bandwidth."""
        seconds = self.fixed_s + self.row_s * inverse
        for tiles, moved_s in self.gemms:
            compute_s = tiles.whole_s
            memory_s = moved_s * inverse
            seconds += compute_s if compute_s > memory_s else memory_s
        return seconds

    def seconds(self, sms: int, inverse: float) -> float:
        """The same on some SMs, contention included."""
        seconds = self.fixed_s + self.row_s * inverse
        for tiles, moved_s in self.gemms:
            compute_s = tiles.seconds(sms, 0)
            memory_s = moved_s * inverse
            seconds += compute_s if compute_s > memory_s else memory_s
        return seconds

    def curve(self, sms: int, beside: int, share: float) -> Curve:
        """Seconds beside another step for any ``inverse``: each GEMM is bound by compute up to its corner and by memory
        beyond it. ``share``: of its SMs' time that it has."""
        terms = []
        constant = self.fixed_s
        for tiles, moved_s in self.gemms:
            compute_s = tiles.seconds(sms, beside) / share
            constant += compute_s
            terms.append((compute_s / moved_s if moved_s else math.inf, compute_s, moved_s))
        terms.sort()
        slope = self.row_s
        corners, constants, slopes = [], [constant], [slope]
        for corner, compute_s, moved_s in terms:
            constant -= compute_s
            slope += moved_s
            corners.append(corner)
            constants.append(constant)
            slopes.append(slope)
        return corners, constants, slopes


class FittedWork:
    """What a step does, independent of SMs. ``bytes``: in all, which is what a co-runner feels of it."""

    __slots__ = ("attention", "attention_fixed_s", "bytes", "dense", "fixed_s", "head", "layers", "solo_s", "solo_sms")

    def __init__(self, layers: int, dense: Row, head: Row | None, attention: tuple[Attention, ...],
                 attention_fixed_s: float, fixed_s: float, bytes_: float) -> None:
        self.layers = layers
        self.dense = dense
        self.head = head
        self.attention = attention
        self.attention_fixed_s = attention_fixed_s
        self.fixed_s = fixed_s
        self.bytes = bytes_
        # The last answer of solo_seconds, if answers are kept: a step is timed against several co-runners on the same SMs.
        self.solo_sms = 0
        self.solo_s = 0.0

    def gemm_sm_s(self) -> float:
        """SM seconds that the step's GEMMs fill."""
        return self.layers * self.dense.gemm_sm_s() + (self.head.gemm_sm_s() if self.head is not None else 0.0)


def step_seconds_all(work: FittedWork, sms: NDArray[np.int64], beside: Any, rates: NDArray[np.float64],
                     inverse: Any) -> NDArray[np.float64]:
    """Seconds of a step over arrays of SMs."""

    def gemms(row: Row) -> Any:
        seconds = row.fixed_s + row.row_s * inverse
        for tiles, moved_s in row.gemms:
            seconds = seconds + np.maximum(_compute_seconds_all(tiles.choices, sms, beside, rates), moved_s * inverse)
        return seconds

    seconds = gemms(work.dense) + work.attention_fixed_s
    for block_s, blocks, moved_s in work.attention:
        seconds = seconds + np.maximum(_compute_seconds_all(((block_s, blocks),), sms, beside, rates), moved_s * inverse)
    seconds = seconds * work.layers
    if work.head is not None:
        seconds = seconds + gemms(work.head)
    result: NDArray[np.float64] = seconds + work.fixed_s
    return result


class _Columns(Row):
    """Rows as one whose numbers are columns; :class:`_Choices` stand for its tiles."""

    __slots__ = ()

    def gemm_sm_s(self) -> Any:
        return sum(np.minimum.reduce([block_s * blocks for block_s, blocks in tiles.choices]) for tiles, _ in self.gemms)


class _Choices(NamedTuple):
    choices: tuple[tuple[Any, Any], ...]


def stacked(works: Sequence[FittedWork]) -> FittedWork:
    """Steps of as many layers and kernels as one whose numbers are columns, a row a step: :func:`step_seconds_all` then gives an
    array (steps, SMs). For that, and their bytes and GEMMs, alone."""

    def column(values: Sequence[Any]) -> Any:
        return np.array(values)[:, None]

    def gemm(terms: Sequence[Term]) -> Any:
        most = max(len(tiles.choices) for tiles, _ in terms)
        padded = [(*tiles.choices, *[tiles.choices[-1]] * (most - len(tiles.choices))) for tiles, _ in terms]
        return (_Choices(tuple((column([own[i][0] for own in padded]), column([own[i][1] for own in padded]))
                               for i in range(most))), column([moved_s for _, moved_s in terms]))

    def row(rows: Sequence[Row]) -> Row:
        return _Columns(tuple(map(gemm, zip(*(one.gemms for one in rows), strict=True))),
                        *(column([getattr(one, name) for one in rows]) for name in ("row_s", "fixed_s", "bytes")))

    heads = [work.head for work in works if work.head is not None]
    assert len({work.layers for work in works}) == 1, "steps of different layers"
    assert len(heads) in (0, len(works)), "some steps have a head"
    kernels = zip(*(work.attention for work in works), strict=True)
    attention: Any = tuple(tuple(map(column, zip(*each, strict=True))) for each in kernels)
    return FittedWork(works[0].layers, row([work.dense for work in works]), row(heads) if heads else None, attention,
                      column([work.attention_fixed_s for work in works]), column([work.fixed_s for work in works]),
                      column([work.bytes for work in works]))
