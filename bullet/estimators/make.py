"""An estimator by name, calibrated on samples."""

from __future__ import annotations

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec
from bullet.devices.base import Device
from bullet.errors import ConfigError
from bullet.estimators.base import Estimator
from bullet.estimators.oracle import Oracle
from bullet.estimators.sampling import calibration_states, sample_device
from bullet.estimators.srm import Srm
from bullet.state import SplitTable


def make_estimator(name: str, *, device: Device, model: ModelSpec, gpu: GpuSpec, splits: SplitTable, seed: int,
                   recalibrate: bool = True, error: float = 1.0) -> Estimator:
    """``srm``, ``srm-blind`` or ``oracle``, calibrated on samples of the device where it needs them."""
    if name not in ("srm", "srm-blind", "oracle"):
        raise ConfigError(f"unknown estimator {name!r}: must be srm, srm-blind or oracle")
    samples = sample_device(device, calibration_states(device, splits, **device.calibration), seed=seed,
                            noise_std=device.calibration_noise_std)
    if name == "oracle":
        return Oracle(device, gpu, splits, samples, recalibrate=recalibrate, error=error)
    return Srm(model, gpu, splits, samples, tensor_parallel=device.tensor_parallel, blind=name == "srm-blind",
               recalibrate=recalibrate, error=error)
