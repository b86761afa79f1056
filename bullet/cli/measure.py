"""``bullet-profile check | sweep | gpu | table | compare``: prove SM partitions and measure on them.

:func:`main` is called by bullet/cli/profile.py. ``gpu`` is check, then sweep, in one process on one table of partitions
(``make gpu``).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bullet.catalog.gpus import GPUS, get_gpu
from bullet.catalog.models import ModelSpec, get_model
from bullet.errors import BulletError, ConfigError, PartitionError, ProfileError, ResultsError
from bullet.gpu.partition import IGNORE_SM_COSCHEDULING, Split, SplitRefusedError, granularity, simulated_table
from bullet.profiler import check as checking
from bullet.profiler import plan as planning
from bullet.profiler import summary, sweep
from bullet.profiler.bench import Bench, CpuBench, SimulatedBench
from bullet.profiles.rows import ENGINE_PHASES, Journal, agreement, finalise, read_journal, write_parquet

PROG = "bullet-profile"
CPU_BUDGET_S = 45.0


def say(text: str = "") -> None:
    """One line to standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _number(text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a {'positive number' if least else 'number, 0 or more'}")
    return value


def _positive(text: str) -> float:
    return _number(text, sys.float_info.min)


def _not_negative(text: str) -> float:
    return _number(text, 0.0)


def _threads(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, 1 or more")
    return int(text)


def _splits(text: str) -> list[Split]:
    try:
        return [Split(*(int(side) for side in part.split("+", 1))) for part in text.split(",")]
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r}: must read prefill+decode,.. as in 112+20,104+28") from None


def build_parser() -> argparse.ArgumentParser:
    """The command line, without running anything."""
    parser = _Parser(prog=PROG, description="Prove SM partitions and measure prefill and decode on them.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for name, text in (("check", "prove each pair of partitions with an SM probe"),
                       ("sweep", "prove the partitions, then measure alone and side by side"),
                       ("gpu", "check, then sweep; verdicts and the co-run table are printed last")):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--device", choices=["cuda", "cpu", "simulated"], default="cuda")
        command.add_argument("--backend", choices=["auto", "green-context", "software", "none"], default="auto",
                             help="how SMs are partitioned; auto: green contexts, else (sweep only) none, labelled so")
        command.add_argument("--splits", type=_splits, default=[], help="prefill+decode,..: only these splits")
        command.add_argument("--ignore-coscheduling", action="store_true",
                             help="splits in multiples of 2 on Hopper and above; large clusters are given up")
        command.add_argument("--gpu", choices=sorted(GPUS), default="h200", help="which GPU to simulate")
        command.add_argument("--out", type=Path, default=None, help="folder for results; an existing one is resumed")
        command.add_argument("--allow-busy", action="store_true", help="measure beside other processes on the card")
        if name == "check":
            continue
        command.add_argument("--model", default=None, help="built-in name or a config.json (default llama-3.1-8b; tiny on a CPU)")
        command.add_argument("--budget-s", type=_positive, default=None, help="seconds for everything, start-up included")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--skip", action="append", default=[], choices=(*planning.OPS, *ENGINE_PHASES), metavar="OP",
                             help="leave an operation out; may be repeated")
        command.add_argument("--threads", type=_threads, default=None, help="--device cpu: threads that stand in for SMs")
        command.add_argument("--noise-std", type=_not_negative, default=0.03, help="--device simulated: relative noise")
        command.add_argument("--plan-only", action="store_true", help="print the plan for --gpu and stop; needs no device")
    command = commands.add_parser("table", help="table and summary of a sweep from its rows; needs no device")
    command.add_argument("out", type=Path, help="the sweep's folder")
    command = commands.add_parser("compare", help="do two sweeps of one device agree?")
    command.add_argument("first", type=Path)
    command.add_argument("second", type=Path)
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 not proven (check) or tables that disagree, 2 the user's to repair, 3 device lost,
    130 Ctrl-C, 141 nobody reads the output, 143 terminated."""
    started_s = time.monotonic()
    try:
        args = build_parser().parse_args(argv)
        if args.command in ("check", "sweep", "gpu"):
            _require_used(args)
        with _terminate_as_interrupt():
            if args.command == "compare":
                return _compare(args)
            if args.command == "table":
                return _table(args)
            if args.command == "check":
                return _check(args)
            return sweep_command(args, started_s)
    except BulletError as exc:
        sys.stdout.flush()
        sys.stderr.write(f"{PROG}: error: {' '.join(str(exc).split())}\n")
        return 2
    except KeyboardInterrupt as exc:
        sys.stderr.write(f"{PROG}: {str(exc) or 'interrupted'}\n")
        return sweep.interrupt_status(exc)
    except BrokenPipeError:  # the reader of our output has gone: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _require_used(args: argparse.Namespace) -> None:
    """An option that the device would ignore is an error: nobody takes plain rows for what was asked."""
    if args.device != "cuda" and args.backend != "auto":
        raise ConfigError(f"--backend {args.backend}: only --device cuda has backends, this is --device {args.device}")
    if args.device == "cpu" and (args.splits or args.ignore_coscheduling):
        raise ConfigError("--splits, --ignore-coscheduling: a CPU has no SMs to split; use --device cuda or simulated")


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM (a time limit) unwinds like Ctrl-C: contexts are destroyed and rows kept. A second one changes nothing."""
    def stop(number: int, frame: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise sweep.Terminated("terminated")

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: the caller's handlers stay
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------------------------------------------ set-up


@dataclass
class _Session:
    """An open device, what the plan may use of it, and the proof."""

    bench: Bench
    axes: planning.Axes
    rates: planning.Rates
    report: checking.CheckReport
    fits: Callable[[planning.Shape], bool]
    fixed: dict[str, Any]


def _open_cuda(args: argparse.Namespace, model: ModelSpec, started_s: float, *, fall_back: bool) -> _Session:
    from bullet.profiler import bench_cuda

    for name, effect in bench_cuda.missing_packages().items():
        say(f"without {name}: {effect}")
    flags = IGNORE_SM_COSCHEDULING if args.ignore_coscheduling else 0

    def open_(backend: str) -> tuple[Any, list[Split], dict[str, Any]]:
        return bench_cuda.open_cuda(model, backend=backend, core=planning.CORE_DECODE_SHARES,
                                    extra=planning.EXTRA_DECODE_SHARES, asked=args.splits, flags=flags,
                                    seed=getattr(args, "seed", 0), allow_busy=args.allow_busy)

    note = "no partition: plain streams"
    try:
        bench, asked_core, fixed = open_("green-context" if args.backend == "auto" else args.backend)
    except PartitionError as exc:
        if args.backend != "auto" or not fall_back or (args.splits and isinstance(exc, SplitRefusedError)):
            raise
        note = f"no partition: {exc}"
        say(f"{note}; going on with plain streams, and every row says so")
        bench, asked_core, fixed = open_("none")
    try:
        broken = bench.try_kernels()
        if broken:
            say(f"triton does not work here ({broken}): no probe, so nothing can be proven, and no ALU-spin control")
        report = _prove(bench, note)
        if fall_back and args.backend == "auto" and _useless(report):
            note = f"no partition: every probe on a green context failed ({report.pairs[0].reasons[0]})"
            say(f"{note}; going on with plain streams, and every row says so")
            _close(bench)
            bench, asked_core, fixed = open_("none")
            bench.try_kernels()
            report = _prove(bench, note)
        core = [p.granted for p in bench.table.pairs if p.asked in asked_core] if bench.backend == "green-context" else []
        extra = [p.granted for p in bench.table.pairs if p.granted not in core] if core else []
        if bench.backend == "software":
            for op in planning.OPS:
                bench.table.allow(_Named(op))
        fits = bench_cuda.fits_in(model, 2, bench.free_bytes())
        # 1 s: plan and journal. The closing is part of the budget too.
        elapsed_s = time.monotonic() - started_s + 1 + sweep.closing_seconds(getattr(args, "budget_s", None) or 240.0)
        rates = bench_cuda.rates_for(bench.props, startup_s=elapsed_s)
        return _Session(bench, planning.gpu_axes(core, extra), rates, report, fits, fixed)
    except BaseException:
        _close(bench)
        raise


@dataclass(frozen=True)
class _Named:
    name: str
    takes_num_sms: bool = False


def _prove(bench: Any, note: str) -> checking.CheckReport:
    if bench.backend == "software":
        return checking.unchecked(bench.table, bench.gpu, "no partition: grids are bounded, nothing is isolated")
    if bench.backend != "green-context":
        return checking.unchecked(bench.table, bench.gpu, note)
    try:
        report = checking.run_check(bench.table, bench, bench.gpu)
    except PartitionError as exc:
        return checking.unchecked(bench.table, bench.gpu, str(exc))
    if _misplaced(report) and bench.enter_contexts():
        say(f"{report.num_proven} of {len(report.pairs)} pairs proven by streams alone; once more with each green context "
            "made current")
        again = checking.run_check(bench.table, bench, bench.gpu)
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


def _open_cpu(args: argparse.Namespace, model: ModelSpec) -> _Session:
    bench = CpuBench(model, threads=args.threads, seed=args.seed)
    splits = [p.granted for p in bench.table.pairs]
    core = [splits[i] for i in sorted({0, len(splits) // 2, len(splits) - 1})]
    report = checking.unchecked(bench.table, bench.gpu, "CPU, no partition: threads are the unit, lanes alternate")
    rates = planning.Rates(bench.num_units, 3e10 * bench.num_units, 5e9, launch_s=2e-5, knee_share=1.0, point_s=0.03,
                           startup_s=4.0, replays=10, min_replay_s=2e-3)
    return _Session(bench, planning.cpu_axes(core, splits), rates, report, _cpu_fits(model), {})


def _cpu_fits(model: ModelSpec) -> Callable[[planning.Shape], bool]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 4 << 30

    def fits(shape: planning.Shape) -> bool:
        return 4 * planning.flops_and_bytes(model, shape)[1] * 4 / model.dtype_bytes <= total
    return fits


def _simulated_splits(args: argparse.Namespace) -> tuple[list[Split], list[Split], int, tuple[int, int]]:
    gpu = get_gpu(args.gpu)
    rule = granularity(gpu.compute_capability, IGNORE_SM_COSCHEDULING if args.ignore_coscheduling else 0)
    core = list(args.splits) or list(planning.choose_splits(gpu.num_sms, rule, planning.CORE_DECODE_SHARES))
    extra = [] if args.splits else list(planning.choose_splits(gpu.num_sms, rule, planning.EXTRA_DECODE_SHARES))
    return core, [s for s in extra if s not in core], gpu.num_sms, gpu.compute_capability


def _simulated_table(args: argparse.Namespace) -> tuple[Any, list[Split], list[Split]]:
    core, extra, num_sms, capability = _simulated_splits(args)
    flags = IGNORE_SM_COSCHEDULING if args.ignore_coscheduling else 0
    return simulated_table([*core, *extra], num_sms, capability, flags), core, extra


def _open_simulated(args: argparse.Namespace, model: ModelSpec) -> _Session:
    table, core, extra = _simulated_table(args)
    bench = SimulatedBench(model, args.gpu, table, noise_std=args.noise_std, seed=args.seed)
    report = checking.unchecked(table, bench.gpu, "simulated: split arithmetic alone, nothing is measured")
    rates = planning.Rates(bench.num_units, 1e18, 1e18, launch_s=0.0, point_s=1e-3, startup_s=0.0, min_replay_s=0.0)
    return _Session(bench, planning.gpu_axes(core, extra), rates, report, lambda shape: True, {})


# --------------------------------------------------------------------------------------------- commands


def _check(args: argparse.Namespace) -> int:
    if args.device == "cpu":
        raise PartitionError("check --device cpu: a CPU has no SM partitions to prove; use --device cuda or simulated")
    if args.device == "simulated":
        table, _, _ = _simulated_table(args)
        report = checking.unchecked(table, f"simulated {args.gpu}", "simulated: split arithmetic alone, nothing is proven")
        if args.out is not None:
            report.write(args.out / "check.json")
        say("\n".join([*report.lines()[:2], *(f"  {p.granted!s:>8}  would be granted" for p in table.pairs)]))
        return 0
    if args.out is not None:
        _prepare(args.out)
    session = _open_cuda(args, get_model("tiny"), time.monotonic(), fall_back=False)
    try:
        if args.out is not None:
            session.report.write(args.out / "check.json")
        say("\n".join(session.report.lines()))
    finally:
        _close(session.bench)
    return 0 if session.report.proven and not session.report.refused else 1


def sweep_command(args: argparse.Namespace, started_s: float) -> int:
    """``sweep`` and ``gpu``: exit status as :func:`main`'s."""
    model = get_model(args.model or ("tiny" if args.device == "cpu" else "llama-3.1-8b"))
    budget_s = args.budget_s if args.budget_s is not None else (CPU_BUDGET_S if args.device == "cpu" else None)
    if args.plan_only:
        say("\n".join(_plan_lines(args, model, budget_s)))
        return 0
    out: Path = args.out or Path("runs") / f"profile-{args.device}"
    _prepare(out)
    if args.device == "cuda":
        session = _open_cuda(args, model, started_s, fall_back=True)
    else:
        session = _open_cpu(args, model) if args.device == "cpu" else _open_simulated(args, model)
    try:
        return _run(args, model, session, out, budget_s, started_s)
    finally:
        _close(session.bench)


def _prepare(out: Path) -> None:
    """Make the folder and look at what is in it before a device is opened: an error costs no device time then."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as exc:
        raise ResultsError(f"{out}: cannot be written ({exc.strerror}): choose another --out") from None
    samples = out / "samples.jsonl"
    if samples.exists() and samples.stat().st_size:
        read_journal(samples)


def _write_text(path: Path, lines: Sequence[str]) -> None:
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as exc:
        raise ResultsError(f"{path}: cannot be written ({exc.strerror}); rows until here are kept") from None


def _close(bench: Bench) -> None:
    """Destroy contexts. On a device that was lost the calls fail too, and the first error is the one to report."""
    try:
        bench.close()
    except (BulletError, RuntimeError) as exc:
        sys.stderr.write(f"{PROG}: while cleaning up: {' '.join(str(exc).split())[:300]}\n")


def _run(args: argparse.Namespace, model: ModelSpec, session: _Session, out: Path, budget_s: float | None,
         started_s: float) -> int:
    bench, report = session.bench, session.report
    verdicts = report.lines()
    say("\n".join(verdicts))
    prefix = sweep.run_prefix(bench, model)
    with Journal(out / "samples.jsonl", {"gpu": bench.gpu, "source": bench.source}) as journal:
        report.write(out / "check.json")  # not before the journal: another GPU's folder stays as it is
        if not any(session.fits(s) for s in session.axes.corun_prefill) or not any(
                session.fits(s) for s in session.axes.corun_decode):
            raise ProfileError(f"too little memory on {bench.gpu} for one layer of {model.name}: end other processes, or "
                               "choose a smaller --model")
        plan = planning.make_plan(
            model, session.axes, session.rates, budget_s=budget_s, seed=args.seed, fits=session.fits,
            allowed=lambda point: bench.allowed(point) and not _skipped(point, args.skip), done=journal.done(),
            prefix=prefix)
        if args.device != "cuda":  # elsewhere nothing rests on more points
            plan = dataclasses.replace(plan, spare=())
        text = [f"Plan: {model.name}, {bench.dtype}, on {bench.gpu} ({bench.num_units} {bench.unit}s)"
                + (f", {len(journal.rows)} rows are there already" if journal.rows else ""), *plan.describe(bench.unit)]
        say("\n".join(text))
        _write_text(out / "plan.txt", text)
        result = sweep.run_sweep(bench, model, plan, journal, report, budget_s=budget_s, started_s=started_s,
                                 fixed=session.fixed, say=say)
        rows = finalise(journal.rows)
    lines = _closing(bench, verdicts, rows, result, out)
    say("\n" + "\n".join(lines))
    _write_text(out / "summary.txt", lines)
    if result.status in (2, 3):
        sys.stderr.write(f"{PROG}: error: {result.stopped}\n")
    return result.status


def _skipped(point: planning.Point, ops: Sequence[str]) -> bool:
    return point.shape.op in ops or (point.other is not None and point.other.op in ops)


def _closing(bench: Bench, verdicts: list[str], rows: list[dict[str, Any]], result: sweep.SweepResult,
             out: Path) -> list[str]:
    try:
        write_parquet(out / "samples.parquet", rows, {"gpu": bench.gpu, "source": bench.source})
        where = f"{out / 'samples.parquet'} and samples.jsonl"
    except ImportError:
        where = f"{out / 'samples.jsonl'} (pyarrow is not installed: no samples.parquet)"
    label = {"measured": "measured on", "simulated": "simulated, not measured:"}[bench.source]
    ended = result.stopped or "plan done" + (f", and {result.beyond} points more in the time left" if result.beyond else "")
    fixed = [f"Sweep: {label} {bench.gpu}; {result.measured} points in {result.elapsed_s:.0f} s, {ended}"
             + (f", {result.left} left: the same command resumes" if result.left else "")]
    fixed += [f"  failed: {key}: {why}"[:200] for key, why in result.failed[:5]]
    if len(result.failed) > 5:
        fixed.append(f"  .. and {len(result.failed) - 5} more failed points")
    fixed += [f"{len(rows)} rows in {where}", summary.drift_line(rows), *verdicts]
    return summary.fit(fixed, _tables(rows))


def _tables(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Control, co-run, own kernels' and operation tables of what was measured last, then those of other models or backends
    that the folder also holds: one cell never stands for two of them.
    """
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["dtype"], row["backend"]), []).append(row)
    tables = []
    for (model, _, backend), found in sorted(groups.items(), key=lambda group: group[1][-1] is not rows[-1]):
        gpu = found[0]["gpu"]
        on = {"cpu": "CPU, no partition, lanes alternate: not contention", "simulated": f"SIMULATED {gpu}"}.get(
            backend, f"measured on {gpu}" + (", no partition" if backend == "none" else ""))
        on += f", {model}"
        tables += [summary.control_lines(found, on), summary.corun_lines(found, on), summary.own_kernel_lines(found, on),
                   summary.operation_lines(found, on)]
    return tables


def _table(args: argparse.Namespace) -> int:
    """What a sweep prints and writes last, from its rows alone: for one that was killed before it came to that."""
    header, journal, _ = read_journal(args.out / "samples.jsonl")
    if not journal:
        raise ProfileError(f"{args.out / 'samples.jsonl'}: holds no row yet")
    rows = finalise(journal)
    gpu, source = str(header.get("gpu")), str(header.get("source"))
    try:
        write_parquet(args.out / "samples.parquet", rows, {"gpu": gpu, "source": source})
    except ImportError:
        say("pyarrow is not installed: no samples.parquet")
    proven = {kind: sum(row["partition"] == kind for row in rows) for kind in ("proven", "unproven", "none")}
    fixed = [f"{len(rows)} rows of {gpu} ({source}): " + ", ".join(f"{n} {kind}" for kind, n in proven.items()),
             summary.drift_line(rows)]
    lines = summary.fit(fixed, _tables(rows))
    say("\n".join(lines))
    _write_text(args.out / "summary.txt", lines)
    return 0


def _plan_lines(args: argparse.Namespace, model: ModelSpec, budget_s: float | None) -> list[str]:
    from bullet.profiler.bench_cuda import Props, fits_in, rates_for

    gpu = get_gpu(args.gpu)
    core, extra, num_sms, capability = _simulated_splits(args)
    props = Props(gpu.name, num_sms, capability, gpu.l2_bytes, gpu.mem_bytes)
    plan = planning.make_plan(model, planning.gpu_axes(core, extra), rates_for(props), budget_s=budget_s, seed=args.seed,
                              fits=fits_in(model, model.dtype_bytes, int(0.9 * gpu.mem_bytes)),
                              allowed=lambda point: not _skipped(point, args.skip))
    return [f"Plan for {model.name} on {gpu.name} ({num_sms} SMs): nothing is measured", *plan.describe()]


def _compare(args: argparse.Namespace) -> int:
    tables = []
    for folder in (args.first, args.second):
        header, rows, _ = read_journal(folder / "samples.jsonl" if folder.is_dir() else folder)
        tables.append((header, rows))
    (first, a), (second, b) = tables
    for name in ("gpu", "source"):
        if first.get(name) != second.get(name):
            raise ProfileError(f"{args.first} is of {name} {first.get(name)!r}, {args.second} of {second.get(name)!r}: "
                               "only tables of one device are compared")
    common, difference = agreement(a, b)
    say(f"{common} measurements in common; median difference {100 * difference:.1f} % (within 5 % wanted)")
    return 0 if difference <= 0.05 else 1
