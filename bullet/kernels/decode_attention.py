"""Decode attention: one query a sequence against its paged KV cache, the sequences cut into pieces of even size.

A batch's lengths differ and a lane's SMs are few, so work is not one block a sequence: sequences are cut into splits of
``split_tokens``, a bounded grid takes (split, KV head) items in turn, and a second kernel joins a sequence's splits by
their log-sum-exps. The query heads that share a KV head are rows of one matrix product: the cache is read once.

::

    lengths        [ 70,            0, 20 ]     split_tokens 32
    split_starts   [  0,            3,  3, 4 ]
    splits           0: 0-31 1: 32-63 2: 64-69    3: 0-19          items = 4 splits x KV heads

How many splits there are follows from the lengths on the device (:func:`plan`): no launch argument depends on them, so
a captured graph serves any lengths of its batch size. The plan is made once a step and serves all layers.

Shapes: q and out ``(B, H, D)``, caches ``(blocks, K, block_tokens, D)``, block tables ``(B, width)``, lengths ``(B,)``;
``G = H / K``. A sequence of length 0 (a padded row of a batch bucket) gives zeros.

References: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023) for the split; Dao et al., FlashAttention (2022), for the
running maximum and sum. Not yet run on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

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

BLOCK_TOKENS_READ = 64
"""Keys of one tile of the product; split sizes are multiples of it."""
PROGRAMS_PER_SM = 3
"""As many as fit by registers (168 of 128 threads, head size 128); each has two tiles of K or V under way."""
ITEMS_PER_PROGRAM = 4
"""Items that the plan aims at, for each program of the grid: enough that unequal ones even out."""
WIDE_TOKENS_READ = 32
"""The same for float32 with a head size beyond 128: 64 would not fit into an sm_89's shared memory."""
MIN_SPLIT_TOKENS = 128
MIN_ROWS = 16
"""Least rows of ``tl.dot``."""


@triton.jit(do_not_specialize=["batch", "table_stride"])
def decode_attention_kernel(q_ptr, k_ptr, v_ptr, tables_ptr, lengths_ptr, starts_ptr, split_tokens_ptr, partial_ptr,
                            lse_ptr, scale_log2, batch, num_kv_heads, q_stride_seq, q_stride_head, cache_stride_block,
                            cache_stride_head, cache_stride_token, table_stride,
                            BATCH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
                            DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Partial attention of every item: ``partial`` (splits, H, D) normalised, ``lse`` (splits, H) in base 2."""
    sequences = tl.arange(0, BATCH)
    ends = tl.load(starts_ptr + 1 + sequences, mask=sequences < batch, other=2147483647)
    num_splits = tl.load(starts_ptr + batch)
    split_tokens = tl.load(split_tokens_ptr)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    lanes = tl.arange(0, TILE)
    row_mask = rows < GROUP
    dim_mask = dims < HEAD_DIM
    num_heads = num_kv_heads * GROUP
    for item in range(tl.program_id(0), num_splits * num_kv_heads, tl.num_programs(0)):
        split = item // num_kv_heads
        kv_head = item % num_kv_heads
        seq = tl.sum((ends <= split).to(tl.int32), 0)
        begin = (split - tl.load(starts_ptr + seq)) * split_tokens
        end = tl.minimum(begin + split_tokens, tl.load(lengths_ptr + seq))
        heads = kv_head * GROUP + rows
        q = tl.load(q_ptr + tl.cast(seq, tl.int64) * q_stride_seq + heads[:, None] * q_stride_head + dims[None, :],
                    mask=row_mask[:, None] & dim_mask[None, :], other=0.0)
        if WIDE:
            q = q.to(tl.float32)
        table = tables_ptr + tl.cast(seq, tl.int64) * table_stride
        head_offset = tl.cast(kv_head, tl.int64) * cache_stride_head
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, DIM), tl.float32)
        for at in range(begin, end, TILE):
            tokens = at + lanes
            token_mask = tokens < end
            block = tl.load(table + tokens // PAGE, mask=token_mask, other=0).to(tl.int64)
            where = block * cache_stride_block + head_offset + (tokens % PAGE) * cache_stride_token
            mask = token_mask[:, None] & dim_mask[None, :]
            k = tl.load(k_ptr + where[:, None] + dims[None, :], mask=mask, other=0.0)
            v = tl.load(v_ptr + where[:, None] + dims[None, :], mask=mask, other=0.0)
            if WIDE:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            scores = tl.where(token_mask[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))  # finite: a split has a token, and its first tile one too
            weights = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top = new_top
        row = tl.cast(split, tl.int64) * num_heads + heads
        tl.store(partial_ptr + row[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None],
                 mask=row_mask[:, None] & dim_mask[None, :])
        tl.store(lse_ptr + row, top + tl.log2(total), mask=row_mask)


@triton.jit(do_not_specialize=["batch"])
def join_splits_kernel(partial_ptr, lse_ptr, starts_ptr, out_ptr, batch, num_heads, out_stride_seq, out_stride_head,
                       HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Each (sequence, head): the mean of its splits, weighted by the exponentials of their log-sum-exps."""
    dims = tl.arange(0, DIM)
    dim_mask = dims < HEAD_DIM
    for item in range(tl.program_id(0), batch * num_heads, tl.num_programs(0)):
        seq = item // num_heads
        head = item % num_heads
        first = tl.load(starts_ptr + seq)
        last = tl.load(starts_ptr + seq + 1)
        top = float("-inf")  # below any score; an empty sequence has no split and never gets to inf - inf
        total = 0.0
        acc = tl.zeros((DIM,), tl.float32)
        for split in range(first, last):
            row = tl.cast(split, tl.int64) * num_heads + head
            lse = tl.load(lse_ptr + row)
            part = tl.load(partial_ptr + row * HEAD_DIM + dims, mask=dim_mask, other=0.0)
            new_top = tl.maximum(top, lse)
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(lse - new_top)
            acc = acc * shrink + part * weight
            total = total * shrink + weight
            top = new_top
        value = acc / tl.where(total > 0.0, total, 1.0)
        tl.store(out_ptr + tl.cast(seq, tl.int64) * out_stride_seq + head * out_stride_head + dims,
                 value.to(out_ptr.dtype.element_ty), mask=dim_mask)


def tile_tokens(dtype: torch.dtype, head_dim: int) -> int:
    """Keys of a tile."""
    return WIDE_TOKENS_READ if dtype == torch.float32 and head_dim > 128 else BLOCK_TOKENS_READ


SHALLOW_STAGES = 3
NARROW_SMS = 32
"""Below, a lane's bandwidth is what its SMs have under way, not what memory gives. *Assumed.*"""


def pipeline_stages(capability: int, num_sms: int, dtype: torch.dtype, head_dim: int) -> int:
    """Deep where two buffers leave room for two blocks on an SM; where they leave room for one (sm_89: 99 KB), deep on a narrow
    lane only, whose SMs each need more bytes under way, and else two shallow blocks that hide each other's waits."""
    buffers = 2 * 2 * tile_tokens(dtype, head_dim) * power_of_two(head_dim) * dtype.itemsize
    needed = buffers + SMALL_BUFFERS_BYTES
    if needed > shared_limit(capability):
        return SHALLOW_STAGES
    return DEEP_STAGES if 2 * needed <= shared_limit(capability) or num_sms < NARROW_SMS else SHALLOW_STAGES


SMALL_BUFFERS_BYTES = 12 << 10
"""Queries, weights and block numbers beside the buffers of keys and values."""


@dataclass(frozen=True)
class Plan:
    """Splits of one step: ``split_starts`` (B + 1,) and ``split_tokens`` (1,), int32 on the device.

    ``max_splits`` bounds the splits whatever the lengths, so buffers have a fixed size; ``programs`` is the grid.
    """

    split_starts: torch.Tensor
    split_tokens: torch.Tensor
    max_splits: int
    programs: int


def plan(lengths: torch.Tensor, num_kv_heads: int, num_sms: int) -> Plan:
    """Cut so that the grid gets about :data:`ITEMS_PER_PROGRAM` items a program; torch operations of fixed shape only.

    With a cut of at least total / aim, the sum of ceil(length / cut) is at most aim + B.
    """
    require(lengths.dtype == torch.int32 and lengths.dim() == 1, "decode plan: lengths must be a row of int32")
    require_sms("decode plan", num_sms)
    programs = num_sms * PROGRAMS_PER_SM
    aim = max(1, -(-programs * ITEMS_PER_PROGRAM // num_kv_heads))
    per_split = (lengths.sum(dtype=torch.int64) + aim - 1) // aim
    per_split = per_split.clamp(min=MIN_SPLIT_TOKENS)
    cut = (per_split + BLOCK_TOKENS_READ - 1) // BLOCK_TOKENS_READ * BLOCK_TOKENS_READ
    splits = (lengths + cut - 1) // cut
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    starts[1:] = splits.cumsum(0)
    return Plan(starts, cut.to(torch.int32).reshape(1), aim + len(lengths), programs)


@dataclass(frozen=True)
class Workspace:
    """Partial results: reused by every layer and step of one lane, float32."""

    partial: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def make(cls, max_splits: int, num_heads: int, head_dim: int, device: torch.device) -> Workspace:
        return cls(torch.empty(max_splits, num_heads, head_dim, dtype=torch.float32, device=device),
                   torch.empty(max_splits, num_heads, dtype=torch.float32, device=device))


def check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
          lengths: torch.Tensor) -> None:
    """Shapes and dtypes; values on the device (block numbers, lengths) are the caller's promise."""
    name = "decode_attention"
    require_paged(name, "B", q, k_cache, v_cache, block_tables, lengths=lengths)
    require(block_tables.dim() == 2 and len(block_tables) == len(q) == len(lengths),
            f"{name}: {len(q)} queries, {len(block_tables)} block tables, {len(lengths)} lengths")


def decode_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
                     lengths: torch.Tensor, *, num_sms: int, scale: float | None = None, plan_: Plan | None = None,
                     workspace: Workspace | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Attend each query to its sequence's ``lengths`` cached tokens; ``scale`` defaults to 1 / sqrt(D)."""
    check(q, k_cache, v_cache, block_tables, lengths)
    require_sms("decode_attention", num_sms)
    batch, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    out = output_like("decode_attention", q, out)
    if not batch:
        return out
    plan_ = plan(lengths, kv_heads, num_sms) if plan_ is None else plan_
    require(len(plan_.split_starts) == batch + 1, f"decode_attention: the plan is for {len(plan_.split_starts) - 1} "
                                                  f"sequences, the batch has {batch}")
    require(plan_.programs == num_sms * PROGRAMS_PER_SM, f"decode_attention: the plan has {plan_.programs} programs, "
            f"{num_sms} SMs take {num_sms * PROGRAMS_PER_SM}")
    workspace = Workspace.make(plan_.max_splits, heads, head_dim, q.device) if workspace is None else workspace
    require_one_device("decode_attention", q=q, out=out, plan=plan_.split_starts, workspace=workspace.lse)
    require(len(workspace.lse) >= plan_.max_splits and workspace.partial.shape[1:] == (heads, head_dim),
            f"decode_attention: workspace {tuple(workspace.partial.shape)} must hold {plan_.max_splits} splits of "
            f"{heads} x {head_dim}")
    scale = head_dim**-0.5 if scale is None else scale
    group = heads // kv_heads
    dim = power_of_two(head_dim)
    decode_attention_kernel[(plan_.programs,)](
        q, k_cache, v_cache, block_tables, lengths, plan_.split_starts, plan_.split_tokens, workspace.partial,
        workspace.lse, scale * math.log2(math.e), batch, kv_heads, q.stride(0), q.stride(1), *k_cache.stride()[:3],
        block_tables.stride(0), BATCH=power_of_two(batch), GROUP=group, ROWS=max(MIN_ROWS, power_of_two(group)),
        HEAD_DIM=head_dim, DIM=dim, PAGE=k_cache.shape[2], TILE=tile_tokens(q.dtype, head_dim), WIDE=dot_in_fp32(q.dtype),
        num_warps=4, num_stages=pipeline_stages(capability_of(q), num_sms, q.dtype, head_dim))
    join_splits_kernel[(min(plan_.programs * 4, batch * heads),)](
        workspace.partial, workspace.lse, plan_.split_starts, out, batch, heads, out.stride(0), out.stride(1),
        HEAD_DIM=head_dim, DIM=dim, num_warps=1)
    return out


def gather(cache: torch.Tensor, table: torch.Tensor, tokens: int) -> torch.Tensor:
    """One sequence's first ``tokens`` of a paged cache: ``(K, tokens, D)``."""
    blocks = -(-tokens // cache.shape[2])
    pages = cache[table[:blocks].long()]  # (blocks, K, block_tokens, D)
    return pages.transpose(0, 1).flatten(1, 2)[:, :tokens]


def decode_attention_reference(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                               block_tables: torch.Tensor, lengths: torch.Tensor, *,
                               scale: float | None = None) -> torch.Tensor:
    """The same in torch, in float32, one sequence after another."""
    check(q, k_cache, v_cache, block_tables, lengths)
    scale = q.shape[-1]**-0.5 if scale is None else scale
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for i, tokens in enumerate(lengths.tolist()):
        if not tokens:
            continue
        k = gather(k_cache, block_tables[i], tokens).float()
        v = gather(v_cache, block_tables[i], tokens).float()
        rows = q[i].float().view(k.shape[0], -1, q.shape[-1])
        weights = torch.softmax(rows @ k.transpose(1, 2) * scale, -1)
        out[i] = (weights @ v).view(q.shape[1:]).to(q.dtype)
    return out


def _compiled(dtype: str, torch_dtype: torch.dtype, group: int, head_dim: int, batch: int = 64, sms: int = 132
              ) -> dict[str, Compiled]:
    attention = Compiled(
        decode_attention_kernel,
        {"q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}", "v_ptr": f"*{dtype}", "tables_ptr": "*i32", "lengths_ptr": "*i32",
         "starts_ptr": "*i32", "split_tokens_ptr": "*i32", "partial_ptr": "*fp32", "lse_ptr": "*fp32",
         "scale_log2": "fp32", "batch": "i32", "num_kv_heads": "i32", "q_stride_seq": "i32", "q_stride_head": "i32",
         "cache_stride_block": "i32", "cache_stride_head": "i32", "cache_stride_token": "i32", "table_stride": "i32"},
        {"BATCH": batch, "GROUP": group, "ROWS": max(MIN_ROWS, power_of_two(group)), "HEAD_DIM": head_dim,
         "DIM": power_of_two(head_dim), "PAGE": 16, "TILE": tile_tokens(torch_dtype, head_dim), "WIDE": False},
        num_stages=lambda capability: pipeline_stages(capability, sms, torch_dtype, head_dim),
        aligned=("q_stride_seq", "q_stride_head", "cache_stride_block", "cache_stride_head", "cache_stride_token"))
    join = Compiled(
        join_splits_kernel,
        {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "starts_ptr": "*i32", "out_ptr": f"*{dtype}", "batch": "i32",
         "num_heads": "i32", "out_stride_seq": "i32", "out_stride_head": "i32"},
        {"HEAD_DIM": head_dim, "DIM": power_of_two(head_dim)}, num_warps=1)
    narrow = "_narrow" if sms < NARROW_SMS else ""
    return {f"decode_attention_{dtype}_g{group}_d{head_dim}_batch_{batch}{narrow}": attention,
            f"join_splits_{dtype}_d{head_dim}": join}


COMPILED: dict[str, Compiled] = {
    **_compiled("bf16", torch.bfloat16, 4, 128), **_compiled("bf16", torch.bfloat16, 4, 128, sms=20),
    **_compiled("bf16", torch.bfloat16, 8, 128, 1),
    **_compiled("bf16", torch.bfloat16, 7, 64, 256), **_compiled("bf16", torch.bfloat16, 16, 256),
    **_compiled("fp16", torch.float16, 8, 128), **_compiled("fp32", torch.float32, 1, 80),
    **_compiled("fp32", torch.float32, 1, 256)}
