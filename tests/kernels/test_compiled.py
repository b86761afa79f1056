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


SIZES = {"batch", "num_kv_heads", "num_heads", "num_rows", "num_tiles", "rows", "columns", "num_elements"}


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_kernels_compile_for_sizes_of_one(name):
    """Triton makes a constant of an argument that is 1: one sequence, one KV head, one row."""
    entry = ENTRIES[name]
    ones = dict.fromkeys(SIZES & set(entry.signature), 1)
    assert ones
    compile_for(dataclasses.replace(entry, constants={**entry.constants, **ones}), 90)
