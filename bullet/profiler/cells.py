"""A cell: the windows of one point, back to back, and the rows they make.

    co-run    solo A | solo B | A and B | solo B | solo A      six rows: each lane alone twice, and both beside each other
    control   solo A | A beside the load | solo A              three rows
    solo      A                                                one row

A slow-down is a ratio of means of neighbouring windows, not of rows that lie minutes apart: what drifts slowly (clocks,
temperature) is in both. That the two windows alone agree is stated (``solo_drift``), not assumed.

Devices differ in how a window is taken (:class:`Bench`); what is made of them is the same here for all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bullet.profiler import timing
from bullet.profiler.plan import Point
from bullet.profiler.shapes import Shape

STEPS: Mapping[str, tuple[str, ...]] = {"corun": ("a", "b", "ab", "b", "a"), "control": ("a", "ab", "a"), "solo": ("a",)}
"""Kind of a point -> which lanes run in each of its windows: ``a`` the lane under test (a co-run's prefill), ``b`` the other."""


@dataclass(frozen=True)
class Side:
    """One lane of one window. ``seconds``: of a repetition, a kept replay each. ``bytes_per_s``: least bytes it moved, over its
    train. ``state``: further columns of its row, as the clock inside the window."""

    lane: str
    shape: Shape | None
    sms: int
    seconds: Sequence[float]
    repeats: int
    window_s: float | None = None
    both_share: float | None = None
    bytes_per_s: float | None = None
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """One row's samples. ``stats``: seconds of one repetition. ``window_s`` is None alone.

    ``corunner``: idle, a control's name, or an operation, whose size is ``corunner_shape``. ``part``: which of a cell's rows it
    is, empty for the one that the point is about; ``step``: its window's place in the cell. ``columns``: what else its row says.
    """

    lane: str
    shape: Shape
    sms: int
    stats: timing.Stats
    repeats: int
    corunner: str = "idle"
    corunner_shape: Shape | None = None
    corunner_sms: int | None = None
    corunner_bytes_per_s: float | None = None
    window_s: float | None = None
    part: str = ""
    step: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


def measure(point: Point, windows: Callable[[Sequence[str]], Sequence[Sequence[Side]]]) -> list[Measurement]:
    """All rows of a point. ``windows`` takes those that it is given, one after the other, and returns the lanes that ran in each,
    A's first; a control's load has no shape and gets no row."""
    steps = STEPS[point.kind]
    taken = windows(steps)
    if len(steps) == 1:
        return [_alone(taken[0][0], "", None)]
    alone = {which: [step for step, other in enumerate(steps) if other == which] for which in "ab"}
    parts = ("alone before", "alone after")
    rows = [_alone(taken[step][0], part, step) for which in "ab" for part, step in zip(parts, alone[which], strict=False)]
    at = steps.index("ab")
    for i, side in enumerate(taken[at][:2 if point.kind == "corun" else 1]):
        rows.append(_beside(point, side, taken[at][1 - i], [taken[step][0].seconds for step in alone["ab"[i]]], at))
    return sorted(rows, key=lambda row: row.step or 0)


def _alone(side: Side, part: str, step: int | None) -> Measurement:
    assert side.shape is not None
    return Measurement(side.lane, side.shape, side.sms, timing.summarise(side.seconds), side.repeats, part=part, step=step,
                       columns=side.state)


def _beside(point: Point, side: Side, other: Side, alone: Sequence[Sequence[float]], step: int) -> Measurement:
    assert side.shape is not None
    stats = timing.summarise(side.seconds)
    ratio, low, high = timing.ratio_of_means(side.seconds, alone, zlib.crc32(f"{point.key}|{side.lane}".encode()))
    before, after = (sum(window) / len(window) for window in alone)
    columns = {**side.state, "both_share": side.both_share, "slowdown": ratio, "slowdown_low": low, "slowdown_high": high,
               "solo_mean_s": (before + after) / 2, "solo_drift": after / before - 1}
    return Measurement(side.lane, side.shape, side.sms, stats, side.repeats, other.shape.op if other.shape else point.control,
                       other.shape, other.sms, other.bytes_per_s, side.window_s, "", step, columns)
