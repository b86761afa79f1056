"""Every reader of files beside the traces' own, on files that something has damaged: sound values, or one printable line.

Deterministic: the same mutations in each run. ``BULLET_MUTATIONS=50000 python -m pytest tests/test_fuzz_readers.py`` tries more.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bullet.catalog.gpus import CARDS, GpuSpec
from bullet.catalog.models import get_model
from bullet.catalog.reader import read_config
from bullet.config import RunConfig, load_run_config, parse_set, to_toml
from bullet.devices import PROFILES
from bullet.devices.coefficients import DeviceCoefficients
from bullet.devices.measured import StepProfile
from bullet.devices.table import FILE, read_tables
from bullet.errors import BulletError
from bullet.profiles.check import A100, RTX4090, check_samples
from bullet.profiles.importers import aiconfigurator, llmservingsim, vidur
from bullet.profiles.journal import read_journal
from bullet.profiles.rows import Row, finalise, read_parquet, write_parquet
from bullet.profiles.sm_axis import muxserve
from bullet.results.folder import load_run
from bullet.sweeps.axes import read_file
from bullet.validation.recorded import load_recorded
from bullet.validation.serving_points import read_points, unlicensed

MUTATIONS = int(os.environ.get("BULLET_MUTATIONS", "2000"))
LLAMA = get_model("llama-3.1-8b")
TOKEN = re.compile(rb'"[^"\n]*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null')
ODD = [b"0", b"-1", b"1", b"1e308", b"1e400", b"-1e-320", b"NaN", b"inf", b"-Infinity", b"9" * 20, b"9" * 5000,
       b"9223372036854775807",
       b"0.5", b"true", b"null", b'""', b'"x"', rb'"\ud800"', rb'"\u001b[2J"', b'"\x1b[2J"', b"[]", b"{}", b"[" * 5000,
       b"[" * 200 + b"]" * 200,
       b'{"a": {"a": 1}}', b'"none"', b"1979-05-27", b"'", b",", b"\n", b"\0", b"\xff", "²".encode(), b"../../x", b'"../../x"']


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to three times: a bit flipped, a part cut off, taken out, doubled or put elsewhere, a value changed for an odd one."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(data) + 1)
        length = rng.choice((1, 1, 2, 7, 40, len(data) // 3))
        kind = rng.randrange(8)
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1:]
        elif kind == 1:
            data = data[:at]
        elif kind == 2:
            data = data[:at] + data[at + length:]
        elif kind == 3:
            data = data[:at + length] + data[at:]
        elif kind == 4:
            data = data[:at] + rng.choice(ODD) + data[at:]
        else:
            found = list(TOKEN.finditer(data))
            if found:
                token = rng.choice(found)
                data = data[:token.start()] + rng.choice(ODD) + data[token.end():]
    return data


def refused(path: Path, read: Callable[[Path], Any]) -> str | None:
    """The one line, or ``None`` where the file was read."""
    try:
        read(path)
    except BulletError as exc:
        text = str(exc)
        assert text.isprintable(), repr(text)
        assert text
        assert len(text) < 3000, text
        return text
    return None


def printed(exc: BulletError) -> bool:
    """True, if it may be printed."""
    assert str(exc).isprintable()
    return True


def besiege(path: Path, good: bytes, read: Callable[[Path], Any], count: int, packed: bool = False) -> None:
    """``good`` is read; of ``count`` mutations some are refused, and nothing else happens."""
    def write(data: bytes) -> None:
        path.write_bytes(gzip.compress(data, 1) if packed else data)

    write(good)
    assert refused(path, read) is None
    lines = 0
    for seed in range(count):
        write(mutated(good, random.Random(seed)))
        try:
            lines += refused(path, read) is not None
        except BaseException as exc:
            exc.add_note(f"mutation {seed}; the file is {path}")
            raise
    assert lines > count / 4


# -------------------------------------------------------------------------------------------- good files


STEPS = {"source": "measured", "hardware": "a CPU", "partition": "none", "model": "tiny", "num_sms": 4, "turns": False,
         "prefill_tokens": [1, 16], "prefill_s": [0.1, 0.2], "batches": [1, 2], "contexts": [16, 32],
         "decode_s": [[0.1, 0.2], [0.2, 0.3]], "launch_s": 0.001, "head_s": 0.0, "pair_s": 1e-9,
         "prefill_sms": [[2, 2.0], [4, 1.0]], "decode_sms": [[4, 1.0]], "corun": [[2, 2, 1.1, 1.2]]}
MODEL = {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "max_position_embeddings": 4096,
         "tie_word_embeddings": False,
         "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
         "mlp_only_layers": [0],
         "sliding_window": None, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
         "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128],
                                                            "ignored_layers": ["re:.*q_proj", "lm_head"]}}
QUANT = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
    "weights": {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}, "input_activations": None}},
    "ignore": ["lm_head"]}
PLAIN_MODEL = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
               "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "sliding_window": 512,
               "sliding_window_pattern": 6, "layer_types": None, "max_position_embeddings": 4096}


def row(i: int, **changes: Any) -> Row:
    sample = {"id": f"{i}", "kind": "solo", "op": "gemm_qkv", "backend": "none", "partition": "none", "lane": "full", "sms": 108,
              "device_sms": 108, "corunner": "idle", "median_s": 1e-4 * (i + 1), "source": "measured", "gpu": A100,
              "tokens": 64 * i + 64,
              "samples": 5, "measured_at": "2026-01-01", "model": "llama-3.1-8b", "order": i, "run": 0,
              "flops": 1e9, "bytes": 1e6}
    return {**sample, **changes}


ROWS = [row(0, kind="anchor"), row(1), row(2, kind="corun", corunner="alu_spin"), row(3)]
JOURNAL = "\n".join(map(json.dumps, [{"schema": "bullet-samples", "version": 1, "gpu": A100}, *ROWS])) + "\n"
DENSE = "layer,tokens,time_us\n" + "".join(f"{name},{n},{n + us}\n" for n in (1, 16, 256) for name, us in (
    ("qkv_proj", 60), ("layernorm", 5), ("act_fn", 20), ("lm_head", 1600)))
ATTENTION = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n" + "".join(
    f"{c},{p},{s},{k},{50 + c}\n" for c, p, s, k in ((64, 0, 0, 0), (64, 32, 2, 100), (0, 0, 4, 100), (128, 0, 8, 10)))
MUX = "model,batch_size,seq_len,mps_sm_percent,prefill_ms,decode_ms\n" + "".join(
    f"llama-7b,{b},{n},{p},{b * n / p},{b + 100 / p}\n" for b in (32, 64) for n in (64, 128) for p in (*range(30, 100, 10), 100))
POINTS = ("# here: a source, commit x, MIT\npoint,kind,engine,gpu,rate_req_per_s,requests,batch,prompt_tokens,output_tokens,"
          "metric,measured_s,source\na,static,vLLM,h100,,,8,512,128,batch,1.5,here\nb,sharegpt,vLLM,h100,4,500,,,,ttft_p50,0.05,here\n")
BLIS = ("model,tp,dp,stage_index,workload,nominal_stage_rates_req_s,ttft_mean_ms,e2e_mean_ms,exp,max_num_batched_tokens,"
        "gpu_mem_util\n"
        "meta-llama/Llama-3.1-8B-Instruct,1,1,0,general,8;20,50.5,4000.1,x-1,2048,0.9\n"
        "meta-llama/Llama-3.1-8B-Instruct,1,1,1,codegen,8;20,60.5,5000.1,x-2,2048,0.9\n")
CONFIG = to_toml(RunConfig()) + '[policy.options]\ndecode_floor = 0.2\nnames = ["a", "b"]\n'
AXES = 'seed = 1\n[workload]\ntrace = "azure-code"\n[axes]\n"policy.name" = ["bullet", "vllm-1024"]\n[[zip]]\nseed = [1, 2]\n'
FIT = (PROFILES / "h100" / "llama-3.1-8b" / "fit.json").read_bytes()


TEXTS: dict[str, tuple[str, str | bytes, Callable[[Path], Any]]] = {
    "configuration": ("c.toml", CONFIG, lambda p: to_toml(load_run_config(p, {"seed": 3}))),
    "axes of a sweep": ("axes.toml", AXES, read_file),
    "card": ("card.toml", (CARDS / "h100.toml").read_bytes(), GpuSpec.from_toml),
    "model": ("config.json", json.dumps(MODEL), lambda p: read_config(p).weight_bytes),
    "model with windows": ("config.json", json.dumps(PLAIN_MODEL), lambda p: read_config(p).weight_bytes),
    "quantised model": ("config.json", json.dumps(PLAIN_MODEL | {"quantization_config": QUANT}),
                        lambda p: read_config(p).weight_bytes),
    "fit": ("fit.json", FIT, DeviceCoefficients.from_json),
    "step times": ("steps.json", json.dumps(STEPS), StepProfile.from_json),
    "journal": ("samples.jsonl", JOURNAL, lambda p: finalise(read_journal(p)[1])),
    "dense table": ("RTX4090__Llama-3.1-8B__dense.csv", DENSE,
                    lambda p: check_samples(llmservingsim.read_dense(p, RTX4090, LLAMA))),
    "attention table": ("RTX4090__Llama-3.1-8B__attention.csv", ATTENTION,
                        lambda p: llmservingsim.read_attention(p, RTX4090, LLAMA)),
    "sweep over SMs": ("muxserve_a100_80gb_mps_sweep_7b_13b_tp1.csv.gz", MUX, lambda p: muxserve(p.parent, "7b", "decode")),
    "serving points": ("serving_points.csv", POINTS, read_points),
    "serving points not shipped": ("blis_vllm_ground_truth_h100.csv", BLIS, lambda p: unlicensed(p.parent)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_damaged_text_is_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    file, good, read = TEXTS[name]
    besiege(tmp_path / file, good.encode() if isinstance(good, str) else good, read, MUTATIONS, file.endswith(".gz"))


def test_a_damaged_flag_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """Not a file, but read as TOML: what --set says."""
    def read(path: Path) -> None:
        key, value = parse_set(path.read_bytes().decode("utf-8", "surrogateescape"))
        to_toml(load_run_config(None, {key: value}))

    for text in ("seed=3", "slo.tpot_s=0.2", "policy.options.names=['a', 1.5]", "workload.trace=azure-code"):
        path, count = tmp_path / "flag", 0
        for seed in range(MUTATIONS):
            path.write_bytes(mutated(text.encode(), random.Random(seed)))
            count += refused(path, read) is not None
        assert count > MUTATIONS / 10


# ------------------------------------------------------------------------------------------------- archives


def test_a_damaged_archive_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    file, good = "RTX4090__Llama-3.1-8B__dense.csv.gz", gzip.compress(DENSE.encode(), mtime=0)
    same = llmservingsim.read_dense(_written(tmp_path / file, good), RTX4090, LLAMA)
    told = 0
    for seed in range(MUTATIONS):
        path = _written(tmp_path / file, mutated(good, random.Random(seed)))
        try:
            # gzip has a checksum of its own: what is read is what was packed.
            found = llmservingsim.read_dense(path, RTX4090, LLAMA)
        except BulletError as exc:
            told += printed(exc)
        else:
            assert [r["median_s"] for r in found] == [r["median_s"] for r in same][:len(found)]
    assert told > MUTATIONS / 2


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# ------------------------------------------------------------------------------------------------- parquet


def _samples(path: Path) -> Path:
    write_parquet(path, finalise(ROWS), {"gpu": A100, "source": "measured"})
    return path


def test_a_flipped_bit_of_a_table_is_never_another_value(tmp_path: Path) -> None:
    path = _samples(tmp_path / "samples.parquet")
    good, data = read_parquet(path), path.read_bytes()
    rng, told = random.Random(0), 0
    for _ in range(MUTATIONS):
        at = rng.randrange(8 * len(data))
        path.write_bytes(data[:at // 8] + bytes([data[at // 8] ^ (1 << at % 8)]) + data[at // 8 + 1:])
        try:
            rows, metadata = read_parquet(path)
        except BulletError as exc:
            told += printed(exc)
        else:  # the name of the checksum itself was struck: all that was written is there
            assert rows == good[0]
            assert good[1].items() <= metadata.items()
    assert told > 0.9 * MUTATIONS


@pytest.mark.parametrize("sealed", [True, False])
def test_a_damaged_table_is_read_or_refused_in_one_line(sealed: bool, tmp_path: Path) -> None:
    """``sealed`` or as a version without checksums wrote it: there other values may come, and nothing worse."""
    import pyarrow.parquet as pq

    path = _samples(tmp_path / "samples.parquet")
    if not sealed:
        pq.write_table(pq.read_table(path).replace_schema_metadata(
            {k: v for k, v in pq.read_schema(path).metadata.items() if k != b"bullet_crc32"}), path)
    _besiege_parquet(path, lambda p: check_samples(read_parquet(p)[0]), MUTATIONS)


def _besiege_parquet(path: Path, read: Callable[[Path], Any], count: int) -> None:
    data = path.read_bytes()
    told = 0
    for seed in range(count):
        path.write_bytes(mutated(data, random.Random(seed)))
        told += refused(path, read) is not None
    assert told > count / 2


def test_damaged_imports_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    needed = ["num_tokens", "num_tensor_parallel_workers", "n_embd", *(f"time_stats.{name}.median" for name in vidur.OPS)]
    path = tmp_path / "a100__Meta-Llama-3-8B__mlp.parquet"
    pq.write_table(pa.Table.from_pylist([dict.fromkeys(needed, 0.5) | {
        "num_tokens": n, "num_tensor_parallel_workers": 1, "n_embd": 4096} for n in (1, 2, 4)]), path)
    assert vidur.read_mlp(path, A100, LLAMA)
    _besiege_parquet(path, lambda p: vidur.read_mlp(p, A100, LLAMA), MUTATIONS)


@pytest.mark.parametrize("odd", [None, -1, 0, 2**62, 1e300, float("nan"), float("inf"), "", "x", "\x1b[2J", [1], True,
                                 b"\xff", {"a": 1}])
def test_an_odd_cell_of_an_import_is_read_or_refused_in_one_line(odd: Any, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    good = {"framework": "VLLM", "version": "0.19", "device": A100, "latency": 1.5, "gemm_dtype": "bfloat16", "m": 4, "n": 6144,
            "k": 4096, "num_gpus": 2, "message_size": 1024, "backend": "x_graph", "op_name": "context_attention", "batch_size": 1,
            "isl": 64, "step": 0, "num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "attn_dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16", "window_size": 0}
    path = tmp_path / "a100_sxm__vllm_0.14.0__gemm_perf.parquet"
    readers = (lambda p: aiconfigurator.read_gemm(p, LLAMA, lambda *_: True), lambda p: aiconfigurator.read_attention(p, LLAMA),
               aiconfigurator.read_all_reduce)
    for name in good:
        pq.write_table(pa.Table.from_pylist([good | {name: odd}]), path)
        for read in readers:
            refused(path, read)


def test_damaged_kernel_tables_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes((PROFILES / "rtx4090" / "llama-3.1-8b" / FILE).read_bytes())
    data = path.read_bytes()
    for seed in range(MUTATIONS):
        path.write_bytes(mutated(data, random.Random(seed)))
        refused(path, read_tables)


# ------------------------------------------------------------------------------------------------- folders


def test_a_damaged_run_folder_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    from bullet.api import simulate

    folder = tmp_path / "run"
    simulate({"workload.num_requests": 5, "policy.name": "vllm-1024"}, out=folder, report=False)
    for file in ("summary.json", "config.toml", "requests.parquet", "steps.parquet"):
        good = (folder / file).read_bytes()
        for seed in range(MUTATIONS // 4):
            (folder / file).write_bytes(mutated(good, random.Random(seed)))
            refused(folder, load_run)
        (folder / file).write_bytes(good)
        assert refused(folder, load_run) is None


def test_a_damaged_recorded_run_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    source = PROFILES / "rtx4090" / "llama-3.1-8b"
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    good = (tmp_path / "recorded_run.json").read_bytes()
    for seed in range(MUTATIONS):
        (tmp_path / "recorded_run.json").write_bytes(mutated(good, random.Random(seed)))
        refused(tmp_path, lambda p: load_recorded("rtx4090", p))
