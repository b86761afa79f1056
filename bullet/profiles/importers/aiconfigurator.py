"""ai-dynamo/aiconfigurator: GEMMs, attention and all-reduces of vLLM and SGLang, timed by its collectors. Milliseconds.

In its repository ``systems/data/<card>/[<kind>/]<framework>/<version>/<table>_perf``, parquet or (earlier) comma-separated
.txt; copies may have ``<card>__<framework>_<version>__`` before the name. Rows say framework, version and device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec, model_label
from bullet.errors import ProfileError
from bullet.profiles.check import gpu_of
from bullet.profiles.importers.reading import (
    Origin,
    all_reduce_columns,
    attention_columns,
    gemm_columns,
    make_row,
    number,
    read_columns,
    text,
    whole,
)
from bullet.profiles.rows import Row
from bullet.units import MILLI
from bullet.work import gemm_shapes

PLACE = "aic-core/src/aiconfigurator_core/systems/data/{hardware}/KIND/{framework}/{version}/{table}"
ORIGIN = Origin("ai-dynamo/aiconfigurator", "095f58a51c4ca8e61b66ec108d86f223f8d559ce", "", "Apache-2.0", {
    f"{table}_perf": PLACE.replace("KIND", kind) for table, kind in (("gemm", "gemm"), ("attention", "attention"),
                                                                    ("allreduce", "comm"))})
"""The version is each row's own."""
VERSIONS = {"a100-80gb": ("a100_sxm__vllm_0.14.0", "a100_sxm__sglang_0.5.10"),
            "h100": ("h100_sxm__vllm_0.19.0", "h100_sxm__sglang_0.5.10")}


def tables(gpu: str, kernels: Path, model: ModelSpec) -> list[Row]:
    """What there is of a GPU; ``kernels``: the folder of all publishers."""
    rows: list[Row] = []
    for prefix in VERSIONS[gpu]:
        def path(table: str, prefix: str = prefix) -> Path:
            return kernels / "aiconfigurator" / f"{prefix}__{table}_perf.parquet"

        rows += read_gemm(path("gemm"), model, llama_gemms)
        for kind in ("context", "generation"):
            rows += read_attention(path(f"{kind}_attention"), model)
        if path("custom_allreduce").is_file():
            rows += read_all_reduce(path("custom_allreduce"))
    return rows


READ = ("gemm_perf", "context_attention_perf", "generation_attention_perf", "custom_allreduce_perf")
"""Tables that are read; others (experts, latent attention, its power) are not."""


def found(folder: Path) -> list[Path]:
    """Tables at or below a folder."""
    return sorted(path for path in folder.rglob("*_perf.*") if path.suffix in (".parquet", ".txt", ".csv")
                  and path.stem.rpartition("__")[2] in READ)


def cards(tables: Sequence[Path]) -> list[str]:
    """Devices that their rows name."""
    return sorted({str(raw["device"]) for path in tables for raw in read_columns(path, ("device",))})


def read_found(tables: Sequence[Path], gpu: GpuSpec, model: ModelSpec, commit: str | None, licence: str | None) -> list[Row]:
    """Rows of a card that bear on a model on one GPU: its GEMMs and the grid's around them, attention of its heads, all-reduces.
    ``gpu`` stands for whatever device the rows name if it is the only one."""
    rows: list[Row] = []
    for path in tables:
        kind, devices = path.stem.rpartition("__")[2], {str(raw["device"]) for raw in read_columns(path, ("device",))}
        if len(devices) > 1 or not _is(next(iter(devices)), gpu, len(cards(tables))):
            continue
        if kind == "gemm_perf":
            read = read_gemm(path, model, around({(whole(raw, "n", path, i), whole(raw, "k", path, i))
                                                  for i, raw in enumerate(read_columns(path, ("n", "k")))}, model))
        elif kind == "custom_allreduce_perf":
            read = read_all_reduce(path)
        else:
            read = read_attention(path, model)
        rows += [{**row, "gpu": gpu.name, "sms": gpu.num_sms, "device_sms": gpu.num_sms,
                  "origin": f"{ORIGIN.repository} {_place(path)} {commit or 'not in the folder'}",
                  "licence": licence or "not in the folder"} for row in read]
    return rows


def _is(device: str, gpu: GpuSpec, devices: int) -> bool:
    try:
        return gpu_of(device, device, gpu) is gpu
    except ProfileError:
        return devices == 1


def _place(path: Path) -> str:
    """A table's path from the card on, as far as the folder has it."""
    parts = path.parts
    return "/".join(parts[parts.index("data") + 1:] if "data" in parts else parts[-4:])


def around(grid: Collection[tuple[int, int]], model: ModelSpec) -> Callable[[int, int, int], bool]:
    """Whether a GEMM is of the model's shapes, or next to one on the grid of measured columns and inner sizes."""
    kept: set[tuple[int, int]] = set()
    for n, k in gemm_shapes(model).values():
        if (n, k) in grid:
            kept.add((n, k))
            continue
        for size, other in ((n, k), (k, n)):
            at = 0 if size == n else 1
            line = sorted({shape[at] for shape in grid if shape[1 - at] == other})
            near = [max((s for s in line if s < size), default=None), min((s for s in line if s > size), default=None)]
            if None not in near:
                kept |= {(s, other) if at == 0 else (other, s) for s in near if s is not None}
    return lambda m, n, k: (n, k) in kept


def llama_gemms(m: int, n: int, k: int) -> bool:
    """Shapes of Llama-3.1-8B and those of the grid that enclose them: 28672 and 14336 are not on it."""
    return (n, k) in {(6144, 4096), (4096, 4096), (16384, 4096), (51200, 4096), (65536, 4096), (4096, 12288), (4096, 16384)}


def _rows(path: Path, needed: Iterable[str]) -> list[tuple[int, dict[str, Any], Origin]]:
    rows = read_columns(path, ("framework", "version", "device", "latency", *needed))
    return [(i, raw, dataclasses.replace(ORIGIN, version=f"{text(raw, 'framework', path, i).lower()} "
                                                         f"{text(raw, 'version', path, i)}")) for i, raw in enumerate(rows)]


def read_gemm(path: Path, model: ModelSpec, keep: Callable[[int, int, int], bool]) -> list[Row]:
    """``gemm_perf``: bf16 rows whose (m, n, k) ``keep`` wants."""
    rows = []
    for i, raw, origin in _rows(path, ("gemm_dtype", "m", "n", "k")):
        m, n, k = (whole(raw, name, path, i) for name in "mnk")
        if raw["gemm_dtype"] == "bfloat16" and keep(m, n, k):
            rows.append(make_row(origin, path, i, text(raw, "device", path, i), number(raw, "latency", path, i) * MILLI,
                                 gemm_columns(m, n, k, model)))
    return rows


def read_attention(path: Path, model: ModelSpec) -> list[Row]:
    """``context_attention_perf`` (causal) or ``generation_attention_perf``, ``step`` past tokens: bf16 rows, no window."""
    rows = []
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    for i, raw, origin in _rows(path, ("op_name", "batch_size", "isl", "step", "num_heads", "num_key_value_heads",
                                                 "head_dim", "attn_dtype", "kv_cache_dtype")):
        if (tuple(whole(raw, name, path, i) for name in ("num_heads", "num_key_value_heads", "head_dim")) != heads
                or [raw["attn_dtype"], raw["kv_cache_dtype"]] != ["bfloat16"] * 2 or raw.get("window_size")):
            continue
        batch, new, past = (whole(raw, name, path, i) for name in ("batch_size", "isl", "step"))
        if raw["op_name"] == "context_attention":
            columns = attention_columns("prefill_attention", batch, new, past, heads)
        else:
            columns = attention_columns("decode_attention", batch, 1, past + 1, heads)
        rows.append(make_row(origin, path, i, text(raw, "device", path, i), number(raw, "latency", path, i) * MILLI,
                             {**columns, "model": model_label(model)}))
    return rows


def read_all_reduce(path: Path) -> list[Row]:
    """``custom_allreduce_perf``: under CUDA graphs. ``message_size`` counts elements of two bytes: only so do the times agree
    with Vidur's table, which is in bytes."""
    return [make_row(origin, path, i, text(raw, "device", path, i), number(raw, "latency", path, i) * MILLI,
                     all_reduce_columns(whole(raw, "num_gpus", path, i, 1), 2 * whole(raw, "message_size", path, i)))
            for i, raw, origin in _rows(path, ("num_gpus", "message_size", "backend"))
            if str(raw["backend"]).endswith("_graph")]
