"""Persistent GEMM on a bounded grid: ``x @ weight.T`` on the SMs of a lane and no more.

For the software backend, where nothing but the size of its grid keeps an operation from the other lane's SMs, and as a
contention source of known SMs; elsewhere cuBLAS is faster. One program an SM takes output tiles in turn; tiles of
:data:`GROUP_ROWS` row blocks are neighbours, so that the weights they share are still in L2.

Reference: Triton's matrix multiplication tutorial for the grouped order. Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bullet.kernels.launch import Compiled, dot_in_fp32, power_of_two, require, require_one_device, require_sms, require_tensors

PROGRAMS_PER_SM = 1
GROUP_ROWS = 8
TILE = (128, 128, 64)
"""Rows, columns and depth of a tile; float32 takes half of each."""
MIN_TILE_ROWS = 16


@triton.jit(do_not_specialize=["rows"])
def gemm_kernel(x_ptr, weight_ptr, out_ptr, rows, columns, depth, x_stride, weight_stride, out_stride,
                TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr, GROUP: tl.constexpr,
                WIDE: tl.constexpr):
    row_tiles = tl.cdiv(rows, TILE_ROWS)
    column_tiles = tl.cdiv(columns, TILE_COLUMNS)
    group_tiles = GROUP * column_tiles
    lanes = tl.arange(0, TILE_DEPTH)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        first = tile // group_tiles * GROUP
        height = tl.minimum(row_tiles - first, GROUP)
        within = tile % group_tiles
        r = (first + within % height) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        c = within // height * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        x_row = x_ptr + r.to(tl.int64)[:, None] * x_stride
        w_row = weight_ptr + c.to(tl.int64)[None, :] * weight_stride
        acc = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
        for at in range(0, depth, TILE_DEPTH):
            k = at + lanes
            x = tl.load(x_row + k[None, :], mask=(r < rows)[:, None] & (k < depth)[None, :], other=0.0)
            w = tl.load(w_row + k[:, None], mask=(c < columns)[None, :] & (k < depth)[:, None], other=0.0)
            if WIDE:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            acc += tl.dot(x, w, input_precision="ieee")
        tl.store(out_ptr + r.to(tl.int64)[:, None] * out_stride + c[None, :], acc.to(out_ptr.dtype.element_ty),
                 mask=(r < rows)[:, None] & (c < columns)[None, :])


def tile_sizes(dtype: torch.dtype, rows: int) -> tuple[int, int, int]:
    """Rows, columns and depth of a tile; few rows (a decode batch) take a low one."""
    tall, wide, deep = (t // 2 for t in TILE) if dtype == torch.float32 else TILE
    return max(MIN_TILE_ROWS, min(tall, power_of_two(rows))), wide, deep


def check(x: torch.Tensor, weight: torch.Tensor) -> None:
    """x ``(rows, depth)``, weight ``(columns, depth)``."""
    require(x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1],
            f"gemm: x {tuple(x.shape)} must be (rows, depth), weight {tuple(weight.shape)} (columns, depth)")
    require_tensors("gemm", x.dtype, x=x, weight=weight)


def gemm(x: torch.Tensor, weight: torch.Tensor, *, num_sms: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T``, accumulated in float32, ``(rows, columns)``."""
    check(x, weight)
    require_sms("gemm", num_sms)
    (rows, depth), columns = x.shape, weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device) if out is None else out
    require(out.shape == (rows, columns) and out.dtype == x.dtype and out.stride(-1) == 1,
            f"gemm: out {tuple(out.shape)} must be {(rows, columns)}")
    require_one_device("gemm", x=x, out=out)
    if rows and columns:
        tall, wide, deep = tile_sizes(x.dtype, rows)
        tiles = -(-rows // tall) * -(-columns // wide)
        gemm_kernel[(min(tiles, num_sms * PROGRAMS_PER_SM),)](
            x, weight, out, rows, columns, depth, x.stride(0), weight.stride(0), out.stride(0), TILE_ROWS=tall,
            TILE_COLUMNS=wide, TILE_DEPTH=deep, GROUP=GROUP_ROWS, WIDE=dot_in_fp32(x.dtype),
            num_warps=8 if tall == TILE[0] else 4, num_stages=3)
    return out


def gemm_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same in torch, in float32."""
    check(x, weight)
    return (x.float() @ weight.float().T).to(x.dtype)


def _compiled(dtype: str, torch_dtype: torch.dtype, rows: int) -> Compiled:
    tall, wide, deep = tile_sizes(torch_dtype, rows)
    strides = ("x_stride", "weight_stride", "out_stride")
    return Compiled(gemm_kernel, {**{f"{n}_ptr": f"*{dtype}" for n in ("x", "weight", "out")},
                                  **dict.fromkeys(("rows", "columns", "depth", *strides), "i32")},
                    {"TILE_ROWS": tall, "TILE_COLUMNS": wide, "TILE_DEPTH": deep, "GROUP": GROUP_ROWS, "WIDE": False},
                    num_warps=8 if tall == TILE[0] else 4, num_stages=3, aligned=("depth", *strides))


COMPILED: dict[str, Compiled] = {"gemm_bf16": _compiled("bf16", torch.bfloat16, 4096),
                                 "gemm_bf16_decode": _compiled("bf16", torch.bfloat16, 16),
                                 "gemm_fp16": _compiled("fp16", torch.float16, 4096),
                                 "gemm_fp32": _compiled("fp32", torch.float32, 4096)}
