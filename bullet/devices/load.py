"""The device of a configuration: fitted, tables, measured step times; and how many tokens of KV fit on it.

Stands above all devices, so that none of them imports another one's loader.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bullet.catalog.gpus import GpuSpec, get_gpu
from bullet.catalog.models import ModelSpec, get_model, model_label
from bullet.config import KV_BLOCK_TOKENS, DeviceConfig
from bullet.devices.coefficients import PROFILES, DeviceCoefficients, analytic_coefficients
from bullet.devices.fitted import DeviceModel
from bullet.errors import ConfigError

# ------------------------------------------------------------------------------------------- profiles


def kv_capacity_tokens(model: ModelSpec, gpu: GpuSpec, config: DeviceConfig) -> int:
    """KV capacity in tokens, whole blocks: memory x utilisation less weights and reserve, per GPU of the group."""
    tp = config.tensor_parallel
    usable = gpu.mem_bytes * config.memory_utilization - model.weight_bytes / tp - config.reserve_bytes
    # With more GPUs than KV heads each holds one whole head: the heads are repeated.
    bytes_per_token = model.kv_bytes_per_token / min(tp, model.num_kv_heads)
    tokens = int(usable // bytes_per_token) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    if tokens < KV_BLOCK_TOKENS:
        raise ConfigError(f"model {model.name} needs {model.weight_bytes / 2**30:.1f} GiB of weights: {tp} x {gpu.name} "
                          f"({gpu.mem_bytes / 2**30:.0f} GiB each) leave no room for KV; raise device.tensor_parallel")
    return tokens


def load_device(config: DeviceConfig, *, cache: bool = True) -> DeviceModel:
    """The device of a configuration: fitted if a profile of (gpu, model) is shipped, else labelled what it is.

    ``config.timing = "table"`` asks for the measured tables themselves instead, a folder for what a fit wrote there.
    """
    if config.timing == "table":
        from bullet.devices.table import load_table_device  # it builds on this module

        return load_table_device(config)
    model, gpu = get_model(config.model), get_gpu(config.gpu)
    if config.timing != "fit":
        return _load_folder(Path(config.timing), config, model, gpu, cache)
    path = PROFILES / gpu.name / model.name / "fit.json"
    others = sorted(PROFILES.glob(f"{gpu.name}/*/fit.json"))
    if path.is_file():
        coefficients = DeviceCoefficients.from_json(path)
    elif others:
        coefficients = dataclasses.replace(DeviceCoefficients.from_json(others[0]),
                                           source=f"fitted on {others[0].parent.name}'s shapes")
    else:
        coefficients = analytic_coefficients(gpu)
    return _with_options(coefficients, config, model, gpu, cache)


def _with_options(coefficients: DeviceCoefficients, config: DeviceConfig, model: ModelSpec, gpu: GpuSpec,
                  cache: bool) -> DeviceModel:
    return DeviceModel(model, gpu, coefficients, tensor_parallel=config.tensor_parallel,
                       contention_scale=config.contention_scale, shared_prefill_share=config.shared_prefill_share,
                       cache=cache)


def _load_folder(folder: Path, config: DeviceConfig, model: ModelSpec, gpu: GpuSpec, cache: bool) -> DeviceModel:
    """What ``bullet-profile fit --out FOLDER`` wrote: a GPU's fit.json, or a CPU's steps.json. One of another GPU or model
    than the configuration's is refused."""
    fitted, steps = folder / "fit.json", folder / "steps.json"
    if steps.is_file() and not fitted.is_file():
        from bullet.devices.measured import load_measured  # it builds on this module

        return load_measured(steps, config, model, gpu)
    if not fitted.is_file():
        raise ConfigError(f"device.timing (--device-model) = {str(folder)!r}: must be fit, table, or a folder that holds "
                          "fit.json (steps.json of a CPU): bullet-profile fit SWEEP --out FOLDER makes one")
    coefficients = DeviceCoefficients.from_json(fitted)
    for name, found, wanted in (("gpu", gpu.name, "--gpu"), ("model", model_label(model), "--model")):
        if coefficients.notes.get(name, found) != found:
            raise ConfigError(f"{fitted}: fitted on {name} {coefficients.notes[name]}, not {found}: give it as {wanted}")
    return _with_options(coefficients, config, model, gpu, cache)
