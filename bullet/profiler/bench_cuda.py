"""A CUDA GPU under measurement: partitions' own streams, graph replays, events on the same stream.

What must never happen here, because it would silently leave the partition or disturb the window: capturing with
``torch.cuda.graph`` (it captures on a stream of its own), ``do_bench`` (it synchronises the device), and any
synchronisation, allocation or capture between the first and the last event of a window. Graphs are captured on the
lane's stream, where a node's context is fixed.

    lane A:  warm-up | gate ... | replay | replay | replay | replay |
    lane B:  warm-up | wait for the gate | r | r | r | r | r | r | r |
                                         ^ kept: replays of one lane inside the other's first start and last end

The gate is a kernel that spins while the host queues both trains, so that no replay waits for the host. Clocks and
other settings of the card are read, never set. ``cuda`` is ``torch.cuda``, or a test's stand-in.

Not yet run on a GPU.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from bullet.catalog.gpus import GPUS
from bullet.catalog.models import ModelSpec
from bullet.errors import PartitionError, ProfileError
from bullet.gpu.partition import (
    Lane,
    Pair,
    PartitionTable,
    Split,
    granularity,
    green_context_table,
    legal_splits,
    nearest_split,
    software_table,
    unpartitioned_table,
)
from bullet.profiler import timing
from bullet.profiler.bench import (
    BusyError,
    DeviceLostError,
    Measurement,
    PointError,
    anchor_shape,
    lane_units,
    no_limit,
    other_lane,
)
from bullet.profiler.check import Reading
from bullet.profiler.plan import PAGED, Point, Rates, Shape, choose_splits, flops_and_bytes
from bullet.profiles.rows import ENGINE_OPS

log = logging.getLogger(__name__)

QUEUE_PER_CALL_S = 30e-6
"""Host time to queue one replay with its two events; sets how long the gate holds. *Assumed*, generous."""
GATE_MIN_S, GATE_MAX_S = 1e-3, 60e-3
TRAIN_LIMIT = 1500
ENOUGH = 5
"""Least samples inside the window, of each lane that is timed."""
ALU_SPIN_S = 5e-4
CLOCKS_RISE_S = 1.0
"""Full load before the first anchor. *Assumed.*"""
PROBE_SPIN_NS = 20_000
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


class OutOfMemoryError(PointError):
    """One point found too little memory; what was cached has been dropped."""


@dataclass
class Props:
    """What is read of the device once."""

    name: str
    num_sms: int
    capability: tuple[int, int]
    l2_bytes: int
    total_bytes: int


@dataclass
class Graph:
    """``repeats`` repetitions captured on one stream; ``replay_s``: one replay, measured alone after capture."""

    graph: Any
    repeats: int
    replay_s: float
    bytes: float | None
    keep: Any = None


class CudaBench:
    """See :class:`bullet.profiler.bench.Bench`; owns graphs and data, and the tables' streams while it lives."""

    source = "measured"
    unit = "SM"

    def __init__(self, model: ModelSpec, table: PartitionTable, plain: PartitionTable, props: Props, workloads: Any,
                 cuda: Any, kernels: Any, *, dtype: str, dtype_bytes: int, versions: dict[str, Any],
                 read_clocks: Callable[[], dict[str, float | None]],
                 read_processes: Callable[[], list[str]] = list, allow_busy: bool = False, replays: int = 25,
                 min_prefill_samples: int = 8, min_replay_s: float = 2e-4) -> None:
        """``kernels``: :mod:`bullet.kernels.probe`, or None where triton is missing: no controls, no proof."""
        self.model, self.table, self.plain, self.props = model, table, plain, props
        self.backend = table.backend
        self.gpu = props.name
        self.num_units = props.num_sms
        self.dtype = dtype
        self._dtype_bytes = dtype_bytes
        self._shop = workloads
        self._cuda = cuda
        self._kernels = kernels
        self._versions = versions
        self._enter = self._busy = False
        self.left_s: Callable[[], float] = no_limit
        self._read_clocks = read_clocks
        # Whoever is here now is known: ourselves, under whatever id a container gives us, and whom the user allowed.
        self._read_processes, self._allow_busy, self._known = read_processes, allow_busy, set(read_processes())
        self._replays, self._min_prefill, self._min_replay_s = replays, min_prefill_samples, min_replay_s
        self._works: dict[tuple[Shape, str], Any] = {}
        self._graphs: dict[tuple[Any, int], Graph] = {}
        self._pools: dict[int, tuple[Any, Any]] = {}
        self._void: list[Any] = []
        self._gate_out: Any = None
        self._buffers: dict[str, Any] = {}
        self._anchor: Graph | None = None
        table.before_close.append(self.release)

    @property
    def device(self) -> Any:
        """Where the workloads' tensors are; an engine's go there too."""
        return self._shop.device

    # ---- the Bench interface -----------------------------------------------------------------------

    def allowed(self, point: Point) -> bool:
        """The software backend bounds no torch operation; controls other than memory, and all of our own, need triton; the
        engine computes no mixture of experts."""
        if self.backend in ("none", "software") and point.split is not None:
            return False
        ops = {point.shape.op, point.other and point.other.op}
        own = ops.intersection(ENGINE_OPS)
        if self.model.num_experts and own - {PAGED}:
            return False
        return not (self._kernels is None and (point.control == "alu_spin" or own))

    def measure(self, point: Point) -> list[Measurement]:
        with bounded(point.key, self.left_s):
            try:
                return self._measure(point)
            except OutOfMemoryError:  # what was cached for other points is gone now: once more
                return self._measure(point)

    def _measure(self, point: Point) -> list[Measurement]:
        with self._guard(point.key, point.shape.op):
            if point.kind == "solo":
                return [self._solo(point)]
            return self._beside(point)

    def anchor(self) -> Measurement:
        shape = anchor_shape(self.model)
        lane = self.plain.pairs[0].prefill
        arrived = sorted(set(self._read_processes()) - self._known)
        self._busy = self._busy or bool(arrived)
        if arrived and not self._allow_busy:
            raise BusyError(f"another process has come to the GPU ({', '.join(arrived[:3])}): rows until here are kept; end it "
                            "and run the same command again to resume, or pass --allow-busy and every row says so")
        with bounded("anchor", self.left_s), self._guard("anchor", shape.op):
            if self._anchor is None:
                self._anchor = self._capture(lane, self._workload(shape, "prefill"), self._bytes(shape))
                # An idle card takes a while to raise its clocks, and the first anchor must not be slow for that.
                count = min(TRAIN_LIMIT, math.ceil(CLOCKS_RISE_S / max(self._anchor.replay_s, 1e-6)))
                self._run([(lane, self._anchor, count)])
            (train,) = self._run([(lane, self._anchor, self._replays)])
            return Measurement("full", shape, self.num_units, self._stats(train, self._anchor), self._anchor.repeats)

    def clocks(self) -> dict[str, Any]:
        return {**self._read_clocks(), **({"busy": True} if self._busy else {})}

    def provenance(self) -> dict[str, Any]:
        return {**self._versions, "compute_capability": "{}.{}".format(*self.props.capability)}

    def free_bytes(self) -> int:
        """Free memory of the device."""
        return int(self._cuda.mem_get_info()[0])

    def release(self) -> None:
        """Drop graphs and data; they must go before the streams they were captured on."""
        try:
            self._cuda.synchronize()
        except RuntimeError as exc:
            log.warning("while cleaning up: %s", _one_line(exc))
        self._graphs.clear()
        self._works.clear()
        self._pools.clear()
        self._void.clear()
        self._buffers.clear()
        self._anchor = None
        self._gate_out = None
        self._shop.clear()

    def close(self) -> None:
        """Graphs, then streams, then contexts; idempotent."""
        with bounded("cleaning up"):
            try:
                self.release()
            finally:
                self.table.close()
                self.plain.close()

    # ---- points -----------------------------------------------------------------------------------

    def _lane(self, point: Point, name: str) -> Lane:
        if point.split is None:
            pair = self.plain.pairs[0]
            return pair.decode if name == "decode" else pair.prefill
        for pair in self.table.pairs:
            if pair.granted == point.split:
                return pair.prefill if name == "prefill" else pair.decode
        raise PointError(f"split {point.split} is not in the table")

    def _solo(self, point: Point) -> Measurement:
        lane = self._lane(point, point.lane)
        graph = self._graph(point.shape, lane, point.lane)
        (train,) = self._run([(lane, graph, self._replays)])
        return Measurement(point.lane, point.shape, lane_units(self, point, point.lane), self._stats(train, graph),
                           graph.repeats)

    def _beside(self, point: Point) -> list[Measurement]:
        """Both lanes at once. The lane under test is the first; a co-run times both."""
        own_name = "prefill" if point.kind == "corun" else point.lane
        names = (own_name, other_lane(own_name))
        lanes = (self._lane(point, names[0]), self._lane(point, names[1]))
        graphs = (self._graph(point.shape, lanes[0], names[0]),
                  self._graph(point.other, lanes[1], names[1]) if point.other is not None
                  else self._control(point.control, lanes[1]))
        wanted = (self._min_prefill if point.shape.op.startswith("prefill") else self._replays,
                  self._replays if point.other is not None else 1)
        # Beside a long prefill replay a train of short ones would be too long for the driver's queue: longer replays
        # then. Half the limit, so that a lane slowed down twice as much as the margin allows for still fits.
        needed = timing.train_lengths(graphs[0].replay_s, graphs[1].replay_s, min_prefill=wanted[0], min_decode=wanted[1],
                                      limit=1 << 30)
        graphs = (self._stretched(lanes[0], graphs[0], math.ceil(2 * needed[0] / TRAIN_LIMIT)),
                  self._stretched(lanes[1], graphs[1], math.ceil(2 * needed[1] / TRAIN_LIMIT)))
        expected = [graph.replay_s for graph in graphs]
        for _ in range(3):
            counts = timing.train_lengths(expected[0], expected[1], min_prefill=wanted[0], min_decode=wanted[1],
                                          limit=TRAIN_LIMIT)
            trains = self._run([(lane, graph, count) for lane, graph, count in zip(lanes, graphs, counts, strict=True)])
            windows = [timing.inside(trains[0], trains[1], graphs[0].repeats),
                       timing.inside(trains[1], trains[0], graphs[1].repeats)]
            if len(windows[0].seconds) >= ENOUGH and (point.other is None or len(windows[1].seconds) >= ENOUGH):
                break
            # A lane slowed down more than the margin allows for: size the trains by what was just seen.
            expected = [max(old, statistics.median(i.end_s - i.start_s for i in train))
                        for old, train in zip(expected, trains, strict=True)]
        else:
            raise PointError(f"only {len(windows[0].seconds)} and {len(windows[1].seconds)} replays lay inside the other "
                             "lane's window: the lanes may not run at the same time (see the check)")
        measured = [self._row(point, 0, names, lanes, graphs, trains, windows)]
        if point.other is not None:
            measured.append(self._row(point, 1, names, lanes, graphs, trains, windows))
        return measured

    def _row(self, point: Point, at: int, names: tuple[str, str], lanes: tuple[Lane, Lane], graphs: tuple[Graph, Graph],
             trains: Sequence[Sequence[timing.Interval]], windows: Sequence[timing.Window]) -> Measurement:
        shapes = (point.shape, point.other)
        shape, beside = shapes[at], shapes[1 - at]
        assert shape is not None
        other = graphs[1 - at]
        span_s = trains[1 - at][-1].end_s - trains[1 - at][0].start_s
        rate = other.bytes * other.repeats * len(trains[1 - at]) / span_s if other.bytes is not None and span_s > 0 else None
        return Measurement(names[at], shape, lanes[at].sms, timing.summarise(windows[at].seconds), graphs[at].repeats,
                           beside.op if beside is not None else point.control, beside, lanes[1 - at].sms, rate,
                           windows[at].window_s)

    def _stats(self, train: Sequence[timing.Interval], graph: Graph) -> timing.Stats:
        return timing.summarise([(i.end_s - i.start_s) / graph.repeats for i in train[1:]])

    # ---- graphs -----------------------------------------------------------------------------------

    def _bytes(self, shape: Shape) -> float:
        return flops_and_bytes(self.model, shape)[1] * self._dtype_bytes / self.model.dtype_bytes

    def _workload(self, shape: Shape, role: str) -> Any:
        role = "decode" if role == "decode" else "prefill"
        key = (shape, role)
        if key not in self._works:
            self._make_room()
            self._works[key] = self._shop.build(*shape, role=role)
        return self._works[key]

    def _make_room(self) -> None:
        free, total = self._cuda.mem_get_info()
        if free < FREE_SHARE * total:
            self._drop_cached()

    def _drop_cached(self) -> None:
        with bounded("dropping what was cached"):
            self._cuda.synchronize()
        self._graphs.clear()
        self._anchor = None
        self._pools.clear()
        self._void.clear()
        self._works.clear()
        self._shop.clear()
        try:
            self._cuda.empty_cache()
        except RuntimeError as exc:  # torch's allocator refuses after a capture that failed; memory is then reused, not freed
            log.info("cache not emptied: %s", _one_line(exc))

    def _graph(self, shape: Shape, lane: Lane, role: str) -> Graph:
        key = (shape, id(lane.stream))
        if key not in self._graphs:
            work = self._workload(shape, role)
            if getattr(work, "on", None) is not None:
                work = work.on(lane.sms)
            self.table.allow(work)
            self._graphs[key] = self._capture(lane, work, self._bytes(shape))
        return self._graphs[key]

    def _control(self, name: str, lane: Lane) -> Graph:
        """A contention source bounded to the lane's SMs; without triton, torch's own copy for the memory stream."""
        key = (name, id(lane.stream))
        if key in self._graphs:
            return self._graphs[key]
        kernels = self._kernels
        torch = importlib.import_module("torch")
        device = self._shop.device
        if name == "alu_spin":
            if kernels is None:
                raise PointError("control alu_spin needs triton: pip install triton, or do without it")
            out = torch.empty(lane.sms * kernels.ALU_BLOCKS_PER_SM * kernels.ALU_BLOCK, dtype=torch.float32, device=device)
            work = _Load("alu_spin", lambda i: kernels.launch_alu_spin(out, lane.sms, int(ALU_SPIN_S * 1e9)))
            moved = None
        else:
            elements = max(1 << 16, int(timing.L2_MULTIPLE * self.props.l2_bytes / 4))
            source, target = torch.rand(elements, device=device), torch.empty(elements, device=device)
            if kernels is None:
                work = _Load("memory_stream", lambda i: target.copy_(source))
            else:
                work = _Load("memory_stream", lambda i: kernels.launch_memory_stream(source, target, lane.sms))
            moved = 8.0 * elements
        self._graphs[key] = self._capture(lane, work, moved)
        return self._graphs[key]

    def _capture(self, lane: Lane, work: Any, moved: float | None) -> Graph:
        """Warm up eagerly, capture one round of the input sets, time it, and capture longer if that is too short."""
        # Inputs are made on the default stream; a capture must see them whole.
        self._cuda.synchronize()
        with self._on(lane):
            for i in range(min(work.rotation, 3)):
                work.run(i)
        lane.stream.synchronize()
        graph = self._capture_repeats(lane, work, work.rotation, moved)
        self._time_alone(lane, graph)
        wanted = timing.repeats(graph.replay_s / graph.repeats, self._min_replay_s, work.rotation)
        if wanted > graph.repeats:
            graph = self._capture_repeats(lane, work, wanted, moved)
            self._time_alone(lane, graph)
        return graph

    def _stretched(self, lane: Lane, graph: Graph, times: int) -> Graph:
        """The same with ``times`` as many repetitions in a replay."""
        if times <= 1:
            return graph
        key = ((id(graph.keep), times), id(lane.stream))
        if key not in self._graphs:
            self._graphs[key] = self._capture_repeats(lane, graph.keep, graph.repeats * times, graph.bytes)
            self._time_alone(lane, self._graphs[key])
        return self._graphs[key]

    def _capture_repeats(self, lane: Lane, work: Any, count: int, moved: float | None) -> Graph:
        """``count`` repetitions in one graph. Graphs of one stream never run at once, so they share a memory pool.

        torch refuses a pool whose last graph has gone, so the stream's first graph is kept as long as its pool is.
        """
        cuda, key = self._cuda, id(lane.stream)
        pool = self._pools[key][0] if key in self._pools else cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        with self._on(lane):
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
            log.info("capture abandoned: %s", _one_line(exc))
            with suppress(Exception):
                binding = importlib.import_module("torch")._C
                binding._cuda_endAllocateToPool(0, pool)
                binding._cuda_releasePool(0, pool)
        self._void.append((graph, self._pools.pop(key, None)))

    def _time_alone(self, lane: Lane, graph: Graph) -> None:
        (train,) = self._run([(lane, graph, 4)])
        graph.replay_s = statistics.median(i.end_s - i.start_s for i in train[1:])

    # ---- the window -------------------------------------------------------------------------------

    def _run(self, trains: Sequence[tuple[Lane, Graph, int]]) -> list[list[timing.Interval]]:
        """Queue every train behind one gate and read the events afterwards; nothing synchronises in between.

        The train with fewer replays is queued first: should the other fill its stream's queue, the host then waits with
        that queue full, and neither lane runs dry.
        """
        cuda = self._cuda
        first = trains[0][0].stream
        calls = sum(min(count, 400) for _, _, count in trains)
        gate_s = min(GATE_MAX_S, max(GATE_MIN_S, QUEUE_PER_CALL_S * calls))
        events = [[(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(count)]
                  for _, _, count in trains]
        opened = cuda.Event(enable_timing=True)
        for lane, graph, _ in trains:
            with self._on(lane):
                graph.graph.replay()  # untimed: brings code and clocks in
            if lane.stream is not first:
                warm = cuda.Event(enable_timing=True)
                warm.record(lane.stream)
                first.wait_event(warm)  # the gate opens after every warm-up, or a lane would start late
        with self._on(trains[0][0]):
            self._gate(gate_s)
            opened.record(first)
        for lane, _, _ in trains[1:]:
            lane.stream.wait_event(opened)
        for at in sorted(range(len(trains)), key=lambda i: trains[i][2]):
            lane, graph, _ = trains[at]
            with self._on(lane):
                for start, end in events[at]:
                    start.record(lane.stream)
                    graph.graph.replay()
                    end.record(lane.stream)
        for lane_events in events:
            lane_events[-1][1].synchronize()
        return [[timing.Interval(opened.elapsed_time(start) * 1e-3, opened.elapsed_time(end) * 1e-3)
                 for start, end in lane_events] for lane_events in events]

    def _gate(self, seconds: float) -> None:
        if self._kernels is None:
            self._cuda._sleep(int(seconds * 1.5e9))  # cycles, at about 1.5 GHz
            return
        if self._gate_out is None:
            torch = importlib.import_module("torch")
            self._gate_out = torch.zeros(1, dtype=torch.int64, device=self._shop.device)
        self._kernels.launch_gate(self._gate_out, int(seconds * 1e9))

    @contextmanager
    def _on(self, lane: Lane) -> Iterator[None]:
        """The lane's stream is current; with ``enter_contexts`` its green context too (see :meth:`enter_contexts`)."""
        with (self.table.current(lane) if self._enter else nullcontext()), self._cuda.stream(lane.stream):
            yield

    def enter_contexts(self) -> bool:
        """From now on make a lane's green context current wherever its stream is; False if there is no such thing.

        A stream carries its context, and that should be enough; this is for the case that the check finds it is not.
        """
        if self._enter or self.backend != "green-context":
            return False
        self._drop_cached()
        self._enter = True
        return True

    def leave_contexts(self) -> None:
        """Back to streams alone."""
        self._drop_cached()
        self._enter = False

    @contextmanager
    def _guard(self, what: str, op: str) -> Iterator[None]:
        """Errors of torch, triton and the driver become one line: this point's, or the device's if it answers no more."""
        try:
            yield
        except (ProfileError, AssertionError):  # ours
            raise
        except Exception as exc:  # whatever a compiler, a launch or an allocation may raise
            message = _one_line(exc) or type(exc).__name__
            try:
                self._cuda.synchronize()
            except RuntimeError as lost:
                raise DeviceLostError(
                    f"{what}: {message}; the GPU answers no more ({_one_line(lost)}): rows until here are kept; run the "
                    f"same command again to resume, with --skip {op} if it fails there again") from None
            if "out of memory" in message.lower():
                self._drop_cached()
                raise OutOfMemoryError(f"out of GPU memory ({message[:80]}): end other processes or leave the shape out "
                                       "with --skip") from None
            raise PointError(message) from None

    def try_kernels(self) -> str:
        """Start the Triton kernels once on a plain stream; why they cannot be used, or empty. The rest works without."""
        if self._kernels is None:
            return ""
        try:
            with bounded("first kernel"), self._on(self.plain.pairs[0].prefill):
                self._gate(1e-5)
                self._cuda.synchronize()
        except Exception as exc:  # no C compiler, a driver too old for its PTX, ..
            self._kernels = None
            return _one_line(exc) or type(exc).__name__
        return ""

    # ---- the check's prober ---------------------------------------------------------------------------

    def _probe_buffers(self, name: str) -> Any:
        if name not in self._buffers:
            kernels = self._kernels
            blocks = self.num_units * kernels.BLOCKS_PER_SM * kernels.OVERSUBSCRIPTION
            self._buffers[name] = kernels.ProbeBuffers(blocks, self._shop.device)
        return self._buffers[name]

    def probe_pair(self, pair: Pair, mode: str) -> tuple[Reading, Reading]:
        """Both lanes' probes behind one gate: launched eagerly, or replayed from graphs captured on the lanes' streams."""
        with bounded(f"probe of {pair.granted}, {mode}"):
            return self._probe(pair.lanes, mode)

    def probe_plain(self) -> tuple[Reading, Reading]:
        """The same on two plain streams."""
        with bounded("probe of plain streams"):
            return self._probe(self.plain.pairs[0].lanes, "eager")

    def _probe(self, lanes: tuple[Lane, Lane], mode: str) -> tuple[Reading, Reading]:
        if self._kernels is None:
            raise PartitionError("the probe needs triton, working: without it no partition is proven")
        cuda, kernels = self._cuda, self._kernels
        buffers = [self._probe_buffers(name) for name in ("first", "second")]
        launches: list[Callable[[], None]] = []
        for lane, buffer in zip(lanes, buffers, strict=True):
            with self._on(lane):
                kernels.launch_probe(buffer, PROBE_SPIN_NS)  # compiles, and warms the stream
            lane.stream.synchronize()
            if mode == "eager":
                launches.append(lambda buffer=buffer: kernels.launch_probe(buffer, PROBE_SPIN_NS))
            else:
                work = _Load("probe", lambda i, buffer=buffer: kernels.launch_probe(buffer, PROBE_SPIN_NS))
                launches.append(self._capture_repeats(lane, work, 1, None).graph.replay)
            buffer.poison()
        cuda.synchronize()
        opened = cuda.Event(enable_timing=True)
        with self._on(lanes[0]):
            self._gate(2e-3)
            opened.record(lanes[0].stream)
        lanes[1].stream.wait_event(opened)
        for lane, launch in zip(lanes, launches, strict=True):
            with self._on(lane):
                launch()
        for lane in lanes:
            lane.stream.synchronize()
        first, second = (_reading(buffer) for buffer in buffers)
        return first, second

    def switch_seconds(self, first: Pair, second: Pair) -> float:
        """Median over 20 of: event on the first pair's stream, wait and event on the second's."""
        cuda = self._cuda
        a, b = first.prefill.stream, second.decode.stream
        seconds = []
        with bounded("switch between pairs"):
            for _ in range(20):
                left, arrived = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
                with self._on(first.prefill):
                    self._gate(2e-4)
                    left.record(a)
                b.wait_event(left)
                arrived.record(b)
                arrived.synchronize()
                seconds.append(left.elapsed_time(arrived) * 1e-3)
        return statistics.median(seconds)


def _reading(buffer: Any) -> Reading:
    smids = buffer.smid.cpu().tolist()
    ran = [i for i, smid in enumerate(smids) if smid >= 0]
    starts, ends = buffer.start.cpu().tolist(), buffer.end.cpu().tolist()
    if not ran:
        return Reading(frozenset(), 0, 0, 0, len(smids))
    return Reading(frozenset(smids[i] for i in ran), min(starts[i] for i in ran), max(ends[i] for i in ran), len(ran),
                   len(smids))


@dataclass
class _Load:
    """A kernel with a workload's face, one input set."""

    name: str
    run: Callable[[int], Any]
    rotation: int = 1
    takes_num_sms: bool = True


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:200]


# --------------------------------------------------------------------------------- reading the card's state


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


# ------------------------------------------------------------------------------------------------ opening


def rates_for(props: Props, **overrides: Any) -> Rates:
    """Planning speeds: data-sheet peaks of a known GPU at assumed efficiencies, else an assumed per-SM rate."""
    known = next((g for key, g in GPUS.items() if key.split("-")[0] in props.name.lower().replace(" ", "")), None)
    flops = known.peak_flops if known else 2.5e12 * props.num_sms
    moved = known.mem_bytes_per_s if known else 1.2e10 * props.num_sms
    return Rates(props.num_sms, 0.6 * flops, 0.7 * moved, **overrides)


def fits_in(model: ModelSpec, dtype_bytes: int, free_bytes: int) -> Callable[[Shape], bool]:
    """Whether a shape's data, twice over (both lanes, intermediates), takes at most half of the free memory."""
    def fits(shape: Shape) -> bool:
        return 2 * flops_and_bytes(model, shape)[1] * dtype_bytes / model.dtype_bytes <= free_bytes / 2
    return fits


def missing_packages() -> dict[str, str]:
    """Packages that are absent -> what goes without them."""
    uses = {"triton": "no probe (nothing can be proven) and no ALU-spin control",
            "cuda.bindings": "no green contexts: install cuda-bindings, or everything is labelled no partition",
            "pyarrow": "no samples.parquet: the rows stay in samples.jsonl",
            "pynvml": "clocks come from nvidia-smi, less often (nvidia-ml-py)"}
    absent = {}
    for name, use in uses.items():
        try:
            importlib.import_module(name)
        except (ImportError, OSError):
            absent[name] = use
    return absent


def choose_table(backend: str, props: Props, core: Iterable[float], extra: Iterable[float], cuda: Any,
                 asked: Sequence[Split] = (), *, ordinal: int = 0, flags: int = 0,
                 driver: Any = None) -> tuple[PartitionTable, list[Split]]:
    """The partition table and its core splits, as asked. ``auto`` is green contexts, an error where there are none."""
    if backend == "none":
        return unpartitioned_table(props.num_sms, lambda priority: cuda.Stream(priority=priority)), []
    rule = granularity(props.capability, flags)
    if not legal_splits(props.num_sms, rule):
        nearest_split(props.num_sms, rule, 0.5)
    core_splits = list(asked) or list(choose_splits(props.num_sms, rule, core))
    every = list(dict.fromkeys([*core_splits, *([] if asked else choose_splits(props.num_sms, rule, extra))]))
    if backend == "software":
        return software_table(every, props.num_sms, lambda priority: cuda.Stream(priority=priority)), core_splits
    table = green_context_table(every, driver=driver, ordinal=ordinal, flags=flags,
                                wrap_stream=cuda.ExternalStream)
    return table, core_splits


def open_cuda(model: ModelSpec, *, backend: str, core: Iterable[float], extra: Iterable[float],
              asked: Sequence[Split] = (), flags: int = 0, seed: int = 0, allow_busy: bool = False
              ) -> tuple[CudaBench, list[Split], dict[str, Any]]:
    """Everything for the first visible GPU: the bench, the core splits as asked, and columns for every row.

    Raises :class:`PartitionError` or :class:`ProfileError` in one line: torch missing or without CUDA, no GPU, another
    process on the card (unless ``allow_busy``), a driver too old.
    """
    # Both before CUDA starts: queues against aliasing of streams, and the processes while we are not among them.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        import torch

        from bullet.profiler import bench_engine as engine_bench
    except (ImportError, OSError) as exc:  # OSError: one of its libraries is missing
        raise ProfileError(f"torch is not installed ({_one_line(exc)}): --device cuda needs it; --device simulated does "
                           "not") from None
    cuda = torch.cuda
    if not cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "no GPU or no driver is visible"
        raise ProfileError(f"no usable GPU ({why}): check nvidia-smi, or use --device cpu")
    reader = CardReader.open()
    # On a second opening (after green contexts failed) we are on the card ourselves, under whatever id.
    others = [] if cuda.is_initialized() else reader.processes()
    if others and not allow_busy:
        raise ProfileError(f"another process is on the GPU ({', '.join(others[:3])}): end it, or pass --allow-busy and "
                           "every row says so")
    device = torch.device("cuda", 0)
    try:
        cuda.init()
        torch.zeros(1, device=device)  # the primary context, before green contexts retain it
        raw = cuda.get_device_properties(device)
        free, _ = cuda.mem_get_info()
    except RuntimeError as exc:
        raise ProfileError(f"the GPU cannot be used ({_one_line(exc)}): end other processes, check nvidia-smi, or use "
                           "--device cpu") from None
    props = Props(raw.name, raw.multi_processor_count, (raw.major, raw.minor), int(getattr(raw, "L2_cache_size", 0) or 60e6),
                  int(raw.total_memory))
    dtype = torch.bfloat16 if props.capability >= (8, 0) else torch.float16
    try:
        kernels = importlib.import_module("bullet.kernels.probe")
    except (ImportError, OSError):
        kernels = None
    triton_version = getattr(importlib.import_module("triton"), "__version__", None) if kernels else None
    shop = engine_bench.EngineWorkloads(model, device, dtype, l2_bytes=props.l2_bytes,
                                        limit_bytes=max(1 << 28, free // 32), seed=seed)
    reader.forget()  # we are on the card now: what it says of processes has changed
    table, core_splits = choose_table(backend, props, core, extra, cuda, asked, flags=flags)
    try:
        plain = unpartitioned_table(props.num_sms, lambda priority: cuda.Stream(priority=priority))
        bench = CudaBench(model, table, plain, props, shop, cuda, kernels, dtype=str(dtype).removeprefix("torch."),
                          dtype_bytes=dtype.itemsize, read_clocks=reader.clocks,
                          read_processes=reader.processes, allow_busy=allow_busy,
                          versions={"driver": reader.driver(), "cuda": torch.version.cuda, "torch": torch.__version__,
                                    "triton": triton_version})
    except BaseException:
        table.close()
        raise
    return bench, core_splits, {"busy": bool(others)}
