"""What a batch costs in operations, bytes and thread blocks, from the model's shape alone.

Nothing here knows how fast a GPU is. One multiply-add counts as two operations. Bytes are the least that must move
between memory and the SMs: each operand once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from bullet.catalog.models import ModelSpec

GEMM_TILE = (128, 256)
"""Output tile of a prefill GEMM (rows, columns): with it Table 2's QKV and O columns come out exactly."""
ATTENTION_TILE_ROWS = 128
"""Query rows that a thread block of prefill attention owns, per head (Table 2's Attn column)."""


class KernelWork(NamedTuple):
    """One kernel: operations, bytes and thread blocks. ``k`` is the GEMM's inner size, 0 for other kernels."""

    name: str
    flops: float
    bytes: float
    blocks: int
    rows: int = 0
    columns: int = 0
    k: int = 0


class Waves(NamedTuple):
    """Wave quantization (section 2.2.1): waves, SMs busy in the last one, idle share of SM cycles."""

    waves: int
    tail_sms: float
    idle: float


def wave_quantization(blocks: int, sms: int, blocks_per_sm: int = 1) -> Waves:
    """``w = ceil(q / (b N))``, ``tail = ceil(q / b - N (w - 1))``, ``idle = (N - tail) / (N w)``."""
    waves = -(-blocks // (blocks_per_sm * sms))
    tail = math.ceil(blocks / blocks_per_sm - sms * (waves - 1))
    return Waves(waves, tail, (sms - tail) / (sms * waves))


def gemm(name: str, m: int, n: int, k: int, dtype_bytes: int) -> KernelWork:
    """``(m x k) (k x n)``: 2 m n k operations; both operands and the result once."""
    blocks = -(-m // GEMM_TILE[0]) * -(-n // GEMM_TILE[1])
    return KernelWork(name, 2.0 * m * n * k, float(dtype_bytes) * (m * k + k * n + m * n), blocks, m, n, k)


def attended_pairs(new_tokens: int, past_tokens: int) -> float:
    """Query-key pairs of causal attention: each new token sees the past and itself."""
    return new_tokens * (past_tokens + (new_tokens + 1) / 2)


def prefill_attention(model: ModelSpec, pieces: Sequence[tuple[int, int]], tensor_parallel: int = 1) -> KernelWork:
    """Causal attention of ``(new, past)`` pieces in one kernel; the cached past is read again by every chunk."""
    heads = model.num_heads // tensor_parallel
    kv_heads = max(1, model.num_kv_heads // tensor_parallel)
    pairs = sum(attended_pairs(new, past) for new, past in pieces)
    tokens = sum(new for new, _ in pieces)
    context = sum(new + past for new, past in pieces)
    blocks = sum(-(-new // ATTENTION_TILE_ROWS) for new, _ in pieces) * heads
    size = model.dtype_bytes * model.head_dim
    return KernelWork("prefill_attention", 4.0 * heads * model.head_dim * pairs,
                      float(size) * (2 * heads * tokens + 2 * kv_heads * context), blocks)


def decode_attention(model: ModelSpec, num_seqs: int, context_tokens: int, tensor_parallel: int = 1) -> KernelWork:
    """One query a sequence over ``context_tokens`` cached tokens in all (the new ones included)."""
    heads = model.num_heads // tensor_parallel
    kv_heads = max(1, model.num_kv_heads // tensor_parallel)
    size = model.dtype_bytes * model.head_dim
    return KernelWork("decode_attention", 4.0 * heads * model.head_dim * context_tokens,
                      float(size) * (2 * heads * num_seqs + 2 * kv_heads * context_tokens), num_seqs * kv_heads)


def dense_kernels(model: ModelSpec, tokens: int, tensor_parallel: int = 1) -> list[KernelWork]:
    """A layer's kernels but attention, for ``tokens`` tokens: norms (residual fused), projections, rotary, activation.

    Mixture of experts: every token visits ``experts_per_token`` experts; the weights of the experts expected to be
    touched under uniform routing are read, ``E (1 - (1 - k/E)^tokens)``.
    """
    tp, width, hidden = tensor_parallel, model.dtype_bytes, model.hidden_size
    qkv = (model.num_heads // tp + 2 * max(1, model.num_kv_heads // tp)) * model.head_dim
    rotated = (model.num_heads // tp + max(1, model.num_kv_heads // tp)) * model.head_dim
    kv = 2 * max(1, model.num_kv_heads // tp) * model.head_dim
    inner = model.intermediate_size // tp
    row_blocks = tokens  # one thread block a row: elementwise kernels never quantize visibly

    def rowwise(name: str, values: float) -> KernelWork:
        return KernelWork(name, 0.0, float(width) * tokens * values, row_blocks)

    kernels = [
        rowwise("norm", 4 * hidden),  # reads x and residual, writes both
        gemm("qkv", tokens, qkv, hidden, width),
        rowwise("rope", 2 * rotated + 2 * kv),  # rotates q and k in place; k and v go to their KV blocks
        gemm("o", tokens, hidden, model.num_heads // tp * model.head_dim, width),
        rowwise("norm", 4 * hidden),
    ]
    if model.qk_norm:
        kernels.insert(2, rowwise("qk_norm", 2 * rotated))
    if model.num_experts:
        k, experts = model.experts_per_token, model.num_experts
        touched = experts * (1 - (1 - k / experts) ** tokens)
        rows = tokens * k
        for name, n, inner_k in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            one = gemm(name, max(1, round(rows / touched)), n, inner_k, width)
            moved = width * (rows * (inner_k + n) + touched * inner_k * n)
            kernels.append(KernelWork(name, 2.0 * rows * n * inner_k, moved, math.ceil(one.blocks * touched), rows, n,
                                      inner_k))
        kernels.insert(-1, rowwise("act", k * 3 * inner))
        kernels.append(gemm("router", tokens, experts, hidden, width))
    else:
        kernels += [gemm("gate_up", tokens, 2 * inner, hidden, width), rowwise("act", 3 * inner),
                    gemm("down", tokens, hidden, inner, width)]
    return kernels


def all_reduce_bytes(model: ModelSpec, tokens: int, tensor_parallel: int) -> float:
    """Bytes that each GPU sends per layer: two ring all-reduces of the hidden states, ``2 (t - 1) / t`` each."""
    if tensor_parallel == 1:
        return 0.0
    return 2 * 2 * (tensor_parallel - 1) / tensor_parallel * tokens * model.hidden_size * model.dtype_bytes


def head_kernels(model: ModelSpec, logits_seqs: int, tensor_parallel: int = 1) -> list[KernelWork]:
    """After the last layer: final norm and LM head, only for sequences whose next token is wanted."""
    if logits_seqs == 0:
        return []
    norm = KernelWork("norm", 0.0, 4.0 * model.dtype_bytes * logits_seqs * model.hidden_size, logits_seqs)
    return [norm, gemm("lm_head", logits_seqs, model.vocab_size // tensor_parallel, model.hidden_size,
                       model.dtype_bytes)]


def gemm_shapes(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """Columns and inner size of each of the model's GEMMs on one GPU, the LM head's last."""
    return {k.name: (k.columns, k.k) for k in (*dense_kernels(model, 1), *head_kernels(model, 1)) if k.k}


def embedding_bytes(model: ModelSpec, tokens: int) -> float:
    """Rows of the embedding table read and written once."""
    return 2.0 * model.dtype_bytes * tokens * model.hidden_size


def layer_kernels(model: ModelSpec, pieces: Sequence[tuple[int, int]], num_seqs: int, context_tokens: int,
                  tensor_parallel: int = 1) -> list[KernelWork]:
    """All kernels of one layer for a prefill (``pieces``), decode or hybrid batch."""
    tokens = sum(new for new, _ in pieces) + num_seqs
    kernels = dense_kernels(model, tokens, tensor_parallel)
    attention = []
    if pieces:
        attention.append(prefill_attention(model, pieces, tensor_parallel))
    if num_seqs:
        attention.append(decode_attention(model, num_seqs, context_tokens, tensor_parallel))
    at = next(i for i, kernel in enumerate(kernels) if kernel.name == "o")
    return [*kernels[:at], *attention, *kernels[at:]]


def chunk_iterations(prompt_tokens: int, chunk_tokens: int, decode_seqs: int) -> tuple[int, int]:
    """Iterations and KV-cache reloads of a chunked prompt: ``n = ceil(sl / (cs - ds))``, ``n (n + 1) / 2``."""
    n = -(-prompt_tokens // (chunk_tokens - decode_seqs))
    return n, n * (n + 1) // 2
