"""One transformer layer and its parts in torch operations alone: what a sweep times.

No paging and no fusion beyond what torch offers: a reference that runs wherever torch does, not a serving engine's
speed. Attention is ``scaled_dot_product_attention`` with grouped heads; decode packs the query heads that share a KV
head as rows of one small matrix, so that the cache is read once. Mixture of experts: batched GEMMs under uniform
routing, as many experts as the tokens can touch.

Shapes: ``B`` sequences of ``n`` new tokens, ``T`` tokens attended, ``H`` query and ``K`` KV heads of size ``D``;
activations are ``(B n, hidden)``, caches ``(B, K, T, D)``, weights ``(out, in)`` as ``torch.nn.functional.linear``
takes them (experts ``(E, in, out)``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bullet.catalog.models import ModelSpec
from bullet.errors import ProfileError
from bullet.profiler import timing
from bullet.profiler.shapes import CUDNN

Tensor = torch.Tensor
PAGE_TOKENS = 16
RMS_EPS = 1e-5
ROPE_BASE = 500_000.0
"""Llama 3.1's rotary base. It changes values, not times."""


def pinned(q: Tensor, backend: str = "flash") -> AbstractContextManager[None]:
    """SDPA by this backend and no other, on a GPU: left alone torch takes cuDNN for a Hopper card where its version is new
    enough, and which it took is nowhere to be read. One that cannot run is an error, not another's time."""
    if not q.is_cuda:
        return nullcontext()
    kind = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[backend]
    context: AbstractContextManager[None] = sdpa_kernel(kind)
    return context


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, backend: str = "flash") -> Tensor:
    """Causal attention of the last ``n`` of ``T`` positions: q ``(B, H, n, D)``, k and v ``(B, K, T, D)``."""
    n, total = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if n == total:
        with pinned(q, backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if q.is_cuda:
        from torch.nn.attention.bias import causal_lower_right

        with pinned(q, backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(n, total), enable_gqa=grouped)
    mask = torch.ones(n, total, dtype=torch.bool, device=q.device).tril(total - n)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def decode_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query a sequence over the whole cache: q ``(B, H, D)``, k and v ``(B, K, T, D)`` -> ``(B, H, D)``."""
    b, h, d = q.shape
    rows = q.view(b, k.shape[1], h // k.shape[1], d)
    with pinned(q):
        return F.scaled_dot_product_attention(rows, k, v).reshape(b, h, d)


def rope_tables(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines, and sines with the sign that a half-rotation needs; each ``(positions, 1, D)``."""
    inverse = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    angle = positions.to(torch.float64)[:, None] * inverse
    cos = torch.cat([angle.cos(), angle.cos()], -1)
    sin = torch.cat([-angle.sin(), angle.sin()], -1)
    return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x ``(tokens, heads, D)``: rotating by D / 2 swaps the halves."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


@dataclass
class Weights:
    """One layer's weights. For experts ``gate_up`` and ``down`` have a leading expert axis."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor
    router: Tensor | None = None


def mlp(model: ModelSpec, h: Tensor, w: Weights) -> Tensor:
    """Gated MLP of h ``(tokens, hidden)``; experts as in :func:`expert_rows`."""
    if not model.num_experts:
        gate, up = F.linear(h, w.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, w.down)
    assert w.router is not None
    F.linear(h, w.router)  # its time counts; the routing itself is uniform
    touched, per = expert_rows(model, h.shape[0])
    index = torch.arange(touched * per, device=h.device).remainder(h.shape[0])
    gate, up = torch.bmm(h[index].view(touched, per, -1), w.gate_up[:touched]).chunk(2, -1)
    out = torch.bmm(F.silu(gate) * up, w.down[:touched]).view(touched * per, -1)
    return torch.zeros_like(h).index_add_(0, index, out)


def expert_rows(model: ModelSpec, tokens: int) -> tuple[int, int]:
    """Experts touched and rows of each, every token visiting ``experts_per_token`` of them, evenly."""
    rows = tokens * model.experts_per_token
    touched = min(model.num_experts, rows)
    return touched, math.ceil(rows / touched)


def layer(model: ModelSpec, x: Tensor, w: Weights, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor,
          past_tokens: int) -> Tensor:
    """A whole layer over x ``(B n, hidden)``; the new keys and values are written behind ``past_tokens`` in the caches.

    ``n = T - past_tokens``; n = 1 takes decode's attention.
    """
    batch, kv_heads, total, head_dim = k_cache.shape
    new, heads = total - past_tokens, model.num_heads
    h = F.rms_norm(x, (model.hidden_size,), w.norm, RMS_EPS)
    qkv = F.linear(h, w.qkv).view(batch * new, heads + 2 * kv_heads, head_dim)
    qk = qkv[:, :heads + kv_heads]
    if model.qk_norm:
        qk = F.rms_norm(qk, (head_dim,), None, RMS_EPS)
    qk = rotate(qk, cos, sin)
    q = qk[:, :heads]
    k_cache[:, :, past_tokens:] = qk[:, heads:].view(batch, new, kv_heads, head_dim).transpose(1, 2)
    v_cache[:, :, past_tokens:] = qkv[:, heads + kv_heads:].view(batch, new, kv_heads, head_dim).transpose(1, 2)
    if new == 1 and past_tokens:
        attended = decode_attention(q.contiguous(), k_cache, v_cache)
    else:
        q = q.view(batch, new, heads, head_dim).transpose(1, 2)
        attended = prefill_attention(q, k_cache, v_cache).transpose(1, 2)
    x = x + F.linear(attended.reshape(batch * new, heads * head_dim), w.o)
    h = F.rms_norm(x, (model.hidden_size,), w.norm, RMS_EPS)
    return x + mlp(model, h, w)


# ------------------------------------------------------------------------------------------- workloads


@dataclass
class Workload:
    """An operation with its data: ``run(i)`` does one repetition on input set ``i``, ``0 <= i < rotation``.

    ``footprint_bytes``: data of one set. ``takes_num_sms``: whether the kernel bounds its own SMs; ``on`` then gives the
    same for a lane of so many.
    """

    name: str
    run: Callable[[int], Tensor]
    rotation: int
    footprint_bytes: int
    takes_num_sms: bool = False
    on: Callable[[int], Workload] | None = None


class Workloads:
    """Builds workloads, sharing weights and caches between sizes.

    ``role`` separates data: the two lanes of a co-run work on different layers' weights, as two phases of a server do,
    or each would find the other's in L2. ``limit_bytes`` bounds what rotation may add for one operation.
    """

    def __init__(self, model: ModelSpec, device: torch.device, dtype: torch.dtype, *, l2_bytes: int, limit_bytes: int,
                 seed: int = 0) -> None:
        self.model = model
        self.device = device
        self.dtype = dtype
        self.l2_bytes = l2_bytes
        self.limit_bytes = limit_bytes
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._weights: dict[tuple[str, str, int], Tensor] = {}
        self._caches: dict[tuple[str, str, int], Tensor] = {}

    def clear(self) -> None:
        """Forget all shared data."""
        self._weights.clear()
        self._caches.clear()

    def build(self, op: str, tokens: int, batch: int, context_tokens: int, role: str) -> Workload:
        """The workload of one shape (:class:`bullet.profiler.shapes.Shape`); :class:`ProfileError` for an unknown one."""
        if tokens % batch:
            raise ProfileError(f"{op}: {tokens} tokens in {batch} sequences: must divide evenly")
        if op in ("prefill_layer", "decode_layer"):
            return self._layer(op, tokens, batch, context_tokens, role)
        if op in ("prefill_attention", CUDNN, "decode_attention"):
            return self._attention(op, tokens, batch, context_tokens, role)
        if op == "paged_decode_attention":
            return self._paged(op, tokens, batch, context_tokens, role)
        if op.startswith("gemm_"):
            return self._gemm(op, tokens, role)
        if op in ("norm", "copy", "rope", "act"):
            return self._rowwise(op, tokens)
        raise ProfileError(f"operation {op!r} has no torch reference")

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        # Random, not zeros: a chip draws less power on zeros and clocks higher.
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.uniform_(-1.7 * scale, 1.7 * scale, generator=self._generator)

    def _weight(self, name: str, role: str, index: int) -> Tensor:
        key = (name, role, index)
        if key not in self._weights:
            m = self.model
            width = m.num_heads * m.head_dim
            sizes = {"qkv": (m.qkv_size, m.hidden_size), "o": (m.hidden_size, width), "norm": (m.hidden_size,),
                     "lm_head": (m.vocab_size, m.hidden_size)}
            if m.num_experts:
                sizes |= {"gate_up": (m.num_experts, m.hidden_size, 2 * m.intermediate_size),
                          "down": (m.num_experts, m.intermediate_size, m.hidden_size),
                          "router": (m.num_experts, m.hidden_size)}
            else:
                sizes |= {"gate_up": (2 * m.intermediate_size, m.hidden_size),
                          "down": (m.hidden_size, m.intermediate_size)}
            self._weights[key] = self._random(*sizes[name], scale=m.hidden_size ** -0.5)
        return self._weights[key]

    def _layer_weights(self, role: str, index: int) -> Weights:
        names = ["qkv", "o", "gate_up", "down", "norm", *(["router"] if self.model.num_experts else [])]
        return Weights(**{name: self._weight(name, role, index) for name in names})

    def _cache(self, name: str, role: str, index: int, batch: int, total: int) -> Tensor:
        """A view of one buffer per role that grows to the largest size asked for."""
        shape = (batch, self.model.num_kv_heads, total, self.model.head_dim)
        key, size = (name, role, index), math.prod(shape)
        if key not in self._caches or self._caches[key].numel() < size:
            self._caches[key] = self._random(size)
        return self._caches[key][:size].view(shape)

    def _rotation(self, footprint: int) -> int:
        return timing.rotation(footprint, self.l2_bytes, self.limit_bytes)

    def _layer(self, op: str, tokens: int, batch: int, context_tokens: int, role: str) -> Workload:
        m, new = self.model, tokens // batch
        past = context_tokens if op == "prefill_layer" else context_tokens - 1
        if op == "decode_layer" and (new != 1 or past < 1):
            raise ProfileError(f"{op}: {new} new tokens a sequence over {context_tokens}: must be 1 over 2 or more")
        total = past + new
        width = self.dtype.itemsize
        weight_bytes = sum(w.numel() for w in vars(self._layer_weights(role, 0)).values() if w is not None) * width
        footprint = weight_bytes + 2 * batch * m.num_kv_heads * total * m.head_dim * width + tokens * m.hidden_size * width
        count = self._rotation(footprint)
        weights = [self._layer_weights(role, i) for i in range(count)]
        inputs = [self._random(tokens, m.hidden_size) for _ in range(count)]
        keys = [self._cache("k", role, i, batch, total) for i in range(count)]
        values = [self._cache("v", role, i, batch, total) for i in range(count)]
        positions = torch.arange(past, total, device=self.device).repeat(batch)
        cos, sin = rope_tables(positions, m.head_dim, self.dtype)
        return Workload(op, lambda i: layer(m, inputs[i], weights[i], keys[i], values[i], cos, sin, past), count,
                        footprint)

    def _attention(self, op: str, tokens: int, batch: int, context_tokens: int, role: str) -> Workload:
        m, new = self.model, tokens // batch
        prefill = op != "decode_attention"
        total = context_tokens + new if prefill else context_tokens
        width = self.dtype.itemsize
        footprint = (2 * batch * m.num_kv_heads * total + 2 * tokens * m.num_heads) * m.head_dim * width
        count = self._rotation(footprint)
        keys = [self._cache("k", role, i, batch, total) for i in range(count)]
        values = [self._cache("v", role, i, batch, total) for i in range(count)]
        if prefill:
            queries = [self._random(batch, m.num_heads, new, m.head_dim) for _ in range(count)]
            backend = "cudnn" if op == CUDNN else "flash"
            return Workload(op, lambda i: prefill_attention(queries[i], keys[i], values[i], backend), count, footprint)
        if new != 1:
            raise ProfileError(f"{op}: {tokens} new tokens in {batch} sequences: must be one each")
        queries = [self._random(batch, m.num_heads, m.head_dim) for _ in range(count)]
        return Workload(op, lambda i: decode_attention(queries[i], keys[i], values[i]), count, footprint)

    def _paged(self, op: str, tokens: int, batch: int, context_tokens: int, role: str) -> Workload:
        """The project's own kernel, over pages in random order; its plan is made once, as once for all layers of a step."""
        from bullet.kernels import decode_attention as own  # Triton: not where there is none

        m, width = self.model, self.dtype.itemsize
        if tokens != batch:
            raise ProfileError(f"{op}: {tokens} new tokens in {batch} sequences: must be one each")
        pages = -(-context_tokens // PAGE_TOKENS)
        footprint = (2 * batch * m.num_kv_heads * pages * PAGE_TOKENS + 2 * tokens * m.num_heads) * m.head_dim * width
        count = self._rotation(footprint)
        shape = (batch * pages, m.num_kv_heads, PAGE_TOKENS, m.head_dim)
        keys = [self._cache("k", role, i, batch, pages * PAGE_TOKENS).view(shape) for i in range(count)]
        values = [self._cache("v", role, i, batch, pages * PAGE_TOKENS).view(shape) for i in range(count)]
        queries = [self._random(batch, m.num_heads, m.head_dim) for _ in range(count)]
        order = torch.randperm(batch * pages, device=self.device, generator=self._generator)
        tables = order.to(torch.int32).view(batch, pages)
        lengths = torch.full((batch,), context_tokens, dtype=torch.int32, device=self.device)

        def on(num_sms: int) -> Workload:
            plan = own.plan(lengths, m.num_kv_heads, num_sms)
            workspace = own.Workspace.make(plan.max_splits, m.num_heads, m.head_dim, self.device)
            out = torch.empty_like(queries[0])
            return Workload(op, lambda i: own.decode_attention(queries[i], keys[i], values[i], tables, lengths, plan_=plan,
                                                               num_sms=num_sms, workspace=workspace, out=out),
                            count, footprint, takes_num_sms=True)
        return replace(on(1), on=on)

    def _gemm(self, op: str, tokens: int, role: str) -> Workload:
        m, name = self.model, op.removeprefix("gemm_")
        weight = self._weight(name, role, 0)
        if m.num_experts and name in ("gate_up", "down"):
            touched, per = expert_rows(m, tokens)
            size = (touched, per, weight.shape[1])
        else:
            touched, size = 0, (tokens, weight.shape[1])
        footprint = (weight.numel() + math.prod(size)) * self.dtype.itemsize
        count = self._rotation(footprint)
        weights = [self._weight(name, role, i) for i in range(count)]
        inputs = [self._random(*size) for _ in range(count)]
        if touched:
            return Workload(op, lambda i: torch.bmm(inputs[i], weights[i][:touched]), count, footprint)
        return Workload(op, lambda i: F.linear(inputs[i], weights[i]), count, footprint)

    def _rowwise(self, op: str, tokens: int) -> Workload:
        m, hidden = self.model, self.model.hidden_size
        if op == "act":
            count = self._rotation(3 * tokens * m.intermediate_size * self.dtype.itemsize)
            wide = [self._random(tokens, 2 * m.intermediate_size) for _ in range(count)]
            return Workload(op, lambda i: F.silu(wide[i][:, :m.intermediate_size]) * wide[i][:, m.intermediate_size:], count,
                            3 * tokens * m.intermediate_size * self.dtype.itemsize)
        if op == "rope":
            return self._rope(op, tokens)
        one = tokens * hidden * self.dtype.itemsize
        count = self._rotation(2 * one)
        first = [self._random(tokens, hidden) for _ in range(count)]
        second = [self._random(tokens, hidden) for _ in range(count)]
        if op == "copy":
            return Workload(op, lambda i: second[i].copy_(first[i]), count, 2 * one)
        weight = self._random(hidden)
        return Workload(op, lambda i: F.rms_norm(first[i] + second[i], (hidden,), weight, RMS_EPS), count, 2 * one)

    def _rope(self, op: str, tokens: int) -> Workload:
        """Rotary embedding of queries and keys, keys and values written to a cache: as :func:`layer` does."""
        m = self.model
        turned, heads = m.num_heads + m.num_kv_heads, m.num_heads + 2 * m.num_kv_heads
        footprint = 2 * tokens * heads * m.head_dim * self.dtype.itemsize
        count = self._rotation(footprint)
        qkv = [self._random(tokens, heads, m.head_dim) for _ in range(count)]
        cache = [torch.empty(tokens, 2 * m.num_kv_heads, m.head_dim, dtype=self.dtype, device=self.device) for _ in range(count)]
        cos, sin = rope_tables(torch.arange(tokens, device=self.device), m.head_dim, self.dtype)

        def run(i: int) -> Tensor:
            qk = rotate(qkv[i][:, :turned], cos, sin)
            cache[i][:, :m.num_kv_heads] = qk[:, m.num_heads:]
            cache[i][:, m.num_kv_heads:] = qkv[i][:, turned:]
            return qk
        return Workload(op, run, count, footprint)
