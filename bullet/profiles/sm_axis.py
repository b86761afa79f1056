"""Rate and bandwidth against SMs by single kernels or published steps: what the whole device cannot show.

The SM axis comes from a sweep's whole layers (:mod:`bullet.profiles.layer_axis`), else from a table's own kernels on fewer SMs,
else from published sweeps that state no licence: those are read in place (``--sm-data DIR``), and nothing but coefficients and
errors leaves this module.

* MuxServe (A100, MPS shares, whole steps of llama-7b and 13b): the curves are fitted on 7b and checked on 13b.
* greenctx (H100, green contexts, single kernels): fitted on every other shape, checked on the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bullet import work
from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.devices.coefficients import DeviceCoefficients
from bullet.devices.fitted import DeviceModel
from bullet.devices.terms import Blocks
from bullet.errors import ProfileError
from bullet.profiles import forms
from bullet.profiles.forms import Array, FitError
from bullet.profiles.importers.reading import read_columns, seconds, text, whole
from bullet.profiles.rows import Row
from bullet.units import MICRO, MILLI

AXIS = ("rate_slope", "rate_cap", "bandwidth_knee", "bandwidth_sharpness")
FLAT = {"rate_slope": 0.0, "rate_cap": 1.0, "bandwidth_knee": 1.0, "bandwidth_sharpness": 1.0}
"""A device of which nothing is known below all its SMs."""
Errors = dict[str, dict[str, float]]

# ----------------------------------------------------------------------------------- MuxServe: whole steps, A100

MUXSERVE = "muxserve_a100_80gb_mps_sweep_7b_13b_tp1.csv.gz"
# What MuxServe ran: multi-head attention, no GQA (public config.json of each).
SWEPT = {"7b": ModelSpec("llama-7b", 32, 4096, 11008, 32, 32, 128, 32000, 2048),
         "13b": ModelSpec("llama-13b", 40, 5120, 13824, 40, 40, 128, 32000, 2048)}
PERCENTS = (30, 40, 50, 60, 70, 80, 90)
Sweep = dict[tuple[int, ...], dict[int, float]]
"""Shape -> SMs (MuxServe: percent of them) -> seconds."""


def muxserve(folder: Path, size: str, phase: str) -> Sweep:
    """(batch, sequence length) that MuxServe measured at every share of SMs."""
    path, found = folder / MUXSERVE, Sweep()
    for i, raw in enumerate(read_columns(path, ("model", "batch_size", "seq_len", "mps_sm_percent", f"{phase}_ms"))):
        if text(raw, "model", path, i).endswith("-" + size) and raw[f"{phase}_ms"] != "-1.0":  # not measured
            batch, length, percent = (whole(raw, name, path, i) for name in ("batch_size", "seq_len", "mps_sm_percent"))
            found.setdefault((batch, length), {})[percent] = seconds(raw, f"{phase}_ms", path, i, MILLI)
    complete = {shape: times for shape, times in sorted(found.items()) if {*PERCENTS, 100} <= times.keys()}
    if not complete:
        raise ProfileError(f"{path}: no {phase} of {size} was measured at every share of SMs")
    return complete


def attention_bandwidth(decode: Sweep) -> Array:
    """KV bandwidth at each share relative to all SMs: a long context's step less a short one's, same batch.

    The difference is attention alone: weights, sampling and the host's time cancel.
    """
    relative = []
    for batch in sorted({b for b, _ in decode if b >= 32}):  # below, the difference is a millisecond and rounding shows
        lengths = sorted(length for b, length in decode if b == batch)
        more = {p: decode[batch, lengths[-1]][p] - decode[batch, lengths[0]][p] for p in (*PERCENTS, 100)}
        if min(more.values()) <= 0:
            raise ProfileError(f"{MUXSERVE}: batch {batch}: a decode of longer contexts takes no longer: which the bandwidth is "
                               "taken from")
        relative.append([more[100] / more[p] for p in PERCENTS])
    middle: Array = np.median(np.array(relative), axis=0)
    return middle


def stretch_of(device: DeviceModel, shapes: Sequence[tuple[int, ...]], decode: bool = False) -> Array:
    """Simulated seconds at each share relative to all SMs; shape (shapes, shares)."""
    n, rows = device.num_sms, []
    for batch, length in shapes:
        step = (device.decode_work(batch, batch * (length + 1)) if decode
                else device.prefill_work([(length, 0)] * batch, device.model.num_layers, logits_seqs=batch))
        rows.append([device.solo_seconds(step, round(n * p / 100)) / device.solo_seconds(step, n) for p in PERCENTS])
    return np.array(rows)


def measured_stretch(times: Sweep) -> Array:
    """As :func:`stretch_of`."""
    return np.array([[t[p] / t[100] for p in PERCENTS] for t in times.values()])


def axis_of_steps(folder: Path, gpu: GpuSpec, alone: DeviceCoefficients) -> tuple[dict[str, float], Errors]:
    """The four coefficients from MuxServe's 7B, checked on its 13B.

    Bandwidth comes from attention's own reads: a copy kernel (LithOS reproduction) draws more on few SMs than serving's
    kernels do, and its error is given beside.
    """
    share = np.array(PERCENTS) / 100
    decode = {size: muxserve(folder, size, "decode") for size in SWEPT}
    # Prefills under 2,048 tokens sit on the host's floor of 13-14 ms; above it launches run ahead of the device.
    prefill = {size: {k: v for k, v in muxserve(folder, size, "prefill").items() if k[0] * k[1] >= 2048} for size in SWEPT}
    knee, sharpness = (round(float(x), 6) for x in forms.fit_bandwidth_curve(share, attention_bandwidth(decode["7b"])))
    curved = dataclasses.replace(alone, bandwidth_knee=knee, bandwidth_sharpness=sharpness)

    def device(size: str, coefficients: DeviceCoefficients) -> DeviceModel:
        return DeviceModel(SWEPT[size], gpu, coefficients)

    def stretch(slope: float, cap: float) -> Array:
        trial = device("7b", dataclasses.replace(curved, rate_slope=slope, rate_cap=cap))
        middle: Array = np.median(stretch_of(trial, list(prefill["7b"])), axis=0)
        return middle

    slope, cap = (round(float(x), 6) for x in
                  forms.fit_rate_curve(stretch, np.median(measured_stretch(prefill["7b"]), axis=0)))
    whole = dataclasses.replace(curved, rate_slope=slope, rate_cap=cap)
    errors: Errors = {}
    for size, label in (("7b", "fitted"), ("13b", "left_out")):
        errors[f"attention_bandwidth_against_sms_{label}:{size}"] = FitError.of(
            forms.bandwidth_curve(share, knee, sharpness), attention_bandwidth(decode[size])).as_dict()
        errors[f"prefill_stretch_{label}:{size}"] = FitError.of(
            stretch_of(device(size, whole), list(prefill[size])).ravel(), measured_stretch(prefill[size]).ravel()).as_dict()
        seen = "partly_seen" if size == "7b" else "left_out"
        errors[f"decode_step_stretch_{seen}:{size}"] = FitError.of(
            stretch_of(device(size, whole), list(decode[size]), True).ravel(),
            measured_stretch(decode[size]).ravel()).as_dict()
    copied = _copy_kernel(folder / "lithos_repro_a100_pcie_tpc_sweep.csv", gpu.num_sms)
    errors["bandwidth_against_sms_of_a_copy_kernel_unfitted"] = FitError.of(
        forms.bandwidth_curve(np.array([n / gpu.num_sms for n in sorted(copied)]), knee, sharpness),
        np.array([copied[gpu.num_sms] / copied[n] for n in sorted(copied)])).as_dict()
    return {"rate_slope": slope, "rate_cap": cap, "bandwidth_knee": knee, "bandwidth_sharpness": sharpness}, errors


def _copy_kernel(path: Path, sms: int) -> dict[int, float]:
    table = read_columns(path, ("op_index_aligned", "sm_count", "ema_us_at_seen151"))
    found = {whole(raw, "sm_count", path, i): seconds(raw, "ema_us_at_seen151", path, i, MICRO) for i, raw in enumerate(table)
             if raw["op_index_aligned"] == "18"}
    if sms not in found:
        raise ProfileError(f"{path}: operation 18 was not measured on all {sms} SMs")
    return found


# ----------------------------------------------------------------------------------------- single kernels


def greenctx(folder: Path) -> dict[str, Sweep]:
    """H100, green contexts, Llama-3-8B shapes: ``gemm`` (m, n, k), ``decode_attention`` (batch, context),
    ``prefill_attention`` (tokens; not causal). Shapes measured at every SM count; milliseconds in the files."""
    sweeps: dict[str, Sweep] = {"gemm": {}, "decode_attention": {}, "prefill_attention": {}}
    for (op, found), kind, names in zip(sweeps.items(), ("matmul", "flash_attn_decode", "flash_attn_prefill"), (
            ("num_tokens", "matrix_shape"), ("batch_size", "context_size"), ("prefill_size",)), strict=True):
        path = folder / f"greenctx_h100_{kind}.csv"
        for i, raw in enumerate(read_columns(path, (*names, "SM_count", "milliseconds"))):
            if "error" in text(raw, "milliseconds", path, i):  # cells with "cublas error"
                continue
            sizes = [whole(raw, name, path, i) for name in names if name != "matrix_shape"]
            if op == "gemm":
                sides = dict(zip(("columns", "rows"), reversed(raw["matrix_shape"].split(" x ")), strict=False))
                sizes += [whole(sides, side, path, i) for side in ("columns", "rows")]
            found.setdefault(tuple(sizes), {})[whole(raw, "SM_count", path, i)] = seconds(raw, "milliseconds", path, i, MILLI)
    return {op: {shape: times for shape, times in sorted(found.items()) if 132 in times} for op, found in sweeps.items()}


def on_unknown_sms(row: Row) -> bool:
    """Of a partition that was not proven: it may have run on any SMs."""
    return row["partition"] == "unproven" and bool(row["sms"] != row["device_sms"])


def sweeps_of(rows: Sequence[Row]) -> dict[str, Sweep]:
    """The same from a table's own rows: alone, on fewer SMs than all, and on all."""
    sweeps: dict[str, Sweep] = {"gemm": {}, "decode_attention": {}, "prefill_attention": {}}
    whole = 0
    for row in rows:
        if row["kind"] != "solo" or row["drift_ok"] is False or on_unknown_sms(row):
            continue
        whole = row["device_sms"]
        if row["op"].startswith("gemm"):
            op, shape = "gemm", (row["tokens"], row["columns"], row["inner"])
        elif row["op"] == "decode_attention":
            op, shape = row["op"], (row["batch"], row["context_tokens"])
        elif row["op"] == "prefill_attention" and not row["context_tokens"] and row["batch"] == 1:
            op, shape = row["op"], (row["tokens"],)
        else:
            continue
        sweeps[op].setdefault(shape, {})[row["sms"]] = row["median_s"]
    return {op: {s: t for s, t in sorted(found.items()) if whole in t and len(t) > 1} for op, found in sweeps.items()}


class KernelsOnSms:
    """Stretch (seconds over those on all SMs) of the sweep's kernels under trial coefficients: one array operation."""

    def __init__(self, sweeps: Mapping[str, Sweep], device: DeviceModel) -> None:
        self.n = n = device.num_sms
        terms: list[tuple[str, tuple[tuple[Blocks, ...], float], float, int, float]] = []
        for op, sweep in sweeps.items():
            for shape, times in sweep.items():
                term, overhead_s = _terms(op, shape, device)
                terms += [(op, term, overhead_s, p, s / times[n]) for p, s in sorted(times.items()) if p < n]
        self.op = np.array([t[0] for t in terms])
        most = max((len(t[1][0]) for t in terms), default=1)
        padded = [[*t[1][0], *[(math.inf, 1)] * (most - len(t[1][0]))] for t in terms]
        #: Of each tile, then row.
        self.block_s, self.blocks = (np.array([[tile[i] for tile in tiles] for tiles in padded], dtype=float).reshape(-1, most).T
                                     for i in range(2))
        self.moved_s = np.array([t[1][1] for t in terms])
        self.overhead_s = np.array([t[2] for t in terms])
        self.sms = np.array([t[3] for t in terms], dtype=float)
        self.measured = np.array([t[4] for t in terms])

    def seconds(self, sms: Any, axis: Array, waves: bool = True) -> Array:
        """``axis``: slope, cap, knee, sharpness, and a launch inside the measurement (never shipped)."""
        slope, cap, knee, sharpness, launch_s = axis
        share = sms / self.n
        if waves:
            rounds = np.ceil(self.blocks / sms)  # the rate is that on the most SMs with as many, see bullet/devices/terms.py
            most = np.where(rounds > 1, np.ceil(self.blocks / np.maximum(rounds - 1, 1)) - 1, self.n)
            busy = np.minimum(most, self.n) / self.n
        else:
            rounds, busy = np.maximum(np.minimum(self.blocks, 1.0), self.blocks / sms), share
        rate = np.minimum(cap, 1 + slope * (1 - busy))
        bandwidth = forms.bandwidth_curve(np.asarray(share), knee, sharpness)
        compute_s = (rounds * self.block_s / rate).min(axis=0)
        seconds: Array = np.maximum(compute_s, self.moved_s / bandwidth) + self.overhead_s + launch_s
        return seconds

    def stretch(self, axis: Array, waves: bool = True) -> Array:
        """Relative to all SMs."""
        stretch: Array = self.seconds(self.sms, axis, waves) / self.seconds(np.full_like(self.sms, self.n), axis, waves)
        return stretch

    def fit(self, waves: bool = True) -> Array:
        """The five of :meth:`seconds`."""
        if len(self.measured) < 10:
            raise ProfileError(f"SM axis: {len(self.measured)} rows on fewer SMs than all, at least 10 are needed to fit 5 "
                               "parameters and test them")
        # The rate's slope and cap trade places: three starts, the best kept.
        found = [forms.search(lambda a: np.log(self.stretch(a, waves) / self.measured), (slope, cap, 0.35, 3.0, 1e-5),
                            (0.0, 1.0, 0.02, 0.5, 0.0), (2.0, 2.0, 1.0, 20.0, 4e-5), (0.005, 0.005, 0.005, 0.05, 2e-7))
                 for slope, cap in ((0.4, 1.3), (0.6, 1.15), (0.2, 2.0))]
        return min(found, key=lambda a: round(float(np.mean(np.abs(np.log(self.stretch(a, waves) / self.measured)))), 9))


def _terms(op: str, shape: tuple[int, ...], device: DeviceModel) -> tuple[tuple[tuple[Blocks, ...], float], float]:
    """Tiles with seconds of bytes, and overhead, of one kernel, as the device has it."""
    c, model = device.coefficients, device.model
    if op == "gemm":
        tiles, moved_s = device.gemm_term(work.gemm("g", *shape, model.dtype_bytes))
        return (tiles.choices, moved_s), c.gemm_overhead_s
    if op == "decode_attention":
        moved = work.decode_attention(model, shape[0], shape[0] * shape[1]).bytes
        return ((((c.decode_attention_seq_s, device.num_sms * shape[0]),),
                 moved / (device.gpu.mem_bytes_per_s * c.decode_attention_bandwidth)), c.decode_attention_overhead_s)
    step = device.prefill_work([(shape[0], 0)], 1, logits_seqs=0)
    ((block_s, blocks, moved_s),) = step.attention
    return (((block_s, blocks),), moved_s), c.prefill_attention_overhead_s


def axis_of_kernels(sweeps: Mapping[str, Sweep], device: DeviceModel) -> tuple[dict[str, float], Errors]:
    """The four coefficients; errors of a fit on every other shape, on the others, with waves and without."""
    halves = [{op: dict(list(sweep.items())[i::2]) for op, sweep in sweeps.items()} for i in (0, 1)]
    seen, unseen = (KernelsOnSms(half, device) for half in halves)
    errors: Errors = {}
    for label, waves in (("sm_axis_left_out", True), ("sm_axis_left_out_without_waves", False)):
        off = unseen.stretch(seen.fit(waves), waves)
        for op in (*sweeps, "all"):
            keep = (unseen.op == op) | (op == "all")
            if keep.any():
                errors[f"{label}:{op}"] = FitError.of(off[keep], unseen.measured[keep]).as_dict()
    found = KernelsOnSms(sweeps, device).fit()
    return {name: round(float(x), 6) for name, x in zip(AXIS, found, strict=False)}, errors
