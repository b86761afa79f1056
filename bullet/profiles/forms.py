"""Measured kernel tables to device coefficients: few parameters, offline, repeatable to the byte.

Each family's model is that of :mod:`bullet.devices.fitted`; errors are relative and fitted in logarithms with a soft-L1 loss,
so that a handful of odd rows (a library's unlucky tile choice) does not bend the rest. scipy lives here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bullet.catalog.gpus import GpuSpec
from bullet.errors import ProfileError
from bullet.work import ATTENTION_TILE_ROWS

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FitError:
    """Relative errors on rows that the fit has not seen."""

    rows: int
    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, predicted: Array, measured: Array) -> FitError:
        """From seconds against seconds."""
        error = np.abs(predicted / measured - 1)
        return cls(len(error), float(np.median(error)), float(np.percentile(error, 90)), float(error.max()))

    def as_dict(self) -> dict[str, float]:
        """Rounded to what can be meant."""
        return {"rows": self.rows, "median": round(self.median, 4), "p90": round(self.p90, 4),
                "worst": round(self.worst, 4)}


@dataclass(frozen=True)
class Gemm:
    """A measured GEMM: ``m x n x k``, 16-bit, seconds."""

    m: int
    n: int
    k: int
    seconds: float


def _solve(residual: Callable[[Array], Array], start: Sequence[float], low: Sequence[float],
           high: Sequence[float]) -> Array:
    try:
        from scipy.optimize import least_squares
    except ImportError as exc:
        raise ProfileError(f"scipy is not installed ({exc}): a fit needs it: pip install 'bullet-llm[fit]'") from None

    found = least_squares(residual, start, bounds=(low, high), loss="soft_l1", f_scale=0.05, x_scale=np.abs(start),
                          diff_step=1e-4, max_nfev=400)
    solution: Array = found.x
    return solution


def search(residual: Callable[[Array], Array], start: Sequence[float], low: Sequence[float], high: Sequence[float],
           unit: Sequence[float]) -> Array:
    """The same loss by a pattern search over multiples of ``unit``, from ``start``, in shrinking steps.

    Only comparisons of costs decide, so the last bits of a CPU's arithmetic do not show in the answer, and a parameter that no
    row fixes stays where it started. Where tiles or waves make the loss piecewise, gradients give neither.
    """
    at = [round(x / u) for x, u in zip(start, unit, strict=True)]
    bounds = [(round(a / u), round(b / u)) for a, b, u in zip(low, high, unit, strict=True)]

    def cost(point: Sequence[int]) -> float:
        off = residual(np.array([i * u for i, u in zip(point, unit, strict=True)])) / 0.05
        return float(np.mean(np.sqrt(1 + off * off)))

    def moved(point: Sequence[int], by: Sequence[tuple[int, int]]) -> list[int]:
        trial = list(point)
        for i, move in by:
            trial[i] = min(max(trial[i] + move, bounds[i][0]), bounds[i][1])
        return trial

    best = cost(at)
    for step in (32, 16, 8, 4, 2, 1):
        single = [[(i, move)] for i in range(len(at)) for move in (step, -step)]
        double = [a + b for a in single for b in single if a[0][0] < b[0][0]]  # along ridges single moves are stuck
        for _ in range(60):
            before = list(at)
            for moves in (single, double):
                for by in moves:
                    trial = moved(at, by)
                    found = cost(trial)
                    if found < best * (1 - 1e-9):
                        at, best = trial, found
                if at != before:
                    break
            if at == before:
                break
    return np.array([round(i * u, 12) for i, u in zip(at, unit, strict=True)])


TILES = ((128, 256), (128, 128), (64, 128), (64, 64))
"""Output tiles that cuBLAS is known to use on Ampere for 16-bit GEMMs, large to small."""


def gemm_seconds(rows: Sequence[Gemm], parameters: Array, gpu: GpuSpec, waves: bool = True) -> Array:
    """Model of :mod:`bullet.devices.fitted`: efficiencies of ``TILES``, bandwidth share, overhead, overhead of one block."""
    efficiencies = parameters[: len(TILES)]
    bandwidth, overhead_s, block_overhead_s = parameters[len(TILES) :]
    m, n, k = (np.array([getattr(r, name) for r in rows], dtype=float) for name in ("m", "n", "k"))
    moved_s = 2.0 * (m * k + k * n + m * n) / (gpu.mem_bytes_per_s * bandwidth)
    best = np.full(len(rows), np.inf)
    for (tile_m, tile_n), efficiency in zip(TILES, efficiencies, strict=True):
        blocks = np.ceil(m / tile_m) * np.ceil(n / tile_n)
        block_s = 2.0 * tile_m * tile_n * k * gpu.num_sms / gpu.peak_flops / efficiency + block_overhead_s
        rounds = np.ceil(blocks / gpu.num_sms) if waves else np.maximum(1.0, blocks / gpu.num_sms)
        best = np.minimum(best, np.maximum(rounds * block_s, moved_s))
    seconds: Array = best + overhead_s
    return seconds


def fit_gemm(rows: Sequence[Gemm], gpu: GpuSpec, waves: bool = True, *, searched: bool = False) -> Array:
    """Seven parameters over all shapes and token counts; see :func:`gemm_seconds`. ``searched``: by :func:`search`."""
    seconds = np.array([r.seconds for r in rows])
    # The choice of tile makes the loss piecewise: several fixed starts, the best kept.
    starts = [(0.75, 0.7, 0.6, 0.45, 0.8, 4e-6, 2e-6), (0.8, 0.75, 0.5, 0.35, 0.75, 6e-6, 5e-6),
              (0.7, 0.65, 0.55, 0.5, 0.85, 3e-6, 1e-6)]
    low, high = (0.2,) * 4 + (0.3, 0.0, 0.0), (1.0,) * 4 + (1.0, 3e-5, 3e-5)

    def residual(parameters: Array) -> Array:
        off: Array = np.log(gemm_seconds(rows, parameters, gpu, waves) / seconds)
        return off

    if searched:
        unit = (0.005,) * 4 + (0.005, 1e-7, 1e-7)
        found = [search(residual, start, low, high, unit) for start in starts]
    else:
        found = [_solve(residual, start, low, high) for start in starts]
    best: Array = min(found, key=lambda p: float(np.mean(np.abs(residual(p)))))
    return best


def rowwise_seconds(bytes_: Array, share: float, overhead_s: float, gpu: GpuSpec) -> Array:
    """Bandwidth-bound kernels."""
    seconds: Array = bytes_ / (gpu.mem_bytes_per_s * share) + overhead_s
    return seconds


def fit_rowwise(families: dict[str, tuple[Array, Array]], gpu: GpuSpec) -> tuple[dict[str, float], float]:
    """One bandwidth share a family, one overhead for all; ``families``: name -> (bytes, seconds)."""
    names = sorted(families)

    def residual(parameters: Array) -> Array:
        parts = [np.log(rowwise_seconds(families[name][0], parameters[i], parameters[-1], gpu) / families[name][1])
                 for i, name in enumerate(names)]
        return np.concatenate(parts)

    found = _solve(residual, [0.5] * len(names) + [4e-6], [0.05] * len(names) + [0.0], [1.0] * len(names) + [3e-5])
    return {name: float(found[i]) for i, name in enumerate(names)}, float(found[-1])


def prefill_attention_seconds(batch: Array, tokens: Array, heads: int | Array, head_dim: int | Array, parameters: Array,
                              gpu: GpuSpec, past: Array | float = 0.0, moved_s: Array | float = 0.0) -> Array:
    """Causal attention of ``batch`` pieces of ``tokens`` after ``past``: efficiency, extra keys a row, overhead.

    ``moved_s``: seconds that its bytes take at the device's bandwidth, where a long past makes them count.
    """
    efficiency, extra_keys, overhead_s = parameters
    flops = 4.0 * heads * head_dim * batch * tokens * (past + (tokens + 1) / 2 + extra_keys)
    blocks = np.ceil(tokens / ATTENTION_TILE_ROWS) * heads * batch
    block_s = flops / blocks * gpu.num_sms / gpu.peak_flops / efficiency
    seconds: Array = np.maximum(np.ceil(blocks / gpu.num_sms) * block_s, moved_s) + overhead_s
    return seconds


def fit_prefill_attention(batch: Array, tokens: Array, seconds: Array, heads: int | Array, head_dim: int | Array,
                          gpu: GpuSpec, past: Array | float = 0.0, moved_s: Array | float = 0.0) -> Array:
    """Three parameters."""
    return _solve(lambda p: np.log(prefill_attention_seconds(batch, tokens, heads, head_dim, p, gpu, past, moved_s) / seconds),
                  (0.55, 100.0, 1e-5), (0.1, 0.0, 0.0), (1.0, 1000.0, 1e-4))


def decode_attention_seconds(batch: Array, bytes_: Array, parameters: Array, gpu: GpuSpec) -> Array:
    """Bandwidth share, overhead, SM time a sequence: the longer of moving the cache and working off the sequences."""
    share, overhead_s, seq_s = parameters
    seconds: Array = np.maximum(bytes_ / (gpu.mem_bytes_per_s * share), seq_s * batch) + overhead_s
    return seconds


def fit_decode_attention(batch: Array, bytes_: Array, seconds: Array, gpu: GpuSpec) -> Array:
    """Three parameters."""
    return _solve(lambda p: np.log(decode_attention_seconds(batch, bytes_, p, gpu) / seconds),
                  (0.7, 1.2e-5, 3e-7), (0.2, 0.0, 0.0), (1.0, 1e-4, 5e-6))


def bandwidth_curve(share: Array, knee: float, sharpness: float) -> Array:
    """Share of full bandwidth on a share of the SMs, 1 at 1."""
    curve: Array = ((share / knee) ** -sharpness + 1) ** (-1 / sharpness) / (
        (1 / knee) ** -sharpness + 1) ** (-1 / sharpness)
    return curve


def fit_bandwidth_curve(share: Array, relative: Array) -> Array:
    """Knee (share of SMs) and sharpness, from bandwidth relative to the full device."""
    return _solve(lambda p: np.log(bandwidth_curve(share, *p) / relative), (0.35, 3.0), (0.02, 0.5), (1.0, 20.0))


def fit_rate_curve(stretch: Callable[[float, float], Array], measured: Array) -> Array:
    """Slope and cap of the per-SM rate; ``stretch(slope, cap)``: the device's prefill seconds relative to all SMs."""
    return _solve(lambda p: np.log(stretch(*p) / measured), (0.3, 1.2), (0.0, 1.0), (2.0, 2.0))


def all_reduce_seconds(sent_bytes: Array, efficiency: float, overhead_s: float, gpu: GpuSpec) -> Array:
    """Ring traffic of each GPU over its link, and a fixed cost."""
    seconds: Array = sent_bytes / (gpu.link_bytes_per_s * efficiency) + overhead_s
    return seconds


def fit_all_reduce(sent_bytes: Array, seconds: Array, gpu: GpuSpec) -> Array:
    """Link efficiency and overhead."""
    return _solve(lambda p: np.log(all_reduce_seconds(sent_bytes, p[0], p[1], gpu) / seconds),
                  (0.5, 1e-5), (0.05, 0.0), (1.0, 1e-4))
