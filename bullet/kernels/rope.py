"""Rotary embedding with the write into the paged KV cache: what lies between a projection and attention, in one pass.

A row of ``qkv`` holds H query, K key and K value heads of size D. Queries are rotated into ``q_out``, keys are rotated into
``k_cache``, values copied into ``v_cache``; with ``q_weight`` and ``k_weight`` queries and keys are first RMS-normalised
over each head, as Qwen3 does. Halves rotate together (``transformers``' layout, not the interleaved one)::

    slot = block x block_tokens + offset in the block; a slot below 0 is a padded row: nothing is written to the cache

``cos`` and ``sin`` are float32 tables ``(positions, D / 2)``. Reference: Su et al., RoFormer (2021).
Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bullet.kernels.launch import Compiled, power_of_two, require, require_one_device, require_sms, require_tensors

PROGRAMS_PER_SM = 8


@triton.jit
def _rotate_heads(source, target, heads, weight_ptr, cos, sin, eps, stride, HEADS: tl.constexpr,
                  HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """``heads`` heads of one row from ``source`` (D apart) to ``target`` (``stride`` apart)."""
    which = tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)
    half: tl.constexpr = HEAD_DIM // 2
    dim_mask = dims < half
    mask = (which < heads)[:, None] & dim_mask[None, :]
    place = source + which[:, None] * HEAD_DIM + dims[None, :]
    low = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(place + half, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)
        low = low * scale[:, None] * tl.load(weight_ptr + dims, mask=dim_mask, other=0.0).to(tl.float32)[None, :]
        high = high * scale[:, None] * tl.load(weight_ptr + half + dims, mask=dim_mask, other=0.0).to(tl.float32)[None, :]
    to = target + which[:, None] * stride + dims[None, :]
    kind = target.dtype.element_ty
    tl.store(to, (low * cos - high * sin).to(kind), mask=mask)
    tl.store(to + half, (high * cos + low * sin).to(kind), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "positions_ptr", "slots_ptr"])
def rope_kernel(qkv_ptr, q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, eps,
                num_rows, num_heads, num_kv_heads, qkv_stride, cache_stride_block, cache_stride_head, cache_stride_token,
                Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
                DIM: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr):
    half: tl.constexpr = HEAD_DIM // 2
    halves = tl.arange(0, HALF)
    for item in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(item, tl.int64)
        position = tl.load(positions_ptr + row).to(tl.int64)
        cos = tl.load(cos_ptr + position * half + halves, mask=halves < half, other=0.0)[None, :]
        sin = tl.load(sin_ptr + position * half + halves, mask=halves < half, other=0.0)[None, :]
        slot = tl.load(slots_ptr + row).to(tl.int64)
        kept_heads = tl.where(slot >= 0, num_kv_heads, 0)  # a padded row writes no head
        slot = tl.maximum(slot, 0)
        to = slot // PAGE * cache_stride_block + slot % PAGE * cache_stride_token
        source = qkv_ptr + row * qkv_stride
        _rotate_heads(source, q_ptr + row * num_heads * HEAD_DIM, num_heads, q_weight_ptr, cos, sin, eps, HEAD_DIM,
                      Q_HEADS, HEAD_DIM, HALF, NORM)
        _rotate_heads(source + num_heads * HEAD_DIM, k_ptr + to, kept_heads, k_weight_ptr, cos, sin, eps,
                      cache_stride_head, KV_HEADS, HEAD_DIM, HALF, NORM)
        heads = tl.arange(0, KV_HEADS)
        dims = tl.arange(0, DIM)
        mask = (heads < kept_heads)[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(source + (num_heads + num_kv_heads + heads[:, None]) * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        tl.store(v_ptr + to + heads[:, None] * cache_stride_head + dims[None, :], values, mask=mask)


def check(qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
          positions: torch.Tensor, slots: torch.Tensor, q_weight: torch.Tensor | None,
          k_weight: torch.Tensor | None) -> int:
    """Shapes and dtypes; returns the number of query heads."""
    name = "rope"
    require(qkv.dim() == 2 and k_cache.dim() == 4, f"{name}: qkv must be (rows, (H + 2 K) D), caches "
                                                   "(blocks, K, block_tokens, D)")
    require_tensors(name, qkv.dtype, qkv=qkv, k_cache=k_cache, v_cache=v_cache)
    require(k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride(), f"{name}: the caches must agree")
    kv_heads, page, head_dim = k_cache.shape[1:]
    require(head_dim % 2 == 0 and qkv.shape[1] % head_dim == 0, f"{name}: rows of {qkv.shape[1]} must be heads of {head_dim}, "
                                                                "an even size")
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    require(heads > 0, f"{name}: rows of {qkv.shape[1]} leave {heads} query heads beside {kv_heads} KV heads")
    require(page == power_of_two(page), f"{name}: block of {page} tokens: must be a power of two")
    for label, table in (("cos", cos), ("sin", sin)):
        require(table.dtype == torch.float32 and table.is_contiguous() and table.dim() == 2
                and table.shape[1] == head_dim // 2, f"{name}: {label} must be contiguous float32 (positions, {head_dim // 2})")
    for label, index in (("positions", positions), ("slots", slots)):
        require(index.dtype == torch.int64 and index.is_contiguous() and index.shape == qkv.shape[:1],
                f"{name}: {label} must be {qkv.shape[0]} contiguous int64")
    require_one_device(name, qkv=qkv, cos=cos, sin=sin, positions=positions, slots=slots)
    require((q_weight is None) == (k_weight is None), f"{name}: q_weight and k_weight come together")
    for weight in (q_weight, k_weight):
        if weight is not None:
            require_tensors(name, qkv.dtype, qkv=qkv, weight=weight)
            require(weight.shape == (head_dim,), f"{name}: norm weight {tuple(weight.shape)} must be ({head_dim},)")
    return heads


def rope(qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
         positions: torch.Tensor, slots: torch.Tensor, *, num_sms: int, q_weight: torch.Tensor | None = None,
         k_weight: torch.Tensor | None = None, eps: float = 1e-6, q_out: torch.Tensor | None = None) -> torch.Tensor:
    """Write the rows' keys and values into the caches; returns the rotated queries ``(rows, H, D)``."""
    heads = check(qkv, k_cache, v_cache, cos, sin, positions, slots, q_weight, k_weight)
    require_sms("rope", num_sms)
    kv_heads, page, head_dim = k_cache.shape[1:]
    rows = qkv.shape[0]
    q_out = torch.empty(rows, heads, head_dim, dtype=qkv.dtype, device=qkv.device) if q_out is None else q_out
    require(q_out.shape == (rows, heads, head_dim) and q_out.is_contiguous() and q_out.dtype == qkv.dtype,
            f"rope: q_out must be contiguous {(rows, heads, head_dim)}")
    require_one_device("rope", qkv=qkv, q_out=q_out)
    if rows:
        norm = q_weight is not None
        rope_kernel[(min(rows, num_sms * PROGRAMS_PER_SM),)](
            qkv, q_out, k_cache, v_cache, q_weight if norm else qkv, k_weight if norm else qkv, cos, sin, positions, slots,
            eps, rows, heads, kv_heads, qkv.stride(0), *k_cache.stride()[:3], Q_HEADS=power_of_two(heads),
            KV_HEADS=power_of_two(kv_heads), HEAD_DIM=head_dim, HALF=power_of_two(head_dim // 2),
            DIM=power_of_two(head_dim), PAGE=page, NORM=norm, num_warps=4)
    return q_out


def rope_reference(qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                   positions: torch.Tensor, slots: torch.Tensor, *, q_weight: torch.Tensor | None = None,
                   k_weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    """The same in torch, in float32."""
    heads = check(qkv, k_cache, v_cache, cos, sin, positions, slots, q_weight, k_weight)
    kv_heads, page, head_dim = k_cache.shape[1:]
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], 1)
    c, s = cos[positions][:, None], sin[positions][:, None]

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        wide = x.float()
        if weight is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        low, high = wide.chunk(2, -1)
        return torch.cat([low * c - high * s, high * c + low * s], -1).to(x.dtype)

    keep = slots >= 0
    block, offset = slots[keep] // page, slots[keep] % page
    k_cache[block, :, offset] = turned(k, k_weight)[keep]
    v_cache[block, :, offset] = v[keep]
    return turned(q, q_weight)


def _compiled(dtype: str, heads: int, kv_heads: int, head_dim: int, norm: bool) -> Compiled:
    strides = ("qkv_stride", "cache_stride_block", "cache_stride_head", "cache_stride_token")
    pointers = {f"{n}_ptr": f"*{dtype}" for n in ("qkv", "q", "k", "v", "q_weight", "k_weight")}
    return Compiled(rope_kernel, {**pointers, "cos_ptr": "*fp32", "sin_ptr": "*fp32", "positions_ptr": "*i64",
                                  "slots_ptr": "*i64", "eps": "fp32",
                                  **dict.fromkeys((*strides, "num_rows", "num_heads", "num_kv_heads"), "i32")},
                    {"Q_HEADS": power_of_two(heads), "KV_HEADS": power_of_two(kv_heads), "HEAD_DIM": head_dim,
                     "HALF": power_of_two(head_dim // 2), "DIM": power_of_two(head_dim), "PAGE": 16, "NORM": norm},
                    aligned=strides)


COMPILED: dict[str, Compiled] = {"rope_bf16": _compiled("bf16", 32, 8, 128, False),
                                 "rope_norm_bf16": _compiled("bf16", 64, 8, 128, True),
                                 "rope_fp16": _compiled("fp16", 32, 8, 64, False),
                                 "rope_fp32": _compiled("fp32", 6, 3, 80, True)}
