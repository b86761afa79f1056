"""The arithmetic of timing: means and quantiles, how often to repeat, how far to rotate, which samples lie in the window, and
how sure a ratio of means is.

Pure: takes seconds, returns seconds. The device side is in :mod:`bullet.profiler.lane_graphs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bullet.errors import ProfileError

L2_MULTIPLE = 3.0
"""Inputs are rotated over this many times the L2 cache, so that no repetition finds its own data there."""
MAX_ROTATION = 64
MAX_REPEATS = 1024
"""Of an operation in a replay: a millisecond of the shortest, which takes about one microsecond."""


class Interval(NamedTuple):
    """Start and end of one replay, in seconds since a common event."""

    start_s: float
    end_s: float


class Stats(NamedTuple):
    """Median, 20th and 80th percentile of ``samples`` values, their mean and 95th percentile, in seconds."""

    median_s: float
    p20_s: float
    p80_s: float
    samples: int
    mean_s: float | None = None
    p95_s: float | None = None


class Window(NamedTuple):
    """Samples of one lane that lie inside the other lane's activity.

    ``seconds``: per repetition, one entry a kept replay. ``window_s``: seconds in which both lanes are known to be busy.
    ``both_share``: of the lane's own timed train.
    """

    seconds: list[float]
    window_s: float
    both_share: float = 0.0


def summarise(seconds: Sequence[float]) -> Stats:
    """Quantiles by linear interpolation; :class:`ProfileError` without a sample, or with one that is not positive."""
    if not seconds:
        raise ProfileError("no sample was kept: the run was too short")
    if not all(math.isfinite(s) and s > 0 for s in seconds):
        raise ProfileError(f"a sample of {min(seconds):g} s: the timer did not advance")
    ordered = sorted(seconds)

    def quantile(q: float) -> float:
        at = q * (len(ordered) - 1)
        low = math.floor(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])

    return Stats(quantile(0.5), quantile(0.2), quantile(0.8), len(ordered), math.fsum(ordered) / len(ordered), quantile(0.95))


RESAMPLES = 400


def ratio_of_means(above: Sequence[float], below: Sequence[Sequence[float]], seed: int) -> tuple[float, float, float]:
    """Mean of ``above`` over the mean of the windows' means ``below``, with its 2.5th and 97.5th percentile.

    By bootstrap over blocks of neighbours, each window by itself: replays that follow one another meet the same phase of the
    other lane and the same clock, so that single ones are not independent (Politis, Romano, 1992: circular blocks, here of
    about the cube root of a window's samples).
    """
    generator = np.random.default_rng([seed, len(above)])

    def means(values: Sequence[float]) -> np.ndarray:
        samples = np.asarray(values, dtype=float)
        length = max(1, round(len(samples) ** (1 / 3)))
        starts = generator.integers(len(samples), size=(RESAMPLES, -(-len(samples) // length)))
        index = (starts[:, :, None] + np.arange(length)) % len(samples)
        drawn: np.ndarray = samples[index.reshape(RESAMPLES, -1)[:, :len(samples)]].mean(1)
        return drawn

    ratios = means(above) / np.mean([means(window) for window in below], 0)
    low, high = np.quantile(ratios, (0.025, 0.975))
    ratio = float(np.mean(above) / np.mean([np.mean(window) for window in below]))
    return ratio, float(low), float(high)


def rotation(footprint_bytes: float, l2_bytes: float, limit_bytes: float) -> int:
    """Input sets to cycle through, at least 1: together past ``L2_MULTIPLE`` x L2, within ``limit_bytes``."""
    if footprint_bytes <= 0:
        return 1
    wanted = math.ceil(L2_MULTIPLE * l2_bytes / footprint_bytes)
    affordable = max(1, int(limit_bytes // footprint_bytes))
    return max(1, min(wanted, affordable, MAX_ROTATION))


def repeats(once_s: float, min_replay_s: float, rotation: int) -> int:
    """Repetitions inside a replay: the replay lasts ``min_replay_s`` and uses every input set, as far as the cap allows.

    A multiple of ``rotation``, so that each replay starts with the same set.
    """
    wanted = max(1, math.ceil(min_replay_s / max(once_s, 1e-9)))
    rounds = max(1, math.ceil(wanted / rotation))
    return rotation * min(rounds, max(1, MAX_REPEATS // rotation))


SOLO_S, SOLO_LEAST = 0.03, 6
"""A window alone: so many seconds of replays, and at least so many of them."""


def solo_count(replay_s: float, most: int) -> int:
    """Timed replays of a window alone: ``most`` of short ones, fewer of long ones, and one more, which is dropped."""
    return 1 + max(SOLO_LEAST, min(most, math.ceil(SOLO_S / max(replay_s, 1e-9))))


def inside(own: Sequence[Interval], other: Sequence[Interval], repetitions: int) -> Window:
    """Own replays that lie wholly between the end of the other lane's first replay and the end of its last.

    Not from the other's first *start*: that event fires when the stream gets to it, which is before its kernel runs if
    the device serialises the lanes; only an end proves that the other lane was running. The first own replay is dropped
    too: caches and clocks still settle in it. In between, replays are back to back, since they were queued ahead.
    """
    if not own or not other:
        return Window([], 0.0)
    start, end = other[0].end_s, other[-1].end_s
    kept = [(i.end_s - i.start_s) / repetitions for i in own[1:] if i.start_s >= start and i.end_s <= end]
    both_s = max(0.0, min(own[-1].end_s, end) - max(own[0].start_s, start))
    return Window(kept, both_s, both_s / (own[-1].end_s - own[0].start_s))


def train_lengths(prefill_s: float, decode_s: float, min_prefill: int, min_decode: int, *,
                  limit: int) -> tuple[int, int]:
    """Replays of each lane so that both are busy for the same time, with at least the wanted samples inside.

    A margin for slow-down: each lane gets half as much again as its runs alone would need, plus the dropped first.
    Never more than ``limit``: the driver's queue must hold the whole train.
    """
    window_s = max((min_prefill + 3) * prefill_s, (min_decode + 3) * decode_s)
    return tuple(min(limit, max(3, math.ceil(1.5 * window_s / s))) for s in (prefill_s, decode_s))  # type: ignore[return-value]
