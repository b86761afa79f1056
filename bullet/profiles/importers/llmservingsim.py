"""casys-kaist/LLMServingSim: every kernel of a step, timed inside vLLM. Microseconds.

Its profiler leaves a folder for each card, model and element type, ``<card>/<model>/<variant>``: ``meta.yaml``, and for each
degree of tensor parallelism ``tpN/`` with the kernels of one shard, measured on one GPU: ``dense.csv``, ``per_sequence.csv``,
``attention.csv`` (prefill and decodes in one kernel), ``moe.csv`` (tokens by experts touched) and ``skew.csv`` (unequal contexts;
its times are sums over the runs of a measurement).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec, model_label
from bullet.devices.table import ATTENTION_AXES, EXPERT_AXES, EXPERTS, HEAD_KERNELS
from bullet.devices.table_skew import COLUMNS as SKEW_COLUMNS
from bullet.door import read_text
from bullet.errors import ProfileError, short
from bullet.profiles.check import RTX4090
from bullet.profiles.importers.reading import (
    Origin,
    attention_columns,
    gemm_columns,
    make_row,
    number,
    read_columns,
    rowwise_columns,
    text,
    whole,
)
from bullet.profiles.rows import Row
from bullet.units import MICRO
from bullet.work import gemm_shapes

REPOSITORY, COMMIT, LICENCE = "casys-kaist/LLMServingSim", "5daddb21a545658d5150b535712d0494584b5278", "MIT"
PLACE = "profiler/perf/{hardware}/{model}/{variant}/tp{degree}"
ORIGIN = Origin(REPOSITORY, COMMIT, "vllm 0.19.0", LICENCE, {
    ".csv": PLACE.format(hardware="{hardware}", model="meta-llama/{source}", variant="bf16", degree=1) + "/{table}"})
OPS = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down", "layernorm": "norm",
       "final_layernorm": "norm", "qk_norm": "qk_norm", "rotary_emb": "rope", "act_fn": "act", "embedding": "embedding"}
EXPERTS_FILE = "moe.csv"
ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
SKEW = ("n", "kv_mean", "kv_big", "t_mean_us", "t_skew_us")
SKEW_RATIO = 4.0
"""Of the one longer context over the others, on the published grid."""


@dataclass(frozen=True)
class Folder:
    """One card's and model's tables. ``runs``: of a measurement. ``sizes``: of the shard that was measured last, by name."""

    path: Path
    gpu: str
    hardware: str
    model: str
    version: str
    variant: str
    runs: int
    taken: str
    eager: bool
    degrees: tuple[int, ...]
    sizes: Mapping[str, int]

    def origin(self, degree: int, commit: str | None = None, licence: str | None = None) -> Origin:
        """Of one shard's tables. What the publisher's repository says of its own is not in the folder: it is given, or named as
        unknown."""
        place = PLACE.format(hardware=self.hardware, model=self.model, variant=self.variant, degree=degree)
        return Origin(REPOSITORY, commit or f"taken {self.taken}", f"vllm {self.version}",
                      licence or "not in the folder", place=place)

    @property
    def source(self) -> str:
        """One line for a device's label."""
        return f"LLMServingSim's profile of vLLM {self.version} on {self.gpu}"


def folders(path: Path) -> list[Path]:
    """Folders of this layout at or below a path."""
    return sorted(meta.parent for meta in path.rglob("meta.yaml") if any(meta.parent.glob("tp*/dense.csv")))


def read_meta(path: Path) -> Folder:
    """A folder's ``meta.yaml``; :class:`ProfileError` names the key that is missing."""
    where = path / "meta.yaml"
    text = read_text(where, ProfileError)

    def value(key: str, default: str | None = None) -> str:
        found = re.search(rf"^[ \t]*{key}:[ \t]*['\"]?([^'\"\n]*?)['\"]?[ \t]*$", text, re.M)
        if found is None or not found[1]:
            if default is not None:
                return default
            raise ProfileError(f"{where}: no {key!r}: is this a profile of LLMServingSim?")
        return found[1]

    runs = value("measurement_iterations", "1")
    if not re.fullmatch("[1-9][0-9]{0,5}", runs):
        raise ProfileError(f"{where}: measurement_iterations = {runs!r}: must be a whole number from 1")
    sizes = {key: int(found) for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
             if re.fullmatch("[0-9]{1,9}", found := value(key, ""))}
    degrees = sorted(int(p.parent.name[2:]) for p in path.glob("tp*/dense.csv")
                     if re.fullmatch("tp[1-9][0-9]{0,3}", p.parent.name))
    return Folder(path, value("gpu"), value("hardware"), value("model"), value("vllm_version"), value("variant", "bf16"),
                  int(runs), value("profiled_at", "at an unknown time"), value("enforce_eager", "false") == "true",
                  tuple(degrees), sizes)


def check_model(folder: Folder, model: ModelSpec) -> None:
    """Refuse a model that is not the one measured: its shard's sizes times some degree of parallelism are not the model's."""
    if folder.variant not in ("bf16", "fp16", "float16", "bfloat16") or model.mlp_bits != 16 or model.attention_bits != 16:
        raise ProfileError(f"{folder.path}: tables of {folder.variant}: only 16-bit weights are read, and {model.name} has "
                           f"{model.mlp_bits:g}-bit ones")
    mine = {"num_attention_heads": model.num_heads, "vocab_size": model.vocab_size}
    known = {key: size for key, size in folder.sizes.items() if key in mine}
    text = read_text(folder.path / "meta.yaml", ProfileError)
    listed = re.search(r"^tp_degrees:[ \t]*\[([0-9, ]+)\]|^tp_degrees:\s*\n((?:\s*- *[0-9]+\n)+)", text, re.M)
    degrees = {int(d) for d in re.findall("[0-9]+", listed[0])} if listed else set()
    for degree in {*degrees, *folder.degrees}:
        if all(size * degree == mine[key] for key, size in known.items()):
            return
    if known:
        raise ProfileError(f"{folder.path}: a shard of {', '.join(f'{key} {size}' for key, size in known.items())} is none of "
                           f"{model.name} ({', '.join(f'{key} {size}' for key, size in mine.items())}): another model's table")


def read_folder(folder: Folder, gpu: str | GpuSpec, model: ModelSpec, commit: str | None = None,
                licence: str | None = None) -> list[Row]:
    """Rows of all shards but experts', which no fit reads. Of further shards only what differs by their shapes."""
    rows: list[Row] = []
    for degree in folder.degrees:
        own, origin = folder.path / f"tp{degree}", folder.origin(degree, commit, licence)
        found = [row for name in ("dense", "per_sequence")
                 for row in read_dense(own / f"{name}.csv", gpu, model, origin=origin, tensor_parallel=degree)]
        found += read_attention(own / "attention.csv", gpu, model, origin=origin, tensor_parallel=degree)
        rows += found if degree == folder.degrees[0] else [r for r in found if r["columns"] or r["heads"]]
    return rows


def tables(gpu: str, kernels: Path, model: ModelSpec) -> list[Row]:
    """What there is of the RTX 4090; ``kernels``: the folder of all publishers."""
    dense, per_sequence, attention = (kernels / f"llmservingsim/RTX4090__Llama-3.1-8B__{name}.csv.gz"
                                      for name in ("dense", "per_sequence", "attention"))
    return [*read_dense(dense, RTX4090, model), *read_dense(per_sequence, RTX4090, model),
            *read_attention(attention, RTX4090, model)]


def read_dense(path: Path, gpu: str | GpuSpec, model: ModelSpec, *, origin: Origin = ORIGIN,
               tensor_parallel: int = 1) -> list[Row]:
    """``dense.csv`` or ``per_sequence.csv``: (layer, tokens) or (layer, sequences)."""
    rows = []
    shapes = gemm_shapes(model, tensor_parallel)
    table = read_columns(path, ("layer", "time_us"))
    count = "tokens" if "tokens" in table[0] else "sequences"
    read_columns(path, (count,))
    for i, raw in enumerate(table):
        layer, tokens = text(raw, "layer", path, i), whole(raw, count, path, i)
        name = OPS.get(layer, layer)
        if name == "sampler":
            columns = {"op": "sampler", "model": model_label(model), "tokens": tokens, "flops": 0.0,
                       "bytes": float(model.dtype_bytes) * tokens * model.vocab_size}
        elif name in shapes:
            # By its layer, not its shape: two layers may have one, and a shard's are not those of the whole.
            columns = {**gemm_columns(tokens, *shapes[name], model), "op": f"gemm_{name}", "model": model_label(model)}
        elif name in ("norm", "rope", "act", "embedding") or (name == "qk_norm" and model.qk_norm):
            columns = rowwise_columns(name, tokens, model, tensor_parallel)
        else:
            raise ProfileError(f"{path}: row {i}: unknown layer {short(layer)}: known are "
                               f"{', '.join([*(layer for layer in OPS if layer != 'qk_norm' or model.qk_norm), *HEAD_KERNELS])}")
        row = make_row(origin, path, i, gpu, number(raw, "time_us", path, i) * MICRO, columns)
        rows.append({**row, "id": f"{row['id']}|{layer}"})
    return rows


def read_attention(path: Path, gpu: str | GpuSpec, model: ModelSpec, *, origin: Origin = ORIGIN,
                   tensor_parallel: int = 1) -> list[Row]:
    """``attention.csv``: prefill chunk and decodes in one kernel. Without the one it is the other's row."""
    rows = []
    heads = (model.num_heads // tensor_parallel, max(1, model.num_kv_heads // tensor_parallel), model.head_dim)
    for i, raw in enumerate(read_columns(path, (*ATTENTION, "time_us"))):
        chunk, past, seqs, context = (whole(raw, name, path, i) for name in ATTENTION)
        if chunk and seqs:
            columns = attention_columns("mixed_attention", 1, chunk, past, heads, decode_seqs=seqs, decode_context=context)
        elif chunk:
            columns = attention_columns("prefill_attention", 1, chunk, past, heads)
        else:
            columns = attention_columns("decode_attention", seqs, 1, context, heads)
        rows.append(make_row(origin, path, i, gpu, number(raw, "time_us", path, i) * MICRO,
                             {**columns, "model": model_label(model)}))
    return rows


# ------------------------------------------------------------------------------------------- as the table device reads them


def table_rows(dense: Path, per_sequence: Path, attention: Path, moe: Path | None = None) -> Iterator[dict[str, Any]]:
    """Kernels of a step as rows of ``engine_tables.parquet``, seconds."""
    for path, count in ((dense, "tokens"), (per_sequence, "sequences")):
        for i, raw in enumerate(read_columns(path, ("layer", count, "time_us"))):
            yield {"kernel": raw["layer"], count: whole(raw, count, path, i), "seconds": number(raw, "time_us", path, i) * MICRO}
    if moe is not None:
        for i, raw in enumerate(read_columns(moe, ("tokens", "activated_experts", "time_us"))):
            yield {"kernel": EXPERTS, "seconds": number(raw, "time_us", moe, i) * MICRO,
                   **{ours: whole(raw, theirs, moe, i) for ours, theirs in zip(EXPERT_AXES, ("tokens", "activated_experts"),
                                                                             strict=True)}}
    for i, raw in enumerate(read_columns(attention, (*ATTENTION, "time_us"))):
        yield {"kernel": "attention", "seconds": number(raw, "time_us", attention, i) * MICRO,
               **{ours: whole(raw, theirs, attention, i) for ours, theirs in zip(ATTENTION_AXES, ATTENTION, strict=True)}}


def shard_rows(folder: Folder, degree: int) -> list[dict[str, Any]]:
    """:func:`table_rows` of one ``tpN``."""
    own = folder.path / f"tp{degree}"
    moe = own / EXPERTS_FILE
    return list(table_rows(own / "dense.csv", own / "per_sequence.csv", own / "attention.csv", moe if moe.is_file() else None))


def skew_rows(path: Path, runs: int) -> list[dict[str, Any]]:
    """``skew.csv``: decodes of which one has four times the context of the others, and as many with the mean each; one run's
    seconds of one layer. Several long contexts, other ratios and batches beside a prompt are left out."""
    rows = []
    for i, raw in enumerate(read_columns(path, ("regime", "nb", "skew", "pc", *SKEW))):
        if raw["regime"] == "pure" and raw["nb"] == "1" and raw["pc"] == "0" and number(raw, "skew", path, i) == SKEW_RATIO:
            rows.append({ours: (number(raw, theirs, path, i) * MICRO / runs if theirs.startswith("t_")
                                else whole(raw, theirs, path, i)) for ours, theirs in zip(SKEW_COLUMNS, SKEW, strict=True)})
    return rows


def as_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str], metadata: Mapping[str, str]) -> Any:
    """Rows as a pyarrow table: counts are whole, what ends in seconds is not, kernels are text."""
    import pyarrow as pa

    def kind(name: str) -> Any:
        return pa.string() if name == "kernel" else pa.float64() if name.endswith("seconds") else pa.int32()

    return pa.table({name: pa.array([row.get(name) for row in rows], type=kind(name)) for name in names}, metadata=dict(metadata))
