"""One run of many, in whichever process: its figures, and nothing else kept."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from bullet.config import DeviceConfig, RunConfig, WorkloadConfig
from bullet.devices.base import Device
from bullet.devices.load import load_device
from bullet.results import metrics
from bullet.sweeps.steady import saturation_figures, steady_figures
from bullet.workload import Workload, load_workload


@lru_cache(maxsize=4)
def device_of(config: DeviceConfig) -> Device:
    return load_device(config)


@lru_cache(maxsize=4)
def workload_of(config: WorkloadConfig, seed: int) -> Workload:
    return load_workload(config, seed)


def flat(figures: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures by dotted names; counts by reason, whose names are anybody's, as one string of JSON."""
    rows: dict[str, Any] = {}
    for name, value in figures.items():
        if name.endswith("_by_reason"):
            rows[prefix + name] = json.dumps(value, sort_keys=True)
        elif isinstance(value, Mapping):
            rows |= flat(value, f"{prefix}{name}.")
        else:
            rows[prefix + name] = value
    return rows


def measure(config: RunConfig) -> tuple[dict[str, Any], float]:
    """Every figure of summary.json (nested ones by dotted names), ``steady.*`` and ``saturation.*``; and the seconds it took."""
    from bullet.sim.run import simulate

    started = time.perf_counter()
    outcome = simulate(config, workload=workload_of(config.workload, config.seed), device=device_of(config.device))
    figures = flat(metrics.summarise(outcome)) | steady_figures(outcome.requests, outcome.tpot_slo_s) | saturation_figures(
        outcome.requests)
    return figures, time.perf_counter() - started
