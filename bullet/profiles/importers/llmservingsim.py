"""casys-kaist/LLMServingSim: every kernel of a step of Llama-3.1-8B by vLLM on an RTX 4090. Microseconds."""

from __future__ import annotations

from pathlib import Path

from bullet.catalog.models import ModelSpec
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

ORIGIN = Origin("casys-kaist/LLMServingSim", "5daddb21a545658d5150b535712d0494584b5278", "vllm 0.19.0", "MIT", {
    ".csv": "profiler/perf/{hardware}/meta-llama/{source}/bf16/tp1/{table}"})
OPS = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down", "layernorm": "norm",
                  "final_layernorm": "norm", "rotary_emb": "rope", "act_fn": "act", "embedding": "embedding"}


def tables(gpu: str, kernels: Path, model: ModelSpec) -> list[Row]:
    """What there is of the RTX 4090; ``kernels``: the folder of all publishers."""
    dense, per_sequence, attention = (kernels / f"llmservingsim/RTX4090__Llama-3.1-8B__{name}.csv.gz"
                                      for name in ("dense", "per_sequence", "attention"))
    return [*read_dense(dense, RTX4090, model), *read_dense(per_sequence, RTX4090, model),
            *read_attention(attention, RTX4090, model)]


def read_dense(path: Path, gpu: str, model: ModelSpec) -> list[Row]:
    """``dense.csv`` or ``per_sequence.csv``: (layer, tokens) or (layer, sequences)."""
    rows = []
    shapes = gemm_shapes(model)
    table = read_columns(path, ("layer", "time_us"))
    count = "tokens" if "tokens" in table[0] else "sequences"
    read_columns(path, (count,))
    for i, raw in enumerate(table):
        layer, tokens = text(raw, "layer", path, i), whole(raw, count, path, i)
        name = OPS.get(layer, layer)
        if name == "sampler":
            columns = {"op": "sampler", "model": model.name, "tokens": tokens, "flops": 0.0,
                       "bytes": float(model.dtype_bytes) * tokens * model.vocab_size}
        elif name in shapes:
            columns = gemm_columns(tokens, *shapes[name], model)
        elif name in ("norm", "rope", "act", "embedding"):
            columns = rowwise_columns(name, tokens, model)
        else:
            raise ProfileError(f"{path}: row {i}: unknown layer {short(layer)}: known are "
                               f"{', '.join([*OPS, 'lm_head', 'sampler'])}")
        row = make_row(ORIGIN, path, i, gpu, number(raw, "time_us", path, i) * MICRO, columns)
        rows.append({**row, "id": f"{row['id']}|{layer}"})
    return rows


def read_attention(path: Path, gpu: str, model: ModelSpec) -> list[Row]:
    """``attention.csv``: prefill chunk and decodes in one kernel. Without the one it is the other's row."""
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
        rows.append(make_row(ORIGIN, path, i, gpu, number(raw, "time_us", path, i) * MICRO,
                             {**columns, "model": model.name}))
    return rows
