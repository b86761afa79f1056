"""The numbers of a fitted device: read from a ``fit.json``, checked, or taken from a data sheet and labelled so."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bullet import door
from bullet.catalog.gpus import GpuSpec
from bullet.devices import PROFILES
from bullet.errors import ProfileError, short

ANALYTIC_FROM = "a100-80gb"
"""Whose coefficients stand in a fit of public tables for what they do not have; in one of a sweep, the nearest silicon's
(``GpuSpec.silicon``). Labelled assumed."""
CALLED = {"a100-80gb": "A100", "h100": "H100", "rtx4090": "RTX 4090"}
"""In words, the cards that others borrow from."""
ROWWISE = ("act", "embedding", "norm", "qk_norm", "rope")
"""Families of bandwidth-bound kernels that work on rows one by one."""


LONGEST_OVERHEAD_S = 0.1
"""No kernel, block, sequence or step costs as much beside its work: above it a fit is in another unit."""
LEAST_SHARE = 0.001
"""Below a thousandth of a peak a fit is in another unit as well."""
LIMITS: Mapping[str, tuple[float, float, str]] = {
    "rate_cap": (1.0, 10.0, "times the rate with all SMs busy"),
    "rate_slope": (0.0, 10.0, "a rate's gain with no SM busy"),
    "bandwidth_sharpness": (0.1, 100.0, "an exponent: beyond it a step"),
    **dict.fromkeys(("contention_loss", "prefill_contention_loss", "decode_contention_loss", "prefill_l2_loss",
                     "decode_l2_loss"), (0.0, 1.0, "a share")),
    "shared_prefill_share": (0.001, 0.999, "of the shared SMs' time"),
    "prefill_attention_extra_keys": (0.0, 10_000.0, "keys a query row"),
    "_s": (0.0, LONGEST_OVERHEAD_S, "seconds"),
    "": (LEAST_SHARE, 1.0, "a share of the data sheet's peak, or of the SMs")}
"""What a coefficient may be, by name, by ending, and the rest: least, most, and what it is."""
LARGEST_TILE = 4096


@dataclass(frozen=True)
class DeviceCoefficients:
    """What a fit yields. Efficiencies are shares of the data sheet's peaks.

    ``gemm_tiles``: (rows, columns, compute efficiency) of the output tiles that the library may pick; it picks the
    fastest for the whole device. ``extra_keys``: keys' worth of work that each query row of prefill attention costs
    beyond those it attends (tile fill, prologue). ``decode_attention_seq_s``: SM time that decode attention spends on a
    sequence however short its context, in seconds of the whole device: its compute term. ``rate_slope``, ``rate_cap``:
    per-SM rate is ``min(cap, 1 + slope (1 - busy / N))`` of that with all SMs busy. ``bandwidth_knee``,
    ``bandwidth_sharpness``: ``((p / N / knee)^-k + 1)^(-1/k)``, normalised to 1 at N. ``all_reduce_overhead_s``: each of
    the two a layer, tensor parallel only. ``host_gap_s`` (per step) is *assumed*.

    What co-running costs is *assumed* (``contention_loss``, both lanes alike) where no co-run row was fitted. A sweep's fit has
    it by lane: ``prefill_contention_loss`` is what decode's share of the bandwidth costs prefill, ``decode_contention_loss`` the
    reverse; ``*_l2_loss`` what the co-runner's GEMMs cost a lane beside that, their operands passing through L2: of the share of
    all SM time that they fill. ``shared_prefill_share``: of SMs that no split divides. None: ``contention_loss``, 0, 0.5.
    """

    source: str
    gemm_tiles: tuple[tuple[int, int, float], ...]
    gemm_bandwidth: float
    gemm_overhead_s: float
    gemm_block_overhead_s: float
    prefill_attention_efficiency: float
    prefill_attention_extra_keys: float
    prefill_attention_overhead_s: float
    decode_attention_bandwidth: float
    decode_attention_overhead_s: float
    decode_attention_seq_s: float
    rowwise_bandwidth: Mapping[str, float]
    rowwise_overhead_s: float
    rate_slope: float
    rate_cap: float
    bandwidth_knee: float
    bandwidth_sharpness: float
    contention_loss: float = 0.2
    host_gap_s: float = 0.0
    link_efficiency: float = 1.0
    all_reduce_overhead_s: float = 0.0
    prefill_contention_loss: float | None = None
    decode_contention_loss: float | None = None
    prefill_l2_loss: float | None = None
    decode_l2_loss: float | None = None
    shared_prefill_share: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peak_bandwidth(self) -> float:
        """The fitted full-device bandwidth as a share of the data sheet's: the best that any family reaches."""
        return max(self.gemm_bandwidth, self.decode_attention_bandwidth, *self.rowwise_bandwidth.values())

    @property
    def digest(self) -> str:
        """Of the numbers alone: a fit keeps its own in its notes, so that one that was changed since is known."""
        numbers = {k: v for k, v in self._told().items() if k not in ("source", "notes")}
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Stable text: the same coefficients give the same bytes."""
        return json.dumps(self._told(), indent=1, sort_keys=True) + "\n"

    def _told(self) -> dict[str, Any]:
        """What was fitted or assumed: a coefficient that no row told is not in the file, as in those of older fits."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}

    @property
    def intervals(self) -> Mapping[str, tuple[float, float]]:
        """Coefficient -> its 99 % interval, of those that a fit states one for."""
        return {name: (float(low), float(high)) for name, (low, high) in self.notes.get("intervals", {}).items()}

    @classmethod
    def from_json(cls, path: Path) -> DeviceCoefficients:
        """Read ``fit.json``; :class:`ProfileError` names the file and the key at fault."""
        fit = door.typed(door.read_object(path, ProfileError, "a fit"), cls, path, ProfileError)
        door.typed(fit.notes, _Notes, path, ProfileError, "notes.", others=True)

        def need(fits: bool, name: str, value: object, allowed: str) -> None:
            if not fits:
                raise ProfileError(f"{path}: {name} = {short(value)}: must be {allowed}")

        need(bool(fit.gemm_tiles) and all(1 <= rows <= LARGEST_TILE and 1 <= columns <= LARGEST_TILE and LEAST_SHARE <= share <= 1
                                          for rows, columns, share in fit.gemm_tiles),
             "gemm_tiles", list(fit.gemm_tiles), "a list of [rows, columns, efficiency]: whole numbers of 1 to "
             f"{LARGEST_TILE}, and {LEAST_SHARE} to 1")
        need(set(fit.rowwise_bandwidth) == set(ROWWISE) and all(LEAST_SHARE <= x <= 1 for x in fit.rowwise_bandwidth.values()),
             "rowwise_bandwidth", fit.rowwise_bandwidth, f"a table of {', '.join(ROWWISE)}, each {LEAST_SHARE} to 1")
        for name, value in vars(fit).items():
            if isinstance(value, float):
                least, most, what = next(LIMITS[end] for end in LIMITS
                                         if name == end or (end in ("_s", "") and name.endswith(end)))
                need(least <= value <= most, name, value, f"{least:g} to {most:g} ({what})"
                     f"{'; are these seconds?' if what == 'seconds' else ''}")
        for name, (low, high) in fit.intervals.items():
            value = getattr(fit, name, None)
            need(low <= high and (value is None or low <= value <= high), f"notes.intervals.{name}", [low, high],
                 "[low, high] around the coefficient")
        return fit


@dataclass
class _Error:
    rows: float
    median: float
    p90: float
    worst: float

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 0:
            raise ProfileError(f"notes.errors: {vars(self)}: must be 0 or more")


@dataclass
class _Waves:
    on: bool = False
    evidence: Any = None


@dataclass
class _Notes:
    """What is read of a fit's notes: all else is free."""

    assumed: list[str] = field(default_factory=list)
    fitted_on: dict[str, str] = field(default_factory=dict)
    errors: dict[str, _Error] = field(default_factory=dict)
    waves: _Waves = field(default_factory=_Waves)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    gpu: str = ""
    model: str = ""
    origin: str = ""
    digest: str = ""


def lent(assumed: Iterable[str]) -> dict[str, str]:
    """What a fit holds of another card -> whose it is, from what its notes assume."""
    whose = {f"{name}'s" for name in CALLED.values()}
    parts = [(text.partition(":")[0], text.rpartition(", ")[2]) for text in assumed]
    return {what: who for what, who in parts if who in whose}


def analytic_coefficients(gpu: GpuSpec) -> DeviceCoefficients:
    """For a GPU without a profile: data-sheet peaks, the efficiencies fitted on the nearest silicon (``GpuSpec.silicon``), and a
    label that says whose."""
    fitted = DeviceCoefficients.from_json(PROFILES / gpu.silicon / "llama-3.1-8b" / "fit.json")
    return dataclasses.replace(
        fitted, source=f"analytic, {gpu.silicon}'s efficiencies",
        notes={"basis": f"data sheet of {gpu.name} ({gpu.source}); efficiencies, overheads and SM curves as fitted on "
                        f"{gpu.silicon}: not measured on this GPU"})
