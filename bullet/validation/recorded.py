"""Simulated against measured: a recorded run of a real engine, replayed by the ordinary simulator.

Everything here is either *measured* (the recorded run) or *simulated* (ours, and the peer simulator's published figures), and
every table says which. Kernel times are measured tables, the scheduler is what the engine does, the host costs nothing. Two
lines are given:

- **tables alone**: nothing is fitted;
- **in full**: with the publisher's own times of unequal contexts (:mod:`bullet.devices.table_skew`) and one factor for
  CUDA graphs and compilation, which the tables were measured without. The factor is what makes the mean TPOT of the first 30
  requests, in the run with arrivals as sent, the measured one (:func:`calibrate`). So all other requests are out of sample.

Definitions, for both sides: TTFT = first token - queued, TPOT = (last - first token) / max(1, output - 1), latency = last
token - queued; percentiles as ``np.percentile``. ``queued`` is when the engine noticed the request: at the end of a step, or
at once when idle. So the simulation is fed the times at which clients sent requests, and takes its own ``queued``; the recorded
one is part of the outcome and would tell it when the real steps ended.

A system that runs with a full KV cache is chaotic: a request that arrives milliseconds later shifts preemptions, and they
shift everything after. So one replay's errors are luck within some per cent. What is judged is the mean of each statistic
over replays whose arrivals are moved by up to 20 ms each (seeds 0 .. 7, fixed before the first run), and its spread.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.config import KV_BLOCK_TOKENS, RunConfig, load_run_config
from bullet.devices.coefficients import PROFILES
from bullet.devices.table import FILE, KernelTables, TableDevice, check_tables, read_tables
from bullet.devices.table_skew import FILE as SKEW_FILE
from bullet.devices.table_skew import LEAST, MOST, DecodeSkew, SkewedTableDevice, read_skew
from bullet.errors import ConfigError, ProfileError
from bullet.state import HybridStep
from bullet.state.prefix import PagedState, SharedPrefixes
from bullet.units import MILLI
from bullet.workload import Workload, stream

Array = NDArray[np.float64]
METRICS = ("ttft", "tpot", "latency")
STATISTICS: Mapping[str, Callable[[Array], Any]] = {
    "mean": np.mean, **{f"p{q}": functools.partial(np.percentile, q=q) for q in (50, 90, 95, 99)}}
NAMES = tuple(f"{metric}_{statistic}" for metric in METRICS for statistic in STATISTICS)
"""The 15 statistics."""
JITTER_S = 20 * MILLI
JITTER_SEEDS = tuple(range(8))
LEFT_OUT = 30
"""The first requests: the graph factor comes from them alone, and statistics are also given without them."""
OTHER_CHOICES = (60, None)
"""What else the factor could be taken from, printed beside it and used for nothing (None: all, which is circular)."""
CAPTURED_TOKENS = 512
"""vLLM captures CUDA graphs for steps of up to twice max_num_seqs tokens, and at most so many (vllm/config/vllm.py)."""
PRECISION = 1e-4
"""Of the graph factor: how near its requests' mean TPOT comes, or how narrow a jump of it is bracketed."""
MOST_RUNS = 25
"""For one factor: halving the widest bracket to the precision takes some 14."""
TARGETS = {"rtx4090": ("rtx4090", "llama-3.1-8b")}
"""Validation target -> (GPU, model) whose profile holds a recorded run."""
NULL_BLOCKS = 1
"""Blocks that the engine reserves as its null block."""


# ------------------------------------------------------------------------------------------- what was measured


@dataclass(frozen=True)
class Recorded:
    """One run of a real engine. Times in seconds from the first request's; arrays over requests, in order of arrival.

    ``sent_s``: by the client, on its clock (which differs from the engine's by a millisecond or two).
    """

    target: str
    gpu: str
    model: str
    source: str
    sent_s: Array
    queued_s: Array
    first_s: Array
    last_s: Array
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    shared: SharedPrefixes
    settings: Mapping[str, Any]
    peer: Mapping[str, Mapping[str, float]]
    series: Mapping[str, Array]
    tables: KernelTables
    skew: DecodeSkew

    def __len__(self) -> int:
        return len(self.queued_s)

    @property
    def statistics(self) -> dict[str, float]:
        """The 15, seconds."""
        return statistics(self.queued_s, self.first_s, self.last_s, self.output_tokens)


def per_request(queued_s: Array, first_s: Array, last_s: Array, output_tokens: NDArray[np.int64]) -> dict[str, Array]:
    """TTFT, TPOT and latency of each request, seconds."""
    return {"ttft": first_s - queued_s, "tpot": (last_s - first_s) / np.maximum(1, output_tokens - 1),
            "latency": last_s - queued_s}


def statistics(queued_s: Array, first_s: Array, last_s: Array, output_tokens: NDArray[np.int64]) -> dict[str, float]:
    """The 15 statistics by name, seconds."""
    values = per_request(queued_s, first_s, last_s, output_tokens)
    return {f"{m}_{s}": float(of(values[m])) for m in METRICS for s, of in STATISTICS.items()}


def load_recorded(target: str, data: Path | None = None) -> Recorded:
    """A recorded run with its kernel tables, from the shipped profile or a folder like it."""
    if target not in TARGETS:
        raise ConfigError(f"unknown validation target {target!r}: choose one of {', '.join(TARGETS)}, serving")
    gpu, model = TARGETS[target]
    folder = PROFILES / gpu / model if data is None else data
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "recorded_requests.parquet"
    try:
        table = pq.read_table(path)
        t = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
        first, last, queued, sent = (np.asarray(t[n], dtype=float) for n in (
            "first_token_s", "last_token_s", "queued_s", "client_arrival_s"))
        prompts, outputs = (np.array(table[n].to_pylist(), dtype=np.int64) for n in ("prompt_tokens", "output_tokens"))
        donors, blocks = (table[name].to_pylist() for name in ("prefix_donor", "prefix_blocks"))
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as exc:
        raise ProfileError(f"{path}: cannot be read as a recorded run ({str(exc).splitlines()[0]})") from None
    if len(queued) < 2:
        raise ProfileError(f"{path}: {len(queued)} requests: needs 2 or more")
    ordered = np.append(True, np.diff(sent) >= 0)
    wrong = np.flatnonzero(~((queued <= first) & (first <= last) & np.isfinite(sent) & ordered & (prompts > 0) & (outputs > 0)))
    if len(wrong):
        raise ProfileError(f"{path}: row {wrong[0]}: needs requests in order of client_arrival_s, with queued <= first token <= "
                           "last token and positive lengths")
    shared = {}
    for i, (donor, count) in enumerate(zip(donors, blocks, strict=True)):
        if donor is None:
            continue
        if count is None or not (0 <= donor < i and 0 < count * KV_BLOCK_TOKENS <= min(prompts[i], prompts[donor])):
            raise ProfileError(f"{path}: row {i}: prefix_donor = {donor}, prefix_blocks = {count}: must be an earlier row, and "
                               f"full blocks of {KV_BLOCK_TOKENS} tokens that both prompts have")
        shared[i] = (int(donor), int(count))
    path = folder / "recorded_run.json"
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        series = {name: np.array(run["timeseries"][name], dtype=float) for name in ("t", "running", "waiting")}
        settings, peer = run["engine_settings"], run["peer_simulator"]
        source = f"{run['repository']} {run['commit'][:12]}, {run['licence']}"
        # Read here so that a file without them is refused here.
        _ = [float(peer[name][key]) for name in NAMES for key in ("peer_simulated_ms", "measured_ms")]
        _ = [settings["vllm_version"], settings["hardware"]["device_name"], int(settings["kv_cache"]["num_gpu_blocks"]),
             *(int(settings["engine_kwargs"][key]) for key in ("max_num_batched_tokens", "max_num_seqs"))]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ProfileError(f"{path}: cannot be read as a recorded run ({exc!r})") from None
    if len({len(column) for column in series.values()}) != 1 or not len(series["t"]):
        raise ProfileError(f"{path}: timeseries: t, running and waiting must be as long as each other, 1 or more")
    if last.max() > 2 * series["t"][-1] + 60:
        raise ProfileError(f"{path}: the time series ends at {series['t'][-1]:g} s, requests at {last.max():g} s: another unit?")
    tables = read_tables(folder / FILE)
    check_tables(tables, get_model(model), get_gpu(gpu), str(folder / FILE))
    skew = read_skew(folder / SKEW_FILE, TableDevice(get_model(model), get_gpu(gpu), tables))
    return Recorded(target, gpu, model, source, sent, queued, first, last, prompts, outputs, shared, settings, peer, series,
                    tables, skew)


# ------------------------------------------------------------------------------------------- what is simulated


@dataclass(frozen=True)
class Scenario:
    """How the engine is modelled. The defaults are the engine as recorded, on the tables alone; a variant leaves out or changes
    one thing.

    ``skew``: decode batches priced by their longest context as well. ``graph_factor``: on steps that the engine replays a
    CUDA graph for.

    ``kv_scale``: KV blocks over those recorded. ``tables``: a change to the kernel tables. ``share``: which requests share
    prefixes with others (off: each finds its own blocks only). ``host_gap_s``: exposed host time of each step.
    ``arrivals``: ``sent`` by the client, or ``queued`` as the real engine recorded it.
    """

    name: str = "as recorded"
    budget_tokens: int | None = None
    kv_scale: float = 1.0
    prefix_cache: bool = True
    share: bool = True
    admission: str = "check"
    resume: str = "front"
    steps_in_flight: int = 2
    host_gap_s: float = 0.0
    arrivals: str = "sent"
    skew: bool = False
    graph_factor: float = 1.0
    tables: Callable[[KernelTables], KernelTables] = field(default=lambda tables: tables)


@dataclass(frozen=True)
class Replay:
    """One simulated run. Arrays by request, in the recorded order; ``series``: t, running, waiting at each step.

    ``preempted``: how often each request was; ``step_ends_s``: when each step ended.
    """

    queued_s: Array
    first_s: Array
    last_s: Array
    output_tokens: NDArray[np.int64]
    preemptions: int
    steps: int
    recomputed_tokens: int
    series: Mapping[str, Array]
    device_source: str
    preempted: NDArray[np.int64]
    step_ends_s: Array

    def statistics(self, first: int = 0) -> dict[str, float]:
        """The 15, from request ``first`` on."""
        return statistics(self.queued_s[first:], self.first_s[first:], self.last_s[first:], self.output_tokens[first:])


def jittered(arrival_s: Array, seed: int | None, jitter_s: float = JITTER_S) -> Array:
    """Arrival times, each moved by up to ``jitter_s`` either way, not before 0; as they are for ``None``."""
    if seed is None:
        return arrival_s
    moved = arrival_s + stream(seed, "arrival jitter", 0).uniform(-jitter_s, jitter_s, len(arrival_s))
    return np.maximum(0.0, moved)


def run_config(recorded: Recorded, scenario: Scenario) -> RunConfig:
    """The ordinary run configuration of a scenario."""
    engine = recorded.settings["engine_kwargs"]
    blocks = max(1, round((recorded.settings["kv_cache"]["num_gpu_blocks"] - NULL_BLOCKS) * scenario.kv_scale))
    budget = scenario.budget_tokens or engine["max_num_batched_tokens"]
    return load_run_config(None, {
        "workload.trace": f"{recorded.target} recorded run", "workload.arrivals": "recorded", "workload.num_requests": None,
        "device.gpu": recorded.gpu, "device.model": recorded.model, "device.timing": "table",
        "device.kv_tokens": blocks * KV_BLOCK_TOKENS, "policy.name": f"vllm-{budget}",
        "policy.options": {"max_num_seqs": engine["max_num_seqs"], "prefix_cache": scenario.prefix_cache,
                           "admission": scenario.admission, "resume": scenario.resume,
                           "steps_in_flight": scenario.steps_in_flight}})


def graph_tokens(recorded: Recorded) -> int:
    """The largest step that the recorded engine captured a CUDA graph for, tokens."""
    engine = recorded.settings["engine_kwargs"]
    return min(2 * int(engine["max_num_seqs"]), CAPTURED_TOKENS, int(engine["max_num_batched_tokens"]))


def _device(recorded: Recorded, scenario: Scenario) -> TableDevice:
    model, gpu, tables = get_model(recorded.model), get_gpu(recorded.gpu), scenario.tables(recorded.tables)
    # An attention that takes no time has no last block to wait for.
    skew = recorded.skew if scenario.skew and np.nanmax(tables.attention) > 0 else None
    if skew is None and scenario.graph_factor == 1.0:
        return TableDevice(model, gpu, tables, host_gap_s=scenario.host_gap_s)
    return SkewedTableDevice(model, gpu, tables, skew=skew, graph_factor=scenario.graph_factor,
                             graph_tokens=graph_tokens(recorded), host_gap_s=scenario.host_gap_s)


def replay(recorded: Recorded, scenario: Scenario | None = None, seed: int | None = None, *, jitter_s: float = JITTER_S,
           device: TableDevice | None = None, watch: Callable[[HybridStep], None] | None = None) -> Replay:
    """Simulate the recorded requests; ``seed`` moves their arrivals by up to ``jitter_s``.

    ``device``: another than the scenario's. ``watch``: is shown each step before it is launched.
    """
    from bullet.sim.run import simulate

    scenario = scenario or Scenario()
    at = jittered(recorded.sent_s if scenario.arrivals == "sent" else recorded.queued_s, seed, jitter_s)
    order = np.argsort(at, kind="stable")
    place = np.empty(len(order), dtype=np.int64)  # request -> its position by jittered arrival
    place[order] = np.arange(len(order))
    shared = {int(place[i]): (int(place[donor]), blocks) for i, (donor, blocks) in recorded.shared.items()}
    workload = Workload(recorded.target, recorded.source, at[order], recorded.prompt_tokens[order],
                        recorded.output_tokens[order], float(recorded.prompt_tokens.mean()),
                        shared if scenario.share else None)
    if device is None:
        device = _device(recorded, scenario)
    seen: list[tuple[float, int, int]] = []
    asked: list[float] = []
    recomputed = 0

    def record(kind: str, what: tuple[Any, ...]) -> None:
        nonlocal recomputed
        if kind != "next_step":
            return
        _, state, now, step = what
        asked.append(now)
        if not isinstance(step, HybridStep):
            return
        assert isinstance(state, PagedState)
        if watch is not None:
            watch(step)
        running = {request.id: request for request in state.running}
        admitted = [chunk for chunk in step.chunks if chunk.request_id not in running]
        if admitted:
            waiting = {request.id: request for request in state.queue}
            recomputed += sum(waiting[c.request_id].known_tokens - c.past_tokens for c in admitted
                              if waiting[c.request_id].preemptions)
        moved = len(admitted) - len(step.preempt)
        seen.append((now, len(running) + moved, len(state.queue) - moved))

    outcome = simulate(run_config(recorded, scenario), workload=workload, device=device, record=record)
    table = outcome.requests
    assert (table["status"] == "finished").all(), "a recorded request was refused"
    by_id = np.argsort(table["id"])[place]
    t, running, waiting = (np.array(column, dtype=float) for column in zip(*seen, strict=True))
    # The engine looks at what has arrived whenever it decides, and decides at once when idle.
    queued = np.array(asked)[np.searchsorted(asked, at)]
    return Replay(queued, table["first_token_s"][by_id], table["finish_s"][by_id], recorded.output_tokens,
                  int(table["preemptions"].sum()), len(outcome.steps), recomputed,
                  {"t": t, "running": running, "waiting": waiting}, device.source,
                  np.asarray(table["preemptions"])[by_id], np.asarray(outcome.steps["end_s"]))


# ------------------------------------------------------------------------------------------- ingredients


def _scaled(tables: KernelTables, dense: Mapping[str, float] | None = None, head: Mapping[str, float] | None = None,
            attention: float = 1.0) -> KernelTables:
    """Tables with the seconds of some kernels multiplied."""
    def curves(old: Mapping[str, Any], factors: Mapping[str, float] | None) -> dict[str, Any]:
        return {name: (counts, seconds * (factors or {}).get(name, 1.0)) for name, (counts, seconds) in old.items()}

    return dataclasses.replace(tables, dense=curves(tables.dense, dense), head=curves(tables.head, head),
                               attention=tables.attention * attention)


def _all_kernels(factor: float) -> Callable[[KernelTables], KernelTables]:
    return lambda t: _scaled(t, dict.fromkeys(t.dense, factor), dict.fromkeys(t.head, factor), factor)


def _apart(tables: KernelTables) -> KernelTables:
    """Attention of a mixed batch as prefill alone plus decode alone."""
    grid = tables.attention
    alone = np.where(np.isnan(grid[:1, :1]), 0.0, grid[:1, :1])  # decodes, no prefill
    prefill = grid[:, :, :1, :1]
    mixed = prefill + alone
    mixed[0] = grid[0]
    mixed[:, :, :1] = grid[:, :, :1]
    return dataclasses.replace(tables, attention=np.where(np.isnan(grid), np.nan, mixed))


INGREDIENTS: tuple[Scenario, ...] = (
    Scenario("KV blocks -5 %", kv_scale=0.95),
    Scenario("KV blocks +5 %", kv_scale=1.05),
    Scenario("KV blocks x 2", kv_scale=2.0),
    Scenario("KV blocks without limit", kv_scale=100.0),
    Scenario("preempted requests resume at the back", resume="back"),
    Scenario("no prefix cache", prefix_cache=False),
    Scenario("prefix cache, own blocks only", share=False),
    Scenario("admission looks at the first chunk only", admission="chunk"),
    Scenario("admission takes a prompt's blocks at once", admission="reserve"),
    Scenario("one step in flight", steps_in_flight=1),
    Scenario("budget 512 tokens", budget_tokens=512),
    Scenario("no LM head, no sampler", tables=lambda t: _scaled(t, head=dict.fromkeys(t.head, 0.0))),
    Scenario("no norms, no activation", tables=lambda t: _scaled(
        t, dict.fromkeys(("layernorm", "final_layernorm", "act_fn"), 0.0))),
    Scenario("no attention", tables=lambda t: _scaled(t, attention=0.0)),
    Scenario("mixed attention = prefill alone + decode alone", tables=_apart),
    Scenario("host gap of 0.25 ms a step", host_gap_s=0.25 * MILLI),
    Scenario("host gap of 0.5 ms a step", host_gap_s=0.5 * MILLI),
    Scenario("host gap of 1 ms a step", host_gap_s=1.0 * MILLI),
    Scenario("arrivals as the real engine noticed them", arrivals="queued"),
    Scenario("kernel times -1 %", tables=_all_kernels(0.99)),
    Scenario("kernel times +1 %", tables=_all_kernels(1.01)),
)
"""One thing left out or changed at a time."""


# ------------------------------------------------------------------------------------------- the graph factor


@dataclass(frozen=True)
class Calibration:
    """A graph factor and what it rests on: the first ``requests``, in ``runs`` runs. ``standard_error``: of the factor, from the
    scatter of those requests' TPOT about the simulated ones. ``one``: the last run, with a factor within the precision."""

    factor: float
    requests: int
    standard_error: float
    runs: int
    one: Replay


def calibrate(recorded: Recorded, requests: int = LEFT_OUT, *, skew: bool = True) -> Calibration:
    """The factor on graphed steps with which the simulated mean TPOT of the first ``requests`` is the measured one.

    One run with arrivals as sent for each try, by false position (Illinois), so the same every time. If the mean jumps over
    the measured one (some request is preempted or is not), the side of the jump that is nearer.
    """
    if not 2 <= requests <= len(recorded):
        raise ConfigError(f"a graph factor from {requests} requests: must be 2 to {len(recorded)}")
    real = per_request(recorded.queued_s, recorded.first_s, recorded.last_s, recorded.output_tokens)["tpot"][:requests]
    tried: list[tuple[float, float, Replay]] = []  # factor, mean TPOT over the measured one less 1, run

    def off(factor: float) -> float:
        run = replay(recorded, Scenario("calibration", skew=skew, graph_factor=factor))
        ours = per_request(run.queued_s, run.first_s, run.last_s, run.output_tokens)["tpot"][:requests]
        tried.append((factor, float(ours.mean() / real.mean() - 1), run))
        return tried[-1][1]

    low = high = 1.0
    at_low = at_high = off(1.0)
    while at_low > 0 or at_high < 0:  # on, past where it would be if TPOT went with the factor
        if low <= LEAST or high >= MOST:
            raise ProfileError(f"{recorded.target}: the first {requests} requests ask for a graph factor beyond {LEAST} to "
                               f"{MOST}: are tables and run of one engine?")
        if at_low > 0:
            high, at_high = low, at_low
            low = max(LEAST, low / (1 + at_low) ** 1.5)
            at_low = off(low)
        else:
            low, at_low = high, at_high
            high = min(MOST, high / (1 + at_high) ** 1.5)
            at_high = off(high)
    side = 0
    while min(abs(t[1]) for t in tried) > PRECISION and high - low > PRECISION and len(tried) < MOST_RUNS:
        share = at_low / (at_low - at_high)
        factor = low + min(max(share, 0.05), 0.95) * (high - low)
        here = off(factor)
        if here < 0:
            low, at_low = factor, here
            at_high /= 2 if side < 0 else 1
        else:
            high, at_high = factor, here
            at_low /= 2 if side > 0 else 1
        side = -1 if here < 0 else 1
    factor, _, run = min(tried, key=lambda t: abs(t[1]))
    ours = per_request(run.queued_s, run.first_s, run.last_s, run.output_tokens)["tpot"][:requests]
    scatter = np.std(real - ours, ddof=1) / requests ** 0.5 / ours.mean()
    return Calibration(factor, requests, float(factor * scatter), len(tried), run)


# ------------------------------------------------------------------------------------------- comparing


def errors(simulated: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Relative errors, signed."""
    return {name: simulated[name] / measured[name] - 1 for name in NAMES}


def worst(found: Mapping[str, float]) -> tuple[str, float]:
    """The statistic with the largest error, and the error."""
    name = max(found, key=lambda n: abs(found[n]))
    return name, found[name]


def mean_absolute(found: Mapping[str, float]) -> float:
    """Mean of the absolute errors."""
    return float(np.mean([abs(e) for e in found.values()]))


def average(replays: Sequence[Replay], first: int = 0) -> dict[str, float]:
    """Mean of each statistic over replays, from request ``first`` on."""
    each = [r.statistics(first) for r in replays]
    return {name: float(np.mean([s[name] for s in each])) for name in NAMES}


def series_errors(recorded: Recorded, run: Replay) -> dict[str, float]:
    """Mean absolute difference of the running and waiting counts at the recorded seconds, and the recorded means."""
    found: dict[str, float] = {}
    at = np.searchsorted(run.series["t"], recorded.series["t"], side="right") - 1
    done = recorded.series["t"] > run.last_s.max()
    for name in ("running", "waiting"):
        ours = np.where(done | (at < 0), 0.0, run.series[name][np.maximum(at, 0)])
        found[f"{name}_mean_measured"] = float(recorded.series[name].mean())
        found[f"{name}_mean_simulated"] = float(ours.mean())
        found[f"{name}_mean_absolute_difference"] = float(np.abs(ours - recorded.series[name]).mean())
    return found


def request_errors(recorded: Recorded, run: Replay) -> dict[str, Array]:
    """Signed relative error of each request's TTFT, TPOT and latency."""
    ours = per_request(run.queued_s, run.first_s, run.last_s, run.output_tokens)
    real = per_request(recorded.queued_s, recorded.first_s, recorded.last_s, recorded.output_tokens)
    return {metric: ours[metric] / real[metric] - 1 for metric in METRICS}


# ------------------------------------------------------------------------------------------- the whole of it


@dataclass(frozen=True)
class Validation:
    """``one``: the run with arrivals as sent; ``moved``: those with moved arrivals, both in full; ``summary``: all figures."""

    recorded: Recorded
    one: Replay
    moved: Sequence[Replay]
    summary: Mapping[str, Any]


def runs_of(seeds: int, ingredients: Sequence[Scenario]) -> int:
    """How often :func:`validate` reports progress."""
    return 1 + len(OTHER_CHOICES) + 2 * (1 + seeds) + (seeds * (3 + len(ingredients)) if ingredients else 0)


def validate(recorded: Recorded, *, seeds: Sequence[int] = JITTER_SEEDS, ingredients: Sequence[Scenario] = (),
             progress: Callable[[int], None] | None = None) -> Validation:
    """Take the graph factor; replay once, and once per seed with moved arrivals, in full and on the tables alone; then each
    ingredient's variant with the same seeds: in full but for that."""
    def run(scenario: Scenario, seed: int | None) -> Replay:
        found = replay(recorded, scenario, seed)
        if progress is not None:
            progress(1)
        return found

    def factor_of(requests: int | None) -> Calibration:
        found = calibrate(recorded, requests or len(recorded))
        if progress is not None:
            progress(1)
        return found

    graphs = factor_of(LEFT_OUT)
    others = [(n, factor_of(n)) for n in OTHER_CHOICES if n is None or n < len(recorded)]
    plain, engine = Scenario(), Scenario("in full", skew=True, graph_factor=graphs.factor)
    alone = run(plain, None), [run(plain, seed) for seed in seeds]
    one, moved = run(engine, None), [run(engine, seed) for seed in seeds]
    if ingredients:
        ingredients = (dataclasses.replace(engine, name="without skew", skew=False),
                       dataclasses.replace(engine, name="without the graph factor", graph_factor=1.0),
                       dataclasses.replace(plain, name="without both: tables alone"),
                       *(dataclasses.replace(s, skew=True, graph_factor=graphs.factor) for s in ingredients))
    variants = []
    for scenario in ingredients:
        try:
            variants.append(_variant(recorded, scenario.name, [run(scenario, seed) for seed in seeds]))
        except ProfileError as exc:
            variants.append({"name": scenario.name, "refused": str(exc)})
    off = request_errors(recorded, one)
    summary = {
        "target": recorded.target, "gpu": recorded.gpu, "model": recorded.model, "requests": len(recorded),
        "sources": {"measured": recorded.source, "simulated": one.device_source,
                    "peer": "simulated by LLMServingSim, as its authors publish it"},
        "policy": run_config(recorded, engine).policy.name, "policy_options": dict(run_config(recorded, engine).policy.options),
        "kv_blocks": run_config(recorded, engine).device.kv_tokens // KV_BLOCK_TOKENS,  # type: ignore[operator]
        "graph_factor": {
            "factor": graphs.factor, "from_first": LEFT_OUT, "standard_error": graphs.standard_error, "runs": graphs.runs,
            "up_to_tokens": graph_tokens(recorded),
            "other_choices": [{"from": "all, circular" if n is None else f"first {n}", "factor": c.factor,
                               "standard_error": c.standard_error} for n, c in others]},
        "host_overhead_s": 0.0, "jitter_s": JITTER_S, "jitter_seeds": list(seeds),
        "statistics": _comparison(recorded, one, moved, 0),
        f"statistics_without_first_{LEFT_OUT}": _comparison(recorded, one, moved, LEFT_OUT),
        "tables_alone": {"simulated": alone[0].device_source, "statistics": _comparison(recorded, *alone, 0),
                         f"statistics_without_first_{LEFT_OUT}": _comparison(recorded, *alone, LEFT_OUT)},
        "runs": [{"jitter_seed": seed, "steps": r.steps, "preemptions": r.preemptions, "recomputed_tokens": r.recomputed_tokens}
                 for seed, r in zip((None, *seeds), (one, *moved), strict=True)],
        "request_errors": {m: {"median_absolute": float(np.median(np.abs(e))), "p90_absolute": float(
            np.percentile(np.abs(e), 90)), "largest_absolute": float(np.abs(e).max())} for m, e in off.items()},
        "counts": series_errors(recorded, one),
        "ingredients": variants,
    }
    return Validation(recorded, one, moved, summary)


def _comparison(recorded: Recorded, one: Replay, moved: Sequence[Replay], first: int) -> dict[str, Any]:
    """Measured, one run, mean and spread over runs, errors; seconds and fractions."""
    real = statistics(recorded.queued_s[first:], recorded.first_s[first:], recorded.last_s[first:],
                      recorded.output_tokens[first:])
    single = one.statistics(first)
    found: dict[str, Any] = {"measured_s": real, "one_run_s": single, "one_run_error": errors(single, real)}
    sums = [("one_run", found["one_run_error"])]
    if moved:
        each = [r.statistics(first) for r in moved]
        found["mean_s"] = average(moved, first)
        found["mean_error"] = errors(found["mean_s"], real)
        found["spread_s"] = {n: float(np.std([s[n] for s in each], ddof=min(1, len(each) - 1))) for n in NAMES}
        found["largest_error_of_each"] = [dict(zip(("statistic", "error"), worst(errors(s, real)), strict=True)) for s in each]
        found["mean_absolute_error_of_each"] = [mean_absolute(errors(s, real)) for s in each]
        sums.append(("mean", found["mean_error"]))
    if not first:
        peer = {n: recorded.peer[n]["peer_simulated_ms"] / recorded.peer[n]["measured_ms"] - 1 for n in NAMES}
        found["peer_error"] = peer
        sums.append(("peer", peer))
    for name, error in sums:
        found[f"{name}_largest"] = dict(zip(("statistic", "error"), worst(error), strict=True))
        found[f"{name}_mean_absolute"] = mean_absolute(error)
    return found


def _variant(recorded: Recorded, name: str, runs: Sequence[Replay]) -> dict[str, Any]:
    error = errors(average(runs), recorded.statistics)
    statistic, largest = worst(error)
    return {"name": name, "largest_statistic": statistic, "largest_error": largest, "mean_absolute_error": mean_absolute(error),
            "errors": error, "preemptions": float(np.mean([r.preemptions for r in runs])),
            "recomputed_tokens": float(np.mean([r.recomputed_tokens for r in runs]))}


# ------------------------------------------------------------------------------------------- printing


def label(name: str) -> str:
    """``ttft_p50`` as it is printed."""
    metric, statistic = name.split("_")
    return f"{metric.upper() if metric != 'latency' else 'Latency'} {statistic if statistic == 'mean' else statistic.upper()}"


def table(v: Validation) -> str:
    """Everything in one page of text."""
    s = v.summary
    count = len(v.moved)
    settings = v.recorded.settings
    lines = [
        f"{s['target']}: {s['requests']} requests, {s['model']}, vLLM {settings['vllm_version']} on one "
        f"{settings['hardware']['device_name']}",
        f"measured:  {s['sources']['measured']}",
        f"simulated: {s['policy']} with " + ", ".join(f"{k}={x}" for k, x in s["policy_options"].items())
        + f", {s['kv_blocks']} KV blocks, host overhead 0",
        f"           device {s['sources']['simulated']}",
        f"peer:      {s['sources']['peer']}", "", *_factor_lines(s["graph_factor"])]
    without = f"statistics_without_first_{LEFT_OUT}"
    for title, found in (("IN FULL: tables, longest context as published, graph factor of the first 30 requests", s),
                         ("TABLES ALONE: nothing fitted", s["tables_alone"])):
        lines += ["", title, "", *_statistics_table(found["statistics"], count, f"all {s['requests']} requests"),
                  "", *_statistics_table(found[without], count, f"without the first {LEFT_OUT} requests")]
    lines += ["", "single requests, one run: absolute error of simulated against measured, %",
              f"  {'':<10}{'median':>8}{'P90':>8}{'largest':>9}"]
    for metric, e in s["request_errors"].items():
        name = label(f"{metric}_mean").split()[0]
        lines.append(f"  {name:<10}{e['median_absolute'] * 100:>8.2f}{e['p90_absolute'] * 100:>8.2f}"
                     f"{e['largest_absolute'] * 100:>9.1f}")
    counts = s["counts"]
    lines += ["", "requests at each recorded second, one run",
              f"  {'':<10}{'measured':>10}{'simulated':>11}{'mean |difference|':>19}"]
    for name in ("running", "waiting"):
        lines.append(f"  {name:<10}{counts[f'{name}_mean_measured']:>10.2f}{counts[f'{name}_mean_simulated']:>11.2f}"
                     f"{counts[f'{name}_mean_absolute_difference']:>19.2f}")
    runs = s["runs"]
    lines += ["", f"simulated, one run: {runs[0]['steps']:,} steps, {runs[0]['preemptions']} preemptions, "
                  f"{runs[0]['recomputed_tokens']:,} tokens computed again"]
    if s["ingredients"]:
        lines += ["", *_ingredients_table(s, count)]
    return "\n".join(lines) + "\n"


def _factor_lines(g: Mapping[str, Any]) -> list[str]:
    def text(factor: float, error: float) -> str:
        return f"{factor:.4f} (standard error {error:.4f})"

    others = "; ".join(f"{o['from']}: {text(o['factor'], o['standard_error'])}" for o in g["other_choices"])
    return [f"graph factor on steps of up to {g['up_to_tokens']} tokens: {text(g['factor'], g['standard_error'])}",
            f"  fitted: the mean TPOT of the first {g['from_first']} requests is then the measured one ({g['runs']} runs);",
            f"  so only the statistics without the first {g['from_first']} are out of sample",
            f"  from other requests, used for nothing: {others}"]


def _statistics_table(c: Mapping[str, Any], count: int, title: str) -> list[str]:
    peer = c.get("peer_error")
    heads = [f"{title:<34}", "measured", "simulated", *((f"mean of {count}", "spread") if count else ()), "one run",
             *((f"mean of {count}",) if count else ()), *(("peer",) if peer else ())]
    units = [" " * 34, "ms", "ms", *(("ms", "ms") if count else ()), "error %", *(("error %",) if count else ()),
             *(("error %",) if peer else ())]
    lines = ["".join(f"{x:>11}" for x in row) for row in (heads, units)]

    def errors_of(name: str) -> list[float]:
        return [c["one_run_error"][name], *([c["mean_error"][name]] if count else []), *([peer[name]] if peer else [])]

    for name in NAMES:
        values = [c["measured_s"][name], c["one_run_s"][name], *((c["mean_s"][name], c["spread_s"][name]) if count else ())]
        digits = 1 if name.startswith("tpot") else 0
        lines.append(f"  {label(name):<32}" + "".join(f"{x * 1e3:>11,.{digits}f}" for x in values)
                     + "".join(f"{x * 100:>+11.2f}" for x in errors_of(name)))
    for text, key in (("largest", "largest"), ("mean absolute", "mean_absolute")):
        found = [c[f"{who}_{key}"] for who in ("one_run", *(("mean",) if count else ()), *(("peer",) if peer else ()))]
        numbers = "".join(f"{x['error'] * 100:>+11.2f}" if key == "largest" else f"{x * 100:>11.2f}" for x in found)
        lines.append(f"  {text:<32}" + " " * (11 * (4 if count else 2)) + numbers)
    return lines


def _ingredients_table(s: Mapping[str, Any], count: int) -> list[str]:
    lines = [f"one thing left out or changed (simulated; error of the mean over {count} runs against measured, %)",
             f"  {'':<48}{'TTFT mean':>10}{'TPOT mean':>10}{'TPOT P90':>10}{'largest':>10}  {'of':<14}{'mean abs.':>9}"
             f"{'preempt.':>10}"]
    c = s["statistics"]
    whole = {"name": "in full", "errors": c["mean_error"], "largest_error": c["mean_largest"]["error"],
             "largest_statistic": c["mean_largest"]["statistic"], "mean_absolute_error": c["mean_mean_absolute"],
             "preemptions": float(np.mean([r["preemptions"] for r in s["runs"][1:]]))}
    for v in (whole, *s["ingredients"]):
        if "refused" in v:
            lines.append(f"  {v['name']:<48}not simulated: {v['refused']}")
            continue
        e = v["errors"]
        lines.append(f"  {v['name']:<48}" + "".join(f"{e[n] * 100:>+10.2f}" for n in ("ttft_mean", "tpot_mean", "tpot_p90"))
                     + f"{v['largest_error'] * 100:>+10.2f}  {label(v['largest_statistic']):<14}"
                     f"{v['mean_absolute_error'] * 100:>9.2f}{v['preemptions']:>10.0f}")
    return lines


def write(folder: Path, v: Validation) -> None:
    """validate.json, validate.txt, validate.png and the requests of the one run beside the recorded ones."""
    from bullet.files import write_json, write_text
    from bullet.results.plots import plot_validation, save

    write_json(folder / "validate.json", v.summary)
    write_text(folder / "validate.txt", table(v))
    r, one = v.recorded, v.one
    real = per_request(r.queued_s, r.first_s, r.last_s, r.output_tokens)
    ours = per_request(one.queued_s, one.first_s, one.last_s, one.output_tokens)
    rows = ["id,prompt_tokens,output_tokens," + ",".join(f"{who}_{m}_s" for m in METRICS for who in ("measured", "simulated"))]
    for i in range(len(r)):
        numbers = ",".join(f"{x[m][i]:.6f}" for m in METRICS for x in (real, ours))
        rows.append(f"{i},{r.prompt_tokens[i]},{r.output_tokens[i]},{numbers}")
    write_text(folder / "requests.csv", "\n".join(rows) + "\n")
    figure = plot_validation({"measured": real, "simulated": ours}, {"measured": r.series, "simulated": one.series},
                             f"{r.target}, {r.model}: measured and simulated (one run, in full)")
    save(figure, folder / "validate.png")
