"""Public kernel tables to rows of :mod:`bullet.profiles.rows`: every row with its origin, version and licence.

A reader a publisher's format. Each knows its unit and refuses what it cannot read, with the file and the row;
:func:`check_samples` then refuses what no GPU could have measured. Seconds and bytes throughout.
"""

from __future__ import annotations

import csv
import gzip
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bullet.catalog.gpus import BYTES_SLACK, FLOOR_S, GPUS, PEAK_SLACK, UNIT_FACTOR, GpuSpec, get_gpu
from bullet.catalog.models import ModelSpec, get_model
from bullet.devices.coefficients import PROFILES
from bullet.errors import ProfileError, ResultsError
from bullet.files import make_folder
from bullet.parquet import read_table
from bullet.profiles.rows import ENGINE_OPS, ENGINE_PHASES, KINDS, SOURCES, Row, check_row, write_parquet
from bullet.units import MICRO, MILLI
from bullet.work import dense_kernels, embedding_bytes

DEVICES: Mapping[str, str] = {
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB": "a100-80gb",
    "NVIDIA A800 80GB": "a100-80gb",  # A100's silicon and HBM with less NVLink
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}
"""Device names as tables give them -> our GPU. A name that is not here is refused, never guessed."""
LEAST_S = 0.2e-6
"""No kernel is launched and done sooner: a value below is in another unit."""
REPEAT_SPREAD = 1.5
"""Repeats of one measurement further apart than this (largest over smallest) are not repeats."""
SHAPE = ("tokens", "batch", "context_tokens", "decode_seqs", "decode_context_tokens", "columns", "inner", "heads", "kv_heads",
         "head_dim", "num_gpus", "message_bytes")
"""Columns that make a row's identity, beside version and operation."""
KNOWN_OPS = ("gemm", "prefill_attention", "decode_attention", "paged_decode_attention", "mixed_attention", "norm", "qk_norm",
             "rope", "act", "embedding", "sampler", "copy", "all_reduce")
SAME = ("kind", "op", *SHAPE, "backend", "partition", "lane", "unit", "sms", "split_prefill_sms", "split_decode_sms", "corunner",
        "corunner_tokens", "corunner_batch", "corunner_context_tokens", "corunner_sms", "origin_version", "model", "dtype")
"""Two rows of one table that agree in these measured the same thing, whatever their ids say."""
REPEAT = "|repeat "
"""What numbers a measurement's further times in its id."""
WIDEST_SPREAD = 4.0
"""Repeats of any publisher's, at most: times of 3 us and up in whole microseconds."""
NEEDED: Mapping[str, tuple[str, ...]] = {
    "gemm": ("tokens", "columns", "inner"), "norm": ("tokens", "bytes"), "rope": ("tokens", "bytes"), "act": ("tokens", "bytes"),
    "embedding": ("tokens", "bytes"), "prefill_attention": ("tokens", "batch", "context_tokens", "flops", "bytes"),
    "decode_attention": ("batch", "context_tokens", "bytes"), "all_reduce": ("num_gpus", "message_bytes", "bytes")}
"""What a fit reads of an operation's rows; GEMMs that carry a name of the model's need ``tokens`` alone."""


@dataclass(frozen=True)
class Origin:
    """Where rows come from and what may be done with them."""

    repository: str
    commit: str
    version: str
    licence: str

    def columns(self, path: Path) -> dict[str, str]:
        """The row's provenance."""
        return {"origin": f"{self.repository} {upstream(path)} {self.commit}", "origin_version": self.version,
                "licence": self.licence}


def upstream(path: Path) -> str:
    """A file's path in its repository, where its name tells (``<gpu>__<framework>_<version>__<table>`` for AIConfigurator)."""
    name = path.name.removesuffix(".gz")
    first, _, rest = name.partition("__")
    table = rest.rpartition("__")[2]
    for fragment, kind in (("gemm_perf", "gemm"), ("attention_perf", "attention"), ("allreduce_perf", "comm")):
        if fragment in table:
            framework, _, version = rest.partition("__")[0].rpartition("_")
            return f"aic-core/src/aiconfigurator_core/systems/data/{first}/{kind}/{framework}/{version}/{table}"
    if table == "mlp.parquet":
        return f"data/profiling/compute/{first}/meta-llama/{rest.partition('__')[0]}/mlp.csv"
    if table == "all_reduce.parquet":
        return f"data/profiling/network/{first}/all_reduce.csv"
    if table == "attention.parquet":
        return f"data/profiling/compute/{first}/meta-llama/{rest.partition('__')[0]}-hf/attention.csv"
    if first == "RTX4090":
        return f"profiler/perf/RTX4090/meta-llama/{rest.partition('__')[0]}/bf16/tp1/{table}"
    return name


VIDUR = Origin("microsoft/vidur", "7d47513363ec447a741ac5e47241580b47724fbf", "vidur 2024 (fp16)", "MIT")
AICONFIGURATOR = Origin("ai-dynamo/aiconfigurator", "095f58a51c4ca8e61b66ec108d86f223f8d559ce", "", "Apache-2.0")
LLMSERVINGSIM = Origin("casys-kaist/LLMServingSim", "5daddb21a545658d5150b535712d0494584b5278", "vllm 0.19.0", "MIT")
FRONTIER = Origin("NetX-lab/Frontier", "a4b22df8211864bf229258ecdfbe680f048f2d77", "flashinfer (frontier)", "MIT")


# ------------------------------------------------------------------------------------------------ reading


def read_columns(path: Path, needed: Iterable[str]) -> list[dict[str, Any]]:
    """Rows of a parquet, csv or csv.gz file that has the ``needed`` columns; :class:`ProfileError` otherwise."""
    rows: list[dict[str, Any]]
    if path.suffix == ".parquet":
        rows = read_table(path, "a table")[0].to_pylist()
    else:
        try:
            with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except (OSError, UnicodeError) as exc:
            raise ProfileError(f"{path}: cannot be read ({str(exc).splitlines()[0]})") from None
    if not rows:
        raise ProfileError(f"{path}: holds no rows")
    absent = [name for name in needed if name not in rows[0]]
    if absent:
        raise ProfileError(f"{path}: no column {absent[0]!r}: it has {', '.join(list(rows[0])[:12])}")
    return rows


def number(raw: Mapping[str, Any], name: str, path: Path, index: int) -> float:
    """A cell as a finite number of 0 or more; ``index``: position of the row, from 0."""
    try:
        value = float(raw[name])
    except (TypeError, ValueError):
        raise ProfileError(f"{path}: row {index}: {name} = {raw[name]!r}: must be a number") from None
    if not (math.isfinite(value) and value >= 0):
        raise ProfileError(f"{path}: row {index}: {name} = {value}: must be finite and 0 or more")
    return value


def whole(raw: Mapping[str, Any], name: str, path: Path, index: int) -> int:
    """A cell as a whole number."""
    value = number(raw, name, path, index)
    if value != int(value):
        raise ProfileError(f"{path}: row {index}: {name} = {value}: must be a whole number")
    return int(value)


def gpu_of(name: str, where: str) -> GpuSpec:
    """Our GPU for a device name; "simulated <gpu>" is that of the simulator's samples, whose ``source`` says so."""
    if name.removeprefix("simulated ") in GPUS:
        return get_gpu(name.removeprefix("simulated "))
    if name not in DEVICES:
        raise ProfileError(f"{where}: unknown device {name!r}: known are {', '.join(DEVICES)}")
    return get_gpu(DEVICES[name])


def make_row(origin: Origin, path: Path, index: int, gpu: str, seconds: float, columns: Mapping[str, Any]) -> Row:
    """One imported row: alone, on the whole device. ``order`` is the position in its file."""
    sms = gpu_of(gpu, f"{path}: row {index}").num_sms
    op = columns["op"]
    shape = ",".join(f"{name}={columns[name]:.15g}" for name in SHAPE if columns.get(name) is not None)
    row = {"id": f"{origin.version}|{op}|{shape}", "kind": "solo", "backend": "none", "partition": "none",
           "partition_note": "the whole device", "lane": "full", "unit": "SM", "sms": sms, "device_sms": sms, "corunner": "idle",
           "median_s": seconds, "order": index, "source": "measured", "gpu": gpu, "phase": "either", "dtype": "bfloat16",
           **origin.columns(path), **columns}
    return check_row(row, f"{path}: row {index}")


def number_repeats(rows: Sequence[Row], spread: float = REPEAT_SPREAD) -> list[Row]:
    """The same rows; a measurement that its publisher took again has "repeat 2" in its id. Refused if they are far apart."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["id"], []).append(row)
    for found in groups.values():
        times = [r["median_s"] for r in found]
        if max(times) > spread * min(times):
            raise ProfileError(f"{_name(found[0])} and row {found[-1]['order']} repeat one measurement but are "
                               f"{max(times) / max(min(times), 1e-12):.3g} times apart")
        for i, row in enumerate(found[1:], 2):
            row["id"] += f"{REPEAT}{i}"
    return list(rows)


# ------------------------------------------------------------------------------------------- what is possible


def roofline_s(row: Mapping[str, Any], gpu: GpuSpec) -> float:
    """Least seconds that the data sheet allows for the row's SMs' share of compute and all of memory."""
    flops, moved = row["flops"] or 0.0, row["bytes"] or 0.0
    if row["op"] == "all_reduce":
        return float(moved / gpu.link_bytes_per_s)
    share = row["sms"] / row["device_sms"]
    # Fewer SMs clock higher, but no part of a chip does the whole chip's work.
    return float(max(flops / (gpu.peak_flops * min(1.0, 2 * share)), (moved - gpu.l2_bytes) / gpu.mem_bytes_per_s, 0.0))


def check_samples(rows: Sequence[Mapping[str, Any]], *, min_neighbours: int = 4) -> GpuSpec:
    """The one GPU that all rows were measured on.

    :class:`ProfileError`, naming the row, for: mixed GPUs or sources, a repeated measurement that is not numbered as one, no
    time at all, a count that is absent or negative, a rate above the data sheet's, and a value ``UNIT_FACTOR`` off its
    neighbours (same origin and operation) or its roofline.
    """
    if not rows:
        raise ProfileError("no samples")
    gpu = gpu_of(str(rows[0]["gpu"]), _name(rows[0]))
    seen: dict[str, Mapping[str, Any]] = {}
    alike: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    groups: dict[tuple[Any, ...], list[tuple[float, Mapping[str, Any]]]] = {}
    for row in rows:
        if gpu_of(str(row["gpu"]), _name(row)) is not gpu:
            raise ProfileError(f"{_name(row)}: measured on {row['gpu']}, others on {rows[0]['gpu']}: one GPU a table")
        if row["source"] != rows[0]["source"]:
            raise ProfileError(f"{_name(row)}: source {row['source']!r}, others {rows[0]['source']!r}: one kind a table")
        if row["kind"] != "anchor" and row["id"] in seen:
            raise ProfileError(f"{_name(row)} repeats row {_place(seen[row['id']])}: {row['id']}")
        seen[row["id"]] = row
        check_place(row, gpu)
        if not row["median_s"] > 0:
            raise ProfileError(f"{_name(row)}: {row['median_s']} s: must be positive")
        if row["kind"] != "anchor":
            check_repeat(row, alike.setdefault(_key(row), row))
        check_counts(row)
        if row["op"] != "all_reduce":  # small ones stay in caches, whatever the link
            check_peak(row, gpu)
        seconds = roofline_s(row, gpu) + FLOOR_S
        groups.setdefault((row["origin"], row["op"], row["sms"]), []).append((row["median_s"] / seconds, row))
    for found in groups.values():
        middle = statistics.median(ratio for ratio, _ in found)
        for ratio, row in found:
            if len(found) >= min_neighbours and not 1 / UNIT_FACTOR < ratio / middle < UNIT_FACTOR:
                raise ProfileError(f"{_name(row)}: {row['median_s']:.3g} s is {_times(ratio / middle)} its neighbours' for its "
                                   "work: another unit?")
            if ratio > UNIT_FACTOR:
                raise ProfileError(f"{_name(row)}: {row['median_s']:.3g} s is {_times(ratio)} what {gpu.name}'s data sheet "
                                   "allows: another unit?")
    for row in rows:
        if row["median_s"] < LEAST_S:
            raise ProfileError(f"{_name(row)}: {row['median_s']:.3g} s: no kernel takes less than {LEAST_S:g} s: another unit?")
    return gpu


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    # A layer's norms have one shape and are several kernels: their names end the id.
    kernel = row["id"].partition(REPEAT)[0].rpartition("|")[2] if row["op"] == "norm" else None
    return (*(row[name] for name in SAME), kernel)


def check_repeat(row: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Refuse a row that measures what ``first`` does, unless it is numbered as a repeat of it and not too far from it."""
    if row is first:
        return
    times = f"{first['median_s'] * 1e6:.6g} and {row['median_s'] * 1e6:.6g} us"
    if row["id"].partition(REPEAT)[0] != first["id"].partition(REPEAT)[0]:
        raise ProfileError(f"{_name(row)} measures what row {_place(first)} does ({times}) under another id, {row['id']!r}: "
                           f"leave one out, or number it {first['id'] + REPEAT + '2'!r}")
    if max(row["median_s"], first["median_s"]) > WIDEST_SPREAD * min(row["median_s"], first["median_s"]):
        raise ProfileError(f"{_name(row)} repeats row {_place(first)}: {times} are further apart than repeats can be")


def check_place(row: Mapping[str, Any], gpu: GpuSpec) -> None:
    """Refuse a kind or source that is none, an operation that nobody knows, and SMs that the device has not."""
    for name, allowed in (("kind", KINDS), ("source", SOURCES)):
        if row[name] not in allowed:
            raise ProfileError(f"{_name(row)}: {name} = {row[name]!r}: must be {', '.join(allowed)}")
    op = row["op"]
    if op not in (*KNOWN_OPS, *ENGINE_OPS, *ENGINE_PHASES) and not op.startswith("gemm_") and not op.endswith("_layer"):
        raise ProfileError(f"{_name(row)}: op = {op!r}: must be gemm_*, *_layer, {', '.join(KNOWN_OPS)}")
    if row["device_sms"] != gpu.num_sms:
        raise ProfileError(f"{_name(row)}: device_sms = {row['device_sms']}: {gpu.name} has {gpu.num_sms}")
    if not 1 <= row["sms"] <= gpu.num_sms:
        raise ProfileError(f"{_name(row)}: sms = {row['sms']}: must be 1 to {gpu.num_sms}")


def check_counts(row: Mapping[str, Any]) -> None:
    """Refuse a row without a count that a fit reads, or with one that no measurement has."""
    op = row["op"]
    needed = ("tokens",) if op.startswith("gemm_") else NEEDED.get(op, ())
    for name in dict.fromkeys((*needed, *SHAPE, "flops", "bytes")):
        value, least = row[name], 0 if name in ("context_tokens", "decode_context_tokens", "flops", "bytes") else 1
        if value is None and name in needed:
            raise ProfileError(f"{_name(row)}: {name} is missing: {op} needs {', '.join(needed)}")
        if value is not None and value < (least if name in needed else 0):
            raise ProfileError(f"{_name(row)}: {name} = {value:g}: must be {least if name in needed else 0} or more")
    if op.startswith("gemm") and None not in (found := [row[name] for name in ("tokens", "columns", "inner", "flops")]):
        m, n, k, flops = found
        if not math.isclose(flops, 2.0 * m * n * k, rel_tol=1e-6):
            raise ProfileError(f"{_name(row)}: {flops:.6g} flops, but {m} x {n} x {k} are {2.0 * m * n * k:.6g}: one is wrong")


def check_peak(row: Mapping[str, Any], gpu: GpuSpec) -> None:
    """Refuse a row that beats the data sheet."""
    seconds, flops, moved = row["median_s"], row["flops"] or 0.0, row["bytes"] or 0.0
    if flops > PEAK_SLACK * gpu.peak_flops * seconds:
        raise ProfileError(f"{_name(row)}: {flops / seconds / 1e12:.4g} TFLOPS is above {gpu.name}'s peak of "
                           f"{gpu.peak_flops / 1e12:.4g}: another unit or device?")
    if moved > BYTES_SLACK * gpu.mem_bytes_per_s * seconds + gpu.l2_bytes:
        raise ProfileError(f"{_name(row)}: {moved / seconds / 1e9:.4g} GB/s is above {gpu.name}'s peak of "
                           f"{gpu.mem_bytes_per_s / 1e9:.4g}: another unit or device?")


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 1 else f"1/{1 / ratio:.0f} of"


def _name(row: Mapping[str, Any]) -> str:
    place = str(row.get("origin") or row["gpu"]).split()
    whose = place[1] if row.get("origin") and len(place) > 1 else " ".join(place)
    return f"{whose}: row {_place(row)} ({row['op']})"


def _place(row: Mapping[str, Any]) -> Any:
    return row["id"] if row["order"] is None else row["order"]


# ------------------------------------------------------------------------------------------------ the formats


def gemm_columns(m: int, n: int, k: int, model: ModelSpec) -> dict[str, Any]:
    """Shape, operations and bytes of a 16-bit GEMM, named after the model's own where it is one of them."""
    shapes = {(c.columns, c.k): f"gemm_{c.name}" for c in dense_kernels(model, 1) if c.k}
    shapes[model.vocab_size, model.hidden_size] = "gemm_lm_head"
    named = shapes.get((n, k))
    return {"op": named or "gemm", "model": model.name if named else None, "tokens": m, "columns": n, "inner": k,
            "flops": 2.0 * m * n * k, "bytes": 2.0 * (m * k + k * n + m * n)}


def rowwise_columns(name: str, tokens: int, model: ModelSpec) -> dict[str, Any]:
    """The same for a kernel that works on rows one by one."""
    moved = (embedding_bytes(model, 1) if name == "embedding"
             else next(k.bytes for k in dense_kernels(model, 1) if k.name == name))
    return {"op": name, "model": model.name, "tokens": tokens, "flops": 0.0, "bytes": tokens * moved}


def attention_columns(op: str, batch: int, new: int, context: int, heads: tuple[int, int, int], *, decode_seqs: int = 0,
                      decode_context: int = 0) -> dict[str, Any]:
    """Attention of ``batch`` sequences: ``new`` tokens each after ``context`` (prefill), or one attending ``context``."""
    q, kv, dim = heads
    per_pair, query, token = 4.0 * q * dim, 2.0 * dim * 2 * q, 2.0 * dim * 2 * kv
    flops = moved = 0.0
    if op != "decode_attention" and new:
        flops = per_pair * batch * new * (context + (new + 1) / 2)
        moved = batch * (query * new + token * (new + context))
    if op == "decode_attention":
        decode_seqs, decode_context = batch, context
    flops += per_pair * decode_seqs * decode_context
    moved += decode_seqs * (query + token * decode_context)
    mixed = {"decode_seqs": decode_seqs, "decode_context_tokens": decode_context} if op == "mixed_attention" else {}
    return {"op": op, "tokens": batch * new, "batch": batch, "context_tokens": context, "heads": q, "kv_heads": kv,
            "head_dim": dim, "flops": flops, "bytes": moved, "phase": op.split("_", 1)[0], **mixed}


VIDUR_OPS = {"attn_pre_proj": "qkv", "attn_post_proj": "o", "mlp_up_proj": "gate_up", "mlp_down_proj": "down", "emb": "embedding",
             "input_layernorm": "norm", "post_attention_layernorm": "norm", "attn_rope": "rope", "mlp_act": "act"}
"""Vidur's names for ours. Its norms and ``add`` are separate kernels; engines fuse them today and no row measures the fused one,
so the norm stands for it (bytes of the fused one) and ``add`` is left out."""


def read_vidur_mlp(path: Path, gpu: str, model: ModelSpec) -> list[Row]:
    """``mlp.csv`` of microsoft/vidur: ms, one row a token count; TP 1."""
    rows = []
    shapes = {k.name: (k.columns, k.k) for k in dense_kernels(model, 1) if k.k}
    needed = ["num_tokens", "num_tensor_parallel_workers", "n_embd", *(f"time_stats.{name}.median" for name in VIDUR_OPS)]
    for i, raw in enumerate(read_columns(path, needed)):
        if whole(raw, "num_tensor_parallel_workers", path, i) != 1:
            continue
        if (found := whole(raw, "n_embd", path, i)) != model.hidden_size:
            raise ProfileError(f"{path}: row {i}: n_embd = {found}, {model.name} has {model.hidden_size}: another model's table")
        tokens = whole(raw, "num_tokens", path, i)
        for name, ours in VIDUR_OPS.items():
            columns = (gemm_columns(tokens, *shapes[ours], model) if ours in shapes else rowwise_columns(ours, tokens, model))
            row = make_row(VIDUR, path, i, gpu, number(raw, f"time_stats.{name}.median", path, i) * MILLI,
                           {**columns, "dtype": "float16"})
            rows.append({**row, "id": f"{row['id']}|{name}"})  # a layer's two norms are two measurements
    return number_repeats(rows)


def read_vidur_all_reduce(path: Path, gpu: str) -> list[Row]:
    """``all_reduce.csv`` of microsoft/vidur: ms and bytes; all GPUs of one node."""
    rows = []
    needed = ("time_stats.all_reduce.median", "num_workers", "size", "devices_per_node")
    for i, raw in enumerate(read_columns(path, needed)):
        gpus = whole(raw, "num_workers", path, i)
        if gpus == whole(raw, "devices_per_node", path, i):
            rows.append(make_row(VIDUR, path, i, gpu, number(raw, needed[0], path, i) * MILLI,
                                 all_reduce_columns(gpus, whole(raw, "size", path, i))))
    return number_repeats(rows, spread=3.0)  # eager launches of some 40 us, in whole microseconds


def all_reduce_columns(gpus: int, message_bytes: int) -> dict[str, Any]:
    """Ring: each GPU sends ``2 (t - 1) / t`` of the message."""
    return {"op": "all_reduce", "num_gpus": gpus, "message_bytes": float(message_bytes),
            "flops": 0.0, "bytes": 2 * (gpus - 1) / gpus * message_bytes}


def _aiconfigurator(path: Path, needed: Iterable[str]) -> list[tuple[int, dict[str, Any], Origin]]:
    rows = read_columns(path, ("framework", "version", "device", "latency", *needed))
    return [(i, raw, Origin(AICONFIGURATOR.repository, AICONFIGURATOR.commit, f"{raw['framework'].lower()} {raw['version']}",
                            AICONFIGURATOR.licence)) for i, raw in enumerate(rows)]


def read_aiconfigurator_gemm(path: Path, model: ModelSpec, keep: Callable[[int, int, int], bool]) -> list[Row]:
    """``gemm_perf`` of ai-dynamo/aiconfigurator: ms; bf16 rows whose (m, n, k) ``keep`` wants."""
    rows = []
    for i, raw, origin in _aiconfigurator(path, ("gemm_dtype", "m", "n", "k")):
        m, n, k = (whole(raw, name, path, i) for name in "mnk")
        if raw["gemm_dtype"] == "bfloat16" and keep(m, n, k):
            rows.append(make_row(origin, path, i, raw["device"], number(raw, "latency", path, i) * MILLI,
                                 gemm_columns(m, n, k, model)))
    return rows


def read_aiconfigurator_attention(path: Path, model: ModelSpec) -> list[Row]:
    """``context_attention_perf`` (causal) or ``generation_attention_perf``, ``step`` past tokens: ms; bf16 rows, no window."""
    rows = []
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    for i, raw, origin in _aiconfigurator(path, ("op_name", "batch_size", "isl", "step", "num_heads", "num_key_value_heads",
                                                 "head_dim", "attn_dtype", "kv_cache_dtype")):
        if (tuple(whole(raw, name, path, i) for name in ("num_heads", "num_key_value_heads", "head_dim")) != heads
                or {raw["attn_dtype"], raw["kv_cache_dtype"]} != {"bfloat16"} or raw.get("window_size")):
            continue
        batch, new, past = (whole(raw, name, path, i) for name in ("batch_size", "isl", "step"))
        if raw["op_name"] == "context_attention":
            columns = attention_columns("prefill_attention", batch, new, past, heads)
        else:
            columns = attention_columns("decode_attention", batch, 1, past + 1, heads)
        rows.append(make_row(origin, path, i, raw["device"], number(raw, "latency", path, i) * MILLI,
                             {**columns, "model": model.name}))
    return rows


def read_aiconfigurator_all_reduce(path: Path) -> list[Row]:
    """``custom_allreduce_perf``: ms under CUDA graphs. ``message_size`` counts elements of two bytes: only so do the times agree
    with Vidur's table, which is in bytes."""
    return [make_row(origin, path, i, raw["device"], number(raw, "latency", path, i) * MILLI,
                     all_reduce_columns(whole(raw, "num_gpus", path, i), 2 * whole(raw, "message_size", path, i)))
            for i, raw, origin in _aiconfigurator(path, ("num_gpus", "message_size", "backend"))
            if str(raw["backend"]).endswith("_graph")]


def read_frontier_attention(path: Path, gpu: str) -> list[Row]:
    """``attention.csv`` of NetX-lab/Frontier: ms in whole microseconds; its own heads; ``kv_cache_size`` past tokens."""
    rows = []
    for i, raw in enumerate(read_columns(path, ("n_embd", "n_q_head", "n_kv_head", "batch_size", "prefill_chunk_size",
                                                "kv_cache_size", "is_prefill", "time_stats.attn_prefill.median"))):
        batch, chunk, past, hidden, q, kv = (whole(raw, name, path, i) for name in (
            "batch_size", "prefill_chunk_size", "kv_cache_size", "n_embd", "n_q_head", "n_kv_head"))
        heads, prefill = (q, kv, hidden // q), str(raw["is_prefill"]) == "True"
        columns = (attention_columns("prefill_attention", batch, chunk, past, heads) if prefill
                   else attention_columns("decode_attention", batch, 1, past + 1, heads))
        name = f"time_stats.attn_{'prefill' if prefill else 'decode'}.median"
        rows.append(make_row(FRONTIER, path, i, gpu, number(raw, name, path, i) * MILLI, {**columns, "dtype": "float16"}))
    return number_repeats(rows, spread=WIDEST_SPREAD)


SERVINGSIM_OPS = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down", "layernorm": "norm",
                  "final_layernorm": "norm", "rotary_emb": "rope", "act_fn": "act", "embedding": "embedding"}


def read_llmservingsim_dense(path: Path, gpu: str, model: ModelSpec) -> list[Row]:
    """``dense.csv`` or ``per_sequence.csv`` of casys-kaist/LLMServingSim: us, (layer, tokens) or (layer, sequences)."""
    rows = []
    shapes = {k.name: (k.columns, k.k) for k in dense_kernels(model, 1) if k.k}
    shapes["lm_head"] = (model.vocab_size, model.hidden_size)
    table = read_columns(path, ("layer", "time_us"))
    count = "tokens" if "tokens" in table[0] else "sequences"
    read_columns(path, (count,))
    for i, raw in enumerate(table):
        name, tokens = SERVINGSIM_OPS.get(raw["layer"], raw["layer"]), whole(raw, count, path, i)
        if name == "sampler":
            columns = {"op": "sampler", "model": model.name, "tokens": tokens, "flops": 0.0,
                       "bytes": float(model.dtype_bytes) * tokens * model.vocab_size}
        elif name in shapes:
            columns = gemm_columns(tokens, *shapes[name], model)
        elif name in ("norm", "rope", "act", "embedding"):
            columns = rowwise_columns(name, tokens, model)
        else:
            raise ProfileError(f"{path}: row {i}: unknown layer {raw['layer']!r}: known are "
                               f"{', '.join([*SERVINGSIM_OPS, 'lm_head', 'sampler'])}")
        row = make_row(LLMSERVINGSIM, path, i, gpu, number(raw, "time_us", path, i) * MICRO, columns)
        rows.append({**row, "id": f"{row['id']}|{raw['layer']}"})
    return rows


def read_llmservingsim_attention(path: Path, gpu: str, model: ModelSpec) -> list[Row]:
    """``attention.csv`` of LLMServingSim: us; prefill chunk and decodes in one kernel. Without the one it is the other's row."""
    rows = []
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    for i, raw in enumerate(read_columns(path, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"))):
        chunk, past, seqs, context = (whole(raw, name, path, i) for name in (
            "prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
        if chunk and seqs:
            columns = attention_columns("mixed_attention", 1, chunk, past, heads, decode_seqs=seqs, decode_context=context)
        elif chunk:
            columns = attention_columns("prefill_attention", 1, chunk, past, heads)
        else:
            columns = attention_columns("decode_attention", seqs, 1, context, heads)
        rows.append(make_row(LLMSERVINGSIM, path, i, gpu, number(raw, "time_us", path, i) * MICRO,
                             {**columns, "model": model.name}))
    return rows


# ---------------------------------------------------------------------------------------------- what ships

A100, A800, H100, RTX4090 = "NVIDIA A100 80GB", "NVIDIA A800 80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"


def _llama_gemms(m: int, n: int, k: int) -> bool:
    """Shapes of Llama-3.1-8B and those of the grid that enclose them: 28672 and 14336 are not on it."""
    return (n, k) in {(6144, 4096), (4096, 4096), (16384, 4096), (51200, 4096), (65536, 4096), (4096, 12288), (4096, 16384)}


PUBLIC = ("a100-80gb", "h100", "rtx4090")
"""GPUs of which public tables are known."""


def import_samples(gpu: str, data: Path, out: Path | None = None, replace: bool = False) -> tuple[Path, list[Row]]:
    """:func:`import_public`, written to ``out`` (default: the GPU's profile); where, and the rows.

    :class:`ResultsError` if a file is there, unless ``replace``, or it cannot be written.
    """
    path = out or PROFILES / gpu / "llama-3.1-8b" / "samples.parquet"
    if path.exists() and not replace:
        raise ResultsError(f"{path}: is there: choose another --out, or say --replace")
    rows = import_public(gpu, data)
    make_folder(path.parent)
    write_parquet(path, rows, {"gpu": gpu, "source": "measured"})
    return path, rows


def import_public(gpu: str, data: Path) -> list[Row]:
    """All licensed public rows of a GPU that bear on Llama-3.1-8B, checked; ``data``: folder with ``kernels/``."""
    model, kernels = get_model("llama-3.1-8b"), data / "kernels"
    if not kernels.is_dir():
        raise ProfileError(f"{data}: no folder kernels/ with the measured tables there; give it by --data")
    rows: list[Row] = []

    def aiconfigurator(prefix: str) -> None:
        folder = kernels / "aiconfigurator"
        rows.extend(read_aiconfigurator_gemm(folder / f"{prefix}__gemm_perf.parquet", model, _llama_gemms))
        for kind in ("context", "generation"):
            rows.extend(read_aiconfigurator_attention(folder / f"{prefix}__{kind}_attention_perf.parquet", model))
        reduce_ = folder / f"{prefix}__custom_allreduce_perf.parquet"
        if reduce_.is_file():
            rows.extend(read_aiconfigurator_all_reduce(reduce_))

    if gpu == "a100-80gb":
        rows += read_vidur_mlp(kernels / "vidur/a100__Meta-Llama-3-8B__mlp.parquet", A100, model)
        rows += read_vidur_all_reduce(kernels / "vidur/a100_dgx__all_reduce.parquet", A100)
        aiconfigurator("a100_sxm__vllm_0.14.0")
        aiconfigurator("a100_sxm__sglang_0.5.10")
        rows += read_frontier_attention(kernels / "frontier/a800__Llama-2-7b__attention.parquet", A800)
    elif gpu == "h100":
        aiconfigurator("h100_sxm__vllm_0.19.0")
        aiconfigurator("h100_sxm__sglang_0.5.10")
        rows += read_vidur_all_reduce(kernels / "vidur/h100_dgx__all_reduce.parquet", H100)
    elif gpu == "rtx4090":
        folder = kernels / "llmservingsim"
        for name in ("dense", "per_sequence"):
            rows += read_llmservingsim_dense(folder / f"RTX4090__Llama-3.1-8B__{name}.csv.gz", RTX4090, model)
        rows += read_llmservingsim_attention(folder / "RTX4090__Llama-3.1-8B__attention.csv.gz", RTX4090, model)
    else:
        raise ProfileError(f"{gpu}: no public tables are known for it: choose a100-80gb, h100 or rtx4090")
    check_samples(rows)
    return rows
