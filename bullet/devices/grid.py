"""Scattered measurements as one grid: linear inside the hull of the points, nothing outside.

A publisher's points need not fill a grid: two sweeps of other steps give a union of both. :func:`filled` lays such points on the
grid of all their counts and fills a hole where measured neighbours stand on both sides of it along an axis, the last axis first:
what was measured keeps its value to the bit, and a full grid is left as it is. :func:`interpolated` reads between nodes, each
axis linear; where a corner of the cell lies outside the hull, on the simplex of the others that holds the point, if there is one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Grid = NDArray[np.float64]
"""Values at the nodes of some axes; NaN where nothing was measured."""


def laid_out(points: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[tuple[Grid, ...], Grid]:
    """Each axis' counts, ascending, and the values on their grid."""
    at = np.array(points, dtype=float)
    axes = tuple(np.unique(column) for column in at.T)
    grid = np.full([len(axis) for axis in axes], np.nan)
    grid[tuple(np.searchsorted(axis, column) for axis, column in zip(axes, at.T, strict=True))] = values
    return axes, grid


def filled(grid: Grid, axes: Sequence[Grid]) -> Grid:
    """The grid with its holes filled along one axis after the other, the last first; never beyond the outermost points."""
    out = grid.copy()
    for dimension in reversed(range(out.ndim)):
        nodes, lines = axes[dimension], np.moveaxis(out, dimension, -1)
        for place in np.ndindex(lines.shape[:-1]):
            known = ~np.isnan(lines[place])
            if 2 <= known.sum() < len(known):
                between = np.interp(nodes, nodes[known], lines[place][known], left=np.nan, right=np.nan)
                lines[place] = np.where(known, lines[place], between)
    return out


def interpolated(grid: Grid, axes: Sequence[Grid], point: Sequence[float]) -> float:
    """The value at a point, linear on every axis; NaN outside the hull. ``axes``: ascending."""
    low: list[int] = []
    shares: list[float] = []
    for axis, x in zip(axes, point, strict=True):
        at = int(np.searchsorted(axis, x, side="right")) - 1
        if at < 0 or x > axis[-1]:
            return math.nan
        low.append(at)
        shares.append(0.0 if axis[at] == x else (x - axis[at]) / (axis[at + 1] - axis[at]))
    return cell(lambda sides: float(grid[tuple(i + side for i, side in zip(low, sides, strict=True))]), shares)


def cell(corner: Callable[[tuple[int, ...]], float], shares: Sequence[float]) -> float:
    """The value inside one cell, ``shares`` of the way along each axis; ``corner``: of each axis' side, 0 or 1.

    Where a corner is NaN: linear on a simplex of the cell's diagonals whose corners are all known, NaN if none holds the point.
    """
    free = [i for i, share in enumerate(shares) if share > 0]
    base = [0] * len(shares)
    total = 0.0
    for sides in itertools.product((0, 1), repeat=len(free)):
        weight, at = 1.0, base.copy()
        for i, side in zip(free, sides, strict=True):
            weight *= shares[i] if side else 1 - shares[i]
            at[i] = side
        total += weight * corner(tuple(at))
    if not math.isnan(total):
        return total
    for start in itertools.product((0, 1), repeat=len(free)):
        # The path from this corner to the opposite one that crosses the longest way first: its corners are the simplex.
        at = base.copy()
        for i, side in zip(free, start, strict=True):
            at[i] = side
        ways = sorted(((1 - shares[i] if side else shares[i], i) for i, side in zip(free, start, strict=True)), reverse=True)
        left, value = 1.0, 0.0
        for way, i in ways:
            if left > way:
                value += (left - way) * corner(tuple(at))
            at[i] = 1 - at[i]
            left = way
        value += left * corner(tuple(at))
        if not math.isnan(value):
            return value
    return math.nan
