"""A recorded run of a real engine: what was measured, and the statistics that both sides are compared in.

Definitions, for both sides: TTFT = first token - queued, TPOT = (last - first token) / max(1, output - 1), latency = last
token - queued; percentiles as ``np.percentile``. ``queued`` is when the engine noticed the request: at the end of a step, or
at once when idle. So a simulation is fed the times at which clients sent requests, and takes its own ``queued``; the recorded
one is part of the outcome and would tell it when the real steps ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.config import KV_BLOCK_TOKENS
from bullet.devices import PROFILES
from bullet.devices.table import FILE, KernelTables, TableDevice, check_tables, read_tables
from bullet.devices.table_skew import FILE as SKEW_FILE
from bullet.devices.table_skew import DecodeSkew, read_skew
from bullet.door import read_object, reason, typed
from bullet.errors import ConfigError, ProfileError
from bullet.parquet import read_table
from bullet.state.sharing import SharedPrefixes

Array = NDArray[np.float64]
METRICS = ("ttft", "tpot", "latency")
STATISTICS: Mapping[str, Callable[[Array], Any]] = {
    "mean": np.mean, **{f"p{q}": functools.partial(np.percentile, q=q) for q in (50, 90, 95, 99)}}
NAMES = tuple(f"{metric}_{statistic}" for metric in METRICS for statistic in STATISTICS)
"""The 15 statistics."""
TARGETS = {"rtx4090": ("rtx4090", "llama-3.1-8b")}
"""Validation target -> (GPU, model) whose profile holds a recorded run."""


@dataclass(frozen=True)
class Served:
    """When requests were noticed and answered. Times in seconds from the first request's; arrays over requests, in order of
    arrival."""

    queued_s: Array
    first_s: Array
    last_s: Array
    output_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.queued_s)

    def per_request(self) -> dict[str, Array]:
        """TTFT, TPOT and latency of each request, seconds."""
        decodes = np.maximum(1, self.output_tokens - 1)
        return {"ttft": self.first_s - self.queued_s, "tpot": (self.last_s - self.first_s) / decodes,
                "latency": self.last_s - self.queued_s}

    def statistics(self, first: int = 0) -> dict[str, float]:
        """The 15 by name, seconds, from request ``first`` on."""
        values = self.per_request()
        return {f"{m}_{s}": float(of(values[m][first:])) for m in METRICS for s, of in STATISTICS.items()}


@dataclass(frozen=True)
class Recorded(Served):
    """One run of a real engine. ``sent_s``: by the client, on its clock (which differs from the engine's by a millisecond or
    two)."""

    target: str
    gpu: str
    model: str
    source: str
    sent_s: Array
    prompt_tokens: NDArray[np.int64]
    shared: SharedPrefixes
    settings: Mapping[str, Any]
    peer: Mapping[str, Mapping[str, float]]
    series: Mapping[str, Array]
    tables: KernelTables
    skew: DecodeSkew


@dataclass
class _Series:
    t: list[float]
    running: list[float]
    waiting: list[float]


@dataclass
class _Hardware:
    device_name: str


@dataclass
class _Cache:
    num_gpu_blocks: int


@dataclass
class _Arguments:
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass
class _Settings:
    vllm_version: str
    hardware: _Hardware
    kv_cache: _Cache
    engine_kwargs: _Arguments


@dataclass
class _Peer:
    peer_simulated_ms: float
    measured_ms: float


@dataclass
class _Run:
    """What is read of recorded_run.json, as its publisher writes it."""

    repository: str
    commit: str
    licence: str
    timeseries: _Series
    engine_settings: _Settings
    peer_simulator: dict[str, _Peer]


def load_recorded(target: str, data: Path | None = None) -> Recorded:
    """A recorded run with its kernel tables, from the shipped profile or a folder like it."""
    if target not in TARGETS:
        raise ConfigError(f"unknown validation target {target!r}: choose one of {', '.join(TARGETS)}, serving")
    gpu, model = TARGETS[target]
    folder = PROFILES / gpu / model if data is None else data
    path = folder / "recorded_requests.parquet"
    table, _ = read_table(path, "a recorded run")
    try:
        first, last, queued, sent = (np.asarray(table[n].to_numpy(zero_copy_only=False), dtype=float) for n in (
            "first_token_s", "last_token_s", "queued_s", "client_arrival_s"))
        prompts, outputs = (np.array(table[n].to_pylist(), dtype=np.int64) for n in ("prompt_tokens", "output_tokens"))
        donors, blocks = (np.array([-1 if n is None else n for n in table[name].to_pylist()], dtype=np.int64).tolist()
                          for name in ("prefix_donor", "prefix_blocks"))
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise ProfileError(f"{path}: cannot be read as a recorded run ({reason(exc)})") from None
    if len(queued) < 2:
        raise ProfileError(f"{path}: {len(queued)} requests: needs 2 or more")
    ordered = np.append(True, np.diff(sent) >= 0)
    wrong = np.flatnonzero(~((queued <= first) & (first <= last) & np.isfinite(sent) & ordered & (prompts > 0) & (outputs > 0)))
    if len(wrong):
        raise ProfileError(f"{path}: row {wrong[0]}: needs requests in order of client_arrival_s, with queued <= first token <= "
                           "last token and positive lengths")
    shared = {}
    for i, (donor, count) in enumerate(zip(donors, blocks, strict=True)):
        if donor < 0 and table["prefix_donor"][i].as_py() is None:
            continue
        if not (0 <= donor < i and 0 < count * KV_BLOCK_TOKENS <= min(prompts[i], prompts[donor])):
            raise ProfileError(f"{path}: row {i}: prefix_donor = {donor}, prefix_blocks = {table['prefix_blocks'][i]}: must be "
                               f"an earlier row, and full blocks of {KV_BLOCK_TOKENS} tokens that both prompts have")
        shared[i] = (int(donor), int(count))
    path = folder / "recorded_run.json"
    raw = read_object(path, ProfileError, "a recorded run")
    run = typed(raw, _Run, path, ProfileError, others=True)
    absent = [name for name in NAMES if name not in run.peer_simulator]
    if absent:
        raise ProfileError(f"{path}: peer_simulator.{absent[0]} is missing")
    series = {name: np.array(getattr(run.timeseries, name)) for name in ("t", "running", "waiting")}
    settings, peer = raw["engine_settings"], raw["peer_simulator"]
    source = f"{run.repository} {run.commit[:12]}, {run.licence}"
    if len({len(column) for column in series.values()}) != 1 or not len(series["t"]):
        raise ProfileError(f"{path}: timeseries: t, running and waiting must be as long as each other, 1 or more")
    if last.max() > 2 * series["t"][-1] + 60:
        raise ProfileError(f"{path}: the time series ends at {series['t'][-1]:g} s, requests at {last.max():g} s: another unit?")
    tables = read_tables(folder / FILE)
    check_tables(tables, get_model(model), get_gpu(gpu), str(folder / FILE))
    skew = read_skew(folder / SKEW_FILE, TableDevice(get_model(model), get_gpu(gpu), tables))
    return Recorded(queued, first, last, outputs, target, gpu, model, source, sent, prompts, shared, settings, peer, series,
                    tables, skew)
