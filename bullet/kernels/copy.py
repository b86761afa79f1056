"""Persistent copy on a bounded grid: a memory stream of known programs, for any dtype. On a lane of ``num_sms`` SMs it
fills them; without a partition the hardware spreads its programs, several for each of ``num_sms``, over all the SMs there are.

The kernel is the probe's (:func:`bullet.kernels.probe.memory_stream_kernel`); here it moves bytes in the widest unit that
their number allows. What decode attention reaches of this bandwidth is its figure of merit. Not yet run on a GPU.
"""

from __future__ import annotations

import torch

from bullet.kernels.launch import Compiled, require, require_one_device, require_sms
from bullet.kernels.probe import STREAM_BLOCK, STREAM_BLOCKS_PER_SM, memory_stream_kernel

UNITS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def check(source: torch.Tensor, target: torch.Tensor) -> None:
    """Contiguous, of one dtype and size."""
    require(source.dtype == target.dtype and source.shape == target.shape,
            f"copy: source {tuple(source.shape)} {source.dtype} and target {tuple(target.shape)} {target.dtype} must agree")
    require_one_device("copy", source=source, target=target)
    require(source.is_contiguous() and target.is_contiguous(), "copy: source and target must be contiguous")


def copy(source: torch.Tensor, target: torch.Tensor, *, num_sms: int) -> torch.Tensor:
    """``target = source`` with a grid for ``num_sms`` SMs; returns the target. The two must not overlap."""
    check(source, target)
    require_sms("copy", num_sms)
    size = source.numel() * source.element_size()
    if size:
        # Addresses, not offsets: memory that torch did not allocate may begin anywhere.
        starts = source.data_ptr() | target.data_ptr()
        unit = next(u for u in UNITS if size % u.itemsize == 0 and starts % u.itemsize == 0)
        a, b = source.view(-1).view(unit), target.view(-1).view(unit)
        programs = min(-(-a.numel() // STREAM_BLOCK), num_sms * STREAM_BLOCKS_PER_SM)
        memory_stream_kernel[(programs,)](a, b, a.numel(), BLOCK=STREAM_BLOCK, num_warps=8)
    return target


def copy_reference(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The same in torch."""
    check(source, target)
    return target.copy_(source)


COMPILED: dict[str, Compiled] = {f"copy_{unit}": Compiled(
    memory_stream_kernel, {"src_ptr": f"*{unit}", "dst_ptr": f"*{unit}", "num_elements": "i64"}, {"BLOCK": STREAM_BLOCK},
    num_warps=8) for unit in ("i64", "i32", "i16", "u8")}
