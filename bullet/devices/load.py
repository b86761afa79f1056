"""The device of a configuration: fitted, tables, measured step times; and how many tokens of KV fit on it.

Stands above all devices, so that none of them imports another one's loader. Tables and step times are imported where a
configuration names them: most runs are of a fit.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from bullet.catalog.gpus import GpuSpec, get_gpu
from bullet.catalog.models import ModelSpec, get_model, model_label
from bullet.config import KV_BLOCK_TOKENS, DeviceConfig
from bullet.devices import PROFILES, profile_folder
from bullet.devices.base import Device
from bullet.devices.coefficients import DeviceCoefficients, analytic_coefficients
from bullet.devices.fitted import DeviceModel
from bullet.door import is_file
from bullet.errors import ConfigError, require

if TYPE_CHECKING:
    from bullet.devices.measured import MeasuredDevice
    from bullet.devices.table import TableDevice


def served_model(config: DeviceConfig) -> ModelSpec:
    """The configuration's model with the KV width and the context that it is served with. An 8-bit KV cache that the checkpoint
    asks for (``kv_cache_scheme``, ``kv_cache_quant_algo``) is what vLLM takes under ``auto``, too."""
    model = get_model(config.model)
    if config.kv_dtype != "auto":
        model = dataclasses.replace(model, kv_bytes=1 if config.kv_dtype == "fp8" else model.dtype_bytes)
    if config.max_model_len is not None:
        if config.max_model_len > model.context_tokens:
            raise ConfigError(f"device.max_model_len (--max-model-len) = {config.max_model_len}: must be at most {model.name}'s "
                              f"context of {model.context_tokens}")
        model = dataclasses.replace(model, context_tokens=config.max_model_len)
    return model


def host_label(config: DeviceConfig) -> str:
    """The host time that a run adds, for the device's label; empty where there is none."""
    parts = [f"{getattr(config, name) * 1e3:.3g} ms {what}" for name, what in (
        ("host_step_s", "a step"), ("host_prefill_step_s", "more with a prompt"), ("host_request_s", "a request"),
        ("host_launch_s", "a launch"), ("device_launch_s", "of the device a launch"))
        if getattr(config, name)]
    return f"; host time {', '.join(parts)}" if parts else ""


def kv_capacity_tokens(model: ModelSpec, gpu: GpuSpec, config: DeviceConfig) -> int:
    """KV capacity in tokens, whole blocks: memory x utilisation less weights and reserve, per GPU of the group.

    Where layers have a window, tokens that would fit if all layers kept them, padding of the groups included, as vLLM prints it:
    a window's layers keep fewer, so that more fit (:class:`~bullet.state.kv.WindowedKvCache`).
    """
    tp = config.tensor_parallel
    usable = gpu.mem_bytes * config.memory_utilization - model.weight_bytes / tp - config.reserve_bytes
    # With more GPUs than KV heads each holds one whole head: the heads are repeated. A latent is one for all heads.
    group_layers, full, window = model.kv_groups
    bytes_per_token = model.kv_bytes_per_token // model.num_layers * group_layers / (
        1 if model.kv_lora_rank else min(tp, model.num_kv_heads))
    tokens = int(usable // bytes_per_token) // KV_BLOCK_TOKENS // (full + window) * KV_BLOCK_TOKENS
    if tokens < KV_BLOCK_TOKENS:
        raise ConfigError(f"model {model.name} needs {model.weight_bytes / 2**30:.1f} GiB of weights: {tp} x {gpu.name} "
                          f"({gpu.mem_bytes / 2**30:.0f} GiB each) leave no room for KV; raise device.tensor_parallel")
    return tokens


def load_device(config: DeviceConfig, *, cache: bool = True) -> Device:
    """The device that ``config.timing`` names. ``fit``: :func:`load_fitted`; ``table``: the measured tables themselves; a
    folder: what ``bullet-profile fit --out FOLDER`` wrote there, a GPU's fit.json or a CPU's steps.json; without either, or as
    ``table:FOLDER``, the tables that ``bullet-profile import`` wrote.

    :class:`ConfigError` where tables, or a folder's numbers, are of another GPU than the configuration's; another model's are
    refused likewise, but for a GPU's fit, which is labelled so.
    """
    if config.timing == "fit":
        return load_fitted(config, cache=cache)
    served_model(config)  # refuses what is wrong
    model, gpu = get_model(config.model), get_gpu(config.gpu)
    if config.timing == "table":
        return load_tables(config, model, gpu, profile_folder(gpu, model))
    if config.timing.startswith("table:"):
        return load_tables(config, model, gpu, Path(config.timing.removeprefix("table:")))
    from bullet.devices.table import tables_in

    folder = Path(config.timing)
    fitted, steps = folder / "fit.json", folder / "steps.json"
    if not (is_file(fitted, ConfigError) or is_file(steps, ConfigError)) and tables_in(folder):
        return load_tables(config, model, gpu, folder)
    if is_file(steps, ConfigError) and not is_file(fitted, ConfigError):
        return _load_steps(steps, config, model, gpu)
    if not is_file(fitted, ConfigError):
        raise ConfigError(f"device.timing (--device-model) = {str(folder)!r}: must be fit, table, or a folder that holds "
                          "fit.json (steps.json of a CPU) or engine tables: bullet-profile fit SWEEP --out FOLDER makes one, "
                          "bullet-profile import --out FOLDER the other")
    return _fitted(_own_fit(fitted, model, gpu), config, model, gpu, cache)


def _own_fit(path: Path, model: ModelSpec, gpu: GpuSpec) -> DeviceCoefficients:
    """The fit of a file, its label saying on what it was made; another GPU's is refused."""
    coefficients = DeviceCoefficients.from_json(path)
    notes, source = coefficients.notes, coefficients.source
    if notes.get("gpu", gpu.name) != gpu.name:
        raise ConfigError(f"{path}: fitted on gpu {notes['gpu']}, not {gpu.name}: give it as --gpu")
    if notes.get("model", model_label(model)) != model_label(model):
        source += f" on {notes['model']}'s shapes"
    if not notes.get("gpu") or not notes.get("model") or not notes.get("origin"):
        source += ", of unknown origin: no gpu, model and origin in its notes"
    elif notes.get("digest") != coefficients.digest:
        source += f" on {notes['gpu']}, changed since"
    return dataclasses.replace(coefficients, source=source)


def load_fitted(config: DeviceConfig, *, cache: bool = True) -> DeviceModel:
    """The shipped fit of (gpu, model), whatever ``config.timing``; else another model's on that GPU, or the data sheet's:
    labelled what it is."""
    model, gpu = get_model(config.model), get_gpu(config.gpu)
    path = profile_folder(gpu, model) / "fit.json"
    others = sorted(path.parents[1].glob("*/fit.json"))
    if path.is_file():
        coefficients = DeviceCoefficients.from_json(path)
    elif others:
        coefficients = dataclasses.replace(DeviceCoefficients.from_json(others[0]),
                                           source=f"fitted on {others[0].parent.name}'s shapes")
    else:
        coefficients = analytic_coefficients(gpu)
    return _fitted(coefficients, config, model, gpu, cache)


def _fitted(coefficients: DeviceCoefficients, config: DeviceConfig, model: ModelSpec, gpu: GpuSpec, cache: bool) -> DeviceModel:
    if config.bandwidth_scale != 1:
        gpu = dataclasses.replace(gpu, mem_bytes_per_s=gpu.mem_bytes_per_s * config.bandwidth_scale)
        coefficients = dataclasses.replace(coefficients, source=f"{coefficients.source}; bandwidth x {config.bandwidth_scale:g}")
    return DeviceModel(served_model(config), gpu, coefficients, tensor_parallel=config.tensor_parallel,
                       contention_scale=config.contention_scale, shared_prefill_share=config.shared_prefill_share,
                       cache=cache)


def _own_bandwidth(config: DeviceConfig) -> None:
    require(config.bandwidth_scale == 1, "device.bandwidth_scale", config.bandwidth_scale,
            "1 where step times are measured or in tables (--device-model): they have their own bandwidth")


def load_tables(config: DeviceConfig, model: ModelSpec, gpu: GpuSpec, folder: Path) -> TableDevice:
    """An engine's own tables where the folder has them (``engine_tables.parquet``, a shard's ``engine_tables.tpN.parquet``), else
    its samples of single kernels."""
    from bullet.devices.table import TABLE, TableDevice, check_tables, read_tables, table_path, tables_in
    from bullet.devices.table_group import with_all_reduce
    from bullet.devices.table_samples import read_samples

    _own_bandwidth(config)
    if config.kv_dtype == "fp8":
        raise ConfigError(f"{TABLE}: the tables were measured with KV of 16 bits, not device.kv_dtype (--kv-dtype) = fp8")
    tp = config.tensor_parallel
    path = table_path(folder, tp)
    samples, fitted = (folder / name for name in ("samples.parquet", "fit.json"))
    if not path.is_file() and (degrees := tables_in(folder)):
        raise ConfigError(f"{TABLE}: no tables for device.tensor_parallel = {tp} in {folder}, there are for "
                          f"{', '.join(map(str, degrees))}")
    if not path.is_file() and not (samples.is_file() and fitted.is_file()):
        have = sorted({f"{p.parent.parent.name} with {p.parent.name}" for name in ("samples.parquet", "engine_tables*.parquet")
                       for p in PROFILES.glob(f"*/*/{name}")})
        raise ConfigError(f"{TABLE}: no measured tables of {model.name} on {gpu.name} are shipped; there are: "
                          f"{', '.join(have) or 'none'}" if config.timing == "table" else
                          f"{folder}: holds no {path.name}: bullet-profile import FOLDER --out {folder} makes it")
    if not path.is_file() and tp != 1:
        raise ConfigError(f"{TABLE}: no tables of shards for device.tensor_parallel = {tp}: those of {folder} are of one GPU")
    fit: DeviceModel | None = None
    if tp > 1 or config.table_outside == "fit":
        fit = _fitted(_own_fit(fitted, model, gpu), config, model, gpu, True) if fitted.is_file() else load_fitted(config)
    if path.is_file():
        tables = read_tables(path, model, gpu)
    else:
        path = samples
        tables = read_samples(samples, model, gpu, DeviceCoefficients.from_json(fitted))
    if tp > 1:
        assert fit is not None
        tables = with_all_reduce(tables, fit, samples)
    check_tables(tables, model, gpu, str(path))
    return TableDevice(model, gpu, tables, outside=fit if config.table_outside == "fit" else None)


def _load_steps(path: Path, config: DeviceConfig, model: ModelSpec, gpu: GpuSpec) -> MeasuredDevice:
    """The step times of a file."""
    _own_bandwidth(config)
    from bullet.devices.measured import MeasuredDevice, StepProfile

    profile = StepProfile.from_json(path)
    if config.tensor_parallel != 1:
        raise ConfigError(f"{path}: step times of one device, not of device.tensor_parallel = {config.tensor_parallel}")
    if profile.model not in (model.name, model_label(model)):
        raise ConfigError(f"{path}: step times of model {profile.model}, not of {model_label(model)}: give it as --model")
    profile = profile.shown(gpu)
    if profile.num_sms != gpu.num_sms:
        raise ConfigError(f"{path}: step times of {profile.hardware} with {profile.num_sms} SMs, not of {gpu.name}: give --gpu")
    return MeasuredDevice(profile, model, gpu)
