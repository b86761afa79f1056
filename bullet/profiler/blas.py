"""cuBLAS told of a lane: the SM count that its heuristics aim at, set for a capture and taken back.

A green context bounds where a GEMM may run, not how many SMs cuBLAS believes it has: told nothing, it may choose tiles for the
whole device. Two settings, since torch takes GEMMs by either library: ``cublasSetSmCountTarget`` on torch's handle (cuBLAS
reference, 2.4.13; 0 is the default again), and torch's own carveout, SMs left out, which goes into cuBLASLt's descriptor.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def loaded_library(name: str, maps: Path = Path("/proc/self/maps")) -> Any:
    """A shared library that this process already has, by the beginning of its file's name; None if there is none."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.split(maxsplit=5)[-1]
        if path.rpartition("/")[2].startswith(name):
            return ctypes.CDLL(path)
    return None


class SmTarget:
    """``to(sms)`` for the time of a capture. ``library``, ``handle``, ``binding``: of torch, or a test's."""

    def __init__(self, device_sms: int, *, library: Callable[[], Any] = lambda: loaded_library("libcublas.so"),
                 handle: Callable[[], int] | None = None, binding: Any = None) -> None:
        self.device_sms = device_sms
        self._library, self._handle, self._binding = library, handle, binding

    @contextmanager
    def to(self, sms: int | None) -> Iterator[int | None]:
        """Yields the count that cuBLAS says it aims at, None where it was not told or does not say."""
        if sms is None:
            yield None
            return
        torch = importlib.import_module("torch")
        binding = self._binding or torch._C
        carve = getattr(binding, "_set_sm_carveout_experimental", None)
        library = self._library()
        handle = ctypes.c_void_p((self._handle or torch.cuda.current_blas_handle)())
        told = None
        try:
            if library is not None and library.cublasSetSmCountTarget(handle, sms) == 0:
                answer = ctypes.c_int(0)
                if library.cublasGetSmCountTarget(handle, ctypes.byref(answer)) == 0:
                    told = answer.value
            if carve is not None:
                carve(self.device_sms - sms)
            yield told
        finally:
            if library is not None and library.cublasSetSmCountTarget(handle, 0) != 0:
                log.warning("cuBLAS keeps an SM count of %d", sms)
            if carve is not None:
                carve(None)
