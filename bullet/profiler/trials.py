"""What is tried on a GPU before the first row: whether cuBLAS keeps to a lane, and whether the engine's layers run at all."""

from __future__ import annotations

from typing import Any

from bullet.profiler.bench import PointError
from bullet.profiler.check import judge_gemm
from bullet.profiler.plan import Point
from bullet.profiler.shapes import Shape, decode, prefill


def check_gemm(bench: Any) -> tuple[list[str], list[str]]:
    """A GEMM alone on the lanes nearest a quarter of the SMs, and on all: lines, and what speaks against the partitions. The
    probe proves where a kernel of ours runs; this, that cuBLAS stays there too."""
    shape = Shape("gemm_gate_up", min(2048, bench.model.context_tokens))
    whole = bench.measure(Point("solo", None, "full", shape))[0]
    lines, reasons = [], list[str]()
    for name in ("prefill", "decode"):
        pair = min(bench.table.pairs, key=lambda p: abs(getattr(p, name).sms - bench.num_units / 4))
        sms = getattr(pair, name).sms
        row = bench.measure(Point("solo", pair.granted, name, shape))[0]
        clocks = row.columns["clock_window_hz"], whole.columns["clock_window_hz"]
        taken = row.stats.median_s, whole.stats.median_s
        told = f", clock {clocks[0] / clocks[1]:.3f} times that" if clocks[0] and clocks[1] else ""
        lines.append(f"GEMM on {sms} of {bench.num_units} SMs ({name}): {taken[0] / taken[1]:.2f} times as long as on all, "
                     f"{bench.num_units / sms:.2f} by SMs{told}")
        reasons += judge_gemm(sms, bench.num_units, *taken, clocks)
    return lines, reasons


def try_layers(bench: Any, layers: tuple[str, str]) -> str:
    """Run a small layer of each phase once, on a plain stream; why that cannot be, or empty."""
    for shape in (prefill(layers[0], 128), decode(layers[1], 4, 64)):
        point = Point("solo", None, "full", shape)
        if not bench.allowed(point):
            return "triton is missing, or the model has experts"
        try:
            bench.measure(point)
        except PointError as exc:
            return str(exc)
    return ""
