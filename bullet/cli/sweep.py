"""bullet-sim sweep, goodput: many runs over all cores."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bullet.cli.common import build_config, number, trace_label, whole
from bullet.files import fresh_folder

if TYPE_CHECKING:
    from bullet.config import RunConfig
    from bullet.sweeps.pool import Progress

EXAMPLES = """examples:
  bullet-sim sweep --trace azure-code --policies bullet,vllm-1024 --rates 2:8:0.5 --seeds 8
      13 rates, 2 policies, 8 seeds: 208 runs over all cores, one table, plots with 95 % bands
  bullet-sim sweep my.toml --jobs 4
      a configuration with [axes] and [[zip]] (docs/sweeps.md)
  bullet-sim sweep --rate 5 --axis slo.tpot_s=0.05,0.1,0.2 --axis policy.options.decode_floor=0:0.3:0.1
      any key of the configuration
  bullet-sim bound --trace arxiv --policies bullet,vllm-1024 --num-requests 4000
      requests per second at most, and what is reached of it
  bullet-sim goodput --trace sharegpt --policies bullet,sglang-1024 --seeds 4
      the highest rate with an attainment of 0.9, to 2 %
"""


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """The commands' parsers; ``common``: flags of all simulated runs."""
    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": EXAMPLES}
    pool = argparse.ArgumentParser(add_help=False)
    pool.add_argument("--policies", metavar="A,B,..", help="an axis of policies")
    pool.add_argument("--seeds", type=whole, metavar="N", help="seeds 0 to N - 1, the same for each policy and rate")
    pool.add_argument("--jobs", type=whole, metavar="N", help="processes (default: all cores)")
    pool.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster instead: HOST:PORT, auto, or local (extra cluster)")
    pool.add_argument("--cache", type=Path, metavar="DIR", help="where results are kept and found again (default runs/cache)")
    sweep = commands.add_parser("sweep", parents=[common, pool], help="a grid of runs over all cores",
                                description="Run a configuration over axes. Results are cached: after a kill the same "
                                "command goes on.", **style)
    sweep.add_argument("file", type=Path, nargs="?", metavar="FILE.toml", help="a configuration with [axes] and [[zip]]")
    sweep.add_argument("--rates", metavar="FROM:TO:STEP", help="an axis of arrival rates, or A,B,..")
    sweep.add_argument("--axis", action="append", default=[], metavar="a.b=VALUES", help="another axis: FROM:TO:STEP, A,B,.. or "
                       "a TOML list; repeatable")
    sweep.add_argument("--zip", action="append", nargs="+", default=[], metavar="a.b=VALUES", dest="zipped",
                       help="axes that go in step; repeatable")
    sweep.set_defaults(handler=_sweep)
    good = commands.add_parser("goodput", parents=[common, pool], help="the highest rate that meets the objectives",
                               description="Per policy, the highest rate whose attainment reaches the goal: bisection for each "
                               "seed, the same requests for each policy.", **style)
    good.add_argument("--goal", type=number, default=0.9, metavar="SHARE", help="default %(default)s")
    good.add_argument("--reading", choices=("mean_length", "per_request"), default="mean_length",
                      help="of the TTFT objective (default %(default)s)")
    good.add_argument("--tolerance", type=number, default=0.02, metavar="SHARE", help="relative width at which bisection ends "
                      "(default %(default)s)")
    good.set_defaults(handler=_goodput)
    unsure = commands.add_parser("sensitivity", parents=[common, pool],
                                 help="whether the winner holds in all that is unknown",
                                 description="Vary what no measurement fixes, one by one and together, over paired seeds: "
                                 "whether the winner changes, and at which value. Ranges: docs/sensitivity.md.", **style)
    unsure.add_argument("--figure", default="slo_attainment_mean_length", metavar="NAME", help="by which the winner is known: a "
                        "figure of summary.json, steady.* or saturation.* (default %(default)s)")
    unsure.add_argument("--vary", action="append", default=[], metavar="a.b=LOW:HIGH", help="another range or key; repeatable")
    unsure.add_argument("--only", action="store_true", help="vary nothing but --vary")
    unsure.add_argument("--together", type=whole, metavar="N", help="points of all ranges at once (default 8; 0: none)")
    unsure.set_defaults(handler=_sensitivity)
    limit = commands.add_parser("bound", parents=[common, pool], help="how many requests per second at most",
                                description="The fluid bound of a workload on a device: one phase at a time, each fixed split, "
                                "all splits. With --policies, beside what each serves at saturation. With --best, beside the "
                                "best schedule found with full knowledge for windows of so many requests.", **style)
    limit.add_argument("--best", type=int, metavar="N", help="compare --policies with the best schedule found for windows of 2 "
                       "to 12 requests, arrivals and output lengths known")
    limit.add_argument("--num-windows", type=int, metavar="K", help="so many of them, evenly over the requests (8)")
    limit.set_defaults(handler=_bound)


def _axes(args: argparse.Namespace) -> tuple[RunConfig, dict[str, Any], list[dict[str, Any]]]:
    from bullet.errors import ConfigError
    from bullet.policies import check_trusted
    from bullet.sweeps.axes import read_file
    from bullet.sweeps.sweep import POLICY, RATE, SEED

    base: dict[str, Any] = {}
    axes: dict[str, Any] = {}
    zipped: list[dict[str, Any]] = []
    if args.file is not None:
        if args.config is not None:
            raise ConfigError(f"--config {args.config}: {args.file} is the configuration already")
        base, axes, zipped = read_file(args.file)
        named = args.policies.split(",") if args.policies else []
        for names in (part.get(POLICY, []) for part in (axes, *zipped)):
            for name in names if isinstance(names, list) else [names]:
                check_trusted(str(name), named, str(args.file), "--policies")
    for text in args.axis:
        axes |= dict([_axis(text, "--axis")])
    zipped += [dict(_axis(text, "--zip") for text in group) for group in args.zipped]
    flags = {POLICY: (args.policies, "--policies"), RATE: (args.rates, "--rates")}
    for key, (text, flag) in flags.items():
        if text is not None:
            axes[key] = _axis(f"{key}={text}", flag)[1]
    if SEED in axes and args.seeds is not None:
        raise ConfigError(f"--seeds {args.seeds}: seed is an axis already")
    everywhere = {*axes, *(key for group in zipped for key in group)}
    for value, flag, key in ((args.rate, "--rate", RATE), (args.seed, "--seed", SEED), (args.trace, "--trace", "workload.trace")):
        if value is not None and (key in everywhere or (key == SEED and args.seeds is not None)):
            raise ConfigError(f"{flag} {value}: {key} is an axis")
    if not everywhere and args.seeds is None:
        raise ConfigError("nothing to go through: give FILE.toml with [axes], or --rates, --policies, --seeds, --axis")
    return build_config(args, base), axes, zipped


def _axis(text: str, flag: str) -> tuple[str, Any]:
    """``key=values``: a TOML list, a range, or values separated by commas."""
    from bullet.config import parse_set
    from bullet.errors import ConfigError

    key, sep, given = text.partition("=")
    if not sep or not given:
        raise ConfigError(f"{flag} {text!r}: must read key.subkey=VALUES")
    _, value = parse_set(text)
    if isinstance(value, list):
        return key, value
    if "," in given:
        return key, [parse_set(f"{key}={part.strip()}")[1] for part in given.split(",") if part.strip()]
    return key, value


def _sweep(args: argparse.Namespace) -> int:
    from bullet.sweeps import sweep as sweeps

    config, axes, zipped = _axes(args)
    folder = fresh_folder(args.out, f"sweep-{trace_label(config.workload.trace)}")
    with Told(args) as told:
        found = sweeps.sweep(config, axes, zipped=zipped, seeds=args.seeds, out=folder, report=not args.no_report,
                             cache=args.cache, jobs=args.jobs, ray=args.ray, progress=told.progress, say=told.say)
    print(found.text())
    errors = found.errors
    for row in errors[:10]:
        print(f"bullet-sim: error: {', '.join(f'{key} {row[key]}' for key in found.axes)}: {row['error']}", file=sys.stderr)
    if len(errors) > 10:
        print(f"bullet-sim: error: and {len(errors) - 10} more (column error of runs.csv)", file=sys.stderr)
    plots = ", ".join(f"plots/{path.name}" for path in sorted((folder / "plots").glob("*.png"))[:3])
    print(f"\n{told.account(len(found.rows))}\nwritten to {folder}/:\n  sweep.txt, runs.parquet, runs.csv, points.csv, base.toml"
          + (f"\n  {plots}" if plots else ""))
    return 2 if errors else 0


def _goodput(args: argparse.Namespace) -> int:
    from bullet import api
    from bullet.sweeps import goodput

    names = None if args.policies is None else api.split_names(args.policies)
    config = build_config(args)
    with Told(args) as told:
        found = goodput.goodput(config, names, goal=args.goal, reading=args.reading, tolerance=args.tolerance,
                                seeds=args.seeds or goodput.SEEDS, cache=args.cache, jobs=args.jobs, ray=args.ray, out=args.out,
                                progress=told.progress, say=told.say)
    print(found.text())
    if args.out is not None:
        print(f"\nwritten to {args.out}/:\n  goodput.txt, goodput.json, probes.csv")
    return 0


def _sensitivity(args: argparse.Namespace) -> int:
    from bullet import api
    from bullet.sweeps import sensitivity

    config = build_config(args)
    names = api.split_names(args.policies or "bullet,vllm-1024")
    unknowns = sensitivity.with_changes(args.vary, args.only)
    folder = fresh_folder(args.out, f"sensitivity-{trace_label(config.workload.trace)}")
    together = sensitivity.TOGETHER if args.together is None else args.together
    with Told(args) as told:
        found = sensitivity.sensitivity(
            config, names, figure=args.figure, unknowns=unknowns, seeds=args.seeds or sensitivity.SEEDS,
            together=together, out=folder, report=not args.no_report, cache=args.cache, jobs=args.jobs, ray=args.ray,
            progress=told.progress, say=told.say)
    print(found.text())
    plot = "" if args.no_report else ", tornado.png, sensitivity.html"
    print(f"\nwritten to {folder}/:\n  sensitivity.txt, sensitivity.csv, sensitivity.json, base.toml{plot}")
    return 0


def _bound(args: argparse.Namespace) -> int:
    from bullet.api import split_names
    from bullet.errors import ConfigError
    from bullet.sweeps import bound, goodput

    config = build_config(args)
    idle = [("--out", args.out)]
    idle += [("--rate", args.rate), ("--num-windows", args.num_windows)] if args.best is None else [("--seeds", args.seeds)]
    for flag, value in idle:
        if value is not None:
            raise ConfigError(f"{flag} {value}: has no effect on bound" + (" without --best" if flag == "--num-windows" else
                                                                         " --best" if flag == "--seeds" else ""))
    if args.policies is not None and not split_names(args.policies):
        raise ConfigError(f"--policies {args.policies!r}: must name each policy once, separated by commas")
    if args.best is not None:
        from bullet.sweeps.windows import windows

        names = split_names("bullet,bullet-plus,vllm-1024,sglang-1024" if args.policies is None else args.policies)
        few = windows(config, names, size=args.best, count=8 if args.num_windows is None else args.num_windows)
        print(f"simulated on {config.device.gpu}, {config.device.model}; {config.workload.trace}, seed {config.seed}")
        print(few.text())
        return 0
    found = bound.bound(config)
    print(f"analytic, from the simulated device: {config.device.gpu}, {config.device.model}; {config.workload.trace}\n")
    print(found.text())
    if args.policies is not None:
        names = split_names(args.policies)
        with Told(args) as told:
            measured = goodput.capacity(config, names, seeds=args.seeds or goodput.SEEDS, cache=args.cache, jobs=args.jobs,
                                        ray=args.ray, progress=told.progress, say=told.say)
        width = max(map(len, names))
        print("\nsimulated at saturation, share of the fluid bound:")
        for one in measured.values():
            notes = ([] if one.whole else ["not saturated: ask for more requests"])
            notes += [f"served requests of {one.mix:.2f} x the mean length"] if abs(one.mix - 1) > 0.1 else []
            print(f"  {one.policy:<{width}}  {one.req_per_s.text('.3f')} req/s  {one.req_per_s.mean / found.fluid.req_per_s:.1%}"
                  + (f"  ({'; '.join(notes)})" if notes else ""))
    return 0


class Told:
    """Progress on the terminal: one line that is rewritten; into a file, a line at each tenth."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.quiet, self.name = args, args.quiet, args.command
        self.tty = sys.stderr.isatty()
        self.started = time.monotonic()
        self.tenth, self.open, self.cached = 0, False, 0
        self.first = True
        self.folder: Path | None = None

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.open:
            sys.stderr.write("\n")

    @property
    def cache(self) -> Path:
        from bullet.sweeps.cache import DEFAULT

        return self.args.cache or DEFAULT

    @property
    def progress(self) -> Callable[[Progress], None] | None:
        return self._tell

    def _tell(self, at: Progress) -> None:
        if self.first:
            self.first, self.cached = False, at.done
        if at.done:
            self.args.kept = self.folder or self.cache  # what a command that is stopped says it leaves
        if self.quiet or not at.total:
            return
        tenth = 10 * at.done // at.total
        if not self.tty and tenth == self.tenth:
            return
        self.tenth = tenth
        left = "" if at.left_s is None else f", about {_duration(at.left_s)} left"
        before, after = ("\r\x1b[K", "") if self.tty else ("", "\n")
        sys.stderr.write(f"{before}{self.name}: {at.done} of {at.total} runs{left}{after}")
        sys.stderr.flush()
        self.open = self.tty

    def say(self, line: str) -> None:
        if self.open:
            sys.stderr.write("\n")
            self.open = False
        print(f"bullet-sim: {line}", file=sys.stderr)

    def account(self, runs: int) -> str:
        return f"{runs} runs in {time.monotonic() - self.started:.1f} s" + (f", {self.cached} of them from the cache"
                                                                           if self.cached else "")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


