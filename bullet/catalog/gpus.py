"""GPUs as their data sheets state them; sources stand beside the numbers."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass

from bullet.errors import ConfigError, require
from bullet.units import GIB, GIGA, MIB, TERA

PEAK_SLACK = 1.02
"""Measured operations a second may exceed the data sheet's by this: cards boost above its clock (RTX 4090: by 0.5 %)."""
BYTES_SLACK = 1.05
"""Likewise bytes a second, what the L2 cache can hold aside."""
FLOOR_S = 20e-6
"""What a kernel may take beyond its roofline however small it is: launch, ramp-up, tail."""
UNIT_FACTOR = 100.0
"""Further from its neighbours, or above its roofline, than this, a value is in another unit."""

# ----------------------------------------------------------------------------------------------- GPUs


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """A GPU as its data sheet states it, and the partition rules of its compute capability.

    ``peak_flops``: dense bf16 tensor-core operations per second, no sparsity. ``bandwidth_knee_sms``: the
    inflection ``N_d`` of eq. 1, SMs at which memory bandwidth saturates; ``None`` where nobody published one.
    ``mem_bytes``: the sheets' GB of memory are GiB (an 80 GB A100 reports 81,920 MiB), their GB/s are 10^9.
    """

    name: str
    num_sms: int
    peak_flops: float
    mem_bytes_per_s: float
    mem_bytes: int
    l2_bytes: int
    compute_capability: tuple[int, int]
    link_bytes_per_s: float
    bandwidth_knee_sms: int | None
    source: str

    def __post_init__(self) -> None:
        for name in ("num_sms", "peak_flops", "mem_bytes_per_s", "mem_bytes"):
            require(getattr(self, name) > 0, f"gpu {self.name}: {name}", getattr(self, name), "positive")

    @property
    def knee_sms(self) -> int:
        """``N_d``; where unpublished, A100's share of the device (30 of 108, Fig. 8): *assumed*."""
        if self.bandwidth_knee_sms is not None:
            return self.bandwidth_knee_sms
        return max(1, round(self.num_sms * 30 / 108))


GPUS: Mapping[str, GpuSpec] = types.MappingProxyType({g.name: g for g in (
    # NVIDIA A100 Tensor Core GPU data sheet (80GB SXM): 312 TFLOPS bf16, 2039 GB/s, NVLink 600 GB/s both ways;
    # 108 SMs and 40 MB L2: A100 architecture whitepaper. N_d = 30: the paper's Fig. 8.
    GpuSpec("a100-80gb", 108, 312 * TERA, 2039 * GIGA, 80 * GIB, 40 * MIB, (8, 0), 300 * GIGA, 30,
            "NVIDIA A100 80GB SXM data sheet; GA100 whitepaper; N_d from the paper, Fig. 8"),
    # NVIDIA H100 Tensor Core GPU data sheet (SXM): 1,979 TFLOPS bf16 with sparsity = 989.4 dense, 3.35 TB/s,
    # NVLink 900 GB/s both ways; 132 SMs and 50 MB L2: Hopper architecture whitepaper.
    GpuSpec("h100", 132, 989.4 * TERA, 3350 * GIGA, 80 * GIB, 50 * MIB, (9, 0), 450 * GIGA, None,
            "NVIDIA H100 SXM data sheet; GH100 whitepaper"),
    # NVIDIA H200 data sheet (SXM): same GH100 compute, 141 GB, 4.8 TB/s.
    GpuSpec("h200", 132, 989.4 * TERA, 4800 * GIGA, 141 * GIB, 50 * MIB, (9, 0), 450 * GIGA, None,
            "NVIDIA H200 SXM data sheet; GH100 whitepaper"),
    # H20: 148 TFLOPS bf16 dense, 4.0 TB/s, 96 GB, 78 SMs (the paper's Table 3; public H20 specification sheets).
    GpuSpec("h20", 78, 148 * TERA, 4000 * GIGA, 96 * GIB, 60 * MIB, (9, 0), 450 * GIGA, None,
            "public H20 specification sheets; SM count as in the paper, Table 3"),
    # NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090: 128 SMs, 165.2 TFLOPS bf16 with fp32 accumulate,
    # 1008 GB/s, 24 GB, 72 MB L2; no NVLink: PCIe 4.0 x16, 32 GB/s each way.
    GpuSpec("rtx4090", 128, 165.2 * TERA, 1008 * GIGA, 24 * GIB, 72 * MIB, (8, 9), 32 * GIGA, None,
            "NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090"),
)})


def get_gpu(name: str) -> GpuSpec:
    """A built-in GPU by name."""
    if name not in GPUS:
        raise ConfigError(f"unknown gpu {name!r}: choose one of {', '.join(GPUS)}")
    return GPUS[name]
