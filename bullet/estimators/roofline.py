"""Eq. 1 (section 3.2): what the kernels of a batch take on each split by operations and bytes alone.

Operations and bytes come from :mod:`bullet.work`. Without experts a kernel's grow linearly with tokens, attention's with
query-key pairs, tokens, sequences and context: what a model's kernels do is counted once, here, and then multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from bullet import work
from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.estimators.base import Array
from bullet.state import DECODE, PREFILL, SplitTable

CACHE_ENTRIES = 8192
"""Rows kept by a cache before it starts anew: bounds memory, never changes a result."""
DENSE_BLOCK = 16
"""Token counts whose kernels are computed together."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class Cache(dict[Key, Value]):
    """A dictionary that starts anew when it is full."""

    __slots__ = ()

    def keep(self, key: Key, value: Value) -> Value:
        """Store a value and return it."""
        self.make_room()
        self[key] = value
        return value

    def make_room(self) -> None:
        """Called before values that belong together are stored."""
        if len(self) >= CACHE_ENTRIES:
            self.clear()


def srm_seconds(kernels: Sequence[work.KernelWork], compute: Array, bandwidth: Array) -> Array:
    """Eq. 1 summed over kernels."""
    flops, bytes_ = (np.array(column)[:, None] for column in zip(*((k.flops, k.bytes) for k in kernels), strict=True))
    total: Array = np.maximum(flops / compute, bytes_ / bandwidth).sum(axis=0)
    return total


_Line = tuple[Array, Array, Array, Array]
"""Operations of each kernel at one token, and more of them with every token; bytes likewise."""


def _counted(rows: Sequence[Sequence[work.KernelWork]]) -> tuple[Array, Array]:
    """Operations and bytes; rows: token counts, columns: kernels."""
    return np.array([[k.flops for k in row] for row in rows]), np.array([[k.bytes for k in row] for row in rows])


def _line(kernels: Callable[[int], Sequence[work.KernelWork]]) -> _Line:
    """Without experts every kernel but attention grows by the same with every token."""
    flops, bytes_ = _counted([kernels(1), kernels(2)])
    return flops[0], flops[1] - flops[0], bytes_[0], bytes_[1] - bytes_[0]


def _along(line: _Line, tokens: Sequence[int]) -> tuple[Array, Array]:
    """As :func:`_counted` (0 tokens as 1)."""
    flops_1, more_flops, bytes_1, more_bytes = line
    more = np.maximum(np.array(tokens, dtype=np.float64) - 1, 0)[:, None]
    return flops_1 + more * more_flops, bytes_1 + more * more_bytes


class _PrefillTerms(NamedTuple):
    """What of a batch's eq. 1 no split changes: operations and bytes of each kernel of a layer but attention, and of
    attention; all-reduces; LM head over splits."""

    kernels: list[tuple[float, float]]
    attention: tuple[float, float]
    network_s: float
    head_s: list[float]


class Roofline:
    """C_p, D_p and eq. 1 of one model on one device. ``own``: SMs of a phase on each split, all of them last."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec, splits: SplitTable, tensor_parallel: int) -> None:
        self.model, self.tensor_parallel = model, tensor_parallel
        self._gpu, self._num_sms = gpu, splits.num_sms
        self._speed = work.gemm_speed(model, gpu)
        #: Whether some layers read a window alone: context tokens then go through :func:`bullet.work.decoded_context`.
        self.windowed = model.window_layers > 0
        n = splits.num_sms
        self.own = {PREFILL: np.append(splits.prefill_sms, n), DECODE: np.append(splits.decode_sms, n)}
        self.compute = {phase: gpu.peak_flops * own / n for phase, own in self.own.items()}
        self.bandwidth = {phase: gpu.mem_bytes_per_s * np.minimum(1.0, own / gpu.knee_sms) for phase, own in self.own.items()}
        self._prefill_rates = list(zip(self.compute[PREFILL].tolist(), self.bandwidth[PREFILL].tolist(), strict=True))
        # Attention of whole prompts is linear in query-key pairs and in tokens, that of decodes in sequences and context.
        lone = work.prefill_attention(model, [(1, 0)], tensor_parallel)
        self._pair_flops, self._token_bytes = lone.flops, lone.bytes
        none, one = (work.decode_attention(model, 1, context, tensor_parallel).bytes for context in (0, 1))
        self._query_bytes, self._context_bytes = none, one - none
        self._head_line = _line(lambda seqs: work.head_kernels(model, seqs, tensor_parallel))
        self._dense_line: _Line | None = None
        if not model.num_experts:
            self._dense_line = _line(lambda tokens: work.dense_kernels(model, tokens, tensor_parallel, self._speed))
            self._dense_terms = list(zip(*(column.tolist() for column in self._dense_line), strict=True))
        self._dense_blocks: dict[int, Array] = {}
        self._head_rows: dict[int, Array] = {}
        self._decode_blocks: dict[int, tuple[Array, ...]] = {}  # by the first size of a block
        self._last_terms: tuple[tuple[int, ...], _PrefillTerms] = ((), _PrefillTerms([], (0.0, 0.0), 0.0, []))

    @property
    def linear(self) -> bool:
        """Whether kernels grow linearly with tokens: no experts, of which more are touched, do."""
        return self._dense_line is not None

    # ---- on any number of SMs ----------------------------------------------------------------------

    def at(self, sms: int) -> tuple[float, float]:
        """C_p and D_p."""
        return self._gpu.peak_flops * sms / self._num_sms, self._gpu.mem_bytes_per_s * min(1.0, sms / self._gpu.knee_sms)

    def prefill_seconds(self, prompt_tokens: tuple[int, ...], sms: int) -> float:
        """T' of a whole prefill, kernel by kernel."""
        compute, bandwidth = (np.array([rate]) for rate in self.at(sms))
        layer = work.layer_kernels(self.model, [(t, 0) for t in prompt_tokens], 0, 0, self.tensor_parallel, self._speed)
        layer_s = srm_seconds(layer, compute, bandwidth) + self._network_seconds(sum(prompt_tokens))
        head = work.head_kernels(self.model, len(prompt_tokens), self.tensor_parallel)
        return float((self.model.num_layers * layer_s + srm_seconds(head, compute, bandwidth))[0])

    def decode_seconds(self, num_seqs: int, context_tokens: int, sms: int, share: float = 1.0) -> float:
        """T' of a decode iteration that attains a share of D_p."""
        compute, bandwidth = self.at(sms)
        row, per_token = self.decode_rows((num_seqs,), np.array([bandwidth * share]), np.array([compute]))
        return float((row[0] + per_token * work.decoded_context(self.model, num_seqs, context_tokens))[0])

    def is_memory_bound(self, num_seqs: int, sms: int) -> bool:
        """Whether every kernel of a layer of this decode takes the time of its bytes."""
        compute, bandwidth = self.at(sms)
        kernels = work.dense_kernels(self.model, num_seqs, self.tensor_parallel, self._speed)
        return all(k.flops / compute <= k.bytes / bandwidth for k in kernels)

    def attained_share(self, num_seqs: int, context_tokens: int, sms: int, seconds: float, least: float) -> float:
        """The share of D_p, ``least`` to 1, at which T' of a decode iteration equals ``seconds``; bisected."""
        compute, bandwidth = self.at(sms)
        layer = work.layer_kernels(self.model, (), num_seqs, context_tokens, self.tensor_parallel, self._speed)
        head = work.head_kernels(self.model, num_seqs, self.tensor_parallel)
        layers = self.model.num_layers
        terms = [(layers * k.flops / compute, layers * k.bytes / bandwidth) for k in layer]
        terms += [(k.flops / compute, k.bytes / bandwidth) for k in head]
        seconds -= layers * self._network_seconds(num_seqs)
        low, high = least, 1.0
        if sum(max(c, m) for c, m in terms) >= seconds:
            return 1.0
        for _ in range(30):
            middle = (low + high) / 2
            if sum(max(c, m / middle) for c, m in terms) > seconds:
                low = middle
            else:
                high = middle
        return high

    def _network_seconds(self, tokens: int) -> float:
        """All-reduces of one layer at the link's peak."""
        return work.all_reduce_bytes(self.model, tokens, self.tensor_parallel) / self._gpu.link_bytes_per_s

    # ---- over splits: decode -----------------------------------------------------------------------

    def decode_rows(self, seqs: Sequence[int], bandwidth: Array, compute: Array | None = None) -> tuple[Array, Array]:
        """Seconds without context, a row for each batch size, and seconds per context token: decode attention is bound by
        memory throughout. ``compute``: C_p on other SMs than the splits'.

        (Its operations per byte are at most heads / KV heads, below any GPU's ridge point.)
        """
        layers = self.model.num_layers
        terms = self._decode_blocks.get(seqs[0]) if compute is None else self._decode_terms(seqs, compute)
        if terms is None:
            terms = self._decode_blocks[seqs[0]] = self._decode_terms(seqs, self.compute[DECODE])
        dense_s, dense_bytes, queries, network_s, head_s, head_bytes = terms
        rows = np.maximum(dense_s, dense_bytes / bandwidth).sum(axis=1)
        rows = rows + queries / bandwidth + network_s
        rows = layers * rows + np.maximum(head_s, head_bytes / bandwidth).sum(axis=1)
        return rows, layers * self._context_bytes / bandwidth

    def _decode_terms(self, seqs: Sequence[int], compute: Array) -> tuple[Array, ...]:
        """What of that no bandwidth changes: seconds of operations, and bytes, of a layer's kernels and of the LM head."""
        flops, bytes_ = self._dense_work(seqs)
        head_flops, head_bytes = _along(self._head_line, seqs)
        network_s = np.array([self._network_seconds(n) for n in seqs])
        return (flops[:, :, None] / compute, bytes_[:, :, None], self._query_bytes * np.array(seqs)[:, None],
                network_s[:, None], head_flops[:, :, None] / compute, head_bytes[:, :, None])

    # ---- over splits: prefill ----------------------------------------------------------------------

    def prefill_row(self, prompt_tokens: tuple[int, ...]) -> Array:
        """T' of a whole prefill on each split."""
        total = sum(prompt_tokens)
        flops, bytes_ = self._attention_work(prompt_tokens, total)
        layer_s = np.maximum(flops / self.compute[PREFILL], bytes_ / self.bandwidth[PREFILL]) + self._dense(total)
        theory: Array = self.model.num_layers * layer_s + self._head_seconds(len(prompt_tokens))
        return theory

    def prefill_cell(self, prompt_tokens: tuple[int, ...], index: int) -> float:
        """One element of that, to the last bit, where kernels are ``linear``: numpy has its price."""
        kernels, (flops, bytes_), network_s, head_s = self._terms_of(prompt_tokens)
        compute, bandwidth = self._prefill_rates[index]
        dense_s = 0.0
        for kernel_flops, kernel_bytes in kernels:
            compute_s, memory_s = kernel_flops / compute, kernel_bytes / bandwidth
            dense_s += compute_s if compute_s > memory_s else memory_s
        layer_s = max(flops / compute, bytes_ / bandwidth) + (dense_s + network_s)
        theory: float = self.model.num_layers * layer_s + head_s[index]
        return theory

    def prefill_intensity(self, prompt_tokens: tuple[int, ...]) -> float:
        """A layer's operations per byte."""
        if self._dense_line is None:
            total = sum(prompt_tokens)
            flops, bytes_ = self._attention_work(prompt_tokens, total)
            dense_flops, dense_bytes = self._dense_work((total,))
            return (float(dense_flops.sum()) + flops) / (float(dense_bytes.sum()) + bytes_)
        terms = self._terms_of(prompt_tokens)
        flops, bytes_ = terms.attention
        for kernel_flops, kernel_bytes in terms.kernels:
            flops += kernel_flops
            bytes_ += kernel_bytes
        return flops / bytes_

    def ridge(self, index: int) -> float:
        """C_p / D_p."""
        return float(self.compute[PREFILL][index] / self.bandwidth[PREFILL][index])

    def _terms_of(self, prompt_tokens: tuple[int, ...]) -> _PrefillTerms:
        """A batch is asked several times running."""
        if self._last_terms[0] != prompt_tokens:
            total = sum(prompt_tokens)
            kernels = [(flops_1 + (total - 1) * more_flops, bytes_1 + (total - 1) * more_bytes)
                       for flops_1, more_flops, bytes_1, more_bytes in self._dense_terms]
            self._last_terms = (prompt_tokens, _PrefillTerms(
                kernels, self._attention_work(prompt_tokens, total), self._network_seconds(total),
                self._head_seconds(len(prompt_tokens)).tolist()))
        return self._last_terms[1]

    def _attention_work(self, prompt_tokens: tuple[int, ...], total: int) -> tuple[float, float]:
        """Operations and bytes of attention over whole prompts: linear in query-key pairs and in tokens."""
        if self.windowed:
            return self._pair_flops * work.attended(self.model, [(t, 0) for t in prompt_tokens])[0], self._token_bytes * total
        return (self._pair_flops * sum(work.attended_pairs(t, 0) for t in prompt_tokens), self._token_bytes * total)

    def _dense(self, tokens: int) -> Array:
        """A layer's kernels but attention, with its all-reduces: eq. 1 over splits.

        They depend on the tokens alone, so neighbouring counts are computed together: nine kernels cost as much for one.
        """
        block = self._dense_blocks.get(tokens // DENSE_BLOCK)
        if block is None:
            if len(self._dense_blocks) >= CACHE_ENTRIES // DENSE_BLOCK:
                self._dense_blocks.clear()
            first = tokens - tokens % DENSE_BLOCK
            block = self._dense_blocks[tokens // DENSE_BLOCK] = self._dense_block(range(first, first + DENSE_BLOCK))
        row: Array = block[tokens % DENSE_BLOCK]
        return row

    def _dense_block(self, tokens: Sequence[int]) -> Array:
        flops, bytes_ = self._dense_work(tokens)
        compute, bandwidth = self.compute[PREFILL], self.bandwidth[PREFILL]
        seconds: Array = np.maximum(flops[:, :, None] / compute, bytes_[:, :, None] / bandwidth).sum(axis=1)
        seconds += np.array([self._network_seconds(t) for t in tokens])[:, None]
        return seconds

    def _dense_work(self, tokens: Sequence[int]) -> tuple[Array, Array]:
        """Operations and bytes of a layer's kernels but attention; rows: token counts (0 as 1), columns: kernels."""
        if self._dense_line is None:
            return _counted([work.dense_kernels(self.model, max(t, 1), self.tensor_parallel, self._speed) for t in tokens])
        return _along(self._dense_line, tokens)

    def _head_seconds(self, num_seqs: int) -> Array:
        """Eq. 1 of final norm and LM head over prefill's splits."""
        row = self._head_rows.get(num_seqs)
        if row is None:
            row = self._head_rows[num_seqs] = srm_seconds(
                work.head_kernels(self.model, num_seqs, self.tensor_parallel), self.compute[PREFILL], self.bandwidth[PREFILL])
        return row
