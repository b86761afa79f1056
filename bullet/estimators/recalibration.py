"""Online learning: what measured steps tell of the predictions' errors."""

from __future__ import annotations

from math import exp, log

import numpy as np

from bullet.estimators.base import Array
from bullet.state import DECODE, PREFILL, SplitTable


class Recalibration:
    """Log corrections per phase and SM bucket, each an exponentially weighted mean of log(measured / uncorrected).

    ``predicted`` already holds the correction of its launch, so ``log(elapsed / predicted)`` is the error of the mean
    itself and ``mean += weight * error`` is its update. Buckets never observed borrow the phase's mean.
    """

    BUCKETS = 8

    def __init__(self, splits: SplitTable, *, enabled: bool = True, weight: float = 0.1) -> None:
        self.enabled = enabled
        self.weight = weight
        self.num_sms = splits.num_sms
        own = {PREFILL: np.append(splits.prefill_sms, splits.num_sms),
               DECODE: np.append(splits.decode_sms, splits.num_sms)}
        self.of = {phase: Correction([self.bucket(int(s)) for s in sms], self.BUCKETS + 1) for phase, sms in own.items()}

    def bucket(self, sms: int) -> int:
        """Eighths of the device, and the whole device by itself."""
        return self.BUCKETS if sms >= self.num_sms else sms * self.BUCKETS // self.num_sms

    def over_splits(self, phase: str) -> Array:
        """Corrections over all splits; not to be written to."""
        own = self.of[phase]
        if own.array is None:
            own.array = np.array(own.factor)[own.bucket_of]
        return own.array

    def observe(self, phase: str, sms: int, predicted_s: float, elapsed_s: float) -> None:
        """Learn from one step."""
        if not self.enabled or predicted_s <= 0 or elapsed_s <= 0:
            return
        bucket = self.BUCKETS if sms >= self.num_sms else sms * self.BUCKETS // self.num_sms
        own, weight = self.of[phase], self.weight
        # The first observation of a bucket corrects what it was predicted with: the phase's mean.
        before, mean = own.logs[bucket], own.mean
        after = (mean if before is None else before) + weight * log(elapsed_s / predicted_s)
        own.logs[bucket] = after
        own.mean = mean = mean + weight * (after - mean)
        own.factor[bucket] = exp(after)
        own.array = None
        if before is None:
            own.seen(bucket)
        if own.unseen:
            own.factor[-1] = exp(mean)


class Correction:
    """Of one phase: ``factor[bucket_of[i]]`` corrects split ``i``, and the whole device last.

    ``buckets``: each split's own; ``bucket_of``: the same, or -1, where the phase's mean is, until that is observed.
    """

    __slots__ = ("array", "bucket_of", "buckets", "factor", "logs", "mean", "unseen")

    def __init__(self, buckets: list[int], count: int) -> None:
        self.buckets = buckets
        self.bucket_of = [-1] * len(buckets)
        self.logs: list[float | None] = [None] * count
        self.factor = [1.0] * (count + 1)  # read one at a time far more often than over all splits
        self.mean = 0.0
        self.unseen = count
        self.array: Array | None = None

    def seen(self, bucket: int) -> None:
        """The first observation of a bucket: its splits leave the mean."""
        self.unseen -= 1
        for split, own in enumerate(self.buckets):
            if own == bucket:
                self.bucket_of[split] = bucket
