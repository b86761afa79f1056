"""What a sweep asks of a device, and the two devices that need no GPU: this machine's CPU and the simulator's.

All three (the third is :mod:`bullet.profiler.bench_cuda`) run the same loop in :mod:`bullet.profiler.sweep`. CPU times are
never GPU measurements: the device is called "CPU, no partition", threads are the unit, and the lanes of a co-run
alternate instead of running at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import MODELS, ModelSpec
from bullet.config import DeviceConfig
from bullet.devices.load import load_fitted
from bullet.errors import ProfileError
from bullet.estimators.sampling import SampledState, sample_device
from bullet.gpu.partition import PartitionTable, plain_table
from bullet.gpu.splits import Split
from bullet.profiler import cells, timing
from bullet.profiler.cells import Measurement, Side
from bullet.profiler.plan import Point
from bullet.profiler.shapes import CUDNN, ENGINE_LAYERS, OWN_KERNELS, TORCH_LAYERS, Shape, flops_and_bytes
from bullet.profiles.rows import ENGINE_PHASES

CPU_NAME = "CPU, no partition"


class PointError(ProfileError):
    """One point failed and the device is well: the sweep goes on without it."""


class DeviceLostError(ProfileError):
    """The device answers no more: the sweep ends, what was measured is kept."""


class TimeUpError(ProfileError):
    """The budget ended in the midst of a point: the sweep ends there, the point is measured by the next call."""


class BusyError(ProfileError):
    """Another process has come to the device: the sweep ends, what was measured is kept."""


class Bench(Protocol):
    """A device under measurement. ``source`` is measured or simulated; ``unit`` is SM or thread."""

    backend: str
    source: str
    gpu: str
    unit: str
    num_units: int
    dtype: str
    table: PartitionTable
    torch_attention: str | None
    """What computes attention of torch's operations: a column of rows."""
    busy: bool
    """Whether another process was seen on the device."""
    left_s: Callable[[], float]
    """Seconds until the sweep's budget ends, set by the sweep; infinite before."""

    def allowed(self, point: Point) -> bool:
        """Whether this device can measure such a point at all."""
        ...

    def measure(self, point: Point) -> list[Measurement]:
        """One row a lane timed; :class:`PointError`, :class:`DeviceLostError` or :class:`TimeUpError`."""
        ...

    def anchor(self) -> Measurement:
        """The same full-device operation each time: what drift is read from. :class:`BusyError` if we are not alone."""
        ...

    def clocks(self) -> Mapping[str, Any]:
        """``clock_sm_hz``, ``clock_mem_hz``, ``temperature_c``, ``power_w``, ``throttle``: read, never set."""
        ...

    def provenance(self) -> Mapping[str, Any]:
        """Columns of :mod:`bullet.profiles.rows` that are the same on every row."""
        ...

    def close(self) -> None:
        """Release everything; idempotent."""
        ...


def no_limit() -> float:
    """``left_s`` where there is no budget."""
    return math.inf


NO_CLOCKS: dict[str, Any] = {"clock_sm_hz": None, "clock_mem_hz": None, "temperature_c": None, "power_w": None, "throttle": None}


def lane_units(bench: Bench, point: Point, lane: str) -> int:
    """Units of the lane on which the point runs."""
    return bench.num_units if point.split is None else int(getattr(point.split, f"{lane}_sms"))


def other_lane(lane: str) -> str:
    """The other of prefill and decode."""
    return "decode" if lane == "prefill" else "prefill"


# ------------------------------------------------------------------------------------------------- CPU


class CpuBench:
    """This machine's cores, really timed: it proves the loop, not contention.

    A lane's "SMs" are the threads torch may use; a co-run alternates the lanes' replays. ``clock`` is injected by tests.
    """

    backend = "cpu"
    source = "measured"
    unit = "thread"
    gpu = CPU_NAME
    dtype = "float32"
    torch_attention = "torch"
    busy = False

    LOADS = ("alu_spin", "memory_stream")

    def __init__(self, model: ModelSpec, *, threads: int | None = None, replays: int = 7, min_replay_s: float = 1e-3,
                 limit_bytes: int = 1 << 30, seed: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        try:
            import torch

            from bullet.profiler import bench_engine as engine_bench
        except ImportError as exc:
            raise ProfileError(f"torch is not installed ({exc}): --device cpu needs it; "
                               "--device simulated does not") from None
        self._torch = torch
        self._before = torch.get_num_threads()
        self.num_units = threads or os.cpu_count() or 1
        if self.num_units < 1:
            raise ProfileError(f"--threads {threads}: must be 1 or more")
        self.model = model
        self._replays = replays
        self._min_replay_s = min_replay_s
        self._clock = clock
        # Rotation past a last-level cache of 32 MiB; on a CPU nothing rests on it.
        self._engine = engine_bench.available(model)
        self._shop = engine_bench.EngineWorkloads(model, torch.device("cpu"), torch.float32, l2_bytes=32 << 20,
                                                  limit_bytes=limit_bytes // 8, seed=seed)
        self._built: dict[tuple[Shape, str], Any] = {}
        self._repeats: dict[tuple[Shape, str, int], int] = {}
        self.left_s: Callable[[], float] = no_limit
        self._between: dict[Any, Callable[[], None]] = {}
        """What runs, untimed, before each replay of a shape; a replay is then one repetition."""
        # One thread cannot be split: both lanes then name the same one, which alternation permits.
        splits = [Split(p, self.num_units - p) for p in range(1, self.num_units)] or [Split(1, 1)]
        self.table = plain_table("none", self.num_units, splits)

    def allowed(self, point: Point) -> bool:
        """Triton kernels run on a GPU only; the engine's layers and steps need its packages, and steps a model long enough."""
        ops = {point.shape.op, point.other and point.other.op}
        if point.shape.op in ENGINE_PHASES and not (self._engine and self._shop.steps.fits(*point.shape[1:])):
            return False
        if point.control not in ("", "idle", *self.LOADS) or point.sharing in ("priority", "bounded") or point.told:
            return False
        return CUDNN not in ops and not ops.intersection(OWN_KERNELS) and (self._engine or not ops.intersection(ENGINE_LAYERS))

    def measure(self, point: Point) -> list[Measurement]:
        own = (point.shape, "prefill" if point.kind == "corun" else point.lane)
        names = (own[1], other_lane(own[1]))
        works: list[tuple[Any, str, int]] = [(point.shape, names[0], lane_units(self, point, names[0]))]
        if point.kind != "solo":
            works.append((point.other or point.control, names[1], lane_units(self, point, names[1])))
        counts = [1 if work[0] == "idle" else self._calibrate(*work) for work in works]

        def alone(at: int) -> Side:
            taken = [self._once(*works[at], counts[at]) for _ in range(self._replays)]
            return Side(works[at][1], works[at][0], works[at][2], [(i.end_s - i.start_s) / counts[at] for i in taken], counts[at])

        def window(which: str) -> list[Side]:
            if which != "ab":
                return [alone("ab".index(which))]
            if works[1][0] == "idle":
                return [alone(0), Side(works[1][1], None, works[1][2], [], 0)]
            trains: tuple[list[timing.Interval], list[timing.Interval]] = ([], [])
            for turn in range(2 * self._replays + 5):
                trains[turn % 2].append(self._once(*works[turn % 2], counts[turn % 2]))
            return [self._side(works[i], counts[i], trains[i], trains[1 - i]) for i in range(2)]

        return cells.measure(point, lambda steps: [window(which) for which in steps])

    def _side(self, work: tuple[Any, str, int], repetitions: int, train: list[timing.Interval],
              other_train: list[timing.Interval]) -> Side:
        window = timing.inside(train, other_train, repetitions)
        busy_s = sum(i.end_s - i.start_s for i in train)
        shape = work[0] if isinstance(work[0], Shape) else None
        moved = flops_and_bytes(self.model, shape)[1] * 4 / self.model.dtype_bytes if shape else None
        rate = moved * repetitions * len(train) / busy_s if moved is not None else None
        return Side(work[1], shape, work[2], window.seconds, repetitions, window.window_s, window.both_share, rate)

    def _once(self, shape: Shape | str, lane: str, units: int, repetitions: int) -> timing.Interval:
        if self.left_s() < 0:  # on a busy machine one point can last a thousand times as long as on an idle one
            raise TimeUpError(f"the budget ended within {shape}")
        work = self._workload(shape, lane)
        self._torch.set_num_threads(units)
        if shape in self._between:
            self._between[shape]()
        start = self._clock()
        for i in range(repetitions):
            work.run(i % work.rotation)
        return timing.Interval(start, self._clock())

    def _calibrate(self, shape: Shape | str, lane: str, units: int) -> int:
        key = (shape, lane, units)
        if key not in self._repeats:
            self._once(shape, lane, units, 1)  # warm-up
            once = self._once(shape, lane, units, 1)
            rotation = self._workload(shape, lane).rotation
            longest = max(1, math.ceil(2 * self._min_replay_s / max(once.end_s - once.start_s, 1e-9)))
            if shape in self._between:
                longest = 1
            self._repeats[key] = min(longest, timing.repeats(once.end_s - once.start_s, self._min_replay_s, rotation))
        return self._repeats[key]

    def _workload(self, shape: Shape | str, lane: str) -> Any:
        role = lane if lane == "decode" else "prefill"
        if (shape, role) not in self._built:
            if shape == "alu_spin":
                x = self._torch.rand(64, 64)
                built: Any = Load(shape, lambda i: x @ x)
            elif shape == "memory_stream":
                source, target = self._torch.rand(2, 1 << 20)
                built = Load(shape, lambda i: target.copy_(source))
            else:
                assert isinstance(shape, Shape)
                built = self._shop.build(*shape, role=role)
                if shape.op in ENGINE_PHASES:  # in service a step finds the caches as another one left them
                    self._between[shape] = self._shop.steps.other_steps
            self._built[(shape, role)] = built
        return self._built[(shape, role)]

    def anchor(self) -> Measurement:
        return self.measure(Point("solo", None, "full", anchor_shape(self.model, cpu=True)))[0]

    def clocks(self) -> dict[str, Any]:
        return dict(NO_CLOCKS)

    def provenance(self) -> dict[str, Any]:
        return {"torch": self._torch.__version__, "driver": None, "cuda": None, "triton": None,
                "compute_capability": platform.machine()}

    def close(self) -> None:
        self._torch.set_num_threads(self._before)
        self._built.clear()
        self._between.clear()
        self._shop.clear()


@dataclass
class Load:
    """A load of ours with a workload's face, one input set."""

    name: str
    run: Callable[[int], Any]
    rotation: int = 1
    takes_num_sms: bool = True


def anchor_shape(model: ModelSpec, *, cpu: bool = False) -> Shape:
    """A whole prefill layer: arithmetic on all units, so that clocks show."""
    return Shape("prefill_layer", 64 if cpu else min(2048, model.context_tokens))


# ------------------------------------------------------------------------------------------- simulated


def sampled_state(shape: Shape, sms: int, beside: Shape | None = None, beside_sms: int = 0) -> SampledState:
    """One layer of ``shape``; with ``beside``, ``shape`` is the prefill and ``beside`` the decode."""
    if shape.phase == "decode":
        return SampledState(num_seqs=shape.batch, context_tokens=shape.batch * shape.context_tokens, decode_sms=sms, layers=1)
    state = SampledState(((shape.tokens // shape.batch, shape.context_tokens),) * shape.batch, sms, layers=1)
    if beside is not None:
        state = state._replace(num_seqs=beside.batch, context_tokens=beside.batch * beside.context_tokens,
                               decode_sms=beside_sms)
    return state


class SimulatedBench:
    """Noisy samples of the simulator's device, as a GPU would give them. Layers only.

    All of them come from :func:`bullet.estimators.sampling.sample_device`, as an estimator's do. The noise of a point is drawn
    from the seed and the point's key: the order of a sweep does not change it. Nothing here is a measurement; every row says
    ``source = simulated``.
    """

    backend = "simulated"
    source = "simulated"
    unit = "SM"
    torch_attention = None
    busy = False

    def __init__(self, model: ModelSpec, gpu_name: str, table: PartitionTable, *, noise_std: float = 0.03, seed: int = 0,
                 samples: int = 25) -> None:
        if MODELS.get(model.name) != model:
            raise ProfileError(f"--device simulated: model {model.name!r} is not built in; choose one of "
                               f"{', '.join(MODELS)}")
        self.device = load_fitted(DeviceConfig(model=model.name, gpu=gpu_name))
        self.model = model
        self.table = table
        self.num_units = get_gpu(gpu_name).num_sms
        self.gpu = f"simulated {gpu_name}"
        self.dtype = "bfloat16"
        self._noise_std = noise_std
        self._seed = seed
        self._samples = samples
        self._anchors = 0
        self.left_s: Callable[[], float] = no_limit

    def allowed(self, point: Point) -> bool:
        pairs = (ENGINE_LAYERS, TORCH_LAYERS)
        if point.told or point.sharing:
            return False
        if point.kind == "solo":
            return any(point.shape.op in pair for pair in pairs)
        return point.kind == "corun" and point.split is not None and (point.shape.op, point.other and point.other.op) in pairs

    def _sample(self, key: str, state: SampledState) -> dict[str, list[float]]:
        """Seconds of one layer by phase."""
        seed = int.from_bytes(hashlib.sha256(f"{self._seed}:{key}".encode()).digest()[:8])
        samples = sample_device(self.device, [state], seed=seed, noise_std=self._noise_std, repeats=self._samples)
        return {phase: [s.seconds for s in samples if s.kind == phase] for phase in sorted({s.kind for s in samples})}

    def measure(self, point: Point) -> list[Measurement]:
        units = (lane_units(self, point, "prefill" if point.kind == "corun" else point.lane), lane_units(self, point, "decode"))
        shapes = (point.shape, point.other)
        names = ("prefill" if point.kind == "corun" else point.lane, "decode")

        def window(which: str, step: int) -> list[Side]:
            key = f"{point.key}|{point.replicate}|{step}"
            if which != "ab":
                i = "ab".index(which)
                own = shapes[i]
                assert own is not None
                (seconds,) = self._sample(key, sampled_state(own, units[i])).values()
                return [Side(names[i], own, units[i], seconds, 1)]
            assert point.other is not None
            found = self._sample(key, sampled_state(point.shape, units[0], point.other, units[1]))
            means = {lane: sum(seconds) / len(seconds) for lane, seconds in found.items()}
            window_s = self._samples * max(means.values())
            return [Side(lane, shape, sms, found[lane], 1, window_s, 1.0, flops_and_bytes(self.model, shape)[1] / means[lane])
                    for lane, shape, sms in zip(("prefill", "decode"), (point.shape, point.other), units, strict=True)]

        return cells.measure(point, lambda steps: [window(which, step) for step, which in enumerate(steps)])

    def anchor(self) -> Measurement:
        self._anchors += 1
        shape = anchor_shape(self.model)
        (seconds,) = self._sample(f"anchor {self._anchors}", sampled_state(shape, self.num_units)).values()
        return Measurement("full", shape, self.num_units, timing.summarise(seconds), 1)

    def clocks(self) -> dict[str, Any]:
        return dict(NO_CLOCKS)

    def provenance(self) -> dict[str, Any]:
        coefficients = dataclasses.asdict(self.device.coefficients)
        return {"driver": None, "cuda": None, "torch": None, "triton": None,
                "compute_capability": None, "partition_note": f"simulated; coefficients: {coefficients['source']}"[:300]}

    def close(self) -> None:
        """Nothing to release."""
