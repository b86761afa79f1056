"""Every kernel of serving compiles for sm_80, sm_89 and sm_90 without a GPU, and keeps what it is made for."""

from __future__ import annotations

import dataclasses
import importlib
import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bullet.kernels.launch import SHARED_MEMORY_BYTES, compile_for, interpreted  # noqa: E402

FILES = ("decode_attention", "prefill_attention", "norm", "rope", "activation", "gemm", "copy")
ENTRIES = {name: entry for file in FILES
           for name, entry in importlib.import_module(f"bullet.kernels.{file}").COMPILED.items()}


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_kernels_compile(name, capability):
    assert not interpreted()
    compiled = compile_for(ENTRIES[name], capability)
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[capability]
    if "attention_bf16" in name or "attention_fp16" in name or "gemm_bf16" in name:
        ptx = compiled.asm["ptx"]
        assert "mma" in ptx  # tensor cores
        assert "cp.async" in ptx  # loads overlap arithmetic


PIPELINES = [
    # Two buffers of 32 KB beside 7 KB: two blocks an SM on sm_80 (163 KB) and three on sm_90 (227), one on sm_89 (99): there deep
    # only on a narrow lane.
    ("decode_attention_bf16_g4_d128_batch_64", {80: 5, 89: 3, 90: 5}, 72_192),
    ("decode_attention_bf16_g4_d128_batch_64_narrow", {80: 5, 89: 5, 90: 5}, 72_192),
    ("prefill_attention_bf16_g4_d128_128_rows", {80: 5, 89: 5, 90: 5}, 98_816)]


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize(("name", "stages", "least_bytes"), PIPELINES)
def test_attention_has_two_tiles_under_way_where_its_depth_says_so(name, stages, least_bytes, capability):
    """In the compiled code: shared memory for two buffers of keys and values, and a loop that waits for the older one only."""
    entry = ENTRIES[name]
    assert entry.num_stages(capability) == stages[capability]
    compiled = compile_for(entry, capability)
    waits = {int(text, 0) for text in re.findall(r"cp\.async\.wait_group\s+(\w+)", compiled.asm["ptx"])}
    deep = stages[capability] == 5
    assert (compiled.metadata.shared >= least_bytes) == deep
    assert (3 in waits) == deep


def test_a_pipeline_is_as_deep_as_the_shared_memory_allows():
    decode_stages, prefill_stages = (importlib.import_module(f"bullet.kernels.{phase}_attention").pipeline_stages
                                     for phase in ("decode", "prefill"))
    bf16, fp32 = torch.bfloat16, torch.float32
    assert [decode_stages(89, sms, bf16, 128) for sms in (20, 31, 32, 128)] == [5, 5, 3, 3]
    assert [decode_stages(cap, 132, bf16, 256) for cap in (80, 89, 90)] == [3, 3, 3]  # 128 KB of buffers: one block at most
    assert decode_stages(80, 20, bf16, 256) == 5  # which a narrow lane takes
    assert [prefill_stages(cap, fp32, 256, 16) for cap in (80, 89, 90)] == [5, 5, 5]  # 81 KB
    assert [prefill_stages(cap, bf16, 256, 64) for cap in (80, 89, 90)] == [5, 2, 5]  # 100 KB, 1 more than sm_89 has
    assert decode_stages(103, 132, bf16, 128) == decode_stages(100, 132, bf16, 128)  # an unlisted capability: the one below


def test_what_the_engine_launches_is_among_them():
    """Head size and dtype of the built-in models on a GPU (bf16, 64 and 128), every height of a prefill tile, decode
    batches of 1 and of the largest bucket."""
    prefill = [e.constants for n, e in ENTRIES.items() if n.startswith("prefill_attention_bf16")]
    assert {c["TILE_ROWS"] for c in prefill if c["HEAD_DIM"] == 128} == {16, 32, 64, 128}
    decode = [e.constants for n, e in ENTRIES.items() if n.startswith("decode_attention_bf16")]
    for entries in (prefill, decode):
        assert {64, 128, 256} <= {c["HEAD_DIM"] for c in entries}
        assert {4, 8, 7} <= {c["GROUP"] for c in entries}
    assert {1, 64, 256} <= {c["BATCH"] for c in decode}


VARYING = {
    "decode_attention": {"batch", "table_stride"}, "join_splits": {"batch"}, "rms_norm": {"num_rows"}, "silu_mul": {"num_rows"},
    "prefill_attention": {"num_tiles", "table_stride", "tile_seq_ptr", "tile_row_ptr"},
    "rope": {"num_rows", "positions_ptr", "slots_ptr"}, "gemm": {"rows"}}
"""What differs from batch to batch, or points into the middle of a tensor made for one."""


@pytest.mark.parametrize("name", sorted(n for n in ENTRIES if not n.startswith("copy")))
def test_no_batch_compiles_a_kernel_anew(name):
    """Triton specialises numbers that are 1, and numbers and addresses that are multiples of 16, where it is not told to
    leave them: a compile in mid-service would be seconds of a request's TTFT."""
    kind = next(k for k in VARYING if name.startswith(k))
    assert {p.name for p in ENTRIES[name].kernel.params if p.do_not_specialize} == VARYING[kind]


SIZES = {"num_kv_heads", "num_heads", "columns", "num_elements"}


@pytest.mark.parametrize("name", sorted(n for n in ENTRIES if SIZES & set(ENTRIES[n].signature)))
def test_kernels_compile_for_sizes_of_one(name):
    """Triton makes a constant of an argument that is 1, where it may: one KV head, one column, one element."""
    entry = ENTRIES[name]
    ones = dict.fromkeys(SIZES & set(entry.signature), 1)
    assert not ones.keys() & {p.name for p in entry.kernel.params if p.do_not_specialize}
    compile_for(dataclasses.replace(entry, constants={**entry.constants, **ones}), 90)
