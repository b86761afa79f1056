"""One simulated run: the configuration's device, policy and workload, on the driver that the policy asks for."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import numpy as np

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.config import KV_BLOCK_TOKENS, RunConfig, resolve_slo
from bullet.devices.base import Device
from bullet.devices.load import kv_capacity_tokens, load_device
from bullet.errors import ConfigError
from bullet.policies import build_policy
from bullet.policies.base import Policy
from bullet.results.columns import RunOutcome
from bullet.sim.driver import ListSink, Recorder, Simulation
from bullet.state import SplitTable
from bullet.workload import Workload, load_workload


def build_splits(config: RunConfig, num_sms: int) -> SplitTable:
    """The splits that the configured mechanism grants on this device."""
    return SplitTable.every(num_sms, config.device.partition_step_sms)


def simulate(config: RunConfig, *, workload: Workload | None = None, writer: Any = None,
             progress: Callable[[int], None] | None = None, policy: Policy | None = None,
             device: Device | None = None, record: Recorder | None = None) -> RunOutcome:
    """Run one configuration and return what happened.

    ``writer`` (:class:`bullet.results.RunWriter`) takes rows as they come; without one they stay in memory.
    ``workload``, ``device`` and ``policy`` override what the configuration names. Raises a
    :class:`~bullet.errors.BulletError` for the user's mistakes and :class:`~bullet.errors.NoProgressError` when stuck.
    """
    if workload is None:
        workload = load_workload(config.workload, config.seed)
    if device is None:
        device = load_device(config.device)
    slo = resolve_slo(config.slo, config.workload.trace, workload.mean_prompt_tokens)
    kv_tokens = config.device.kv_tokens
    if kv_tokens is None:
        kv_tokens = kv_capacity_tokens(device.model, device.gpu, config.device)
    config = dataclasses.replace(config, slo=slo, device=dataclasses.replace(config.device, kv_tokens=kv_tokens))
    kv_blocks = kv_tokens // KV_BLOCK_TOKENS
    if kv_blocks < 1:
        raise ConfigError(f"device.kv_tokens = {kv_tokens}: must hold at least one block of {KV_BLOCK_TOKENS} tokens")
    splits = build_splits(config, device.num_sms)
    if policy is None:
        policy = build_policy(config, get_model(config.device.model), get_gpu(config.device.gpu), splits, device)
    sink: Any = writer if writer is not None else ListSink()
    if writer is not None:
        writer.resolved(config, len(workload))
    kind = Simulation
    if getattr(policy, "paging", None) is not None:
        from bullet.sim.paged import PagedSimulation  # it builds on this module

        kind = PagedSimulation
    run = kind(config, workload, device, policy, splits, kv_blocks, sink, progress=progress, record=record)
    # Millions of small tuples and no reference cycles: the cyclic collector only costs time (a tenth of it).
    collecting = gc.isenabled()
    gc.disable()
    try:
        run.run()
        assert run.closed == len(run.arrivals), f"I1: {run.closed} of {len(run.arrivals)} requests closed"
        return _outcome(run, config, workload, sink)
    except BaseException:
        # Whatever stopped the run (Ctrl-C, a stuck policy, a bug): offered = finished + rejected + unfinished.
        run.close_unfinished()
        raise
    finally:
        if collecting:
            gc.enable()


def _outcome(run: Simulation, config: RunConfig, workload: Workload, sink: Any) -> RunOutcome:
    steps, requests = sink.tables()
    tpot_slo_s = config.slo.tpot_s
    assert tpot_slo_s is not None
    span_s = run.now_s - (run.arrivals[0] if run.arrivals else 0.0)
    held_sm_s = steps["sms"] * steps["actual_s"]
    held = {lane.name: float(held_sm_s[steps["lane"] == lane.name].sum()) for lane in run.lanes}
    return RunOutcome(
        config=config, system=config.policy.name, steps=steps, requests=requests,
        itl_s=np.array(run.itl_s), itl_counts=np.array(run.itl_counts), sm_seconds=run.gpu.sm_seconds(span_s, held),
        span_s=span_s, num_sms=run.gpu.num_sms,
        kv_blocks=run.state.kv.total_blocks, split_changes=run.split_changes, decisions=run.decisions,
        decision_wall_s=run.decision_wall_s, tpot_slo_s=tpot_slo_s,
        device={"gpu": config.device.gpu, "model": config.device.model, "source": run.device.source,
                "workload": workload.source, "queue_integral_s": run.queue_integral_s, "wait_sum_s": run.wait_sum_s,
                "kv_peak_blocks": run.state.kv.peak_blocks},
    )
