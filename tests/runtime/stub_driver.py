"""A stand-in for ``cuda.bindings.driver``: same functions, same ``(code, *values)`` answers, no GPU.

It keeps the books that a real driver would: which contexts and streams live, in which order they were made and
destroyed, and which SMs each group holds. Groups are rounded up as the card's granularity asks, and made of what can hold a
cluster: on Hopper eight SMs of one GPC. Numbers of errors are the real ones (tests/runtime/test_hard_fakes.py).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803
    CUDA_ERROR_INVALID_RESOURCE_TYPE = 914
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915


SINCE = {"cuDeviceGetDevResource": 12040, "cuDevSmResourceSplitByCount": 12040, "cuDevResourceGenerateDesc": 12040,
         "cuGreenCtxCreate": 12040, "cuGreenCtxDestroy": 12040, "cuGreenCtxGetDevResource": 12040, "cuCtxFromGreenCtx": 12040,
         "cuGreenCtxStreamCreate": 12050}
"""First driver with each call: streams of green contexts came a release later."""
PRIMARY = 1
"""Handle of the primary context."""


def gpcs_of(num_sms: int) -> list[list[int]]:
    """SMs by GPC, in pairs (TPCs) dealt in turn, eight GPCs as equal as pairs allow: an H200's 132 are 6 of 16 and 2 of 18."""
    gpcs: list[list[int]] = [[] for _ in range(8)]
    for pair, gpc in zip(range(0, num_sms, 2), itertools.cycle(gpcs)):
        gpc += range(pair, min(pair + 2, num_sms))
    return gpcs


@dataclass
class Resource:
    sms: frozenset[int]

    @property
    def sm(self) -> SimpleNamespace:
        return SimpleNamespace(smCount=len(self.sms))


@dataclass
class StubDriver:
    """``fail``: call name -> (code, how many calls succeed first). ``missing``: functions an old driver lacks.

    ``absent``: attributes that old bindings lack. ``shrink``: SMs that a group silently loses, as seen on an L40S.
    """

    num_sms: int = 132
    capability: tuple[int, int] = (9, 0)
    version: int = 13000
    fail: dict[str, tuple[CUresult, int]] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    shrink: int = 0
    step: int | None = None
    """Granularity, where it is not what the card's capability says: a driver that this project does not know."""
    graphs: dict[int, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    contexts: dict[int, frozenset[int]] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)
    stack: list[int] = field(default_factory=list)
    _next: int = 1000

    def __getattribute__(self, name: str):
        if name.startswith("cu") or name.startswith("CU"):
            if name in object.__getattribute__(self, "absent"):
                raise AttributeError(name)
            if name.startswith("CU"):
                return int
            return lambda *args: object.__getattribute__(self, "_call")(name, args)
        return object.__getattribute__(self, name)

    def _call(self, name: str, args: tuple):
        self.calls.append(name)
        if name in self.missing or self.version < SINCE.get(name, 0):
            raise RuntimeError(f'Function "{name}" not found')
        if name in self.fail:
            code, left = self.fail[name]
            if left == 0:
                return (code,)
            self.fail[name] = (code, left - 1)
        answer = getattr(self, f"_{name}")(*args)
        return answer if isinstance(answer, tuple) else (CUresult.CUDA_SUCCESS, answer)

    @property
    def pushed(self) -> int | None:
        """The green context current on this thread; None: the primary one."""
        return self.stack[-1] if self.stack else None

    def _cuCtxFromGreenCtx(self, context):
        assert context in self.contexts
        return context

    def _cuCtxPushCurrent(self, context):
        self.stack.append(context)
        return (CUresult.CUDA_SUCCESS,)

    def _cuCtxPopCurrent(self):
        return self.stack.pop()

    def _handle(self) -> int:
        self._next += 1
        return self._next

    def _cuInit(self, flags):
        return (CUresult.CUDA_SUCCESS,)

    def _cuDriverGetVersion(self):
        return self.version

    def _cuDeviceGet(self, ordinal):
        return ordinal

    def _cuDeviceGetAttribute(self, attribute, device):
        return {16: self.num_sms, 75: self.capability[0], 76: self.capability[1]}[attribute]

    def _cuDeviceGetDevResource(self, device, kind):
        return Resource(frozenset(range(self.num_sms)))

    def _cuDevSmResourceSplitByCount(self, groups, resource, flags, count):
        """Of the SMs asked for, rounded up: in chunks that lie in one GPC, which no remainder is promised."""
        assert groups == 1
        hopper = self.capability[0] >= 9
        step = self.step or (8 if hopper and not flags & 1 else 2)
        size = -(-max(count, 4 if self.capability[0] == 8 else step) // step) * step
        chunk = 8 if hopper and not flags & 1 else 2
        chunks = [gpc[i:i + chunk] for gpc in gpcs_of(self.num_sms) for i in range(0, len(gpc) - chunk + 1, chunk)]
        taken = [sm for found in chunks[:-(-size // chunk)] for sm in found][:size]
        if len(taken) < size or size > len(resource.sms):
            return (CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,)
        group = Resource(frozenset(taken[:size - self.shrink]))
        return CUresult.CUDA_SUCCESS, [group], 1, Resource(resource.sms - group.sms)

    # ---- nodes of a captured graph: fake_cuda.FakeGraph keeps them

    def _cuGraphGetNodes(self, graph, count):
        nodes = self.graphs[graph].nodes
        return CUresult.CUDA_SUCCESS, list(nodes[:count]) or None, len(nodes)

    def _cuGraphNodeGetType(self, node):
        return {"kernel": 0, "memcpy": 1}[node.kind]

    def _cuGraphKernelNodeGetParams(self, node):
        return SimpleNamespace(func=1, kern=0, ctx=node.context, gridDimX=node.grid, gridDimY=1, gridDimZ=1, blockDimX=128,
                               blockDimY=1, blockDimZ=1)

    def _cuFuncGetName(self, func):
        return b"kernel"

    def _cuDevResourceGenerateDesc(self, resources, count):
        assert count == len(resources) == 1
        return resources[0]

    def _cuGreenCtxCreate(self, descriptor, device, flags):
        assert flags == 1, "CU_GREEN_CTX_DEFAULT_STREAM is required"
        handle = self._handle()
        self.contexts[handle] = descriptor.sms
        return handle

    def _cuGreenCtxGetDevResource(self, context, kind):
        return Resource(self.contexts[context])

    def _cuGreenCtxStreamCreate(self, context, flags, priority):
        assert flags == 1, "CU_STREAM_NON_BLOCKING is required"
        assert context in self.contexts
        handle = self._handle()
        self.streams[handle] = context
        return handle

    def _cuStreamDestroy(self, stream):
        context = self.streams.pop(stream)
        return (CUresult.CUDA_SUCCESS if context in self.contexts else CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED,)

    def _cuGreenCtxDestroy(self, context):
        assert context not in self.streams.values(), "a stream outlived its context"
        del self.contexts[context]
        return (CUresult.CUDA_SUCCESS,)
