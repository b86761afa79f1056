"""Least squares with honest intervals: few parameters, rows that hang together in groups, no scipy.

Rows of one group (the two lanes of a cell, a combination's visits) share clocks, temperature and what the model lacks of that
shape: they are not independent, and an interval that takes them so is too narrow. The covariance is that of the delete-a-group
jackknife, linearised (CR3 of MacKinnon and White, 1985, over groups: Bell and McCaffrey, 2002); the quantile is Student's with
as many degrees of freedom as groups tell of a parameter, which may be far fewer than there are (Carter, Schnepel, Steigerwald,
2017).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from bullet.profiles.forms import Array
from bullet.results.student import student_t

CONFIDENCE = 0.99
"""Of every interval: a fit states some ten coefficients at once, of which 95 % each would miss one on every other card."""

HUBER = 2.5
"""Standard deviations (by the median of residuals) from which on a row counts less: one unlucky window does not bend the rest."""
STEP = 1e-5


@dataclass(frozen=True)
class Solution:
    """Parameters with the half widths of their intervals (:data:`CONFIDENCE`), and their covariance."""

    values: Array
    half: Array
    covariance: Array


Residual = Callable[[Array], Array]


def solve(residual: Residual, start: Sequence[float] | Array, low: Sequence[float] | Array, high: Sequence[float] | Array,
          rounds: int = 30) -> Array:
    """Parameters within ``low`` to ``high`` with the least sum of Huber's losses: Gauss and Newton's steps, damped."""
    at, least, most = (np.asarray(x, dtype=float) for x in (start, low, high))
    at = np.clip(at, least, most)
    scale = most - least
    off = residual(at)
    damping = 1e-4
    for _ in range(rounds):
        root = np.sqrt(weights(off))
        slope = _slopes(residual, at, scale, least, most) * root[:, None]
        square, pull = slope.T @ slope, slope.T @ (off * root)
        # What stands at a bound and would go beyond it stays.
        free = ~(((at <= least) & (pull > 0)) | ((at >= most) & (pull < 0)))
        if not free.any():
            break
        before, moved = _cost(off), np.zeros(len(at))
        for _ in range(12):
            lifted = square[np.ix_(free, free)] + damping * np.diag(np.maximum(np.diag(square)[free], 1e-12))
            moved[free] = -np.linalg.solve(lifted, pull[free])
            trial = np.clip(at + moved * scale, least, most)
            found = residual(trial)
            if _cost(found) <= before:
                break
            damping *= 10
        else:
            break
        damping = max(damping / 10, 1e-9)
        done = float(np.max(np.abs(trial - at) / scale)) < 1e-6
        at, off = trial, found
        if done:
            break
    return at


def weights(off: Array) -> Array:
    """Huber's, by row."""
    middle = float(np.median(np.abs(off))) / 0.6745
    if middle <= 1e-12:
        return np.ones(len(off))
    kept: Array = np.minimum(1.0, HUBER * middle / np.maximum(np.abs(off), 1e-300))
    return kept


def _cost(off: Array) -> float:
    limit = HUBER * float(np.median(np.abs(off))) / 0.6745
    size = np.abs(off)
    if limit <= 1e-12:
        return float(np.sum(size**2))
    return float(np.sum(np.where(size <= limit, size**2, 2 * limit * size - limit**2)))


def _slopes(residual: Residual, at: Array, scale: Array, low: Array, high: Array) -> Array:
    """Derivatives by the scaled parameters; shape (rows, parameters)."""
    columns = []
    for i in range(len(at)):
        more, less = at.copy(), at.copy()
        more[i], less[i] = min(at[i] + STEP * scale[i], high[i]), max(at[i] - STEP * scale[i], low[i])
        columns.append((residual(more) - residual(less)) / ((more[i] - less[i]) / scale[i]))
    return np.stack(columns, axis=1)


def intervals(residual: Residual, at: Array, low: Sequence[float] | Array, high: Sequence[float] | Array,
              groups: Sequence[Hashable]) -> Solution:
    """How sure the parameters of :func:`solve` are. A parameter that no row moves has an infinite half width."""
    least, most = (np.asarray(x, dtype=float) for x in (low, high))
    scale = most - least
    off = residual(at)
    root = np.sqrt(weights(off))
    slope = _slopes(residual, at, scale, least, most) * root[:, None]
    off = off * root
    told = np.sqrt(np.sum(slope**2, axis=0)) > 1e-9
    half, covariance = np.full(len(at), np.inf), np.full((len(at), len(at)), np.nan)
    if told.any():
        own = slope[:, told]
        total = own.T @ own
        bread = np.linalg.pinv(total)
        names = list(dict.fromkeys(groups))
        index = {name: i for i, name in enumerate(names)}
        of = np.array([index[name] for name in groups])
        meat, shares = np.zeros_like(bread), []
        for g in range(len(names)):
            rows = own[of == g]
            square = rows.T @ rows
            # X'(I - X B X')^-1 r by Woodbury: as small as there are parameters, however many rows.
            pull = rows.T @ off[of == g]
            pull = pull + square @ (np.linalg.pinv(total - square, rcond=1e-10) @ pull)
            meat += np.outer(pull, pull)
            shares.append(np.einsum("ij,jk,ki->i", bread, square, bread))
        count = len(names)
        found = (count - 1) / count * bread @ meat @ bread
        parts = np.array(shares)
        # As many groups as carry a parameter's information, if all carried the same.
        carrying = np.sum(parts, axis=0) ** 2 / np.maximum(np.sum(parts**2, axis=0), 1e-300)
        freedom = np.maximum(1, np.round(carrying) - 1).astype(int)
        sizes = scale[told]
        half[told] = np.array([student_t(int(f), CONFIDENCE) for f in freedom]) * np.sqrt(np.maximum(np.diag(found), 0.0)) * sizes
        covariance[np.ix_(told, told)] = found * np.outer(sizes, sizes)
    return Solution(at, half, covariance)
