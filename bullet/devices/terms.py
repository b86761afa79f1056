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
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tiles = tuple[tuple[float, int], ...]
"""(c, q) of each tile that may be chosen: seconds of one block on one SM with all SMs busy, blocks."""

Term = tuple[Tiles, float]
"""(tiles, m): seconds of the bytes at full bandwidth."""

Curve = tuple[list[float], list[float], list[float]]
"""Seconds of a row against ``x``, the price of a byte (1 / share of bandwidth): convex, piecewise linear. Corners, and
before each of them and after the last: seconds at 0, and seconds per unit of ``x``."""


def compute_seconds(tiles: Tiles, sms: int, beside: int, rates: Sequence[float]) -> float:
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


def _compute_seconds_all(tiles: Tiles, sms: NDArray[np.int64], beside: Any, rates: NDArray[np.float64]) -> Any:
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
        return sum(min(block_s * blocks for block_s, blocks in tiles) for tiles, _ in self.gemms)

    def seconds(self, sms: int, rates: Sequence[float], inverse: float) -> float:
        """Seconds alone; ``inverse``: 1 / share of bandwidth, contention included."""
        seconds = self.fixed_s + self.row_s * inverse
        for tiles, moved_s in self.gemms:
            compute_s = compute_seconds(tiles, sms, 0, rates)
            memory_s = moved_s * inverse
            seconds += compute_s if compute_s > memory_s else memory_s
        return seconds

    def curve(self, sms: int, beside: int, share: float, rates: Sequence[float]) -> Curve:
        """Seconds beside another step for any ``inverse``: each GEMM is bound by compute up to its corner and by memory
        beyond it. ``share``: of its SMs' time that it has."""
        terms = []
        constant = self.fixed_s
        for tiles, moved_s in self.gemms:
            compute_s = compute_seconds(tiles, sms, beside, rates) / share
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

    def __init__(self, layers: int, dense: Row, head: Row | None, attention: tuple[Term, ...],
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

    def terms(items: Sequence[Term], start: Any) -> Any:
        seconds = start
        for tiles, moved_s in items:
            seconds = seconds + np.maximum(_compute_seconds_all(tiles, sms, beside, rates), moved_s * inverse)
        return seconds

    seconds = terms(work.dense.gemms, work.dense.fixed_s + work.dense.row_s * inverse) + work.attention_fixed_s
    seconds = terms(work.attention, seconds) * work.layers
    if work.head is not None:
        seconds = seconds + terms(work.head.gemms, work.head.fixed_s + work.head.row_s * inverse)
    result: NDArray[np.float64] = seconds + work.fixed_s
    return result
