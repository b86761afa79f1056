"""The performance model that a scheduler asks: the published form (SRM), and an oracle for comparison.

==================  =======================================================================================
paper (section 3.2)  here
==================  =======================================================================================
flop_k, mem_k        ``KernelWork.flops``, ``.bytes`` of :mod:`bullet.work`
C_p = C_peak N_p/N   ``Srm._compute`` (operations/s on each split)
D_p                  ``Srm._bandwidth``: D_peak min(1, N_p / N_d), ``GpuSpec.knee_sms`` = N_d
T'_{k,p}  (eq. 1)    ``flops / min(flops / bytes * D_p, C_p)`` = ``max(flops / C_p, bytes / D_p)``
alpha_{p,ES} (eq. 2) ``Srm._alpha_prefill``, ``_alpha_alone``, ``_alpha_beside``: measured / T' at few samples
D_{p,sl}             ``Srm._attainable``: D_p x the share that decode attains beside an sl-token prefill
network, N_w         bytes / ``GpuSpec.link_bytes_per_s``; no N_w is known, so SMs do not change it (*assumed*)
==================  =======================================================================================

An estimator answers for all splits at once (arrays of length n + 1, see docs/interfaces.md) and learns online: per
phase and SM bucket a mean of log(measured / predicted). It never reads the simulated device's coefficients: it sees
samples, as it would from a GPU. ``Oracle`` is the exception, and is named so. See docs/estimator.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bullet import work
from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.errors import ProfileError
from bullet.estimators.base import Array, Sample
from bullet.estimators.recalibration import Recalibration
from bullet.state import DECODE, PREFILL, SplitTable

CACHE_ENTRIES = 8192
"""Rows kept by a cache before it starts anew: bounds memory, never changes a result."""
DENSE_BLOCK = 16
"""Token counts whose kernels are computed together."""
SEQS_BLOCK = 8
"""Likewise sizes of the decode batch."""
MIN_ALPHA = 0.5
"""Linear extrapolation far outside the samples may not turn alpha into nonsense: nothing beats peak twofold."""
MIN_SHARE = 0.05
"""Likewise the least share of its bandwidth that a co-running decode is taken to attain."""


# ---------------------------------------------------------------------------------------- published form


def _srm_seconds(kernels: Sequence[work.KernelWork], compute: Array, bandwidth: Array) -> Array:
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


def interpolate(x: float, nodes: Sequence[float], values: Sequence[Array]) -> Array:
    """Piecewise linear between nodes, extended linearly beyond; arrays over splits."""
    if len(nodes) == 1:
        return values[0]
    i, share = _between(x, nodes)
    return values[i] + share * (values[i + 1] - values[i])


def _between(x: float, nodes: Sequence[float]) -> tuple[int, float]:
    """The node before ``x``, and how far on it lies towards the next."""
    i = 0
    while i < len(nodes) - 2 and x > nodes[i + 1]:
        i += 1
    return i, (x - nodes[i]) / (nodes[i + 1] - nodes[i])


def along_sms(own: NDArray[np.int64], points: Mapping[int, float]) -> Array:
    """A value sampled at few SM counts, on each of ``own``: linear between, extended linearly beyond (Fig. 9)."""
    nodes = sorted(points)
    if len(nodes) == 1:
        return np.full(len(own), points[nodes[0]])
    x, y = np.array(nodes, dtype=np.float64), np.array([points[s] for s in nodes])
    i = np.clip(np.searchsorted(x, own, side="left") - 1, 0, len(nodes) - 2)
    values: Array = y[i] + (own - x[i]) / (x[i + 1] - x[i]) * (y[i + 1] - y[i])
    return values


def _mean_over(ratios: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Geometric mean of the ratios seen at each SM count."""
    return {sms: math.exp(sum(map(math.log, values)) / len(values)) for sms, values in ratios.items()}


_Ratios = defaultdict[int, list[float]]
"""SM count -> ratios measured there."""


def _by_sms() -> _Ratios:
    return defaultdict(list)


class _PrefillTerms(NamedTuple):
    """Operations and bytes of each kernel of a layer but attention, and of attention; all-reduces; LM head over splits; the
    node of alpha before the batch's tokens and how far on they lie (None: there is but one)."""

    kernels: list[tuple[float, float]]
    attention: tuple[float, float]
    network_s: float
    head_s: list[float]
    node: int
    share: float | None


class Srm:
    """Eq. 1 and 2 with contention, calibrated on samples. ``blind``: without contention, from samples taken alone.

    ``error`` multiplies every uncorrected prediction (studies of a wrong start).
    """

    def __init__(self, model: ModelSpec, gpu: GpuSpec, splits: SplitTable, samples: Sequence[Sample], *,
                 tensor_parallel: int = 1, blind: bool = False, recalibrate: bool = True, error: float = 1.0) -> None:
        self.name = "srm-blind" if blind else "srm"
        self.model = model
        self.tensor_parallel = tensor_parallel
        self.splits = splits
        self.blind = blind
        self.error = error
        self.recalibration = Recalibration(splits, enabled=recalibrate)
        self._prefill_correction, self._decode_correction = (self.recalibration.of[phase] for phase in (PREFILL, DECODE))
        #: Online recalibration (section 3.2.4).
        self.observe = self.recalibration.observe
        n = splits.num_sms
        self._own = {PREFILL: np.append(splits.prefill_sms, n), DECODE: np.append(splits.decode_sms, n)}
        self._compute = {phase: gpu.peak_flops * own / n for phase, own in self._own.items()}
        self._bandwidth = {phase: gpu.mem_bytes_per_s * np.minimum(1.0, own / gpu.knee_sms)
                           for phase, own in self._own.items()}
        self._gpu = gpu
        # Attention of whole prompts is linear in query-key pairs and in tokens, that of decodes in sequences and context.
        lone = work.prefill_attention(model, [(1, 0)], tensor_parallel)
        self._pair_flops, self._token_bytes = lone.flops, lone.bytes
        none, one = (work.decode_attention(model, 1, context, tensor_parallel).bytes for context in (0, 1))
        self._query_bytes, self._context_bytes = none, one - none
        self._head_line = _line(lambda seqs: work.head_kernels(model, seqs, tensor_parallel))
        self._dense_line: _Line | None = None  # None: the experts touched grow otherwise
        if not model.num_experts:
            self._dense_line = _line(lambda tokens: work.dense_kernels(model, tokens, tensor_parallel))
            self._dense_terms = list(zip(*(column.tolist() for column in self._dense_line), strict=True))
        self._prefill_rates = list(zip(self._compute[PREFILL].tolist(), self._bandwidth[PREFILL].tolist(), strict=True))
        self._dense_blocks: dict[int, Array] = {}
        self._head_rows: dict[int, Array] = {}
        self._prefill_rows: dict[tuple[int, ...], Array] = {}
        self._last_terms: tuple[tuple[int, ...], _PrefillTerms] = ((), _PrefillTerms([], (0.0, 0.0), 0.0, [], 0, None))
        self._prefill_cells: dict[tuple[int, ...], dict[int, float]] = {}
        self._alpha_rows: dict[tuple[int, bool], tuple[Array, Array, list[float], list[float]]] = {}
        self._decode_rows: dict[tuple[int, int], tuple[Array, Array, list[float], list[float]]] = {}
        self._decode_blocks: dict[int, tuple[Array, ...]] = {}  # by the first size of a block
        self._octaves: dict[int, int] = {}
        self._last_line: tuple[tuple[int, int], tuple[list[float], ...]] = ((0, 0), ())
        self._calibrate(samples)

    # ---- calibration -----------------------------------------------------------------------------

    def _calibrate(self, samples: Sequence[Sample]) -> None:
        for s in samples:
            if s.kind not in (PREFILL, DECODE) or not (s.seconds > 0 and math.isfinite(s.seconds)):
                raise ProfileError(f"sample {s}: kind must be prefill or decode, seconds must be positive")
        self._calibrate_prefill([s for s in samples if s.kind == PREFILL])
        decode = [s for s in samples if s.kind == DECODE]
        self._calibrate_decode([s for s in decode if not s.corun_sms])
        self._alpha_beside = self._alpha_alone
        self._share_nodes: list[float] = []
        self._attainable: list[Array] = []
        if not self.blind:
            self._calibrate_contention([s for s in decode if s.corun_sms])

    def _calibrate_prefill(self, samples: Sequence[Sample]) -> None:
        """alpha of prefill. Eq. 2 alone covers contention (section 3.2.3): a split is only ever in use beside decode, so
        its alpha comes from co-running samples where there are any; on all N it comes from samples taken alone.
        """
        alone: dict[int, _Ratios] = defaultdict(_by_sms)
        beside: dict[int, _Ratios] = defaultdict(_by_sms)
        for s in samples:
            ratio = s.seconds / self._theory_prefill((s.tokens,), s.sms)
            (beside if s.corun_sms else alone)[s.tokens][s.sms].append(ratio)
        if not alone:
            raise ProfileError("samples hold no prefill alone: alpha (eq. 2) needs it, and decode alone")
        self._prefill_nodes = [math.log2(tokens) for tokens in sorted(alone)]
        self._alpha_prefill: list[Array] = []
        for tokens in sorted(alone):
            alpha = along_sms(self._own[PREFILL], _mean_over(alone[tokens]))
            if beside[tokens] and not self.blind:
                alpha[:-1] = along_sms(self._own[PREFILL], _mean_over(beside[tokens]))[:-1]
            self._alpha_prefill.append(alpha)
        self._alpha_lists: list[list[float]] = [alpha.tolist() for alpha in self._alpha_prefill]

    def _calibrate_decode(self, samples: Sequence[Sample]) -> None:
        """alpha of decode alone, over batch (log2), mean context (linear) and SMs."""
        ratios: dict[tuple[int, int], _Ratios] = defaultdict(_by_sms)
        for s in samples:
            theory = self._theory_decode(s.tokens, s.context_tokens, s.sms, 1.0)
            ratios[s.tokens, round(s.context_tokens / s.tokens)][s.sms].append(s.seconds / theory)
        if not ratios:
            raise ProfileError("samples hold no decode alone: alpha (eq. 2) needs it, and prefill alone")
        batches, contexts = sorted({b for b, _ in ratios}), sorted({c for _, c in ratios})
        if len(ratios) != len(batches) * len(contexts):
            raise ProfileError("decode samples must cover every (batch, context) pair of their grid")
        self._batch_nodes = [math.log2(b) for b in batches]
        # Between the two outermost contexts alpha is taken as linear: one multiply-add a decision.
        self._context_nodes = (float(contexts[0]), float(contexts[-1]))
        self._alpha_alone = [[along_sms(self._own[DECODE], _mean_over(ratios[b, c])) for b in batches]
                             for c in (contexts[0], contexts[-1])]

    def _calibrate_contention(self, samples: Sequence[Sample]) -> None:
        """D_{p,sl} first, from the co-running samples that eq. 1 holds to be bound by memory; then, with it in eq. 1,
        what is left is alpha's: co-running decode loses compute speed too, which shows in large batches. Both are
        relative to alpha alone, so that a lone sample and a co-running one without contention agree.
        """
        if not samples:
            raise ProfileError("samples hold no decode beside a prefill: D_{p,sl} needs some (srm-blind does not)")
        bound = [s for s in samples if self._is_memory_bound(s)] or samples
        shares: dict[int, _Ratios] = defaultdict(_by_sms)
        for s in bound:
            shares[s.corun_tokens][s.sms].append(self._attained_share(s))
        self._share_nodes = [math.log2(tokens) for tokens in sorted(shares)]
        self._attainable = [np.clip(along_sms(self._own[DECODE], _mean_over(shares[tokens])), MIN_SHARE, 1.0)
                            for tokens in sorted(shares)]
        left: list[dict[int, _Ratios]] = [defaultdict(_by_sms), defaultdict(_by_sms)]
        for s in samples:
            i = self._index(DECODE, s.sms)
            share = float(self._attainable_share(s.corun_tokens)[i])
            theory = self._theory_decode(s.tokens, s.context_tokens, s.sms, share)
            alpha = float(self._alpha_of_decode(s.tokens, s.context_tokens)[i])
            long = s.context_tokens / s.tokens > sum(self._context_nodes) / 2
            left[long][s.tokens][s.sms].append(s.seconds / (alpha * theory))
        self._alpha_beside = [self._beside(row, found or left[0] or left[1])
                              for row, found in zip(self._alpha_alone, left, strict=True)]
        self._alpha_rows.clear()

    def _beside(self, alone: Sequence[Array], left: Mapping[int, _Ratios]) -> list[Array]:
        """alpha beside a prefill at the nodes of the batch axis: alone x what is left, held beyond its samples."""
        nodes = [math.log2(batch) for batch in sorted(left)]
        factors = [along_sms(self._own[DECODE], _mean_over(left[batch])) for batch in sorted(left)]
        for factor in factors:
            factor[-1] = 1.0  # alone on N
        return [alpha * interpolate(min(max(x, nodes[0]), nodes[-1]), nodes, factors)
                for x, alpha in zip(self._batch_nodes, alone, strict=True)]

    def _is_memory_bound(self, s: Sample) -> bool:
        """Whether eq. 1 gives every kernel of a layer of this decode the time of its bytes."""
        compute, bandwidth = self._at(s.sms)
        kernels = work.dense_kernels(self.model, s.tokens, self.tensor_parallel)
        return all(k.flops / compute <= k.bytes / bandwidth for k in kernels)

    def _attained_share(self, s: Sample) -> float:
        """D_{p,sl} / D_p: the bandwidth at which alpha x T' equals the co-running measurement; bisected."""
        measured_s = s.seconds / float(self._alpha_of_decode(s.tokens, s.context_tokens)[self._index(DECODE, s.sms)])
        compute, bandwidth = self._at(s.sms)
        layer = work.layer_kernels(self.model, (), s.tokens, s.context_tokens, self.tensor_parallel)
        head = work.head_kernels(self.model, s.tokens, self.tensor_parallel)
        layers = self.model.num_layers
        terms = [(layers * k.flops / compute, layers * k.bytes / bandwidth) for k in layer]
        terms += [(k.flops / compute, k.bytes / bandwidth) for k in head]
        measured_s -= layers * self._network_seconds(s.tokens)
        low, high = MIN_SHARE, 1.0
        if sum(max(c, m) for c, m in terms) >= measured_s:
            return 1.0
        for _ in range(30):
            middle = (low + high) / 2
            if sum(max(c, m / middle) for c, m in terms) > measured_s:
                low = middle
            else:
                high = middle
        return high

    def _index(self, phase: str, sms: int) -> int:
        return int(np.abs(self._own[phase] - sms).argmin())

    def _theory_prefill(self, prompt_tokens: tuple[int, ...], sms: int) -> float:
        compute, bandwidth = self._at(sms)
        return float(self._prefill_theory(prompt_tokens, np.array([compute]), np.array([bandwidth]))[0])

    def _theory_decode(self, num_seqs: int, context_tokens: int, sms: int, share: float) -> float:
        compute, bandwidth = self._at(sms)
        row, per_token = self._decode_theory((num_seqs,), np.array([compute]), np.array([bandwidth * share]))
        return float((row[0] + per_token * context_tokens)[0])

    def _at(self, sms: int) -> tuple[float, float]:
        """C_p and D_p on any number of SMs."""
        return (self._gpu.peak_flops * sms / self.splits.num_sms,
                self._gpu.mem_bytes_per_s * min(1.0, sms / self._gpu.knee_sms))

    def _network_seconds(self, tokens: int) -> float:
        """All-reduces of one layer at the link's peak."""
        return work.all_reduce_bytes(self.model, tokens, self.tensor_parallel) / self._gpu.link_bytes_per_s

    def _prefill_theory(self, prompt_tokens: tuple[int, ...], compute: Array, bandwidth: Array) -> Array:
        tp = self.tensor_parallel
        layer = work.layer_kernels(self.model, [(t, 0) for t in prompt_tokens], 0, 0, tp)
        layer_s = _srm_seconds(layer, compute, bandwidth) + self._network_seconds(sum(prompt_tokens))
        head = work.head_kernels(self.model, len(prompt_tokens), tp)
        return self.model.num_layers * layer_s + _srm_seconds(head, compute, bandwidth)

    def _decode_theory(self, seqs: Sequence[int], compute: Array, bandwidth: Array) -> tuple[Array, Array]:
        """Seconds without context, a row for each batch size, and seconds per context token: decode attention is bound by
        memory throughout.

        (Its operations per byte are at most heads / KV heads, below any GPU's ridge point.)
        """
        layers = self.model.num_layers
        dense_s, dense_bytes, queries, network_s, head_s, head_bytes = self._decode_terms(seqs, compute)
        rows = np.maximum(dense_s, dense_bytes / bandwidth).sum(axis=1)
        rows = rows + queries / bandwidth + network_s
        rows = layers * rows + np.maximum(head_s, head_bytes / bandwidth).sum(axis=1)
        return rows, layers * self._context_bytes / bandwidth

    def _decode_terms(self, seqs: Sequence[int], compute: Array) -> tuple[Array, ...]:
        """What of that no bandwidth changes: seconds of operations, and bytes, of a layer's kernels and of the LM head."""
        found = self._decode_blocks.get(seqs[0]) if compute is self._compute[DECODE] else None
        if found is None:
            flops, bytes_ = self._dense_work(seqs)
            head_flops, head_bytes = _along(self._head_line, seqs)
            network_s = np.array([self._network_seconds(n) for n in seqs])
            found = (flops[:, :, None] / compute, bytes_[:, :, None], self._query_bytes * np.array(seqs)[:, None],
                     network_s[:, None], head_flops[:, :, None] / compute, head_bytes[:, :, None])
            if compute is self._compute[DECODE]:
                self._decode_blocks[seqs[0]] = found
        return found

    # ---- predictions -----------------------------------------------------------------------------

    def prefill_seconds(self, prompt_tokens: tuple[int, ...], decode: tuple[int, int] | None) -> Array:
        """Eq. 1 and 2; contention leaves prefill alone (section 3.2.3), so ``decode`` is not used."""
        return self._prefill_row(prompt_tokens) * self.recalibration.over_splits(PREFILL)

    def prefill_at(self, prompt_tokens: tuple[int, ...], decode: tuple[int, int] | None, index: int) -> float:
        """One element of :meth:`prefill_seconds`, to the last bit."""
        return self.prefill_base_at(prompt_tokens, index) * self.prefill_correction(index)

    def prefill_line(self, prompt_tokens: tuple[int, ...], decode: tuple[int, int] | None) -> Callable[[int], float]:
        """The same for a few indices."""
        cells = self._prefill_cells.get(prompt_tokens)
        if cells is None:
            cells = self._cells_of(prompt_tokens)
        factor, bucket_of = self._prefill_correction.factor, self._prefill_correction.bucket_of

        def at(index: int) -> float:
            base = cells.get(index)
            if base is None:
                base = cells[index] = self._prefill_cell(prompt_tokens, index)
            return base * factor[bucket_of[index]]

        return at

    def prefill_base(self, prompt_tokens: int) -> Array:
        """One prompt, before online correction."""
        return self._prefill_row((prompt_tokens,))

    def prefill_base_at(self, prompt_tokens: tuple[int, ...], index: int) -> float:
        """A batch on one split, before online correction."""
        cells = self._cells_of(prompt_tokens)
        base = cells.get(index)
        if base is None:
            base = cells[index] = self._prefill_cell(prompt_tokens, index)
        return base

    def _cells_of(self, prompt_tokens: tuple[int, ...]) -> dict[int, float]:
        """Uncorrected seconds on the splits asked for so far."""
        cells = self._prefill_cells.get(prompt_tokens)
        if cells is None:
            if len(self._prefill_cells) >= CACHE_ENTRIES:
                self._prefill_cells.clear()
            cells = self._prefill_cells[prompt_tokens] = {}
        return cells

    def _prefill_row(self, prompt_tokens: tuple[int, ...]) -> Array:
        """Uncorrected seconds over all splits."""
        row = self._prefill_rows.get(prompt_tokens)
        if row is None:
            if len(self._prefill_rows) >= CACHE_ENTRIES:
                self._prefill_rows.clear()
            row = self._prefill_rows[prompt_tokens] = self._uncorrected_prefill(prompt_tokens)
            row.setflags(write=False)
        return row

    def _uncorrected_prefill(self, prompt_tokens: tuple[int, ...]) -> Array:
        total = sum(prompt_tokens)
        compute, bandwidth = self._compute[PREFILL], self._bandwidth[PREFILL]
        flops, bytes_ = self._attention_work(prompt_tokens, total)
        layer_s = np.maximum(flops / compute, bytes_ / bandwidth) + self._dense(total)
        theory = self.model.num_layers * layer_s + self._head_seconds(len(prompt_tokens))
        alpha = interpolate(math.log2(total), self._prefill_nodes, self._alpha_prefill)
        base: Array = theory * np.maximum(alpha, MIN_ALPHA) * self.error
        return base

    def _prefill_cell(self, prompt_tokens: tuple[int, ...], index: int) -> float:
        """One element of that, to the last bit. Most batches are asked for on a split or two, and numpy has its price."""
        if self._dense_line is None:
            return float(self._prefill_row(prompt_tokens)[index])
        kernels, (flops, bytes_), network_s, head_s, node, share = self._terms_of(prompt_tokens)
        compute, bandwidth = self._prefill_rates[index]
        dense_s = 0.0
        for kernel_flops, kernel_bytes in kernels:
            compute_s, memory_s = kernel_flops / compute, kernel_bytes / bandwidth
            dense_s += compute_s if compute_s > memory_s else memory_s
        layer_s = max(flops / compute, bytes_ / bandwidth) + (dense_s + network_s)
        theory = self.model.num_layers * layer_s + head_s[index]
        alpha = self._alpha_lists[node][index]
        if share is not None:
            alpha += share * (self._alpha_lists[node + 1][index] - alpha)
        base: float = theory * max(alpha, MIN_ALPHA) * self.error
        return base

    def _terms_of(self, prompt_tokens: tuple[int, ...]) -> _PrefillTerms:
        """What of a batch's eq. 1 and 2 no split changes; it is asked several times running."""
        if self._last_terms[0] != prompt_tokens:
            total, nodes = sum(prompt_tokens), self._prefill_nodes
            kernels = [(flops_1 + (total - 1) * more_flops, bytes_1 + (total - 1) * more_bytes)
                       for flops_1, more_flops, bytes_1, more_bytes in self._dense_terms]
            node, share = _between(math.log2(total), nodes) if len(nodes) > 1 else (0, None)
            terms = _PrefillTerms(kernels, self._attention_work(prompt_tokens, total), self._network_seconds(total),
                                  self._head_seconds(len(prompt_tokens)).tolist(), node, share)
            self._last_terms = (prompt_tokens, terms)
        return self._last_terms[1]

    def _attention_work(self, prompt_tokens: tuple[int, ...], total: int) -> tuple[float, float]:
        """Operations and bytes of attention over whole prompts: linear in query-key pairs and in tokens."""
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
        compute, bandwidth = self._compute[PREFILL], self._bandwidth[PREFILL]
        seconds: Array = np.maximum(flops[:, :, None] / compute, bytes_[:, :, None] / bandwidth).sum(axis=1)
        seconds += np.array([self._network_seconds(t) for t in tokens])[:, None]
        return seconds

    def _dense_work(self, tokens: Sequence[int]) -> tuple[Array, Array]:
        """Operations and bytes of a layer's kernels but attention; rows: token counts (0 as 1), columns: kernels."""
        if self._dense_line is None:
            return _counted([work.dense_kernels(self.model, max(t, 1), self.tensor_parallel) for t in tokens])
        return _along(self._dense_line, tokens)

    def _head_seconds(self, num_seqs: int) -> Array:
        """Eq. 1 of final norm and LM head over prefill's splits."""
        row = self._head_rows.get(num_seqs)
        if row is None:
            row = self._head_rows[num_seqs] = _srm_seconds(
                work.head_kernels(self.model, num_seqs, self.tensor_parallel), self._compute[PREFILL],
                self._bandwidth[PREFILL])
        return row

    def prefill_correction(self, index: int) -> float:
        """Online correction of prefill on one split."""
        own = self._prefill_correction
        return own.factor[own.bucket_of[index]]

    def _alpha_of_decode(self, num_seqs: int, context_tokens: int) -> Array:
        """alpha of decode alone, over splits."""
        first, slope, _, _ = self._alpha_row(num_seqs, False)
        return np.maximum(first + slope * (context_tokens / num_seqs), MIN_ALPHA)

    def _alpha_row(self, num_seqs: int, beside: bool) -> tuple[Array, Array, list[float], list[float]]:
        """alpha over splits at context 0 and its slope per token of mean context, as arrays and as lists."""
        row = self._alpha_rows.get((num_seqs, beside))
        if row is None:
            if len(self._alpha_rows) >= CACHE_ENTRIES:
                self._alpha_rows.clear()
            at = [interpolate(math.log2(num_seqs), self._batch_nodes, values)
                  for values in (self._alpha_beside if beside else self._alpha_alone)]
            low, high = self._context_nodes
            slope = (at[1] - at[0]) / (high - low) if high > low else np.zeros_like(at[0])
            first = at[0] - slope * low
            row = self._alpha_rows[num_seqs, beside] = (first, slope, first.tolist(), slope.tolist())
        return row

    def _attainable_share(self, prefill_tokens: float) -> Array:
        """D_{p,sl} / D_p on each split; alone on N there is no co-runner."""
        if self.blind or prefill_tokens <= 0:
            return np.ones(self.splits.full + 1)
        share = interpolate(math.log2(prefill_tokens), self._share_nodes, self._attainable)
        share = np.clip(share, MIN_SHARE, 1.0)
        share[-1] = 1.0
        return share

    def decode_seconds(self, num_seqs: int, context_tokens: int, prefill_tokens: int) -> Array:
        """One iteration on each split: eq. 1 with D_{p,sl} in it, then alpha."""
        row, per_token, _, _ = self._decode_row(num_seqs, prefill_tokens)
        first, slope, _, _ = self._alpha_row(num_seqs, prefill_tokens > 0)
        alpha = np.maximum(first + slope * (context_tokens / num_seqs), MIN_ALPHA)
        seconds: Array = (row + per_token * context_tokens) * alpha * self.recalibration.over_splits(DECODE)
        return seconds

    def decode_at(self, num_seqs: int, context_tokens: int, prefill_tokens: int, index: int) -> float:
        """One element of :meth:`decode_seconds`, to the last bit."""
        return self.decode_line(num_seqs, context_tokens, prefill_tokens)(index)

    def decode_line(self, num_seqs: int, context_tokens: int, prefill_tokens: int) -> Callable[[int], float]:
        """The same for a few indices."""
        key, lists = self._last_line
        if key != (num_seqs, prefill_tokens):  # the context alone changes from one iteration to the next
            _, _, row, per_token = self._decode_row(num_seqs, prefill_tokens)
            _, _, first, slope = self._alpha_row(num_seqs, prefill_tokens > 0)
            lists = row, per_token, first, slope
            self._last_line = (num_seqs, prefill_tokens), lists
        row, per_token, first, slope = lists
        factor, bucket_of = self._decode_correction.factor, self._decode_correction.bucket_of
        mean_tokens = context_tokens / num_seqs

        def at(index: int) -> float:
            alpha = first[index] + slope[index] * mean_tokens
            if alpha < MIN_ALPHA:
                alpha = MIN_ALPHA
            return (row[index] + per_token[index] * context_tokens) * alpha * factor[bucket_of[index]]

        return at

    def _decode_row(self, num_seqs: int, prefill_tokens: int) -> tuple[Array, Array, list[float], list[float]]:
        """Seconds without context and per context token, alpha and correction left out; as arrays and as lists."""
        # D_{p,sl} is read at quarter octaves of sl: finer than it is sampled, and few enough to keep.
        octave = -1
        if prefill_tokens > 0 and not self.blind:
            octave = self._octaves.get(prefill_tokens, -1)
            if octave < 0:
                if len(self._octaves) >= CACHE_ENTRIES:
                    self._octaves.clear()
                octave = self._octaves[prefill_tokens] = round(4 * math.log2(prefill_tokens))
        rows = self._decode_rows.get((num_seqs, octave))
        if rows is None:
            if len(self._decode_rows) >= CACHE_ENTRIES:
                self._decode_rows.clear()
            bandwidth = self._bandwidth[DECODE] * self._attainable_share(2.0 ** (octave / 4) if octave >= 0 else 0.0)
            # Neighbouring batch sizes together, as they follow one another: numpy's calls cost as much for one.
            first = max(1, num_seqs - num_seqs % SEQS_BLOCK)
            seqs = range(first, num_seqs - num_seqs % SEQS_BLOCK + SEQS_BLOCK)
            block, per_token = self._decode_theory(seqs, self._compute[DECODE], bandwidth)
            block, per_token = block * self.error, per_token * self.error
            tokens_list = per_token.tolist()
            for n, row in zip(seqs, block, strict=True):
                self._decode_rows[n, octave] = (row, per_token, row.tolist(), tokens_list)
            rows = self._decode_rows[num_seqs, octave]
        return rows

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
        return float(self._compute[PREFILL][index] / self._bandwidth[PREFILL][index])
