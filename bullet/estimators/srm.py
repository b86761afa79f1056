"""The performance model that a scheduler asks, in its published form (SRM): eq. 1, alpha of eq. 2 and contention.

==================  =======================================================================================
paper (section 3.2)  here
==================  =======================================================================================
flop_k, mem_k        ``KernelWork.flops``, ``.bytes`` of :mod:`bullet.work`
C_p = C_peak N_p/N   ``Roofline.compute`` (operations/s on each split)
D_p                  ``Roofline.bandwidth``: D_peak min(1, N_p / N_d), ``GpuSpec.knee_sms`` = N_d
T'_{k,p}  (eq. 1)    ``flops / min(flops / bytes * D_p, C_p)`` = ``max(flops / C_p, bytes / D_p)``: roofline.py
alpha_{p,ES} (eq. 2) ``Srm._alpha_prefill``, ``_alpha_alone``, ``_alpha_beside``: measured / T' at few samples
D_{p,sl}             ``Srm._attainable``: D_p x the share that decode attains beside an sl-token prefill
network, N_w         bytes / ``GpuSpec.link_bytes_per_s``; no N_w is known, so SMs do not change it (*assumed*)
==================  =======================================================================================

An estimator answers for all splits at once (arrays of length n + 1, see docs/interfaces.md) and learns online: per
phase and SM bucket a mean of log(measured / predicted). It never reads the simulated device's coefficients: it sees
samples, as it would from a GPU. ``Oracle`` (oracle.py) is the exception, and is named so. See docs/estimator.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.errors import ProfileError
from bullet.estimators.base import Array, Sample
from bullet.estimators.recalibration import Recalibration
from bullet.estimators.roofline import Cache, Roofline
from bullet.piecewise import linear
from bullet.state import DECODE, PREFILL, SplitTable
from bullet.work import decoded_context

SEQS_BLOCK = 8
"""Sizes of the decode batch whose rows are computed together."""
MIN_ALPHA = 0.5
"""Linear extrapolation far outside the samples may not turn alpha into nonsense: nothing beats peak twofold."""
MIN_SHARE = 0.05
"""Likewise the least share of its bandwidth that a co-running decode is taken to attain."""


def along_sms(own: NDArray[np.int64], points: Mapping[int, float]) -> Array:
    """A value sampled at few SM counts, on each of ``own``: linear between, extended linearly beyond (Fig. 9)."""
    nodes = sorted(points)
    return np.array([linear(sms, nodes, [points[node] for node in nodes]) for sms in own.tolist()])


def _mean_over(ratios: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Geometric mean of the ratios seen at each SM count."""
    return {sms: math.exp(sum(map(math.log, values)) / len(values)) for sms, values in ratios.items()}


_Ratios = defaultdict[int, list[float]]
"""SM count -> ratios measured there."""


def _by_sms() -> _Ratios:
    return defaultdict(list)


_Row = tuple[Array, Array, list[float], list[float]]
"""A constant over splits and a slope, as arrays and as lists."""


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
        self.roofline = roofline = Roofline(model, gpu, splits, tensor_parallel)
        self.prefill_intensity, self.ridge = roofline.prefill_intensity, roofline.ridge
        self._prefill_rows: Cache[tuple[int, ...], Array] = Cache()
        self._prefill_cells: Cache[tuple[int, ...], dict[int, float]] = Cache()
        self._alpha_rows: Cache[tuple[int, bool], _Row] = Cache()
        self._decode_rows: Cache[tuple[int, int], _Row] = Cache()
        self._octaves: Cache[int, int] = Cache()
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
            ratio = s.seconds / self.roofline.prefill_seconds((s.tokens,), s.sms)
            (beside if s.corun_sms else alone)[s.tokens][s.sms].append(ratio)
        if not alone:
            raise ProfileError("samples hold no prefill alone: alpha (eq. 2) needs it, and decode alone")
        self._prefill_nodes = [math.log2(tokens) for tokens in sorted(alone)]
        self._alpha_prefill: list[Array] = []
        for tokens in sorted(alone):
            alpha = along_sms(self.roofline.own[PREFILL], _mean_over(alone[tokens]))
            if beside[tokens] and not self.blind:
                alpha[:-1] = along_sms(self.roofline.own[PREFILL], _mean_over(beside[tokens]))[:-1]
            self._alpha_prefill.append(alpha)
        #: The same by split, then node.
        self._alpha_of_split = list(zip(*(alpha.tolist() for alpha in self._alpha_prefill), strict=True))

    def _calibrate_decode(self, samples: Sequence[Sample]) -> None:
        """alpha of decode alone, over batch (log2), mean context (linear) and SMs."""
        ratios: dict[tuple[int, int], _Ratios] = defaultdict(_by_sms)
        for s in samples:
            theory = self.roofline.decode_seconds(s.tokens, s.context_tokens, s.sms)
            ratios[s.tokens, round(s.context_tokens / s.tokens)][s.sms].append(s.seconds / theory)
        if not ratios:
            raise ProfileError("samples hold no decode alone: alpha (eq. 2) needs it, and prefill alone")
        batches, contexts = sorted({b for b, _ in ratios}), sorted({c for _, c in ratios})
        if len(ratios) != len(batches) * len(contexts):
            raise ProfileError("decode samples must cover every (batch, context) pair of their grid")
        self._batch_nodes = [math.log2(b) for b in batches]
        # Between the two outermost contexts alpha is taken as linear: one multiply-add a decision.
        self._context_nodes = (float(contexts[0]), float(contexts[-1]))
        self._alpha_alone = [[along_sms(self.roofline.own[DECODE], _mean_over(ratios[b, c])) for b in batches]
                             for c in (contexts[0], contexts[-1])]

    def _calibrate_contention(self, samples: Sequence[Sample]) -> None:
        """D_{p,sl} first, from the co-running samples that eq. 1 holds to be bound by memory; then, with it in eq. 1,
        what is left is alpha's: co-running decode loses compute speed too, which shows in large batches. Both are
        relative to alpha alone, so that a lone sample and a co-running one without contention agree.
        """
        if not samples:
            raise ProfileError("samples hold no decode beside a prefill: D_{p,sl} needs some (srm-blind does not)")
        bound = [s for s in samples if self.roofline.is_memory_bound(s.tokens, s.sms)] or samples
        shares: dict[int, _Ratios] = defaultdict(_by_sms)
        for s in bound:
            shares[s.corun_tokens][s.sms].append(self._attained_share(s))
        self._share_nodes = [math.log2(tokens) for tokens in sorted(shares)]
        self._attainable = [np.clip(along_sms(self.roofline.own[DECODE], _mean_over(shares[tokens])), MIN_SHARE, 1.0)
                            for tokens in sorted(shares)]
        left: list[dict[int, _Ratios]] = [defaultdict(_by_sms), defaultdict(_by_sms)]
        for s in samples:
            i = self._index(DECODE, s.sms)
            share = float(self.attainable_share(s.corun_tokens)[i])
            theory = self.roofline.decode_seconds(s.tokens, s.context_tokens, s.sms, share)
            alpha = float(self._alpha_of_decode(s.tokens, s.context_tokens)[i])
            long = s.context_tokens / s.tokens > sum(self._context_nodes) / 2
            left[long][s.tokens][s.sms].append(s.seconds / (alpha * theory))
        self._alpha_beside = [self._beside(row, found or left[0] or left[1])
                              for row, found in zip(self._alpha_alone, left, strict=True)]
        self._alpha_rows.clear()

    def _beside(self, alone: Sequence[Array], left: Mapping[int, _Ratios]) -> list[Array]:
        """alpha beside a prefill at the nodes of the batch axis: alone x what is left, held beyond its samples."""
        nodes = [math.log2(batch) for batch in sorted(left)]
        factors = [along_sms(self.roofline.own[DECODE], _mean_over(left[batch])) for batch in sorted(left)]
        for factor in factors:
            factor[-1] = 1.0  # alone on N
        return [alpha * linear(min(max(x, nodes[0]), nodes[-1]), nodes, factors)
                for x, alpha in zip(self._batch_nodes, alone, strict=True)]

    def _attained_share(self, s: Sample) -> float:
        """D_{p,sl} / D_p: the bandwidth at which alpha x T' equals the co-running measurement."""
        alpha = float(self._alpha_of_decode(s.tokens, s.context_tokens)[self._index(DECODE, s.sms)])
        return self.roofline.attained_share(s.tokens, s.context_tokens, s.sms, s.seconds / alpha, MIN_SHARE)

    def _index(self, phase: str, sms: int) -> int:
        return int(np.abs(self.roofline.own[phase] - sms).argmin())

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

    def prefill_correction(self, index: int) -> float:
        """Online correction of prefill on one split."""
        own = self._prefill_correction
        return own.factor[own.bucket_of[index]]

    def _cells_of(self, prompt_tokens: tuple[int, ...]) -> dict[int, float]:
        """Uncorrected seconds on the splits asked for so far."""
        cells = self._prefill_cells.get(prompt_tokens)
        return self._prefill_cells.keep(prompt_tokens, {}) if cells is None else cells

    def _prefill_row(self, prompt_tokens: tuple[int, ...]) -> Array:
        """Uncorrected seconds over all splits."""
        row = self._prefill_rows.get(prompt_tokens)
        if row is None:
            row = self._prefill_rows.keep(prompt_tokens, self._uncorrected_prefill(prompt_tokens))
            row.setflags(write=False)
        return row

    def _uncorrected_prefill(self, prompt_tokens: tuple[int, ...]) -> Array:
        alpha = linear(math.log2(sum(prompt_tokens)), self._prefill_nodes, self._alpha_prefill)
        base: Array = self.roofline.prefill_row(prompt_tokens) * np.maximum(alpha, MIN_ALPHA) * self.error
        return base

    def _prefill_cell(self, prompt_tokens: tuple[int, ...], index: int) -> float:
        """One element of that, to the last bit. Most batches are asked for on a split or two, and numpy has its price."""
        if not self.roofline.linear:
            return float(self._prefill_row(prompt_tokens)[index])
        alpha = linear(math.log2(sum(prompt_tokens)), self._prefill_nodes, self._alpha_of_split[index])
        base: float = self.roofline.prefill_cell(prompt_tokens, index) * max(alpha, MIN_ALPHA) * self.error
        return base

    def _alpha_of_decode(self, num_seqs: int, context_tokens: int) -> Array:
        """alpha of decode alone, over splits."""
        first, slope, _, _ = self._alpha_row(num_seqs, False)
        return np.maximum(first + slope * (context_tokens / num_seqs), MIN_ALPHA)

    def _alpha_row(self, num_seqs: int, beside: bool) -> _Row:
        """alpha over splits at context 0 and its slope per token of mean context, as arrays and as lists."""
        row = self._alpha_rows.get((num_seqs, beside))
        if row is None:
            at = [linear(math.log2(num_seqs), self._batch_nodes, values)
                  for values in (self._alpha_beside if beside else self._alpha_alone)]
            low, high = self._context_nodes
            slope = (at[1] - at[0]) / (high - low) if high > low else np.zeros_like(at[0])
            first = at[0] - slope * low
            row = self._alpha_rows.keep((num_seqs, beside), (first, slope, first.tolist(), slope.tolist()))
        return row

    def attainable_share(self, prefill_tokens: float) -> Array:
        """D_{p,sl} / D_p on each split; alone on N there is no co-runner."""
        if self.blind or prefill_tokens <= 0:
            return np.ones(self.splits.full + 1)
        share = linear(math.log2(prefill_tokens), self._share_nodes, self._attainable)
        share = np.clip(share, MIN_SHARE, 1.0)
        share[-1] = 1.0
        return share

    def decode_seconds(self, num_seqs: int, context_tokens: int, prefill_tokens: int) -> Array:
        """One iteration on each split: eq. 1 with D_{p,sl} in it, then alpha."""
        row, per_token, _, _ = self._decode_row(num_seqs, prefill_tokens)
        first, slope, _, _ = self._alpha_row(num_seqs, prefill_tokens > 0)
        alpha = np.maximum(first + slope * (context_tokens / num_seqs), MIN_ALPHA)
        read = decoded_context(self.model, num_seqs, context_tokens)
        seconds: Array = (row + per_token * read) * alpha * self.recalibration.over_splits(DECODE)
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
        read: float = context_tokens
        if self.roofline.windowed:
            read = decoded_context(self.model, num_seqs, context_tokens)

        def at(index: int) -> float:
            alpha = first[index] + slope[index] * mean_tokens
            if alpha < MIN_ALPHA:
                alpha = MIN_ALPHA
            return (row[index] + per_token[index] * read) * alpha * factor[bucket_of[index]]

        return at

    def _decode_row(self, num_seqs: int, prefill_tokens: int) -> _Row:
        """Seconds without context and per context token, alpha and correction left out; as arrays and as lists."""
        # D_{p,sl} is read at quarter octaves of sl: finer than it is sampled, and few enough to keep.
        octave = -1
        if prefill_tokens > 0 and not self.blind:
            octave = self._octaves.get(prefill_tokens, -1)
            if octave < 0:
                octave = self._octaves.keep(prefill_tokens, round(4 * math.log2(prefill_tokens)))
        rows = self._decode_rows.get((num_seqs, octave))
        if rows is None:
            self._decode_rows.make_room()
            bandwidth = self.roofline.bandwidth[DECODE] * self.attainable_share(2.0 ** (octave / 4) if octave >= 0 else 0.0)
            # Neighbouring batch sizes together, as they follow one another: numpy's calls cost as much for one.
            first = max(1, num_seqs - num_seqs % SEQS_BLOCK)
            seqs = range(first, num_seqs - num_seqs % SEQS_BLOCK + SEQS_BLOCK)
            block, per_token = self.roofline.decode_rows(seqs, bandwidth)
            block, per_token = block * self.error, per_token * self.error
            tokens_list = per_token.tolist()
            for n, row in zip(seqs, block, strict=True):
                self._decode_rows[n, octave] = (row, per_token, row.tolist(), tokens_list)
            rows = self._decode_rows[num_seqs, octave]
        return rows
