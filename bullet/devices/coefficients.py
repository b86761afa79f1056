"""The numbers of a fitted device: read from a ``fit.json``, checked, or taken from a data sheet and labelled so."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bullet.catalog.gpus import GpuSpec
from bullet.devices import PROFILES
from bullet.errors import ProfileError

ANALYTIC_FROM = "a100-80gb"
"""Whose coefficients stand in a fit for what its table does not have; labelled assumed."""
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
    "contention_loss": (0.0, 1.0, "a share"),
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
    the two a layer, tensor parallel only. ``contention_loss`` and ``host_gap_s`` (per step) are *assumed*.
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
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peak_bandwidth(self) -> float:
        """The fitted full-device bandwidth as a share of the data sheet's: the best that any family reaches."""
        return max(self.gemm_bandwidth, self.decode_attention_bandwidth, *self.rowwise_bandwidth.values())

    @property
    def digest(self) -> str:
        """Of the numbers alone: a fit keeps its own in its notes, so that one that was changed since is known."""
        numbers = {k: v for k, v in dataclasses.asdict(self).items() if k not in ("source", "notes")}
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Stable text: the same coefficients give the same bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, path: Path) -> DeviceCoefficients:
        """Read ``fit.json``; :class:`ProfileError` names the file and the key at fault."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as exc:
            raise ProfileError(f"{path}: cannot be read as a fit ({exc})") from None
        if not isinstance(raw, dict):
            raise ProfileError(f"{path}: must hold one JSON object, found {type(raw).__name__}")
        names = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(raw) - set(names))
        if unknown:
            raise ProfileError(f"{path}: unknown {', '.join(unknown)}: allowed are {', '.join(sorted(names))}")
        missing = [n for n, f in names.items() if n not in raw and f.default is dataclasses.MISSING
                   and f.default_factory is dataclasses.MISSING]
        if missing:
            raise ProfileError(f"{path}: {', '.join(missing)} missing")
        tiles, rowwise = raw["gemm_tiles"], raw["rowwise_bandwidth"]
        if not (isinstance(tiles, list) and tiles and all(_is_tile(tile) for tile in tiles)):
            raise ProfileError(f"{path}: gemm_tiles = {_short(tiles)}: must be a list of [rows, columns, efficiency]: whole "
                               f"numbers of 1 to {LARGEST_TILE}, and {LEAST_SHARE} to 1")
        if not (isinstance(rowwise, dict) and set(rowwise) == set(ROWWISE)
                and all(_within(x, LEAST_SHARE, 1) for x in rowwise.values())):
            raise ProfileError(f"{path}: rowwise_bandwidth = {_short(rowwise)}: must give {', '.join(ROWWISE)}, each "
                               f"{LEAST_SHARE} to 1")
        if not isinstance(raw["source"], str):
            raise ProfileError(f"{path}: source = {_short(raw['source'])}: must be text")
        _check_notes(raw.get("notes", {}), f"{path}: notes")
        for name in sorted(set(raw) - {"source", "gemm_tiles", "rowwise_bandwidth", "notes"}):
            least, most, what = next(LIMITS[end] for end in LIMITS if name == end or (end in ("_s", "") and name.endswith(end)))
            if not _within(raw[name], least, most):
                hint = "; are these seconds?" if what == "seconds" else ""
                raise ProfileError(f"{path}: {name} = {_short(raw[name])}: must be {least:g} to {most:g} ({what}){hint}")
        raw["gemm_tiles"] = tuple((r, c, float(e)) for r, c, e in tiles)
        return cls(**raw)


def _within(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_tile(tile: object) -> bool:
    return (isinstance(tile, list) and len(tile) == 3 and _within(tile[2], LEAST_SHARE, 1)
            and all(isinstance(x, int) and _within(x, 1, LARGEST_TILE) for x in tile[:2]))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_notes(notes: object, where: str) -> None:
    """What is read of a fit's notes: all else is free."""
    if not isinstance(notes, dict):
        raise ProfileError(f"{where} = {_short(notes)}: must be an object")
    assumed, fitted_on, errors = notes.get("assumed", []), notes.get("fitted_on", {}), notes.get("errors", {})
    if not (isinstance(assumed, list) and all(isinstance(text, str) for text in assumed)):
        raise ProfileError(f"{where}: assumed = {_short(assumed)}: must be a list of texts")
    if not (isinstance(fitted_on, dict) and all(isinstance(text, str) for text in fitted_on.values())):
        raise ProfileError(f"{where}: fitted_on = {_short(fitted_on)}: must be an object of texts")
    if not isinstance(errors, dict):
        raise ProfileError(f"{where}: errors = {_short(errors)}: must be an object")
    for name, error in errors.items():
        needed = ("rows", "median", "p90", "worst")
        if not (isinstance(error, dict) and all(_within(error.get(key), 0, math.inf) for key in needed)):
            raise ProfileError(f"{where}: errors: {name} = {_short(error)}: must give {', '.join(needed)}: numbers of 0 or more")
    for name in ("gpu", "model", "origin", "digest"):
        if not isinstance(notes.get(name, ""), str):
            raise ProfileError(f"{where}: {name} = {_short(notes[name])}: must be text")
    if "waves" in notes and not (isinstance(notes["waves"], dict) and {"on", "evidence"} <= set(notes["waves"])):
        raise ProfileError(f"{where}: waves = {_short(notes['waves'])}: must give on and evidence")


def analytic_coefficients(gpu: GpuSpec) -> DeviceCoefficients:
    """For a GPU without a profile: data-sheet peaks, the efficiencies fitted on the nearest silicon (``GpuSpec.silicon``), and a
    label that says whose."""
    fitted = DeviceCoefficients.from_json(PROFILES / gpu.silicon / "llama-3.1-8b" / "fit.json")
    return dataclasses.replace(
        fitted, source=f"analytic, {gpu.silicon}'s efficiencies",
        notes={"basis": f"data sheet of {gpu.name} ({gpu.source}); efficiencies, overheads and SM curves as fitted on "
                        f"{gpu.silicon}: not measured on this GPU"})
