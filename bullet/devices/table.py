"""The table device: seconds of a step interpolated from kernel times that were measured inside the engine itself.

Where :mod:`bullet.devices.fitted` fits a few coefficients, this reads the tables as they are, so a replay is as good as the
tables and the scheduler, with nothing fitted::

    step = L x (2 norm + qkv + rotary + o + gate_up + act + down)(tokens) + (embedding + final norm)(tokens)
         + L x attention(pc, kp, nd, kd) + (lm_head + sampler)(requests)

with qk_norm once a layer where the model has it, experts(tokens, experts touched) for gate_up, act and down in its layers of
experts, and two all-reduces a layer where the tables are a tensor-parallel shard's::

    pc  prompt tokens of this step, over requests with more than one new token     kp  tokens that each attends before them
    nd  requests with exactly one new token                                        kd  mean of their computed tokens

The attention kernel was measured with one prefill beside nd decodes; several pieces of n new tokens after c computed
ones become one with as many query-key pairs, ``A = sum n (c + n / 2)``: ``kp = (A - pc^2 / 2) / pc``, or, where that is
negative, a prompt with no past and fewer tokens, ``pc = sqrt(2 A)``.

Interpolation is linear on every axis, inside the hull of each family's own points (:mod:`bullet.devices.grid`): attention of
prefills alone, of decodes alone, of both; dense kernels; experts. Outside it a query is refused (:class:`ProfileError`), or, if
so configured, the fit answers for that family and is counted in ``by_fit``. Two holes at the lower rim are filled with the
nearest measured point and counted in ``clamped``: fewer than 16 computed tokens per decode, and a lone prefill of fewer than 16
tokens. Experts touched are those expected under uniform routing, ``E (1 - (1 - k / E)^tokens)``: *assumed*. Tables hold the whole
device: there is no SM axis and no co-runner.
"""

from __future__ import annotations

import dataclasses
import math
import re
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
from bullet.devices.fitted import DeviceModel
from bullet.devices.grid import Grid, cell, filled, interpolated, laid_out
from bullet.errors import ConfigError, ProfileError
from bullet.parquet import read_table
from bullet.work import gemm_shapes

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Counts, ascending, and the seconds measured at each."""

LAYER_KERNELS: Mapping[str, int] = {"layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1,
                                    "act_fn": 1, "down_proj": 1}
"""Dense kernels of a layer and how often each runs."""
MLP_KERNELS = ("gate_up_proj", "act_fn", "down_proj")
"""Those of them that layers of experts have not."""
EXPERTS, QK_NORM, ALL_REDUCE = "moe", "qk_norm", "all_reduce"
ONCE_KERNELS = ("embedding", "final_layernorm")
HEAD_KERNELS = ("lm_head", "sampler")
TABLE = "device.timing (--device-model) = 'table'"
FILE = "engine_tables.parquet"
SHARES = {"tokens": (*LAYER_KERNELS, QK_NORM, *ONCE_KERNELS), "sequences": HEAD_KERNELS}
ATTENTION_AXES = ("prefill_chunk_tokens", "kv_prefill_tokens", "decode_sequences", "kv_decode_tokens")
EXPERT_AXES = ("tokens", "experts")
COLUMNS = ("kernel", "tokens", "sequences", *ATTENTION_AXES, "seconds")


@dataclass(frozen=True)
class KernelTables:
    """What was measured. ``dense``, ``head``: kernel -> curve over tokens or requests.

    ``attention``: seconds of one layer, shape of the four ``axes`` (see :data:`ATTENTION_AXES`), NaN outside the hull.
    ``experts``: axes (tokens, experts touched) and seconds of one layer's, likewise. ``tensor_parallel``: GPUs of which each has
    a shard such as was measured; ``dense`` then holds an ``all_reduce`` too. ``beside``: what else the label must say.
    """

    source: str
    dense: Mapping[str, Curve]
    head: Mapping[str, Curve]
    axes: tuple[NDArray[np.float64], ...]
    attention: NDArray[np.float64]
    beside: str = ""
    experts: tuple[tuple[Grid, ...], Grid] | None = None
    tensor_parallel: int = 1


class TableWork(NamedTuple):
    """A step's seconds on the whole device."""

    seconds: float


class TableDevice(Device):
    """One whole GPU, or a group of tensor-parallel ones, as an engine's kernel tables say. ``host_gap_s``: exposed host time,
    added to every step. ``outside``: what answers where the tables do not; None: they refuse.

    ``clamped`` counts queries in the two holes at the lower rim of the tables, ``by_fit``, by family, what ``outside`` answered.
    """

    def __init__(self, model: ModelSpec, gpu: GpuSpec, tables: KernelTables, *, host_gap_s: float = 0.0,
                 outside: DeviceModel | None = None) -> None:
        super().__init__(model, gpu, tables.tensor_parallel)
        self.tables = tables
        self.host_gap_s = host_gap_s
        self.has_host_time = host_gap_s > 0
        self.outside = outside
        self.clamped = 0
        self.by_fit: dict[str, int] = {}
        sparse = model.num_layers - model.dense_layers if model.num_experts else 0
        layer = _sum([(tables.dense[name], times) for name, times in LAYER_KERNELS.items()
                      if not (sparse and name in MLP_KERNELS)], model.num_layers)
        if model.qk_norm:
            layer = _together(layer, _sum([(tables.dense[QK_NORM], 1)], model.num_layers))
        if sparse:
            layer = _together(layer, sparse * self._experts_seconds(len(layer)))
            if model.dense_layers:
                layer = _together(layer, _sum([(tables.dense[name], 1) for name in MLP_KERNELS], model.dense_layers))
        if tables.tensor_parallel > 1:
            layer = _together(layer, _sum([(tables.dense[ALL_REDUCE], 2)], model.num_layers))
        self._tokens_s = _together(layer, _sum([(tables.dense[name], 1) for name in ONCE_KERNELS], 1))
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

    def _experts_seconds(self, counts: int) -> NDArray[np.float64]:
        """One layer's experts for 0, 1, .. tokens, as many experts as are touched on average; NaN outside the hull."""
        assert self.tables.experts is not None
        axes, grid = self.tables.experts
        experts, chosen = self.model.num_experts, self.model.experts_per_token
        touched = [experts * (1 - (1 - chosen / experts) ** n) for n in range(1, counts)]
        return np.array([0.0, *(interpolated(grid, axes, (n, some)) for n, some in enumerate(touched, 1))])

    def _dense_seconds(self, tokens: int) -> float:
        if not 0 < tokens < len(self._tokens_s) or math.isnan(self._tokens_s[tokens]):
            if self.outside is not None and tokens > 0:
                return self._fits("dense", self.outside.dense_seconds(tokens))
            self._refuse(f"a step of {tokens} tokens", f"{_first(self._tokens_s)} to {len(self._tokens_s) - 1} tokens a step")
        return float(self._tokens_s[tokens])

    def _head_seconds(self, requests: int) -> float:
        if requests == 0:
            return 0.0
        if not 0 < requests < len(self._head_s) or math.isnan(self._head_s[requests]):
            if self.outside is not None:
                return self._fits("head", self.outside.head_seconds(requests))
            self._refuse(f"logits of {requests} requests", f"{_first(self._head_s)} to {len(self._head_s) - 1}")
        return float(self._head_s[requests])

    def _fits(self, family: str, seconds: float) -> float:
        self.by_fit[family] = self.by_fit.get(family, 0) + 1
        return seconds

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
        computed = computed_tokens / num_seqs if num_seqs else 0.0
        seconds = self._attention_at(chunk, past, num_seqs, computed)
        if math.isnan(seconds):
            if self.outside is None:
                self._refuse_attention(chunk, past, num_seqs, computed)
            return self._fits("attention", self.outside.attention_seconds(pieces, num_seqs, computed_tokens + num_seqs))
        return self.model.num_layers * seconds

    def attention_seconds(self, chunk: float, past: float, num_seqs: int, computed: float) -> float:
        """One layer's attention at (pc, kp, nd, kd), linear between the measured points around it."""
        seconds = self._attention_at(chunk, past, num_seqs, computed)
        if math.isnan(seconds):
            self._refuse_attention(chunk, past, num_seqs, computed)
        return seconds

    def _attention_at(self, chunk: float, past: float, num_seqs: int, computed: float) -> float:
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
                return math.nan
            if axis[at] == value:
                corners = [(i + at * stride, w) for i, w in corners]
            else:
                right = (value - axis[at]) / (axis[at + 1] - axis[at])
                corners = [(i + (at + side) * stride, w * weight) for i, w in corners
                           for side, weight in ((0, 1 - right), (1, right))]
        seconds = sum(self._grid[i] * w for i, w in corners)
        if math.isnan(seconds) and not 0 < chunk < pcs[1]:  # a corner that nobody measured; decodes alone say nothing of it
            return self._at_the_rim((chunk, past, num_seqs, computed))
        return seconds

    def _at_the_rim(self, point: Sequence[float]) -> float:
        """In a cell that the hull cuts."""
        low = [bisect_right(axis, x) - 1 for axis, x in zip(self._axes, point, strict=True)]
        shares = [0.0 if axis[at] == x else (x - axis[at]) / (axis[at + 1] - axis[at])
                  for axis, at, x in zip(self._axes, low, point, strict=True)]
        return cell(lambda sides: self._grid[sum((at + side) * stride for at, side, stride in zip(
            low, sides, self._strides, strict=True))], shares)

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
                           "use a smaller batch, --device-model fit or --set device.table_outside=fit")

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
        parts = [f"table: {self.tables.source}, interpolated", self.tables.beside,
                 "experts touched as under uniform routing: assumed" if self.tables.experts is not None else "",
                 f"{self.clamped} attention queries below the first point" if self.clamped else "",
                 f"outside the tables: {self.outside.source}" if self.outside is not None else "",
                 ", ".join(f"{count} {family} queries" for family, count in sorted(self.by_fit.items()))]
        return "; ".join(part for part in parts if part)

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


def _together(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Both, as far as either reaches."""
    reach = min(len(first), len(second))
    both: NDArray[np.float64] = first[:reach] + second[:reach]
    return both


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


def table_path(folder: Path, tensor_parallel: int = 1) -> Path:
    """Where a profile's folder keeps the tables of a GPU, or of a tensor-parallel shard."""
    return folder / (FILE if tensor_parallel == 1 else FILE.replace(".", f".tp{tensor_parallel}.", 1))


def layer_sizes(model: ModelSpec) -> str:
    """What a model's kernels depend on: models that agree in it may share tables."""
    experts = f", {model.experts_per_token} of {model.num_experts} experts" if model.num_experts else ""
    return (f"hidden {model.hidden_size}, intermediate {model.intermediate_size}, {model.num_heads} heads, {model.num_kv_heads} "
            f"KV heads of {model.head_dim}, vocabulary {model.vocab_size}{experts}")


def tables_in(folder: Path) -> list[int]:
    """Degrees of tensor parallelism that a folder has engine tables of."""
    stem, _, ending = FILE.partition(".")
    found = (re.fullmatch(rf"{stem}(?:\.tp([0-9]{{1,4}}))?\.{ending}", path.name) for path in folder.glob(f"{stem}*"))
    return sorted(int(match[1] or 1) for match in found if match)


def read_tables(path: Path, model: ModelSpec | None = None, gpu: GpuSpec | None = None) -> KernelTables:
    """Read a profile's tables; :class:`ProfileError` names the file and what is wrong with it: also that they are another model's
    or GPU's than asked for, where the file says whose they are."""
    table, metadata = read_table(path, "kernel tables")
    absent = [name for name in COLUMNS if name not in table.column_names]
    if absent:
        raise ProfileError(f"{path}: cannot be read as kernel tables (no column {absent[0]!r})")
    for mine, said, flag in ((gpu and gpu.name, metadata.get("card"), "--gpu"),
                             (model and layer_sizes(model), metadata.get("layer_sizes"), "--model")):
        if mine and said and said != mine:
            raise ProfileError(f"{path}: tables of {said}, not of {mine}: give what was measured as {flag}")
    tables = tables_from_rows(table.to_pylist(), metadata.get("source", str(path)), str(path))
    degree = metadata.get("tensor_parallel", "1")
    if not re.fullmatch("[1-9][0-9]{0,3}", degree):
        raise ProfileError(f"{path}: tensor_parallel = {degree!r}: must be a whole number from 1")
    return dataclasses.replace(tables, tensor_parallel=int(degree))


def tables_from_rows(rows: Sequence[Mapping[str, Any]], source: str, where: str) -> KernelTables:
    """Tidy rows (kernel, its counts, seconds) as curves and a grid; what cannot be right is refused with its row."""
    curves: dict[str, dict[str, dict[float, float]]] = {"tokens": {}, "sequences": {}}
    points: dict[str, dict[Any, float]] = {"attention": {}, EXPERTS: {}}
    for number, row in enumerate(rows, 1):
        kernel, seconds = row["kernel"], row["seconds"]
        if not isinstance(seconds, float) or not 0 < seconds < 1:
            raise ProfileError(f"{where}: row {number} ({kernel}): seconds = {seconds!r}: must be between 0 and 1 s")
        found: dict[Any, float]
        key: tuple[Any, ...]
        if kernel in points:
            key = tuple(row.get(axis) for axis in (ATTENTION_AXES if kernel == "attention" else EXPERT_AXES))
            found = points[kernel]
        else:
            axis = next((axis for axis, names in SHARES.items() if kernel in names), None)
            if axis is None:
                raise ProfileError(f"{where}: row {number}: kernel {kernel!r}: must be attention, {EXPERTS}, "
                                   f"{', '.join(name for names in SHARES.values() for name in names)}")
            key, found = (row[axis],), curves[axis].setdefault(kernel, {})
        if any(not isinstance(x, int) or x < 0 for x in key):
            raise ProfileError(f"{where}: row {number} ({kernel}): {key}: must be whole numbers, 0 or more")
        index: Any = key if kernel in points else key[0]
        if index in found:
            raise ProfileError(f"{where}: row {number} ({kernel}): {index} is there twice")
        found[index] = seconds
    optional = (QK_NORM, *(MLP_KERNELS if points[EXPERTS] else ()))
    for axis, names in SHARES.items():
        missing = [name for name in names if len(curves[axis].get(name, (0,) * 2 if name in optional else ())) < 2]
        if missing:
            raise ProfileError(f"{where}: {missing[0]}: needs 2 rows or more")
    axes, grid = laid_out(list(points["attention"]), list(points["attention"].values())) if points["attention"] else ((), None)
    if grid is None or any(len(axis) < 2 or axis[0] != 0 for axis in axes):
        raise ProfileError(f"{where}: attention: each of {', '.join(ATTENTION_AXES)} needs 0 and at least one more value")
    # Three families: decodes alone, prefills alone, both in one kernel. Each is filled between its own points.
    grid[0, 0, 1:, 1:] = filled(grid[0, 0, 1:, 1:], axes_of := [axis[1:] for axis in axes][2:])
    grid[1:, :, 0, 0] = filled(grid[1:, :, 0, 0], [axes[0][1:], axes[1]])
    grid[1:, :, 1:, 1:] = filled(grid[1:, :, 1:, 1:], [axes[0][1:], axes[1], *axes_of])
    dense, head = ({k: _curve(v) for k, v in curves[axis].items()} for axis in ("tokens", "sequences"))
    for kernel, (counts, times) in (dense | head).items():
        _require_steady(times, (counts,), f"{where}: {kernel}")
    _require_steady(grid, axes, f"{where}: attention")
    experts = None
    if points[EXPERTS]:
        axes_of_experts, seconds_of = laid_out(list(points[EXPERTS]), list(points[EXPERTS].values()))
        experts = axes_of_experts, filled(seconds_of, axes_of_experts)
        _require_steady(experts[1], axes_of_experts, f"{where}: {EXPERTS}")
    return KernelTables(source, dense, head, axes, grid, experts=experts)


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
    """Refuse tables that lack a kernel of the model's, or have one that it has not; and GEMMs that beat the data sheet or take a
    hundred times what it allows: other units, or another GPU."""
    if model.kv_lora_rank:
        raise ProfileError(f"{where}: {model.name} has latent attention, whose kernels no table of this form holds: use "
                           "--device-model fit")
    if model.window_layers:
        raise ProfileError(f"{where}: {model.name} has layers that attend to {model.window_tokens} tokens alone, the tables hold "
                           "one attention: use --device-model fit")
    sparse = model.num_experts > 0
    for name, there, wanted in ((QK_NORM, QK_NORM in tables.dense, model.qk_norm), (EXPERTS, tables.experts is not None, sparse),
                                *((name, name in tables.dense, not sparse or model.dense_layers > 0) for name in MLP_KERNELS)):
        if there != wanted:
            raise ProfileError(f"{where}: {'has' if there else 'lacks'} {name}, which {model.name} has{' not' if there else ''}: "
                               "are these tables its own?")
    for gemm, (columns, inner) in gemm_shapes(model, tables.tensor_parallel).items():
        name = gemm if gemm in HEAD_KERNELS else f"{gemm}_proj"
        if sparse and (name in MLP_KERNELS or gemm == "router"):
            continue  # a layer's experts are one kernel
        counts, seconds = (tables.head if name in HEAD_KERNELS else tables.dense)[name]
        compute_s = 2.0 * counts * columns * inner / gpu.peak_flops
        moved = model.dtype_bytes * (counts * (columns + inner) + columns * inner)
        least_s = np.maximum(compute_s / PEAK_SLACK, (moved - gpu.l2_bytes) / (BYTES_SLACK * gpu.mem_bytes_per_s))
        for wrong, text in ((seconds < least_s, "faster than"), (seconds > UNIT_FACTOR * (least_s + FLOOR_S), "a hundred times")):
            if wrong.any():
                i = int(np.argmax(wrong))
                raise ProfileError(f"{where}: {name}: {seconds[i]:.3g} s at {counts[i]:g} is {text} what {gpu.name}'s data sheet "
                                   f"allows ({least_s[i]:.3g} s): are all values in seconds, and of this GPU?")
    if tables.experts is not None:
        (_, touched), seconds = tables.experts
        weights = touched * 3 * model.hidden_size * (model.intermediate_size // tables.tensor_parallel) * model.mlp_bits / 8
        wrong = seconds < (weights - gpu.l2_bytes) / (BYTES_SLACK * gpu.mem_bytes_per_s)
        if wrong.any():
            n, m = (int(i) for i in np.argwhere(wrong)[0])
            raise ProfileError(f"{where}: {EXPERTS}: {seconds[n, m]:.3g} s on {touched[m]:g} experts is less than {gpu.name}'s "
                               "data sheet allows to read their weights: are all values in seconds, and of this GPU?")


def _curve(points: Mapping[float, float]) -> Curve:
    counts = sorted(points)
    return np.array(counts, dtype=float), np.array([points[c] for c in counts])
