"""Why a GEMM shape that a fit has not seen is off: the form, waves, or what was measured. Nothing is set from it.

    python -m experiments.findings.gemm_shapes

Of each shipped source with the model's shapes: the error of a shape left out of the fit, and of a fit to that shape alone (what
the form itself cannot hold); its rate on long prompts; how much of the SMs the last wave of the largest tile leaves idle; and the
time that starts a block, as fitted to the other shapes and to this one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bullet.catalog.gpus import GpuSpec, get_gpu
from bullet.devices import PROFILES
from bullet.parquet import read_table
from bullet.profiles import forms as fit
from bullet.work import GEMM_TILE, wave_quantization

SOURCES = (("a100-80gb", "vidur 2024 (fp16)"), ("a100-80gb", "sglang 0.5.10"), ("h100", "sglang 0.5.10"), ("h100", "vllm 0.19.0"),
           ("rtx4090", "vllm 0.19.0"))
PLATEAU = 0.5
"""Rates are of token counts from this share of the largest on."""

Array = NDArray[np.float64]


def read(gpu: str, source: str) -> list[fit.Gemm]:
    """GEMMs of a source, repeats as their median; the LM head aside."""
    columns = ["op", "tokens", "columns", "inner", "median_s", "origin_version"]
    found: dict[tuple[int, int, int], list[float]] = {}
    for r in read_table(PROFILES / gpu / "llama-3.1-8b" / "samples.parquet", columns=columns)[0].to_pylist():
        if r["op"].startswith("gemm") and r["op"] != "gemm_lm_head" and r["origin_version"] == source:
            found.setdefault((r["columns"], r["inner"], r["tokens"]), []).append(r["median_s"])
    return [fit.Gemm(m, n, k, statistics.median(times)) for (n, k, m), times in sorted(found.items())]


def off(rows: Sequence[fit.Gemm], parameters: Array, gpu: GpuSpec) -> Array:
    """Relative errors of rows, signed."""
    return fit.gemm_seconds(rows, parameters, gpu) / np.array([r.seconds for r in rows]) - 1


def plateau(rows: Sequence[fit.Gemm], gpu: GpuSpec) -> tuple[float, float]:
    """Median rate on long prompts, operations a second, and median share of the SMs' time that the last wave leaves idle."""
    long = [r for r in rows if r.m >= PLATEAU * max(x.m for x in rows)]
    idle = [wave_quantization(-(-r.m // GEMM_TILE[0]) * -(-r.n // GEMM_TILE[1]), gpu.num_sms).idle for r in long]
    return statistics.median(2.0 * r.m * r.n * r.k / r.seconds for r in long), statistics.median(idle)


def main() -> None:
    for name, source in SOURCES:
        gpu, rows = get_gpu(name), read(name, source)
        print(f"\n{name}, {source}\n{'columns x inner':>16}{'left out: median %':>20}{'signed':>8}{'alone: median %':>17}"
              f"{'TFLOPS, long':>14}{'idle %':>8}  us to start a block: others, alone")
        for n, k in sorted({(r.n, r.k) for r in rows}):
            own, others = ([r for r in rows if ((r.n, r.k) == (n, k)) == mine] for mine in (True, False))
            without, on_it = fit.fit_gemm(others, gpu, searched=True), fit.fit_gemm(own, gpu, searched=True)
            out, alone = off(own, without, gpu), off(own, on_it, gpu)
            rate, idle = plateau(own, gpu)
            print(f"{f'{n} x {k}':>16}{np.median(np.abs(out)) * 100:>20.1f}{np.median(out) * 100:>+8.1f}"
                  f"{np.median(np.abs(alone)) * 100:>17.1f}{rate / 1e12:>14.1f}{idle * 100:>8.1f}"
                  f"{without[-1] * 1e6:>12.1f}, {on_it[-1] * 1e6:.1f}")


if __name__ == "__main__":
    main()
