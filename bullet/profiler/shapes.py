"""Operations at their sizes: what a sweep times, by name, and what one repetition of each computes and moves."""

from __future__ import annotations

from typing import NamedTuple

from bullet import work
from bullet.catalog.models import ModelSpec
from bullet.errors import ProfileError
from bullet.profiles.rows import ENGINE_OPS, ENGINE_PHASES

GEMMS = ("gemm_qkv", "gemm_o", "gemm_gate_up", "gemm_down", "gemm_lm_head")
PAGED, OWN_PREFILL = "paged_decode_attention", "own_prefill_attention"
OWN_ROWWISE = ("own_norm", "own_rope", "own_act")
OWN_KERNELS = (PAGED, OWN_PREFILL, *OWN_ROWWISE, "own_gemm_gate_up", "own_copy")
"""The project's own Triton kernels, which bound their own grids; those of :data:`bullet.profiles.rows.ENGINE_OPS` are torch's."""
ENGINE_LAYERS = ("engine_prefill_layer", "engine_decode_layer")
"""A layer as the project's engine runs it: paged cache, fused kernels; ``prefill_layer``, ``decode_layer`` are torch's."""
TORCH_LAYERS = ("prefill_layer", "decode_layer")
CUDNN = "cudnn_prefill_attention"
"""SDPA by cuDNN, which torch may choose by itself on a Hopper card: a row of its own, and not of any fit."""
OPS = (*GEMMS, "prefill_attention", CUDNN, "decode_attention", "norm", "rope", "act", "copy", *TORCH_LAYERS,
       *OWN_KERNELS, *ENGINE_LAYERS)
_PHASE = {"prefill_attention": "prefill", CUDNN: "prefill",
          "prefill_layer": "prefill", "decode_attention": "decode", "decode_layer": "decode",
          ENGINE_PHASES[0]: "prefill", ENGINE_PHASES[1]: "prefill", ENGINE_PHASES[2]: "decode"}


class Shape(NamedTuple):
    """One operation at one size.

    ``tokens``: new tokens over the batch (rows of a GEMM). ``context_tokens``, per sequence: past tokens for prefill,
    tokens attended (the new one included) for decode; 0 for other operations.
    """

    op: str
    tokens: int
    batch: int = 1
    context_tokens: int = 0

    @property
    def phase(self) -> str:
        """prefill, decode, or either."""
        return _PHASE.get(ENGINE_OPS.get(self.op, self.op), "either")

    def __str__(self) -> str:
        return f"{self.op}:{self.tokens}x{self.batch}@{self.context_tokens}"


def prefill(op: str, new_tokens: int, past_tokens: int = 0, batch: int = 1) -> Shape:
    """A prefill shape of ``batch`` equal sequences."""
    return Shape(op, new_tokens * batch, batch, past_tokens)


def decode(op: str, batch: int, context_tokens: int) -> Shape:
    """A decode shape: one new token a sequence over ``context_tokens`` attended."""
    return Shape(op, batch, batch, context_tokens)


def kernels_of(model: ModelSpec, shape: Shape) -> list[work.KernelWork]:
    """The kernels that one repetition stands for (bullet.work)."""
    if shape.op in ENGINE_OPS:
        return kernels_of(model, shape._replace(op=ENGINE_OPS[shape.op]))
    new = shape.tokens // shape.batch
    pieces = [(new, shape.context_tokens)] * shape.batch
    if shape.op in ("prefill_attention", CUDNN):
        return [work.prefill_attention(model, pieces)]
    if shape.op == "decode_attention":
        return [work.decode_attention(model, shape.batch, shape.batch * shape.context_tokens)]
    if shape.op == "prefill_layer":
        return work.layer_kernels(model, pieces, 0, 0)
    if shape.op == "decode_layer":
        return work.layer_kernels(model, [], shape.batch, shape.batch * shape.context_tokens)
    if shape.op in ENGINE_PHASES:
        decodes = shape.batch if shape.phase == "decode" else 0
        layer = work.layer_kernels(model, [] if decodes else pieces, decodes, decodes * shape.context_tokens)
        return [*layer * model.num_layers, *work.head_kernels(model, shape.batch)]
    if shape.op == "gemm_lm_head":
        return [work.gemm("lm_head", shape.tokens, model.vocab_size, model.hidden_size, model.dtype_bytes)]
    if shape.op == "copy":
        return [work.KernelWork("copy", 0.0, 2.0 * model.dtype_bytes * shape.tokens * model.hidden_size, shape.tokens)]
    name = shape.op.removeprefix("gemm_")
    for kernel in work.dense_kernels(model, shape.tokens):
        if kernel.name == name:
            return [kernel]
    raise ProfileError(f"operation {shape.op!r}: choose one of {', '.join(OPS)}")


def flops_and_bytes(model: ModelSpec, shape: Shape) -> tuple[float, float]:
    """Operations and least bytes of one repetition."""
    kernels = kernels_of(model, shape)
    return sum(k.flops for k in kernels), sum(k.bytes for k in kernels)
