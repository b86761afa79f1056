"""Prefill attention: causal, ragged, grouped heads, over a paged KV cache that already holds the new tokens.

The rows of a batch's chunks lie behind one another; chunk ``b`` has ``lengths[b]`` tokens in its cache, the last
``starts[b + 1] - starts[b]`` of them new. So a whole prompt, a chunk with a past, and a recomputation after preemption are
one case. An item is (row tile, query head); the tiles are listed on the host, longest first, because under a causal mask
later tiles cost more and a bounded grid takes items in turn.

::

    keys  |<------- past ------->|<- new ->|
    row i sees keys 0 .. past + i          tile of rows: keys before past + first row need no mask

Shapes: q and out ``(rows, H, D)``, caches ``(blocks, K, block_tokens, D)``, block tables ``(B, width)``, lengths ``(B,)``.

Reference: Dao, FlashAttention-2 (2023). Not yet run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bullet.kernels.decode_attention import gather
from bullet.kernels.launch import (
    DEEP_STAGES,
    Compiled,
    capability_of,
    dot_in_fp32,
    output_like,
    power_of_two,
    require,
    require_one_device,
    require_paged,
    require_sms,
    shared_limit,
)

PROGRAMS_PER_SM = 2
"""By registers (255 of 128 threads at 64 rows and head size 128) two fit; of 128 rows one does, and the second begins where the
first ends."""
SMALL_TILE = (32, 32)
"""Rows and keys of a tile for float32: its products take four times the shared memory and time."""
TILE = (128, 64)
MIN_TILE_ROWS = 16


@triton.jit
def _attend(acc, top, total, q, k_ptr, v_ptr, table, head_offset, begin, end, last_seen, lanes, dims, dim_mask,
            scale_log2, cache_stride_block, cache_stride_token, PAGE: tl.constexpr, TILE_KEYS: tl.constexpr,
            MASKED: tl.constexpr, WIDE: tl.constexpr):
    """Fold keys ``begin .. end`` into the running maximum, sum and output of a tile of rows."""
    for at in range(begin, end, TILE_KEYS):
        keys = at + lanes
        if MASKED:
            key_mask = keys < end
            block = tl.load(table + keys // PAGE, mask=key_mask, other=0).to(tl.int64)
            mask = key_mask[:, None] & dim_mask[None, :]
        else:
            block = tl.load(table + keys // PAGE).to(tl.int64)
            mask = (keys >= 0)[:, None] & dim_mask[None, :]
        where = block * cache_stride_block + head_offset + (keys % PAGE) * cache_stride_token
        k = tl.load(k_ptr + where[:, None] + dims[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + where[:, None] + dims[None, :], mask=mask, other=0.0)
        if WIDE:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            scores = tl.where(keys[None, :] <= last_seen[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["num_tiles", "table_stride", "tile_seq_ptr", "tile_row_ptr"])
def prefill_attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, tables_ptr, starts_ptr, lengths_ptr, tile_seq_ptr,
                             tile_row_ptr, scale_log2, num_tiles, num_heads, q_stride_row, q_stride_head,
                             out_stride_row, out_stride_head, cache_stride_block, cache_stride_head,
                             cache_stride_token, table_stride,
                             GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
                             TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, WIDE: tl.constexpr):
    lanes = tl.arange(0, TILE_KEYS)
    dims = tl.arange(0, DIM)
    dim_mask = dims < HEAD_DIM
    for item in range(tl.program_id(0), num_tiles * num_heads, tl.num_programs(0)):
        # Heads of one tile are neighbours: those of a group read the same keys at about the same time.
        tile = item // num_heads
        head = item % num_heads
        seq = tl.load(tile_seq_ptr + tile)
        first = tl.load(tile_row_ptr + tile)
        row_begin = tl.load(starts_ptr + seq)
        new = tl.load(starts_ptr + seq + 1) - row_begin
        past = tl.load(lengths_ptr + seq) - new
        rows = first + tl.arange(0, TILE_ROWS)
        row_mask = rows < new
        mask = row_mask[:, None] & dim_mask[None, :]
        at = (row_begin + rows).to(tl.int64)
        q = tl.load(q_ptr + at[:, None] * q_stride_row + head * q_stride_head + dims[None, :], mask=mask, other=0.0)
        if WIDE:
            q = q.to(tl.float32)
        table = tables_ptr + tl.cast(seq, tl.int64) * table_stride
        head_offset = tl.cast(head // GROUP, tl.int64) * cache_stride_head
        # Rows behind the chunk's end see what its last row sees: nothing is undefined, and they are not stored.
        last_seen = past + tl.minimum(rows, new - 1)
        unmasked = (past + first + 1) // TILE_KEYS * TILE_KEYS
        end = past + tl.minimum(first + TILE_ROWS, new)
        acc = tl.zeros((TILE_ROWS, DIM), tl.float32)
        top = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((TILE_ROWS,), tl.float32)
        acc, top, total = _attend(acc, top, total, q, k_ptr, v_ptr, table, head_offset, 0, unmasked, last_seen, lanes,
                                  dims, dim_mask, scale_log2, cache_stride_block, cache_stride_token, PAGE, TILE_KEYS,
                                  False, WIDE)
        acc, top, total = _attend(acc, top, total, q, k_ptr, v_ptr, table, head_offset, unmasked, end, last_seen, lanes,
                                  dims, dim_mask, scale_log2, cache_stride_block, cache_stride_token, PAGE, TILE_KEYS,
                                  True, WIDE)
        tl.store(out_ptr + at[:, None] * out_stride_row + head * out_stride_head + dims[None, :],
                 (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Plan:
    """Row tiles of one batch, int32 on the device: which chunk, and its first row within the chunk."""

    tile_seq: torch.Tensor
    tile_row: torch.Tensor
    tile_rows: int


def tile_sizes(dtype: torch.dtype, head_dim: int, longest: int) -> tuple[int, int]:
    """Rows and keys of a tile; few rows take a small one."""
    rows, keys = SMALL_TILE if dtype == torch.float32 else TILE
    if head_dim > 128:
        rows, keys = rows // 2, keys // 2  # or float32 would not fit into an sm_89's shared memory
    return max(MIN_TILE_ROWS, min(rows, power_of_two(longest))), keys


SHALLOW_STAGES = 2


def pipeline_stages(capability: int, dtype: torch.dtype, head_dim: int, tile_rows: int) -> int:
    """Deep where two buffers of keys and values fit beside the queries; on sm_90 the products read queries and weights from
    shared memory too. A tile of 128 rows has an SM to itself by its registers, whatever the buffers."""
    keys, dim = tile_sizes(dtype, head_dim, tile_rows)[1], power_of_two(head_dim)
    queries = tile_rows * dim * (2 if capability >= 90 else 1)
    weights = tile_rows * keys if tile_rows < TILE[0] else 0  # the tallest tile's stay in registers
    needed = (2 * 2 * keys * dim + queries + weights) * dtype.itemsize + SMALL_BUFFERS_BYTES
    return DEEP_STAGES if needed <= shared_limit(capability) else SHALLOW_STAGES


SMALL_BUFFERS_BYTES = 1 << 10


def plan(new_tokens: Sequence[int], past_tokens: Sequence[int], tile_rows: int, device: torch.device) -> Plan:
    """List the tiles on the host, those that see most keys first."""
    tiles = [(past + min(row + tile_rows, new), seq, row)
             for seq, (new, past) in enumerate(zip(new_tokens, past_tokens, strict=True))
             for row in range(0, new, tile_rows)]
    tiles.sort(key=lambda t: (-t[0], t[1], t[2]))
    both = torch.tensor([[t[1] for t in tiles], [t[2] for t in tiles]], dtype=torch.int32).to(device)
    return Plan(both[0], both[1], tile_rows)


def check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
          starts: torch.Tensor, lengths: torch.Tensor) -> None:
    """Shapes and dtypes; values on the device are the caller's promise."""
    name = "prefill_attention"
    require_paged(name, "rows", q, k_cache, v_cache, block_tables, starts=starts, lengths=lengths)
    require(block_tables.dim() == 2 and len(block_tables) == len(lengths) == len(starts) - 1,
            f"{name}: {len(block_tables)} block tables, {len(lengths)} lengths, {len(starts)} starts (one more)")


def prefill_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
                      starts: torch.Tensor, lengths: torch.Tensor, plan_: Plan, *, num_sms: int,
                      scale: float | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Attend each row to its chunk's cached tokens up to itself; ``plan_`` from :func:`plan` for the same chunks."""
    check(q, k_cache, v_cache, block_tables, starts, lengths)
    require_sms("prefill_attention", num_sms)
    heads, head_dim = q.shape[1:]
    out = output_like("prefill_attention", q, out)
    require_one_device("prefill_attention", q=q, out=out, plan=plan_.tile_seq)
    tallest = tile_sizes(q.dtype, head_dim, TILE[0])[0]
    require(plan_.tile_rows == power_of_two(plan_.tile_rows) and MIN_TILE_ROWS <= plan_.tile_rows <= tallest,
            f"prefill_attention: plan of {plan_.tile_rows} rows a tile: {q.dtype} with head size {head_dim} takes a power of "
            f"two, {MIN_TILE_ROWS} to {tallest}")
    tiles = len(plan_.tile_seq)
    if not tiles:
        return out
    scale = head_dim**-0.5 if scale is None else scale
    wide = dot_in_fp32(q.dtype)
    tile_keys = tile_sizes(q.dtype, head_dim, plan_.tile_rows)[1]
    prefill_attention_kernel[(min(tiles * heads, num_sms * PROGRAMS_PER_SM),)](
        q, k_cache, v_cache, out, block_tables, starts, lengths, plan_.tile_seq, plan_.tile_row,
        scale * math.log2(math.e), tiles, heads, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        *k_cache.stride()[:3], block_tables.stride(0), GROUP=heads // k_cache.shape[1], HEAD_DIM=head_dim,
        DIM=power_of_two(head_dim), PAGE=k_cache.shape[2], TILE_ROWS=plan_.tile_rows, TILE_KEYS=tile_keys, WIDE=wide,
        num_warps=8 if plan_.tile_rows == 128 else 4,
        num_stages=pipeline_stages(capability_of(q), q.dtype, head_dim, plan_.tile_rows))
    return out


def prefill_attention_reference(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                                block_tables: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, *,
                                scale: float | None = None) -> torch.Tensor:
    """The same in torch, in float32, one chunk after another."""
    check(q, k_cache, v_cache, block_tables, starts, lengths)
    heads, head_dim = q.shape[1:]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    bounds = starts.tolist()
    for i, tokens in enumerate(lengths.tolist()):
        begin, end = bounds[i], bounds[i + 1]
        if begin == end:
            continue
        k = gather(k_cache, block_tables[i], tokens).float()[:, None]  # (K, 1, tokens, D)
        v = gather(v_cache, block_tables[i], tokens).float()[:, None]
        rows = q[begin:end].float().view(end - begin, k.shape[0], -1, head_dim).permute(1, 2, 0, 3)  # (K, G, rows, D)
        seen = torch.ones(end - begin, tokens, dtype=torch.bool, device=q.device).tril(tokens - (end - begin))
        scores = (rows @ k.transpose(2, 3) * scale).masked_fill(~seen, float("-inf"))
        attended = torch.softmax(scores, -1) @ v
        out[begin:end] = attended.permute(2, 0, 1, 3).reshape(end - begin, heads, head_dim).to(q.dtype)
    return out


def _compiled(dtype: str, torch_dtype: torch.dtype, group: int, head_dim: int, longest: int = 4096) -> dict[str, Compiled]:
    rows, keys = tile_sizes(torch_dtype, head_dim, longest)
    pointers = {f"{n}_ptr": f"*{dtype}" for n in ("q", "k", "v", "out")}
    indices = {f"{n}_ptr": "*i32" for n in ("tables", "starts", "lengths", "tile_seq", "tile_row")}
    strides = ("q_stride_row", "q_stride_head", "out_stride_row", "out_stride_head", "cache_stride_block",
               "cache_stride_head", "cache_stride_token")
    scalars = dict.fromkeys(("num_tiles", "num_heads", "table_stride", *strides), "i32")
    return {f"prefill_attention_{dtype}_g{group}_d{head_dim}_{rows}_rows": Compiled(
        prefill_attention_kernel, {**pointers, **indices, **scalars, "scale_log2": "fp32"},
        {"GROUP": group, "HEAD_DIM": head_dim, "DIM": power_of_two(head_dim), "PAGE": 16, "TILE_ROWS": rows,
         "TILE_KEYS": keys, "WIDE": False}, num_warps=8 if rows == 128 else 4, aligned=strides,
        num_stages=lambda capability: pipeline_stages(capability, torch_dtype, head_dim, rows))}


COMPILED: dict[str, Compiled] = {
    **{name: entry for longest in (16, 32, 64, 128)  # every height that a batch of the engine may take
       for name, entry in _compiled("bf16", torch.bfloat16, 4, 128, longest).items()},
    **_compiled("bf16", torch.bfloat16, 8, 64), **_compiled("bf16", torch.bfloat16, 7, 256),
    **_compiled("fp16", torch.float16, 8, 64),
    **_compiled("fp32", torch.float32, 1, 80), **_compiled("fp32", torch.float32, 1, 256)}
