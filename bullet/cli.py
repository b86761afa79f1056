"""Commands: parse, build a configuration, call one function, print a table. Heavy imports are inside functions."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bullet.errors import BulletError

EXAMPLES = """examples:
  bullet-sim list
      traces, policies, models and GPUs that are built in
  bullet-sim run --trace sharegpt --rate 15 --policy bullet --out runs/mine
      1,000 ShareGPT requests at 15 req/s under Bullet; tables, plots and a Perfetto trace in runs/mine
  bullet-sim compare --trace azure-code --rate 5 --policies bullet,sglang-1024,vllm-1024
      the same requests under three schedulers, one table
  bullet-sim run --trace my.csv.gz --arrivals recorded --policy static-96
      a trace of your own (columns prompt_tokens, output_tokens, arrival_s) as recorded
  bullet-sim run --policy mine.py:Mine --set policy.options.knob=3 --set device.kv_tokens=200000
      a scheduler of your own; any key of the configuration by --set
"""


class _Parser(argparse.ArgumentParser):
    """Errors as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _sim_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="bullet-sim", description="Replay LLM serving traces on a modelled GPU under Bullet and its rivals. "
                     "Everything it prints is simulated.", epilog=EXAMPLES,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="run | compare | list", required=True, parser_class=_Parser)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--trace", help="azure-code, azure-conv, sharegpt, arxiv, or a .csv / .jsonl file, plain or .gz")
    common.add_argument("--arrivals", choices=("recorded", "poisson", "constant", "gamma"), help="default: poisson")
    common.add_argument("--rate", type=_number, metavar="REQ/S", help="arrival rate (default 5)")
    common.add_argument("--time-scale", type=_number, help="recorded arrivals this many times as fast")
    common.add_argument("--cv", type=_number, help="coefficient of variation of gamma arrivals")
    common.add_argument("--num-requests", type=_whole, metavar="N", help="default 1000")
    common.add_argument("--model", help="llama-3.1-8b, llama-3.1-70b, qwen3-32b, tiny, or a Hugging Face config.json")
    common.add_argument("--gpu", help="a100-80gb, h100, h200, h20, rtx4090")
    common.add_argument("--estimator", choices=("srm", "srm-blind", "oracle"), help="what bullet asks (default srm)")
    common.add_argument("--seed", type=_whole)
    common.add_argument("--config", metavar="FILE.toml", help="a configuration; flags and --set override it")
    common.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="sets", help="any key, repeatable")
    common.add_argument("--out", type=Path, metavar="DIR", help="a fresh folder (default runs/<name>-<time>)")
    common.add_argument("--no-report", action="store_true", help="no plots, HTML or Perfetto trace")
    common.add_argument("--quiet", action="store_true", help="no progress bar")
    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": EXAMPLES}
    run = commands.add_parser("run", parents=[common], help="one policy", **style)
    run.add_argument("--policy", help="bullet, bullet-literal, static-P, naive, sglang-N, sglang-N-mixed, vllm-N, file.py:Class")
    compare = commands.add_parser("compare", parents=[common], help="several policies on the same requests", **style)
    compare.add_argument("--policies", metavar="A,B,..", default="bullet,sglang-1024,sglang-2048,vllm-1024")
    listing = commands.add_parser("list", help="what is built in")
    listing.set_defaults(handler=_list)
    run.set_defaults(handler=_run)
    compare.set_defaults(handler=_compare)
    return parser


FLAGS = {"trace": "workload.trace", "arrivals": "workload.arrivals", "rate": "workload.rate_req_per_s",
         "time_scale": "workload.time_scale", "cv": "workload.cv", "num_requests": "workload.num_requests",
         "model": "device.model", "gpu": "device.gpu", "estimator": "policy.estimator", "seed": "seed", "policy": "policy.name"}


def _config(args: argparse.Namespace, policy: str | None = None) -> Any:
    from bullet.config import load_run_config, parse_set
    from bullet.errors import ConfigError

    if args.arrivals == "recorded" and args.rate is not None:
        raise ConfigError("--rate goes with drawn arrivals: with --arrivals recorded use --time-scale")
    overrides: dict[str, Any] = {}
    for flag, key in FLAGS.items():
        value = getattr(args, flag, None)
        if value is not None:
            overrides[key] = value
    if args.arrivals == "recorded" and args.num_requests is None:
        overrides["workload.num_requests"] = None
    for text in args.sets:
        key, value = parse_set(text)
        overrides[key] = value
    if policy is not None:
        overrides["policy.name"] = policy
    return load_run_config(args.config, overrides)


def _progress(total: int, label: str, quiet: bool) -> tuple[Callable[[int], None] | None, Callable[[], None]]:
    if quiet or not sys.stderr.isatty():
        return None, lambda: None
    from tqdm import tqdm

    bar = tqdm(total=total, desc=label, unit="req", leave=False)
    return bar.update, bar.close


def _fresh(out: Path | None, name: str) -> Path:
    if out is not None:
        return out
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    base = Path("runs") / f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def _simulate(config: Any, workload: Any, folder: Path, args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """One run into one folder; whatever stops it, its rows are kept."""
    from bullet import metrics, report
    from bullet.config import to_toml
    from bullet.results import RunWriter
    from bullet.sim.driver import simulate

    writer = RunWriter(folder)
    update, close = _progress(len(workload), config.policy.name, args.quiet)
    started = time.perf_counter()
    try:
        outcome = simulate(config, workload=workload, writer=writer, progress=update)
    except BaseException as exc:
        why = "interrupted" if isinstance(exc, KeyboardInterrupt) else f"{type(exc).__name__}: {exc}"
        writer.abort(why)
        raise
    finally:
        close()
    summary = metrics.summarise(outcome)
    writer.close(outcome, summary, metrics.timing(outcome, time.perf_counter() - started))
    if not args.no_report:
        report.write_run_report(folder, outcome, summary, to_toml(outcome.config))
    return outcome, summary


def _run(args: argparse.Namespace) -> int:
    from bullet import policies, report
    from bullet.workload import load_workload

    config = _config(args)
    policies.check_name(config.policy.name)
    workload = load_workload(config.workload, config.seed)
    folder = _fresh(args.out, f"{config.policy.name}-{Path(config.workload.trace).name}")
    args.kept = folder
    _, summary = _simulate(config, workload, folder, args)
    print(report.comparison_table([summary]))
    _print_paths(folder, args)
    return 0


def _compare(args: argparse.Namespace) -> int:
    from bullet import policies, report
    from bullet.config import to_toml
    from bullet.errors import ConfigError
    from bullet.results import create_folder, write_text
    from bullet.workload import load_workload

    names = [name.strip() for name in args.policies.split(",") if name.strip()]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if not names or doubled:
        raise ConfigError(f"--policies {args.policies!r}: must name each policy once, separated by commas")
    for name in names:
        policies.check_name(name)
    configs = [_config(args, name) for name in names]
    workload = load_workload(configs[0].workload, configs[0].seed)
    folder = _fresh(args.out, f"compare-{Path(configs[0].workload.trace).name}")
    create_folder(folder)
    args.kept = folder
    outcomes, summaries = [], []
    for name, config in zip(names, configs, strict=True):
        safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
        outcome, summary = _simulate(config, workload, folder / safe, args)
        outcomes.append(outcome)
        summaries.append(summary)
        report.write_comparison(folder, summaries)
    table = report.comparison_table(summaries)
    write_text(folder / "comparison.txt", table + "\n")
    if not args.no_report:
        report.write_comparison_report(folder, outcomes, summaries, to_toml(configs[0]))
    print(table)
    _print_paths(folder, args)
    return 0


def _print_paths(folder: Path, args: argparse.Namespace) -> None:
    print(f"\nwritten: {folder}/" + ("" if args.no_report else f" (open {folder / 'report.html'})"))


def _list(args: argparse.Namespace) -> int:
    from bullet import policies
    from bullet.config import GPUS, MODELS
    from bullet.workload import BUILTIN, describe

    print("traces                rows   prompt mean/p50/p90/max         output mean/p50/p90/max      req/s    CV")
    for name in BUILTIN:
        d = describe(name)
        lengths = ["/".join(f"{v:.0f}" for v in four) for four in (d.prompt, d.output)]
        tail = f"{d.rate_req_per_s:8.2f} {d.cv:5.2f}" if d.rate_req_per_s is not None and d.cv is not None else "       -     -"
        print(f"  {name:<16} {d.rows:>8}   {lengths[0]:<28}  {lengths[1]:<25} {tail}   {BUILTIN[name].source}")
    print("\npolicies")
    for name, description in policies.describe():
        print(f"  {name:<16} {description}")
    print(f"  {'file.py:Class':<16} your own\n\nestimators (for bullet)\n  srm, srm-blind (no contention), oracle (asks the device)")
    print("\nmodels\n  " + ", ".join(MODELS) + ", or a Hugging Face config.json")
    print("\nGPUs")
    for gpu in GPUS.values():
        print(f"  {gpu.name:<16} {gpu.num_sms} SMs, {gpu.peak_flops / 1e12:.0f} TFLOPS bf16, "
              f"{gpu.mem_bytes_per_s / 1e9:.0f} GB/s, {gpu.mem_bytes / 1e9:.0f} GB")
    return 0


def _guarded(program: str, args: argparse.Namespace) -> int:
    args.kept = None
    try:
        code: int = args.handler(args)
        sys.stdout.flush()
        return code
    except BulletError as exc:
        print(f"{program}: error: {' '.join(str(exc).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = f"; rows so far are kept in {args.kept}/" if args.kept is not None and args.kept.exists() else ""
        print(f"\n{program}: interrupted{kept}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def sim(argv: Sequence[str] | None = None) -> int:
    """``bullet-sim``."""
    return _guarded("bullet-sim", _sim_parser().parse_args(argv))


def profile(argv: Sequence[str] | None = None) -> int:
    """``bullet-profile``."""
    parser = _Parser(prog="bullet-profile", description="Measure kernels against SMs and fit the performance model.")
    commands = parser.add_subparsers(dest="command", metavar="show", required=True, parser_class=_Parser)
    show = commands.add_parser("show", help="coefficients, sources and errors of a shipped profile")
    show.add_argument("--gpu", default="a100-80gb")
    show.add_argument("--model", default="llama-3.1-8b")
    show.set_defaults(handler=_show)
    return _guarded("bullet-profile", parser.parse_args(argv))


def _show(args: argparse.Namespace) -> int:
    from bullet.config import DeviceConfig
    from bullet.device import load_device

    print(load_device(DeviceConfig(gpu=args.gpu, model=args.model)).coefficients.to_json(), end="")
    return 0
