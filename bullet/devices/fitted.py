"""The simulated device: how long a step really takes (the *rich form*), alone and beside another.

    kernel seconds = max(ceil(q / p) * c / rate(busy),  m / bandwidth(p) * s) + overhead

``q`` thread blocks on ``p`` SMs take ``ceil(q / p)`` waves of ``c`` seconds each, so waves stretch the compute term
only; a GEMM takes the tile that computes fastest on these SMs. ``rate(busy)`` is the per-SM speed against all busy SMs of the
chip: with few busy there is power to spare and clocks are higher. ``bandwidth(p)`` saturates softly. ``s >= 1`` is what
contention for memory costs:

    u = a lane's solo bytes / solo seconds;   g = its max-min share of the device's bandwidth, g <= u
    s = u / (g (1 - loss * g_other / D_peak - l2_loss * a_other)),   a = SM time that a lane's GEMMs fill, of all SMs'

computed once per change of co-runner from solo values. Coefficients come from a fit (profiles/<gpu>/<model>/fit.json)
or from the data sheet, and say which; see docs/model.md.

A scheduler never sees this module's coefficients, except the estimator named ``oracle``.

Longer than 500 lines: one device, and all its questions are answered from the same rows, curves and last answers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet import work as work_model
from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.devices.base import Device
from bullet.devices.coefficients import DeviceCoefficients, lent
from bullet.devices.terms import Attention, Blocks, Curve, FittedWork, Row, Term, Tiles, compute_seconds, step_seconds_all
from bullet.errors import ConfigError
from bullet.state import SplitTable


def reduced_over(gpu: GpuSpec, tensor_parallel: int) -> tuple[float, str]:
    """Bytes a second, one way, of the slowest link that an all-reduce of the group crosses, and a word for the device's label
    where that is not the GPUs' own link: past a node it is the host's."""
    if tensor_parallel > gpu.gpus_per_node:
        speed = min(gpu.link_bytes_per_s, gpu.host_link_bytes_per_s)
        return speed, f"; all-reduce past a node of {gpu.gpus_per_node}: over the host link of {speed / 1e9:g} GB/s"
    speed = gpu.link_bytes_per_s
    if tensor_parallel > 1 and (not gpu.link or gpu.link.upper().startswith("PCIE")):
        return speed, f"; all-reduce over {gpu.link or 'PCIe'}, {speed / 1e9:g} GB/s"
    return speed, ""


class DeviceModel(Device):
    """A device of fitted coefficients. ``cache=False`` recomputes everything; results are the same to the last bit (a test)."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec, coefficients: DeviceCoefficients, *, tensor_parallel: int = 1,
                 contention_scale: float = 1.0, shared_prefill_share: float | None = None, cache: bool = True) -> None:
        if tensor_parallel > 1 and (model.num_heads % tensor_parallel or model.intermediate_size % tensor_parallel):
            raise ConfigError(f"device.tensor_parallel = {tensor_parallel}: must divide {model.name}'s "
                              f"{model.num_heads} heads and {model.intermediate_size} intermediate size")
        if model.num_kv_heads % tensor_parallel and tensor_parallel % model.num_kv_heads:
            raise ConfigError(f"device.tensor_parallel = {tensor_parallel}: must divide {model.name}'s {model.num_kv_heads} KV "
                              "heads, or be a multiple of them")
        super().__init__(model, gpu, tensor_parallel)
        self.coefficients = c = coefficients
        n = self.num_sms
        told = c.shared_prefill_share if shared_prefill_share is None else shared_prefill_share
        self.shared_prefill_share = 0.5 if told is None else told
        losses = (c.contention_loss if loss is None else loss for loss in (c.prefill_contention_loss, c.decode_contention_loss))
        #: Of prefill and of decode: what the other's share of the bandwidth costs it, and what the other's GEMMs do.
        self.losses = tuple(loss * contention_scale for loss in losses)
        self.l2_losses = tuple((loss or 0.0) * contention_scale for loss in (c.prefill_l2_loss, c.decode_l2_loss))
        self._by_gemms = self.l2_losses != (0.0, 0.0)
        self.cache = cache
        #: Seconds of one operation on one SM with every SM busy, at efficiency 1.
        self._op_s = n / gpu.peak_flops
        self._peak_bytes_per_s = gpu.mem_bytes_per_s * c.peak_bandwidth
        self._prefill_byte_loss, self._decode_byte_loss = (loss / self._peak_bytes_per_s for loss in self.losses)
        busy = np.arange(n + 1)
        rate = np.minimum(c.rate_cap, 1 + c.rate_slope * (1 - busy / n))
        self._rate: list[float] = rate.tolist()
        self._inverse_bandwidth: list[float] = [float("inf")] + [1 / self.bandwidth_share(float(p)) for p in busy[1:]]
        empty, one = (work_model.decode_attention(model, 1, tokens, tensor_parallel) for tokens in (0, 1))
        self._query_bytes = empty.bytes
        self._context_bytes = one.bytes - empty.bytes
        # Both attentions are linear in a few counts: take the slopes from work.py and build no kernel objects per step.
        new, chunk = (work_model.prefill_attention(model, [(1, past)], tensor_parallel) for past in (0, 1))
        self._pair_flops = new.flops
        self._past_flops = chunk.flops - 2 * new.flops  # of a cached token, whatever attends to it: latents widened anew
        self._chunk_context_bytes = chunk.bytes - new.bytes
        self._chunk_new_bytes = new.bytes - self._chunk_context_bytes
        self._chunk_heads = new.blocks
        self._decode_bytes_per_s = gpu.mem_bytes_per_s * c.decode_attention_bandwidth
        self._decode_fixed_s = c.decode_attention_overhead_s
        self._decode_seq_s = c.decode_attention_seq_s
        #: Seconds of one context token's operations on one SM; 0: heads share keys so little that bytes always bind (GQA).
        self._context_op_s = 0.0
        if model.kv_lora_rank:
            self._context_op_s = (one.flops - empty.flops) * self._op_s / c.prefill_attention_efficiency
        self.asks_within = self._windowed = model.window_layers > 0
        self._speed = work_model.gemm_speed(model, gpu)
        self._host_gap_s = c.host_gap_s
        self.has_host_time = c.host_gap_s > 0
        self._num_layers = model.num_layers
        self._link_bytes_per_s, self._link_said = reduced_over(gpu, tensor_parallel)
        self._inverse_effective: dict[float, float] = {}
        self._last_corun: tuple[FittedWork | None, FittedWork | None, int, int, tuple[float, float]] = (
            None, None, 0, 0, (0.0, 0.0))
        self._decode_lines: dict[tuple[int, int], tuple[float, float, float, float, float, float]] = {}
        self._gemm_byte_s = 1 / (gpu.mem_bytes_per_s * c.gemm_bandwidth)
        #: All tiles' rows are multiples of it.
        self._tile_rows = math.gcd(*(rows for rows, _, _ in c.gemm_tiles))
        self._tilings_of: dict[tuple[int, int, int, float], Tiles] = {}
        self._tiles_of: dict[tuple[int, float], list[tuple[int, int, float]]] = {}
        self._head_lines = self._lines(lambda seqs: work_model.head_kernels(model, seqs, tensor_parallel))
        self._dense_lines: list[tuple[float, ...]] = []
        if not model.num_experts:
            self._dense_lines = self._lines(lambda tokens: work_model.dense_kernels(model, tokens, tensor_parallel, self._speed))
        self._dense: dict[int, Row] = {}
        self._heads: dict[int, Row] = {}

    @property
    def source(self) -> str:
        """Where seconds are from; what a fitted profile holds of another GPU is named."""
        others = lent(self.coefficients.notes.get("assumed", ()))
        if self.tensor_parallel == 1:
            others.pop("all_reduce", None)
        said = "".join(f"; {', '.join(what for what, of in others.items() if of == who)}: {who}"
                       for who in dict.fromkeys(others.values()))
        return self.coefficients.source + said + self._link_said

    # ---- building work ---------------------------------------------------------------------------

    def prefill_work(self, pieces: Sequence[tuple[int, int]], layers: int, *, logits_seqs: int) -> FittedWork:
        return self._work(pieces, 0, 0, layers, logits_seqs)

    def decode_work(self, num_seqs: int, context_tokens: int, within_tokens: int | None = None) -> FittedWork:
        # As _work((), num_seqs, context_tokens, num_layers, num_seqs), written out: it runs at every iteration.
        dense, head = self._dense.get(num_seqs), self._heads.get(num_seqs)
        if dense is None:
            dense = self._dense_row(num_seqs)
        if head is None:
            head = self._head_row(num_seqs)
        layers = self._num_layers
        context: float = context_tokens
        if self._windowed:
            context = work_model.decoded_context(self.model, num_seqs, context_tokens, within_tokens)
        moved = self._query_bytes * num_seqs + self._context_bytes * context
        block_s = self._decode_seq_s
        if self._context_op_s:
            block_s += self._context_op_s * context / (self.num_sms * num_seqs)
        return FittedWork(
            layers, dense, head, ((block_s, self.num_sms * num_seqs, moved / self._decode_bytes_per_s),),
            self._decode_fixed_s, self._host_gap_s, layers * (dense.bytes + moved) + head.bytes)

    def hybrid_work(self, pieces: Sequence[tuple[int, int]], num_seqs: int, context_tokens: int, *,
                    logits_seqs: int, layers: int | None = None, within_tokens: int | None = None) -> FittedWork:
        return self._work(pieces, num_seqs, context_tokens, layers or self._num_layers, logits_seqs, within_tokens)

    def _work(self, pieces: Sequence[tuple[int, int]], num_seqs: int, context_tokens: int, layers: int,
              logits_seqs: int, within_tokens: int | None = None) -> FittedWork:
        if not pieces and layers == self._num_layers and logits_seqs == num_seqs:
            return self.decode_work(num_seqs, context_tokens, within_tokens)
        attention: tuple[Attention, ...] = ()
        tokens, fixed_s, bytes_ = num_seqs, 0.0, 0.0
        if pieces:
            c = self.coefficients
            pairs, context, tiles, prompts = 0.0, 0.0, 0, 0
            for new, past in pieces:
                prompts += new
                context += new + past
                pairs += new * (past + (new + 1) / 2)
                tiles += -(-new // work_model.ATTENTION_TILE_ROWS)
            tokens += prompts
            cached = context - prompts
            if self._windowed:
                pairs, context = work_model.attended(self.model, pieces)
            bytes_ = self._chunk_new_bytes * prompts + self._chunk_context_bytes * context
            blocks = tiles * self._chunk_heads
            padded = self._pair_flops * (pairs + c.prefill_attention_extra_keys * prompts) + self._past_flops * cached
            block_s = padded / blocks * self._op_s / c.prefill_attention_efficiency
            attention = ((block_s, blocks, bytes_ / self._peak_bytes_per_s),)
            fixed_s = c.prefill_attention_overhead_s
        if num_seqs:
            read: float = context_tokens
            if self._windowed:
                read = work_model.decoded_context(self.model, num_seqs, context_tokens, within_tokens)
            moved = self._query_bytes * num_seqs + self._context_bytes * read
            # Split-KV cuts a sequence into as many blocks as fill the device: N a sequence, so waves do not show.
            block_s = self._decode_seq_s + self._context_op_s * read / (self.num_sms * num_seqs)
            attention = (*attention, (block_s, self.num_sms * num_seqs, moved / self._decode_bytes_per_s))
            fixed_s += self._decode_fixed_s
            bytes_ += moved
        dense = self._dense.get(tokens) or self._dense_row(tokens)
        bytes_ = layers * (dense.bytes + bytes_)
        head = None
        if logits_seqs:
            head = self._heads.get(logits_seqs) or self._head_row(logits_seqs)
            bytes_ += head.bytes
        return FittedWork(layers, dense, head, attention, fixed_s, self._host_gap_s * (layers / self._num_layers), bytes_)

    def _dense_row(self, tokens: int) -> Row:
        c, tp = self.coefficients, self.tensor_parallel
        extra_s = 0.0
        if tp > 1:
            sent = work_model.all_reduce_bytes(self.model, tokens, tp)
            extra_s = sent / (self._link_bytes_per_s * c.link_efficiency) + 2 * c.all_reduce_overhead_s
        if self.model.num_experts:
            row = self._row(work_model.dense_kernels(self.model, tokens, tp, self._speed), extra_s)
        else:
            row = self._row_along(self._dense_lines, tokens, extra_s)
        # The embedding runs once a step; a layer carries its share, so that a prefill cut by layers adds up.
        once = work_model.embedding_bytes(self.model, tokens)
        row.row_s += once / (self.gpu.mem_bytes_per_s * c.rowwise_bandwidth["embedding"]) / self.model.num_layers
        row.fixed_s += c.rowwise_overhead_s / self.model.num_layers
        row.bytes += once / self.model.num_layers
        if self.cache:
            self._dense[tokens] = row
        return row

    def _head_row(self, seqs: int) -> Row:
        row = self._row_along(self._head_lines, seqs, 0.0)
        if self.cache:
            self._heads[seqs] = row
        return row

    def _row(self, kernels: Sequence[work_model.KernelWork], extra_s: float) -> Row:
        c = self.coefficients
        gemms: list[Term] = []
        row_s, fixed_s, bytes_ = 0.0, extra_s, 0.0
        for kernel in kernels:
            bytes_ += kernel.bytes
            if kernel.k:
                gemms.append(self.gemm_term(kernel))
                fixed_s += c.gemm_overhead_s * kernel.share
            else:
                row_s += kernel.bytes / (self.gpu.mem_bytes_per_s * c.rowwise_bandwidth[kernel.name])
                fixed_s += c.rowwise_overhead_s * kernel.share
        return Row(tuple(gemms), row_s, fixed_s, bytes_)

    def kernel_seconds(self, kernels: Sequence[work_model.KernelWork]) -> float:
        """Dense kernels one after the other, alone on the whole device."""
        n = self.num_sms
        return self._row(kernels, 0.0).whole_seconds(self._inverse_bandwidth[n])

    def dense_seconds(self, tokens: int) -> float:
        """All layers' kernels but attention, embedding and all-reduces included, alone on the whole device."""
        n = self.num_sms
        return self._num_layers * self._dense_row(tokens).whole_seconds(self._inverse_bandwidth[n])

    def head_seconds(self, seqs: int) -> float:
        """Final norm and LM head, alone on the whole device."""
        n = self.num_sms
        return self._head_row(seqs).whole_seconds(self._inverse_bandwidth[n])

    def attention_seconds(self, pieces: Sequence[tuple[int, int]], num_seqs: int, context_tokens: int) -> float:
        """All layers' attention, alone on the whole device."""
        work = self._work(pieces, num_seqs, context_tokens, self._num_layers, 0)
        return (self.solo_seconds(work, self.num_sms) - work.fixed_s
                - self.dense_seconds(num_seqs + sum(new for new, _ in pieces)))

    def _lines(self, kernels: Callable[[int], Sequence[work_model.KernelWork]]) -> list[tuple[float, ...]]:
        """Each kernel's bytes/s (0: a GEMM), bytes at one token and more with every token, columns, inner size and speed: without
        experts all grow evenly, and need not be described anew for every count."""
        c = self.coefficients
        return [(0.0 if one.k else self.gpu.mem_bytes_per_s * c.rowwise_bandwidth[one.name], one.bytes, two.bytes - one.bytes,
                 one.columns, one.k, one.speed) for one, two in zip(kernels(1), kernels(2), strict=True)]

    def _row_along(self, lines: Sequence[tuple[Any, ...]], count: int, extra_s: float) -> Row:
        """:meth:`_row` of those kernels for ``count`` tokens, or sequences."""
        c = self.coefficients
        gemms: list[Term] = []
        row_s, fixed_s, bytes_ = 0.0, extra_s, 0.0
        more, filled = count - 1, -(-count // self._tile_rows)
        for per_s, bytes_1, more_bytes, columns, k, speed in lines:
            moved = bytes_1 + more * more_bytes
            bytes_ += moved
            if k:
                tiles = self._tilings_of.get((columns, k, filled, speed)) or self._tilings(count, columns, k, 1.0, speed)
                gemms.append((tiles, moved * self._gemm_byte_s))
                fixed_s += c.gemm_overhead_s
            else:
                row_s += moved / per_s
                fixed_s += c.rowwise_overhead_s
        return Row(tuple(gemms), row_s, fixed_s, bytes_)

    def gemm_term(self, kernel: work_model.KernelWork) -> Term:
        """One GEMM. Mixture of experts: rows are spread over experts, each padded to its own tiles."""
        whole = -(-kernel.rows // work_model.GEMM_TILE[0]) * -(-kernel.columns // work_model.GEMM_TILE[1])
        groups = kernel.blocks / whole if kernel.blocks > whole else 1.0
        tiles = self._tilings(kernel.rows, kernel.columns, kernel.k, groups, kernel.speed)
        if kernel.share != 1:
            tiles = Tiles(tuple((block_s * kernel.share, blocks) for block_s, blocks in tiles.choices), self._rate)
        return tiles, kernel.bytes * self._gemm_byte_s

    def _tilings(self, rows: int, columns: int, k: int, groups: float = 1.0, speed: float = 1.0) -> Tiles:
        """Seconds of a block, and blocks, of each tile that is fastest on some SMs: which one, the SMs at hand decide.

        Where bytes bound several tiles alike (decode) that is the one with the least arithmetic: a wide tile, mostly empty,
        would wait for bandwidth on all SMs and for its own padding on a few.
        """
        found: list[Blocks] = []
        for tile_rows, tile_columns, block_s in self._tiles(k, speed):
            blocks = -(-rows // tile_rows) * -(-columns // tile_columns)
            if groups != 1.0:
                blocks = max(1, round(groups * blocks))
            found.append((block_s, blocks))
        tiles = Tiles(tuple(one for i, one in enumerate(found) if not any(
            other[0] <= one[0] and other[1] <= one[1] and (other != one or j < i) for j, other in enumerate(found))), self._rate)
        if self.cache and groups == 1.0:
            # of all rows that fill the same tiles
            self._tilings_of[columns, k, -(-rows // self._tile_rows), speed] = tiles
        return tiles

    def _tiles(self, k: int, speed: float) -> list[tuple[int, int, float]]:
        """Rows, columns and seconds of a block of each tile, for one inner dimension."""
        tiles = self._tiles_of.get((k, speed))
        if tiles is None:
            c = self.coefficients
            tiles = self._tiles_of[k, speed] = [
                (rows, columns, 2.0 * rows * columns * k * self._op_s / efficiency / speed + c.gemm_block_overhead_s)
                for rows, columns, efficiency in c.gemm_tiles]
        return tiles

    # ---- seconds ---------------------------------------------------------------------------------

    def bandwidth_share(self, sms: float) -> float:
        """Share of the full device's bandwidth that ``sms`` SMs can draw."""
        c = self.coefficients

        def curve(share: float) -> float:
            return float(((share / c.bandwidth_knee) ** -c.bandwidth_sharpness + 1) ** (-1 / c.bandwidth_sharpness))

        return curve(sms / self.num_sms) / curve(1.0)

    def solo_seconds(self, work: FittedWork, sms: int) -> float:
        if work.solo_sms == sms:
            return work.solo_s
        inverse, whole = self._inverse_bandwidth[sms], sms == self.num_sms
        dense, head = work.dense, work.head
        seconds = dense.solo_s.get(sms)
        if seconds is None:
            seconds = self._row_solo(dense, sms)
        seconds += work.attention_fixed_s
        for block_s, blocks, moved_s in work.attention:
            compute_s = -(-blocks // sms) * block_s if whole else compute_seconds(((block_s, blocks),), sms, 0, self._rate)
            memory_s = moved_s * inverse
            seconds += compute_s if compute_s > memory_s else memory_s
        seconds = seconds * work.layers + work.fixed_s
        if head is not None:
            head_s = head.solo_s.get(sms)
            seconds += self._row_solo(head, sms) if head_s is None else head_s
        if self.cache:
            work.solo_sms, work.solo_s = sms, seconds
        return seconds

    def _inverse_of(self, effective_sms: float) -> float:
        """1 / share of bandwidth on a number of SMs that sharing makes a fraction: few of them occur."""
        inverse = self._inverse_effective.get(effective_sms)
        if inverse is None:
            inverse = self._inverse_effective[effective_sms] = 1 / self.bandwidth_share(effective_sms)
        return inverse

    def decode_seconds(self, num_seqs: int, context_tokens: int, sms: int) -> float:
        """Linear in the context: one line for each batch size and SM count."""
        if self._windowed or self._context_op_s:
            return self.solo_seconds(self.decode_work(num_seqs, context_tokens), sms)
        line = self._decode_lines.get((num_seqs, sms)) if self.cache else None
        if line is None:
            work = self.decode_work(num_seqs, context_tokens)
            assert work.head is not None
            ((block_s, blocks, _),) = work.attention
            line = self._decode_lines[num_seqs, sms] = (
                self._row_solo(work.dense, sms) + work.attention_fixed_s,
                compute_seconds(((block_s, blocks),), sms, 0, self._rate),
                self._query_bytes * num_seqs, self._inverse_bandwidth[sms], work.fixed_s, self._row_solo(work.head, sms))
        rest_s, compute_s, query_bytes, inverse, fixed_s, head_s = line
        memory_s = (query_bytes + self._context_bytes * context_tokens) / self._decode_bytes_per_s * inverse
        return (rest_s + (compute_s if compute_s > memory_s else memory_s)) * self._num_layers + fixed_s + head_s

    def _row_solo(self, row: Row, sms: int) -> float:
        inverse = self._inverse_bandwidth[sms]
        seconds = row.whole_seconds(inverse) if sms == self.num_sms else row.seconds(sms, inverse)
        if self.cache:
            row.solo_s[sms] = seconds
        return seconds

    def _corun_seconds(self, work: FittedWork, sms: int, beside: int, share: float, inverse: float) -> float:
        """Beside another step on ``beside`` SMs, with a ``share`` of its own SMs' time: rows come as curves, for ``inverse``
        hardly ever repeats."""
        key = sms, beside, share
        corners, constants, slopes = work.dense.curves.get(key) or self._curve(work.dense, key)
        i = bisect_left(corners, inverse)
        seconds = constants[i] + slopes[i] * inverse + work.attention_fixed_s
        whole = sms + beside >= self.num_sms
        for block_s, blocks, moved_s in work.attention:
            compute_s = (-(-blocks // sms) * block_s if whole
                         else compute_seconds(((block_s, blocks),), sms, beside, self._rate)) / share
            memory_s = moved_s * inverse
            seconds += compute_s if compute_s > memory_s else memory_s
        seconds = seconds * work.layers + work.fixed_s
        head = work.head
        if head is not None:
            corners, constants, slopes = head.curves.get(key) or self._curve(head, key)
            i = bisect_left(corners, inverse)
            seconds += constants[i] + slopes[i] * inverse
        return seconds

    def _curve(self, row: Row, key: tuple[int, int, float]) -> Curve:
        curve = row.curve(*key)
        if self.cache:
            row.curves[key] = curve
        return curve

    def corun_seconds(self, prefill: FittedWork, p: int, decode: FittedWork, d: int) -> tuple[float, float]:
        """Full durations of each if the other ran beside it throughout. ``p + d > N``: the excess is shared.

        On shared SMs prefill gets ``shared_prefill_share`` of the time: a lane's effective SMs shrink, its waves are
        still counted on the SMs it holds.
        """
        last = self._last_corun
        if last[0] is decode and last[1] is prefill and last[2] == d and last[3] == p:
            return last[4]  # prefill's next layers beside the same decode step
        n = self.num_sms
        shared = p + d - n
        if shared > 0:
            p_effective = p - (1 - self.shared_prefill_share) * shared
            d_effective = d - self.shared_prefill_share * shared
            p_share, d_share = p_effective / p, d_effective / d
            p_inverse, d_inverse = self._inverse_of(p_effective), self._inverse_of(d_effective)
            p_solo = self._corun_seconds(prefill, p, d, p_share, p_inverse)
            d_solo = self._corun_seconds(decode, d, p, d_share, d_inverse)
        else:
            p_share = d_share = 1.0
            p_inverse, d_inverse = self._inverse_bandwidth[p], self._inverse_bandwidth[d]
            p_solo = prefill.solo_s if prefill.solo_sms == p else self.solo_seconds(prefill, p)
            d_solo = decode.solo_s if decode.solo_sms == d else self.solo_seconds(decode, d)
        if self._by_gemms:
            p_slow, d_slow = self._slowdowns(prefill.bytes / p_solo, decode.bytes / d_solo, prefill.gemm_sm_s() / (n * p_solo),
                                             decode.gemm_sm_s() / (n * d_solo))
        else:
            p_slow, d_slow = self._slowdowns(prefill.bytes / p_solo, decode.bytes / d_solo)
        both = (self._corun_seconds(prefill, p, d, p_share, p_inverse * p_slow),
                self._corun_seconds(decode, d, p, d_share, d_inverse * d_slow))
        if self.cache:
            self._last_corun = (decode, prefill, d, p, both)
        return both

    def _slowdowns(self, use_a: float, use_b: float, gemms_a: float = 0.0, gemms_b: float = 0.0) -> tuple[float, float]:
        """``s`` of prefill and decode that would alone draw ``use_a`` and ``use_b`` bytes/s and whose GEMMs fill such shares of
        all SM time."""
        peak = self._peak_bytes_per_s
        if use_a + use_b <= peak:
            grant_a, grant_b = use_a, use_b
        elif use_a <= peak / 2:
            grant_a, grant_b = use_a, peak - use_a
        elif use_b <= peak / 2:
            grant_a, grant_b = peak - use_b, use_b
        else:
            grant_a = grant_b = peak / 2
        left_a = 1 - self._prefill_byte_loss * grant_b - self.l2_losses[0] * gemms_b
        left_b = 1 - self._decode_byte_loss * grant_a - self.l2_losses[1] * gemms_a
        slow_a = use_a / (grant_a * (left_a if left_a > 0.05 else 0.05)) if use_a else 1.0
        slow_b = use_b / (grant_b * (left_b if left_b > 0.05 else 0.05)) if use_b else 1.0
        return slow_a, slow_b

    # ---- all splits at once, for the oracle --------------------------------------------------------

    def _all(self, work: FittedWork, other: FittedWork | None, splits: SplitTable, is_prefill: bool) -> NDArray[np.float64]:
        n = self.num_sms
        own = np.append(splits.prefill_sms if is_prefill else splits.decode_sms, n)
        rates, inverses = np.array(self._rate), np.array(self._inverse_bandwidth)
        solo = step_seconds_all(work, own, 0, rates, inverses[own])
        if other is None:
            return solo
        beside = n - own[:-1]
        other_solo = step_seconds_all(other, beside, 0, rates, inverses[beside])
        use, other_use = work.bytes / solo[..., :-1], other.bytes / other_solo
        peak = self._peak_bytes_per_s
        half = peak / 2
        grant = np.where(use + other_use <= peak, use,
                         np.where(use <= half, use, np.where(other_use <= half, peak - other_use, half)))
        other_grant = np.where(use + other_use <= peak, other_use,
                               np.where(other_use <= half, other_use, np.where(use <= half, peak - use, half)))
        side = 0 if is_prefill else 1
        left = 1 - self.losses[side] / peak * other_grant - self.l2_losses[side] * (other.gemm_sm_s() / (n * other_solo))
        slow = use / (grant * np.maximum(0.05, left))
        together = step_seconds_all(work, own[:-1], beside, rates, inverses[own[:-1]] * slow)
        return together if np.ndim(other.bytes) else np.concatenate((together, solo[..., -1:]), axis=-1)

    def coruns_all(self, prefills: Sequence[FittedWork], decode: FittedWork,
                   splits: SplitTable) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        from bullet.devices.terms import stacked

        whole = stacked(prefills)
        return self._all(whole, decode, splits, True)[:, :-1], self._all(decode, whole, splits, False)

    def min_prefill_seconds(self, prompt_tokens: int) -> float:
        """No padding, no waves, best tile, best clocks, no overheads."""
        c = self.coefficients
        best_rate = max(r * p / self.num_sms for p, r in enumerate(self._rate))
        efficiency = max(e for _, _, e in c.gemm_tiles)
        layer_s = 0.0
        for kernel in work_model.dense_kernels(self.model, prompt_tokens, self.tensor_parallel):
            if kernel.k:
                layer_s += kernel.flops / (self.gpu.peak_flops * efficiency * best_rate)
        pairs = work_model.prefill_attention(self.model, [(prompt_tokens, 0)], self.tensor_parallel).flops
        layer_s += pairs / (self.gpu.peak_flops * c.prefill_attention_efficiency * best_rate)
        return layer_s * self.model.num_layers
