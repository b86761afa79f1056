"""Public tables become rows with the right units and shapes; what no GPU can have measured is refused with its row."""

import csv
import gzip
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bullet.catalog.models import get_model
from bullet.errors import ProfileError
from bullet.profiles.check import A100, A800, RTX4090, check_samples
from bullet.profiles.importers import aiconfigurator, frontier, import_public, llmservingsim, vidur
from bullet.profiles.rows import Row, read_parquet

LLAMA = get_model("llama-3.1-8b")
ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A table in the format that the suffix says."""
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    with gzip.open(path, "wt", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def dense(tmp_path: Path, rows: list[tuple[Any, Any, Any]]) -> list[Row]:
    """LLMServingSim's dense table of (layer, tokens, microseconds)."""
    path = write(tmp_path / "RTX4090__Llama-3.1-8B__dense.csv.gz", [{"layer": a, "tokens": b, "time_us": c} for a, b, c in rows])
    return llmservingsim.read_dense(path, RTX4090, LLAMA)


def qkv(*microseconds: float) -> list[tuple[str, int, float]]:
    return [("qkv_proj", 100 * (i + 1), us) for i, us in enumerate(microseconds)]


# -------------------------------------------------------------------------------------------- reading


def test_servingsim_is_in_microseconds_with_the_models_shapes(tmp_path: Path) -> None:
    rows = dense(tmp_path, [("qkv_proj", 1000, 400.0), ("layernorm", 10, 2.0), ("final_layernorm", 10, 2.5)])
    gemm, norm, final = rows
    assert gemm["median_s"] == pytest.approx(400e-6)
    assert (gemm["op"], gemm["tokens"], gemm["columns"], gemm["inner"]) == ("gemm_qkv", 1000, 6144, 4096)
    assert gemm["flops"] == 2 * 1000 * 6144 * 4096
    assert gemm["bytes"] == 2 * (1000 * 4096 + 4096 * 6144 + 1000 * 6144)
    assert norm["bytes"] == 4 * 2 * 10 * 4096  # reads x and residual, writes both
    assert (norm["op"], final["op"]) == ("norm", "norm")
    assert norm["id"] != final["id"]
    assert (gemm["licence"], gemm["origin_version"], gemm["sms"]) == ("MIT", "vllm 0.19.0", 128)
    assert gemm["origin"].split()[:2] == ["casys-kaist/LLMServingSim",
                                          "profiler/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1/dense.csv"]


def test_mixed_attention_splits_into_what_it_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "attention.csv.gz", [
        {"prefill_chunk": c, "kv_prefill": p, "n_decode": n, "kv_decode": k, "time_us": 100.0}
        for c, p, n, k in ((0, 0, 4, 100), (16, 32, 0, 0), (16, 32, 4, 100))])
    decode, prefill, mixed = llmservingsim.read_attention(path, RTX4090, LLAMA)
    assert [r["op"] for r in (decode, prefill, mixed)] == ["decode_attention", "prefill_attention", "mixed_attention"]
    # 4 sequences attend 100 tokens each: 4 x 32 heads x 128 a pair; 16 new tokens see 32 past and on average 8.5 of their own.
    assert decode["flops"] == 4 * 32 * 128 * 400
    assert prefill["flops"] == pytest.approx(4 * 32 * 128 * 16 * (32 + 8.5))
    assert mixed["flops"] == decode["flops"] + prefill["flops"]
    assert mixed["bytes"] == decode["bytes"] + prefill["bytes"]
    assert (mixed["tokens"], mixed["context_tokens"], mixed["decode_seqs"], mixed["decode_context_tokens"]) == (16, 32, 4, 100)


def aic(**changes: Any) -> dict[str, Any]:
    base = {"framework": "VLLM", "version": "0.14.0", "device": "NVIDIA A100-SXM4-80GB", "op_name": "context_attention",
            "batch_size": 2, "isl": 100, "step": 0, "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "latency": 0.5}
    return {**base, **changes}


def test_aiconfigurator_is_in_milliseconds_and_other_heads_and_types_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a100_sxm__vllm_0.14.0__context_attention_perf.parquet", [
        aic(), aic(num_heads=64), aic(kv_cache_dtype="fp8"), aic(op_name="generation_attention", isl=1, step=99, batch_size=3)])
    prefill, decode = aiconfigurator.read_attention(path, LLAMA)
    assert prefill["median_s"] == pytest.approx(0.5e-3)
    assert (prefill["tokens"], prefill["batch"], prefill["order"]) == (200, 2, 0)
    assert (decode["context_tokens"], decode["batch"], decode["order"]) == (100, 3, 3)  # 99 past and the new one
    assert decode["bytes"] == 2 * 128 * (2 * 32 * 3 + 2 * 8 * 300)
    assert prefill["origin_version"] == "vllm 0.14.0"
    assert "data/a100_sxm/attention/vllm/0.14.0/context_attention_perf.parquet" in prefill["origin"]


def test_aiconfigurator_all_reduce_sizes_are_elements_of_two_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [
        {"framework": "vLLM", "version": "1", "device": "NVIDIA A100-SXM4-80GB", "num_gpus": 4, "message_size": 1000,
         "latency": 0.01, "backend": backend} for backend in ("vllm_graph", "vllm_eager")])
    (row,) = aiconfigurator.read_all_reduce(path)
    assert (row["message_bytes"], row["bytes"]) == (2000.0, 3000.0)  # ring: 2 (t - 1) / t = 1.5


def test_grid_gemms_keep_their_shape(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [
        {"framework": "SGLang", "version": "0.5.10", "device": "NVIDIA H100 80GB HBM3", "gemm_dtype": kind, "m": 8, "n": n,
         "k": 4096, "latency": 0.05} for kind, n in (("bfloat16", 6144), ("bfloat16", 16384), ("fp8", 6144))])
    rows = aiconfigurator.read_gemm(path, LLAMA, lambda m, n, k: True)
    assert [(r["op"], r["columns"]) for r in rows] == [("gemm_qkv", 6144), ("gemm", 16384)]


def vidur_row(tokens: int, milliseconds: float, **changes: Any) -> dict[str, Any]:
    return {"num_tokens": tokens, "num_tensor_parallel_workers": 1, "n_embd": 4096,
            **{f"time_stats.{name}.median": milliseconds for name in vidur.OPS}, **changes}


def test_vidur_rows_of_tp_1_and_repeats_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "mlp.parquet", [vidur_row(64, 1.0), vidur_row(64, 1.1),
                                            vidur_row(64, 9.0, num_tensor_parallel_workers=2)])
    rows = vidur.read_mlp(path, A100, LLAMA)
    assert len(rows) == 2 * len(vidur.OPS)
    assert len({r["id"] for r in rows}) == len(rows)
    assert sum(r["id"].endswith("|repeat 2") for r in rows) == len(vidur.OPS)
    assert sorted({r["median_s"] for r in rows}) == pytest.approx([1.0e-3, 1.1e-3])


def test_frontier_rows_keep_their_own_heads(tmp_path: Path) -> None:
    path = write(tmp_path / "attention.parquet", [
        {"n_embd": 4096, "n_q_head": 32, "n_kv_head": 32, "batch_size": 2, "prefill_chunk_size": chunk, "kv_cache_size": 96,
         "is_prefill": chunk > 0, "time_stats.attn_prefill.median": 0.05, "time_stats.attn_decode.median": 0.02}
        for chunk in (64, 0)])
    prefill, decode = frontier.read_attention(path, A800)
    assert (prefill["median_s"], decode["median_s"]) == (pytest.approx(5e-5), pytest.approx(2e-5))
    assert (prefill["tokens"], prefill["context_tokens"], decode["context_tokens"]) == (128, 96, 97)
    assert decode["kv_heads"] == 32
    check_samples([prefill, decode])


# ------------------------------------------------------------------------------------------- refusing


@pytest.mark.parametrize(("rows", "message"), [
    ([("qkv_proj", 1, "nan")], r"dense.csv.gz: row 0: time_us = nan: must be finite"),
    ([("qkv_proj", 1, 50), ("qkv_proj", 2, "fast")], r"row 1: time_us = 'fast': must be a number"),
    ([("qkv_proj", 1, -3)], "must be finite and 0 or more"),
    ([("qkv_proj", 1.5, 50)], r"row 0: tokens = 1.5: must be a whole number"),
    ([("mystery", 1, 50)], "row 0: unknown layer 'mystery': known are qkv_proj"),
])
def test_a_cell_that_is_no_measurement_is_refused_with_its_row(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        dense(tmp_path, rows)


def test_a_missing_file_or_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"none.parquet: cannot be read"):
        vidur.read_mlp(tmp_path / "none.parquet", A100, LLAMA)
    path = write(tmp_path / "t.parquet", [{"a": 1}])
    with pytest.raises(ProfileError, match="no column 'num_tokens': it has a"):
        vidur.read_mlp(path, A100, LLAMA)
    with pytest.raises(ProfileError, match=r"n_embd = 5120, llama-3.1-8b has 4096"):
        vidur.read_mlp(write(tmp_path / "m.parquet", [vidur_row(1, 0.1, n_embd=5120)]), A100, LLAMA)


def test_good_rows_pass_and_say_their_gpu(tmp_path: Path) -> None:
    assert check_samples(dense(tmp_path, qkv(70, 80, 110, 140, 170))).name == "rtx4090"


@pytest.mark.parametrize(("rows", "message"), [
    (qkv(70, 80, 110_000, 140, 170), r"row 2 \(gemm_qkv\): 0.11 s is .* times its neighbours' for its work: another unit"),
    (qkv(70, 80, 110, 0.14, 170), r"row 3 \(gemm_qkv\): .* TFLOPS is above rtx4090's peak of 165.2"),
    (qkv(70e3, 80e3, 110e3, 140e3, 170e3), r"what rtx4090's data sheet allows: another unit"),
    ([("layernorm", 64, us) for us in (3.0,)] + [("layernorm", 64 + i, 3.0) for i in (1, 2, 3)]
     + [("layernorm", 99, 0.003)], r"row 4 \(norm\): 3e-09 s is 1/\d+ of its neighbours'"),
    ([("layernorm", 8192, 100)], r"row 0 \(norm\): 2684 GB/s is above rtx4090's peak of 1008"),  # 4 x 2 bytes x 4096 x 8192
    ([*qkv(70, 80), ("qkv_proj", 100, 71)], r"row 2 \(gemm_qkv\) repeats row 0"),
    (qkv(0, 80), r"dense.csv.gz: row 0: median_s = 0.0: must be positive"),
])
def test_what_no_gpu_measures_is_refused_with_its_row(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        check_samples(dense(tmp_path, rows))


@pytest.mark.parametrize(("change", "message"), [
    ({"tokens": None}, r"row 0 \(gemm_qkv\): tokens is missing: gemm_qkv needs tokens"),
    ({"tokens": -5}, "tokens = -5: must be 1 or more"),
    ({"op": "gemm", "columns": None}, r"row 0 \(gemm\): columns is missing: gemm needs tokens, columns, inner"),
    ({"op": "decode_attention", "batch": 4, "context_tokens": None}, "context_tokens is missing"),
    ({"op": "prefill_attention", "batch": 0, "context_tokens": 0}, "batch = 0: must be 1 or more"),
    ({"op": "all_reduce", "num_gpus": 2}, "message_bytes is missing"),
    ({"op": "norm", "bytes": None}, "bytes is missing"),
    ({"heads": -1}, "heads = -1: must be 0 or more"),
    ({"kind": "banana"}, "kind = 'banana': must be solo, corun, control, anchor"),
    ({"source": "guessed"}, "source = 'guessed': must be measured, simulated"),
    ({"op": "gemv"}, r"op = 'gemv': must be gemm_\*, \*_layer, gemm, prefill_attention"),
    ({"sms": 0}, "sms = 0: must be 1 to 128"),
    ({"sms": 129}, "sms = 129: must be 1 to 128"),
    ({"device_sms": 64}, "device_sms = 64: rtx4090 has 128"),
    ({"tokens": 101}, r"5.03316e\+09 flops, but 101 x 6144 x 4096 are 5.0835e\+09: one is wrong"),
])
def test_a_row_without_its_counts_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = dense(tmp_path, qkv(70, 80))
    with pytest.raises(ProfileError, match=message):
        check_samples([{**rows[0], **change}, rows[1]])


def test_one_measurement_under_two_ids_is_refused_with_both_rows(tmp_path: Path) -> None:
    """Equal in all that was measured: whatever the id says, and whether or not the times are the same."""
    rows = dense(tmp_path, [*qkv(70, 80, 110), ("layernorm", 64, 3.0), ("final_layernorm", 64, 3.1)])
    check_samples(rows)  # a layer's norm and the last one have one shape and are two kernels
    for us in (80, 82):
        again = {**rows[1], "id": "mine", "order": 9, "median_s": us * 1e-6}
        with pytest.raises(ProfileError, match=rf"row 9 \(gemm_qkv\) measures what row 1 does \(80 and {us} us\) under another "
                                               "id, 'mine': leave one out, or number it '.*repeat 2'"):
            check_samples([*rows, again])
    norm = {**rows[3], "id": rows[3]["id"].replace("|layernorm", "|mine|layernorm"), "order": 9}
    with pytest.raises(ProfileError, match=r"row 9 \(norm\) measures what row 3 does"):
        check_samples([*rows, norm])
    other = {**rows[1], "id": "mine", "order": None, "sms": 64}  # elsewhere: another measurement
    check_samples([*rows, other])
    with pytest.raises(ProfileError, match=r"row mine \(gemm_qkv\): tokens is missing"):
        check_samples([*rows, {**other, "tokens": None}])


def test_numbered_repeats_pass_if_not_too_far_apart(tmp_path: Path) -> None:
    rows = dense(tmp_path, qkv(70, 80, 110))
    again = {**rows[1], "id": rows[1]["id"] + "|repeat 2", "order": 9, "median_s": 90e-6}
    check_samples([*rows, again])
    with pytest.raises(ProfileError, match=r"row 9 \(gemm_qkv\) repeats row 1: 80 and 330 us are further apart"):
        check_samples([*rows, {**again, "median_s": 330e-6}])


def test_a_time_that_no_kernel_takes_is_refused(tmp_path: Path) -> None:
    """Elementwise kernels of a few bytes beat no data sheet; all of them a thousand times too fast do not differ either."""
    with pytest.raises(ProfileError, match=r"row 0 \(norm\): 3e-09 s: no kernel takes less than 2e-07 s: another unit"):
        check_samples(dense(tmp_path, [("layernorm", i, 0.003) for i in (1, 2, 3, 4)]))


def test_boost_clocks_a_little_above_the_data_sheet_are_no_error(tmp_path: Path) -> None:
    flops = 2 * 2048 * 28672 * 4096
    for share, fine in ((1.01, True), (1.05, False)):
        rows = dense(tmp_path, [("gate_up_proj", 2048, flops / (165.2e12 * share) * 1e6)])
        if fine:
            check_samples(rows)
        else:
            with pytest.raises(ProfileError, match=r"above rtx4090's peak"):
                check_samples(rows)


def test_tables_of_two_gpus_or_two_kinds_are_not_mixed(tmp_path: Path) -> None:
    rows = dense(tmp_path, qkv(70, 80))
    with pytest.raises(ProfileError, match="measured on NVIDIA H200, others on NVIDIA GeForce RTX 4090: one GPU a table"):
        check_samples([rows[0], {**rows[1], "gpu": "NVIDIA H200"}])
    with pytest.raises(ProfileError, match="source 'simulated', others 'measured'"):
        check_samples([rows[0], {**rows[1], "source": "simulated"}])
    with pytest.raises(ProfileError, match="unknown device 'Voodoo 2'"):
        check_samples([{**rows[0], "gpu": "Voodoo 2"}])
    with pytest.raises(ProfileError, match="no samples"):
        check_samples([])


def test_repeats_far_apart_are_no_repeats(tmp_path: Path) -> None:
    path = write(tmp_path / "mlp.parquet", [vidur_row(64, 1.0), vidur_row(64, 2.0)])
    with pytest.raises(ProfileError, match="repeat one measurement but are 2 times apart"):
        vidur.read_mlp(path, A100, LLAMA)


# ---------------------------------------------------------------------------------------- what is shipped


@pytest.mark.parametrize("gpu", ["a100-80gb", "h100", "rtx4090"])
def test_shipped_samples_are_licensed_checked_and_small(gpu: str) -> None:
    path = ROOT / "profiles" / gpu / "llama-3.1-8b" / "samples.parquet"
    rows, metadata = read_parquet(path)
    assert path.stat().st_size < 1_000_000
    assert check_samples(rows).name == gpu
    assert metadata["source"] == "measured"
    assert {r["licence"] for r in rows} <= {"MIT", "Apache-2.0"}
    for r in rows:
        assert not any(word in r["origin"].lower() for word in ("muxserve", "green", "lithos", "blis"))
    page = (path.parent / "SOURCE.md").read_text()
    for origin in {r["origin"] for r in rows}:
        assert origin in page


@pytest.mark.skipif(not (DATA / "kernels").is_dir(), reason="the measured tables are not here")
@pytest.mark.parametrize("gpu", ["a100-80gb", "h100", "rtx4090"])
def test_shipped_samples_are_those_of_the_public_tables(gpu: str) -> None:
    assert import_public(gpu, DATA) == read_parquet(ROOT / f"profiles/{gpu}/llama-3.1-8b/samples.parquet")[0]


@pytest.mark.parametrize(("publisher", "name", "path"), [
    (aiconfigurator, "a100_sxm__vllm_0.14.0__gemm_perf.parquet",
     "aic-core/src/aiconfigurator_core/systems/data/a100_sxm/gemm/vllm/0.14.0/gemm_perf.parquet"),
    (vidur, "a100__Meta-Llama-3-8B__mlp.parquet", "data/profiling/compute/a100/meta-llama/Meta-Llama-3-8B/mlp.csv"),
    (frontier, "a800__Llama-2-7b__attention.parquet", "data/profiling/compute/a800/meta-llama/Llama-2-7b-hf/attention.csv"),
    (vidur, "h100_dgx__all_reduce.parquet", "data/profiling/network/h100_dgx/all_reduce.csv"),
    (llmservingsim, "RTX4090__Llama-3.1-8B__dense.csv.gz", "profiler/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1/dense.csv"),
])
def test_a_row_names_the_file_where_it_was_published(publisher: ModuleType, name: str, path: str) -> None:
    assert publisher.ORIGIN.upstream(Path(name)) == path


def test_a_gpu_without_public_tables_and_a_folder_without_them(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no folder kernels/"):
        import_public("h100", tmp_path)
    (tmp_path / "kernels").mkdir()
    with pytest.raises(ProfileError, match="h200: no shipped profile is made of public tables for it"):
        import_public("h200", tmp_path)
