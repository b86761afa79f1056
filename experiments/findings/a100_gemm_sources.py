"""A100's GEMM family fitted on other libraries' rows, with 128 to 1,024 tokens counted three times: errors on token counts left
out, and what served points of ``bullet-sim validate serving`` become. A trial: no profile is changed by it.

``python -m experiments.findings.a100_gemm_sources``"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from bullet.catalog.gpus import get_gpu
from bullet.devices import PROFILES
from bullet.devices.fitted import DeviceModel
from bullet.profiles import forms
from bullet.validation import serving, serving_points

GPU = get_gpu("a100-80gb")
SOURCES = ("vidur 2024 (fp16)", "sglang 0.5.10", "vllm 0.14.0")
RANGES = ((1, 127), (128, 1024), (1025, 4352))
COLUMNS = {"tokens": "m", "columns": "n", "inner": "k", "median_s": "seconds"}


def rows_of(source: str) -> list[Any]:
    """Rows of up to 4,352 tokens, as the fit has them."""
    table = pd.read_parquet(PROFILES / "a100-80gb" / "llama-3.1-8b" / "samples.parquet")
    table = table[table.op.str.startswith("gemm") & (table.origin_version == source) & (table.tokens <= 4352)]
    return list(table.rename(columns=COLUMNS).itertuples())


def weighted(rows: Sequence[Any]) -> forms.Array:
    """Seven parameters; tokens where serving lives count three times."""
    return forms.fit_gemm([*rows, *(row for row in rows if 128 <= row.m <= 1024 for _ in range(2))], GPU)


def errors(rows: Sequence[Any], parameters: forms.Array, low: int, high: int) -> str:
    """Median, median absolute and P90 absolute, %."""
    some = [row for row in rows if low <= row.m <= high]
    off = 100 * (forms.gemm_seconds(some, parameters, GPU) / np.array([row.seconds for row in some]) - 1)
    return f"{len(some):4} rows {np.median(off):+6.1f} {np.median(abs(off)):5.1f} {np.percentile(abs(off), 90):5.1f}"


def main() -> None:
    """Print both."""
    plain = serving.build_device
    for source in SOURCES[1:]:
        rows = rows_of(source)
        trained = set(sorted({row.m for row in rows})[::2])
        half, left = weighted([row for row in rows if row.m in trained]), [row for row in rows if row.m not in trained]
        for low, high in RANGES:
            print(f"{source}, left out, {low}-{high} tokens: {errors(left, half, low, high)}")
            for other in SOURCES:
                if other != source:
                    print(f"    against {other}: {errors(rows_of(other), half, low, high)}")
        found = weighted(rows)

        def changed(point: serving_points.Point, host_gap_s: float = 0.0, found: forms.Array = found) -> DeviceModel:
            device = plain(point, host_gap_s)
            tiles = tuple((m, n, float(share)) for (m, n), share in zip(forms.TILES, found, strict=False))
            coefficients = dataclasses.replace(device.coefficients, gemm_tiles=tiles, gemm_bandwidth=float(found[4]),
                                               gemm_overhead_s=float(found[5]), gemm_block_overhead_s=float(found[6]))
            return DeviceModel(device.model, device.gpu, coefficients, tensor_parallel=point.tensor_parallel)

        for point in serving_points.shipped():
            if point.gpu == "a100-80gb" or (point.gpu == "a100-40gb" and point.prompt_tokens in (256, 1024)):
                before = serving.simulate_point(point)
                serving.build_device = changed
                after = serving.simulate_point(point)
                serving.build_device = plain
                moved = ", ".join(f"{m} {100 * (before[m] / x - 1):+.1f} -> {100 * (after[m] / x - 1):+.1f} %"
                                  for m, x in point.measured.items())
                print(f"{source}: {point.name}: {moved}", flush=True)


if __name__ == "__main__":
    main()
