"""What ``bullet-profile show`` prints: of a profile coefficients with their units, errors by family, and what is assumed; of a
table its rows by version and operation, or a value between measured points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bullet.catalog.gpus import GPUS
from bullet.config import DeviceConfig
from bullet.devices import profile_folder
from bullet.devices.coefficients import DeviceCoefficients
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import load_fitted
from bullet.devices.lookup import lookup
from bullet.errors import ProfileError
from bullet.profiles.check import DEVICES, check_samples
from bullet.profiles.rows import Row
from bullet.profiles.source_page import TITLES

FAMILY_OF = (("gemm", "gemm"), ("rowwise", "rowwise"), ("prefill_attention", "prefill_attention"),
             ("decode_attention", "decode_attention"), ("link", "all_reduce"), ("all_reduce", "all_reduce"),
             ("bandwidth", "bandwidth_against_sms"), ("rate", "rate_against_sms"))
"""How a coefficient's name begins -> its family. The longer beginnings first."""
UNITS = {"gemm_bandwidth": "memory", "decode_attention_bandwidth": "memory", "rowwise_bandwidth": "memory",
         "prefill_attention_efficiency": "peak", "prefill_attention_extra_keys": "keys a query row", "link_efficiency": "link",
         "rate_slope": "1 + slope x idle share of the SMs", "rate_cap": "times the rate with all SMs busy, at most",
         "bandwidth_knee": "of the SMs", "bandwidth_sharpness": "", "contention_loss": "of the co-runner's share of bandwidth"}
"""Coefficient -> its unit; names in ``_s`` are seconds, shown in microseconds."""


def shipped_lines(gpu: str, model: str) -> list[str]:
    """A GPU's device for a model as one page of text, and the folder that holds it."""
    device = load_fitted(DeviceConfig(gpu=gpu, model=model))
    lines, folder = profile_lines(device), profile_folder(device.gpu, device.model)
    if folder.is_dir():
        lines += ["", f"{folder}: fit.json holds these numbers, SOURCE.md their sources, samples.parquet the rows"]
    return lines


def table_lines(path: Path, rows: Sequence[Row], *, version: str | None = None, op: str | None = None,
                point: Mapping[str, int] | None = None, sms: int | None = None) -> list[str]:
    """A table's rows, those of ``version`` alone if given; with ``op`` its seconds at a ``point``, see :func:`lookup`."""
    if version is not None:
        versions = sorted({str(r["origin_version"]) for r in rows})
        if version not in versions:
            raise ProfileError(f"{path}: no rows of {version!r}: it has {', '.join(versions)}")
        rows = [r for r in rows if r["origin_version"] == version]
    if op is None:
        return listing(rows)
    names, point = sorted({r["gpu"] for r in rows}), point or {}
    if all(name in DEVICES or name.removeprefix("simulated ") in GPUS for name in names):
        check_samples(rows)  # what a fit refuses answers no question either
    elif len(names) > 1:
        raise ProfileError(f"{path}: measured on {', '.join(names)}: one device a table")
    seconds = lookup(rows, op, point, sms=sms)
    return [f"{op} at {', '.join(f'{k} {v}' for k, v in point.items())}: {seconds * 1e6:.2f} us, {rows[0]['source']}, "
            "linear between measured points"]


def listing(rows: Sequence[Row]) -> list[str]:
    """Rows by version and operation, with their range of tokens."""
    counts = Counter((r["origin_version"] or r["source"], r["op"], r["kind"]) for r in rows)
    lines = [f"{'from':<24} {'operation':<20} {'kind':<8} {'rows':>6}  tokens"]
    for (version, op, kind), number in sorted(counts.items()):
        tokens = [r["tokens"] for r in rows if (r["origin_version"] or r["source"], r["op"]) == (version, op)
                  and r["tokens"] is not None]
        lines.append(f"{version:<24} {op:<20} {kind:<8} {number:>6}  {f'{min(tokens)} to {max(tokens)}' if tokens else '-'}")
    return lines


def profile_lines(device: DeviceModel) -> list[str]:
    """A device as one page of text."""
    c, notes = device.coefficients, device.coefficients.notes
    parameters = f", {notes['parameters']} parameters" if "parameters" in notes else ""
    lines = [f"{device.gpu.name}, {device.model.name}: {device.source}{parameters}"]
    if "basis" in notes:
        lines.append(notes["basis"])
    lines += ["", f"{'coefficient':<36}{'value':>10}  {'unit':<44}fitted on"]
    lines += coefficient_lines(c, {"peak": f"of {device.gpu.peak_flops / 1e12:.4g} TFLOPS",
                                   "memory": f"of {device.gpu.mem_bytes_per_s / 1e9:,.0f} GB/s",
                                   "link": f"of {device.gpu.link_bytes_per_s / 1e9:,.0f} GB/s"})
    if notes.get("assumed"):
        lines += ["", "assumed, or taken from elsewhere: no measured row", *(f"  {text}" for text in notes["assumed"])]
    if "waves" in notes:
        waves = notes["waves"]
        lines += ["", f"waves: {'on' if waves['on'] else 'off'}; the rows left out are {waves['evidence']} them"]
    if notes.get("errors"):
        lines += ["", *error_lines(notes["errors"])]
    return lines


def coefficient_lines(c: DeviceCoefficients, units: Mapping[str, str]) -> list[str]:
    """One line a coefficient: value, unit, and the source of its family, or that it is assumed. ``units``: the GPU's own."""
    on = c.notes.get("fitted_on", {})
    rows: list[tuple[str, float, str, str]] = [
        (f"gemm_tile {r} x {n}", efficiency, units["peak"], "gemm_tiles") for r, n, efficiency in c.gemm_tiles]
    for name in (*sorted(n for n in vars(c) if n.startswith("gemm_") and n != "gemm_tiles"), "rowwise_bandwidth",
                 "rowwise_overhead_s", *sorted(n for n in vars(c) if "_attention_" in n), "link_efficiency",
                 "all_reduce_overhead_s", "rate_slope", "rate_cap", "bandwidth_knee", "bandwidth_sharpness", "contention_loss",
                 "host_gap_s"):
        value, unit = getattr(c, name), UNITS.get(name, "")
        if isinstance(value, Mapping):
            rows += [(f"{name} {kernel}", share, units[unit], name) for kernel, share in sorted(value.items())]
        elif name.endswith("_s"):
            rows.append((name, value * 1e6, "us", name))
        else:
            rows.append((name, value, units.get(unit, unit), name))
    lines = []
    for label, number, unit, name in rows:
        family = next((family for start, family in FAMILY_OF if name.startswith(start)), "contention")
        source = on.get("sm_axis" if family.endswith("_against_sms") else family, "assumed")
        if any(text.startswith((name, label.rpartition(" ")[2] + " ")) for text in c.notes.get("assumed", ())):
            source = "assumed"
        lines.append(f"{label:<36}{number:>10.4g}  {unit:<44}{source}")
    return lines


def error_lines(errors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Errors of a profile as a table, by family."""
    lines = [f"{'relative error of seconds':<52}{'rows':>7}{'median %':>10}{'P90 %':>8}{'worst %':>9}"]
    family = ""
    for name, e in sorted(errors.items(), key=lambda item: _group(item[0])):
        if (now := _group(name)[1]) != family:
            family = now
            lines.append(family)
        lines.append(f"  {name.replace(':', ', ').replace('_', ' '):<50}{e['rows']:>7}"
                     + "".join(f"{100 * e[key]:>{width}.1f}" for key, width in (("median", 10), ("p90", 8), ("worst", 9))))
    return lines


def _group(name: str) -> tuple[int, str, str]:
    """Order and title of the family that an error belongs to."""
    families = ("gemm", "rowwise", "prefill_attention", "decode_attention", "all_reduce")
    if "sms" in name or "stretch" in name or name.startswith("sm_axis"):
        return len(families), "against SMs", name
    for i, family in enumerate(families):
        if name.startswith(family):
            return i, TITLES[family], name
    if "_layer_" in name:
        return len(families) + 2, "whole layers, the sum of their kernels: nothing fitted to them", name
    return len(families) + 1, TITLES["contention"], name
