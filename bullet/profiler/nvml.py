"""NVML by ctypes, for a machine without nvidia-ml-py: the few calls that :class:`bullet.profiler.card.CardReader` makes, under
the names and with the answers of that package. Only what reads.

Source: NVML API reference; layouts of ``nvmlFieldValue_t`` and ``nvmlProcessInfo_t`` (version 2) as in its header.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0


class NvmlError(RuntimeError):
    """A call that NVML answered with an error number."""


class _FieldValue(ctypes.Structure):
    _fields_ = [("fieldId", ctypes.c_uint), ("scopeId", ctypes.c_uint), ("timestamp", ctypes.c_longlong),
                ("latencyUsec", ctypes.c_longlong), ("valueType", ctypes.c_int), ("nvmlReturn", ctypes.c_int),
                ("value", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong), ("gpuInstanceId", ctypes.c_uint),
                ("computeInstanceId", ctypes.c_uint)]


class Nvml:
    """``OSError`` where there is no library."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU

    def __init__(self, path: str = "libnvidia-ml.so.1") -> None:
        self._library = ctypes.CDLL(path)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise NvmlError(f"{name} answered {code}")

    def _uint(self, name: str, *arguments: Any) -> int:
        answer = ctypes.c_uint(0)
        self._call(name, *arguments, ctypes.byref(answer))
        return answer.value

    def nvmlInit(self) -> None:
        self._call("nvmlInit_v2")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return handle

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        return self._uint("nvmlDeviceGetClockInfo", handle, ctypes.c_int(kind))

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return self._uint("nvmlDeviceGetTemperature", handle, ctypes.c_int(sensor))

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._uint("nvmlDeviceGetPowerUsage", handle)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        answer = ctypes.c_ulonglong(0)
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(answer))
        return answer.value

    def nvmlSystemGetDriverVersion(self) -> str:
        text = ctypes.create_string_buffer(80)
        self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        return text.value.decode()

    def nvmlDeviceGetFieldValues(self, handle: Any, fields: list[int]) -> list[Any]:
        values = (_FieldValue * len(fields))(*(_FieldValue(fieldId=field) for field in fields))
        self._call("nvmlDeviceGetFieldValues", handle, ctypes.c_int(len(fields)), values)
        return [SimpleNamespace(nvmlReturn=v.nvmlReturn, value=SimpleNamespace(uiVal=v.value & 0xFFFFFFFF)) for v in values]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        count = ctypes.c_uint(64)
        found = (_Process * count.value)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), found)
        return [SimpleNamespace(pid=found[i].pid) for i in range(min(count.value, len(found)))]
