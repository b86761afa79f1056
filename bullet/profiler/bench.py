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
from bullet.profiler import timing
from bullet.profiler.plan import ENGINE_LAYERS, OWN_KERNELS, Point, Shape, flops_and_bytes
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


@dataclass(frozen=True)
class Measurement:
    """One lane's samples. ``stats``: seconds of one repetition. ``window_s`` is None alone.

    ``corunner``: idle, a control's name, or an operation, whose size is ``corunner_shape``.
    """

    lane: str
    shape: Shape
    sms: int
    stats: timing.Stats
    repeats: int
    corunner: str = "idle"
    corunner_shape: Shape | None = None
    corunner_sms: int | None = None
    corunner_bytes_per_s: float | None = None
    window_s: float | None = None


class Bench(Protocol):
    """A device under measurement. ``source`` is measured or simulated; ``unit`` is SM or thread."""

    backend: str
    source: str
    gpu: str
    unit: str
    num_units: int
    dtype: str
    table: PartitionTable
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
        """``clock_sm_hz``, ``clock_mem_hz``, ``temperature_c``, ``power_w``: read, never set. ``busy`` once that is so."""
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


NO_CLOCKS: dict[str, float | None] = {"clock_sm_hz": None, "clock_mem_hz": None, "temperature_c": None, "power_w": None}


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
        return not ops.intersection(OWN_KERNELS) and (self._engine or not ops.intersection(ENGINE_LAYERS))

    def measure(self, point: Point) -> list[Measurement]:
        if point.kind == "solo":
            units = lane_units(self, point, point.lane)
            repetitions = self._calibrate(point.shape, point.lane, units)
            samples = [self._once(point.shape, point.lane, units, repetitions) for _ in range(self._replays)]
            stats = timing.summarise([(i.end_s - i.start_s) / repetitions for i in samples])
            return [Measurement(point.lane, point.shape, units, stats, repetitions)]
        lane = "prefill" if point.kind == "corun" else point.lane
        own: tuple[Any, str, int] = (point.shape, lane, lane_units(self, point, lane))
        other: tuple[Any, str, int] = (point.other or point.control, other_lane(lane),
                                       lane_units(self, point, other_lane(lane)))
        counts = [self._calibrate(*one) for one in (own, other)]
        trains: tuple[list[timing.Interval], list[timing.Interval]] = ([], [])
        for turn in range(2 * self._replays + 5):
            which = turn % 2
            trains[which].append(self._once(*(own, other)[which], counts[which]))
        rows = [self._beside(own, counts[0], trains[0], other, counts[1], trains[1])]
        if point.kind == "corun":
            rows.append(self._beside(other, counts[1], trains[1], own, counts[0], trains[0]))
        return rows

    def _beside(self, own: tuple[Any, str, int], repetitions: int, train: list[timing.Interval],
                other: tuple[Any, str, int], other_repetitions: int, other_train: list[timing.Interval]) -> Measurement:
        window = timing.inside(train, other_train, repetitions)
        busy_s = sum(i.end_s - i.start_s for i in other_train)
        name, shape = (other[0].op, other[0]) if isinstance(other[0], Shape) else (other[0], None)
        moved = flops_and_bytes(self.model, shape)[1] * 4 / self.model.dtype_bytes if shape else None
        rate = moved * other_repetitions * len(other_train) / busy_s if moved is not None else None
        return Measurement(own[1], own[0], own[2], timing.summarise(window.seconds), repetitions, name, shape, other[2],
                           rate, window.window_s)

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

    def clocks(self) -> dict[str, float | None]:
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
    if shape.op == "decode_layer":
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
        layers = ("prefill_layer", "decode_layer")
        if point.kind == "solo":
            return point.shape.op in layers
        return point.kind == "corun" and point.split is not None and (
            point.shape.op, point.other and point.other.op) == layers

    def _sample(self, key: str, state: SampledState) -> dict[str, timing.Stats]:
        """Statistics of one layer by phase."""
        seed = int.from_bytes(hashlib.sha256(f"{self._seed}:{key}".encode()).digest()[:8])
        samples = sample_device(self.device, [state], seed=seed, noise_std=self._noise_std, repeats=self._samples)
        return {phase: timing.summarise([s.seconds for s in samples if s.kind == phase])
                for phase in sorted({s.kind for s in samples})}

    def measure(self, point: Point) -> list[Measurement]:
        if point.kind == "solo":
            units = lane_units(self, point, point.lane)
            (stats,) = self._sample(point.key, sampled_state(point.shape, units)).values()
            return [Measurement(point.lane, point.shape, units, stats, 1)]
        assert point.split is not None
        assert point.other is not None
        p, d = point.split
        stats = self._sample(point.key, sampled_state(point.shape, p, point.other, d))
        medians = {phase: found.median_s for phase, found in stats.items()}
        window_s = self._samples * max(medians.values())
        rows = (("prefill", point.shape, p, "decode", point.other, d), ("decode", point.other, d, "prefill", point.shape, p))
        return [Measurement(lane, shape, units, stats[lane], 1, beside.op, beside, other_units,
                            flops_and_bytes(self.model, beside)[1] / medians[other], window_s)
                for lane, shape, units, other, beside, other_units in rows]

    def anchor(self) -> Measurement:
        self._anchors += 1
        shape = anchor_shape(self.model)
        (stats,) = self._sample(f"anchor {self._anchors}", sampled_state(shape, self.num_units)).values()
        return Measurement("full", shape, self.num_units, stats, 1)

    def clocks(self) -> dict[str, float | None]:
        return dict(NO_CLOCKS)

    def provenance(self) -> dict[str, Any]:
        coefficients = dataclasses.asdict(self.device.coefficients)
        return {"driver": None, "cuda": None, "torch": None, "triton": None,
                "compute_capability": None, "partition_note": f"simulated; coefficients: {coefficients['source']}"[:300]}

    def close(self) -> None:
        """Nothing to release."""
