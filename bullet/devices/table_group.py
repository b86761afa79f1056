"""Tables of a tensor-parallel shard: the all-reduce between its GPUs, which no table of one GPU holds.

Measured where the profile's samples time it for as many GPUs (messages of the step's hidden states, linear in their bytes); else
the fit's form, bytes over the link and an overhead, and the device's label says so.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bullet.devices.fitted import DeviceModel, reduced_over
from bullet.devices.table import ALL_REDUCE, KernelTables
from bullet.parquet import read_table
from bullet.work import all_reduce_bytes

COLUMNS = ("op", "kind", "num_gpus", "message_bytes", "origin_version", "median_s")
ANALYTIC_TOKENS = 1 << 20
"""Beyond any step: the form is a straight line."""


def with_all_reduce(tables: KernelTables, fit: DeviceModel, samples: Path) -> KernelTables:
    """The tables with seconds of one all-reduce over a step's tokens. ``fit``: of the same model and group. ``samples``: of the
    profile, where there are any."""
    gpus, token_bytes = tables.tensor_parallel, fit.model.hidden_size * fit.model.dtype_bytes
    rows = read_table(samples, "samples", COLUMNS)[0].to_pylist() if samples.is_file() else []
    measured = measured_curve(rows, gpus, fit.coefficients.notes.get("fitted_on", {}).get(ALL_REDUCE))
    if measured is not None:
        sizes, seconds, whose = measured
        return _with(tables, np.array(sizes) / token_bytes, np.array(seconds), f"all-reduce of {gpus} GPUs by {whose}")
    c, link = fit.coefficients, fit.gpu.link or "PCIe"
    speed, _ = reduced_over(fit.gpu, gpus)
    token_s = all_reduce_bytes(fit.model, 1, gpus) / 2 / (speed * c.link_efficiency)
    counts = np.array([0.0, ANALYTIC_TOKENS])
    return _with(tables, counts, c.all_reduce_overhead_s + token_s * counts,
                 f"all-reduce of {gpus} GPUs not measured: {c.link_efficiency:.2g} of {speed / 1e9:g} GB/s ({link}) and "
                 f"{c.all_reduce_overhead_s * 1e6:.3g} us, the form of '{c.source}'")


def measured_curve(rows: Sequence[Mapping[str, Any]], gpus: int, preferred: str | None
                   ) -> tuple[list[float], list[float], str] | None:
    """Message bytes, ascending, and seconds of one source: the ``preferred``, else that of most rows."""
    own: dict[str, dict[float, list[float]]] = {}
    for r in rows:
        if r["op"] == ALL_REDUCE and r["kind"] == "solo" and r["num_gpus"] == gpus:
            own.setdefault(r["origin_version"] or "this project", {}).setdefault(r["message_bytes"], []).append(r["median_s"])
    if not own:
        return None
    whose = preferred if preferred in own else max(sorted(own), key=lambda name: len(own[name]))
    sizes = sorted(own[whose])
    return sizes, [statistics.median(own[whose][size]) for size in sizes], whose


def _with(tables: KernelTables, counts: np.ndarray, seconds: np.ndarray, said: str) -> KernelTables:
    return dataclasses.replace(tables, dense={**tables.dense, ALL_REDUCE: (counts, seconds)},
                               beside="; ".join(part for part in (tables.beside, said) if part))
