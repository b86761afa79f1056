"""What the Triton kernels of serving share: argument checks, the interpreter's bf16, and a compile without a GPU.

A kernel file holds the kernel, a wrapper that checks and launches, and a torch reference with the wrapper's signature.
``num_sms`` bounds a grid: the SMs of the lane that the kernel is launched on, never the device's, since Triton and
``multi_processor_count`` know only the whole device.

Triton compiles a kernel anew where an integer is 1, or a number or address a multiple of 16. What changes from batch to
batch (rows, tiles, the width of block tables, views into one tensor) is left out of that by ``do_not_specialize``: a
compile in mid-service would be seconds of somebody's TTFT.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def interpreted() -> bool:
    """Whether Triton interprets kernels in this process: it decides once, when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def require(ok: bool, message: str) -> None:
    """``ValueError`` with the message: a wrapper was called wrongly, which is our mistake and not the user's."""
    if not ok:
        raise ValueError(message)


def require_sms(kernel: str, num_sms: int) -> None:
    """A grid of 0 programs is launched without an error and computes nothing: it must not come to that."""
    require(num_sms > 0, f"{kernel}: num_sms = {num_sms} must be positive")


def require_one_device(kernel: str, **tensors: torch.Tensor) -> None:
    """All on the first one's device: a kernel follows an address wherever it points."""
    first, *others = tensors.items()
    for name, tensor in others:
        require(tensor.device == first[1].device, f"{kernel}: {name} is on {tensor.device}, {first[0]} on {first[1].device}")


def require_tensors(kernel: str, dtype: torch.dtype, **tensors: torch.Tensor) -> None:
    """All of one floating dtype, on one device, with unit stride along the last axis."""
    require(dtype in FLOATS, f"{kernel}: dtype {dtype}: must be float32, float16 or bfloat16")
    require_one_device(kernel, **tensors)
    for name, tensor in tensors.items():
        require(tensor.dtype == dtype, f"{kernel}: {name} is {tensor.dtype}, must be {dtype} as the others")
        require(tensor.stride(-1) == 1, f"{kernel}: {name} has stride {tensor.stride(-1)} along its last axis, must be 1")


def require_indices(kernel: str, **tensors: torch.Tensor) -> None:
    """Contiguous int32."""
    for name, tensor in tensors.items():
        require(tensor.dtype == torch.int32 and tensor.is_contiguous(),
                f"{kernel}: {name} must be contiguous int32, is {tensor.dtype} with strides {tensor.stride()}")


def require_paged(kernel: str, rows: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                  block_tables: torch.Tensor, **indices: torch.Tensor) -> None:
    """Queries (``rows``, H, D) and a paged cache (blocks, K, block_tokens, D) that attention can read together, and where."""
    require(q.dim() == 3 and k_cache.dim() == 4, f"{kernel}: q must be ({rows}, H, D), caches (blocks, K, block_tokens, D)")
    require_tensors(kernel, q.dtype, q=q, k_cache=k_cache, v_cache=v_cache)
    require(k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride(),
            f"{kernel}: k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} must agree, strides too")
    _, heads, head_dim = q.shape
    _, kv_heads, block_tokens, cached_dim = k_cache.shape
    require(cached_dim == head_dim, f"{kernel}: head size {head_dim} of q, {cached_dim} of the cache")
    require(16 <= head_dim <= 256, f"{kernel}: head size {head_dim} must be 16 to 256")
    require(heads % kv_heads == 0, f"{kernel}: {heads} query heads must be a multiple of {kv_heads} KV heads")
    require(block_tokens == power_of_two(block_tokens), f"{kernel}: block of {block_tokens} tokens: must be a power of two")
    require_indices(kernel, block_tables=block_tables, **indices)
    require_one_device(kernel, q=q, block_tables=block_tables, **indices)


def output_like(kernel: str, q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """``out``, or a new one of the shape and dtype that it must have."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    require(out.shape == q.shape and out.dtype == q.dtype and out.stride(-1) == 1,
            f"{kernel}: out {tuple(out.shape)} {out.dtype} must be as q {tuple(q.shape)} {q.dtype}")
    return out


def dot_in_fp32(dtype: torch.dtype) -> bool:
    """Whether a kernel must widen the operands of ``tl.dot``: interpreted, bf16 products are silently wrong."""
    return interpreted() and dtype == torch.bfloat16


def power_of_two(value: int) -> int:
    """The least power of two that is not below ``value`` (at least 1)."""
    return 1 << max(0, value - 1).bit_length()


SHARED_MEMORY_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Most that a block may use, by compute capability (CUDA C++ programming guide, table of compute capabilities)."""
DEEP_STAGES = 5
"""Of a loop that loads a block table, then keys and values through it: one stage goes to the table and one is in use, so that
five leave two buffers of keys and values, and the loop waits for the older (``cp.async.wait_group 3`` in the compiled code). With
two or three it waits for all loads before each tile, and arithmetic never overlaps them."""


def shared_limit(capability: int) -> int:
    """Of the newest capability that is not above this one."""
    return SHARED_MEMORY_BYTES[max((c for c in SHARED_MEMORY_BYTES if c <= capability), default=80)]


@lru_cache(maxsize=8)
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def capability_of(tensor: torch.Tensor) -> int:
    """Compute capability of its device, 80 for 8.0; on a CPU, where kernels are interpreted, 80."""
    return _capability(tensor.device) if tensor.is_cuda else 80


@dataclass(frozen=True)
class Compiled:
    """One specialisation to compile without a GPU: argument types by name, compile-time constants, options.

    Pointers are declared divisible by 16, as torch's allocations are, but for those that the kernel leaves open. ``num_stages``:
    a number, or what gives it for a capability.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int | Callable[[int], int] = 3
    aligned: tuple[str, ...] = field(default=())


def compile_for(entry: Compiled, capability: int) -> Any:
    """Compile for ``sm_<capability>`` (80, 89, 90) without a GPU; returns Triton's compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**entry.signature, **dict.fromkeys(entry.constants, "constexpr")}
    order = list(entry.kernel.arg_names)
    signature = {name: signature[name] for name in order}
    left_open = {p.name for p in entry.kernel.params if p.do_not_specialize}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(order)
                  if (signature[name].startswith("*") or name in entry.aligned) and name not in left_open}
    stages = entry.num_stages(capability) if callable(entry.num_stages) else entry.num_stages
    source = ASTSource(fn=entry.kernel, signature=signature, constexprs=dict(entry.constants), attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32),
                          options={"num_warps": entry.num_warps, "num_stages": stages})
