"""What the publishers' readers share: tables of several file formats, checked cells, and rows with their origin.

Each reader knows its unit and refuses what it cannot read, with the file and the row. Seconds and bytes throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec, model_label
from bullet.door import read_csv
from bullet.errors import ProfileError, printable, short
from bullet.parquet import read_table
from bullet.profiles.check import REPEAT, SHAPE, gpu_of, name_of
from bullet.profiles.rows import Row, check_row
from bullet.work import dense_kernels, embedding_bytes, gemm_shapes

REPEAT_SPREAD = 1.5
"""Repeats of one measurement further apart than this (largest over smallest) are not repeats."""


@dataclass(frozen=True)
class Origin:
    """Where rows come from and what may be done with them.

    ``files``: the tables' paths in the repository, by a part of their names here: ``<hardware>__<source>__<table>``, where the
    source is a model, or ``<framework>_<version>``.
    """

    repository: str
    commit: str
    version: str
    licence: str
    files: Mapping[str, str] = field(default_factory=dict)
    place: str = ""
    """Where all of them are, for a folder that its publisher's own paths name."""

    def upstream(self, path: Path) -> str:
        """A file's path in its repository, where its name or ``place`` tells."""
        if self.place:
            return f"{self.place}/{path.name}"
        name = path.name.removesuffix(".gz")
        hardware, _, rest = name.partition("__")
        source, table = rest.partition("__")[0], rest.rpartition("__")[2]
        framework, _, version = source.rpartition("_")
        for part, place in self.files.items():
            if part in table:
                return place.format(hardware=hardware, source=source, table=table, framework=framework, version=version)
        return name

    def columns(self, path: Path) -> dict[str, str]:
        """The row's provenance."""
        return {"origin": f"{self.repository} {self.upstream(path)} {self.commit}", "origin_version": self.version,
                "licence": self.licence}


def read_columns(path: Path, needed: Iterable[str]) -> list[dict[str, Any]]:
    """Rows of a parquet, csv or csv.gz file that has the ``needed`` columns; :class:`ProfileError` otherwise."""
    rows: list[dict[str, Any]]
    needed = tuple(needed)
    if path.suffix == ".parquet":
        table = read_table(path, "a table")[0]
        absent = [name for name in needed if name not in table.column_names]
        if absent:
            raise ProfileError(f"{path}: no column {absent[0]!r}: it has {short(', '.join(table.column_names), 200)}")
        rows = table.to_pylist()
    else:
        rows = [cells for _, cells in read_csv(path, needed, ProfileError)]
    if not rows:
        raise ProfileError(f"{path}: holds no rows")
    return rows


def number(raw: Mapping[str, Any], name: str, path: Path, index: int) -> float:
    """A cell as a finite number of 0 or more; ``index``: position of the row, from 0."""
    try:
        value = float(raw[name])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ProfileError(f"{path}: row {index}: {name} = {short(raw.get(name))}: must be a number") from None
    if not (math.isfinite(value) and value >= 0):
        raise ProfileError(f"{path}: row {index}: {name} = {value}: must be finite and 0 or more")
    return value


def whole(raw: Mapping[str, Any], name: str, path: Path, index: int, least: int = 0) -> int:
    """A cell as a whole number of ``least`` or more, of 53 bits, what a double holds."""
    value = number(raw, name, path, index)
    if value != int(value) or not least <= value < 2**53:
        raise ProfileError(f"{path}: row {index}: {name} = {value}: must be a whole number, {least} or more")
    return int(value)


def seconds(raw: Mapping[str, Any], name: str, path: Path, index: int, unit: float) -> float:
    """A cell as a time, in seconds; ``unit``: of the file's, in seconds."""
    value = number(raw, name, path, index) * unit
    if not value > 0:
        raise ProfileError(f"{path}: row {index}: {name} = {raw[name]}: must be positive, a time")
    return value


def text(raw: Mapping[str, Any], name: str, path: Path, index: int) -> str:
    """A cell as one line of text."""
    value = raw[name]
    if not isinstance(value, str) or printable(value) != value:
        raise ProfileError(f"{path}: row {index}: {name} = {short(value)}: must be one line of text")
    return value


def make_row(origin: Origin, path: Path, index: int, gpu: str | GpuSpec, seconds: float, columns: Mapping[str, Any]) -> Row:
    """One imported row: alone, on the whole device. ``order`` is the position in its file."""
    spec = gpu if isinstance(gpu, GpuSpec) else gpu_of(gpu, f"{path}: row {index}")
    gpu, sms = gpu.name if isinstance(gpu, GpuSpec) else gpu, spec.num_sms
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
            raise ProfileError(f"{name_of(found[0])} and row {found[-1]['order']} repeat one measurement but are "
                               f"{max(times) / max(min(times), 1e-12):.3g} times apart")
        for i, row in enumerate(found[1:], 2):
            row["id"] += f"{REPEAT}{i}"
    return list(rows)


def gemm_columns(m: int, n: int, k: int, model: ModelSpec) -> dict[str, Any]:
    """Shape, operations and bytes of a 16-bit GEMM, named after the model's own on one GPU where it is one of them."""
    named = next((f"gemm_{name}" for name, shape in gemm_shapes(model).items() if shape == (n, k)), None)
    return {"op": named or "gemm", "model": model_label(model) if named else None, "tokens": m, "columns": n, "inner": k,
            "flops": 2.0 * m * n * k, "bytes": 2.0 * (m * k + k * n + m * n)}


def rowwise_columns(name: str, tokens: int, model: ModelSpec, tensor_parallel: int = 1) -> dict[str, Any]:
    """The same for a kernel that works on rows one by one."""
    moved = (embedding_bytes(model, 1) if name == "embedding"
             else next(k.bytes for k in dense_kernels(model, 1, tensor_parallel) if k.name == name))
    return {"op": name, "model": model_label(model), "tokens": tokens, "flops": 0.0, "bytes": tokens * moved}


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


def all_reduce_columns(gpus: int, message_bytes: int) -> dict[str, Any]:
    """Ring: each GPU sends ``2 (t - 1) / t`` of the message."""
    return {"op": "all_reduce", "num_gpus": gpus, "message_bytes": float(message_bytes),
            "flops": 0.0, "bytes": 2 * (gpus - 1) / gpus * message_bytes}
