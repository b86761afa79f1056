"""What a batch costs in operations, bytes and thread blocks, from the model's shape alone.

Nothing here knows how fast a GPU is. One multiply-add counts as two operations. Bytes are the least that must move
between memory and the SMs: each operand once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec

GEMM_TILE = (128, 256)
"""Output tile of a prefill GEMM (rows, columns): with it Table 2's QKV and O columns come out exactly."""
ATTENTION_TILE_ROWS = 128
"""Query rows that a thread block of prefill attention owns, per head (Table 2's Attn column)."""


class KernelWork(NamedTuple):
    """One kernel: operations, bytes and thread blocks. ``k`` is the GEMM's inner size, 0 for other kernels.

    ``share``: the part of the model's layers that runs it; operations and bytes are multiplied by it already, blocks are not.
    ``speed``: how much faster than in 16 bits its tensor-core operations are; ``flops`` are divided by it.
    """

    name: str
    flops: float
    bytes: float
    blocks: int
    rows: int = 0
    columns: int = 0
    k: int = 0
    share: float = 1.0
    speed: float = 1.0


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


def gemm(name: str, m: int, n: int, k: int, dtype_bytes: int, weight_bits: float = 0.0, speed: float = 1.0) -> KernelWork:
    """``(m x k) (k x n)``: 2 m n k operations; both operands and the result once. ``weight_bits``: of the second operand, 0: as
    the others."""
    blocks = -(-m // GEMM_TILE[0]) * -(-n // GEMM_TILE[1])
    moved = float(dtype_bytes) * (m * k + k * n + m * n)
    if weight_bits and weight_bits != 8.0 * dtype_bytes:
        moved += (weight_bits / 8 - dtype_bytes) * k * n
    return KernelWork(name, 2.0 * m * n * k / speed, moved, blocks, m, n, k, 1.0, speed)


def gemm_speed(model: ModelSpec, gpu: GpuSpec) -> float:
    """How much faster than in 16 bits the GPU multiplies the model's quantised matrices: by the data sheet; 1 where its tensor
    cores lack the type, since the weights are then widened on the way (as Marlin kernels do)."""
    peak = {"fp8": gpu.peak_fp8_flops, "int8": gpu.peak_int8_flops}.get(model.gemm_dtype, 0.0)
    return peak / gpu.peak_flops if peak > gpu.peak_flops else 1.0


def attended_pairs(new_tokens: int, past_tokens: int) -> float:
    """Query-key pairs of causal attention: each new token sees the past and itself."""
    return new_tokens * (past_tokens + (new_tokens + 1) / 2)


def windowed_pairs(new_tokens: int, past_tokens: int, window_tokens: int) -> float:
    """Likewise where a token sees the last ``window_tokens`` alone, itself among them."""
    growing = min(new_tokens, max(0, window_tokens - past_tokens))
    return attended_pairs(growing, past_tokens) + (new_tokens - growing) * window_tokens


def attended(model: ModelSpec, pieces: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Query-key pairs and tokens read of ``(new, past)`` pieces in the mean layer: some layers may have a window."""
    pairs = sum(attended_pairs(new, past) for new, past in pieces)
    context = sum(new + past for new, past in pieces)
    if not model.window_layers:
        return pairs, context
    share, window = model.window_layers / model.num_layers, model.window_tokens
    within = sum(windowed_pairs(new, past, window) for new, past in pieces)
    read = sum(new + min(past, window) for new, past in pieces)
    return (1 - share) * pairs + share * within, (1 - share) * context + share * read


def decoded_context(model: ModelSpec, num_seqs: int, context_tokens: float, within_tokens: float | None = None) -> float:
    """Context tokens that decodes read in the mean layer. In layers with a window at most that many each: ``within_tokens``, or
    taken of the mean context, an upper bound where some contexts are shorter than the window and others longer."""
    if not model.window_layers:
        return context_tokens
    share = model.window_layers / model.num_layers
    within = min(context_tokens, num_seqs * model.window_tokens) if within_tokens is None else within_tokens
    return (1 - share) * context_tokens + share * within


def prefill_attention(model: ModelSpec, pieces: Sequence[tuple[int, int]], tensor_parallel: int = 1) -> KernelWork:
    """Causal attention of ``(new, past)`` pieces in one kernel; the cached past is read again by every chunk.

    Latent attention: keys and values are made anew from the cached latents of the past (new tokens' are dense kernels).
    """
    heads = model.num_heads // tensor_parallel
    pairs, context = attended(model, pieces)
    tokens = sum(new for new, _ in pieces)
    blocks = sum(-(-new // ATTENTION_TILE_ROWS) for new, _ in pieces) * heads
    if model.kv_lora_rank:
        past = sum(past for _, past in pieces)
        width = model.head_dim + model.value_dim
        again = 2.0 * past * model.kv_lora_rank * heads * (width - model.rope_dim)
        return KernelWork("prefill_attention", 2.0 * heads * width * pairs + again,
                          float(model.dtype_bytes) * heads * width * (tokens + context)
                          + float(model.kv_bytes) * model.kv_values_per_token * past, blocks)
    kv_heads = max(1, model.num_kv_heads // tensor_parallel)
    return KernelWork("prefill_attention", 4.0 * heads * model.head_dim * pairs, float(model.head_dim) * (
        model.dtype_bytes * 2 * heads * tokens + model.kv_bytes * 2 * kv_heads * context), blocks)


def decode_attention(model: ModelSpec, num_seqs: int, context_tokens: int, tensor_parallel: int = 1) -> KernelWork:
    """One query a sequence over ``context_tokens`` cached tokens in all (the new ones included).

    Latent attention: every head attends to the one latent of a token, which no tensor parallelism divides.
    """
    heads = model.num_heads // tensor_parallel
    context = decoded_context(model, num_seqs, context_tokens)
    if model.kv_lora_rank:
        read, written = model.kv_values_per_token, model.kv_lora_rank
        return KernelWork("decode_attention", 2.0 * heads * (read + written) * context,
                          float(model.dtype_bytes) * heads * (read + written) * num_seqs + float(model.kv_bytes) * read * context,
                          num_seqs)
    kv_heads = max(1, model.num_kv_heads // tensor_parallel)
    return KernelWork("decode_attention", 4.0 * heads * model.head_dim * context, float(model.head_dim) * (
        model.dtype_bytes * 2 * heads * num_seqs + model.kv_bytes * 2 * kv_heads * context), num_seqs * kv_heads)


def dense_kernels(model: ModelSpec, tokens: int, tensor_parallel: int = 1, speed: float = 1.0) -> list[KernelWork]:
    """The mean layer's kernels but attention, for ``tokens`` tokens: norms (residual fused), projections, rotary, activation.

    Mixture of experts: every token visits ``experts_per_token`` experts; the weights of the experts expected to be
    touched under uniform routing are read, ``E (1 - (1 - k/E)^tokens)``. ``speed``: :func:`gemm_speed`, of quantised matrices.
    """
    tp, width, hidden = tensor_parallel, model.dtype_bytes, model.hidden_size
    kv_heads = max(1, model.num_kv_heads // tp)
    rotated = (model.num_heads // tp + kv_heads) * model.head_dim
    row_blocks = tokens  # one thread block a row: elementwise kernels never quantize visibly

    def rowwise(name: str, values: float) -> KernelWork:
        return KernelWork(name, 0.0, float(width) * tokens * values, row_blocks)

    def attention(name: str, n: int, k: int) -> KernelWork:
        bits = model.attention_bits
        return gemm(name, tokens, n, k, width, bits, speed if bits < 16 else 1.0)

    if model.kv_lora_rank:
        middle = _latent_projections(model, tp, attention, rowwise)
    else:
        middle = [
            attention("qkv", (model.num_heads // tp + 2 * kv_heads) * model.head_dim, hidden),
            rowwise("rope", 2 * rotated + 2 * 2 * kv_heads * model.head_dim),  # rotates q and k; k and v go to their KV blocks
            attention("o", hidden, model.num_heads // tp * model.head_dim)]
        if model.qk_norm:
            middle.insert(1, rowwise("qk_norm", 2 * rotated))
    kernels = [rowwise("norm", 4 * hidden), *middle, rowwise("norm", 4 * hidden)]  # reads x and residual, writes both
    if not model.num_experts:
        return kernels + _mlp(model, tokens, model.intermediate_size // tp, rowwise, speed)
    sparse = _experts(model, tokens, tp, rowwise, speed)
    if model.shared_size:
        sparse += _mlp(model, tokens, model.shared_size // tp, rowwise, speed)
    if model.dense_layers:
        share = model.dense_layers / model.num_layers
        return (kernels + [_of_layers(kernel, 1 - share) for kernel in sparse]
                + [_of_layers(kernel, share) for kernel in _mlp(model, tokens, model.dense_size // tp, rowwise, speed)])
    return kernels + sparse


_Rowwise = Callable[[str, float], KernelWork]


def _of_layers(kernel: KernelWork, share: float) -> KernelWork:
    return kernel._replace(flops=kernel.flops * share, bytes=kernel.bytes * share, share=share)


def _mlp(model: ModelSpec, tokens: int, inner: int, rowwise: _Rowwise, speed: float) -> list[KernelWork]:
    """A dense MLP: gate and up in one matrix, or up alone."""
    width, hidden, bits = model.dtype_bytes, model.hidden_size, model.mlp_bits
    speed = speed if bits < 16 else 1.0
    wide = 2 if model.gated_mlp else 1
    return [gemm("gate_up", tokens, wide * inner, hidden, width, bits, speed), rowwise("act", (wide + 1) * inner),
            gemm("down", tokens, hidden, inner, width, bits, speed)]


def _experts(model: ModelSpec, tokens: int, tp: int, rowwise: _Rowwise, speed: float) -> list[KernelWork]:
    """Routed experts, each a small MLP on the tokens that visit it, and the router."""
    width, hidden, inner = model.dtype_bytes, model.hidden_size, model.intermediate_size // tp
    k, experts = model.experts_per_token, model.num_experts
    speed = speed if model.mlp_bits < 16 else 1.0
    wide = 2 if model.gated_mlp else 1
    touched = experts * (1 - (1 - k / experts) ** tokens)
    rows = tokens * k
    kernels = []
    for name, n, inner_k in (("gate_up", wide * inner, hidden), ("down", hidden, inner)):
        one = gemm(name, max(1, round(rows / touched)), n, inner_k, width)
        moved = width * rows * (inner_k + n) + model.mlp_bits / 8 * touched * inner_k * n
        kernels.append(KernelWork(name, 2.0 * rows * n * inner_k / speed, moved, math.ceil(one.blocks * touched), rows, n,
                                  inner_k,
                                  1.0, speed))
    kernels.insert(-1, rowwise("act", k * (wide + 1) * inner))
    kernels.append(gemm("router", tokens, experts, hidden, width))
    return kernels


def _latent_projections(model: ModelSpec, tp: int, attention: Callable[[str, int, int], KernelWork],
                        rowwise: _Rowwise) -> list[KernelWork]:
    """Down to the latents and up to the heads (DeepSeek V2). In a decode ``kv_b`` is folded into the query and the output: as
    many operations and the same weights for a token as making its own keys and values, which is what a prefill does."""
    heads, hidden, rank = model.num_heads // tp, model.hidden_size, model.kv_lora_rank
    nope = model.head_dim - model.rope_dim
    query = [attention("q", heads * model.head_dim, hidden)] if not model.q_lora_rank else [
        attention("q_a", model.q_lora_rank, hidden), rowwise("norm", 2 * model.q_lora_rank),
        attention("q_b", heads * model.head_dim, model.q_lora_rank)]
    return [*query, attention("kv_a", rank + model.rope_dim, hidden), rowwise("norm", 2 * rank),
            attention("kv_b", heads * (nope + model.value_dim), rank),
            rowwise("rope", 2 * (heads + 1) * model.rope_dim + 2 * (rank + model.rope_dim)),
            attention("o", hidden, heads * model.value_dim)]


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
    return [norm, gemm("lm_head", logits_seqs, model.vocab_size // tensor_parallel, model.hidden_size, model.dtype_bytes,
                       model.head_bits)]


def gemm_shapes(model: ModelSpec, tensor_parallel: int = 1) -> dict[str, tuple[int, int]]:
    """Columns and inner size of each of the model's GEMMs on one GPU (of ``tensor_parallel``), the LM head's last."""
    kernels = (*dense_kernels(model, 1, tensor_parallel), *head_kernels(model, 1, tensor_parallel))
    return {k.name: (k.columns, k.k) for k in kernels if k.k}


def embedding_bytes(model: ModelSpec, tokens: int) -> float:
    """Rows of the embedding table read and written once."""
    return 2.0 * model.dtype_bytes * tokens * model.hidden_size


def activation_bytes(model: ModelSpec, tokens: int, dtype_bytes: int) -> int:
    """Most that a layer's tensors hold at once over ``tokens`` new ones, weights and caches aside: at the activation the gated
    projection and its product (three times the inner size), and the residual stream, the normalised input, queries, attended
    values and the step's own input (five times the width). Experts: of those that a token visits."""
    inner = model.intermediate_size * max(1, model.experts_per_token if model.num_experts else 1)
    return tokens * dtype_bytes * (3 * inner + 5 * model.hidden_size)


def layer_kernels(model: ModelSpec, pieces: Sequence[tuple[int, int]], num_seqs: int, context_tokens: int,
                  tensor_parallel: int = 1, speed: float = 1.0) -> list[KernelWork]:
    """All kernels of the mean layer for a prefill (``pieces``), decode or hybrid batch."""
    tokens = sum(new for new, _ in pieces) + num_seqs
    kernels = dense_kernels(model, tokens, tensor_parallel, speed)
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
