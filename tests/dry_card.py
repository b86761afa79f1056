"""A card whose truth is known: the co-run part of a sweep as it would give it, cell by cell, with all that disturbs one.

Clocks drift by 10 % while it runs (within a cell too) and fall with what the other lane demands; every replay has 5 % of noise
and every window 1 % more; of a layer's phases one in five contends three times as much as the mean and the rest half. Only the
means are what the device's form says, with coefficients drawn anew from each seed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.devices.fitted import DeviceModel
from bullet.profiler.shapes import Shape, flops_and_bytes
from bullet.profiles.contention import L2_BYTES_PER_FLOP, fit_contention
from bullet.profiles.layer_axis import axis_of_layers
from bullet.profiles.rows import Row, finalise
from bullet.profiles.sm_axis import AXIS, FLAT
from tests.known_device import made_up

LLAMA, GPU = get_model("llama-3.1-8b"), get_gpu("h200")
N = GPU.num_sms
SPLITS = (112, 104, 96, 80, 64, 32)
PREFILLS, BATCHES, CONTEXT = (512, 2048, 4096, 8192), (8, 64, 256), 1024
REPLAYS, CLOCK_HZ, CLOCK_NOISE, CELL_S = 25, 1.7e9, 0.003, 1.2
PATTERN = np.array([3.0, 0.5, 0.5, 0.5, 0.5])
"""Of a replay's excess over its time alone; its mean is 1."""
assert PATTERN.mean() == 1.0

COEFFICIENTS = {"prefill_contention_loss": (0.1, 0.5), "decode_contention_loss": (0.1, 0.5), "prefill_l2_loss": (0.0, 0.0),
                "decode_l2_loss": (0.1, 0.3), "shared_prefill_share": (0.4, 0.85), "rate_slope": (0.2, 0.5),
                "rate_cap": (1.08, 1.14),
                "bandwidth_knee": (0.3, 0.6), "bandwidth_sharpness": (2.0, 5.0)}
"""Between what each is drawn."""
CLOCK_LOSSES = {"clock_loss_arithmetic": (0.03, 0.1), "clock_loss_bandwidth": (0.01, 0.05)}


class DryCard:
    """``truth``: coefficients of the device, ``clock``: of its clock."""

    def __init__(self, seed: int, **changed: float) -> None:
        self.random = np.random.default_rng(seed)
        drawn = {name: float(self.random.uniform(*span)) for name, span in (COEFFICIENTS | CLOCK_LOSSES).items()} | changed
        self.clock = {name: drawn.pop(name) for name in CLOCK_LOSSES}
        self.truth = drawn
        self.coefficients = made_up(GPU, **drawn)
        self.device = DeviceModel(LLAMA, GPU, self.coefficients, cache=False)
        self.phase = float(self.random.uniform(0, 2 * math.pi))
        self.now_s = 0.0
        self.rows: list[dict[str, Any]] = []
        self.rows_: list[Row] = []

    def unfitted(self) -> DeviceModel:
        """Its kernels alone on the whole device, as a fit has them before it knows of SMs and of co-running."""
        alone = dict.fromkeys(("prefill_contention_loss", "decode_contention_loss", "prefill_l2_loss", "decode_l2_loss",
                               "shared_prefill_share"))
        return DeviceModel(LLAMA, GPU, dataclasses.replace(self.coefficients, **(FLAT | alone)))

    def drift(self) -> float:
        """Of the clock, now: 10 % between its least and its most, over minutes."""
        return 1.0 + 0.05 * math.sin(2 * math.pi * self.now_s / 70 + self.phase)

    # ------------------------------------------------------------------------------------- what is true

    def work(self, shape: tuple[str, int]) -> Any:
        op, size = shape
        if op == "prefill_layer":
            return self.device.prefill_work([(size, 0)], 1, logits_seqs=0)
        return self.device.hybrid_work((), size, size * CONTEXT, logits_seqs=0, layers=1)

    def use(self, shape: tuple[str, int], sms: int, part: float, inverse: float) -> tuple[float, float]:
        """Bytes/s that a lane alone draws with a part of its SMs' time, and the share of all SM time that its GEMMs fill."""
        work = self.work(shape)
        seconds = self.device._corun_seconds(work, sms, 0, part, inverse)
        return work.bytes / seconds, work.gemm_sm_s() / (N * seconds)

    def grants(self, own: float, other: float) -> tuple[float, float]:
        peak = self.device._peak_bytes_per_s
        if own + other <= peak:
            return own, other
        if min(own, other) >= peak / 2:
            return peak / 2, peak / 2
        return (own, peak - own) if own < other else (peak - other, other)

    def seconds(self, shape: tuple[str, int], sms: int) -> float:
        """Alone, at this moment's clock."""
        return self.device._corun_seconds(self.work(shape), sms, 0, self.drift(), self.device._inverse_bandwidth[sms])

    # ------------------------------------------------------------------------------------- what a window gives

    def window(self, alone_s: float, beside_s: float | None = None) -> np.ndarray:
        """Replays of a lane alone, or beside the other."""
        noise = np.exp(0.05 * self.random.standard_normal(REPLAYS)) * math.exp(0.01 * self.random.standard_normal())
        if beside_s is None:
            return alone_s * noise
        pattern = np.roll(np.tile(PATTERN, REPLAYS // len(PATTERN)), self.random.integers(len(PATTERN)))
        return np.maximum(alone_s + (beside_s - alone_s) * pattern, 0.2 * alone_s) * noise

    def row(self, kind: str, lane: str, shape: tuple[str, int], sms: int, split: int | None, seconds: np.ndarray, clock: float,
            beside: dict[str, Any] | None = None, **columns: Any) -> dict[str, Any]:
        op, size = shape
        decode = op == "decode_layer"
        flops, moved = flops_and_bytes(LLAMA, Shape(op, size, size if decode else 1, CONTEXT if decode else 0))
        row = {"id": f"{len(self.rows)}", "flops": flops, "bytes": moved,
               "kind": kind, "op": op, "phase": lane, "tokens": size, "batch": size if decode else 1,
               "context_tokens": CONTEXT if decode else 0, "backend": "simulated", "partition": "proven" if split else "none",
               "lane": lane, "unit": "SM", "sms": sms, "split_prefill_sms": split, "split_decode_sms": split and N - split,
               "device_sms": N, "corunner": "idle", "median_s": float(np.median(seconds)), "mean_s": float(seconds.mean()),
               "samples": REPLAYS, "source": "simulated", "gpu": "simulated h200", "model": LLAMA.name, "dtype": "bfloat16",
               "order": len(self.rows), "run": 0, "measured_at": "2026-11-30",
               "clock_window_hz": CLOCK_HZ * clock * math.exp(CLOCK_NOISE * self.random.standard_normal()), **(beside or {}),
               **columns}
        self.rows.append(row)
        return row

    def anchor(self) -> None:
        shape = ("prefill_layer", 2048)
        self.row("anchor", "full", shape, N, None, self.window(self.seconds(shape, N)), self.drift())

    def beside(self, lane: str, shape: tuple[str, int], sms: int, use: tuple[float, float], own: tuple[float, float],
               part: float, inverse: float, arithmetic: float | None = None) -> tuple[float, float]:
        """Seconds beside a load of that use (bytes/s, GEMMs' share of SM time), and how much of its clock is left."""
        granted, other = self.grants(own[0], use[0])
        side = 0 if lane == "prefill" else 1
        share = other / self.device._peak_bytes_per_s
        left = 1 - self.device.losses[side] * share - self.device.l2_losses[side] * use[1]
        arithmetic = use[1] if arithmetic is None else arithmetic
        clock = math.exp(-self.clock["clock_loss_arithmetic"] * arithmetic - self.clock["clock_loss_bandwidth"] * share)
        seconds = self.device._corun_seconds(self.work(shape), sms, 0, part * clock * self.drift(),
                                             inverse * own[0] / granted / left)
        return seconds, clock

    def cell(self, tokens: int, batch: int, split: int | None, replicate: int = 0, sharing: str = "split", share: float = 0.0
             ) -> None:
        shapes = {"prefill": ("prefill_layer", tokens), "decode": ("decode_layer", batch)}
        sms = {"prefill": split or N, "decode": N - split if split else N}
        part = {"prefill": share, "decode": 1 - share} if split is None else dict.fromkeys(sms, 1.0)
        rate, inverse = self.device._rate, self.device._inverse_bandwidth
        lane_inverse = {lane: inverse[sms[lane]] if split else 1 / self.device.bandwidth_share(part[lane] * N) for lane in sms}
        name = f"{tokens}|{batch}|{split}|{sharing}|visit {replicate}"
        alone: dict[str, list[float]] = {"prefill": [], "decode": []}
        use = {lane: self.use(shapes[lane], sms[lane], part[lane], lane_inverse[lane]) for lane in sms}
        for step, running in enumerate(("prefill", "decode", "both", "decode", "prefill")):
            self.now_s += CELL_S / 5
            if running != "both":
                clock = rate[sms[running]] * self.drift()
                seconds = self.window(self.seconds(shapes[running], sms[running]))
                alone[running].append(float(seconds.mean()))
                self.row("solo", running, shapes[running], sms[running], split, seconds, clock, cell=name, step=step,
                         replicate=replicate, sharing=sharing)
                continue
            found = []
            for lane, other in (("prefill", "decode"), ("decode", "prefill")):
                both_s, left = self.beside(lane, shapes[lane], sms[lane], use[other], use[lane], part[lane],
                                           lane_inverse[lane])
                seconds = self.window(self.seconds(shapes[lane], sms[lane]), both_s)
                op, size = shapes[other]
                found.append((lane, self.row(
                    "corun", lane, shapes[lane], sms[lane], split, seconds, rate[sms[lane]] * self.drift() * left, {
                        "corunner": op, "corunner_tokens": size, "corunner_batch": size if other == "decode" else 1,
                        "corunner_context_tokens": CONTEXT if other == "decode" else 0, "corunner_sms": sms[other]},
                    cell=name, step=step, replicate=replicate, sharing=sharing)))
        for lane, row in found:
            row["slowdown"] = row["mean_s"] / float(np.mean(alone[lane]))
            row["solo_mean_s"] = float(np.mean(alone[lane]))

    def control(self, control: str, lane: str, split: int) -> None:
        """A stream, a spin, or nothing beside a layer of middle size."""
        shape = ("prefill_layer", 2048) if lane == "prefill" else ("decode_layer", 64)
        sms = split if lane == "prefill" else N - split
        rate, inverse = self.device._rate[sms], self.device._inverse_bandwidth[sms]
        l2_rate = L2_BYTES_PER_FLOP * GPU.peak_flops * self.coefficients.gemm_tiles[0][2]
        streams = {"memory_stream": (0.95 * self.device.bandwidth_share(N - sms) * self.device._peak_bytes_per_s, 0.0),
                   "l2_stream": (0.0, 0.45 * (N - sms) / N)}
        own, use = self.use(shape, sms, 1.0, inverse), streams.get(control, (0.0, 0.0))
        both_s, left = self.beside(lane, shape, sms, use, own, 1.0, inverse, (N - sms) / N if control == "tensor_spin" else 0.0)
        name, alone = f"{control}|{lane}|{split}", []
        moved = {"memory_stream": self.grants(own[0], use[0])[1], "l2_stream": use[1] * l2_rate}.get(control)
        for step, running in enumerate(("a", "ab", "a")):
            self.now_s += CELL_S / 3
            if running == "a":
                seconds = self.window(self.seconds(shape, sms))
                alone.append(float(seconds.mean()))
                self.row("solo", lane, shape, sms, split, seconds, rate * self.drift(), cell=name, step=step, sharing="split")
            else:
                row = self.row("control", lane, shape, sms, split, self.window(self.seconds(shape, sms), both_s),
                               rate * self.drift() * left, {"corunner": control, "corunner_sms": N - sms,
                                                            "corunner_bytes_per_s": moved}, cell=name, step=step, sharing="split")
        row["slowdown"] = row["mean_s"] / float(np.mean(alone))

    def sweep(self) -> list[Row]:
        """The co-run part of the plan: matrix twice, controls, the unpartitioned cells, whole layers along SMs."""
        points: list[Any] = []
        for replicate in range(2):
            cells = [(t, b, p, replicate) for t in PREFILLS for b in BATCHES for p in SPLITS]
            points += [("cell", cells[i]) for i in self.random.permutation(len(cells))]
        points += [("control", (control, lane, split)) for split in (112, 80, 32) for lane in ("decode", "prefill")
                   for control in ("tensor_spin", "l2_stream", "memory_stream", "alu_spin", "idle")]
        share = self.truth["shared_prefill_share"]
        for tokens in (512, 8192):
            for batch in (8, 256):
                points += [("cell", (tokens, batch, None, 0, "plain", share)),
                           ("cell", (tokens, batch, None, 0, "priority", 0.7 * share))]
        for i, (kind, arguments) in enumerate(points):
            if i % 20 == 0:
                self.anchor()
            getattr(self, kind)(*arguments)
        self.anchor()
        for shape, lane in ((("prefill_layer", 2048), "prefill"), (("decode_layer", 64), "decode")):
            for split in (None, *SPLITS):
                sms = N if split is None else split if lane == "prefill" else N - split
                self.now_s += 0.4
                self.row("solo", lane, shape, sms, split, self.window(self.seconds(shape, sms)),
                         self.device._rate[sms] * self.drift())
        self.anchor()
        self.rows_ = finalise(self.rows)
        return self.rows_


@dataclasses.dataclass(frozen=True)
class Recovered:
    """Of one card: coefficient -> what is true, what was found, and the interval."""

    truth: dict[str, float]
    value: dict[str, float]
    low: dict[str, float]
    high: dict[str, float]


def recovered(seed: int, left_out: bool = True, **changed: float) -> Recovered:
    """Its SM axis by layers, then contention, as a fit does it once kernels alone are known. ``left_out``: the axis too, else the
    true one."""
    card = DryCard(seed, **changed)
    rows, device = card.sweep(), card.unfitted()
    axis: dict[str, float] = {name: card.truth[name] for name in AXIS}
    spans: dict[str, tuple[float, float]] = {}
    if left_out:
        layers = axis_of_layers(rows, device)
        assert layers is not None
        axis, spans, _ = layers
    fit = fit_contention(rows, DeviceModel(LLAMA, GPU, dataclasses.replace(device.coefficients, **axis)))
    clock = {name: told for name, told in fit.notes["clock"].items() if isinstance(told, dict)}
    both = spans | fit.intervals
    return Recovered({**card.truth, **card.clock}, {**axis, **fit.coefficients, **{k: v["value"] for k, v in clock.items()}},
                     {**{k: v[0] for k, v in both.items()}, **{k: v["low"] for k, v in clock.items()}},
                     {**{k: v[1] for k, v in both.items()}, **{k: v["high"] for k, v in clock.items()}})
