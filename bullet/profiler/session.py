"""A whole check or sweep, from opening the device to the last table: what ``bullet-profile`` and the closed loop call.

    Target --open--> bench, axes, speeds --prove--> report --plan--> points --sweep--> rows, tables

``say`` takes lines as they come; what a notebook wants is in what is returned.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import ModelSpec, get_model
from bullet.errors import BulletError, ConfigError, PartitionError, ProfileError, ResultsError, one_line, require
from bullet.files import Claim
from bullet.gpu.partition import PartitionTable, simulated_table
from bullet.gpu.splits import IGNORE_SM_COSCHEDULING, Split, SplitRefusedError, granularity
from bullet.profiler import axes, card, shapes, summary, trials
from bullet.profiler import check as checking
from bullet.profiler import plan as planning
from bullet.profiler.axes import Axes
from bullet.profiler.bench import Bench, CpuBench, DeviceLostError, PointError, SimulatedBench
from bullet.profiler.progress import NAME as PROGRESS
from bullet.profiler.progress import Progress, tier_line
from bullet.profiler.sweep import SweepResult, closing_seconds, run_prefix, run_sweep
from bullet.profiles.journal import Journal, read_journal
from bullet.profiles.rows import ENGINE_PHASES, finalise
from bullet.signals import Say, held, silent, warn

CPU_BUDGET_S = 45.0
GRAPHS = "graphs.jsonl.gz"
CHECK_MODEL = "llama-3.1-8b"
"""Whose GEMM a check runs on a quarter of the SMs: a tiny one is launch overhead, which no SM shortens."""
DEVICES = ("cuda", "cpu", "simulated")
BACKENDS = ("auto", "green-context", "software", "none")
SKIPPABLE = (*shapes.OPS, *ENGINE_PHASES)


@dataclass(frozen=True)
class Target:
    """What is measured, and on which parts of it.

    ``backend``: how SMs are partitioned; auto: green contexts, else (a sweep only) none, and every row says so. ``splits``: only
    these, else the plan's. ``ignore_coscheduling``: splits in multiples of 2 on Hopper and above. ``gpu``, ``noise_std``: of a
    simulated device; ``threads``: what stands in for a CPU's SMs; ``allow_busy``: beside other processes on the card. ``lead_s``:
    load before each window of a cell but its first.
    """

    device: str = "cuda"
    backend: str = "auto"
    splits: Sequence[Split] = ()
    ignore_coscheduling: bool = False
    gpu: str = "h200"
    allow_busy: bool = False
    threads: int | None = None
    noise_std: float = 0.03
    lead_s: float = planning.NEXT_LEAD_S

    def __post_init__(self) -> None:
        """An option that the device would ignore is an error: nobody takes plain rows for what was asked."""
        require(self.device in DEVICES, "device", self.device, " or ".join(DEVICES))
        require(self.backend in BACKENDS, "backend", self.backend, " or ".join(BACKENDS))
        if self.device != "cuda" and self.backend != "auto":
            raise ConfigError(f"--backend {self.backend}: only --device cuda has backends, this is --device {self.device}")
        if self.device == "cpu" and (self.splits or self.ignore_coscheduling):
            raise ConfigError("--splits, --ignore-coscheduling: a CPU has no SMs to split; use --device cuda or simulated")

    @property
    def flags(self) -> int:
        """Of the driver's split."""
        return IGNORE_SM_COSCHEDULING if self.ignore_coscheduling else 0

    def simulated_splits(self) -> tuple[list[Split], list[Split]]:
        """Core and further splits of ``gpu``, without one."""
        gpu = get_gpu(self.gpu)
        rule = granularity(gpu.compute_capability, self.flags)
        core = list(self.splits) or list(axes.choose_splits(gpu.num_sms, rule, axes.CORE_DECODE_SHARES))
        extra = [] if self.splits else axes.choose_splits(gpu.num_sms, rule, axes.EXTRA_DECODE_SHARES)
        return core, [s for s in extra if s not in core]

    def simulated_table(self) -> PartitionTable:
        """What ``gpu`` would grant of them."""
        gpu, (core, extra) = get_gpu(self.gpu), self.simulated_splits()
        return simulated_table([*core, *extra], gpu.num_sms, gpu.compute_capability, self.flags)


# ------------------------------------------------------------------------------------------------ opening


@dataclass
class Session:
    """An open device, what the plan may use of it, and the proof."""

    bench: Bench
    axes: Axes
    rates: planning.Rates
    report: checking.CheckReport
    fits: Callable[[shapes.Shape], bool]
    fixed: dict[str, Any]
    memory: str = ""
    """What it will hold, in a line."""


def _open_cuda(target: Target, model: ModelSpec, seed: int, say: Say, *, fall_back: bool, started_s: float,
               budget_s: float | None = None, parts: Sequence[str] = ("own",), progress: Progress | None = None,
               evidence: Path | None = None) -> Session:
    from bullet.profiler import bench_cuda

    progress = progress or Progress(None)
    for name, effect in bench_cuda.missing_packages().items():
        say(f"without {name}: {effect}")

    def open_(backend: str) -> tuple[Any, list[Split], dict[str, Any]]:
        return bench_cuda.open_cuda(model, backend=backend, core=axes.CORE_DECODE_SHARES,
                                    extra=axes.EXTRA_DECODE_SHARES if "own" in parts else (), asked=target.splits,
                                    flags=target.flags, seed=seed, allow_busy=target.allow_busy,
                                    leads_s=(planning.LEAD_S, target.lead_s))

    note = "no partition: plain streams"
    try:
        bench, asked_core, fixed = open_("green-context" if target.backend == "auto" else target.backend)
    except PartitionError as exc:
        if target.backend != "auto" or not fall_back or (target.splits and isinstance(exc, SplitRefusedError)):
            raise
        note = f"no partition: {exc}"
        say(f"{note}; going on with plain streams, and every row says so")
        bench, asked_core, fixed = open_("none")
    try:
        broken = _try_kernels(bench, progress)
        if broken:
            say(f"triton does not work here ({broken}): no probe, so nothing can be proven, and no ALU-spin control")
        report = prove(bench, note, say, progress)
        if fall_back and target.backend == "auto" and _useless(report):
            note = f"no partition: every probe on a green context failed ({report.pairs[0].reasons[0]})"
            say(f"{note}; going on with plain streams, and every row says so")
            _close(bench)
            bench, asked_core, fixed = open_("none")
            _try_kernels(bench, progress)
            report = prove(bench, note, say, progress)
        core = [p.granted for p in bench.table.pairs if p.asked in asked_core] if bench.backend == "green-context" else []
        extra = [p.granted for p in bench.table.pairs if p.granted not in core] if core else []
        if bench.backend == "software":
            bench.table.allow(shapes.OPS[0], takes_num_sms=False)
        layers = shapes.ENGINE_LAYERS
        _check_gemm(bench, report, progress)
        if fall_back:  # a sweep: what its rows will rest on, before the first of them
            if why := _why_not(bench, layers, progress):
                say(f"the engine's layers do not run here ({why}): torch's stand in for them")
                layers = shapes.TORCH_LAYERS
            if evidence is not None and (why := progress.spoilt("evidence")):
                say(f"where kernels run is not kept: {why}")
            elif evidence is not None:
                bench.keep_evidence(evidence, partial(progress.within, "evidence"))
        fits = card.fits_in(model, 2, bench.free_bytes(), len(bench.table.pairs))
        # 1 s: plan and journal. The closing is part of the budget too.
        elapsed_s = time.monotonic() - started_s + 1 + closing_seconds(budget_s or 240.0)
        rates = card.rates_for(bench.props, startup_s=elapsed_s, compile_s=0.0, leads_s=(planning.LEAD_S, target.lead_s))
        grid = axes.gpu_axes(core, extra, layers)
        memory = card.memory_plan(model, filter(fits, grid.every_shape()), len(bench.table.pairs), 2, bench.props.l2_bytes,
                                  bench.free_bytes())
        return Session(bench, grid, rates, report, fits, fixed, memory.line())
    except BaseException:
        _close(bench)
        raise


def _try_kernels(bench: Any, progress: Progress) -> str:
    """Why kernels of ours cannot be used, or empty."""
    if why := progress.spoilt("kernels"):
        bench.graphs.kernels = None
        return why
    with progress.within("kernels"):
        broken: str = bench.try_kernels()
    return broken


def _check_gemm(bench: Any, report: checking.CheckReport, progress: Progress) -> None:
    if bench.backend != "green-context" or not bench.table.pairs:
        return
    try:
        if why := progress.spoilt("gemm"):
            raise PointError(why)
        with progress.within("gemm"):
            report.gemm, report.gemm_reasons = trials.check_gemm(bench)
    except PointError as exc:
        report.gemm = [f"GEMM on a quarter of the SMs: not measured ({exc})"]


def _why_not(bench: Any, layers: tuple[str, str], progress: Progress) -> str:
    """Why the matrix cannot be of these layers, or empty."""
    lost = sorted(progress.suspects().intersection(layers))
    if lost:
        return f"the device was lost in {', '.join(lost)} before"
    if why := progress.spoilt("layers"):
        return why
    with progress.within("layers"):
        return trials.try_layers(bench, layers)


def prove(bench: Any, note: str, say: Say = silent, progress: Progress | None = None) -> checking.CheckReport:
    """The check of a CUDA bench, its contexts made current where that proves more; ``note``: why there is nothing to prove."""
    progress = progress or Progress(None)
    if bench.backend == "software":
        return checking.unchecked(bench.table, bench.gpu, "no partition: grids are bounded, nothing is isolated")
    if bench.backend != "green-context":
        return checking.unchecked(bench.table, bench.gpu, note)
    if why := progress.spoilt("proof"):
        return checking.unchecked(bench.table, bench.gpu, f"not proven: {why}")
    with progress.within("proof"):
        try:
            report = checking.run_check(bench.table, bench, bench.gpu)
        except PartitionError as exc:
            return checking.unchecked(bench.table, bench.gpu, str(exc))
        bench.require_answer("the partitions' proof")  # a lost device is no reason to do without partitions
        if _misplaced(report) and bench.enter_contexts():
            say(f"{report.num_proven} of {len(report.pairs)} pairs proven by streams alone; once more with each green context "
                "made current")
            again = checking.run_check(bench.table, bench, bench.gpu)
            bench.require_answer("the partitions' proof")
            if again.num_proven <= report.num_proven:
                bench.leave_contexts()
            else:
                report = again
    return report


def _misplaced(report: checking.CheckReport) -> bool:
    """Work that ran elsewhere than on its lane's SMs, or not at all: what making the context current may cure."""
    return not report.control_reasons and any(
        word in reason for pair in report.pairs for reason in pair.reasons for word in ("ran on ", "share", "probe failed"))


def _useless(report: checking.CheckReport) -> bool:
    """Not one probe ran on any pair, though the control did: nothing can be measured on these streams."""
    return bool(report.pairs) and not report.control_reasons and all(
        any(reason.startswith("probe failed") for reason in pair.reasons) for pair in report.pairs)


def _open_cpu(target: Target, model: ModelSpec, seed: int) -> Session:
    bench = CpuBench(model, threads=target.threads, seed=seed)
    splits = [p.granted for p in bench.table.pairs]
    core = [splits[i] for i in sorted({0, len(splits) // 2, len(splits) - 1})]
    report = checking.unchecked(bench.table, bench.gpu, "CPU, no partition: threads are the unit, lanes alternate")
    rates = planning.Rates(bench.num_units, 3e10 * bench.num_units, 5e9, launch_s=2e-5, knee_share=1.0, point_s=0.01,
                           capture_s=0.01, compile_s=0.0, startup_s=4.0, replays=10, min_replay_s=2e-3, leads_s=(0.0, 0.0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 4 << 30
    return Session(bench, axes.cpu_axes(core, splits), rates, report, card.fits_in(model, 4, memory), {})


def _open_simulated(target: Target, model: ModelSpec, seed: int) -> Session:
    table = target.simulated_table()
    bench = SimulatedBench(model, target.gpu, table, noise_std=target.noise_std, seed=seed)
    report = checking.unchecked(table, bench.gpu, "simulated: split arithmetic alone, nothing is measured")
    rates = planning.Rates(bench.num_units, 1e18, 1e18, launch_s=0.0, point_s=1e-3, startup_s=0.0, min_replay_s=0.0,
                           capture_s=0.0, compile_s=0.0, leads_s=(0.0, 0.0))
    return Session(bench, axes.gpu_axes(*target.simulated_splits()), rates, report, lambda shape: True, {})


# --------------------------------------------------------------------------------------------- in one call


def check(target: Target = Target(), out: Path | None = None, *, say: Say = silent) -> checking.CheckReport:
    """Prove each pair of partitions with an SM probe; ``check.json`` into ``out``. A simulated target shows split arithmetic."""
    if target.device == "cpu":
        raise PartitionError("check --device cpu: a CPU has no SM partitions to prove; use --device cuda or simulated")
    if target.device == "simulated":
        table = target.simulated_table()
        report = checking.unchecked(table, f"simulated {target.gpu}", "simulated: split arithmetic alone, nothing is proven")
        if out is not None:
            with claimed(out):
                report.write(out / "check.json")
        say("\n".join([*report.lines()[:2], *(f"  {p.granted!s:>8}  would be granted" for p in table.pairs)]))
        return report
    with nullcontext() if out is None else claimed(out):
        session = _open_cuda(target, get_model(CHECK_MODEL), 0, say, fall_back=False, started_s=time.monotonic())
        try:
            if out is not None:
                session.report.write(out / "check.json")
            say("\n".join(session.report.lines()))
        finally:
            _close(session.bench)
    return session.report


def plan_lines(target: Target = Target(), *, model: str | None = None, budget_s: float | None = None, seed: int = 0,
               skip: Sequence[str] = (), parts: Sequence[str] = tuple(planning.PARTS), began_s: float = 0.0) -> list[str]:
    """What a sweep of ``target.gpu`` would measure in ``budget_s``, by its data sheet; needs no device. ``began_s``: added to the
    times at which its tiers end."""
    spec, budget_s = _defaults(target, model, budget_s)
    gpu = get_gpu(target.gpu)
    props = card.Props(gpu.name, gpu.num_sms, gpu.compute_capability, gpu.l2_bytes, gpu.mem_bytes)
    rates = card.rates_for(props, leads_s=(planning.LEAD_S, target.lead_s))
    plan = planning.make_plan(spec, axes.gpu_axes(*target.simulated_splits()), rates, budget_s=budget_s,
                              seed=seed, allowed=_without(skip), parts=parts,
                              fits=card.fits_in(spec, spec.dtype_bytes, int(0.9 * gpu.mem_bytes)))
    return [f"Plan for {spec.name} on {gpu.name} ({gpu.num_sms} SMs): nothing is measured", *plan.describe(began_s=began_s)]


def sweep(target: Target = Target(), out: Path | None = None, *, model: str | None = None, budget_s: float | None = None,
          seed: int = 0, skip: Sequence[str] = (), parts: Sequence[str] = tuple(planning.PARTS), started_s: float | None = None,
          say: Say = silent) -> SweepResult:
    """Prove the partitions, then measure alone and side by side into ``out`` (default: runs/profile-DEVICE), which is resumed.

    ``model``: a built-in name or a config.json (default llama-3.1-8b; tiny on a CPU). ``budget_s``: seconds for everything, from
    ``started_s`` (time.monotonic(); default: now) on. ``skip``: operations to leave out; ``parts``: of
    :data:`bullet.profiler.plan.PARTS`. The result's ``status`` and ``stopped``
    say how it ended, its ``lines`` are the table. Raises :class:`BulletError` where nothing can be measured.
    """
    started_s = time.monotonic() if started_s is None else started_s
    spec, budget_s = _defaults(target, model, budget_s)
    allowed = _without(skip)
    with claimed(out or Path("runs") / f"profile-{target.device}") as claim:
        return _sweep(target, claim.folder, spec, budget_s, seed, allowed, parts, started_s, say)


def _sweep(target: Target, out: Path, spec: ModelSpec, budget_s: float | None, seed: int,
           allowed: Callable[[planning.Point], bool], parts: Sequence[str], started_s: float, say: Say) -> SweepResult:
    progress = Progress(out / PROGRESS if target.device == "cuda" else None)  # no other device is lost
    if target.device == "cuda":
        try:
            session = _open_cuda(target, spec, seed, say, fall_back=True, started_s=started_s, budget_s=budget_s, parts=parts,
                                 progress=progress, evidence=out / GRAPHS)
        except DeviceLostError as exc:
            warn(f"bullet-profile: error: {exc}")
            return SweepResult(stopped=str(exc), status=3)
    else:
        session = (_open_cpu if target.device == "cpu" else _open_simulated)(target, spec, seed)
    bench, report = session.bench, session.report
    try:
        say("\n".join(report.lines()))
        with Journal(out / "samples.jsonl", {"gpu": bench.gpu, "source": bench.source}) as journal:
            report.write(out / "check.json")  # not before the journal: another GPU's folder stays as it is
            if not any(session.fits(s) for s in session.axes.corun_prefill) or not any(
                    session.fits(s) for s in session.axes.corun_decode):
                raise ProfileError(f"too little memory on {bench.gpu} for one layer of {spec.name}: end other processes, or "
                                   "choose a smaller --model")
            plan = planning.make_plan(
                spec, session.axes, session.rates, budget_s=budget_s, seed=seed, fits=session.fits,
                allowed=lambda point: bench.allowed(point) and allowed(point) and progress.allows(point),
                done=journal.done(), prefix=run_prefix(bench, spec), parts=parts)
            if target.device != "cuda":  # elsewhere nothing rests on more points
                plan = dataclasses.replace(plan, spare=())
            text = [f"Plan: {spec.name}, {bench.dtype}, on {bench.gpu} ({bench.num_units} {bench.unit}s)"
                    + (f", {len(journal.rows)} rows are there already" if journal.rows else ""), *plan.describe(bench.unit),
                    *[session.memory] * bool(session.memory)]
            say("\n".join(text))
            report.write(out / "check.json", plan=text)
            try:
                result = run_sweep(bench, spec, plan, journal, report, budget_s=budget_s, started_s=started_s,
                                   fixed=session.fixed, say=say, progress=progress)
            except ResultsError:  # a full disk takes no summary either
                say(tier_line(progress.tiers))
                raise
            with held():  # rows are there: their table is made however the sweep ended
                evidence = bench.graphs.evidence.lines() if target.device == "cuda" else []  # type: ignore[attr-defined]
                lost = [f"left out, since the device was lost there: {', '.join(progress.lost[:5])}"] * bool(progress.lost)
                said = [tier_line(progress.tiers), *lost, *report.lines(), *evidence]
                result.lines = summary.closing(out, finalise(journal.rows), result, bench.gpu, bench.source, said)
                summary.write_lines(out / "summary.txt", result.lines)
        say("\n" + "\n".join(result.lines))
        if result.status in (2, 3):
            warn(f"bullet-profile: error: {result.stopped}")
        return result
    finally:
        _close(bench)


def _defaults(target: Target, model: str | None, budget_s: float | None) -> tuple[ModelSpec, float | None]:
    cpu = target.device == "cpu"
    return get_model(model or ("tiny" if cpu else "llama-3.1-8b")), CPU_BUDGET_S if cpu and budget_s is None else budget_s


def _without(ops: Sequence[str]) -> Callable[[planning.Point], bool]:
    for op in ops:
        require(op in SKIPPABLE, "skip", op, f"one of {', '.join(SKIPPABLE)}")
    return lambda point: point.shape.op not in ops and (point.other is None or point.other.op not in ops)


_LEFT = re.compile(r"(check\.json|samples\.parquet|summary\.txt)\.\d+\.tmp|(progress|engine\.tar)\.tmp")
"""What a process that was killed in the midst of writing a file leaves beside it."""


def claimed(out: Path) -> Claim:
    """The folder, and a look at what is in it before a device is opened: an error costs no device time then."""
    # A process may have been cut before its first row, or while it wrote the first thing of all.
    names = ["samples.jsonl", PROGRESS, str(Path(PROGRESS).with_suffix(".tmp"))]
    claim = Claim(out, resumes=next((name for name in names if (out / name).exists()), names[0]))
    try:
        for path in claim.folder.iterdir():
            if _LEFT.fullmatch(path.name):
                path.unlink(missing_ok=True)
        samples = claim.folder / "samples.jsonl"
        if samples.exists() and samples.stat().st_size:
            read_journal(samples)
    except BaseException:
        claim.release(undo=True)
        raise
    return claim


def _close(bench: Bench) -> None:
    """Destroy contexts. On a device that was lost the calls fail too, and the first error is the one to report."""
    try:
        with held():
            bench.close()
    except (BulletError, RuntimeError) as exc:
        warn(f"bullet-profile: while cleaning up: {one_line(exc, 300)}")
