"""Operations captured as graphs on the lanes' own streams, and trains of their replays behind one gate.

What must never happen here, because it would silently leave the partition or disturb the window: capturing with
``torch.cuda.graph`` (it captures on a stream of its own), ``do_bench`` (it synchronises the device), and any
synchronisation, allocation or capture between the first and the last event of a window. Graphs are captured on the
lane's stream, where a node's context is fixed.

    lane A:  gate | lead, untimed: r r r | replay | replay | clock | replay | replay | next window ..
    lane B:  wait | lead: r r r r r r r r| r | r | r | r | clock | r | r | r | r | r | wait for A, next window ..
                                             ^ kept: replays of one lane inside the other's first end and last end

The gate is a kernel that spins while the host queues both trains, so that no replay waits for the host. All windows of a cell are
queued at once: while one runs the host queues the next, and the card is never idle between them. A small kernel in the middle of
each train counts cycles over nanoseconds: the SM clock inside the window, where the driver's own is an average or comes late.

Not yet run on a GPU.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from bullet.catalog.models import ModelSpec
from bullet.errors import ResultsError, one_line
from bullet.gpu.partition import Lane, PartitionTable
from bullet.profiler import timing
from bullet.profiler.bench import DeviceLostError, Load, PointError, no_limit
from bullet.profiler.blas import SmTarget
from bullet.profiler.card import Props
from bullet.profiler.evidence import Evidence
from bullet.profiler.shapes import Shape, flops_and_bytes

log = logging.getLogger(__name__)

QUEUE_PER_CALL_S = 30e-6
"""Host time to queue one replay with its two events; sets how long the gate holds. *Assumed*, generous."""
GATE_MIN_S, GATE_MAX_S = 1e-3, 60e-3
LEAD_COVERS_S = 20e-3
"""A lead this long gives the host time to queue what follows: a short gate then starts the lanes together."""
TRAIN_LIMIT = 1500
SPIN_S = 1e-3
"""One repetition of a load that spins."""
CLOCK_NS = 100_000
"""The clock kernel's spin: 32 to 1000 ns of the timer's resolution are then at most 1 %."""
L2_SHARE = 0.3
"""Of L2, that the L2 stream reads: so that it stays there beside another lane's traffic."""
WATCH_S = 4e-3
"""Between two looks at the card while a window runs."""
HANG_S, LEAST_HANG_S = 120.0, 60.0
"""A point, an anchor or a probe that takes longer hangs; the second where the budget ends before. *Assumed*: the longest point
of an 8B model takes some seconds, the first of a layer of ours compiles for some ten."""
FREE_SHARE = 0.12
"""Below this share of free memory, cached graphs and data are dropped before more is built."""


@contextmanager
def bounded(what: str, left_s: Callable[[], float] = no_limit) -> Iterator[None]:
    """End the process, status 3, if the body takes ``HANG_S``, or less where the budget ends in ``left_s``: a wait for a GPU
    that hangs cannot be interrupted, not even by a signal. Rows are on disk by then, and the driver takes back the contexts of
    a process that ends.
    """
    limit_s = min(HANG_S, max(LEAST_HANG_S, left_s()))

    def hung() -> None:
        sys.stderr.write(f"bullet-profile: error: {what}: the GPU has not answered for {limit_s:.0f} s: rows until here are "
                         "kept (`bullet-profile table` makes their table); the same command resumes\n")
        sys.stderr.flush()
        os._exit(3)

    timer = threading.Timer(limit_s, hung)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection within: a graph that is collected in mid-capture is destroyed there, which voids the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class Graph:
    """``repeats`` repetitions captured on one stream; ``replay_s``: one replay, measured alone after capture."""

    graph: Any
    repeats: int
    replay_s: float
    bytes: float | None
    keep: Any = None
    cublas_sms: int | None = None


@dataclass
class Train:
    """What one lane does in a window: ``lead`` untimed replays, then ``count`` timed ones."""

    lane: Lane
    graph: Graph
    count: int
    lead: int = 0


@dataclass
class Ran:
    """One lane of one window. ``warm_s``: seconds of its lead; ``loaded_s``: from the gate's opening to its first timed replay;
    ``clock_hz``: SM clock inside it. ``card``: what the driver said while the window ran."""

    intervals: list[timing.Interval]
    warm_s: float = 0.0
    loaded_s: float = 0.0
    clock_hz: float | None = None
    card: dict[str, Any] = field(default_factory=dict)


class LaneGraphs:
    """Owns graphs, their data and their memory pools, and caches them while there is room.

    ``kernels``: :mod:`bullet.kernels.probe`, or None where triton is missing: a gate then is torch's own.
    """

    def __init__(self, model: ModelSpec, table: PartitionTable, props: Props, workloads: Any, cuda: Any, kernels: Any, *,
                 dtype_bytes: int, min_replay_s: float, blas: SmTarget | None = None) -> None:
        self.model, self.table, self.props = model, table, props
        self.blas = blas or SmTarget(props.num_sms)
        self.evidence = Evidence(None)
        self.shop, self.cuda, self.kernels = workloads, cuda, kernels
        self.enter = False
        """Whether a lane's green context is made current wherever its stream is."""
        self.captured: dict[tuple[Any, ...], Graph] = {}
        self._clocks: dict[int, Any] = {}
        self._dtype_bytes, self._min_replay_s = dtype_bytes, min_replay_s
        self._works: dict[tuple[Shape, str], Any] = {}
        self._pools: dict[int, tuple[Any, Any]] = {}
        self._void: list[Any] = []
        self._gate_out: Any = None

    def least_bytes(self, shape: Shape) -> float:
        """That ``shape`` moves, in the element type of the data."""
        return flops_and_bytes(self.model, shape)[1] * self._dtype_bytes / self.model.dtype_bytes

    def workload(self, shape: Shape, role: str) -> Any:
        """Its data, which the lanes do not share."""
        role = "decode" if role == "decode" else "prefill"
        key = (shape, role)
        if key not in self._works:
            self._make_room()
            self._works[key] = self.shop.build(*shape, role=role)
        return self._works[key]

    def _make_room(self) -> None:
        free, total = self.cuda.mem_get_info()
        if free < FREE_SHARE * total:
            self.drop()

    def drop(self) -> None:
        """Give back what is cached: it is made again when it is asked for."""
        with bounded("dropping what was cached"):
            self.cuda.synchronize()
        self._clear()
        try:
            self.cuda.empty_cache()
        except RuntimeError as exc:  # torch's allocator refuses after a capture that failed; memory is then reused, not freed
            log.info("cache not emptied: %s", one_line(exc, 200))

    def release(self) -> None:
        """Drop graphs and data for good; they must go before the streams they were captured on."""
        try:
            self.cuda.synchronize()
        except RuntimeError as exc:
            log.warning("while cleaning up: %s", one_line(exc, 200))
        self._clear()
        self._gate_out = None
        self._clocks.clear()

    def _clear(self) -> None:
        self.captured.clear()
        self._pools.clear()
        self._void.clear()
        self._works.clear()
        self.shop.clear()

    def graph(self, shape: Shape, lane: Lane, role: str, told: bool = False) -> Graph:
        """``shape`` on the lane's stream, bound to its SMs where the kernel takes them; ``told``: cuBLAS knows of them too."""
        key = (shape, id(lane.stream), lane.sms, told)
        if key not in self.captured:
            work = self.workload(shape, role)
            if getattr(work, "on", None) is not None:
                work = work.on(lane.sms)
            self.table.allow(work.name, work.takes_num_sms)
            with self.blas.to(lane.sms if told else None) as cublas_sms:
                graph = self.captured[key] = self.capture(lane, work, self.least_bytes(shape))
                graph.cublas_sms = cublas_sms
                self._keep_evidence(shape.op, lane, told, work)
        return self.captured[key]

    def _keep_evidence(self, op: str, lane: Lane, told: bool, work: Any) -> None:
        """One repetition once more, in a graph that is kept whole and never launched. It costs no row: a torch that keeps no
        graph, or a driver that does not tell, is said at the end."""
        if not self.evidence.wants((op, id(lane.stream), lane.sms, told)):
            return
        with self.evidence.within():
            try:
                graph = self.capture_repeats(lane, work, 1, None, keep_graph=True).graph
                self.evidence.keep(graph, {"op": op, "lane": lane.name, "sms": lane.sms, "told": told}, lane.context)
            except ResultsError:
                raise
            except Exception as exc:
                self.evidence.cannot(exc)
                try:
                    self.cuda.synchronize()
                except RuntimeError as lost:
                    raise DeviceLostError(f"reading the graph of {op}: the GPU answers no more ({one_line(lost, 200)}): rows "
                                          "until here are kept; the same command resumes, without this reading") from None

    def control(self, name: str, lane: Lane) -> Graph:
        """A contention source bounded to the lane's SMs; without triton, torch's own copy for the memory stream."""
        key = (name, id(lane.stream), lane.sms)
        if key in self.captured:
            return self.captured[key]
        kernels = self.kernels
        torch = importlib.import_module("torch")
        device = self.shop.device
        moved: float | None = None
        if kernels is None and name != "memory_stream":
            raise PointError(f"control {name} needs triton: pip install triton, or do without it")
        if name == "alu_spin":
            out = torch.empty(lane.sms * kernels.ALU_BLOCKS_PER_SM * kernels.ALU_BLOCK, dtype=torch.float32, device=device)
            work = Load(name, lambda i: kernels.launch_alu_spin(out, lane.sms, int(SPIN_S * 1e9)))
        elif name == "tensor_spin":
            out = torch.empty(kernels.TENSOR_TILE**2, dtype=torch.float32, device=device)
            work = Load(name, lambda i: kernels.launch_tensor_spin(out, lane.sms, int(SPIN_S * 1e9)))
        elif name == "l2_stream":
            source = torch.rand(max(1 << 12, int(L2_SHARE * self.props.l2_bytes / 4)), device=device)
            out = torch.empty(lane.sms * kernels.STREAM_BLOCKS_PER_SM * kernels.STREAM_BLOCK, dtype=torch.float32, device=device)
            work = Load(name, lambda i: kernels.launch_l2_stream(source, out, lane.sms))
            moved = 4.0 * source.numel() * kernels.L2_PASSES
        else:
            elements = max(1 << 16, int(timing.L2_MULTIPLE * self.props.l2_bytes / 4))
            source, target = torch.rand(elements, device=device), torch.empty(elements, device=device)
            work = Load(name, lambda i: target.copy_(source) if kernels is None
                        else kernels.launch_memory_stream(source, target, lane.sms))
            moved = 8.0 * elements
        self.captured[key] = self.capture(lane, work, moved)
        return self.captured[key]

    def capture(self, lane: Lane, work: Any, moved: float | None) -> Graph:
        """Warm up eagerly, capture one round of the input sets, time it, and capture longer if that is too short."""
        # Inputs are made on the default stream; a capture must see them whole.
        self.cuda.synchronize()
        with self.on(lane):
            for i in range(min(work.rotation, 3)):
                work.run(i)
        lane.stream.synchronize()
        graph = self.capture_repeats(lane, work, work.rotation, moved)
        self._time_alone(lane, graph)
        wanted = timing.repeats(graph.replay_s / graph.repeats, self._min_replay_s, work.rotation)
        if wanted > graph.repeats:
            graph = self.capture_repeats(lane, work, wanted, moved)
            self._time_alone(lane, graph)
        return graph

    def stretched(self, lane: Lane, graph: Graph, times: int) -> Graph:
        """The same with ``times`` as many repetitions in a replay."""
        if times <= 1:
            return graph
        key = (id(graph), times, id(lane.stream))
        if key not in self.captured:
            longer = self.captured[key] = self.capture_repeats(lane, graph.keep, graph.repeats * times, graph.bytes)
            longer.cublas_sms = graph.cublas_sms
            self._time_alone(lane, longer)
        return self.captured[key]

    def capture_repeats(self, lane: Lane, work: Any, count: int, moved: float | None, *, keep_graph: bool = False) -> Graph:
        """``count`` repetitions in one graph. Graphs of one stream never run at once, so they share a memory pool.

        torch refuses a pool whose last graph has gone, so the stream's first graph is kept as long as its pool is.
        """
        cuda, key = self.cuda, id(lane.stream)
        pool = self._pools[key][0] if key in self._pools else cuda.graph_pool_handle()
        graph = cuda.CUDAGraph(keep_graph=True) if keep_graph else cuda.CUDAGraph()
        with self.on(lane), _no_collection():
            try:
                graph.capture_begin(pool, capture_error_mode="thread_local")
                for i in range(count):
                    work.run(i % work.rotation)
                graph.capture_end()
            except BaseException:
                self._abandon(graph, pool, key)
                raise
        self._pools.setdefault(key, (pool, graph))
        return Graph(graph, count, 0.0, moved, keep=work)

    def _abandon(self, graph: Any, pool: Any, key: int) -> None:
        """End a capture that failed; the first error is the one to report.

        Up to torch 2.11 a failed ``capture_end`` leaves the allocator recording into the pool, and the next capture into
        it, or emptying the cache, fails: recording is ended by hand, and the stream gets a new pool.
        """
        try:
            graph.capture_end()
        except Exception as exc:
            log.info("capture abandoned: %s", one_line(exc, 200))
            with suppress(Exception):
                binding = importlib.import_module("torch")._C
                binding._cuda_endAllocateToPool(0, pool)
                binding._cuda_releasePool(0, pool)
        self._void.append((graph, self._pools.pop(key, None)))

    def _time_alone(self, lane: Lane, graph: Graph) -> None:
        ((ran,),) = self.run([[Train(lane, graph, 4, 1)]], clocks=False)
        graph.replay_s = statistics.median(i.end_s - i.start_s for i in ran.intervals[1:])

    # ---- the window -------------------------------------------------------------------------------

    def run(self, windows: Sequence[Sequence[Train]], *, clocks: bool = True,
            read_card: Callable[[], dict[str, Any]] | None = None) -> list[list[Ran]]:
        """Queue every window's trains, each window behind the end of the one before, and read the events afterwards; nothing
        synchronises in between. ``clocks``: a clock kernel in each train. ``read_card``: asked again and again meanwhile.

        The train with fewer replays is queued first: should the other fill its stream's queue, the host then waits with that
        queue full, and neither lane runs dry. Lanes that the device serialises then run one train after the other, which shows.
        """
        cuda, clocks = self.cuda, clocks and self.kernels is not None
        lanes = {id(t.lane.stream): t.lane for window in windows for t in window}
        first = windows[0][0].lane
        queued = [[_Queued(cuda, t, self._clock_out(t.lane, number) if clocks else None) for t in window]
                  for number, window in enumerate(windows)]
        opened = cuda.Event(enable_timing=True)
        for lane in lanes.values():  # what is still under way ends before the gate, or a lane would start late
            if lane.stream is not first.stream:
                before = cuda.Event(enable_timing=True)
                with self.on(lane):  # an event is made in the context that is current, and may be of no use in another
                    before.record(lane.stream)
                first.stream.wait_event(before)
        with self.on(first):
            self.gate(self._gate_s(windows[0]))
            opened.record(first.stream)
        # Each lane's own zero, for the same reason: the gate's end as it hears of it, some microseconds late.
        zeros = {key: opened if lane is first else cuda.Event(enable_timing=True) for key, lane in lanes.items()}
        for key, lane in lanes.items():
            if zeros[key] is not opened:
                lane.stream.wait_event(opened)
                with self.on(lane):
                    zeros[key].record(lane.stream)
        ended = [opened]
        for window in queued:
            for one in window:
                for event in ended:
                    one.train.lane.stream.wait_event(event)
            self._queue(window)
            ended = [one.events[-1][1] for one in window]
        cards = [self._watch(window, read_card) for window in queued]
        for one in queued[-1]:
            one.events[-1][1].synchronize()
        return [[one.read(zeros[id(one.train.lane.stream)], card) for one in window]
                for window, card in zip(queued, cards, strict=True)]

    @staticmethod
    def _gate_s(window: Sequence[Train]) -> float:
        if all(t.lead * t.graph.replay_s >= LEAD_COVERS_S for t in window):
            return 2 * GATE_MIN_S
        return min(GATE_MAX_S, max(GATE_MIN_S, QUEUE_PER_CALL_S * sum(min(t.count + t.lead, 400) for t in window)))

    def _queue(self, window: Sequence[_Queued]) -> None:
        for one in sorted(window, key=lambda o: o.train.count + o.train.lead):
            train, stream = one.train, one.train.lane.stream
            with self.on(train.lane):
                one.began.record(stream)
                for _ in range(train.lead):
                    train.graph.graph.replay()
                for at, (start, end) in enumerate(one.events):
                    if one.clock is not None and at == train.count // 2:
                        self.kernels.launch_clock(one.clock, CLOCK_NS)
                    start.record(stream)
                    train.graph.graph.replay()
                    end.record(stream)

    def _watch(self, window: Sequence[_Queued], read_card: Callable[[], dict[str, Any]] | None) -> dict[str, Any]:
        """What ``read_card`` says between the window's first timed replay and its last: means of numbers, all reasons."""
        if read_card is None:
            return {}
        looks: list[dict[str, Any]] = []
        starts, ends = ([one.events[at][at] for one in window] for at in (0, -1))
        while not all(event.query() for event in ends):
            if all(event.query() for event in starts):
                looks.append(read_card())
            time.sleep(WATCH_S)
        looks = looks or [read_card()]
        out: dict[str, Any] = {}
        for name in looks[0]:
            values = [look[name] for look in looks if look[name] is not None]
            if name == "throttle":
                out[name] = "+".join(sorted({r for v in values for r in v.split("+") if r})) if values else None
            else:
                out[name] = statistics.fmean(values) if values else None
        return out

    def _clock_out(self, lane: Lane, number: int) -> Any:
        """Where the clock kernel of a lane's train in window ``number`` writes; made once, since nothing is allocated later."""
        key = hash((id(lane.stream), number))
        if key not in self._clocks:
            torch = importlib.import_module("torch")
            self._clocks[key] = torch.zeros(2, dtype=torch.int64, device=self.shop.device)
            self.cuda.synchronize()
        return self._clocks[key]

    def gate(self, seconds: float) -> None:
        """Hold the current stream for so long."""
        if self.kernels is None:
            self.cuda._sleep(int(seconds * 1.5e9))  # cycles, at about 1.5 GHz
            return
        if self._gate_out is None:
            torch = importlib.import_module("torch")
            self._gate_out = torch.zeros(1, dtype=torch.int64, device=self.shop.device)
        self.kernels.launch_gate(self._gate_out, int(seconds * 1e9))

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """The lane's stream is current; with ``enter`` its green context too."""
        with (self.table.current(lane) if self.enter else nullcontext()), self.cuda.stream(lane.stream):
            yield


class _Queued:
    """A train on its way, with its events, made beforehand."""

    def __init__(self, cuda: Any, train: Train, clock: Any) -> None:
        self.train, self.clock = train, clock
        self.began = cuda.Event(enable_timing=True)
        self.events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(train.count)]

    def read(self, opened: Any, card: dict[str, Any]) -> Ran:
        """After the end: seconds since ``opened``, the lane's zero."""
        intervals = [timing.Interval(opened.elapsed_time(start) * 1e-3, opened.elapsed_time(end) * 1e-3)
                     for start, end in self.events]
        cycles, nanoseconds = self.clock.cpu().tolist() if self.clock is not None else (0, 0)
        return Ran(intervals, intervals[0].start_s - opened.elapsed_time(self.began) * 1e-3, intervals[0].start_s,
                   cycles / nanoseconds * 1e9 if nanoseconds > 0 and cycles > 0 else None, card)
