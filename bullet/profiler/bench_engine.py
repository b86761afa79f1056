"""The project's own operations for the sweep, beside the torch reference's: its Triton kernels, and its engine's layers.

A layer is one as the engine runs it (:class:`bullet.engine.model.Model`), fused where there is a GPU. Caches are paged, pages
in random order. Each is given its lane's SMs (``Workload.on``); kernels run on a GPU only. Not yet run on one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch

from bullet.catalog.models import ModelSpec
from bullet.config import KV_BLOCK_TOKENS
from bullet.engine.engine import Engine
from bullet.engine.model import Architecture, Batch, Chunks, Decodes, LayerWeights, Model, Ops, Weights
from bullet.engine.weights import random_weights
from bullet.errors import ProfileError
from bullet.profiler import torch_operations as reference
from bullet.profiler.shapes import ENGINE_LAYERS, OWN_KERNELS, OWN_PREFILL, PAGED
from bullet.profiles.rows import ENGINE_PHASES
from bullet.state import Chunk


def available(model: ModelSpec) -> bool:
    """Whether the engine can run such a layer here: dense, and triton installed (its wrappers need it on a CPU too)."""
    return model.num_experts == 0 and find_spec("triton") is not None


class EngineWorkloads(reference.Workloads):
    """The reference's workloads, the own kernels, the engine's layers, and on a CPU its whole steps."""

    @cached_property
    def residuals(self) -> dict[tuple[str, str], list[torch.Tensor]]:
        """(Layer, role) -> residual streams of the sets built last."""
        return {}

    @cached_property
    def steps(self) -> EngineSteps:
        """Whole steps; the engine is made when the first one is asked for."""
        return EngineSteps(self.model, self.dtype, self.device)

    def build(self, op: str, tokens: int, batch: int, context_tokens: int, role: str) -> reference.Workload:
        if op in ENGINE_PHASES:
            return self.steps.build(op, tokens, batch, context_tokens)
        if op == OWN_PREFILL:
            return self._own_prefill(op, tokens, batch, context_tokens, role)
        if op in OWN_KERNELS and op != PAGED:
            return self._own_rows(op, tokens, role)
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
        caches: Any = [self._paged_cache(role, i, batch, pages) for i in range(count)]
        model = self._model(role, count, pages * KV_BLOCK_TOKENS)
        rows = self._rows(model.ops, batch, new, past, pages, prefill)
        inputs = [self._random(tokens, m.hidden_size) for _ in range(count)]
        residuals = self.residuals[op, role] = [self._random(tokens, m.hidden_size) for _ in range(count)]

        def on(num_sms: int) -> reference.Workload:
            split = model.ops.split(rows.decodes, m, num_sms)  # once for all layers of a step, hence not a layer's time

            def run(i: int) -> torch.Tensor:
                # The residual stream is added to in place and grows with every repetition, by a layer's input and output: it ends
                # where bfloat16 no longer tells the sum, some hundred outputs high. A copy would be no kernel but a memcpy node.
                return model.layers(rows, inputs[i], residuals[i], caches, i, i + 1, num_sms, split)[0]

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

    def _paged_cache(self, role: str, index: int, batch: int, pages: int) -> tuple[torch.Tensor, ...]:
        """Keys and values ``(batch x pages, K, block, D)``."""
        shape = (batch * pages, self.model.num_kv_heads, KV_BLOCK_TOKENS, self.model.head_dim)
        return tuple(self._cache(name, role, index, batch, pages * KV_BLOCK_TOKENS).view(shape) for name in "kv")

    def _tables(self, batch: int, pages: int) -> torch.Tensor:
        """Block tables over one pool, in random order."""
        order = torch.randperm(batch * pages, device=self.device, generator=self._generator)
        return order.to(torch.int32).view(batch, pages)

    def _rows(self, ops: Ops, batch: int, new: int, past: int, pages: int, prefill: bool) -> Batch:
        device = self.device
        tables = self._tables(batch, pages)
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

    # ---- single kernels ------------------------------------------------------------------------------

    def _own_prefill(self, op: str, tokens: int, batch: int, context_tokens: int, role: str) -> reference.Workload:
        from bullet.kernels import prefill_attention as own

        if tokens % batch:
            raise ProfileError(f"{op}: {tokens} tokens in {batch} sequences: must divide evenly")
        m, new = self.model, tokens // batch
        pages = -(-(context_tokens + new) // KV_BLOCK_TOKENS)
        footprint = (2 * batch * pages * KV_BLOCK_TOKENS * m.num_kv_heads + 2 * tokens * m.num_heads) * (
            m.head_dim * self.dtype.itemsize)
        count = self._rotation(footprint)
        queries = [self._random(tokens, m.num_heads, m.head_dim) for _ in range(count)]
        caches = [self._paged_cache(role, i, batch, pages) for i in range(count)]
        tables = self._tables(batch, pages)
        # The plan is made once, as the engine makes it once for all layers of a step.
        plan = own.plan([new] * batch, [context_tokens] * batch, own.tile_sizes(self.dtype, m.head_dim, new)[0], self.device)
        starts = torch.arange(0, tokens + 1, new, dtype=torch.int32, device=self.device)
        lengths = torch.full((batch,), context_tokens + new, dtype=torch.int32, device=self.device)
        return self._bounded(op, count, footprint, lambda i, sms: own.prefill_attention(
            queries[i], *caches[i], tables, starts, lengths, plan, num_sms=sms))

    def _own_rows(self, op: str, tokens: int, role: str) -> reference.Workload:
        """Kernels over rows of tokens: norm with its residual, SiLU-mul, rotary with the cache write, GEMM, copy."""
        from bullet.kernels import activation, gemm, norm, rope
        from bullet.kernels import copy as copying

        m = self.model
        width = {"own_act": 2 * m.intermediate_size, "own_rope": m.qkv_size}.get(op, m.hidden_size)
        weights = m.hidden_size * 2 * m.intermediate_size if op == "own_gemm_gate_up" else 0
        footprint = (2 * tokens * width + weights) * self.dtype.itemsize
        count = self._rotation(footprint)
        x = [self._random(tokens, width) for _ in range(count)]
        run: Callable[[int, int], torch.Tensor]
        if op == "own_norm":
            # Added to in place: it grows with every repetition, which changes values, not times.
            residual, weight = [self._random(tokens, width) for _ in range(count)], self._random(width)

            def run(i: int, sms: int) -> torch.Tensor:
                return norm.rms_norm(x[i], weight, reference.RMS_EPS, num_sms=sms, residual=residual[i])
        elif op == "own_act":
            def run(i: int, sms: int) -> torch.Tensor:
                return activation.silu_mul(x[i], num_sms=sms)
        elif op == "own_gemm_gate_up":
            matrices = [self._weight("gate_up", role, i) for i in range(count)]

            def run(i: int, sms: int) -> torch.Tensor:
                return gemm.gemm(x[i], matrices[i], num_sms=sms)
        elif op == "own_copy":
            targets = [torch.empty_like(source) for source in x]

            def run(i: int, sms: int) -> torch.Tensor:
                return copying.copy(x[i], targets[i], num_sms=sms)
        else:
            pages = -(-tokens // KV_BLOCK_TOKENS)
            caches = [self._paged_cache(role, i, 1, pages) for i in range(count)]
            rows = self._rows(Ops("torch"), 1, tokens, 0, pages, False)
            cos, sin = Architecture.of(m, self.dtype).rope_tables(tokens, self.device)
            head = torch.ones(m.head_dim, dtype=self.dtype, device=self.device) if m.qk_norm else None

            def run(i: int, sms: int) -> torch.Tensor:
                return rope.rope(x[i], *caches[i], cos, sin, rows.positions, rows.slots, num_sms=sms, q_weight=head,
                                 k_weight=head)
        return self._bounded(op, count, footprint, run)

    def _bounded(self, op: str, count: int, footprint: int, run: Callable[[int, int], torch.Tensor]) -> reference.Workload:
        def on(num_sms: int) -> reference.Workload:
            return reference.Workload(op, lambda i: run(i, num_sms), count, footprint, takes_num_sms=True)
        return replace(on(1), on=on)


class EngineSteps:
    """Steps of an engine of its own, as the driver launches them: a batch is made, its layers run, tokens come back.

    A sequence is put back after each repetition, so that the next one takes the same step. Eager, hence for a CPU.
    """

    MAX_TOKENS, KV_TOKENS = 448, 32_768
    """As long as a step may be, and what all that are built hold together."""

    def __init__(self, model: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self.max_tokens = min(self.MAX_TOKENS, model.context_tokens)
        self._next_id = 0

    @cached_property
    def engine(self) -> Engine:
        """Random weights: they change values, not times."""
        arch = Architecture.of(self.model, self.dtype)
        return Engine(arch, random_weights(arch, 0, self.device), Ops("torch"), kv_blocks=self.KV_TOKENS // KV_BLOCK_TOKENS,
                      max_tokens=self.max_tokens, device=self.device)

    def fits(self, tokens: int, batch: int, context_tokens: int) -> bool:
        """Whether the longest sequence of such a step is one that the model takes."""
        return tokens // batch + context_tokens < self.max_tokens

    def build(self, op: str, tokens: int, batch: int, context_tokens: int) -> reference.Workload:
        """``engine_decode``: one token each, the new one among ``context_tokens``; else a prefill after ``context_tokens``."""
        engine, layers = self.engine, self.model.num_layers
        if tokens % batch or (op == ENGINE_PHASES[2] and (tokens != batch or context_tokens < 2)):
            raise ProfileError(f"{op}: {tokens} new tokens in {batch} sequences over {context_tokens}: must divide evenly, and a "
                               "decode is one each over 2 or more")
        new = tokens // batch
        past = context_tokens - 1 if op == ENGINE_PHASES[2] else context_tokens
        ids = [self._sequence(past + (new if op != ENGINE_PHASES[2] else 0), past) for _ in range(batch)]
        if op == ENGINE_PHASES[2]:
            known = len(engine.sequences[ids[0]].tokens)

            def run(i: int) -> Any:
                tokens_of = engine.decode(ids).finish()
                for request_id in ids:
                    engine.rewind(request_id, known, past)
                return tokens_of
        else:
            chunks, at_once = [Chunk(i, new, past) for i in ids], 1 if op == ENGINE_PHASES[1] else layers

            def run(i: int) -> Any:
                batch_ = engine.start_prefill(chunks)
                for _ in range(layers // at_once):
                    tokens_of = engine.run_layers(batch_, at_once).finish()
                for request_id in ids:
                    engine.rewind(request_id, past + new, past)
                return tokens_of
        return reference.Workload(op, run, 1, 0)

    def other_steps(self) -> None:
        """A small prefill and a small iteration, as lie between two steps of one kind in service. The same step again and
        again is 3 to 16 % faster on a CPU (measured in alternation): no step in service is."""
        for work in self._others:
            work.run(0)

    @cached_property
    def _others(self) -> list[reference.Workload]:
        return [self.build(ENGINE_PHASES[0], 16, 1, 0), self.build(ENGINE_PHASES[2], 4, 4, 16)]

    def _sequence(self, prompt: int, past: int) -> int:
        """A request of ``prompt`` tokens, ``past`` of them computed."""
        self._next_id += 1
        engine, vocabulary = self.engine, self.model.vocab_size
        engine.add(self._next_id, [i * 7 % vocabulary for i in range(prompt)])
        if past:
            engine.run_layers(engine.start_prefill([Chunk(self._next_id, past, 0)]), self.model.num_layers).finish()
        return self._next_id
