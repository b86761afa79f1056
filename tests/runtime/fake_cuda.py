"""A stand-in for ``torch.cuda`` and for the probe kernels: streams with a virtual clock, no GPU.

Work takes the seconds that :meth:`FakeCuda.launch` is given. Time passes per stream; nothing sleeps. The log of calls
shows what a real device would have been asked, and the fake refuses what would silently leave a partition: capturing
anywhere but on the current, non-default stream.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from stub_driver import StubDriver


class FakeStream:
    def __init__(self, cuda: FakeCuda, handle: int | None = None, priority: int = 0) -> None:
        self.cuda, self.handle, self.priority, self.now = cuda, handle, priority, 0.0
        cuda.streams.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append("wait")
        self.now = max(self.now, event.at)

    def synchronize(self) -> None:
        self.cuda.log.append("synchronize")
        self.cuda.host = max(self.cuda.host, self.now)

    @property
    def sms(self) -> frozenset[int]:
        stub = self.cuda.stub
        if self.handle is None:
            return frozenset(range(stub.num_sms))
        return stub.contexts[stub.streams[self.handle]]


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.at = cuda, 0.0

    def record(self, stream: FakeStream) -> None:
        assert self.cuda.capturing is None
        self.cuda.log.append("record")
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
        return (other.at - self.at) * 1e3


class FakeGraph:
    """Keeps torch's books on memory pools: a pool without a living graph is refused, a failed end keeps it recording."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.seconds, self.effects, self.stream, self.ended = cuda, 0.0, [], None, False
        self.broken = ""

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

    def __del__(self) -> None:
        if self.ended:
            self.cuda.pool_graphs[self.pool] -= 1

    def debug_dump(self, path: str) -> None:
        with open(path, "w") as out:
            out.write("digraph dot { }")

    def raw_cuda_graph(self) -> int:
        return id(self)

    def replay(self) -> None:
        self.cuda.log.append("replay")
        self.cuda.spend(self.cuda.current, self.seconds)
        # A node's context is the capture's; ``graphs_leak`` is the silent bypass that the check must find.
        leak = {"": False, "always": True, "without context": self.context is None}[self.cuda.graphs_leak]
        where = FakeStream(self.cuda) if leak else self.stream
        for effect in self.effects:
            effect(where)


class FakeCuda:
    """``serial``: lanes run one after the other. ``fail_at``: launch number -> message; ``sticky``: then all fail.

    ``graphs_leak``: graphs run on the whole device: ``always``, or ``without context`` current at their capture.
    """

    def __init__(self, stub: StubDriver, *, serial: bool = False, graphs_leak: str = "", sticky: bool = False,
                 fail_at: dict[int, str] | None = None, free_share: float = 0.5) -> None:
        self.stub, self.serial, self.graphs_leak, self.sticky = stub, serial, graphs_leak, sticky
        self.fail_at = fail_at or {}
        self.free_share = free_share
        self.log: list[str] = []
        self.current: FakeStream | None = None
        self.capturing: FakeGraph | None = None
        self.lost = False
        self.launches = 0
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
        return FakeGraph(self)

    def current_blas_handle(self) -> int:
        return 7

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

    def mem_get_info(self) -> tuple[int, int]:
        return int(self.free_share * 2**37), 2**37

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def empty_cache(self) -> None:
        self.log.append("empty_cache")
        if self.recording:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def spend(self, stream: FakeStream, seconds: float) -> None:
        stream.now = max(stream.now, self.host, self.last if self.serial and seconds else 0.0) + seconds
        self.last = max(self.last, stream.now)

    def launch(self, seconds: float, effect=None) -> None:
        """One kernel on the current stream, or into the graph being captured."""
        assert self.current is not None, "launched on the default stream"
        self.launches += 1
        if self.lost or self.launches in self.fail_at:
            self.lost = self.lost or self.sticky
            if self.capturing is not None:
                self.capturing.broken = "yes"
            raise RuntimeError(self.fail_at.get(self.launches, "CUDA error: an illegal memory access was encountered"))
        if self.capturing is not None:
            self.capturing.seconds += seconds
            if effect is not None:
                self.capturing.effects.append(effect)
            return
        self.spend(self.current, seconds)
        if effect is not None:
            effect(self.current)


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
        self.cuda.launch(spin_ns * 1e-9, effect)

    def launch_gate(self, out: object, spin_ns: int) -> None:
        self.cuda.launch(spin_ns * 1e-9)

    def launch_clock(self, out: object, spin_ns: int) -> None:
        def effect(stream: FakeStream) -> None:
            out[0], out[1] = round(self.CLOCK_HZ * spin_ns * 1e-9), spin_ns
        self.cuda.launch(spin_ns * 1e-9, effect)

    def launch_tensor_spin(self, out: object, num_sms: int, spin_ns: int) -> None:
        self.cuda.launch(spin_ns * 1e-9)

    def launch_l2_stream(self, source: object, out: object, num_sms: int) -> None:
        self.cuda.launch(1e-4)

    def launch_alu_spin(self, out: object, num_sms: int, spin_ns: int) -> None:
        self.cuda.launch(spin_ns * 1e-9)

    def launch_memory_stream(self, source: object, target: object, num_sms: int) -> None:
        self.cuda.launch(1e-4)


class FakeShop:
    """Workloads whose repetition takes as long as the plan's rates say on the lane's SMs."""

    def __init__(self, cuda: FakeCuda, model, rates) -> None:
        self.cuda, self.model, self.rates = cuda, model, rates
        self.device = "cpu"
        self.built: list[str] = []
        self.cleared = 0

    def build(self, op: str, tokens: int, batch: int, context_tokens: int, role: str) -> SimpleNamespace:
        from bullet.profiler.shapes import Shape

        shape = Shape(op, tokens, batch, context_tokens)
        self.built.append(op)

        def run(index: int) -> None:
            assert 0 <= index < 2
            self.cuda.launch(self.rates.seconds(self.model, shape, len(self.cuda.current.sms)))
        return SimpleNamespace(name=op, run=run, rotation=2, takes_num_sms=False)

    def clear(self) -> None:
        self.cleared += 1
