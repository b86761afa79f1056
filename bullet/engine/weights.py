"""Weights of a model: random from a seed, or from safetensors files as Hugging Face publishes them.

Nothing is ever unpickled: ``pytorch_model.bin`` is refused by name. Every tensor's shape is checked against the
architecture, and separate projections are fused as :class:`bullet.engine.model.LayerWeights` says.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bullet import door
from bullet.engine.model import Architecture, LayerWeights, Weights
from bullet.errors import EngineError, one_line
from bullet.units import GIB

Tensor = torch.Tensor
Fetch = Callable[[str, tuple[int, ...]], Tensor]
"""A tensor by its Hugging Face name, in the architecture's dtype, on the device; checks the shape."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth")


def assemble(arch: Architecture, fetch: Fetch) -> Weights:
    """Build the fused weights, tensor by tensor: at most one layer's parts exist twice."""
    spec = arch.spec
    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_size, kv_size = spec.num_heads * head_dim, spec.num_kv_heads * head_dim

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return LayerWeights(
            input_norm=fetch(f"{prefix}.input_layernorm.weight", (hidden,)),
            qkv=torch.cat([fetch(f"{attention}.q_proj.weight", (q_size, hidden)),
                           fetch(f"{attention}.k_proj.weight", (kv_size, hidden)),
                           fetch(f"{attention}.v_proj.weight", (kv_size, hidden))]),
            o=fetch(f"{attention}.o_proj.weight", (hidden, q_size)),
            post_norm=fetch(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
            gate_up=torch.cat([fetch(f"{mlp}.gate_proj.weight", (inner, hidden)),
                               fetch(f"{mlp}.up_proj.weight", (inner, hidden))]),
            down=fetch(f"{mlp}.down_proj.weight", (hidden, inner)),
            q_norm=fetch(f"{attention}.q_norm.weight", (head_dim,)) if spec.qk_norm else None,
            k_norm=fetch(f"{attention}.k_norm.weight", (head_dim,)) if spec.qk_norm else None)

    embed = fetch("model.embed_tokens.weight", (spec.vocab_size, hidden))
    layers = [layer(i) for i in range(spec.num_layers)]
    norm = fetch("model.norm.weight", (hidden,))
    head = embed if spec.tie_embeddings else fetch("lm_head.weight", (spec.vocab_size, hidden))
    return Weights(embed, layers, norm, head)


def require_room(arch: Architecture, device: torch.device, free_bytes: int | None = None) -> None:
    """:class:`EngineError` where the weights exceed the device's free memory; on a CPU all of it, as far as it is known."""
    where = "GPU" if device.type == "cuda" else "machine"
    if free_bytes is None:
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _memory_bytes()
        if free_bytes is None:
            return
    parameters = arch.spec.weight_bytes // arch.spec.dtype_bytes
    needed = parameters * arch.dtype.itemsize
    if needed > free_bytes:
        raise EngineError(f"weights of {arch.spec.name} need {needed / GIB:.1f} GiB and {free_bytes / GIB:.1f} are free: end "
                          f"other processes on the {where}, or choose a smaller model")


def _memory_bytes() -> int | None:
    """This machine's memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def random_weights(arch: Architecture, seed: int, device: torch.device) -> Weights:
    """Normal with standard deviation 1 / sqrt(fan-in), norms 1: activations keep their size through any depth."""
    require_room(arch, device)
    generator = torch.Generator(device=device).manual_seed(seed)

    def fetch(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=arch.dtype, device=device)
        tensor = torch.empty(shape, dtype=arch.dtype, device=device)
        return tensor.normal_(0.0, 1.0 / math.sqrt(shape[1]), generator=generator)

    return assemble(arch, fetch)


def load_safetensors(folder: str | Path, arch: Architecture, device: torch.device) -> Weights:
    """The weights in ``folder``: one ``model.safetensors``, or shards listed in ``model.safetensors.index.json``."""
    folder = Path(folder)
    files = _files_by_tensor(folder)
    require_room(arch, device)
    safetensors = _safetensors()
    opened: dict[Path, Any] = {}

    def fetch(name: str, shape: tuple[int, ...]) -> Tensor:
        path = files.get(name) if files is not None else folder / SINGLE
        if path is None:
            raise EngineError(f"{folder / INDEX}: tensor {name!r} is in no shard: the folder and its config.json do not match")
        if path not in opened:
            opened[path] = _open(safetensors, path)
        return _read(safetensors, opened[path], path, name, shape).to(device=device, dtype=arch.dtype)

    return assemble(arch, fetch)


def _files_by_tensor(folder: Path) -> dict[str, Path] | None:
    """Tensor name -> shard, or None where one file holds all; missing files are refused before anything is read."""
    if not folder.is_dir():
        raise EngineError(f"{folder}: no such folder: give one with config.json and *.safetensors")
    index = folder / INDEX
    if not index.exists():
        if (folder / SINGLE).exists():
            return None
        pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
        if pickles:
            raise EngineError(f"{folder}: holds {pickles[0]}, which is a pickle and is never loaded: convert it to safetensors")
        raise EngineError(f"{folder}: holds neither {SINGLE} nor {INDEX}: download the model again")
    files = door.read_object(index, EngineError, "an index with a weight_map").get("weight_map")
    if not (isinstance(files, dict) and all(isinstance(file, str) for file in files.values())):
        raise EngineError(f"{index}: cannot be read as an index with a weight_map (it has no table of files): download it again")
    for file in sorted(set(files.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise EngineError(f"{index}: shard {file!r}: must be the name of a .safetensors file in the same folder")
        if not (folder / file).is_file():
            raise EngineError(f"{folder / file}: the shard is missing: download the model again")
    return {name: folder / file for name, file in files.items()}


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as exc:
        raise EngineError(f"safetensors is not installed ({exc}): pip install safetensors, or use random weights") from None
    return safetensors


def _open(safetensors: Any, path: Path) -> Any:
    try:
        return safetensors.safe_open(str(path), framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError) as exc:
        raise EngineError(f"{path}: damaged or not safetensors ({one_line(exc, 160)}): download it again") from None


def _read(safetensors: Any, file: Any, path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    try:
        tensor = file.get_tensor(name)
    except (safetensors.SafetensorError, OSError) as exc:
        raise EngineError(f"{path}: tensor {name!r} cannot be read ({one_line(exc, 160)}): the file does not match config.json, "
                          "or is damaged") from None
    if tuple(tensor.shape) != shape:
        raise EngineError(f"{path}: tensor {name!r} is {tuple(tensor.shape)}, config.json says {shape}")
    if not tensor.is_floating_point():
        raise EngineError(f"{path}: tensor {name!r} is {tensor.dtype}: quantised weights are not supported")
    return tensor
