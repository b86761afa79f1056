"""``bullet-profile check | sweep | gpu | table | compare``: prove SM partitions and measure on them.

:func:`main` is called by bullet/cli/profile.py. ``gpu`` is check, then sweep, in one process on one table of partitions
(``make gpu``).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from bullet.catalog.gpus import get_gpu
from bullet.cli.common import Parser, out_folder
from bullet.cli.lifecycle import command
from bullet.errors import ConfigError
from bullet.gpu.splits import Split
from bullet.profiler import session, stages, summary
from bullet.profiler.bench import DeviceLostError
from bullet.profiler.plan import LEAD_S, PARTS
from bullet.profiler.session import Target
from bullet.signals import warn

PROG = "bullet-profile"


def say(text: str = "") -> None:
    """One line to standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _number(text: str, least: float = sys.float_info.min) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a {'positive number' if least else 'number, 0 or more'}")
    return value


def _threads(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, 1 or more")
    return int(text)


def _card(text: str) -> str:
    """Known by name, or as a file; :class:`ConfigError` says what there is."""
    get_gpu(text)
    return text


def _splits(text: str) -> list[Split]:
    try:
        return [Split(*(int(side) for side in part.split("+", 1))) for part in text.split(",")]
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r}: must read prefill+decode,.. as in 112+20,104+28") from None


def build_parser() -> argparse.ArgumentParser:
    """The command line, without running anything."""
    parser = _Parser(prog=PROG, description="Prove SM partitions and measure prefill and decode on them.")
    parser.set_defaults(handler=measure)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    for name, text in (("check", "prove each pair of partitions with an SM probe"),
                       ("sweep", "prove the partitions, then measure alone and side by side"),
                       ("gpu", "check, then sweep; verdicts and the co-run table are printed last"),
                       ("stages", "all that make gpu does: matrix, own kernels, engine, each in a process of its own")):
        command = commands.add_parser(name, help=text, description=text)
        if name == "stages":
            command.add_argument("--no-engine", dest="engine", action="store_false", help="the sweep's parts alone")
        command.add_argument("--device", choices=session.DEVICES, default=Target.device)
        command.add_argument("--backend", choices=session.BACKENDS, default=Target.backend,
                             help="how SMs are partitioned; auto: green contexts, else (sweep only) none, labelled so")
        command.add_argument("--splits", type=_splits, default=Target.splits, help="prefill+decode,..: only these splits")
        command.add_argument("--ignore-coscheduling", action="store_true",
                             help="splits in multiples of 2 on Hopper and above; large clusters are given up")
        command.add_argument("--gpu", type=_card, default=Target.gpu, help="which GPU to simulate: a name (bullet-sim list) or a "
                             "card.toml (default %(default)s)")
        command.add_argument("--out", type=out_folder, default=None, help="folder for results; an existing one is resumed")
        command.add_argument("--allow-busy", action="store_true", help="measure beside other processes on the card")
        if name == "check":
            continue
        command.add_argument("--model", default=None, help="built-in name or a config.json (default llama-3.1-8b; tiny on a CPU)")
        command.add_argument("--budget-s", type=_number, default=None, help="seconds for everything, start-up included")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--skip", action="append", default=[], choices=session.SKIPPABLE, metavar="OP",
                             help="leave an operation out; may be repeated")
        command.add_argument("--threads", type=_threads, default=None, help="--device cpu: threads that stand in for SMs")
        command.add_argument("--noise-std", type=partial(_number, least=0.0), default=Target.noise_std,
                             help="--device simulated: relative noise")
        command.add_argument("--part", dest="parts", action="append", default=None, choices=sorted(PARTS),
                             help="only this part of the plan: corun (matrix, controls, checks, SM axis) or own (our kernels, "
                                  "more sizes, a finer matrix); may be repeated")
        command.add_argument("--lead-s", type=partial(_number, least=0.0), default=Target.lead_s, metavar="S",
                             help="load before each window of a cell but its first (default %(default)s; before the first "
                                  f"{LEAD_S})")
        command.add_argument("--plan-only", action="store_true", help="print the plan for --gpu and stop; needs no device")
    command = commands.add_parser("table", help="table and summary of a sweep from its rows; needs no device")
    command.add_argument("out", type=Path, help="the sweep's folder")
    command = commands.add_parser("compare", help="do two sweeps of one device agree?")
    command.add_argument("first", type=Path)
    command.add_argument("second", type=Path)
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 1 not proven (check) or tables that disagree, 3 device lost, and those of
    :func:`bullet.cli.lifecycle.command`."""
    return command(PROG, build_parser, argv)


def measure(args: argparse.Namespace) -> int:
    """All of them."""
    started_s = time.monotonic()
    target = _target(args)
    if args.command == "compare":
        from bullet.profiles.agreement import compare

        found = compare(args.first, args.second)
        say("\n".join([*found.lines, found.verdict]))
        return 0 if found.agree else 1
    if args.command == "table":
        summary.table(args.out, say=say)
        return 0
    if args.command == "check":
        try:
            report = session.check(target, args.out, say=say)
        except DeviceLostError as exc:
            warn(f"{PROG}: error: {exc}")
            return 3
        return 0 if target.device == "simulated" or (report.proven and not report.refused) else 1
    asked = {"model": args.model, "budget_s": args.budget_s, "seed": args.seed, "skip": args.skip,
             "parts": args.parts or tuple(PARTS)}
    if args.command == "stages":
        return _stages(args, target, started_s)
    if args.plan_only:
        say("\n".join(session.plan_lines(target, **asked)))
        return 0
    return session.sweep(target, args.out, started_s=started_s, say=say, **asked).status


def _stages(args: argparse.Namespace, target: Target, started_s: float) -> int:
    budget_s = args.budget_s or 600.0
    if args.plan_only:
        say("\n".join(stages.plan_lines(target, budget_s=budget_s, model=args.model, seed=args.seed, skip=args.skip,
                                        engine=args.engine)))
        return 0
    if args.out is None:
        raise ConfigError("stages: --out FOLDER is needed: all parts write there")
    model = ["--model", args.model] if args.model else []
    passed = [*model, "--device", args.device, "--gpu", args.gpu, "--backend", args.backend, "--seed", str(args.seed),
              "--lead-s", str(args.lead_s)]
    passed += ["--splits", ",".join(map(str, args.splits))] if args.splits else []
    passed += [flag for flag, given in (("--allow-busy", args.allow_busy),
                                        ("--ignore-coscheduling", args.ignore_coscheduling)) if given]
    passed += [word for op in args.skip for word in ("--skip", op)]
    outcome = stages.stages(target, args.out, budget_s=budget_s, arguments=passed, engine=args.engine, say=say,
                            started_s=started_s, engine_arguments=[*model, *(["--allow-busy"] if args.allow_busy else [])])
    say("\n".join(["", *outcome.lines]))
    return outcome.status


def _target(args: argparse.Namespace) -> Target:
    return Target(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Target) if hasattr(args, f.name)})
