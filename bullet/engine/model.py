"""Llama and Qwen3 dense decoders: their configuration, the layout of their weights, and a layer's arithmetic.

A layer works on *rows*: tokens of prompts' chunks first, then one row for every decoding sequence. Between layers two
tensors carry everything, so work may stop after any layer and go on elsewhere::

    residual   the stream that layers add to
    x          the last layer's output, not yet added (the next norm adds it): None before the first layer

Keys and values go straight into the paged cache ``(layers, 2, blocks, K, block_tokens, D)``, which decode reads in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bullet.catalog.reader import read_config, read_object
from bullet.catalog.spec import ModelSpec
from bullet.errors import ConfigError

Tensor = torch.Tensor

MODEL_TYPES = ("llama", "qwen3")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rotary scaling: wavelengths beyond ``original_tokens / low`` are stretched ``factor`` times, those
    below ``original_tokens / high`` kept, and those between interpolated in frequency."""

    factor: float
    low: float
    high: float
    original_tokens: int


@dataclass(frozen=True)
class Architecture:
    """What a forward pass needs beside :class:`bullet.config.ModelSpec`'s sizes."""

    spec: ModelSpec
    model_type: str
    dtype: torch.dtype
    rms_eps: float
    rope_theta: float
    scaling: Llama3Scaling | None = None

    @classmethod
    def of(cls, spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> Architecture:
        """A built-in model's shape, for random weights: eps and rotary base as Llama 3.1's or Qwen3's config.json."""
        for what, there in (("mixtures of experts", spec.num_experts), ("latent attention", spec.kv_lora_rank),
                            ("sliding windows", spec.window_layers), ("MLPs without a gate", not spec.gated_mlp),
                            ("biases", spec.qkv_bias or spec.o_bias or spec.mlp_bias),
                            ("quantised weights", spec.mlp_bits != 8 * spec.dtype_bytes)):
            if there:
                raise ConfigError(f"model {spec.name}: {what} are simulated only; the engine runs dense "
                                  f"{' and '.join(MODEL_TYPES)}")
        if spec.qk_norm:
            return cls(spec, "qwen3", dtype, 1e-6, 1e6)
        return cls(spec, "llama", dtype, 1e-5, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))

    @classmethod
    def from_hf(cls, path: str | Path) -> Architecture:
        """Read a ``config.json``, or the folder that holds one; refuses by name what the engine does not compute."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        raw = read_object(path)
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(f"{path}: model_type = {model_type!r}: the engine runs {' and '.join(MODEL_TYPES)} (dense)")
        for name, allowed in (("attention_bias", False), ("mlp_bias", False), ("use_sliding_window", False),
                              ("hidden_act", "silu"), ("quantization_config", None)):
            value = raw.get(name)
            if value is not None and value != allowed:
                raise ConfigError(f"{path}: {name} = {value!r}: the engine supports {allowed!r} only")
        for name in ("head_dim", "num_key_value_heads"):
            if model_type == "qwen3" and raw.get(name) is None:  # its own defaults are 128 and 32, whatever the other sizes
                raise ConfigError(f"{path}: {name!r} is missing: a Qwen3's does not follow from its other sizes")
        dtype = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16").removeprefix("torch.")
        if dtype not in DTYPES:
            raise ConfigError(f"{path}: torch_dtype = {dtype!r}: the engine supports {', '.join(DTYPES)}")
        spec = read_config(path)
        if spec.head_dim % 2 or not 16 <= spec.head_dim <= MAX_HEAD_DIM:
            raise ConfigError(f"{path}: head_dim = {spec.head_dim}: must be even, 16 to {MAX_HEAD_DIM}")
        # transformers 5 writes rope_parameters; before, rope_theta stood alone and rope_scaling held the rest.
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ConfigError(f"{path}: rope_scaling = {rope!r}: must be an object")
        theta = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
        return cls(spec, model_type, DTYPES[dtype], _positive(path, "rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
                   _positive(path, "rope_theta", theta), _scaling(path, rope, spec.context_tokens))

    def rope_tables(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 ``(positions, D / 2)``."""
        half = self.spec.head_dim // 2
        inverse = 1.0 / self.rope_theta ** (torch.arange(half, dtype=torch.float32) / half)
        if self.scaling is not None:
            inverse = _scaled(inverse, self.scaling)
        angle = torch.arange(positions, dtype=torch.float32)[:, None] * inverse
        return angle.cos().to(device), angle.sin().to(device)


def _positive(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{path}: {name} = {value!r}: must be a positive number")
    return float(value)


def _scaling(path: Path, rope: dict[str, Any], context_tokens: int) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{path}: rope_type = {kind!r}: the engine supports default and llama3")
    factor, low, high = (_positive(path, name, rope.get(name)) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _positive(path, "original_max_position_embeddings", rope.get("original_max_position_embeddings", context_tokens))
    if high <= low:
        raise ConfigError(f"{path}: high_freq_factor = {high}: must exceed low_freq_factor = {low}")
    return Llama3Scaling(factor, low, high, int(original))


def _scaled(inverse: Tensor, scaling: Llama3Scaling) -> Tensor:
    # ``turns``: rotations of each frequency within the original context; few turns are stretched, many are kept.
    turns = scaling.original_tokens * inverse / (2 * math.pi)
    keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return inverse * (keep + (1.0 - keep) / scaling.factor)


# ---------------------------------------------------------------------------------------------- weights


@dataclass
class LayerWeights:
    """One layer; matrices are ``(out, in)``. ``qkv``: queries, keys, values; ``gate_up``: gates, then ups."""

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass
class Weights:
    """All of a model; ``head`` is ``embed`` where the embeddings are tied."""

    embed: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor


# ------------------------------------------------------------------------------------------- operations


class Ops:
    """A layer's operations on a lane of ``num_sms`` SMs: Triton kernels, or their torch references.

    ``gemm``: ``torch`` (cuBLAS; a green context bounds it) or ``triton`` (a bounded grid, for the software backend,
    where nothing else bounds an operation).
    """

    def __init__(self, kernels: str, gemm: str = "torch") -> None:
        for name, value in (("kernels", kernels), ("gemm", gemm)):
            if value not in ("triton", "torch"):
                raise ConfigError(f"{name} = {value!r}: must be triton or torch")
        self.kernels, self.gemm = kernels, gemm
        self.fused = kernels == "triton"
        from bullet.kernels import activation, decode_attention, norm, prefill_attention, rope

        self._activation, self._decode, self._norm = activation, decode_attention, norm
        self._prefill, self._rope = prefill_attention, rope

    def linear(self, x: Tensor, weight: Tensor, num_sms: int) -> Tensor:
        """``x @ weight.T``."""
        if self.gemm == "triton":
            from bullet.kernels.gemm import gemm

            return gemm(x, weight, num_sms=num_sms)
        return F.linear(x, weight)

    def norm(self, x: Tensor, weight: Tensor, eps: float, num_sms: int, residual: Tensor | None = None) -> Tensor:
        """RMSNorm of ``x``, or of ``residual += x``."""
        if self.fused:
            return self._norm.rms_norm(x, weight, eps, num_sms=num_sms, residual=residual)
        return self._norm.rms_norm_reference(x, weight, eps, residual=residual)

    def rope(self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, sin: Tensor, batch: Batch,
             w: LayerWeights, eps: float, num_sms: int) -> Tensor:
        """Keys and values into the cache; returns the queries."""
        args = (qkv, k_cache, v_cache, cos, sin, batch.positions, batch.slots)
        if self.fused:
            return self._rope.rope(*args, num_sms=num_sms, q_weight=w.q_norm, k_weight=w.k_norm, eps=eps)
        return self._rope.rope_reference(*args, q_weight=w.q_norm, k_weight=w.k_norm, eps=eps)

    def silu_mul(self, gate_up: Tensor, num_sms: int) -> Tensor:
        if self.fused:
            return self._activation.silu_mul(gate_up, num_sms=num_sms)
        return self._activation.silu_mul_reference(gate_up)

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, num_sms: int, split: Any) -> Tensor:
        """Chunks' rows by the prefill kernel, decodes' rows by the decode kernel."""
        chunks, decodes = batch.chunks, batch.decodes
        parts = []
        if chunks is not None:
            args = (q[:chunks.rows], k_cache, v_cache, chunks.tables, chunks.starts, chunks.lengths)
            parts.append(self._prefill.prefill_attention(*args, chunks.plan, num_sms=num_sms) if self.fused
                         else self._prefill.prefill_attention_reference(*args))
        if decodes is not None:
            first = chunks.rows if chunks is not None else 0
            args = (q[first:], k_cache, v_cache, decodes.tables, decodes.lengths)
            parts.append(self._decode.decode_attention(*args, num_sms=num_sms, plan_=split[0], workspace=split[1])
                         if self.fused else self._decode.decode_attention_reference(*args))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def split(self, decodes: Decodes | None, spec: ModelSpec, num_sms: int) -> Any:
        """Decode attention's plan and workspace, once for all layers of a launch."""
        if decodes is None or not self.fused:
            return None
        plan = self._decode.plan(decodes.lengths, spec.num_kv_heads, num_sms)
        return plan, self._decode.Workspace.make(plan.max_splits, spec.num_heads, spec.head_dim, decodes.lengths.device)

    def tiles(self, new: list[int], past: list[int], dtype: torch.dtype, head_dim: int, device: torch.device) -> Any:
        """Prefill attention's row tiles, once for a batch."""
        if not self.fused:
            return None
        rows, _ = self._prefill.tile_sizes(dtype, head_dim, max(new))
        return self._prefill.plan(new, past, rows, device)


# --------------------------------------------------------------------------------------------- forward


@dataclass
class Chunks:
    """Parts of prompts: ``rows`` of the batch, chunk ``b`` at ``starts[b] .. starts[b + 1]``; int32 on the device."""

    rows: int
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    plan: Any


@dataclass
class Decodes:
    """Sequences that gain a token: block tables ``(B, width)``, and lengths with the new token in them; int32."""

    tables: Tensor
    lengths: Tensor


@dataclass
class Batch:
    """Rows of one forward pass: token, position and KV slot of each (int64). ``last_rows``: whose next token is wanted
    (None: every row's)."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    chunks: Chunks | None
    decodes: Decodes | None
    last_rows: Tensor | None = None


class Model:
    """Weights with the operations to apply them; owns no sequence."""

    def __init__(self, arch: Architecture, weights: Weights, ops: Ops, max_positions: int, device: torch.device) -> None:
        self.arch, self.weights, self.ops = arch, weights, ops
        self.cos, self.sin = arch.rope_tables(max_positions, device)

    def embed(self, batch: Batch) -> Tensor:
        """The residual stream before the first layer."""
        return F.embedding(batch.tokens, self.weights.embed)

    def layers(self, batch: Batch, x: Tensor | None, residual: Tensor, kv: Tensor, first: int, last: int,
               num_sms: int, split: Any = None) -> tuple[Tensor, Tensor]:
        """Layers ``first .. last - 1``; ``residual`` is updated in place. ``split``: of :meth:`Ops.split`, made before."""
        split = self.ops.split(batch.decodes, self.arch.spec, num_sms) if split is None else split
        for index in range(first, last):
            x = self._layer(self.weights.layers[index], batch, x, residual, kv[index], num_sms, split)
        assert x is not None, f"no layer in {first}..{last}"
        return x, residual

    def _layer(self, w: LayerWeights, batch: Batch, x: Tensor | None, residual: Tensor, kv: Tensor, num_sms: int,
               split: Any) -> Tensor:
        ops, eps = self.ops, self.arch.rms_eps
        h = ops.norm(residual, w.input_norm, eps, num_sms) if x is None else ops.norm(x, w.input_norm, eps, num_sms, residual)
        q = ops.rope(ops.linear(h, w.qkv, num_sms), kv[0], kv[1], self.cos, self.sin, batch, w, eps, num_sms)
        attended = ops.attention(q, kv[0], kv[1], batch, num_sms, split)
        x = ops.linear(attended.flatten(1), w.o, num_sms)
        h = ops.norm(x, w.post_norm, eps, num_sms, residual)
        return ops.linear(ops.silu_mul(ops.linear(h, w.gate_up, num_sms), num_sms), w.down, num_sms)

    def logits(self, batch: Batch, x: Tensor, residual: Tensor, num_sms: int) -> Tensor:
        """``(wanted rows, vocabulary)`` after the last layer."""
        if batch.last_rows is not None:
            x, residual = x[batch.last_rows], residual[batch.last_rows]
        h = self.ops.norm(x, self.weights.norm, self.arch.rms_eps, num_sms, residual)
        return self.ops.linear(h, self.weights.head, num_sms)
