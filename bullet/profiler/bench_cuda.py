"""A CUDA GPU under measurement: points as trains of graph replays on the partitions' own streams, and the check's probes.

Clocks and other settings of the card are read, never set. ``cuda`` is ``torch.cuda``, or a test's stand-in.

Not yet run on a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bullet.catalog.models import ModelSpec
from bullet.errors import PartitionError, ProfileError, ResultsError, one_line
from bullet.gpu.partition import Lane, Pair, PartitionTable, green_context_table, software_table, unpartitioned_table
from bullet.gpu.splits import Split, granularity, legal_splits, nearest_split
from bullet.profiler import cells, timing
from bullet.profiler.axes import choose_splits
from bullet.profiler.bench import (
    BusyError,
    DeviceLostError,
    Load,
    PointError,
    anchor_shape,
    no_limit,
    other_lane,
)
from bullet.profiler.blas import SmTarget
from bullet.profiler.card import CardReader, Props
from bullet.profiler.cells import Measurement, Side
from bullet.profiler.check import Reading, reading_of
from bullet.profiler.evidence import Evidence
from bullet.profiler.lane_graphs import TRAIN_LIMIT, Graph, LaneGraphs, Ran, Train, bounded
from bullet.profiler.plan import LEAD_S, NEXT_LEAD_S, Point
from bullet.profiler.shapes import PAGED
from bullet.profiles.rows import ENGINE_OPS

ENOUGH = 5
"""Least samples inside the window, of each lane that is timed."""
PROBE_SPIN_NS = 20_000


class OutOfMemoryError(PointError):
    """One point found too little memory; what was cached has been dropped."""


class CudaBench:
    """See :class:`bullet.profiler.bench.Bench`; owns graphs and data, and the tables' streams while it lives."""

    source = "measured"
    unit = "SM"

    def __init__(self, model: ModelSpec, table: PartitionTable, plain: PartitionTable, props: Props, workloads: Any,
                 cuda: Any, kernels: Any, *, dtype: str, dtype_bytes: int, versions: dict[str, Any],
                 read_clocks: Callable[[], dict[str, Any]],
                 read_processes: Callable[[], list[str]] = list, allow_busy: bool = False, replays: int = 25,
                 min_prefill_samples: int = 6, min_replay_s: float = 1e-3, urgent: PartitionTable | None = None,
                 leads_s: tuple[float, float] = (LEAD_S, NEXT_LEAD_S)) -> None:
        """``kernels``: :mod:`bullet.kernels.probe`, or None where triton is missing: no controls, no proof. ``urgent``: plain
        streams of which decode's has the higher priority."""
        self.model, self.table, self.plain, self.props = model, table, plain, props
        self.urgent, self.leads_s = urgent, leads_s
        self.backend = table.backend
        self.gpu = props.name
        self.num_units = props.num_sms
        self.dtype = dtype
        self._cuda = cuda
        self.graphs = LaneGraphs(model, table, props, workloads, cuda, kernels, dtype_bytes=dtype_bytes,
                                 min_replay_s=min_replay_s, blas=SmTarget(props.num_sms, handle=cuda.current_blas_handle))
        self._versions = versions
        self.busy = False
        self.torch_attention = "flash"
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
        if self.backend in ("none", "software") and point.split is not None and point.sharing != "bounded":
            return False
        if point.sharing == "priority" and self.urgent is None:
            return False
        ops = {point.shape.op, point.other and point.other.op}
        own = ops.intersection(ENGINE_OPS)
        if self.model.num_experts and own - {PAGED}:
            return False
        return not (self.graphs.kernels is None and (point.control not in ("", "idle", "memory_stream") or own))

    def measure(self, point: Point) -> list[Measurement]:
        with bounded(point.key, self.left_s):
            try:
                found = self._measure(point)
            except OutOfMemoryError:  # what was cached for other points is gone now: once more
                found = self._measure(point)
        self._look_for_others()  # afterwards: who came meanwhile has disturbed it
        return found

    def _measure(self, point: Point) -> list[Measurement]:
        with self._guard(point.key, point.shape.op):
            return cells.measure(point, lambda steps: self._windows(point, steps))

    def anchor(self) -> Measurement:
        shape = anchor_shape(self.model)
        lane = self.plain.pairs[0].prefill
        self._look_for_others()
        with bounded("anchor", self.left_s), self._guard("anchor", shape.op):
            graph = self.graphs.graph(shape, lane, "prefill")
            # An idle card takes a while to raise its clocks, and no anchor must be slow for that.
            ((ran,),) = self.graphs.run([[self._train(lane, graph, self._replays, self.leads_s[0])]], read_card=self._read_clocks)
            return Measurement("full", shape, self.num_units, timing.summarise(self._seconds(ran, graph)), graph.repeats,
                               columns=self._state(ran, graph))

    def _look_for_others(self) -> None:
        arrived = sorted(set(self._read_processes()) - self._known)
        self.busy = self.busy or bool(arrived)
        if arrived and not self._allow_busy:
            raise BusyError(f"another process has come to the GPU ({', '.join(arrived[:3])}): rows until here are kept; end it "
                            "and run the same command again to resume, or pass --allow-busy and every row says so")

    def clocks(self) -> dict[str, Any]:
        return dict(self._read_clocks())

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
                if self.urgent is not None:
                    self.urgent.close()

    # ---- points -----------------------------------------------------------------------------------

    def _lane(self, point: Point, name: str) -> Lane:
        if point.split is None or point.sharing == "bounded":
            pair = self.urgent.pairs[0] if point.sharing == "priority" and self.urgent is not None else self.plain.pairs[0]
            lane = pair.decode if name == "decode" else pair.prefill
            if point.split is None:
                return lane
            return dataclasses.replace(lane, sms=getattr(point.split, f"{name}_sms"))
        for pair in self.table.pairs:
            if pair.granted == point.split:
                return pair.prefill if name == "prefill" else pair.decode
        raise PointError(f"split {point.split} is not in the table")

    def _windows(self, point: Point, steps: Sequence[str]) -> list[list[Side]]:
        """A point's windows, back to back. The lane under test is A; a co-run times both."""
        names = [("prefill" if point.kind == "corun" else point.lane)]
        lanes = [self._lane(point, names[0])]
        graphs = [self.graphs.graph(point.shape, lanes[0], names[0], point.told)]
        if point.kind != "solo":
            names.append(other_lane(names[0]))
            lanes.append(self._lane(point, names[1]))
        if point.other is not None:
            graphs.append(self.graphs.graph(point.other, lanes[1], names[1], point.told))
        elif point.control not in ("", "idle"):
            graphs.append(self.graphs.control(point.control, lanes[1]))
        beside = self._stretched(point, lanes, graphs) if len(graphs) == 2 else graphs
        expected = [graph.replay_s for graph in beside]
        for _ in range(3):
            ran = self.graphs.run([self._trains(which, step, lanes, graphs, beside, expected, point)
                                   for step, which in enumerate(steps)], read_card=self._read_clocks)
            at = steps.index("ab") if "ab" in steps and len(graphs) == 2 else None
            if at is None:
                break
            one, two = (r.intervals for r in ran[at])
            kept = [timing.inside(one, two, beside[0].repeats), timing.inside(two, one, beside[1].repeats)]
            if len(kept[0].seconds) >= ENOUGH and (point.other is None or len(kept[1].seconds) >= ENOUGH):
                break
            # A lane slowed down more than the margin allows for: size the trains by what was just seen.
            expected = [max(old, statistics.median(i.end_s - i.start_s for i in r.intervals))
                        for old, r in zip(expected, ran[at], strict=True)]
        else:
            raise PointError(f"only {len(kept[0].seconds)} and {len(kept[1].seconds)} replays lay inside the other "
                             "lane's window: the lanes may not run at the same time (see the check)")
        shapes, out = (point.shape, point.other), []
        for which, lanes_ran in zip(steps, ran, strict=True):
            if which == "ab" and at is not None:
                out.append([self._beside(names[i], shapes[i], lanes[i], beside[i], r, kept[i])
                            for i, r in enumerate(lanes_ran)])
                continue
            i = "ab".index(which) if which != "ab" else 0
            out.append([Side(names[i], shapes[i], lanes[i].sms, self._seconds(lanes_ran[0], graphs[i]), graphs[i].repeats,
                             state=self._state(lanes_ran[0], graphs[i]))])
            if which == "ab":  # beside nothing
                out[-1].append(Side(names[1], None, lanes[1].sms, [], 0))
        return out

    def _trains(self, which: str, step: int, lanes: Sequence[Lane], graphs: Sequence[Graph], beside: Sequence[Graph],
                expected: Sequence[float], point: Point) -> list[Train]:
        lead_s = self.leads_s[0 if step == 0 else 1]
        if which == "ab" and len(graphs) == 2:
            counts = timing.train_lengths(*expected, *self._wanted(point), limit=TRAIN_LIMIT)
            return [self._train(lane, graph, count, lead_s) for lane, graph, count in zip(lanes, beside, counts, strict=True)]
        i = "ab".index(which) if which != "ab" else 0
        return [self._train(lanes[i], graphs[i], timing.solo_count(graphs[i].replay_s, self._replays), lead_s)]

    @staticmethod
    def _train(lane: Lane, graph: Graph, count: int, lead_s: float) -> Train:
        return Train(lane, graph, count, max(1, math.ceil(lead_s / max(graph.replay_s, 1e-6))))

    def _wanted(self, point: Point) -> tuple[int, int]:
        """Samples that each lane's train should have inside the other's; a control's own are not counted."""
        long = point.shape.phase == "prefill"
        return self._min_prefill if long else self._replays, self._replays if point.other is not None else 1

    def _stretched(self, point: Point, lanes: Sequence[Lane], graphs: Sequence[Graph]) -> list[Graph]:
        """Beside a long prefill replay a train of short ones would be too long for the driver's queue: longer replays then. Half
        the limit, so that a lane slowed down twice as much as the margin allows for still fits."""
        needed = timing.train_lengths(graphs[0].replay_s, graphs[1].replay_s, *self._wanted(point), limit=1 << 30)
        return [self.graphs.stretched(lane, graph, math.ceil(2 * count / TRAIN_LIMIT))
                for lane, graph, count in zip(lanes, graphs, needed, strict=True)]

    def _beside(self, name: str, shape: Any, lane: Lane, graph: Graph, ran: Ran, kept: timing.Window) -> Side:
        train = ran.intervals
        busy_s = sum(i.end_s - i.start_s for i in train)
        rate = graph.bytes * graph.repeats * len(train) / busy_s if graph.bytes is not None and busy_s > 0 else None
        return Side(name, shape, lane.sms, kept.seconds, graph.repeats, kept.window_s, kept.both_share, rate,
                    self._state(ran, graph))

    @staticmethod
    def _state(ran: Ran, graph: Graph) -> dict[str, Any]:
        return {**ran.card, "clock_window_hz": ran.clock_hz, "warm_s": ran.warm_s, "loaded_s": ran.loaded_s,
                "cublas_sms": graph.cublas_sms}

    @staticmethod
    def _seconds(ran: Ran, graph: Graph) -> list[float]:
        return [(i.end_s - i.start_s) / graph.repeats for i in ran.intervals[1:]]

    def keep_evidence(self, path: Path, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """From now on write what every captured operation consists of to ``path`` (:mod:`bullet.profiler.evidence`), each inside
        ``within``."""
        self.graphs.evidence = Evidence(path, self.table.driver, within)

    def require_answer(self, what: str) -> None:
        """:class:`DeviceLostError` if the device was lost in ``what``."""
        try:
            with bounded(what):
                self._cuda.synchronize()
        except RuntimeError as lost:
            raise self._lost(what, "", lost) from None

    @staticmethod
    def _lost(what: str, message: str, lost: Exception, advice: str = "") -> DeviceLostError:
        said = f"{message}; " if message else ""
        return DeviceLostError(f"{what}: {said}the GPU answers no more ({one_line(lost, 200)}): rows until here are kept; run "
                               f"the same command again to resume{advice}")

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
        except (ProfileError, ResultsError, AssertionError):  # ours
            raise
        except Exception as exc:  # whatever a compiler, a launch or an allocation may raise
            message = one_line(exc, 200) or type(exc).__name__
            try:
                self._cuda.synchronize()
            except RuntimeError as lost:
                raise self._lost(what, message, lost, f", with --skip {op} if it fails there again") from None
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
            self.require_answer("the first kernel of ours")
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
        first, second = (reading_of(buffer) for buffer in buffers)
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


# ------------------------------------------------------------------------------------------------ opening


def missing_packages() -> dict[str, str]:
    """Packages that are absent -> what goes without them."""
    uses = {"triton": "no probe (nothing can be proven) and no ALU-spin control",
            "cuda.bindings": "no green contexts: install cuda-bindings, or everything is labelled no partition",
            "pyarrow": "no samples.parquet: the rows stay in samples.jsonl",
            "pynvml": "clocks and power come from the NVML library itself, else from nvidia-smi, less often"}
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
              asked: Sequence[Split] = (), flags: int = 0, seed: int = 0, allow_busy: bool = False,
              leads_s: tuple[float, float] = (LEAD_S, NEXT_LEAD_S)) -> tuple[CudaBench, list[Split], dict[str, Any]]:
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
        urgent = unpartitioned_table(props.num_sms, lambda priority: cuda.Stream(priority=priority), priorities=(0, -1))
        bench = CudaBench(model, table, plain, props, shop, cuda, kernels, dtype=str(dtype).removeprefix("torch."),
                          dtype_bytes=dtype.itemsize, urgent=urgent, leads_s=leads_s, read_clocks=reader.clocks,
                          read_processes=reader.processes, allow_busy=allow_busy,
                          versions={"driver": reader.driver(), "cuda": torch.version.cuda, "torch": torch.__version__,
                                    "triton": triton_version})
    except BaseException:
        table.close()
        raise
    return bench, core_splits, {"busy": bool(others)}
