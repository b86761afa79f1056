"""SiLU-mul: ``silu(gate) * up`` of a fused projection's output ``(rows, 2 x width)``, gates first.

Reference: Shazeer, GLU Variants Improve Transformer (2020). Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bullet.kernels.launch import Compiled, require, require_one_device, require_sms, require_tensors

PROGRAMS_PER_SM = 8
BLOCK = 1024


@triton.jit(do_not_specialize=["num_rows"])
def silu_mul_kernel(gate_up_ptr, out_ptr, num_rows, width, in_stride, out_stride, BLOCK: tl.constexpr):
    columns_of_row = tl.cdiv(width, BLOCK)
    lanes = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), num_rows * columns_of_row, tl.num_programs(0)):
        row = tl.cast(item // columns_of_row, tl.int64)
        columns = item % columns_of_row * BLOCK + lanes
        mask = columns < width
        gate = tl.load(gate_up_ptr + row * in_stride + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + row * in_stride + width + columns, mask=mask, other=0.0).to(tl.float32)
        value = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out_ptr + row * out_stride + columns, value.to(out_ptr.dtype.element_ty), mask=mask)


def check(gate_up: torch.Tensor) -> None:
    """``(rows, 2 x width)``."""
    require(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 and gate_up.shape[1] > 0,
            f"silu_mul: gate_up {tuple(gate_up.shape)} must be (rows, 2 x width)")
    require_tensors("silu_mul", gate_up.dtype, gate_up=gate_up)


def silu_mul(gate_up: torch.Tensor, *, num_sms: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """``(rows, 2 x width)`` -> ``(rows, width)``."""
    check(gate_up)
    require_sms("silu_mul", num_sms)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    require(out.shape == (rows, width) and out.dtype == gate_up.dtype and out.stride(-1) == 1,
            f"silu_mul: out {tuple(out.shape)} must be {(rows, width)}")
    require_one_device("silu_mul", gate_up=gate_up, out=out)
    if rows:
        items = rows * -(-width // BLOCK)
        silu_mul_kernel[(min(items, num_sms * PROGRAMS_PER_SM),)](gate_up, out, rows, width, gate_up.stride(0), out.stride(0),
                                                                  BLOCK=BLOCK, num_warps=4)
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in torch, in float32."""
    check(gate_up)
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


COMPILED: dict[str, Compiled] = {f"silu_mul_{dtype}": Compiled(
    silu_mul_kernel, {"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "num_rows": "i32", "width": "i32",
                      "in_stride": "i32", "out_stride": "i32"}, {"BLOCK": BLOCK},
    aligned=("width", "in_stride", "out_stride")) for dtype in ("bf16", "fp16", "fp32")}
