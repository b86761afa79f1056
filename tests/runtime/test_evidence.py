"""Where kernels ran: what is kept of a graph, what is a fault, what a cut leaves; cuBLAS told of its lane; NVML by ctypes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from bullet.errors import PartitionError
from bullet.profiler.evidence import Evidence, faults, nodes_of, read_evidence, summary_of
from bullet.profiler.nvml import Nvml, NvmlError


class Driver:
    """Answers as cuda-bindings would for a graph of a kernel in context 77, and a memcpy."""

    def __init__(self, contexts=(77,), copies=1):
        self.contexts, self.copies = contexts, copies

    def call(self, name, *args):
        kernels = [("kernel", c) for c in self.contexts]
        nodes = [*kernels, *[("memcpy", 0)] * self.copies]
        if name == "cuGraphGetNodes":
            return (nodes if args[1] else None), len(nodes)
        if name == "cuGraphNodeGetType":
            return 0 if args[0][0] == "kernel" else 1
        if name == "cuGraphKernelNodeGetParams":
            return SimpleNamespace(func=5, kern=0, ctx=args[0][1], gridDimX=112, gridDimY=1, gridDimZ=1, blockDimX=128,
                                   blockDimY=1, blockDimZ=1)
        return {"cuFuncGetName": b"gemm_kernel", "cuCtxFromGreenCtx": 77}[name]


class Graph:
    def raw_cuda_graph(self):
        return 1

    def debug_dump(self, path):
        Path(path).write_text("digraph dot {}")


ABOUT = {"op": "engine_decode_layer", "lane": "decode", "sms": 20, "told": False}


def test_a_graph_is_kept_with_names_grids_and_contexts(tmp_path):
    path = tmp_path / "graphs.jsonl.gz"
    evidence = Evidence(path, Driver(copies=0))
    assert evidence.wants(("a",))
    evidence.keep(Graph(), ABOUT, lane_context="green")
    assert not evidence.wants(("a",))
    evidence.keep(Graph(), {**ABOUT, "op": "gemm_qkv"})
    first, second = read_evidence(path)
    assert first["nodes"] == [{"kind": "kernel", "name": "gemm_kernel", "grid": [112, 1, 1], "block": [128, 1, 1], "context": 77}]
    assert (first["context"], first["dot"], second["context"]) == (77, "digraph dot {}", None)
    assert summary_of([first]) == {"engine_decode_layer": 1}
    assert evidence.lines() == ["Where kernels ran: 2 graphs in graphs.jsonl.gz, no fault found in them"]
    path.write_bytes(path.read_bytes()[:-9])  # cut in the last member
    assert read_evidence(path) == [first]


@pytest.mark.parametrize(("driver", "said"), [
    (Driver(copies=2), "2 memcpy nodes inside the layer"), (Driver((77, 78), 0), "kernels in 2 contexts"),
    (Driver((5,), 0), "in another context than the lane's"), (Driver((0,), 0), "")])
def test_faults(tmp_path, driver, said):
    evidence = Evidence(tmp_path / "graphs.jsonl.gz", driver)
    evidence.keep(Graph(), ABOUT, lane_context="green")
    assert [said in fault for fault in evidence.faults] == [True] * bool(said)
    assert ("1 faults" in evidence.lines()[0]) == bool(said)


def test_a_copy_is_no_fault_of_a_copy():
    record = {"op": "copy", "lane": "prefill", "sms": 112, "nodes": [{"kind": "memcpy"}], "context": None}
    assert faults(record) == []


def test_what_cannot_be_read_is_said_and_costs_nothing(tmp_path):
    class Old(Driver):
        def call(self, name, *args):
            raise PartitionError(f"this cuda-bindings has no {name}")

    evidence = Evidence(tmp_path / "graphs.jsonl.gz", Old())
    evidence.keep(Graph(), ABOUT)
    (record,) = read_evidence(tmp_path / "graphs.jsonl.gz")
    assert (record["nodes"], record["dot"]) == (None, "digraph dot {}")
    assert "not all could be read: this cuda-bindings has no cuGraphGetNodes" in evidence.lines()[0]
    assert Evidence(None).lines() == []
    assert not Evidence(None).wants(("a",))


def test_nodes_are_asked_for_by_their_number():
    assert [n["kind"] for n in nodes_of(Driver(), 1)] == ["kernel", "memcpy"]


# ------------------------------------------------------------------------------------------- cuBLAS


def test_cublas_is_told_for_a_capture_and_untold_after_it():
    pytest.importorskip("torch")
    from bullet.profiler.blas import SmTarget

    calls, carved = [], []

    class Library:
        target = 0

        def cublasSetSmCountTarget(self, handle, sms):
            calls.append((handle.value, sms))
            self.target = sms
            return 0

        def cublasGetSmCountTarget(self, handle, out):
            ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = self.target
            return 0

    library = Library()
    binding = SimpleNamespace(_set_sm_carveout_experimental=carved.append)
    target = SmTarget(132, library=lambda: library, handle=lambda: 7, binding=binding)
    with target.to(None) as told:
        assert told is None
    assert calls == []
    with target.to(20) as told:
        assert told == 20
    assert calls[-1] == (7, 0)
    calls.clear()
    carved.clear()
    with pytest.raises(ValueError, match="mine"), target.to(20):  # a capture that fails takes it back too
        raise ValueError("mine")
    assert calls == [(7, 20), (7, 0)]
    assert carved == [112, None]
    with SmTarget(132, library=lambda: None, handle=lambda: 7, binding=SimpleNamespace()).to(20) as told:
        assert told is None


# ------------------------------------------------------------------------------------------- NVML


STUB = r"""
#include <string.h>
typedef struct { unsigned fieldId, scopeId; long long timestamp, latencyUsec; int valueType, nvmlReturn;
                 union { double d; unsigned u; unsigned long long ull; } value; } Field;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } Process;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(size_t)(100 + i); return 0; }
int nvmlDeviceGetClockInfo(void *h, int kind, unsigned *out) { *out = (size_t)h == 101 && kind == 1 ? 1980 : 2619; return 0; }
int nvmlDeviceGetTemperature(void *h, int s, unsigned *out) { *out = 55; return 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *out) { *out = 111000; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, unsigned long long *out) { *out = 0x24; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned n) { strncpy(text, "580.65", n); return 0; }
int nvmlDeviceGetFieldValues(void *h, int n, Field *f) {
    f[0].nvmlReturn = f[0].fieldId == 186 ? 0 : 3; f[0].value.u = 612345; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, Process *p) { *n = 2; p[0].pid = 41; p[1].pid = 42; return 0; }
int nvmlDeviceGetHandleByUUID(const char *u, void **h) { return 2; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_nvml_by_ctypes_reads_what_the_package_would(tmp_path):
    from bullet.profiler.card import CardReader

    (tmp_path / "nvml.c").write_text(STUB)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(tmp_path / "nvml.so"), str(tmp_path / "nvml.c")], check=True)
    nvml = Nvml(str(tmp_path / "nvml.so"))
    reader = CardReader("1", nvml=nvml)
    assert reader.clocks() == {"clock_sm_hz": 1.98e9, "clock_mem_hz": 2.619e9, "temperature_c": 55.0,
                               "power_w": pytest.approx(612.345), "throttle": "power cap+thermal"}
    assert reader.driver() == "580.65"
    assert reader.processes() == ["pid 41", "pid 42"]
    assert reader.quick
    with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByUUID answered 2"):
        nvml.nvmlDeviceGetHandleByUUID("GPU-1")
    with pytest.raises(OSError, match="no-such"):
        Nvml("no-such-library.so")
