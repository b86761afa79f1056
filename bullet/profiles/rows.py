"""Measured samples: one tidy table, a row a (shape, lane, co-runner), provenance on every row.

While a sweep runs, its rows go to a journal (:mod:`bullet.profiles.journal`). At the end :func:`finalise` adds what needs all
rows (drift, slow-down) and :func:`write_parquet` writes the table.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bullet.errors import ProfileError, short
from bullet.parquet import read_table, write_table

SCHEMA = "bullet-samples"
SCHEMA_VERSION = 1
DRIFT_LIMIT = 0.05
"""A row between anchors further than this from the run's median anchor is marked, and left out of slow-downs."""

COLUMNS: Mapping[str, tuple[str, str]] = {
    # What was measured
    "id": ("str", "key of the measurement: same key, same measurement; resuming goes by it"),
    "kind": ("str", "solo | corun | control | anchor"),
    "tier": ("str", "part of the plan that asked for it"),
    "op": ("str", "operation timed: gemm_* of the model's shapes, gemm (any other shape), prefill_attention, decode_attention, "
                  "mixed_attention, norm, rope, act, embedding, sampler, copy, all_reduce, *_layer; cudnn_prefill_attention; "
                  "paged_decode_attention and own_* (our kernels), engine_* (our engine)"),
    "phase": ("str", "prefill | decode | mixed | either"),
    "tokens": ("int", "new tokens over the whole batch (rows of a GEMM)"),
    "batch": ("int", "sequences"),
    "context_tokens": ("int", "per sequence: past tokens (prefill) or tokens attended (decode)"),
    "decode_seqs": ("int", "mixed_attention: sequences that decode in the same kernel; null otherwise"),
    "decode_context_tokens": ("int", "mixed_attention: tokens attended per decoding sequence"),
    "columns": ("int", "GEMM: columns of the result"),
    "inner": ("int", "GEMM: inner size"),
    "heads": ("int", "attention: query heads"),
    "kv_heads": ("int", "attention: KV heads"),
    "head_dim": ("int", "attention: size of a head"),
    "num_gpus": ("int", "all_reduce: GPUs taking part"),
    "message_bytes": ("float", "all_reduce: bytes reduced on each GPU"),
    "flops": ("float", "operations of one repetition (bullet.work)"),
    "bytes": ("float", "least bytes of one repetition (bullet.work)"),
    # Where
    "backend": ("str", "green-context | software | none | cpu | simulated"),
    "partition": ("str", "proven | unproven | none: whether the SM partition was checked with %smid in this process"),
    "partition_note": ("str", "why it is unproven, or what stands in for a partition"),
    "lane": ("str", "prefill | decode | full"),
    "unit": ("str", "SM | thread"),
    "sms": ("int", "units granted to the lane"),
    "split_prefill_sms": ("int", "the pair's prefill side as granted; null without a partition"),
    "split_decode_sms": ("int", "the pair's decode side as granted; null without a partition"),
    "device_sms": ("int", "units of the whole device"),
    "sharing": ("str", "how two lanes share the device: split (each its own SMs) | plain (streams) | priority (plain streams, "
                       "decode's the more urgent) | bounded (plain streams, grids and cuBLAS bound to sms); null: one lane"),
    "group_lane": ("str", "prefill | decode: the lane that holds the group of SMs asked for; the other has the remainder, which "
                          "carries no co-scheduling guarantee; null without a split"),
    "attention": ("str", "attention kernel: flash | cudnn (torch's, pinned) | own (this project's) | torch (not pinned: a CPU)"),
    "cublas_sms": ("int", "SM count that cuBLAS was told to aim at; null: none, it may take the device for the lane"),
    # Beside what
    "corunner": ("str", "idle | tensor_spin | l2_stream | memory_stream | alu_spin | an operation"),
    "corunner_tokens": ("int", "as tokens, of the co-runner; null if none"),
    "corunner_batch": ("int", "as batch"),
    "corunner_context_tokens": ("int", "as context_tokens"),
    "corunner_sms": ("int", "units of the co-runner's lane"),
    "corunner_bytes_per_s": ("float", "least bytes that it moved over its window's seconds; null if none"),
    # Result: seconds of one repetition
    "median_s": ("float", "median over samples (p50)"),
    "mean_s": ("float", "mean over samples: what a sum of steps, and so TPOT, consists of"),
    "p20_s": ("float", "20th percentile"),
    "p80_s": ("float", "80th percentile"),
    "p95_s": ("float", "95th percentile"),
    "samples": ("int", "timed replays kept"),
    "repeats": ("int", "repetitions inside one replay"),
    "window_s": ("float", "seconds in which both lanes were busy; null alone"),
    "both_share": ("float", "share of this lane's timed train in which both lanes ran; null alone"),
    "slowdown": ("float", "mean_s over the mean alone in the same cell (solo_mean_s); of rows without a cell, median_s over the "
                          "median alone on the same lane; null where that was not measured"),
    "slowdown_low": ("float", "2.5th percentile of slowdown by block bootstrap of the replays; null without a cell"),
    "slowdown_high": ("float", "97.5th percentile"),
    "solo_mean_s": ("float", "mean alone on the same lane, of the windows before and after in the same cell"),
    "solo_drift": ("float", "of those two: the mean after over the mean before, minus 1"),
    "drift": ("float", "anchors around this row over the run's median anchor, minus 1; null without anchors"),
    "drift_ok": ("bool", "|drift| within the limit"),
    # When, and on what
    "cell": ("str", "windows taken back to back: solo A, solo B, co-run, solo B, solo A; the same text on all rows of one visit"),
    "replicate": ("int", "0, 1, ..: which visit of the same cell"),
    "cell_order": ("int", "position of the visit in the random order of this run"),
    "step": ("int", "position of the window in its cell, 0 first"),
    "warm_s": ("float", "seconds of the same load directly before the first replay that counts"),
    "loaded_s": ("float", "seconds of any load before it without the host's pause: of the same cell"),
    "order": ("int", "position in the run"),
    "run": ("int", "0, 1, ..: which call of the sweep appended it"),
    "seed": ("int", "seed of the order"),
    "measured_at": ("str", "UTC, ISO 8601"),
    "clock_window_hz": ("float", "SM clock inside the window: cycles over nanoseconds of one small kernel in the lane's train"),
    "clock_sm_hz": ("float", "SM clock as the driver reports it, read while the window ran; null if unknown"),
    "clock_mem_hz": ("float", "memory clock, as the driver reports it"),
    "temperature_c": ("float", "GPU temperature"),
    "power_w": ("float", "board power, read while the window ran: at an instant where the driver has that, else its average"),
    "throttle": ("str", "reasons for which clocks were held down while the window ran, + between; empty: none; null if unknown"),
    "busy": ("bool", "another process was on the card"),
    "source": ("str", "measured | simulated"),
    "origin": ("str", "public table that the row comes from: repository, path, commit; null if measured by this project"),
    "origin_version": ("str", "what was measured there: engine or library with its version"),
    "licence": ("str", "licence of the origin"),
    "model": ("str", "model whose shapes these are; a config.json's is name#hash of what it says"),
    "dtype": ("str", "element type"),
    "gpu": ("str", "device name; 'CPU, no partition' on a CPU"),
    "compute_capability": ("str", "major.minor"),
    "driver": ("str", "driver version"),
    "cuda": ("str", "CUDA version that torch was built for"),
    "torch": ("str", "torch version"),
    "triton": ("str", "triton version"),
    "bullet": ("str", "version of this project"),
}
ENGINE_OPS: Mapping[str, str] = {
    "paged_decode_attention": "decode_attention", "own_prefill_attention": "prefill_attention", "own_norm": "norm",
    "own_rope": "rope", "own_act": "act", "own_gemm_gate_up": "gemm_gate_up", "own_copy": "copy",
    "engine_prefill_layer": "prefill_layer", "engine_decode_layer": "decode_layer"}
"""What the project's own kernels and its engine's layers do -> the operation in torch beside which they are measured."""
ENGINE_PHASES = ("engine_prefill", "engine_prefill_by_layer", "engine_decode")
"""Whole steps of the engine as the driver launches them, the host's work included: a prefill, the same in one launch a layer, a
decode iteration. Measured on a CPU only: on a GPU a sweep times graphs, which hold no host work."""
_TYPES: Mapping[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (float, int), "bool": (bool,)}
MOST_S = 1e6
"""No kernel takes eleven days: quotients and squares of what is read stay numbers."""
REQUIRED = ("id", "kind", "op", "backend", "partition", "lane", "sms", "device_sms", "corunner", "median_s", "source", "gpu")
OWN = ("samples", "measured_at")
"""Required too where this project measured; public tables seldom say."""
IMPORTED = ("origin_version", "licence")
"""Required with an ``origin``."""

KINDS = ("solo", "corun", "control", "anchor")
SOURCES = ("measured", "simulated")

Row = dict[str, Any]


def check_row(row: Mapping[str, Any], where: str = "row") -> Row:
    """The row with every column present (None where absent); :class:`ProfileError` names a wrong one.

    A public table's row has ``origin``, ``origin_version`` and ``licence``; a row of our own has ``samples`` and ``measured_at``.
    """
    unknown = sorted(set(row) - set(COLUMNS))
    if unknown:
        raise ProfileError(f"{where}: unknown column {unknown[0]!r}: written by another version of this project?")
    full: Row = {}
    for name, (kind, _) in COLUMNS.items():
        value = row.get(name)
        if value is None:
            if name in REQUIRED or name in (OWN if row.get("origin") is None else IMPORTED):
                raise ProfileError(f"{where}: column {name!r} is missing")
        elif not isinstance(value, _TYPES[kind]) or (kind == "int" and isinstance(value, bool)):
            raise ProfileError(f"{where}: {name} = {short(value)}: must be {kind}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ProfileError(f"{where}: {name} = {value!r}: must be finite")
        elif isinstance(value, str) and not value.isprintable():
            raise ProfileError(f"{where}: {name} = {short(value)}: must be one line of text")
        elif isinstance(value, int) and not -2**63 <= value < 2**63:
            raise ProfileError(f"{where}: {name} = {short(value)}: must be a whole number of 64 bits")
        elif isinstance(value, float) and name.endswith("_s") and not (value > 0 or (value == 0 and name != "median_s")):
            raise ProfileError(f"{where}: {name} = {value!r}: must be positive")
        elif name == "median_s" and isinstance(value, int | float) and value > MOST_S:
            raise ProfileError(f"{where}: {name} = {value!r}: must be {MOST_S:g} s at most")
        full[name] = value
    return full


# ---------------------------------------------------------------------------------------- what needs all rows


def finalise(rows: Sequence[Mapping[str, Any]], drift_limit: float = DRIFT_LIMIT) -> list[Row]:
    """Rows with ``drift``, ``drift_ok`` and ``slowdown`` filled in; order kept, input untouched.

    Drift: the mean of the anchors just before and just after the row, over the median anchor of its run, minus 1;
    an anchor's is its own.
    Slow-down: a row that was measured in a cell brings its own, from the windows alone beside it. Else over the median of the
    rows alone on the same lane of the same split, drifted rows left out.
    """
    out = [check_row(row) for row in rows]
    anchors: dict[int, list[tuple[int, float]]] = {}
    for row in out:
        if row["kind"] == "anchor":
            anchors.setdefault(row["run"] or 0, []).append((row["order"] or 0, row["median_s"]))
    centre = {run: statistics.median(s for _, s in times) for run, times in anchors.items()}
    for times in anchors.values():
        times.sort()
    for row in out:
        found = anchors.get(row["run"] or 0)
        row["drift"], row["drift_ok"] = None, None
        if found:
            at = bisect_right(found, (row["order"] or 0, math.inf))
            around = [row["median_s"]] if row["kind"] == "anchor" else [s for _, s in found[max(0, at - 1):at + 1]]
            row["drift"] = statistics.fmean(around) / centre[row["run"] or 0] - 1
            row["drift_ok"] = abs(row["drift"]) <= drift_limit
    alone: dict[tuple[Any, ...], list[float]] = {}
    for row in out:
        if row["kind"] == "solo" and row["drift_ok"] is not False:
            alone.setdefault(_lane_key(row), []).append(row["median_s"])
    for row in out:
        if row["cell"] is not None:
            continue
        base = alone.get(_lane_key(row))
        row["slowdown"] = None
        if row["kind"] in ("corun", "control") and base:
            row["slowdown"] = row["median_s"] / statistics.median(base)
    return out


def _lane_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    # Without a partition a lane is the whole device under either name.
    lane = row["lane"] if row["split_prefill_sms"] is not None else "full"
    return (row["model"], row["dtype"], row["op"], row["tokens"], row["batch"], row["context_tokens"], lane, row["sms"],
            row["split_prefill_sms"], row["split_decode_sms"])


def agreement(first: Iterable[Mapping[str, Any]], second: Iterable[Mapping[str, Any]]) -> tuple[int, float]:
    """How two tables of the same device agree: common ids, and the median of ``|a / b - 1|`` over their medians."""
    by_id = {row["id"]: row["median_s"] for row in first if row["kind"] != "anchor"}
    ratios = [abs(by_id[row["id"]] / row["median_s"] - 1) for row in second
              if row["kind"] != "anchor" and row["id"] in by_id]
    if not ratios:
        raise ProfileError("the two tables have no measurement in common: same model, splits and axes are needed")
    return len(ratios), statistics.median(ratios)


# --------------------------------------------------------------------------------------------- parquet


def arrow_schema() -> Any:
    """The table's pyarrow schema."""
    import pyarrow as pa

    kinds = {"str": pa.dictionary(pa.int32(), pa.string()), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    return pa.schema([pa.field(name, pa.string() if name in ("id", "measured_at") else kinds[kind],
                               nullable=name not in REQUIRED) for name, (kind, _) in COLUMNS.items()])


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], metadata: Mapping[str, str]) -> None:
    """Write the table, atomically. ``metadata``: free text about the run, stored in the file."""
    import pyarrow as pa

    checked = [check_row(row) for row in rows]
    text = {"schema": SCHEMA, "version": str(SCHEMA_VERSION), **metadata}
    schema = arrow_schema().with_metadata(text)
    columns = [pa.array([row[f.name] for row in checked],
                        type=f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema]
    columns = [c.dictionary_encode() if pa.types.is_dictionary(f.type) else c
               for c, f in zip(columns, schema, strict=True)]
    write_table(path, pa.Table.from_arrays(columns, schema=schema))


def read_parquet(path: Path) -> tuple[list[Row], dict[str, str]]:
    """Rows and metadata; :class:`ProfileError` if the file is not such a table of this version."""
    table, metadata = read_table(path)
    if metadata.get("schema") != SCHEMA:
        raise ProfileError(f"{path}: not a {SCHEMA} table")
    if metadata.get("version") != str(SCHEMA_VERSION):
        raise ProfileError(f"{path}: schema version {metadata.get('version')!r}, this version reads {SCHEMA_VERSION}")
    return [check_row(row, f"{path}: row {i}") for i, row in enumerate(table.to_pylist())], metadata
