"""Operations captured as graphs on the lanes' own streams, and trains of their replays behind one gate.

What must never happen here, because it would silently leave the partition or disturb the window: capturing with
``torch.cuda.graph`` (it captures on a stream of its own), ``do_bench`` (it synchronises the device), and any
synchronisation, allocation or capture between the first and the last event of a window. Graphs are captured on the
lane's stream, where a node's context is fixed.

    lane A:  warm-up | gate ... | replay | replay | replay | replay |
    lane B:  warm-up | wait for the gate | r | r | r | r | r | r | r |
                                         ^ kept: replays of one lane inside the other's first start and last end

The gate is a kernel that spins while the host queues both trains, so that no replay waits for the host.

Not yet run on a GPU.
"""

from __future__ import annotations

import importlib
import logging
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from bullet.catalog.models import ModelSpec
from bullet.errors import one_line
from bullet.gpu.partition import Lane, PartitionTable
from bullet.profiler import timing
from bullet.profiler.bench import Load, PointError, no_limit
from bullet.profiler.card import Props
from bullet.profiler.plan import Shape, flops_and_bytes

log = logging.getLogger(__name__)

QUEUE_PER_CALL_S = 30e-6
"""Host time to queue one replay with its two events; sets how long the gate holds. *Assumed*, generous."""
GATE_MIN_S, GATE_MAX_S = 1e-3, 60e-3
TRAIN_LIMIT = 1500
ALU_SPIN_S = 5e-4
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


@dataclass
class Graph:
    """``repeats`` repetitions captured on one stream; ``replay_s``: one replay, measured alone after capture."""

    graph: Any
    repeats: int
    replay_s: float
    bytes: float | None
    keep: Any = None


class LaneGraphs:
    """Owns graphs, their data and their memory pools, and caches them while there is room.

    ``kernels``: :mod:`bullet.kernels.probe`, or None where triton is missing: a gate then is torch's own.
    """

    def __init__(self, model: ModelSpec, table: PartitionTable, props: Props, workloads: Any, cuda: Any, kernels: Any, *,
                 dtype_bytes: int, min_replay_s: float) -> None:
        self.model, self.table, self.props = model, table, props
        self.shop, self.cuda, self.kernels = workloads, cuda, kernels
        self.enter = False
        """Whether a lane's green context is made current wherever its stream is."""
        self.captured: dict[tuple[Any, int], Graph] = {}
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

    def _clear(self) -> None:
        self.captured.clear()
        self._pools.clear()
        self._void.clear()
        self._works.clear()
        self.shop.clear()

    def graph(self, shape: Shape, lane: Lane, role: str) -> Graph:
        """``shape`` on the lane's stream, bound to its SMs where the kernel takes them."""
        key = (shape, id(lane.stream))
        if key not in self.captured:
            work = self.workload(shape, role)
            if getattr(work, "on", None) is not None:
                work = work.on(lane.sms)
            self.table.allow(work.name, work.takes_num_sms)
            self.captured[key] = self.capture(lane, work, self.least_bytes(shape))
        return self.captured[key]

    def control(self, name: str, lane: Lane) -> Graph:
        """A contention source bounded to the lane's SMs; without triton, torch's own copy for the memory stream."""
        key = (name, id(lane.stream))
        if key in self.captured:
            return self.captured[key]
        kernels = self.kernels
        torch = importlib.import_module("torch")
        device = self.shop.device
        if name == "alu_spin":
            if kernels is None:
                raise PointError("control alu_spin needs triton: pip install triton, or do without it")
            out = torch.empty(lane.sms * kernels.ALU_BLOCKS_PER_SM * kernels.ALU_BLOCK, dtype=torch.float32, device=device)
            work = Load("alu_spin", lambda i: kernels.launch_alu_spin(out, lane.sms, int(ALU_SPIN_S * 1e9)))
            moved = None
        else:
            elements = max(1 << 16, int(timing.L2_MULTIPLE * self.props.l2_bytes / 4))
            source, target = torch.rand(elements, device=device), torch.empty(elements, device=device)
            if kernels is None:
                work = Load("memory_stream", lambda i: target.copy_(source))
            else:
                work = Load("memory_stream", lambda i: kernels.launch_memory_stream(source, target, lane.sms))
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
        key = ((id(graph.keep), times), id(lane.stream))
        if key not in self.captured:
            self.captured[key] = self.capture_repeats(lane, graph.keep, graph.repeats * times, graph.bytes)
            self._time_alone(lane, self.captured[key])
        return self.captured[key]

    def capture_repeats(self, lane: Lane, work: Any, count: int, moved: float | None) -> Graph:
        """``count`` repetitions in one graph. Graphs of one stream never run at once, so they share a memory pool.

        torch refuses a pool whose last graph has gone, so the stream's first graph is kept as long as its pool is.
        """
        cuda, key = self.cuda, id(lane.stream)
        pool = self._pools[key][0] if key in self._pools else cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        with self.on(lane):
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
        (train,) = self.run([(lane, graph, 4)])
        graph.replay_s = statistics.median(i.end_s - i.start_s for i in train[1:])

    # ---- the window -------------------------------------------------------------------------------

    def run(self, trains: Sequence[tuple[Lane, Graph, int]]) -> list[list[timing.Interval]]:
        """Queue every train behind one gate and read the events afterwards; nothing synchronises in between.

        The train with fewer replays is queued first: should the other fill its stream's queue, the host then waits with
        that queue full, and neither lane runs dry.
        """
        cuda = self.cuda
        first = trains[0][0].stream
        calls = sum(min(count, 400) for _, _, count in trains)
        gate_s = min(GATE_MAX_S, max(GATE_MIN_S, QUEUE_PER_CALL_S * calls))
        events = [[(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(count)]
                  for _, _, count in trains]
        opened = cuda.Event(enable_timing=True)
        for lane, graph, _ in trains:
            with self.on(lane):
                graph.graph.replay()  # untimed: brings code and clocks in
            if lane.stream is not first:
                warm = cuda.Event(enable_timing=True)
                warm.record(lane.stream)
                first.wait_event(warm)  # the gate opens after every warm-up, or a lane would start late
        with self.on(trains[0][0]):
            self.gate(gate_s)
            opened.record(first)
        for lane, _, _ in trains[1:]:
            lane.stream.wait_event(opened)
        for at in sorted(range(len(trains)), key=lambda i: trains[i][2]):
            lane, graph, _ = trains[at]
            with self.on(lane):
                for start, end in events[at]:
                    start.record(lane.stream)
                    graph.graph.replay()
                    end.record(lane.stream)
        for lane_events in events:
            lane_events[-1][1].synchronize()
        return [[timing.Interval(opened.elapsed_time(start) * 1e-3, opened.elapsed_time(end) * 1e-3)
                 for start, end in lane_events] for lane_events in events]

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
