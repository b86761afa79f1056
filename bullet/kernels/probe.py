"""Triton kernels that prove partitions, make contention and read clocks: SM probe, spins of the arithmetic and of the tensor
cores, streams through memory and through L2, a spinning gate, and cycles over nanoseconds.

``%smid`` names the SM a thread block runs on, ``%globaltimer`` is a nanosecond clock common to all SMs (PTX ISA,
special registers; its resolution varies, about 1 us on some GPUs: spins are tens of microseconds). Inline assembly has
no interpreter: on CPU these kernels are only compiled, for sm_80, sm_89 and sm_90.

Not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

PROBE_WARPS = 4
BLOCKS_PER_SM = 32
"""More blocks than any SM holds at once (16 to 32 of 128 threads)."""
OVERSUBSCRIPTION = 4
"""Waves of a probe over a whole device: every SM that may be used is used."""


# Times are not specialised on (1, multiples of 16): a kernel compiles once, at its first launch, never before a window.


@triton.jit
def _now():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _smid():
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _cycles():
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["spin_ns"])
def sm_probe_kernel(smid_ptr, start_ptr, end_ptr, spin_ns):
    """Each block notes its SM, spins for ``spin_ns``, and notes when it started and ended (ns)."""
    block = tl.program_id(0)
    start = _now()
    now = start
    while now - start < spin_ns:
        now = _now()
    tl.store(smid_ptr + block, _smid())
    tl.store(start_ptr + block, start)
    tl.store(end_ptr + block, now)


@triton.jit(do_not_specialize=["spin_ns"])
def gate_kernel(out_ptr, spin_ns):
    """One block holds its stream for ``spin_ns``, while the host queues what comes after."""
    start = _now()
    now = start
    while now - start < spin_ns:
        now = _now()
    tl.store(out_ptr, now - start)


@triton.jit(do_not_specialize=["spin_ns"])
def clock_kernel(out_ptr, spin_ns):
    """One block counts its SM's cycles over ``spin_ns``: cycles, then nanoseconds. Both begin with a tick of the timer, whose
    resolution then adds nothing."""
    before = _now()
    start = before
    while start == before:
        start = _now()
    first = _cycles()
    now = start
    while now - start < spin_ns:
        now = _now()
    tl.store(out_ptr, _cycles() - first)
    tl.store(out_ptr + 1, now - start)


@triton.jit(do_not_specialize=["spin_ns"])
def tensor_spin_kernel(out_ptr, spin_ns, TILE: tl.constexpr):
    """Products of tiles on the tensor cores for ``spin_ns``, nothing but the result stored: the power of prefill's GEMMs without
    their memory traffic. Operands have varied bits, since equal ones draw less."""
    rows = tl.arange(0, TILE)
    bits = (rows[:, None] * 1103515245 + rows[None, :] * 12345 + tl.program_id(0)) & 1023
    a = ((bits - 512).to(tl.float32) * 1e-3).to(tl.float16)
    b = ((((bits * 7) & 1023) - 512).to(tl.float32) * 1e-3).to(tl.float16)
    acc = tl.zeros((TILE, TILE), tl.float32)
    start = _now()
    now = start
    while now - start < spin_ns:
        for _ in range(32):
            acc = tl.dot(a, b, acc)
        now = _now()
    tl.store(out_ptr + rows[:, None] * TILE + rows[None, :], acc)


@triton.jit
def l2_stream_kernel(src_ptr, out_ptr, num_elements, passes, BLOCK: tl.constexpr):
    """Reads a buffer that fits in L2 ``passes`` times, past L1 (``.cg``): traffic between SMs and L2 that no memory sees."""
    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(passes):
        at = tl.program_id(0).to(tl.int64) * BLOCK
        while at < num_elements:
            index = at + lanes
            total += tl.load(src_ptr + index, mask=index < num_elements, other=0.0, cache_modifier=".cg")
            at += step
    tl.store(out_ptr + tl.program_id(0) * BLOCK + lanes, total)


@triton.jit(do_not_specialize=["spin_ns"])
def alu_spin_kernel(out_ptr, spin_ns, BLOCK: tl.constexpr):
    """Dependent multiply-adds in registers for ``spin_ns``: keeps an SM's arithmetic busy, memory idle."""
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    x = lanes.to(tl.float32) * 1e-6
    start = _now()
    now = start
    while now - start < spin_ns:
        for _ in range(64):  # 64 between looks at the timer, so that the timer is not what is measured
            x = x * 0.999 + 0.001
        now = _now()
    tl.store(out_ptr + block * BLOCK + lanes, x)


@triton.jit
def memory_stream_kernel(src_ptr, dst_ptr, num_elements, BLOCK: tl.constexpr):
    """Persistent copy: the grid's blocks stride over the buffer; how many there are bounds the SMs it can use."""
    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    at = tl.program_id(0).to(tl.int64) * BLOCK
    while at < num_elements:
        index = at + lanes
        mask = index < num_elements
        tl.store(dst_ptr + index, tl.load(src_ptr + index, mask=mask), mask=mask)
        at += step


ALU_BLOCK = 1024
STREAM_BLOCK = 4096
STREAM_BLOCKS_PER_SM = 4
ALU_BLOCKS_PER_SM = 8
TENSOR_TILE = 64
TENSOR_BLOCKS_PER_SM = 4
L2_PASSES = 16

# Signatures for a compile without a GPU: name -> (kernel, argument types, compile-time constants).
COMPILED: dict[str, tuple[Any, dict[str, str], dict[str, int]]] = {
    "sm_probe": (sm_probe_kernel, {"smid_ptr": "*i32", "start_ptr": "*i64", "end_ptr": "*i64", "spin_ns": "i64"}, {}),
    "gate": (gate_kernel, {"out_ptr": "*i64", "spin_ns": "i64"}, {}),
    "clock": (clock_kernel, {"out_ptr": "*i64", "spin_ns": "i64"}, {}),
    "tensor_spin": (tensor_spin_kernel, {"out_ptr": "*fp32", "spin_ns": "i64", "TILE": "constexpr"}, {"TILE": TENSOR_TILE}),
    "l2_stream": (l2_stream_kernel, {"src_ptr": "*fp32", "out_ptr": "*fp32", "num_elements": "i64", "passes": "i64",
                                     "BLOCK": "constexpr"}, {"BLOCK": STREAM_BLOCK}),
    "alu_spin": (alu_spin_kernel, {"out_ptr": "*fp32", "spin_ns": "i64", "BLOCK": "constexpr"}, {"BLOCK": ALU_BLOCK}),
    "memory_stream": (memory_stream_kernel,
                      {"src_ptr": "*fp32", "dst_ptr": "*fp32", "num_elements": "i64", "BLOCK": "constexpr"},
                      {"BLOCK": STREAM_BLOCK}),
}


def compile_for(name: str, capability: int, integers: str = "i64") -> Any:
    """Compile one kernel for ``sm_<capability>`` (80, 89, 90) without a GPU; returns Triton's compiled kernel.

    ``integers``: the type of plain numbers; at a launch Triton takes ``i32`` for those that fit.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, signature, constants = COMPILED[name]
    signature = {argument: integers if kind == "i64" else kind for argument, kind in signature.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": PROBE_WARPS})


def _require_int64(value: int, what: str) -> int:
    if not 0 < value < 2**62:
        raise ValueError(f"{what} = {value}: must be a positive 64-bit number")
    return value


class ProbeBuffers:
    """Outputs of one probe launch: SM, start and end of each block. Allocated once, poisoned before each use."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        self.blocks = blocks
        self.smid = torch.full((blocks,), -1, dtype=torch.int32, device=device)
        self.start = torch.zeros(blocks, dtype=torch.int64, device=device)
        self.end = torch.zeros(blocks, dtype=torch.int64, device=device)

    def poison(self) -> None:
        """So that a block that never ran shows as SM -1."""
        self.smid.fill_(-1)


def launch_probe(buffers: ProbeBuffers, spin_ns: int) -> None:
    """On the current stream."""
    sm_probe_kernel[(buffers.blocks,)](buffers.smid, buffers.start, buffers.end, _require_int64(spin_ns, "spin_ns"),
                                       num_warps=PROBE_WARPS)


def launch_gate(out: torch.Tensor, spin_ns: int) -> None:
    """Hold the current stream; ``out``: one int64."""
    gate_kernel[(1,)](out, _require_int64(spin_ns, "spin_ns"), num_warps=1)


def launch_clock(out: torch.Tensor, spin_ns: int) -> None:
    """Cycles and nanoseconds into ``out``, two int64, on the current stream."""
    clock_kernel[(1,)](out, _require_int64(spin_ns, "spin_ns"), num_warps=1)


def launch_tensor_spin(out: torch.Tensor, num_sms: int, spin_ns: int) -> None:
    """Tensor cores of ``num_sms`` SMs; ``out``: float32, ``TENSOR_TILE`` squared."""
    if out.numel() < TENSOR_TILE**2:
        raise ValueError(f"out has {out.numel()} elements: tensor_spin needs {TENSOR_TILE**2}")
    tensor_spin_kernel[(num_sms * TENSOR_BLOCKS_PER_SM,)](out, _require_int64(spin_ns, "spin_ns"), TILE=TENSOR_TILE,
                                                          num_warps=PROBE_WARPS)


def launch_l2_stream(src: torch.Tensor, out: torch.Tensor, num_sms: int) -> None:
    """Read ``src`` (float32, contiguous) :data:`L2_PASSES` times with a grid bounded by ``num_sms``; ``out``: float32, a
    ``STREAM_BLOCK`` for each of ``num_sms * STREAM_BLOCKS_PER_SM`` programs."""
    programs = num_sms * STREAM_BLOCKS_PER_SM
    if src.dtype != torch.float32 or not src.is_contiguous() or out.numel() < programs * STREAM_BLOCK:
        raise ValueError(f"l2_stream reads a contiguous float32 buffer into {programs * STREAM_BLOCK} sums, got {src.dtype} and "
                         f"{out.numel()}")
    l2_stream_kernel[(programs,)](src, out, src.numel(), L2_PASSES, BLOCK=STREAM_BLOCK, num_warps=8)


def launch_alu_spin(out: torch.Tensor, num_sms: int, spin_ns: int) -> None:
    """Arithmetic on ``num_sms`` SMs' worth of blocks; ``out``: float32, ``num_sms * ALU_BLOCKS_PER_SM * ALU_BLOCK``."""
    blocks = num_sms * ALU_BLOCKS_PER_SM
    if out.numel() < blocks * ALU_BLOCK:
        raise ValueError(f"out has {out.numel()} elements: alu_spin on {num_sms} SMs needs {blocks * ALU_BLOCK}")
    alu_spin_kernel[(blocks,)](out, _require_int64(spin_ns, "spin_ns"), BLOCK=ALU_BLOCK, num_warps=PROBE_WARPS)


def launch_memory_stream(src: torch.Tensor, dst: torch.Tensor, num_sms: int) -> None:
    """``dst = src`` (float32, contiguous, same size) with a grid bounded by ``num_sms``."""
    if src.dtype != torch.float32 or dst.dtype != torch.float32 or src.numel() != dst.numel():
        raise ValueError(f"memory_stream copies float32 buffers of one size, got {src.dtype} x {src.numel()} and "
                         f"{dst.dtype} x {dst.numel()}")
    if not (src.is_contiguous() and dst.is_contiguous()):
        raise ValueError("memory_stream needs contiguous buffers")
    programs = num_sms * STREAM_BLOCKS_PER_SM
    memory_stream_kernel[(programs,)](src, dst, src.numel(), BLOCK=STREAM_BLOCK, num_warps=8)


def memory_stream_reference(src: torch.Tensor, dst: torch.Tensor) -> None:
    """What :func:`launch_memory_stream` does, in torch."""
    dst.copy_(src)
