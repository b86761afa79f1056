"""What all commands share: the parser, progress, fresh folders, stopping, one line for an error."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bullet.signals import Watch
from bullet.units import parse_time_s

if TYPE_CHECKING:
    from bullet.config import RunConfig
    from bullet.results.folder import RunWriter


class Parser(argparse.ArgumentParser):
    """Errors as one line; flags in full, or --policy would pass for --policies."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        # Else argparse takes -5ms for a flag and says that one argument was expected.
        self._negative_number_matcher = re.compile(r"-[0-9.]+[a-z]*$")
        if options.get("add_help", True):
            add_debug(self)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


def add_debug(parser: Any) -> None:
    """The flag of every command, which its boundary reads."""
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="print the traceback of an error")


def number(text: str) -> float:
    try:
        if "_" in text:  # Python takes 1_0 for 10
            raise ValueError
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def whole(text: str) -> int:
    try:
        if "_" in text:
            raise ValueError
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def out_folder(text: str) -> Path:
    """Absolute at once: a user's policy may go elsewhere meanwhile."""
    try:
        text.encode()
        return Path(os.path.abspath(text))
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r}: is not UTF-8") from None
    except OSError as exc:
        raise argparse.ArgumentTypeError(f"{text!r}: there is no present folder ({exc.strerror})") from None


def seconds(text: str) -> float:
    """A time with its unit; a bare number would be milliseconds to some and seconds to others."""
    found = parse_time_s(text)
    if found is None and text.startswith("-") and parse_time_s(text[1:]) is not None:
        raise argparse.ArgumentTypeError(f"{text!r}: must not be negative")
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time with its unit (500ms, 0.5s; ns, us, ms, s, min, h)")
    return found


def width() -> int:
    """Columns for tables: 80, or the terminal's if that is wider."""
    return max(80, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 80


def group_of(parser: argparse.ArgumentParser, title: str) -> Any:
    """The parser's argument group of that title, made if there is none."""
    return next((g for g in parser._action_groups if g.title == title), None) or parser.add_argument_group(title)


COMMON = "common options"


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say which requests come when, and what is asked of them; `bullet-run` has the same."""
    common = group_of(parser, COMMON)
    common.add_argument("--trace", help="azure-code (default), azure-conv, sharegpt, arxiv, or a file: CSV, JSONL, Parquet; .gz, "
                        ".zst, .xz, .bz2; or phases in turns: azure-code@5/60s,sharegpt@14/60s")
    common.add_argument("--arrivals", choices=("recorded", "poisson", "constant", "gamma", "closed"), help="default: poisson")
    common.add_argument("--rate", type=number, metavar="REQ/S", help="arrival rate (default 5); not with recorded arrivals")
    common.add_argument("--concurrency", type=whole, metavar="N", help="a closed loop instead: N clients, each sends its next "
                        "request when its last one ends")
    common.add_argument("--num-requests", type=whole, metavar="N", help="default 1000; with recorded arrivals, all")
    common.add_argument("--ttft", type=seconds, metavar="TIME", help="objective: time to first token, as 500ms (default: by the "
                        "paper's Table 4)")
    common.add_argument("--tpot", type=seconds, metavar="TIME", help="objective: time per output token, as 30ms")
    more = group_of(parser, "arrivals and objectives")
    more.add_argument("--workload", metavar="NAME", help="a named workload in which sharing is hard (bullet-sim list): "
                      "trace, rates, arrivals, cap")
    more.add_argument("--rate-profile", metavar="PROFILE", help="a rate that changes: sine:LOW:HIGH:PERIOD (sine:4.8:19:360s) or "
                      "steps:RATE/TIME,..")
    more.add_argument("--rate-scale", type=number, metavar="X", help="all rates of phases or of a profile, X times")
    more.add_argument("--time-scale", type=number, metavar="X", help="recorded arrivals X times as fast")
    more.add_argument("--cv", type=number, metavar="CV", help="coefficient of variation of gamma arrivals")
    more.add_argument("--think-time", type=seconds, metavar="TIME", help="how long clients think before each request (0s)")
    more.add_argument("--think", choices=("exponential", "constant"), help="whether that is a mean (exponential, the default) or "
                      "always the same")
    more.add_argument("--ttft-per-token", type=seconds, metavar="TIME", help="objective: TTFT for each prompt token, as 3ms")
    more.add_argument("--warmup", metavar="N|TIME", help="leave the first N requests, or those of the first 30s, out of the "
                      "statistics")
    add_trace_arguments(parser)


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say how a trace is read; `bullet-sim inspect` has the same."""
    group = group_of(parser, "reading a trace")
    group.add_argument("--format", metavar="NAME", help="of a trace file: auto (default), csv, jsonl, parquet, azure, mooncake, "
                       "bailian, burstgpt, splitwise, blis, vidur, llmservingsim, run, sharegpt, bench")
    group.add_argument("--window", metavar="FROM:TO", help="part of the trace: rows (151:300) or times (10min:20min)")
    group.add_argument("--max-prompt", type=whole, metavar="N", help="leave longer prompts of the trace out, and count them")
    group.add_argument("--skip-failed", action="store_const", const=True, help="leave failed requests of a trace out, and count "
                       "them")
    group.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json that counts ShareGPT's texts")


FLAGS = {"trace": "workload.trace", "arrivals": "workload.arrivals", "rate": "workload.rate_req_per_s",
         "time_scale": "workload.time_scale", "cv": "workload.cv", "num_requests": "workload.num_requests",
         "format": "workload.format", "window": "workload.window", "warmup": "workload.warmup",
         "skip_failed": "workload.skip_failed", "max_prompt": "workload.max_prompt_tokens",
         "rate_profile": "workload.rate_profile", "rate_scale": "workload.rate_scale", "tokenizer": "workload.tokenizer",
         "concurrency": "workload.concurrency",
         "think_time": "workload.think_time_s", "think": "workload.think", "ttft": "slo.ttft_s", "tpot": "slo.tpot_s",
         "ttft_per_token": "slo.ttft_s_per_token",
         "model": "device.model", "gpu": "device.gpu", "kv_dtype": "device.kv_dtype", "max_model_len": "device.max_model_len",
         "cluster": "cluster.layout", "router": "cluster.router", "device_model": "device.timing",
         "estimator": "policy.estimator", "seed": "seed", "policy": "policy.name"}


def build_config(args: argparse.Namespace, base: Mapping[str, Any] | None = None) -> RunConfig:
    """Defaults, file (or ``base``, dotted keys), flags, --set, in that order; a flag that the rest makes meaningless is refused,
    not ignored."""
    from bullet.config import load_run_config, parse_set
    from bullet.errors import ConfigError
    from bullet.policies import check_trusted

    said: dict[str, Any] = {}
    if getattr(args, "workload", None) is not None:
        from bullet.workload.named import named

        said |= named(args.workload)
        for flag in ("trace", "arrivals", "cv", "rate_profile"):
            if getattr(args, flag) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: --workload {args.workload} states it: give "
                                  "one of the two")
    for flag, key in FLAGS.items():
        value = getattr(args, flag, None)
        if value is not None:
            said[key] = value
    if {**(base or {}), **said}.get("workload.concurrency") is not None and "workload.arrivals" not in (base or {}):
        said.setdefault("workload.arrivals", "closed")
    said |= dict(parse_set(text) for text in args.sets)
    if args.command == "compare" and "policy.name" in said:
        raise ConfigError("--set policy.name: compare takes its policies from --policies A,B,..")
    config = load_run_config(args.config, {**(base or {}), **said})
    if args.command in ("run", "replay", "sweep", "goodput"):  # others take theirs from --policies, or none
        where = args.config or getattr(args, "file", None)
        check_trusted(config.policy.name, [str(said.get("policy.name"))], str(where), "--policy")
    arrivals = config.workload.arrivals
    for value, name, needed, hint in (
            (args.rate, "--rate", config.workload.rate_req_per_s is not None and arrivals not in ("recorded", "closed"),
             "use --time-scale, or --arrivals poisson, constant or gamma" if arrivals == "recorded" else
             "a request is sent when one ends: leave --concurrency out" if arrivals == "closed" else
             "phases and profiles state their rates: use --rate-scale"),
            (args.time_scale, "--time-scale", arrivals == "recorded", "use --rate, or --arrivals recorded"),
            (args.cv, "--cv", arrivals == "gamma", "use --arrivals gamma")):
        if value is not None and not needed:
            raise ConfigError(f"{name} {value:g} has no effect on {arrivals} arrivals: {hint}")
    return config


def refuse_idle(args: argparse.Namespace, names: Sequence[str], *flags: str) -> None:
    """Flags that only an estimator heeds, where none of the policies asks one."""
    from bullet import policies
    from bullet.errors import ConfigError

    for name in names:
        policies.check_name(name)
    for flag in flags:
        value = getattr(args, flag)
        if names and value is not None and not any(policies.needs_estimator(name) for name in names):
            raise ConfigError(f"--{flag} {value} has no effect: {', '.join(names)} predicts nothing")


def progress_bar(total: int, label: str, quiet: bool,
                 unit: str = "req") -> tuple[Callable[[int], None] | None, Callable[[], None]]:
    # A GPU machine's own python (make gpu) need not have it.
    if quiet or not sys.stderr.isatty() or find_spec("tqdm") is None:
        return None, lambda: None
    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

    bar = tqdm(total=total, desc=label, unit=unit, leave=False)
    return bar.update, bar.close


def trace_label(trace: str) -> str:
    """:func:`bullet.config.trace_name`, loaded when a folder is to be named."""
    from bullet.config import trace_name

    return trace_name(trace)


def watched(args: argparse.Namespace) -> Watch:
    """Runs as a command watches them: a progress bar, and which folder to name if it comes to that."""
    @contextlib.contextmanager
    def watch(writer: RunWriter, requests: int, name: str) -> Iterator[Callable[[int], None] | None]:
        args.kept = writer.folder
        update, close = progress_bar(requests, name, args.quiet)
        try:
            yield update
        finally:
            close()

    return watch


def print_paths(folder: Path, args: argparse.Namespace, *files: str) -> None:
    """Where the files are; the report's first, if there is one."""
    if (folder / "report.html").is_file():
        files = ("report.html, plots/" + (", trace.json (for ui.perfetto.dev)" if args.command == "run" else ""), *files)
    print("\n".join([f"\nwritten to {folder}/:", *(f"  {line}" for line in files)]))


RUN_FILES = "requests.parquet, steps.parquet, summary.json, timing.json, config.toml"
