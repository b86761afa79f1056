"""The card itself: what is read of it (never set), how fast a plan takes it to be, and what fits in its memory."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bullet import work
from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import ModelSpec
from bullet.errors import ConfigError
from bullet.profiler.nvml import Nvml
from bullet.profiler.plan import Rates
from bullet.profiler.shapes import Shape, flops_and_bytes
from bullet.profiler.timing import L2_MULTIPLE, MAX_ROTATION

log = logging.getLogger(__name__)


@dataclass
class Props:
    """What is read of the device once."""

    name: str
    num_sms: int
    capability: tuple[int, int]
    l2_bytes: int
    total_bytes: int


def rates_for(props: Props, **overrides: Any) -> Rates:
    """Planning speeds: data-sheet peaks of a known GPU at assumed efficiencies, else an assumed per-SM rate."""
    try:
        known = get_gpu(props.name)
        part = min(1.0, props.num_sms / known.num_sms)  # of a card that is cut up (MIG)
        flops, moved = part * known.peak_flops, part * known.mem_bytes_per_s
    except ConfigError:
        flops, moved = 2.5e12 * props.num_sms, 1.2e10 * props.num_sms
    return Rates(props.num_sms, 0.6 * flops, 0.7 * moved, **overrides)


WORKSPACE_BYTES = 32 << 20
"""cuBLAS's, one for each stream (Hopper's; less elsewhere)."""
CONTEXT_BYTES = 44 << 20
"""A green context's own. As reported by others."""


@dataclass(frozen=True)
class MemoryPlan:
    """What a sweep holds at its fullest. Graphs of one stream share a pool as large as the largest of them; streams share
    nothing, so activations count once for each lane; weights and caches are one set for each phase."""

    layers_bytes: int
    caches_bytes: int
    activations_bytes: int
    streams_bytes: int
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.layers_bytes + self.caches_bytes + self.activations_bytes + self.streams_bytes

    def line(self) -> str:
        """For the plan."""
        gib = 1 << 30
        return (f"  memory: {self.total_bytes / gib:.1f} of {self.free_bytes / gib:.1f} GiB free: weights "
                f"{self.layers_bytes / gib:.1f}, caches {self.caches_bytes / gib:.1f}, activations "
                f"{self.activations_bytes / gib:.1f}, streams and contexts {self.streams_bytes / gib:.1f}")


def memory_plan(model: ModelSpec, shapes: Iterable[Shape], lanes: int, dtype_bytes: int, l2_bytes: int, free_bytes: int
                ) -> MemoryPlan:
    """Of these shapes on so many prefill lanes and as many of decode, each set rotated past L2."""
    layers = work.layer_kernels(model, [(1, 0)], 0, 0)
    weights = int(sum(k.bytes for k in layers) * dtype_bytes / model.dtype_bytes)
    caches, activations = {"prefill": 0, "decode": 0}, {"prefill": 0, "decode": 0}
    for shape in shapes:
        role = "decode" if shape.phase == "decode" else "prefill"
        total = shape.context_tokens + (0 if role == "decode" else shape.tokens // shape.batch)
        if shape.op.endswith(("layer", "attention")):
            one = 2 * shape.batch * total * model.num_kv_heads * model.head_dim * dtype_bytes
            caches[role] = max(caches[role], one, min(int(L2_MULTIPLE * l2_bytes), MAX_ROTATION * one))
        activations[role] = max(activations[role], work.activation_bytes(model, shape.tokens, dtype_bytes))
    return MemoryPlan(2 * max(weights, int(L2_MULTIPLE * l2_bytes)), sum(caches.values()),
                      (lanes + 2) * sum(activations.values()), (2 * lanes + 4) * (WORKSPACE_BYTES + CONTEXT_BYTES), free_bytes)


def fits_in(model: ModelSpec, dtype_bytes: int, free_bytes: int, lanes: int = 1) -> Callable[[Shape], bool]:
    """Whether a shape's data, twice over (both phases), and its activations on each of ``lanes`` lanes take at most half of the
    free memory."""
    def fits(shape: Shape) -> bool:
        held = lanes * work.activation_bytes(model, shape.tokens, dtype_bytes) if shape.op.endswith("_layer") else 0
        return 2 * flops_and_bytes(model, shape)[1] * dtype_bytes / model.dtype_bytes + held <= free_bytes / 2
    return fits


POWER_INSTANT = 186
"""NVML_FI_DEV_POWER_INSTANT: nvmlDeviceGetPowerUsage is an average over a second on cards since Ampere, longer than a window."""
THROTTLE = {0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "thermal",
            0x40: "hardware thermal", 0x80: "power brake", 0x100: "display clocks"}
"""Bits of nvmlDeviceGetCurrentClocksThrottleReasons; bit 0, an idle card, is none while a window runs."""


class CardReader:
    """Clocks, temperature, power, throttle reasons, driver and other processes: through NVML (nvidia-ml-py, else the library
    itself), else nvidia-smi, else unknown.

    Reads only. nvidia-smi takes long, so an answer is kept for ``keep_s``, and for 20 times as long as it took.
    """

    QUERY = "clocks.sm,clocks.mem,temperature.gpu,power.draw"

    def __init__(self, ordinal: str = "0", *, nvml: Any = None, command: Callable[[list[str]], str] | None = None,
                 clock: Callable[[], float] = time.monotonic, keep_s: float = 10.0) -> None:
        self._ordinal = ordinal
        self._clock, self._keep_s = clock, keep_s
        self._command = command or _nvidia_smi
        self._kept: dict[str, tuple[float, list[list[str]]]] = {}
        self._nvml, self._handle = nvml, None
        if nvml is not None:
            try:
                nvml.nvmlInit()
                self._handle = (nvml.nvmlDeviceGetHandleByIndex(int(ordinal)) if ordinal.isdigit()
                                else nvml.nvmlDeviceGetHandleByUUID(ordinal))
            except Exception as exc:  # nvml raises its own classes, one per error
                log.info("nvidia-ml-py is no help here: %s", exc)
                self._nvml = None

    @classmethod
    def open(cls) -> CardReader:
        """For the first visible GPU."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
        nvml: Any
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            try:
                nvml = Nvml()
            except OSError:
                nvml = None
        return cls(visible, nvml=nvml)

    def clocks(self) -> dict[str, Any]:
        """``clock_sm_hz``, ``clock_mem_hz``, ``temperature_c``, ``power_w``, ``throttle``; None where unknown."""
        if self._handle is not None and self._nvml is not None:
            n, h = self._nvml, self._handle
            return {"clock_sm_hz": _try(lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM) * 1e6),
                    "clock_mem_hz": _try(lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM) * 1e6),
                    "temperature_c": _try(lambda: float(n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU))),
                    "power_w": self._power_w(), "throttle": self._throttle()}
        fields = self._query(f"--query-gpu={self.QUERY}")
        values = [_number(v) for v in fields[0]] if fields and len(fields[0]) == 4 else [None] * 4
        return {"throttle": None, **{name: None if v is None else v * scale for name, v, scale in zip(
            ("clock_sm_hz", "clock_mem_hz", "temperature_c", "power_w"), values, (1e6, 1e6, 1.0, 1.0), strict=True)}}

    @property
    def quick(self) -> bool:
        """Whether an answer takes microseconds: a window is then watched while it runs, and not asked about once."""
        return self._handle is not None and self._nvml is not None

    def _power_w(self) -> float | None:
        n, h = self._nvml, self._handle
        found = _try(lambda: n.nvmlDeviceGetFieldValues(h, [POWER_INSTANT])[0])
        if found is not None and found.nvmlReturn == 0 and found.value.uiVal:
            return float(found.value.uiVal) * 1e-3
        milliwatts = _try(lambda: n.nvmlDeviceGetPowerUsage(h))
        return None if milliwatts is None else milliwatts * 1e-3

    def _throttle(self) -> str | None:
        n, h = self._nvml, self._handle
        bits = _try(lambda: n.nvmlDeviceGetCurrentClocksThrottleReasons(h))
        return None if bits is None else "+".join(name for bit, name in THROTTLE.items() if int(bits) & bit)

    def driver(self) -> str | None:
        """The driver's version."""
        if self._handle is not None and self._nvml is not None:
            version = _try(self._nvml.nvmlSystemGetDriverVersion)
            return version.decode() if isinstance(version, bytes) else version
        fields = self._query("--query-gpu=driver_version")
        return fields[0][0] if fields else None

    def processes(self) -> list[str]:
        """Compute processes on the card, ours not yet among them if asked before CUDA is initialised."""
        if self._handle is not None and self._nvml is not None:
            n, h = self._nvml, self._handle
            found = _try(lambda: n.nvmlDeviceGetComputeRunningProcesses(h)) or []
            return [f"pid {p.pid}" for p in found if p.pid != os.getpid()]
        return [f"pid {f[0]} ({f[1]})" for f in self._query("--query-compute-apps=pid,process_name")
                if len(f) == 2 and f[0] != str(os.getpid())]

    def forget(self) -> None:
        """The next answers are fresh."""
        self._kept.clear()

    def _query(self, what: str) -> list[list[str]]:
        until_s, answer = self._kept.get(what, (float("-inf"), []))
        began_s = self._clock()
        if began_s < until_s:
            return answer
        try:
            text = self._command(["nvidia-smi", "-i", self._ordinal, what, "--format=csv,noheader,nounits"])
        except (OSError, subprocess.SubprocessError):
            text = ""
        answer = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
        ended_s = self._clock()
        self._kept[what] = ended_s + max(self._keep_s, 20 * (ended_s - began_s)), answer
        return answer


def _nvidia_smi(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout


def _try(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:  # a field that this card or driver does not report
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
