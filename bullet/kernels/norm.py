"""RMSNorm fused with the residual: ``residual += x``, then ``out = residual / rms(residual) * weight``.

One pass over memory instead of three. The sum is stored in the residual's dtype and normalised in float32, as
``transformers`` does. Reference: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bullet.kernels.launch import Compiled, power_of_two, require, require_one_device, require_sms, require_tensors

PROGRAMS_PER_SM = 8


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, eps, num_rows, width, x_stride, residual_stride, out_stride,
                    BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    for item in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(item, tl.int64)
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
        wide = x.to(tl.float32)
        if RESIDUAL:
            place = residual_ptr + row * residual_stride + columns
            x = (wide + tl.load(place, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
            tl.store(place, x, mask=mask)
            wide = x.to(tl.float32)  # what is normalised is the sum as it is stored
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
        tl.store(out_ptr + row * out_stride + columns, (wide * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    """x and residual ``(rows, width)``, weight ``(width,)``, one dtype."""
    require(x.dim() == 2 and weight.shape == x.shape[1:], f"rms_norm: x {tuple(x.shape)} must be (rows, width), weight "
                                                          f"{tuple(weight.shape)} (width,)")
    require_tensors("rms_norm", x.dtype, x=x, weight=weight)
    if residual is not None:
        require_tensors("rms_norm", x.dtype, x=x, residual=residual)
        require(residual.shape == x.shape, f"rms_norm: residual {tuple(residual.shape)} must be as x {tuple(x.shape)}")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, num_sms: int, residual: torch.Tensor | None = None,
             out: torch.Tensor | None = None) -> torch.Tensor:
    """Normalise ``x``, or ``residual + x`` where a residual is given, which is then updated in place."""
    check(x, weight, residual)
    require_sms("rms_norm", num_sms)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    require(out.shape == x.shape and out.dtype == x.dtype and out.stride(-1) == 1, "rms_norm: out must be as x")
    require_one_device("rms_norm", x=x, out=out)
    rows, width = x.shape
    if not rows:
        return out
    block = power_of_two(width)
    rms_norm_kernel[(min(rows, num_sms * PROGRAMS_PER_SM),)](
        x, x if residual is None else residual, weight, out, eps, rows, width, x.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0), BLOCK=block, RESIDUAL=residual is not None,
        num_warps=max(1, min(16, block // 512)))
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, *,
                       residual: torch.Tensor | None = None) -> torch.Tensor:
    """The same in torch; updates ``residual`` too."""
    check(x, weight, residual)
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _compiled(dtype: str, width: int, residual: bool) -> Compiled:
    block = power_of_two(width)
    strides = ("x_stride", "residual_stride", "out_stride", "width")
    return Compiled(rms_norm_kernel, {**{f"{n}_ptr": f"*{dtype}" for n in ("x", "residual", "weight", "out")},
                                      **dict.fromkeys((*strides, "num_rows"), "i32"), "eps": "fp32"},
                    {"BLOCK": block, "RESIDUAL": residual}, num_warps=max(1, min(16, block // 512)), aligned=strides)


COMPILED: dict[str, Compiled] = {"rms_norm_bf16": _compiled("bf16", 4096, True), "rms_norm_fp16": _compiled("fp16", 5120, False),
                                 "rms_norm_fp32": _compiled("fp32", 8192, True)}
