"""microsoft/vidur: GEMMs and elementwise kernels of a model, and all-reduces. Milliseconds.

In its repository ``data/profiling/compute/<card>/<model>/mlp.csv`` and ``network/<card>_<topology>/all_reduce.csv``; copies
may be named ``<card>__<model>__mlp`` and ``<card>_<topology>__all_reduce``. Rows say neither card nor model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.errors import ProfileError
from bullet.profiles.check import A100, H100, is_card
from bullet.profiles.importers.reading import (
    Origin,
    all_reduce_columns,
    gemm_columns,
    make_row,
    number,
    number_repeats,
    read_columns,
    rowwise_columns,
    whole,
)
from bullet.profiles.rows import Row
from bullet.units import MILLI
from bullet.work import gemm_shapes

ORIGIN = Origin("microsoft/vidur", "7d47513363ec447a741ac5e47241580b47724fbf", "vidur 2024 (fp16)", "MIT", {
    "mlp.parquet": "data/profiling/compute/{hardware}/meta-llama/{source}/mlp.csv",
    "all_reduce.parquet": "data/profiling/network/{hardware}/all_reduce.csv"})
OPS = {"attn_pre_proj": "qkv", "attn_post_proj": "o", "mlp_up_proj": "gate_up", "mlp_down_proj": "down", "emb": "embedding",
             "input_layernorm": "norm", "post_attention_layernorm": "norm", "attn_rope": "rope", "mlp_act": "act"}
"""Vidur's names for ours. Its norms and ``add`` are separate kernels; engines fuse them today and no row measures the fused one,
so the norm stands for it (bytes of the fused one) and ``add`` is left out."""


def tables(gpu: str, kernels: Path, model: ModelSpec) -> list[Row]:
    """What there is of a GPU; ``kernels``: the folder of all publishers."""
    folder, hardware, name = kernels / "vidur", *{"a100-80gb": ("a100", A100), "h100": ("h100", H100)}[gpu]
    rows = read_mlp(folder / "a100__Meta-Llama-3-8B__mlp.parquet", name, model) if name == A100 else []
    return rows + read_all_reduce(folder / f"{hardware}_dgx__all_reduce.parquet", name)


def found(folder: Path) -> list[Path]:
    """Tables at or below a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix in (".parquet", ".csv")
                  and path.stem.rpartition("__")[2] in ("mlp", "all_reduce"))


def _card(path: Path) -> str:
    """The card's part of a table's path."""
    name = path.stem.partition("__")[0] if "__" in path.stem else ""
    if not name:
        parts = path.parts
        name = parts[parts.index("compute") + 1] if "compute" in parts else path.parent.name
    return name.partition("_")[0]


def cards(tables: Sequence[Path]) -> list[str]:
    """Cards that the paths name."""
    return sorted({_card(path) for path in tables})


def models(tables: Sequence[Path]) -> list[str]:
    """Models that the paths name."""
    return sorted({path.stem.split("__")[1] if "__" in path.stem else path.parent.name
                   for path in tables if path.stem.rpartition("__")[2] == "mlp"})


def read_found(tables: Sequence[Path], gpu: GpuSpec, model: ModelSpec, commit: str | None, licence: str | None) -> list[Row]:
    """Rows of a card and model, on one GPU; ``gpu`` stands for whatever card the paths name if it is the only one."""
    rows: list[Row] = []
    several = len(models(tables)) > 1
    # Links of one topology: all GPUs of a node joined alike where that was measured.
    links = [path for path in tables if path.stem.rpartition("__")[2] == "all_reduce"
             and (len(cards(tables)) == 1 or is_card(_card(path), gpu))]
    link = next(iter(sorted(links, key=lambda path: ("dgx" not in str(path.parent.name) + path.stem, path))), None)
    for path in tables:
        if len(cards(tables)) > 1 and not is_card(_card(path), gpu):
            continue
        if path.stem.rpartition("__")[2] == "mlp":
            if several and not _has_shapes(path, model):
                continue
            read = read_mlp(path, gpu, model)
        elif path == link:
            read = read_all_reduce(path, gpu)
        else:
            continue
        where = "/".join(path.parts[-4:])
        rows += [{**row, "origin": f"{ORIGIN.repository} {where} {commit or 'not in the folder'}",
                  "licence": licence or "not in the folder"} for row in read]
    return rows


def _has_shapes(path: Path, model: ModelSpec) -> bool:
    raw = read_columns(path, ("n_embd", "n_head", "n_expanded_embd"))[0]
    return [whole(raw, name, path, 0) for name in ("n_embd", "n_head", "n_expanded_embd")] == [
        model.hidden_size, model.num_heads, model.intermediate_size]


def read_mlp(path: Path, gpu: str | GpuSpec, model: ModelSpec) -> list[Row]:
    """``mlp.csv``: one row a token count; TP 1."""
    rows = []
    shapes = gemm_shapes(model)
    needed = ["num_tokens", "num_tensor_parallel_workers", "n_embd", *(f"time_stats.{name}.median" for name in OPS)]
    for i, raw in enumerate(read_columns(path, needed)):
        if whole(raw, "num_tensor_parallel_workers", path, i) != 1:
            continue
        if (found := whole(raw, "n_embd", path, i)) != model.hidden_size:
            raise ProfileError(f"{path}: row {i}: n_embd = {found}, {model.name} has {model.hidden_size}: another model's table")
        tokens = whole(raw, "num_tokens", path, i)
        for name, ours in OPS.items():
            columns = (gemm_columns(tokens, *shapes[ours], model) if ours in shapes else rowwise_columns(ours, tokens, model))
            row = make_row(ORIGIN, path, i, gpu, number(raw, f"time_stats.{name}.median", path, i) * MILLI,
                           {**columns, "dtype": "float16"})
            rows.append({**row, "id": f"{row['id']}|{name}"})  # a layer's two norms are two measurements
    return number_repeats(rows)


def read_all_reduce(path: Path, gpu: str | GpuSpec) -> list[Row]:
    """``all_reduce.csv``: bytes; all GPUs of one node."""
    rows = []
    needed = ("time_stats.all_reduce.median", "num_workers", "size", "devices_per_node")
    for i, raw in enumerate(read_columns(path, needed)):
        gpus = whole(raw, "num_workers", path, i, 1)
        if gpus == whole(raw, "devices_per_node", path, i):
            rows.append(make_row(ORIGIN, path, i, gpu, number(raw, needed[0], path, i) * MILLI,
                                 all_reduce_columns(gpus, whole(raw, "size", path, i))))
    return number_repeats(rows, spread=3.0)  # eager launches of some 40 us, in whole microseconds
