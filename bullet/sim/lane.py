"""A simulated lane: what it sees of the other one, and the noise of its steps."""

from __future__ import annotations

from collections import deque
from zlib import crc32

import numpy as np

from bullet.results.bookkeeping import INFINITY
from bullet.state import DECODE, HYBRID, PREFILL, DecodeStep, HybridStep, Partition, PrefillStep, Published


class Noise:
    """Log-normal factors, keyed by lane and step index: drawn in order from the lane's own stream."""

    def __init__(self, std: float, seed: int, lane: str, replica: int = 0) -> None:
        self.std = std
        self.rng = np.random.default_rng(np.random.SeedSequence([seed, replica, crc32(f"noise:{lane}".encode())]))
        self.drawn: list[float] = []

    def next(self) -> float:
        if not self.drawn:
            self.drawn.extend(np.exp(self.std * self.rng.standard_normal(1024))[::-1].tolist())
        return self.drawn.pop()


class Lane:
    """One lane: what it may launch, and the target and published estimates as it sees them.

    Its own decisions it sees at once, the other lane's after a delay. The last writer wins, by the decision's number: two
    lanes may decide at one instant, yet one of them was last.
    """

    __slots__ = ("last_sms", "name", "noise", "other", "own", "pending", "seen", "step_type", "target", "wait_until_s",
                 "written")

    def __init__(self, name: str, target: Partition, noise: Noise | None) -> None:
        self.name = name
        self.step_type = {PREFILL: PrefillStep, DECODE: DecodeStep, HYBRID: HybridStep}[name]
        self.noise = noise
        self.other = self  # of two, the other one
        self.last_sms = 0
        self.wait_until_s = INFINITY
        self.target = target
        self.written = 0
        self.own = self.seen = Published()  # what it published itself, and what it has seen of the other
        #: What the other lane decided: when it can be seen, the decision's number, what it published, its target.
        self.pending: deque[tuple[float, int, Published | None, Partition | None]] = deque()

    def look(self, now_s: float) -> None:
        """See what the other lane has decided by now."""
        pending = self.pending
        while pending and pending[0][0] <= now_s:
            _, number, published, target = pending.popleft()
            if target is not None and number > self.written:
                self.target, self.written = target, number
            if published is not None:
                self.seen = published
