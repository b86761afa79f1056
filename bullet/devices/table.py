"""The table device: seconds of a step interpolated from kernel times that were measured inside the engine itself.

Where :mod:`bullet.devices.fitted` fits a few coefficients, this reads the tables as they are, so a replay is as good as the
tables and the scheduler, with nothing fitted::

    step = L x (2 norm + qkv + rotary + o + gate_up + act + down)(tokens) + (embedding + final norm)(tokens)
         + L x attention(pc, kp, nd, kd) + (lm_head + sampler)(requests)

    pc  prompt tokens of this step, over requests with more than one new token     kp  tokens that each attends before them
    nd  requests with exactly one new token                                        kd  mean of their computed tokens

The attention kernel was measured with one prefill beside nd decodes; several pieces of n new tokens after c computed
ones become one with as many query-key pairs, ``A = sum n (c + n / 2)``: ``kp = (A - pc^2 / 2) / pc``, or, where that is
negative, a prompt with no past and fewer tokens, ``pc = sqrt(2 A)``.

Interpolation is linear on every axis. Outside the measured range a query is refused (:class:`ProfileError`). Two holes at
the lower rim are filled with the nearest measured point and counted in ``clamped``: fewer than 16 computed tokens per
decode, and a lone prefill of fewer than 16 tokens. Tables hold the whole device: there is no SM axis and no co-runner.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from bullet.catalog.gpus import BYTES_SLACK, FLOOR_S, PEAK_SLACK, UNIT_FACTOR, GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.devices.base import Device
from bullet.errors import ConfigError, ProfileError
from bullet.parquet import read_table
from bullet.work import gemm_shapes

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Counts, ascending, and the seconds measured at each."""

LAYER_KERNELS: Mapping[str, int] = {"layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1,
                                    "act_fn": 1, "down_proj": 1}
"""Dense kernels of a layer and how often each runs."""
ONCE_KERNELS = ("embedding", "final_layernorm")
HEAD_KERNELS = ("lm_head", "sampler")
TABLE = "device.timing (--device-model) = 'table'"
FILE = "engine_tables.parquet"
SHARES = {"tokens": (*LAYER_KERNELS, *ONCE_KERNELS), "sequences": HEAD_KERNELS}
ATTENTION_AXES = ("prefill_chunk_tokens", "kv_prefill_tokens", "decode_sequences", "kv_decode_tokens")


@dataclass(frozen=True)
class KernelTables:
    """What was measured. ``dense``, ``head``: kernel -> curve over tokens or requests.

    ``attention``: seconds of one layer, shape of the four ``axes`` (see :data:`ATTENTION_AXES`), NaN where not measured.
    ``beside``: what else the label must say.
    """

    source: str
    dense: Mapping[str, Curve]
    head: Mapping[str, Curve]
    axes: tuple[NDArray[np.float64], ...]
    attention: NDArray[np.float64]
    beside: str = ""


class TableWork(NamedTuple):
    """A step's seconds on the whole device."""

    seconds: float


class TableDevice(Device):
    """One whole GPU as its engine's kernel tables say. ``host_gap_s``: exposed host time, added to every step.

    ``clamped`` counts queries in the two holes at the lower rim of the tables.
    """

    def __init__(self, model: ModelSpec, gpu: GpuSpec, tables: KernelTables, *, host_gap_s: float = 0.0) -> None:
        super().__init__(model, gpu)
        self.tables = tables
        self.host_gap_s = host_gap_s
        self.has_host_time = host_gap_s > 0
        self.clamped = 0
        layer = _sum([(tables.dense[name], times) for name, times in LAYER_KERNELS.items()], model.num_layers)
        self._tokens_s = layer + _sum([(tables.dense[name], 1) for name in ONCE_KERNELS], 1)
        self._head_s = _sum([(tables.head[name], 1) for name in HEAD_KERNELS], 1)
        self._axes = tuple(axis.tolist() for axis in tables.axes)
        grid = _filled(tables)
        self._grid: list[float] = grid.ravel().tolist()
        self._strides = tuple(int(np.prod(grid.shape[i + 1:])) for i in range(4))

    # ---- building work ---------------------------------------------------------------------------

    def prefill_work(self, pieces: Sequence[tuple[int, int]], layers: int, *, logits_seqs: int) -> TableWork:
        """Some layers of a prefill: their share of the whole, and the head where it runs."""
        share = layers / self.model.num_layers
        tokens = sum(new for new, _ in pieces)
        seconds = share * (self._dense_seconds(tokens) + self._attention_seconds(pieces, 0, 0))
        return TableWork(seconds + self._head_seconds(logits_seqs) + share * self.host_gap_s)

    def decode_work(self, num_seqs: int, context_tokens: int) -> TableWork:
        """A whole iteration; ``context_tokens`` as everywhere includes the new tokens."""
        return self.hybrid_work((), num_seqs, context_tokens, logits_seqs=num_seqs)

    def hybrid_work(self, pieces: Sequence[tuple[int, int]], num_seqs: int, context_tokens: int, *,
                    logits_seqs: int, layers: int | None = None) -> TableWork:
        """One lock-step batch, all layers unless said. A piece of one token is, to the kernel, a decode."""
        long = [piece for piece in pieces if piece[0] > 1]
        for new, past in pieces:
            if new == 1:
                num_seqs += 1
                context_tokens += past + 1
        tokens = num_seqs + sum(new for new, _ in long)
        seconds = self._dense_seconds(tokens) + self._attention_seconds(long, num_seqs, context_tokens - num_seqs)
        share = 1.0 if layers is None else layers / self.model.num_layers
        return TableWork(share * seconds + self._head_seconds(logits_seqs) + share * self.host_gap_s)

    # ---- tables ----------------------------------------------------------------------------------

    def _dense_seconds(self, tokens: int) -> float:
        if not 0 < tokens < len(self._tokens_s) or math.isnan(self._tokens_s[tokens]):
            self._refuse(f"a step of {tokens} tokens", f"{_first(self._tokens_s)} to {len(self._tokens_s) - 1} tokens a step")
        return float(self._tokens_s[tokens])

    def _head_seconds(self, requests: int) -> float:
        if requests == 0:
            return 0.0
        if not 0 < requests < len(self._head_s) or math.isnan(self._head_s[requests]):
            self._refuse(f"logits of {requests} requests", f"{_first(self._head_s)} to {len(self._head_s) - 1}")
        return float(self._head_s[requests])

    def _attention_seconds(self, pieces: Sequence[tuple[int, int]], num_seqs: int, computed_tokens: int) -> float:
        """All layers; ``computed_tokens``: over the decodes, their new tokens not included."""
        chunk = past = 0.0
        if pieces:
            chunk = float(sum(new for new, _ in pieces))
            pairs = sum(new * (before + new / 2) for new, before in pieces)
            past = (pairs - chunk * chunk / 2) / chunk
            if past < 0.0:
                chunk, past = math.sqrt(2 * pairs), 0.0
        elif not num_seqs:
            return 0.0
        return self.model.num_layers * self.attention_seconds(chunk, past, num_seqs,
                                                              computed_tokens / num_seqs if num_seqs else 0.0)

    def attention_seconds(self, chunk: float, past: float, num_seqs: int, computed: float) -> float:
        """One layer's attention at (pc, kp, nd, kd), linear between the measured points around it."""
        pcs, _, _, kds = self._axes
        if num_seqs and computed < kds[1]:
            self.clamped += 1
            computed = kds[1]
        if not num_seqs and chunk < pcs[1]:
            self.clamped += 1
            chunk = pcs[1]
        corners = [(0, 1.0)]
        for axis, stride, value in zip(self._axes, self._strides, (chunk, past, num_seqs, computed), strict=True):
            at = bisect_right(axis, value) - 1
            if at < 0 or value > axis[-1]:
                self._refuse_attention(chunk, past, num_seqs, computed)
            if axis[at] == value:
                corners = [(i + at * stride, w) for i, w in corners]
            else:
                right = (value - axis[at]) / (axis[at + 1] - axis[at])
                corners = [(i + (at + side) * stride, w * weight) for i, w in corners
                           for side, weight in ((0, 1 - right), (1, right))]
        seconds = sum(self._grid[i] * w for i, w in corners)
        if math.isnan(seconds):  # a corner that nobody measured
            self._refuse_attention(chunk, past, num_seqs, computed)
        return seconds

    def _refuse_attention(self, chunk: float, past: float, num_seqs: int, computed: float) -> NoReturn:
        pcs, kps, nds, kds = self._axes
        known = ~np.isnan(np.array(self._grid).reshape([len(axis) for axis in self._axes]))
        most = [max(int(nds[i]) for i in np.flatnonzero(known[first:].any(axis=(0, 1, 3)))) for first in (0, 1)]
        measured = f"up to {pcs[-1]:g} after {kps[-1]:g}, and {most[0]} decodes ({most[1]} beside a prefill) of {kds[-1]:g}"
        at = min(bisect_left(nds, num_seqs), len(nds) - 1)  # as many decodes, or the next measured number
        reach = [kds[i] for i in np.flatnonzero(known[1 if chunk else 0, 0, at])]
        if num_seqs <= most[bool(chunk)] and reach and reach[-1] < kds[-1]:
            measured += f"; {nds[at]:g} decodes of {reach[-1]:g} at most"
        self._refuse(f"attention of {chunk:g} prompt tokens after {past:g}, beside {num_seqs} decodes of {computed:g}", measured)

    def _refuse(self, asked: str, measured: str) -> NoReturn:
        raise ProfileError(f"{self.gpu.name} {self.model.name} tables: {asked} lies outside what was measured ({measured}): "
                           "use a smaller batch or --device-model fit")

    # ---- seconds ---------------------------------------------------------------------------------

    def solo_seconds(self, work: TableWork, sms: int) -> float:
        """As measured: on the whole device."""
        if sms != self.num_sms:
            raise ConfigError(f"{TABLE}: a step was asked for on {sms} SMs, the tables of {self.gpu.name} were measured on all "
                              f"{self.num_sms}: use a one-lane policy (vllm-N, sglang-N) or 'fit'")
        return work.seconds

    def corun_seconds(self, prefill: TableWork, p: int, decode: TableWork, d: int) -> NoReturn:
        """Not measured."""
        raise ConfigError(f"{TABLE}: the tables of {self.gpu.name} hold no two steps side by side and no SM partition: use a "
                          "one-lane policy (vllm-N, sglang-N) or 'fit'")

    @property
    def source(self) -> str:
        """Where seconds are from, and how many queries fell into the holes at the tables' lower rim."""
        return (f"table: {self.tables.source}, interpolated" + (f"; {self.tables.beside}" if self.tables.beside else "")
                + (f"; {self.clamped} attention queries below the first point" if self.clamped else ""))

    def min_prefill_seconds(self, prompt_tokens: int) -> float:
        """The least seconds per token in the tables, for every token; attention left out."""
        per_token = self._tokens_s[1:] / np.arange(1, len(self._tokens_s))
        return float(np.nanmin(per_token)) * prompt_tokens


def _sum(curves: Sequence[tuple[Curve, int]], times: int) -> NDArray[np.float64]:
    """Seconds at 0 (nothing), 1, .. as far as every curve reaches, linear between measured counts; NaN below the first."""
    reach = min(int(counts[-1]) for (counts, _), _ in curves)
    first = max(int(counts[0]) for (counts, _), _ in curves)
    at = np.arange(reach + 1)
    total: NDArray[np.float64] = np.zeros(reach + 1)
    for (counts, seconds), each in curves:
        total += times * each * np.interp(at, counts, seconds)
    total[1:first] = np.nan
    total[0] = 0.0
    return total


def _first(seconds: NDArray[np.float64]) -> int:
    """The least count from 1 that was measured."""
    return 1 + int(np.argmax(~np.isnan(seconds[1:])))


def _filled(tables: KernelTables) -> NDArray[np.float64]:
    """The attention grid with the values that an absent part makes meaningless: no prefill has no past, no decode no keys."""
    grid = tables.attention.copy()
    grid[0, 1:] = grid[0, :1]
    grid[:, :, 0, 1:] = grid[:, :, 0, :1]
    return grid


# ------------------------------------------------------------------------------------------- files


def read_tables(path: Path) -> KernelTables:
    """Read a profile's tables; :class:`ProfileError` names the file and what is wrong with it."""
    table, metadata = read_table(path, "kernel tables", ("kernel", "tokens", "sequences", *ATTENTION_AXES, "seconds"))
    return tables_from_rows(table.to_pylist(), metadata.get("source", str(path)), str(path))


def tables_from_rows(rows: Sequence[Mapping[str, Any]], source: str, where: str) -> KernelTables:
    """Tidy rows (kernel, its counts, seconds) as curves and a grid; what cannot be right is refused with its row."""
    curves: dict[str, dict[str, dict[float, float]]] = {"tokens": {}, "sequences": {}}
    points: dict[tuple[float, ...], float] = {}
    for number, row in enumerate(rows, 1):
        kernel, seconds = row["kernel"], row["seconds"]
        if not isinstance(seconds, float) or not 0 < seconds < 1:
            raise ProfileError(f"{where}: row {number} ({kernel}): seconds = {seconds!r}: must be between 0 and 1 s")
        if kernel == "attention":
            key = tuple(row[axis] for axis in ATTENTION_AXES)
            found: dict[Any, float] = points
        else:
            axis = next((axis for axis, names in SHARES.items() if kernel in names), None)
            if axis is None:
                raise ProfileError(f"{where}: row {number}: kernel {kernel!r}: must be attention, "
                                   f"{', '.join((*LAYER_KERNELS, *ONCE_KERNELS, *HEAD_KERNELS))}")
            key, found = (row[axis],), curves[axis].setdefault(kernel, {})
        if any(not isinstance(x, int) or x < 0 for x in key):
            raise ProfileError(f"{where}: row {number} ({kernel}): {key}: must be whole numbers, 0 or more")
        index = key if kernel == "attention" else key[0]
        if index in found:
            raise ProfileError(f"{where}: row {number} ({kernel}): {index} is there twice")
        found[index] = seconds
    for axis, names in SHARES.items():
        missing = [name for name in names if len(curves[axis].get(name, ())) < 2]
        if missing:
            raise ProfileError(f"{where}: {missing[0]}: needs 2 rows or more")
    axes = tuple(np.unique(np.array([key[i] for key in points], dtype=float)) for i in range(4)) if points else ()
    if len(axes) < 4 or any(len(axis) < 2 or axis[0] != 0 for axis in axes):
        raise ProfileError(f"{where}: attention: each of {', '.join(ATTENTION_AXES)} needs 0 and at least one more value")
    grid = np.full([len(axis) for axis in axes], np.nan)
    for point, seconds in points.items():
        grid[tuple(int(np.searchsorted(axis, x)) for axis, x in zip(axes, point, strict=True))] = seconds
    dense, head = ({k: _curve(v) for k, v in curves[axis].items()} for axis in ("tokens", "sequences"))
    for kernel, (counts, times) in (dense | head).items():
        _require_steady(times, (counts,), f"{where}: {kernel}")
    _require_steady(grid, axes, f"{where}: attention")
    return KernelTables(source, dense, head, axes, grid)


def _require_steady(seconds: NDArray[np.float64], axes: Sequence[NDArray[np.float64]], what: str) -> None:
    """Refuse a value in other units than its neighbours': a hundred times off along some axis."""
    for dimension in range(seconds.ndim):
        steps = np.diff(np.log(seconds), axis=dimension)
        wrong = np.argwhere(np.abs(steps) > math.log(100))
        if len(wrong):
            here = [int(i) for i in wrong[0]]
            there = here.copy()
            there[dimension] += 1
            at = [f"{seconds[tuple(i)]:g} s at {tuple(float(x[j]) for x, j in zip(axes, i, strict=True))}" for i in (here, there)]
            raise ProfileError(f"{what}: {' but '.join(at)}: neighbours a hundred times apart, are all values in seconds?")


def check_tables(tables: KernelTables, model: ModelSpec, gpu: GpuSpec, where: str) -> None:
    """Refuse GEMMs that beat the data sheet or take a hundred times what it allows: other units, or another GPU."""
    for gemm, (columns, inner) in gemm_shapes(model).items():
        name = gemm if gemm in HEAD_KERNELS else f"{gemm}_proj"
        counts, seconds = (tables.head if name in HEAD_KERNELS else tables.dense)[name]
        compute_s = 2.0 * counts * columns * inner / gpu.peak_flops
        moved = model.dtype_bytes * (counts * (columns + inner) + columns * inner)
        least_s = np.maximum(compute_s / PEAK_SLACK, (moved - gpu.l2_bytes) / (BYTES_SLACK * gpu.mem_bytes_per_s))
        for wrong, text in ((seconds < least_s, "faster than"), (seconds > UNIT_FACTOR * (least_s + FLOOR_S), "a hundred times")):
            if wrong.any():
                i = int(np.argmax(wrong))
                raise ProfileError(f"{where}: {name}: {seconds[i]:.3g} s at {counts[i]:g} is {text} what {gpu.name}'s data sheet "
                                   f"allows ({least_s[i]:.3g} s): are all values in seconds, and of this GPU?")


def _curve(points: Mapping[float, float]) -> Curve:
    counts = sorted(points)
    return np.array(counts, dtype=float), np.array([points[c] for c in counts])
