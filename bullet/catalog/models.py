"""Models by name or from a Hugging Face ``config.json``."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Mapping
from typing import Any

from bullet.catalog.spec import ModelSpec
from bullet.errors import ConfigError

__all__ = ["MODELS", "ModelSpec", "described", "get_model", "model_label"]

# Values of the public config.json of meta-llama/Llama-3.1-8B, meta-llama/Llama-3.1-70B, Qwen/Qwen3-32B,
# Qwen/Qwen3-235B-A22B-FP8.
MODELS: Mapping[str, ModelSpec] = types.MappingProxyType({m.name: m for m in (
    ModelSpec("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072),
    ModelSpec("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072),
    ModelSpec("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936, 40960, qk_norm=True),
    # Blocks of 128 x 128 weights share a scale of 32 bits.
    ModelSpec("qwen3-235b-a22b-fp8", 94, 4096, 1536, 64, 4, 128, 151936, 40960, qk_norm=True, num_experts=128,
              experts_per_token=8, attention_bits=8 + 32 / 128**2, mlp_bits=8 + 32 / 128**2, gemm_dtype="fp8"),
    ModelSpec("tiny", 4, 256, 512, 4, 2, 64, 1024, 4096),
)})


def get_model(name: str) -> ModelSpec:
    """A built-in model by name, one of :mod:`bullet.catalog.published` by its full name, or a path to a ``config.json``."""
    if name in MODELS:
        return MODELS[name]
    if name.endswith(".json"):
        from bullet.catalog.reader import read_config

        return read_config(name)
    if "/" in name:
        from bullet.catalog.published import PUBLISHED

        if name in PUBLISHED:
            return PUBLISHED[name]
    raise ConfigError(f"unknown model {name!r}: choose one of {', '.join(MODELS)}, or give a path to a config.json")


def described(model: ModelSpec) -> dict[str, Any]:
    """What a run's headline says of its model, as keys of its summary."""
    return {"parameters": model.num_parameters, "weight_bytes": model.weight_bytes,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "window_kv_bytes_per_token": model.kv_bytes_per_token * model.window_layers // model.num_layers,
            "window_tokens": model.window_tokens, "model_notes": list(model.notes)}


def model_label(model: ModelSpec) -> str:
    """A built-in model's name. A config.json is known by what it says as well: another one of the same name is another
    model, and neither resumes nor is divided by the other's rows.
    """
    if MODELS.get(model.name) == model:
        return model.name
    return f"{model.name}#{hashlib.sha256(repr(model).encode()).hexdigest()[:8]}"
