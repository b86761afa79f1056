"""Means over seeds with their intervals, and paired differences. Student's t; no scipy, which the core does without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bullet.results.student import CONFIDENCE, student_t


class Estimate(NamedTuple):
    """A mean and half the width of its interval; the latter is ``None`` where one value alone says nothing of the spread."""

    mean: float
    half_width: float | None
    seeds: int

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width

    def text(self, form: str = ".3f") -> str:
        """``mean ± half width``."""
        return f"{self.mean:{form}}" + ("" if self.half_width is None else f" ± {self.half_width:{form.lstrip('+')}}")


def interval(values: Sequence[float] | NDArray[np.float64], confidence: float = CONFIDENCE) -> Estimate:
    """The mean of independent values, as of several seeds, with its interval."""
    data = np.asarray(values, dtype=float)
    assert len(data), "no values"
    mean, count = float(data.mean()), len(data)
    if count == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, student_t(count - 1, confidence) * float(data.std(ddof=1)) / math.sqrt(count), count)


def paired(ours: Sequence[float], theirs: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Mean of ``ours - theirs``, seed by seed: both saw the same requests, so what the seed does to both drops out."""
    assert len(ours) == len(theirs), f"{len(ours)} and {len(theirs)} values are no pairs"
    return interval(np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float), confidence)
