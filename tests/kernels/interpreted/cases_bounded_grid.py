"""The bounded-grid GEMM and copy against torch, at any grid."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged import close

from bullet.kernels import copy, gemm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (5, 130, 70), (16, 64, 64), (33, 20, 100)])
def test_gemm(rows, columns, depth, dtype):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth, generator=generator).to(dtype)
    weight = (torch.randn(columns, depth, generator=generator) / depth**0.5).to(dtype)
    close(gemm.gemm(x, weight, num_sms=2), gemm.gemm_reference(x, weight))


@pytest.mark.parametrize("num_sms", [1, 3, 1000])
def test_gemm_writes_every_tile_once_at_any_grid(num_sms, monkeypatch):
    """More row tiles than a group holds, the last group a rest: 10 tiles of 16 rows, 3 of 16 columns."""
    monkeypatch.setattr(gemm, "TILE", (32, 32, 64))
    monkeypatch.setattr(gemm, "GROUP_ROWS", 4)
    x, weight = torch.randn(151, 8), torch.randn(40, 8)
    out = torch.full((151, 40), float("nan"))
    close(gemm.gemm(x, weight, num_sms=num_sms, out=out), x @ weight.T)


def test_gemm_of_strided_rows_and_of_nothing():
    wide = torch.randn(5, 32)
    weight = torch.randn(3, 16)
    close(gemm.gemm(wide[:, :16], weight, num_sms=1), wide[:, :16] @ weight.T)
    assert gemm.gemm(torch.empty(0, 16), weight, num_sms=1).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 7, 4096, 3 * 4096 + 5])
def test_copy(size, dtype):
    source = torch.randint(-100, 100, (size,)).to(dtype)
    target = torch.zeros_like(source)
    expected = copy.copy_reference(source, torch.empty_like(source))
    assert torch.equal(copy.copy(source, target, num_sms=1), expected)
    part = torch.zeros(size + 1, dtype=dtype)  # behind an odd offset
    copy.copy(source, part[1:], num_sms=2)
    assert torch.equal(part[1:], source)
    assert part[0] == 0


@pytest.mark.parametrize(("skip", "unit"), [(1, torch.uint8), (2, torch.int16), (4, torch.int32), (8, torch.int64)])
def test_copy_of_memory_that_begins_anywhere(skip, unit, monkeypatch):
    """Torch's own begins at multiples of 64; another's need not, and a wide load from an odd address fails on a GPU."""
    memory = np.arange(4096 + 64, dtype=np.uint8)
    first = -memory.ctypes.data % 64 + skip
    source = torch.from_numpy(memory[first:first + 4096 - 64])
    assert source.storage_offset() == 0
    units, kernel = [], copy.memory_stream_kernel

    class Watched:
        def __getitem__(self, grid):
            return lambda a, b, *rest, **options: (units.append(a.dtype), kernel[grid](a, b, *rest, **options))

    monkeypatch.setattr(copy, "memory_stream_kernel", Watched())
    target = torch.zeros_like(source)
    assert torch.equal(copy.copy(source, target, num_sms=1), source)
    assert units == [unit]
