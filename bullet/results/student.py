"""Student's t for intervals; no scipy, which the core does without."""

from __future__ import annotations

import math
from functools import cache

CONFIDENCE = 0.95


def _inside(t: float, freedom: int) -> float:
    """P(-t < T < t) for whole degrees of freedom, a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@cache
def student_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(-t < T < t) = ``confidence``, by bisection to the last digits."""
    assert freedom >= 1, freedom
    assert 0 < confidence < 1, confidence
    low, high = 0.0, 1.0
    while _inside(high, freedom) < confidence:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _inside(middle, freedom) < confidence else (low, middle)
    return high
