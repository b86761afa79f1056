"""The loop of a sweep: points in order, anchors in between, rows appended as they come.

One loop for every device (:class:`bullet.profiler.bench.Bench`). It stops at the end of the plan, at the budget, on
Ctrl-C or when the device is lost; in each case the rows until then are on disk, and the next call resumes.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bullet.catalog.models import ModelSpec, model_label
from bullet.errors import ProfileError, ResultsError
from bullet.gpu.splits import Split
from bullet.profiler.bench import Bench, BusyError, DeviceLostError, TimeUpError
from bullet.profiler.cells import STEPS, Measurement
from bullet.profiler.check import CheckReport
from bullet.profiler.plan import ANCHOR_EVERY, Plan, Point
from bullet.profiler.progress import Progress
from bullet.profiler.shapes import CUDNN, TORCH_LAYERS, flops_and_bytes
from bullet.profiles.journal import Journal
from bullet.profiles.rows import ENGINE_OPS, ENGINE_PHASES
from bullet.signals import exit_status, held
from bullet.version import VERSION

PROGRESS_S = 5.0


def closing_seconds(budget_s: float) -> float:
    """Kept of the budget for the last anchor, the table and the summary. *Assumed.*"""
    return min(2.0, 0.05 * budget_s)

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class SweepResult:
    """What one call did. ``left``: planned points not come to; ``beyond``: points measured beyond the plan. ``stopped``:
    why it ended before the plan did, or empty. ``status``: exit status of that: 0 for the plan or the budget, 2 busy or
    nothing measured, 3 device lost, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP. ``lines``: the closing table, the first says how
    it ended. ``interrupt``: the signal. ``tiers``: points measured (by earlier calls too)
    and planned, in order.
    """

    measured: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    left: int = 0
    beyond: int = 0
    stopped: str = ""
    status: int = 0
    elapsed_s: float = 0.0
    lines: list[str] = field(default_factory=list)
    interrupt: KeyboardInterrupt | None = None
    tiers: dict[str, tuple[int, int]] = field(default_factory=dict)


def run_prefix(bench: Bench, model: ModelSpec) -> str:
    """What makes ids of one model, element type and backend distinct in a shared table."""
    return f"{model_label(model)}|{bench.dtype}|{bench.backend}"


def utc_now() -> str:
    """Now, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class _Recorder:
    """Turns measurements into rows and appends them."""

    def __init__(self, bench: Bench, model: ModelSpec, journal: Journal, report: CheckReport, seed: int,
                 fixed: Mapping[str, Any], now: Callable[[], str]) -> None:
        self.bench, self.model, self.journal, self.report, self.now = bench, model, journal, report, now
        self.order = 0
        self.fixed = {"unit": bench.unit, "device_sms": bench.num_units, "source": bench.source, "model": model_label(model),
                      "dtype": bench.dtype, "gpu": bench.gpu, "seed": seed, "run": journal.run,
                      "bullet": VERSION, "backend": bench.backend, **bench.provenance(), **fixed}

    def record(self, row_id: str, kind: str, tier: str, split: Split | None, m: Measurement, **columns: Any) -> None:
        """``columns``: of the point; those of the measurement go before."""
        flops, least_bytes = flops_and_bytes(self.model, m.shape)
        scale = _DTYPE_BYTES[self.bench.dtype] / self.model.dtype_bytes
        partition, note = self._partition(split, columns.get("sharing"))
        beside = m.corunner_shape
        if split is not None and columns.get("sharing") == "bounded":
            split = None  # its sizes bound grids: the lanes' SMs are nobody's own
        state = {} if "clock_sm_hz" in m.columns else self.bench.clocks()
        row = {
            **self.fixed, **state, "id": row_id, "kind": kind, "tier": tier, "op": m.shape.op,
            "phase": m.shape.phase, "tokens": m.shape.tokens, "batch": m.shape.batch,
            "context_tokens": m.shape.context_tokens, "flops": flops, "bytes": least_bytes * scale, "lane": m.lane,
            "partition": partition, "partition_note": note or self.fixed.get("partition_note"), "sms": m.sms,
            "split_prefill_sms": split and split.prefill_sms, "split_decode_sms": split and split.decode_sms,
            "corunner": m.corunner, "corunner_tokens": beside and beside.tokens, "corunner_batch": beside and beside.batch,
            "corunner_context_tokens": beside and beside.context_tokens, "corunner_sms": m.corunner_sms,
            "corunner_bytes_per_s": m.corunner_bytes_per_s, "median_s": m.stats.median_s, "p20_s": m.stats.p20_s,
            "p80_s": m.stats.p80_s, "mean_s": m.stats.mean_s, "p95_s": m.stats.p95_s, "samples": m.stats.samples,
            "repeats": m.repeats, "window_s": m.window_s, "order": self.order, "measured_at": self.now(), "step": m.step,
            "group_lane": self._group_lane(split), "attention": self._attention(m.shape.op), **columns, **m.columns,
            **({"busy": True} if self.bench.busy else {}),
        }
        self.order += 1
        with held():
            self.journal.append(row)

    def point(self, prefix: str, point: Point, measured: list[Measurement], order: int, done: set[str]) -> None:
        """All rows of a point, those that it is about last: a cell counts as done once it is whole."""
        kind = {"sharing": point.sharing or ("split" if point.split is not None else None), "replicate": point.replicate}
        if len(STEPS[point.kind]) > 1:
            kind |= {"cell": f"{point.key}|visit {point.replicate}|run {self.journal.run}", "cell_order": order}
        elif point.split is None:
            kind["sharing"] = None
        for m in (m for m in measured if m.part):
            self.record(f"{prefix}|{kind['cell']}|{m.lane} {m.part}", "solo", point.tier, point.split, m, **kind)
        own = [m for m in measured if not m.part]
        for row_id, m in zip(point.row_ids(prefix), own, strict=True):
            if row_id not in done:
                self.record(row_id, point.kind, point.tier, point.split, m, **kind)
                done.add(row_id)

    def _partition(self, split: Split | None, sharing: str | None = None) -> tuple[str, str]:
        if split is None:
            return "none", "whole device, plain stream"
        if sharing == "bounded":
            return "unproven", "no partition: grids are bounded, nothing is isolated"
        return self.report.verdict(split)

    def _group_lane(self, split: Split | None) -> str | None:
        if split is None:
            return None
        return next((pair.group or None for pair in self.bench.table.pairs if pair.granted == split), None)

    def _attention(self, op: str) -> str | None:
        if op in ENGINE_OPS or op in ENGINE_PHASES:
            own = "attention" in op or "layer" in op or op in ENGINE_PHASES
            return ("own" if self.bench.backend != "cpu" else self.bench.torch_attention) if own else None
        if op == CUDNN:
            return "cudnn"
        return self.bench.torch_attention if "attention" in op or op in TORCH_LAYERS else None


def run_sweep(bench: Bench, model: ModelSpec, plan: Plan, journal: Journal, report: CheckReport, *,
              budget_s: float | None = None, started_s: float | None = None, fixed: Mapping[str, Any] | None = None,
              say: Callable[[str], None] = lambda line: None, clock: Callable[[], float] = time.monotonic,
              now: Callable[[], str] = utc_now, progress: Progress | None = None) -> SweepResult:
    """Measure the plan's points and append their rows.

    ``budget_s``, a hard stop, counts from ``started_s`` (default: now). Estimates are corrected by what points took so
    far, and no point is begun that would overrun; time that is left goes to what the plan had to cut. ``fixed``: further
    columns for every row. ``progress``: kept up to date at every point. A point that fails is named and left out;
    :class:`DeviceLostError` and Ctrl-C end the sweep: see :class:`SweepResult`.
    """
    begun_s = clock()
    started_s = begun_s if started_s is None else started_s
    prefix = run_prefix(bench, model)
    done = journal.done()
    recorder = _Recorder(bench, model, journal, report, plan.seed, fixed or {}, now)
    result = SweepResult()
    spent_s = planned_s = 0.0
    last_say_s = begun_s
    deadline_s = float("inf") if budget_s is None else started_s + budget_s - closing_seconds(budget_s)
    spare = () if budget_s is None else plan.spare
    bench.left_s = lambda: deadline_s - clock()
    points = [p for p in (*plan.points, *spare) if not done.issuperset(p.row_ids(prefix))]
    planned = result.left = sum(not done.issuperset(p.row_ids(prefix)) for p in plan.points)

    progress = progress or Progress(None)
    remaining = {tier: sum(p.tier == tier for p in (*plan.points, *plan.spare)) for tier in plan.every}

    def tiers() -> dict[str, tuple[int, int]]:
        return {tier: (count - remaining[tier], count) for tier, count in plan.every.items()}

    def anchor(number: int) -> None:
        try:
            recorder.record(f"{prefix}|anchor|run {journal.run}|{number}", "anchor", "anchor", None, bench.anchor())
        except (BusyError, DeviceLostError, TimeUpError):
            raise
        except ProfileError as exc:
            result.failed.append(("anchor", str(exc)))

    def slower() -> float:
        """How many times longer points take than was thought. From 5 s on: the first carry what is made once."""
        return spent_s / planned_s if planned_s > 0 and max(planned_s, spent_s) > 5 else 1.0

    try:
        for index, point in enumerate(points):
            if clock() + point.seconds * slower() > deadline_s:
                result.stopped = f"budget of {budget_s:.0f} s reached" if index < planned else ""
                break
            try:
                if index % ANCHOR_EVERY == 0:
                    anchor(index // ANCHOR_EVERY)
                point_began_s = clock()
                progress.begin(point)
                if _measure(bench, recorder, prefix, point, index, done, result):
                    remaining[point.tier] -= 1
                progress.end(tiers())
            except TimeUpError:
                progress.end(tiers())
                result.stopped = f"budget of {budget_s:.0f} s reached" if index < planned else ""
                break
            result.left = max(0, planned - index - 1)
            result.beyond = max(0, index + 1 - planned)
            spent_s += clock() - point_began_s
            planned_s += point.seconds
            if clock() - last_say_s >= PROGRESS_S:
                last_say_s = clock()
                rest_s = min(slower() * sum(p.seconds for p in points[index + 1:]), max(0.0, deadline_s - clock()))
                say(f"[{index + 1}/{planned}] {clock() - started_s:.0f} s, about {rest_s:.0f} s to go; "
                    f"{point.tier}: {point.key}")
        if points and result.measured:
            # From what is kept for the closing.
            bench.left_s = lambda: float("inf") if budget_s is None else started_s + budget_s - clock()
            with suppress(TimeUpError):
                anchor(1 + len(points) // ANCHOR_EVERY)
    except DeviceLostError as exc:
        progress.end(tiers(), lost=True)
        result.stopped, result.status = str(exc), 3
    except BusyError as exc:
        result.stopped, result.status = str(exc), 2
    except ResultsError:  # a full disk is no fault of the point
        with suppress(ResultsError):
            progress.end(tiers())
            progress.close()
        raise
    except KeyboardInterrupt as exc:
        progress.end(tiers())
        result.stopped, result.status, result.interrupt = str(exc) or "interrupted", exit_status(exc), exc
    if result.failed and not journal.done() and not result.stopped:
        result.stopped, result.status = f"no point could be measured; the first: {': '.join(result.failed[0])}"[:300], 2
    progress.end(tiers())
    progress.close()
    result.elapsed_s, result.tiers = clock() - begun_s, tiers()
    return result


def _measure(bench: Bench, recorder: _Recorder, prefix: str, point: Point, order: int, done: set[str],
             result: SweepResult) -> bool:
    try:
        recorder.point(prefix, point, bench.measure(point), order, done)
        result.measured += 1
        return True
    except (BusyError, DeviceLostError, TimeUpError):
        raise
    except ProfileError as exc:  # PointError, and what the torch reference or the quantiles refuse
        result.failed.append((point.key, str(exc)))
    return False
