"""NetX-lab/Frontier: FlashInfer's attention on an A800, A100's silicon. Milliseconds, to whole microseconds."""

from __future__ import annotations

from pathlib import Path

from bullet.catalog.models import ModelSpec
from bullet.profiles.check import A800, WIDEST_SPREAD
from bullet.profiles.importers.reading import Origin, attention_columns, make_row, number, number_repeats, read_columns, whole
from bullet.profiles.rows import Row
from bullet.units import MILLI

ORIGIN = Origin("NetX-lab/Frontier", "a4b22df8211864bf229258ecdfbe680f048f2d77", "flashinfer (frontier)", "MIT", {
    "attention.parquet": "data/profiling/compute/{hardware}/meta-llama/{source}-hf/attention.csv"})


def tables(gpu: str, kernels: Path, model: ModelSpec) -> list[Row]:
    """What there is for A100, of llama-2's heads; ``kernels``: the folder of all publishers."""
    return read_attention(kernels / "frontier/a800__Llama-2-7b__attention.parquet", A800)


def read_attention(path: Path, gpu: str) -> list[Row]:
    """``attention.csv``: its own heads; ``kv_cache_size`` past tokens."""
    rows = []
    for i, raw in enumerate(read_columns(path, ("n_embd", "n_q_head", "n_kv_head", "batch_size", "prefill_chunk_size",
                                                "kv_cache_size", "is_prefill", "time_stats.attn_prefill.median"))):
        batch, chunk, past, hidden, kv = (whole(raw, name, path, i) for name in (
            "batch_size", "prefill_chunk_size", "kv_cache_size", "n_embd", "n_kv_head"))
        q = whole(raw, "n_q_head", path, i, 1)
        heads, prefill = (q, kv, hidden // q), str(raw["is_prefill"]) == "True"
        columns = (attention_columns("prefill_attention", batch, chunk, past, heads) if prefill
                   else attention_columns("decode_attention", batch, 1, past + 1, heads))
        name = f"time_stats.attn_{'prefill' if prefill else 'decode'}.median"
        rows.append(make_row(ORIGIN, path, i, gpu, number(raw, name, path, i) * MILLI, {**columns, "dtype": "float16"}))
    return number_repeats(rows, spread=WIDEST_SPREAD)
