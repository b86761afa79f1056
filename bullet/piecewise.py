"""Straight lines between measured points: where a value lies among ascending nodes, and what holds there.

The one place where a node is looked for. What holds beyond the ends is the caller's to say: :func:`linear` lets the outermost
piece go on, tables refuse before they ask.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Value = TypeVar("Value", float, "NDArray[np.float64]")


def piece(x: float, nodes: Sequence[float]) -> int:
    """The node that ``x``'s piece begins at, of two or more ascending: below ``x``, or the outermost piece's."""
    return bisect_left(nodes, x, 1, len(nodes) - 1) - 1


def between(x: float, nodes: Sequence[float]) -> tuple[int, float]:
    """:func:`piece`, and the share of it that lies before ``x``: exactly 1 at its end, outside 0 to 1 beyond the nodes."""
    i = bisect_left(nodes, x, 1, len(nodes) - 1) - 1
    return i, (x - nodes[i]) / (nodes[i + 1] - nodes[i])


def linear(x: float, nodes: Sequence[float], values: Sequence[Value]) -> Value:
    """Piecewise linear between nodes, extended linearly beyond; one node holds everywhere. ``values``: numbers, or arrays."""
    if len(nodes) == 1:
        return values[0]
    i, share = between(x, nodes)
    return values[i] + share * (values[i + 1] - values[i])
