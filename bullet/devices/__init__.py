"""How long a step takes: devices."""

from pathlib import Path

from bullet.catalog.gpus import GpuSpec
from bullet.catalog.models import ModelSpec, model_label
from bullet.files import safe_name

PROFILES = Path(__file__).parents[1] / "profiles" / "data"
"""The shipped profiles: a folder ``<gpu>/<model>`` each, with what was measured (``samples.parquet``), fitted (``fit.json``) or
recorded there."""


def profile_folder(gpu: GpuSpec, model: ModelSpec) -> Path:
    """Where the package keeps what it has of a model on a GPU. By who the model is, not by what a file or its folder calls it:
    neither another model of that name nor a path in a config.json finds anything."""
    return PROFILES / safe_name(gpu.name) / safe_name(model_label(model))
