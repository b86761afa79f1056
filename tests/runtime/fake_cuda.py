"""A stand-in for ``torch.cuda`` and for the probe kernels: streams with a virtual clock, no GPU.

Work takes the seconds that :meth:`FakeCuda.launch` is given. Time passes per stream; nothing sleeps. The log of calls
shows what a real device would have been asked, and the fake refuses what would silently leave a partition: capturing
anywhere but on the current, non-default stream.

What a card may do to a sweep, each as an option of :class:`FakeCuda`: tie events to contexts, run out of memory, let a library
leave its lane, copy inside a layer, fail for good at some launch, change its clocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

from stub_driver import PRIMARY, StubDriver

INVALID_HANDLE = "CUDA error: invalid resource handle"


class FakeStream:
    def __init__(self, cuda: FakeCuda, handle: int | None = None, priority: int = 0) -> None:
        self.cuda, self.handle, self.priority, self.now = cuda, handle, priority, 0.0
        cuda.streams.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        """Of whatever context: waiting across contexts is what the driver's manual allows."""
        self.cuda.log.append("wait")
        self.now = max(self.now, event.at)

    def synchronize(self) -> None:
        self.cuda.log.append("synchronize")
        self.cuda.host = max(self.cuda.host, self.now)

    @property
    def context(self) -> int:
        """That its work runs in; a stream that the driver has destroyed has none."""
        if self.handle is None:
            return PRIMARY
        stub = self.cuda.stub
        if stub.streams.get(self.handle) not in stub.contexts:
            raise RuntimeError(INVALID_HANDLE)
        return stub.streams[self.handle]

    @property
    def sms(self) -> frozenset[int]:
        stub = self.cuda.stub
        return frozenset(range(stub.num_sms)) if self.handle is None else stub.contexts[self.context]


class FakeEvent:
    """Made when it is first recorded, as torch makes them: in the context that is current then."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.at, self.context = cuda, 0.0, None

    def record(self, stream: FakeStream) -> None:
        assert self.cuda.capturing is None
        self.cuda.log.append("record")
        if self.context is None:
            self.context = self.cuda.stub.pushed or PRIMARY
        if self.cuda.strict_events and self.context != stream.context:
            raise RuntimeError(INVALID_HANDLE)
        self.cuda.spend(stream, 0.0)
        self.at = stream.now

    def synchronize(self) -> None:
        self.cuda.log.append("synchronize")
        self.cuda.host = max(self.cuda.host, self.at)

    def query(self) -> bool:
        """A look takes the host to the event: nothing here passes time by itself."""
        self.cuda.host = max(self.cuda.host, self.at)
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        if self.cuda.strict_events and self.context != other.context:
            raise RuntimeError(INVALID_HANDLE)
        return (other.at - self.at) * 1e3


class FakeGraph:
    """Keeps torch's books on memory pools: a pool without a living graph is refused, a failed end keeps it recording.
    ``nodes``: what the driver would say that it consists of."""

    def __init__(self, cuda: FakeCuda, keep_graph: bool = False) -> None:
        self.cuda, self.seconds, self.effects, self.stream, self.ended = cuda, 0.0, [], None, False
        self.broken, self.nodes, self.kept = "", [], keep_graph

    def capture_begin(self, pool, capture_error_mode="global") -> None:
        cuda = self.cuda
        assert cuda.current is not None, "captured on the default stream: on the primary context"
        assert cuda.capturing is None
        assert cuda.pool_stream.setdefault(pool, cuda.current) is cuda.current, "a pool shared between streams"
        if cuda.pool_graphs.get(pool, 1) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        if pool in cuda.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        cuda.pool_graphs[pool] = cuda.pool_graphs.get(pool, 0) + 1
        cuda.log.append("capture")
        cuda.capturing, self.stream, self.pool = self, cuda.current, pool
        self.context = cuda.stub.pushed
        cuda.recording.add(pool)

    def capture_end(self) -> None:
        assert self.cuda.current is self.stream
        self.cuda.capturing = None
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda.recording.discard(self.pool)
        self.ended = True
        self.cuda.host += self.cuda.capture_s
        if self.kept:
            self.cuda.stub.graphs[id(self)] = self

    def __del__(self) -> None:
        self.cuda.stub.graphs.pop(id(self), None)
        if self.ended:
            self.cuda.pool_graphs[self.pool] -= 1

    def debug_dump(self, path: str) -> None:
        with open(path, "w") as out:
            out.write("digraph dot { }")

    def raw_cuda_graph(self) -> int:
        return id(self)

    def replay(self) -> None:
        self.cuda.log.append("replay")
        if self.cuda.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.cuda.spend(self.cuda.current, self.seconds)
        # A node's context is the capture's; ``graphs_leak`` is the silent bypass that the check must find.
        leak = {"": False, "always": True, "without context": self.context is None}[self.cuda.graphs_leak]
        where = FakeStream(self.cuda) if leak else self.stream
        for effect in self.effects:
            effect(where)


class Boost:
    """Clocks of a card under its power cap: highest after a rest, lower the longer it works, as 1 + extra x exp(-t / settle)."""

    REST_S = 0.01

    def __init__(self, extra: float = 0.25, settle_s: float = 0.08) -> None:
        self.extra, self.settle_s, self.began, self.ended = extra, settle_s, 0.0, -1.0

    def __call__(self, at_s: float) -> float:
        if at_s > self.ended + self.REST_S:
            self.began = at_s
        return 1 + self.extra * math.exp(-max(0.0, at_s - self.began) / self.settle_s)

    def worked_until(self, at_s: float) -> None:
        self.ended = max(self.ended, at_s)


class FakeCuda:
    """``serial``: lanes run one after the other. ``fail_at``: launch number, or (name, which of that name) -> message;
    ``sticky``: then all fail. A kernel of a graph that is kept counts as ``kept`` too.

    ``graphs_leak``: graphs run on the whole device: ``always``, or ``without context`` current at their capture.
    ``strict_events``: an event is of the context that was current when it was made, is recorded on streams of that context only,
    and measures no time to another's. ``total_bytes``: what :meth:`charge` may hold. ``escapes``: operations (beginnings of their
    names) whose library leaves the lane: kernels on all SMs, in the primary context. ``copies``: operations with a memcpy node.
    ``clock``: seconds -> clock relative to the nominal one. ``capture_s``: host time of a capture, in which the card is idle.
    """

    def __init__(self, stub: StubDriver, *, serial: bool = False, graphs_leak: str = "", sticky: bool = False,
                 fail_at: dict[int | tuple[str, int], str] | None = None, free_share: float = 0.5, strict_events: bool = False,
                 total_bytes: int | None = None, escapes: tuple[str, ...] = (), copies: tuple[str, ...] = (),
                 clock: Callable[[float], float] = lambda at_s: 1.0, capture_s: float = 0.0) -> None:
        self.stub, self.serial, self.graphs_leak, self.sticky = stub, serial, graphs_leak, sticky
        self.fail_at = fail_at or {}
        self.free_share, self.strict_events = free_share, strict_events
        self.escapes, self.copies, self.clock, self.capture_s = escapes, copies, clock, capture_s
        self.total_bytes, self.charged, self.peak = total_bytes, 0, 0
        self.log: list[str] = []
        self.current: FakeStream | None = None
        self.capturing: FakeGraph | None = None
        self.lost = False
        self.launches = 0
        self.counts: Counter[str] = Counter()
        self.pool_graphs: dict[int, int] = {}
        self.pool_stream: dict[int, FakeStream] = {}
        self.recording: set[int] = set()
        self.pools = 0
        self.last = 0.0
        self.host = 0.0
        self.streams: list[FakeStream] = []

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    def Stream(self, priority: int = 0) -> FakeStream:
        return FakeStream(self, None, priority)

    def ExternalStream(self, handle: int) -> FakeStream:
        return FakeStream(self, handle)

    def CUDAGraph(self, keep_graph: bool = False) -> FakeGraph:
        return FakeGraph(self, keep_graph)

    def current_blas_handle(self) -> int:
        return 7

    def _sleep(self, cycles: int) -> None:
        self.launch(cycles / 1.5e9, name="sleep")

    @contextmanager
    def stream(self, stream: FakeStream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.host = max([self.host, *(stream.now for stream in self.streams)])
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def charge(self, moved: int) -> None:
        """Take memory, or give it back."""
        if self.total_bytes is not None and self.charged + moved > self.total_bytes:
            raise RuntimeError(f"CUDA out of memory. Tried to allocate {moved / 2**30:.2f} GiB")
        self.charged += moved
        self.peak = max(self.peak, self.charged)

    def mem_get_info(self) -> tuple[int, int]:
        if self.total_bytes is not None:
            return self.total_bytes - self.charged, self.total_bytes
        return int(self.free_share * 2**37), 2**37

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def empty_cache(self) -> None:
        self.log.append("empty_cache")
        if self.recording:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def spend(self, stream: FakeStream, seconds: float) -> None:
        began = max(stream.now, self.host, self.last if self.serial and seconds else 0.0)
        stream.now = began + (seconds / self.clock(began) if seconds else 0.0)
        self.last = max(self.last, stream.now)
        if seconds and isinstance(self.clock, Boost):
            self.clock.worked_until(stream.now)

    def launch(self, seconds: float, effect=None, name: str = "kernel") -> None:
        """One kernel on the current stream, or into the graph being captured."""
        assert self.current is not None, "launched on the default stream"
        context = PRIMARY if self.escaped(name) else self.current.context
        self.launches += 1
        names = [name, *["kept"] * (self.capturing is not None and self.capturing.kept)]
        self.counts.update(names)
        failing = [key for key in (self.launches, *((n, self.counts[n]) for n in names)) if key in self.fail_at]
        if self.lost or failing:
            self.lost = self.lost or self.sticky
            if self.capturing is not None:
                self.capturing.broken = "yes"
            raise RuntimeError(self.fail_at[failing[0]] if failing else "CUDA error: an illegal memory access was encountered")
        if self.capturing is not None:
            self.capturing.seconds += seconds
            self.capturing.nodes.append(SimpleNamespace(kind="kernel", name=name, context=context, grid=len(self.current.sms)))
            if name in self.copies:
                self.capturing.nodes.append(SimpleNamespace(kind="memcpy"))
            if effect is not None:
                self.capturing.effects.append(effect)
            return
        self.spend(self.current, seconds)
        if effect is not None:
            effect(self.current)

    def escaped(self, name: str) -> bool:
        return bool(self.escapes) and name.startswith(self.escapes)


class FakeArray(list):
    def cpu(self) -> FakeArray:
        return self

    def tolist(self) -> list[int]:
        return list(self)


class FakeKernels:
    """The face of ``bullet.kernels.probe``: probes read the stub driver's books."""

    BLOCKS_PER_SM, OVERSUBSCRIPTION, ALU_BLOCKS_PER_SM, ALU_BLOCK = 1, 2, 1, 1
    TENSOR_TILE, STREAM_BLOCK, STREAM_BLOCKS_PER_SM, L2_PASSES = 4, 4, 1, 2
    CLOCK_HZ = 1.5e9

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def ProbeBuffers(self, blocks: int, device: object) -> SimpleNamespace:
        buffers = SimpleNamespace(blocks=blocks, smid=FakeArray([-1] * blocks), start=FakeArray([0] * blocks),
                                  end=FakeArray([0] * blocks))

        def poison() -> None:
            buffers.smid[:] = [-1] * blocks
        buffers.poison = poison
        return buffers

    def launch_probe(self, buffers: SimpleNamespace, spin_ns: int) -> None:
        def effect(stream: FakeStream) -> None:
            sms = sorted(stream.sms)
            began = round(stream.now * 1e9)
            for block in range(buffers.blocks):
                buffers.smid[block] = sms[block % len(sms)]
                buffers.start[block] = began
                buffers.end[block] = began + 1000
        self.cuda.launch(spin_ns * 1e-9, effect, "probe")

    def launch_gate(self, out: object, spin_ns: int) -> None:
        self.cuda.launch(spin_ns * 1e-9, name="gate")

    def launch_clock(self, out: object, spin_ns: int) -> None:
        def effect(stream: FakeStream) -> None:
            out[0], out[1] = round(self.CLOCK_HZ * self.cuda.clock(stream.now) * spin_ns * 1e-9), spin_ns
        self.cuda.launch(spin_ns * 1e-9, effect, "clock")

    def launch_tensor_spin(self, out: object, num_sms: int, spin_ns: int) -> None:
        self.cuda.launch(spin_ns * 1e-9, name="tensor_spin")

    def launch_l2_stream(self, source: object, out: object, num_sms: int) -> None:
        self.cuda.launch(1e-4, name="l2_stream")

    def launch_alu_spin(self, out: object, num_sms: int, spin_ns: int) -> None:
        self.cuda.launch(spin_ns * 1e-9, name="alu_spin")

    def launch_memory_stream(self, source: object, target: object, num_sms: int) -> None:
        self.cuda.launch(1e-4, name="memory_stream")


class FakeShop:
    """Workloads whose repetition takes as long as the plan's rates say on the lane's SMs, and whose data takes memory where the
    fake has an end of it: what an operation reads, once for each phase, and its activations, once for each stream."""

    def __init__(self, cuda: FakeCuda, model, rates) -> None:
        self.cuda, self.model, self.rates = cuda, model, rates
        self.device = "cpu"
        self.built: list[str] = []
        self.cleared = 0
        self.held: dict[object, int] = {}

    def build(self, op: str, tokens: int, batch: int, context_tokens: int, role: str) -> SimpleNamespace:
        from bullet import work
        from bullet.profiler.shapes import Shape, flops_and_bytes

        shape = Shape(op, tokens, batch, context_tokens)
        self.built.append(op)
        self._hold((shape, role), int(flops_and_bytes(self.model, shape)[1]))
        activations = work.activation_bytes(self.model, tokens, 2) if op.endswith("_layer") else 0

        def run(index: int) -> None:
            assert 0 <= index < 2
            stream = self.cuda.current
            self._hold((id(stream), "activations"), activations)
            sms = self.cuda.stub.num_sms if self.cuda.escaped(op) else len(stream.sms)
            self.cuda.launch(self.rates.seconds(self.model, shape, sms), name=op)
        return SimpleNamespace(name=op, run=run, rotation=2, takes_num_sms=False)

    def _hold(self, key: object, wanted: int) -> None:
        if self.cuda.total_bytes is not None and wanted > self.held.get(key, 0):
            self.cuda.charge(wanted - self.held.get(key, 0))
            self.held[key] = wanted

    def clear(self) -> None:
        self.cleared += 1
        self.cuda.charge(-sum(self.held.values()))
        self.held.clear()
