"""Public tables of kernels, each timed alone, as the table device reads them (:mod:`bullet.devices.table`).

The RTX 4090's tables come from one engine and hold every kernel of a step. Those of A100 and H100 (``samples.parquet``) hold
each kernel that their publishers timed; what they lack is taken from the fit beside them (``fit.json``) and said by name in
the device's label, which runs and reports carry:

- a GEMM of a shape that was not timed: linear between the two timed shapes around it, else the fit (the LM head);
- elementwise kernels without rows: the fit;
- attention of a prompt to its own earlier chunks: the measured time without them, and the fit's difference;
- a batch of both kinds: prefill alone and decode alone, one after the other;
- the sampler: not counted.

Each family is read from the source that the fit chose.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.devices.coefficients import DeviceCoefficients, lent
from bullet.devices.fitted import DeviceModel
from bullet.devices.table import Curve, KernelTables
from bullet.errors import ProfileError
from bullet.parquet import read_table
from bullet.work import KernelWork, dense_kernels, embedding_bytes, head_kernels

GEMMS: Mapping[str, str] = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down"}
ROWS: Mapping[str, str] = {"layernorm": "norm", "rotary_emb": "rope", "act_fn": "act", "embedding": "embedding",
                           "final_layernorm": "norm"}
"""The table device's name of a kernel -> ours."""
PASTS = (0, 256, 1024, 4096, 16384, 65536, 131072)
"""Earlier tokens at which the fit's difference is laid into the grid: it is linear, but where bytes take over from operations."""
MOST_REQUESTS = 2048
COLUMNS = ("op", "kind", "corunner", "sms", "device_sms", "tokens", "batch", "context_tokens", "columns", "inner", "heads",
           "kv_heads", "head_dim", "origin_version", "median_s")

Rows = Sequence[Mapping[str, Any]]


def read_samples(path: Path, model: ModelSpec, gpu: GpuSpec, coefficients: DeviceCoefficients) -> KernelTables:
    """A profile's samples; :class:`ProfileError` names the file if it cannot be read."""
    return tables_of(read_table(path, "samples", COLUMNS)[0].to_pylist(), model, gpu, coefficients, str(path))


def tables_of(rows: Rows, model: ModelSpec, gpu: GpuSpec, coefficients: DeviceCoefficients, where: str) -> KernelTables:
    """All kernels of a step. Attention must be measured; :class:`ProfileError` says which rows are missing."""
    fitted_on = coefficients.notes.get("fitted_on", {})
    fit = DeviceModel(model, gpu, coefficients)
    alone = [r for r in rows if r["kind"] == "solo" and r["corunner"] == "idle" and r["sms"] == r["device_sms"]]
    measured: dict[str, list[str]] = {}  # source -> what
    from_fit = ["LM head", "attention to earlier chunks"]
    whose = lent(coefficients.notes.get("assumed", ())).get("rowwise")

    def of(family: str, *ops: str) -> Rows:
        found = [r for r in alone if r["op"] in ops and r["origin_version"] == fitted_on.get(family)]
        if found:
            measured.setdefault(fitted_on[family], []).append(family.replace("_", " "))
        return found

    gemms = of("gemm", "gemm", *(f"gemm_{name}" for name in GEMMS.values()), "gemm_lm_head")
    if not gemms:
        raise ProfileError(f"{where}: no rows of GEMMs of {fitted_on.get('gemm')!r}, on which its fit.json was fitted")
    longest = max(int(r["tokens"]) for r in gemms)
    heads, gemms = ([r for r in gemms if (r["op"] == "gemm_lm_head") == head] for head in (True, False))
    kernels = {k.name: k for k in dense_kernels(model, 1)}
    dense: dict[str, Curve] = {}
    between: list[str] = []
    for name, ours in GEMMS.items():
        dense[name], how = gemm_curve(gemms, kernels[ours].columns, kernels[ours].k)
        between += [f"{ours} {how}"] if how else []
    rowwise = of("rowwise", *ROWS.values())
    for name, ours in ROWS.items():
        own = [r for r in rowwise if r["op"] == ours]
        if own:
            dense[name] = curve(own)
        else:
            moved = embedding_bytes(model, 1) if ours == "embedding" else kernels[ours].bytes
            ends = [fit.kernel_seconds([KernelWork(ours, 0.0, moved * n, n)]) for n in (1, longest)]
            dense[name] = (np.array([1.0, longest]), np.array(ends))
            from_fit.append(ours + (f" ({whose})" if whose else ""))
    lm_head: Curve
    if heads:
        lm_head = curve(heads)
        from_fit.remove("LM head")
    else:
        counts = range(1, MOST_REQUESTS + 1)
        lm_head = np.array(counts, dtype=float), np.array([fit.kernel_seconds(head_kernels(model, n)[1:]) for n in counts])
    axes, grid = attention_grid(of("prefill_attention", "prefill_attention"), of("decode_attention", "decode_attention"),
                                model, fit, where)
    source = ", ".join(f"{', '.join(what)} by {name}" for name, what in measured.items())
    beside = "; ".join([*between, f"from the fit: {', '.join(dict.fromkeys(from_fit))}", "mixed attention as prefill + decode",
                        "no sampler"])
    return KernelTables(source, dense, {"lm_head": lm_head, "sampler": (lm_head[0], np.zeros(len(lm_head[0])))}, axes, grid,
                        beside)


def curve(rows: Rows) -> Curve:
    """Seconds over tokens; repeats as their median."""
    found: dict[int, list[float]] = {}
    for r in rows:
        found.setdefault(int(r["tokens"]), []).append(float(r["median_s"]))
    counts = sorted(found)
    return np.array(counts, dtype=float), np.array([statistics.median(found[n]) for n in counts])


def gemm_curve(rows: Rows, columns: int, inner: int) -> tuple[Curve, str]:
    """A shape's own rows; else linear between the nearest shapes that differ from it in one size alone. And how, in words.

    Nothing beyond the largest or below the smallest: :class:`ProfileError`.
    """
    own = [r for r in rows if (r["columns"], r["inner"]) == (columns, inner)]
    if own:
        return curve(own), ""
    for size, value, other, fixed in (("columns", columns, "inner", inner), ("inner", inner, "columns", columns)):
        sizes = sorted({int(r[size]) for r in rows if r[other] == fixed})
        below, above = [s for s in sizes if s < value], [s for s in sizes if s > value]
        if below and above:
            low, high = below[-1], above[0]
            ends = [curve([r for r in rows if (r[size], r[other]) == (s, fixed)]) for s in (low, high)]
            counts = np.array(sorted(set(ends[0][0]) & set(ends[1][0])))
            at = [end[1][np.searchsorted(end[0], counts)] for end in ends]
            right = (value - low) / (high - low)
            return (counts, (1 - right) * at[0] + right * at[1]), f"between {low} and {high} {size}"
    raise ProfileError(f"no rows of a GEMM of {columns} columns and an inner size of {inner}, nor of shapes around it")


def attention_grid(prefill: Rows, decode: Rows, model: ModelSpec, fit: DeviceModel,
                   where: str) -> tuple[tuple[NDArray[np.float64], ...], NDArray[np.float64]]:
    """The four axes of the table device and one layer's seconds: prefill alone + decode alone, NaN where not measured."""
    def of_model(rows: Rows, what: str) -> Rows:
        shape = (model.num_heads, model.num_kv_heads, model.head_dim)
        found = [r for r in rows if (r["heads"], r["kv_heads"], r["head_dim"]) == shape]
        if not found:
            raise ProfileError(f"{where}: no rows of {what} with {model.num_heads} heads and {model.num_kv_heads} KV heads")
        return found

    once = [r for r in of_model(prefill, "prefill attention") if r["batch"] == 1 and r["context_tokens"] == 0]
    lengths, alone_s = curve(once)
    pasts = np.array([p for p in PASTS if p <= model.context_tokens], dtype=float)
    table: dict[tuple[int, int], list[float]] = {}
    for r in of_model(decode, "decode attention"):
        table.setdefault((int(r["batch"]), int(r["context_tokens"]) - 1), []).append(float(r["median_s"]))
    batches, contexts = (sorted({key[i] for key in table}) for i in (0, 1))
    axes = tuple(np.array([0.0, *values]) for values in (lengths, pasts[1:], batches, contexts))
    grid = np.full([len(axis) for axis in axes], np.nan)
    chunks = np.zeros((len(lengths) + 1, len(pasts)))
    chunks[1:] = alone_s[:, None] + _later(fit, lengths, pasts)
    grid[1:, :, 0, 0] = chunks[1:]
    for (batch, context), seconds in table.items():
        at = batches.index(batch) + 1, contexts.index(context) + 1
        grid[:, :, at[0], at[1]] = chunks + statistics.median(seconds)
    return axes, grid


def _later(fit: DeviceModel, lengths: NDArray[np.float64], pasts: NDArray[np.float64]) -> NDArray[np.float64]:
    """What earlier tokens add to a chunk's attention by the fit, seconds a layer, (lengths, pasts)."""
    def seconds(new: float, past: float) -> float:
        return fit.solo_seconds(fit.prefill_work([(int(new), int(past))], 1, logits_seqs=0), fit.num_sms)

    return np.array([[seconds(new, past) - seconds(new, 0) for past in pasts] for new in lengths])
