"""One simulated run: the configuration's device, policy and workload, on the driver that the policy asks for."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

from bullet.catalog.gpus import get_gpu
from bullet.config import KV_BLOCK_TOKENS, RunConfig, resolve_slo
from bullet.devices.base import Device
from bullet.devices.load import kv_capacity_tokens, load_device, served_model
from bullet.errors import ConfigError
from bullet.policies import build_policy, is_custom
from bullet.policies.base import Policy
from bullet.results.bookkeeping import Recorder
from bullet.results.columns import RunOutcome
from bullet.results.sink import ListSink, RowSink
from bullet.sim.driver import Simulation
from bullet.sim.paged import PagedSimulation
from bullet.state import SplitTable, kv_cache_of
from bullet.state.sharing import SharingKvCache, check_prefixes
from bullet.workload import Workload, load_workload


def wants_prefix_cache(config: RunConfig, workload: Workload, device: Device) -> bool:
    """Whether prompts are to share blocks; a :class:`ConfigError` where it is asked for and cannot be."""
    asked = config.policy.prefix_cache
    if device.model.window_layers:
        if asked == "on":
            raise ConfigError(f"policy.prefix_cache = 'on': not modelled for layers with a window, which {device.model.name} has")
        return False
    return asked == "on" or (asked == "auto" and bool(workload.shared_prefix))


def shares_prefixes(policy: Policy, config: RunConfig) -> bool:
    """Whether a policy takes cached tokens into account; all built-in ones do, unless their options say otherwise."""
    able = bool(getattr(policy, "shares_prefixes", False))
    if config.policy.prefix_cache == "on" and not able:
        raise ConfigError(f"policy.prefix_cache = 'on': policy {config.policy.name!r} does not share prefixes (shares_prefixes)")
    return able


def shares_blocks(config: RunConfig, workload: Workload, device: Device) -> bool:
    """Whether a run's policy will share the workload's prefixes, known before it is built; a user's policy is not asked."""
    given = config.policy.options.get("prefix_cache")
    return bool(given) if given is not None else (
        wants_prefix_cache(config, workload, device) and not is_custom(config.policy.name))


def resolved(config: RunConfig, workload: Workload, device: Device) -> RunConfig:
    """The configuration as it is run and stored: nothing is left to be found out."""
    slo, kv_tokens = resolve_slo(config.slo, config.workload.trace, workload.mean_prompt_tokens), config.device.kv_tokens
    if kv_tokens is None:
        kv_tokens = kv_capacity_tokens(device.model, device.gpu, config.device)
    return dataclasses.replace(config, slo=slo, device=dataclasses.replace(config.device, kv_tokens=kv_tokens))


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
    config = resolved(config, workload, device)
    sink: Any = writer if writer is not None else ListSink()
    if config.layout is None:
        run: Any = simulation(config, workload, device, sink, policy=policy, progress=progress, record=record)
    else:
        from bullet.sim.cluster import cluster_of

        if policy is not None or record is not None:
            raise ConfigError(f"cluster.layout = {config.layout!r}: a policy of its own object, or a record, is of one device")
        run = cluster_of(config, workload, device, sink, simulation, progress)
    if writer is not None:
        writer.resolved(config, len(workload))
    # Millions of small tuples and no reference cycles: the cyclic collector only costs time (a tenth of it).
    collecting = gc.isenabled()
    gc.disable()
    try:
        run.run()
        assert run.closed == len(run.arrivals), f"I1: {run.closed} of {len(run.arrivals)} requests closed"
        outcome: RunOutcome = run.outcome()
        return outcome
    except BaseException as exc:
        told = run.break_off(exc)
        if told is not exc:
            raise told from exc
        raise
    finally:
        if collecting:
            gc.enable()


def simulation(config: RunConfig, workload: Workload, device: Device, sink: RowSink, *, policy: Policy | None = None,
               progress: Callable[[int], None] | None = None, record: Recorder | None = None,
               kinds: tuple[type[Simulation], type[PagedSimulation]] | None = None) -> Simulation:
    """What drives one device under a resolved configuration; of ``kinds`` (a driver's own, or a
    cluster's) the second for policies that name their blocks."""
    kv_tokens = config.device.kv_tokens
    assert kv_tokens is not None
    if kv_tokens < KV_BLOCK_TOKENS:
        raise ConfigError(f"device.kv_tokens = {kv_tokens}: must hold at least one block of {KV_BLOCK_TOKENS} tokens")
    splits = SplitTable.every(device.num_sms, config.device.partition_step_sms)
    if policy is None:
        policy = build_policy(config, served_model(config.device), get_gpu(config.device.gpu), splits, device,
                              prefix_cache=wants_prefix_cache(config, workload, device))
    kind = (kinds or (Simulation, PagedSimulation))[getattr(policy, "paging", None) is not None]
    kv = kv_cache_of(device.model, kv_tokens)
    sharing = wants_prefix_cache(config, workload, device) and shares_prefixes(policy, config)
    if sharing and not issubclass(kind, PagedSimulation):
        check_prefixes(workload.shared_prefix or {}, workload.prompt_tokens, workload.name)
        kv = SharingKvCache(kv.total_blocks, workload.shared_prefix)
    return kind(config, workload, device, policy, splits, kv, sink, progress=progress, record=record)
