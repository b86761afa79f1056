"""A paged cache whose blocks lie in random order, unused ones filled with NaN so that a stray read shows."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def paged_cache(lengths, kv_heads, head_dim, block_tokens, dtype, seed=0, spare=3, room=0):
    """``k, v, block_tables``; slots behind a sequence's end, and blocks of nobody, are NaN. ``room``: extra tokens."""
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-(n + room) // block_tokens) for n in lengths]
    total = sum(blocks_of) + spare
    order = torch.randperm(total, generator=generator).tolist()
    shape = (total, kv_heads, block_tokens, head_dim)
    k, v = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    tables = torch.full((len(lengths), max([*blocks_of, 1])), order[-1], dtype=torch.int32)
    for row, (tokens, blocks) in enumerate(zip(lengths, blocks_of, strict=True)):
        mine = [order.pop(0) for _ in range(blocks)]
        tables[row, :blocks] = torch.tensor(mine, dtype=torch.int32)
        for at, block in enumerate(mine):
            filled = max(0, min(block_tokens, tokens - at * block_tokens))
            for cache in (k, v):
                cache[block, :, :filled] = torch.randn(kv_heads, filled, head_dim, generator=generator).to(dtype)
    return k, v, tables


def close(actual, expected):
    """Both finite and within the dtype's tolerance of each other, relative to the largest value."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual.float()).all()
    error = (actual.float() - expected.float()).abs().max().item() if actual.numel() else 0.0
    scale = max(1.0, expected.float().abs().max().item()) if actual.numel() else 1.0
    assert error <= TOLERANCE[actual.dtype] * scale, f"error {error} of {scale}"
