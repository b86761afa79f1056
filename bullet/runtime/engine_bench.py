"""The engine's own layers for the sweep: paged cache, fused kernels where there is a GPU, beside the torch reference's.

One layer as the engine runs it (:class:`bullet.runtime.model.Model`), over pages in random order. A layer is given its
lane's SMs (``Workload.on``). Not yet run on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from bullet.config import KV_BLOCK_TOKENS, ModelSpec
from bullet.errors import ProfileError
from bullet.kernels import reference
from bullet.runtime.model import Architecture, Batch, Chunks, Decodes, LayerWeights, Model, Ops, Weights
from bullet.runtime.plan import ENGINE_LAYERS


def available(model: ModelSpec) -> bool:
    """Whether the engine can run such a layer here: dense, and triton installed (its wrappers need it on a CPU too)."""
    return model.num_experts == 0 and find_spec("triton") is not None


class EngineWorkloads(reference.Workloads):
    """The reference's workloads, and the engine's layers."""

    def build(self, op: str, tokens: int, batch: int, context_tokens: int, role: str) -> reference.Workload:
        if op not in ENGINE_LAYERS:
            return super().build(op, tokens, batch, context_tokens, role)
        new, prefill = tokens // batch, op == ENGINE_LAYERS[0]
        past = context_tokens if prefill else context_tokens - 1
        if tokens % batch or past < 0 or (not prefill and new != 1):
            raise ProfileError(f"{op}: {tokens} new tokens in {batch} sequences over {context_tokens}: must divide evenly, and a "
                               "decode is one each over 1 or more")
        m, total = self.model, past + new
        pages = -(-total // KV_BLOCK_TOKENS)
        width = self.dtype.itemsize
        footprint = (sum(w.numel() for w in vars(self._layer_weights(role, 0)).values() if w is not None)
                     + 2 * batch * m.num_kv_heads * pages * KV_BLOCK_TOKENS * m.head_dim + 2 * tokens * m.hidden_size) * width
        count = self._rotation(footprint)
        shape = (batch * pages, m.num_kv_heads, KV_BLOCK_TOKENS, m.head_dim)
        caches: Any = [tuple(self._cache(name, role, i, batch, pages * KV_BLOCK_TOKENS).view(shape) for name in "kv")
                  for i in range(count)]
        model = self._model(role, count, pages * KV_BLOCK_TOKENS)
        rows = self._rows(model.ops, batch, new, past, pages, prefill)
        inputs, residuals = ([self._random(tokens, m.hidden_size) for _ in range(count)] for _ in range(2))

        def on(num_sms: int) -> reference.Workload:
            def run(i: int) -> torch.Tensor:
                # From a copy: the residual stream is added to in place, and would grow with every repetition.
                return model.layers(rows, inputs[i], residuals[i].clone(), caches, i, i + 1, num_sms)[0]

            return reference.Workload(op, run, count, footprint)
        return replace(on(1), on=on)

    def _model(self, role: str, count: int, positions: int) -> Model:
        arch = Architecture.of(self.model, self.dtype)
        ones = torch.ones(self.model.head_dim, dtype=self.dtype, device=self.device) if self.model.qk_norm else None
        layers = []
        for i in range(count):
            w = self._layer_weights(role, i)
            layers.append(LayerWeights(w.norm, w.qkv, w.o, w.norm, w.gate_up, w.down, ones, ones))
        norm = layers[0].input_norm
        weights = Weights(norm, layers, norm, norm)  # embedding and head are not run
        return Model(arch, weights, Ops("triton" if self.device.type == "cuda" else "torch"), positions, self.device)

    def _rows(self, ops: Ops, batch: int, new: int, past: int, pages: int, prefill: bool) -> Batch:
        device = self.device
        tables = torch.randperm(batch * pages, device=device, generator=self._generator).to(torch.int32).view(batch, pages)
        positions = torch.arange(past, past + new, device=device).repeat(batch)
        sequences = torch.arange(batch, device=device).repeat_interleave(new)
        slots = tables[sequences, positions // KV_BLOCK_TOKENS].to(torch.int64) * KV_BLOCK_TOKENS + positions % KV_BLOCK_TOKENS
        lengths = torch.full((batch,), past + new, dtype=torch.int32, device=device)
        nothing = torch.zeros_like(positions)
        if not prefill:
            return Batch(nothing, positions, slots, None, Decodes(tables, lengths))
        starts = torch.arange(0, batch * new + 1, new, dtype=torch.int32, device=device)
        plan: Any = ops.tiles([new] * batch, [past] * batch, self.dtype, self.model.head_dim, device)
        return Batch(nothing, positions, slots, Chunks(batch * new, tables, starts, lengths, plan), None)
