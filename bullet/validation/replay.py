"""A recorded run replayed by the ordinary simulator: how the engine is modelled, and one thing left out at a time.

Kernel times are measured tables, the scheduler is what the engine does, the host costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.config import KV_BLOCK_TOKENS, RunConfig, load_run_config
from bullet.devices.table import KernelTables, TableDevice
from bullet.devices.table_skew import SkewedTableDevice
from bullet.state import HybridStep
from bullet.state.prefix import PagedState
from bullet.units import MILLI
from bullet.validation.recorded import Array, Recorded, Served
from bullet.workload import Workload, stream

JITTER_S = 20 * MILLI
JITTER_SEEDS = tuple(range(8))
CAPTURED_TOKENS = 512
"""vLLM captures CUDA graphs for steps of up to twice max_num_seqs tokens, and at most so many (vllm/config/vllm.py)."""
NULL_BLOCKS = 1
"""Blocks that the engine reserves as its null block."""


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
class Replay(Served):
    """One simulated run, requests in the recorded order; ``series``: t, running, waiting at each step.

    ``preempted``: how often each request was; ``step_ends_s``: when each step ended.
    """

    preemptions: int
    steps: int
    recomputed_tokens: int
    series: Mapping[str, Array]
    device_source: str
    preempted: NDArray[np.int64]
    step_ends_s: Array


def jittered(arrival_s: Array, seed: int | None, jitter_s: float = JITTER_S) -> Array:
    """Arrival times, each moved by up to ``jitter_s`` either way, not before 0; as they are for ``None``."""
    if seed is None:
        return arrival_s
    moved = arrival_s + stream(seed, "arrival jitter", 0).uniform(-jitter_s, jitter_s, len(arrival_s))
    return np.maximum(0.0, moved)


def run_config(recorded: Recorded, scenario: Scenario) -> RunConfig:
    """The ordinary run configuration of a scenario."""
    engine = recorded.settings["engine_kwargs"]
    blocks = max(1, round((recorded.kv_blocks - NULL_BLOCKS) * scenario.kv_scale))
    budget = scenario.budget_tokens or engine["max_num_batched_tokens"]
    return load_run_config(None, {
        "workload.trace": f"{recorded.target} recorded run", "workload.arrivals": "recorded", "workload.num_requests": None,
        "device.gpu": recorded.gpu, "device.model": recorded.model, "device.timing": "table",
        "device.tensor_parallel": recorded.tables.tensor_parallel,
        "device.kv_tokens": blocks * KV_BLOCK_TOKENS, "policy.name": f"vllm-{budget}",
        "policy.prefix_cache": "off",  # the engine's own option below decides
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
