"""Every kernel of serving compiles for sm_80, sm_89 and sm_90 without a GPU, and keeps what it is made for."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from bullet.kernels.launch import compile_for, interpreted

FILES = ("decode_attention", "prefill_attention", "norm", "rope", "activation", "gemm", "copy")
ENTRIES = {name: entry for file in FILES
           for name, entry in importlib.import_module(f"bullet.kernels.{file}").COMPILED.items()}
SHARED_MEMORY_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Most that a block may use (CUDA C++ programming guide, table of compute capabilities)."""


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
