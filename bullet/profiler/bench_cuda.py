"""A CUDA GPU under measurement: points as trains of graph replays on the partitions' own streams, and the check's probes.

Clocks and other settings of the card are read, never set. ``cuda`` is ``torch.cuda``, or a test's stand-in.

Not yet run on a GPU.
"""

from __future__ import annotations

import importlib
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bullet.catalog.models import ModelSpec
from bullet.errors import PartitionError, ProfileError, one_line
from bullet.gpu.partition import Lane, Pair, PartitionTable, green_context_table, software_table, unpartitioned_table
from bullet.gpu.splits import Split, granularity, legal_splits, nearest_split
from bullet.profiler import timing
from bullet.profiler.bench import (
    BusyError,
    DeviceLostError,
    Load,
    Measurement,
    PointError,
    anchor_shape,
    lane_units,
    no_limit,
    other_lane,
)
from bullet.profiler.card import CardReader, Props
from bullet.profiler.check import Reading
from bullet.profiler.lane_graphs import TRAIN_LIMIT, Graph, LaneGraphs, bounded
from bullet.profiler.plan import PAGED, Point, choose_splits
from bullet.profiles.rows import ENGINE_OPS

ENOUGH = 5
"""Least samples inside the window, of each lane that is timed."""
CLOCKS_RISE_S = 1.0
"""Full load before the first anchor. *Assumed.*"""
PROBE_SPIN_NS = 20_000
class OutOfMemoryError(PointError):
    """One point found too little memory; what was cached has been dropped."""


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
        self._cuda = cuda
        self.graphs = LaneGraphs(model, table, props, workloads, cuda, kernels, dtype_bytes=dtype_bytes,
                                 min_replay_s=min_replay_s)
        self._versions = versions
        self._busy = False
        self.left_s: Callable[[], float] = no_limit
        self._read_clocks = read_clocks
        # Whoever is here now is known: ourselves, under whatever id a container gives us, and whom the user allowed.
        self._read_processes, self._allow_busy, self._known = read_processes, allow_busy, set(read_processes())
        self._replays, self._min_prefill = replays, min_prefill_samples
        self._buffers: dict[str, Any] = {}
        table.before_close.append(self.release)

    @property
    def device(self) -> Any:
        """Where the workloads' tensors are; an engine's go there too."""
        return self.graphs.shop.device

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
        return not (self.graphs.kernels is None and (point.control == "alu_spin" or own))

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
            key = ("anchor", id(lane.stream))
            graph = self.graphs.captured.get(key)
            if graph is None:
                graph = self.graphs.captured[key] = self.graphs.capture(
                    lane, self.graphs.workload(shape, "prefill"), self.graphs.least_bytes(shape))
                # An idle card takes a while to raise its clocks, and the first anchor must not be slow for that.
                self.graphs.run([(lane, graph, min(TRAIN_LIMIT, math.ceil(CLOCKS_RISE_S / max(graph.replay_s, 1e-6))))])
            (train,) = self.graphs.run([(lane, graph, self._replays)])
            return Measurement("full", shape, self.num_units, self._stats(train, graph), graph.repeats)

    def clocks(self) -> dict[str, Any]:
        return {**self._read_clocks(), **({"busy": True} if self._busy else {})}

    def provenance(self) -> dict[str, Any]:
        return {**self._versions, "compute_capability": "{}.{}".format(*self.props.capability)}

    def free_bytes(self) -> int:
        """Free memory of the device."""
        return int(self._cuda.mem_get_info()[0])

    def release(self) -> None:
        """Drop graphs and data; they must go before the streams they were captured on."""
        self.graphs.release()
        self._buffers.clear()

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
        graph = self.graphs.graph(point.shape, lane, point.lane)
        (train,) = self.graphs.run([(lane, graph, self._replays)])
        return Measurement(point.lane, point.shape, lane_units(self, point, point.lane), self._stats(train, graph),
                           graph.repeats)

    def _beside(self, point: Point) -> list[Measurement]:
        """Both lanes at once. The lane under test is the first; a co-run times both."""
        own_name = "prefill" if point.kind == "corun" else point.lane
        names = (own_name, other_lane(own_name))
        lanes = (self._lane(point, names[0]), self._lane(point, names[1]))
        graphs = (self.graphs.graph(point.shape, lanes[0], names[0]),
                  self.graphs.graph(point.other, lanes[1], names[1]) if point.other is not None
                  else self.graphs.control(point.control, lanes[1]))
        wanted = (self._min_prefill if point.shape.op.startswith("prefill") else self._replays,
                  self._replays if point.other is not None else 1)
        # Beside a long prefill replay a train of short ones would be too long for the driver's queue: longer replays
        # then. Half the limit, so that a lane slowed down twice as much as the margin allows for still fits.
        needed = timing.train_lengths(graphs[0].replay_s, graphs[1].replay_s, min_prefill=wanted[0], min_decode=wanted[1],
                                      limit=1 << 30)
        graphs = (self.graphs.stretched(lanes[0], graphs[0], math.ceil(2 * needed[0] / TRAIN_LIMIT)),
                  self.graphs.stretched(lanes[1], graphs[1], math.ceil(2 * needed[1] / TRAIN_LIMIT)))
        expected = [graph.replay_s for graph in graphs]
        for _ in range(3):
            counts = timing.train_lengths(expected[0], expected[1], min_prefill=wanted[0], min_decode=wanted[1],
                                          limit=TRAIN_LIMIT)
            trains = self.graphs.run([(lane, graph, count) for lane, graph, count in zip(lanes, graphs, counts, strict=True)])
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

    def enter_contexts(self) -> bool:
        """From now on make a lane's green context current wherever its stream is; False if there is no such thing.

        A stream carries its context, and that should be enough; this is for the case that the check finds it is not.
        """
        if self.graphs.enter or self.backend != "green-context":
            return False
        self.graphs.drop()
        self.graphs.enter = True
        return True

    def leave_contexts(self) -> None:
        """Back to streams alone."""
        self.graphs.drop()
        self.graphs.enter = False

    @contextmanager
    def _guard(self, what: str, op: str) -> Iterator[None]:
        """Errors of torch, triton and the driver become one line: this point's, or the device's if it answers no more."""
        try:
            yield
        except (ProfileError, AssertionError):  # ours
            raise
        except Exception as exc:  # whatever a compiler, a launch or an allocation may raise
            message = one_line(exc, 200) or type(exc).__name__
            try:
                self._cuda.synchronize()
            except RuntimeError as lost:
                raise DeviceLostError(
                    f"{what}: {message}; the GPU answers no more ({one_line(lost, 200)}): rows until here are kept; run the "
                    f"same command again to resume, with --skip {op} if it fails there again") from None
            if "out of memory" in message.lower():
                self.graphs.drop()
                raise OutOfMemoryError(f"out of GPU memory ({message[:80]}): end other processes or leave the shape out "
                                       "with --skip") from None
            raise PointError(message) from None

    def try_kernels(self) -> str:
        """Start the Triton kernels once on a plain stream; why they cannot be used, or empty. The rest works without."""
        if self.graphs.kernels is None:
            return ""
        try:
            with bounded("first kernel"), self.graphs.on(self.plain.pairs[0].prefill):
                self.graphs.gate(1e-5)
                self._cuda.synchronize()
        except Exception as exc:  # no C compiler, a driver too old for its PTX, ..
            self.graphs.kernels = None
            return one_line(exc, 200) or type(exc).__name__
        return ""

    # ---- the check's prober ---------------------------------------------------------------------------

    def _probe_buffers(self, name: str) -> Any:
        if name not in self._buffers:
            kernels = self.graphs.kernels
            blocks = self.num_units * kernels.BLOCKS_PER_SM * kernels.OVERSUBSCRIPTION
            self._buffers[name] = kernels.ProbeBuffers(blocks, self.graphs.shop.device)
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
        if self.graphs.kernels is None:
            raise PartitionError("the probe needs triton, working: without it no partition is proven")
        cuda, kernels = self._cuda, self.graphs.kernels
        buffers = [self._probe_buffers(name) for name in ("first", "second")]
        launches: list[Callable[[], None]] = []
        for lane, buffer in zip(lanes, buffers, strict=True):
            with self.graphs.on(lane):
                kernels.launch_probe(buffer, PROBE_SPIN_NS)  # compiles, and warms the stream
            lane.stream.synchronize()
            if mode == "eager":
                launches.append(lambda buffer=buffer: kernels.launch_probe(buffer, PROBE_SPIN_NS))
            else:
                work = Load("probe", lambda i, buffer=buffer: kernels.launch_probe(buffer, PROBE_SPIN_NS))
                launches.append(self.graphs.capture_repeats(lane, work, 1, None).graph.replay)
            buffer.poison()
        cuda.synchronize()
        opened = cuda.Event(enable_timing=True)
        with self.graphs.on(lanes[0]):
            self.graphs.gate(2e-3)
            opened.record(lanes[0].stream)
        lanes[1].stream.wait_event(opened)
        for lane, launch in zip(lanes, launches, strict=True):
            with self.graphs.on(lane):
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
                with self.graphs.on(first.prefill):
                    self.graphs.gate(2e-4)
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


# ------------------------------------------------------------------------------------------------ opening


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
        raise ProfileError(f"torch is not installed ({one_line(exc, 200)}): --device cuda needs it; --device simulated does "
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
        raise ProfileError(f"the GPU cannot be used ({one_line(exc, 200)}): end other processes, check nvidia-smi, or use "
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
