"""Bits of a weight in a checkpoint: ``quantization_config`` of config.json, or the file that a quantiser leaves beside it.

Widths of weights, activations and KV cache are apart. What is counted: fp16 and bf16; FP8 (weights and activations; by block or
by tensor); 8-bit integers (weights and activations, or weights alone); 4-bit weights in groups with a 16-bit scale (AWQ, GPTQ,
compressed-tensors), MXFP4 (blocks of 32 with an 8-bit exponent), NVFP4 (blocks of 16 with an FP8 scale). Embeddings, norms and
routers stay in 16 bits, the LM head too unless the file says otherwise. Any other method is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bullet import door
from bullet.errors import ConfigError, short

ACTIVATIONS: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 2, "float": 2}
"""Bytes of an activation by the checkpoint's ``torch_dtype``. Engines serve float32 in 16 bits (vLLM's ``--dtype auto``)."""
BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of quantisers beside config.json: ModelOpt's, AutoGPTQ's, AutoAWQ's."""
MXFP4_BITS = 4 + 8 / 32
NVFP4_BITS = 4 + 8 / 16


@dataclass(frozen=True)
class Widths:
    """Bits a weight of attention's and of the MLP's matrices, and of the LM head (scales included); ``compute``: what the tensor
    cores multiply (``16``, ``fp8``, ``int8``); ``kv_bytes``: of a value in the KV cache, 0 where the checkpoint does not say."""

    attention_bits: float = 16.0
    mlp_bits: float = 16.0
    head_bits: float = 16.0
    compute: str = "16"
    kv_bytes: int = 0
    notes: tuple[str, ...] = ()


def read_widths(path: Path, raw: Mapping[str, Any], layers: int) -> Widths:
    """``raw``: the config that holds ``torch_dtype``; ``path``: its file, whose folder is looked into as well."""
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in ACTIVATIONS:
        raise ConfigError(
            f"{path}: torch_dtype = {short(dtype)}: must be one of bfloat16, float16, float32 (a quantised checkpoint says so "
            "in quantization_config)"
        )
    notes = ("float32 checkpoint, served in 16 bits",) if dtype.startswith("float32") or dtype == "float" else ()
    found = raw.get("quantization_config") or raw.get("compression_config")
    where = f"{path}: quantization_config"
    if found is None:
        for name in BESIDE:
            beside = path.with_name(name)
            if door.is_file(beside, ConfigError):
                where, found = str(beside), door.read_object(beside, ConfigError)
                found = {
                    "quant_method": {
                        "hf_quant_config.json": "modelopt",
                        "quantize_config.json": "gptq",
                        "quant_config.json": "awq",
                    }[name],
                    **found,
                }
                break
    if found is None:
        return Widths(notes=notes)
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} = {short(found)}: must be an object")
    method = str(found.get("quant_method", "")).lower()
    read = METHODS.get(method)
    if read is None:
        raise ConfigError(f"{where}: quant_method = {short(method)}: not modelled; known are {', '.join(METHODS)}")
    bits, compute, skipped, kv_bytes = read(where, found)
    attention, mlp = (_share(skipped, layers, names) for names in (ATTENTION, MLP))
    head = bits if found.get("lm_head") is True else 16.0
    return Widths(attention * 16 + (1 - attention) * bits, mlp * 16 + (1 - mlp) * bits, head, compute, kv_bytes,
                  (*notes, f"{method} weights of {bits:.4g} bits{', multiplied in 16' if bits == NVFP4_BITS else ''}"))


def _number(where: str, found: Mapping[str, Any], *names: str, default: int | None = None, least: int = 1) -> int:
    for name in names:
        value = found.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or (value < least and value != -1):
            raise ConfigError(f"{where}: {name} = {short(value)}: must be a whole number, {least} or more")
        return value
    if default is None:
        raise ConfigError(f"{where}: {names[0]!r} is missing")
    return default


def _grouped(bits: int, group: int, zero_point: bool) -> float:
    """A 16-bit scale, and a zero point where there is one, for every group of weights (-1: a whole column, next to nothing)."""
    return float(bits) if group <= 0 else bits + (16 + (bits if zero_point else 0)) / group


_Read = tuple[float, str, list[str], int]


def _bits(where: str, found: Mapping[str, Any], *names: str) -> int:
    bits = _number(where, found, *names)
    if bits not in (2, 3, 4, 8):
        raise ConfigError(f"{where}: {names[0]} = {bits}: must be 2, 3, 4 or 8")
    return bits


def _awq(where: str, found: Mapping[str, Any]) -> _Read:
    bits = _bits(where, found, "bits", "w_bit")
    group = _number(where, found, "group_size", "q_group_size", default=128)
    return _grouped(bits, group, found.get("zero_point", True) is True), "16", _names(where, found), 0


def _gptq(where: str, found: Mapping[str, Any]) -> _Read:
    if found.get("dynamic"):
        raise ConfigError(f"{where}: dynamic = {short(found['dynamic'])}: bits that differ by module are not modelled")
    bits = _bits(where, found, "bits")
    return _grouped(bits, _number(where, found, "group_size", default=128), True), "16", _names(where, found), 0


def _fp8(where: str, found: Mapping[str, Any]) -> _Read:
    block = found.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)
    ):
        raise ConfigError(f"{where}: weight_block_size = {short(block)}: must be two whole numbers")
    return 8.0 + (32 / (block[0] * block[1]) if block else 0.0), "fp8", _names(where, found), 0


def _mxfp4(where: str, found: Mapping[str, Any]) -> _Read:
    return MXFP4_BITS, "16", [*_names(where, found), "self_attn"], 0


def _modelopt(where: str, found: Mapping[str, Any]) -> _Read:
    inner = found.get("quantization", found)
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{where}: quantization = {short(inner)}: must be an object")
    algorithm = str(inner.get("quant_algo", "")).upper()  # null: the KV cache alone is quantised
    known = {"NONE": (16.0, "16"),
             "FP8": (8.0, "fp8"), "NVFP4": (NVFP4_BITS, "16"), "W4A16_AWQ": (4 + 16 / 128, "16"), "INT8_SQ": (8.0, "int8")}
    if algorithm not in known:
        raise ConfigError(f"{where}: quant_algo = {short(algorithm)}: not modelled; known are {', '.join(known)}")
    kv = str(inner.get("kv_cache_quant_algo") or "").upper()
    if kv not in ("", "NONE", "FP8"):
        raise ConfigError(f"{where}: kv_cache_quant_algo = {short(kv)}: must be FP8 or absent")
    return *known[algorithm], _names(where, inner), 1 if kv == "FP8" or _kv_scheme(where, found) else 0


def _compressed(where: str, found: Mapping[str, Any]) -> _Read:
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ConfigError(f"{where}: config_groups: must hold one group, as all matrices alike are what is modelled")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ConfigError(f"{where}: config_groups: a group's weights are missing")
    if str(
        found.get("sparsity_config", {}).get("format", "dense") if isinstance(found.get("sparsity_config"), Mapping) else "dense"
    ) not in ("dense", ""):
        raise ConfigError(f"{where}: sparsity_config: sparse weights are not modelled")
    bits = _number(where, weights, "num_bits")
    kind = str(weights.get("type", "int"))
    if (kind, bits) not in {("int", 4), ("int", 8), ("float", 8), ("float", 4)}:
        raise ConfigError(f"{where}: weights of {bits} bits, type {short(kind)}: must be int of 4 or 8, or float of 8 or 4")
    activations = group.get("input_activations")
    size = _number(where, weights, "group_size", default=-1)
    if bits == 4 and activations is not None and not (kind == "float" and _number(where, activations, "num_bits") == 4):
        raise ConfigError(f"{where}: input_activations beside weights of 4 bits: not modelled, only activations of 16")
    wide = (MXFP4_BITS if size == 32 else NVFP4_BITS) if (kind, bits) == ("float", 4) else \
        _grouped(bits, size, weights.get("symmetric") is False)
    compute = "16" if activations is None or bits == 4 else ("fp8" if kind == "float" else "int8")
    return wide, compute, _names(where, found), 1 if _kv_scheme(where, found) else 0


def _kv_scheme(where: str, found: Mapping[str, Any]) -> bool:
    """Whether the KV cache is kept in 8 bits, as compressed-tensors and ModelOpt's config.json say it."""
    kv = found.get("kv_cache_scheme")
    if kv is None:
        return False
    if not isinstance(kv, Mapping) or kv.get("num_bits") != 8:
        raise ConfigError(f"{where}: kv_cache_scheme = {short(kv)}: must be an object with num_bits = 8, or null")
    return True


METHODS = {
    "awq": _awq,
    "awq_marlin": _awq,
    "gptq": _gptq,
    "gptq_marlin": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed,
}


def _names(where: str, found: Mapping[str, Any]) -> list[str]:
    """Modules that stay in 16 bits."""
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        value = found.get(key)
        if value is None:
            continue
        if not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise ConfigError(f"{where}: {key} = {short(value)}: must be a list of names")
        return value
    return []


ATTENTION = (".{}.self_attn.q_proj", ".{}.self_attn.o_proj")
MLP = (".{}.mlp.up_proj", ".{}.mlp.experts.0.up_proj")

OUTER = ("model.layers", "language_model.model.layers", "model.language_model.layers", "thinker.model.layers")
"""What layers are called, in models for several media too."""


def _share(skipped: Iterable[str], layers: int, names: tuple[str, ...]) -> float:
    """Share of the layers in which a module of that kind stays in 16 bits."""

    def hit(pattern: str, name: str) -> bool:
        if pattern.startswith("re:"):
            try:
                return re.match(pattern[3:], name) is not None
            except re.error:
                return False
        if "*" in pattern:
            return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) is not None
        return re.search(rf"(^|\.){re.escape(pattern)}($|\.)", name) is not None

    patterns = list(skipped)
    if not patterns:
        return 0.0
    said = [outer + name for name in names for outer in OUTER]
    count = sum(any(hit(pattern, name.format(layer)) for name in said for pattern in patterns) for layer in range(layers))
    return count / layers
