"""The card itself: what is read of it (never set), how fast a plan takes it to be, and what fits in its memory."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import ModelSpec
from bullet.errors import ConfigError
from bullet.profiler.plan import Rates, Shape, flops_and_bytes

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
        flops, moved = known.peak_flops, known.mem_bytes_per_s
    except ConfigError:
        flops, moved = 2.5e12 * props.num_sms, 1.2e10 * props.num_sms
    return Rates(props.num_sms, 0.6 * flops, 0.7 * moved, **overrides)


def fits_in(model: ModelSpec, dtype_bytes: int, free_bytes: int) -> Callable[[Shape], bool]:
    """Whether a shape's data, twice over (both lanes, intermediates), takes at most half of the free memory."""
    def fits(shape: Shape) -> bool:
        return 2 * flops_and_bytes(model, shape)[1] * dtype_bytes / model.dtype_bytes <= free_bytes / 2
    return fits


class CardReader:
    """Clocks, temperature, power, driver and other processes: through nvidia-ml-py, else nvidia-smi, else unknown.

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
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            nvml = None
        return cls(visible, nvml=nvml)

    def clocks(self) -> dict[str, float | None]:
        """``clock_sm_hz``, ``clock_mem_hz``, ``temperature_c``, ``power_w``; None where unknown."""
        if self._handle is not None and self._nvml is not None:
            n, h = self._nvml, self._handle
            return {"clock_sm_hz": _try(lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM) * 1e6),
                    "clock_mem_hz": _try(lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM) * 1e6),
                    "temperature_c": _try(lambda: float(n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU))),
                    "power_w": _try(lambda: n.nvmlDeviceGetPowerUsage(h) * 1e-3)}
        fields = self._query(f"--query-gpu={self.QUERY}")
        values = [_number(v) for v in fields[0]] if fields and len(fields[0]) == 4 else [None] * 4
        return {name: None if v is None else v * scale for name, v, scale in zip(
            ("clock_sm_hz", "clock_mem_hz", "temperature_c", "power_w"), values, (1e6, 1e6, 1.0, 1.0), strict=True)}

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
