"""Step times taken from the engine itself, and a device made of them: what closes the loop between simulator and engine.

A profile holds medians of whole steps on one machine: prefills of one prompt, decode iterations, and how both depend on
SMs and on a co-runner. :class:`MeasuredDevice` interpolates them, with no other model:

    prefill of ``k`` of ``L`` layers = launch + k / L (whole(tokens) + pair_s (pairs - tokens^2 / 2) - launch - head) [+ head]
    decode iteration                 = bilinear in (sequences, context of each)
    hybrid batch                     = prefill of all its rows + what decode's context adds to a decode iteration

``pairs``: query-key pairs of all chunks. On one processor lanes take turns, so of two steps in flight each lasts as long as
both together, by construction. Source: measured, on the machine that the profile names.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bullet import door
from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.devices.base import Device
from bullet.errors import ProfileError
from bullet.piecewise import piece

TURNS = "none: lanes take turns"
"""The partition of a CPU, before a nominal GPU is named."""


@dataclass(frozen=True)
class StepProfile:
    """Seconds of whole steps. ``prefill_s``: one prompt of each of ``prefill_tokens``, all layers and the LM head, on all
    SMs. ``decode_s[i][j]``: an iteration of ``batches[i]`` sequences with ``contexts[j]`` tokens each, on all SMs.
    ``launch_s``: what a step costs whatever its size; ``head_s``: the last layer's extra; ``pair_s``: a query-key pair.

    ``prefill_sms``, ``decode_sms``: (SMs, factor over all SMs), ascending, the last (N, 1). ``corun``: (prefill's SMs,
    decode's SMs, slow-down of prefill, of decode) of both at once over each alone on the same SMs.
    """

    hardware: str
    partition: str
    model: str
    num_sms: int
    turns: bool
    prefill_tokens: tuple[int, ...]
    prefill_s: tuple[float, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    decode_s: tuple[tuple[float, ...], ...]
    launch_s: float
    head_s: float
    pair_s: float
    prefill_sms: tuple[tuple[int, float], ...]
    decode_sms: tuple[tuple[int, float], ...]
    corun: tuple[tuple[int, int, float, float], ...] = ()

    def shown(self, gpu: GpuSpec) -> StepProfile:
        """A CPU's sweep knows of threads: the policy is shown the splits of a nominal GPU, of no effect. Others stay as they are.
        """
        if self.partition != TURNS:
            return self
        whole = ((gpu.num_sms, 1.0),)
        return dataclasses.replace(self, partition=f"{TURNS}, SMs of a nominal {gpu.name}", num_sms=gpu.num_sms,
                                   prefill_sms=whole, decode_sms=whole)

    def to_json(self) -> str:
        """Stable text."""
        return json.dumps({"source": "measured", **dataclasses.asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, path: Path) -> StepProfile:
        """:class:`ProfileError` names the file."""
        raw = door.read_object(path, ProfileError, "step times")
        raw.pop("source", None)
        profile = door.typed(raw, cls, path, ProfileError)
        for name in ("prefill_tokens", "batches", "contexts"):
            if len(getattr(profile, name)) < 2:  # nothing to interpolate between; a sweep cut short may still tell the drift
                raise ProfileError(f"{path}: {name}: must be two or more whole numbers, ascending: measure them again with "
                                   "bullet-run steps")
        return profile

    def __post_init__(self) -> None:
        """Sizes ascend and times are times: a file may have been written by hand."""
        def need(fits: bool, what: str) -> None:
            if not fits:
                raise ProfileError(f"cannot be step times: {what}: measure them again with bullet-run steps")

        def rise(sizes: Sequence[int]) -> bool:
            return all(0 < n <= 10**9 for n in sizes) and list(sizes) == sorted(set(sizes))

        def times(values: Sequence[float], count: int) -> bool:
            return len(values) == count and all(0 < value < math.inf for value in values)

        need(self.num_sms > 0, "num_sms: must be a whole number, 1 or more")
        for name in ("prefill_tokens", "batches", "contexts"):
            sizes = getattr(self, name)
            need(len(sizes) > 0 and rise(sizes), f"{name}: must be two or more whole numbers, ascending")
        need(times(self.prefill_s, len(self.prefill_tokens)), "prefill_s: must be a positive time for each of prefill_tokens")
        need(len(self.decode_s) == len(self.batches) and all(times(row, len(self.contexts)) for row in self.decode_s),
             "decode_s: must be a positive time for each of batches and contexts")
        for name in ("launch_s", "head_s", "pair_s"):
            need(0 <= getattr(self, name) < math.inf, f"{name}: must be a number, 0 or more")
        for name in ("prefill_sms", "decode_sms"):
            curve = getattr(self, name)
            need(len(curve) > 0 and rise([n for n, _ in curve]) and times([x for _, x in curve], len(curve))
                 and curve[-1][0] == self.num_sms, f"{name}: must be (SMs, positive factor), ascending, the last of num_sms")
        need(all(min(row) > 0 and max(row) < math.inf for row in self.corun),
             "corun: must be (prefill's SMs, decode's SMs, two positive slow-downs)")


def along(x: float, nodes: Sequence[float], values: Sequence[float]) -> float:
    """Piecewise linear through the nodes; beyond the ends the outermost piece goes on, never below half its end."""
    i = piece(x, nodes)
    slope = (values[i + 1] - values[i]) / (nodes[i + 1] - nodes[i])
    return max(values[i] + slope * (x - nodes[i]), 0.5 * min(values[i], values[i + 1]))


class MeasuredWork(NamedTuple):
    """A step: its phase and its seconds alone on all SMs."""

    kind: str
    seconds: float


class MeasuredDevice(Device):
    """A profile as a device, for the simulator and for the estimators' samples.

    ``sharing``: how two steps share one processor: ``turns``, each lasting as long as both; or ``fair``, each twice as long,
    which is what turns come to for a whole prefill beside many iterations. Of no effect where lanes really run at once.
    """

    has_host_time = True

    def __init__(self, profile: StepProfile, model: ModelSpec, gpu: GpuSpec, *, sharing: str = "turns") -> None:
        super().__init__(model, dataclasses.replace(gpu, num_sms=profile.num_sms))
        self.profile, self.sharing = profile, sharing
        # At sizes that were measured: nothing is extrapolated. Their noise is in the medians already.
        ends = (profile.batches[0], profile.batches[-1])
        self.calibration = {"prefill_tokens": profile.prefill_tokens[-5:], "batches": profile.batches,
                            "corun_batches": tuple(dict.fromkeys(ends)), "contexts": (profile.contexts[0], profile.contexts[-1])}
        self._columns = list(zip(*profile.decode_s, strict=True))

    calibration_noise_std = 0.0

    @property
    def source(self) -> str:
        return f"measured on {self.profile.hardware}"

    def sampled(self) -> MeasuredDevice:
        """Samples are of long runs, in which turns come out fair."""
        return MeasuredDevice(self.profile, self.model, self.gpu, sharing="fair")

    def _prefill_s(self, rows: int, pairs: float) -> float:
        profile = self.profile
        whole = along(rows, profile.prefill_tokens, profile.prefill_s)
        return max(whole + profile.pair_s * (pairs - rows * rows / 2), 0.1 * whole)

    def _decode_s(self, seqs: int, context_each: float) -> float:
        profile = self.profile
        return along(context_each, profile.contexts, [along(seqs, profile.batches, column) for column in self._columns])

    def prefill_work(self, pieces: Sequence[tuple[int, int]], layers: int, *, logits_seqs: int) -> MeasuredWork:
        profile = self.profile
        rows, pairs = sum(new for new, _ in pieces), sum(new * (past + new / 2) for new, past in pieces)
        body = max(self._prefill_s(rows, pairs) - profile.launch_s - profile.head_s, 0.0)
        return MeasuredWork("prefill", profile.launch_s + body * layers / self.model.num_layers
                            + (profile.head_s if logits_seqs else 0.0))

    def decode_work(self, num_seqs: int, context_tokens: int) -> MeasuredWork:
        return MeasuredWork("decode", self._decode_s(num_seqs, context_tokens / num_seqs))

    def hybrid_work(self, pieces: Sequence[tuple[int, int]], num_seqs: int, context_tokens: int, *, logits_seqs: int,
                    layers: int | None = None) -> MeasuredWork:
        assert layers is None, "a hybrid batch is measured whole"
        if not pieces:
            return self.decode_work(num_seqs, context_tokens)
        rows, pairs = sum(new for new, _ in pieces), sum(new * (past + new / 2) for new, past in pieces)
        seconds = self._prefill_s(rows + num_seqs, pairs + num_seqs * num_seqs / 2)
        if num_seqs:
            attended = self._decode_s(num_seqs, context_tokens / num_seqs) - self._decode_s(num_seqs, self.profile.contexts[0])
            seconds += max(0.0, attended)
        return MeasuredWork("prefill", seconds)

    def solo_seconds(self, work: MeasuredWork, sms: int) -> float:
        curve = self.profile.prefill_sms if work.kind == "prefill" else self.profile.decode_sms
        nodes, factors = zip(*curve, strict=True)
        return float(work.seconds * np.interp(sms, nodes, factors))

    def corun_seconds(self, prefill: MeasuredWork, p: int, decode: MeasuredWork, d: int) -> tuple[float, float]:
        alone = self.solo_seconds(prefill, p), self.solo_seconds(decode, d)
        if self.profile.turns:
            return (alone[0] + alone[1],) * 2 if self.sharing == "turns" else (2 * alone[0], 2 * alone[1])
        if not self.profile.corun:
            return alone
        rows = sorted(self.profile.corun, key=lambda row: row[1])
        nodes = [row[1] for row in rows]
        return (alone[0] * float(np.interp(d, nodes, [row[2] for row in rows])),
                alone[1] * float(np.interp(d, nodes, [row[3] for row in rows])))
