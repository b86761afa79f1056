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
from bullet.config import KV_BLOCK_TOKENS, DeviceConfig
from bullet.devices import PROFILES
from bullet.devices.load import kv_capacity_tokens, load_tables
from bullet.devices.table import KernelTables
from bullet.devices.table_skew import FILE as SKEW_FILE
from bullet.devices.table_skew import DecodeSkew, read_skew
from bullet.door import is_file, is_folder, read_object, reason, typed
from bullet.errors import ConfigError, ProfileError
from bullet.parquet import read_table
from bullet.profiles.importers.folder import named_gpu, named_model
from bullet.state.sharing import SharedPrefixes

Array = NDArray[np.float64]
METRICS = ("ttft", "tpot", "latency")
STATISTICS: Mapping[str, Callable[[Array], Any]] = {
    "mean": np.mean, **{f"p{q}": functools.partial(np.percentile, q=q) for q in (50, 90, 95, 99)}}
NAMES = tuple(f"{metric}_{statistic}" for metric in METRICS for statistic in STATISTICS)
"""The 15 statistics."""
RUN_FILE, REQUESTS_FILE = "recorded_run.json", "recorded_requests.parquet"


def shipped() -> dict[str, Path]:
    """Target -> the shipped profile that holds a recorded run: by its GPU, with the model where a GPU has several."""
    folders = sorted(path.parent for path in PROFILES.glob(f"*/*/{RUN_FILE}"))
    gpus = [folder.parent.name for folder in folders]
    return {gpu if gpus.count(gpu) == 1 else f"{gpu}/{folder.name}": folder for gpu, folder in zip(gpus, folders, strict=True)}


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
    skew: DecodeSkew | None
    kv_blocks: int = 0
    device_name: str = ""
    assumed: tuple[str, ...] = ()


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
    model: str = ""
    tensor_parallel_size: int = 1


@dataclass
class _Settings:
    vllm_version: str
    hardware: _Hardware | None
    kv_cache: _Cache | None
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
    peer_simulator: dict[str, _Peer] | None = None
    gpu: str = ""


def load_recorded(target: str, data: Path | None = None) -> Recorded:
    """A recorded run with its kernel tables: ``target`` names a shipped profile or is a folder laid out like one; ``data``: such
    a folder instead of the shipped one.

    The card is the one that the run names, or ``card.toml`` in the folder; the model likewise, or ``config.json``.
    """
    known = shipped()
    folder = data or known.get(target) or Path(target)
    if data is None and target not in known and not is_folder(folder, ProfileError):
        raise ConfigError(f"unknown validation target {target!r}: choose one of {', '.join(known)}, serving, or give a folder "
                          f"that holds {RUN_FILE}")
    path = folder / REQUESTS_FILE
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
    path = folder / RUN_FILE
    raw = read_object(path, ProfileError, "a recorded run")
    run = typed(raw, _Run, path, ProfileError, others=True)
    absent = [name for name in NAMES if run.peer_simulator is not None and name not in run.peer_simulator]
    if absent:
        raise ProfileError(f"{path}: peer_simulator.{absent[0]} is missing")
    series = {name: np.array(getattr(run.timeseries, name)) for name in ("t", "running", "waiting")}
    settings, peer = raw["engine_settings"], raw.get("peer_simulator") or {}
    source = f"{run.repository} {run.commit[:12]}, {run.licence}"
    if len({len(column) for column in series.values()}) != 1 or not len(series["t"]):
        raise ProfileError(f"{path}: timeseries: t, running and waiting must be as long as each other, 1 or more")
    if last.max() / 2 - 30 > series["t"][-1]:
        raise ProfileError(f"{path}: the time series ends at {series['t'][-1]:g} s, requests at {last.max():g} s: another unit?")
    engine, hardware = run.engine_settings.engine_kwargs, run.engine_settings.hardware
    named = run.gpu or (hardware.device_name if hardware is not None else "")
    card, config = folder / "card.toml", folder / "config.json"
    gpu = str(card) if is_file(card, ProfileError) else named_gpu(None, [named], path).name
    model = str(config) if is_file(config, ProfileError) else named_model(None, engine.model or None, path).name
    device = DeviceConfig(model=model, gpu=gpu, tensor_parallel=engine.tensor_parallel_size, timing=f"table:{folder}")
    table_device = load_tables(device, get_model(model), get_gpu(gpu), folder)
    skew = read_skew(folder / SKEW_FILE, table_device) if is_file(folder / SKEW_FILE, ProfileError) else None
    cache, assumed = run.engine_settings.kv_cache, []
    if cache is None:
        blocks = kv_capacity_tokens(get_model(model), get_gpu(gpu), device) // KV_BLOCK_TOKENS
        assumed.append(f"{blocks:,} KV blocks ({device.memory_utilization:g} of {get_gpu(gpu).mem_bytes / 2**30:.0f} GiB less "
                       f"weights and {device.reserve_bytes / 2**30:g} GiB)")
        assumed.append("prefix cache on and two steps in flight, as that engine's defaults are")
    return Recorded(queued, first, last, outputs, target if target in known else folder.name, gpu, model, source, sent, prompts,
                    shared, settings, peer, series, table_device.tables, skew,
                    kv_blocks=blocks if cache is None else cache.num_gpu_blocks, device_name=named, assumed=tuple(assumed))
