"""Commands: parse, build a configuration, call one function, print a table. Heavy imports are inside functions."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bullet.cli.common import (
    Parser,
    add_workload_arguments,
    build_config,
    fresh_folder,
    guarded,
    print_paths,
    progress_bar,
    safe_name,
    stops_between_steps,
    whole,
)

if TYPE_CHECKING:
    from bullet.config import RunConfig
    from bullet.devices.fitted import DeviceModel
    from bullet.results.columns import RunOutcome
    from bullet.workload import Workload


EXAMPLES = """examples:
  bullet-sim list
      traces, policies, models and GPUs that are built in
  bullet-sim compare --trace azure-code --rate 5 --policies bullet,sglang-1024,vllm-1024
      1,000 requests with Azure-Code lengths at 5 req/s under three schedulers: one table, plots, a report
  bullet-sim run --trace sharegpt --rate 15 --policy bullet --out runs/mine
      one scheduler; tables, plots, report.html and a trace for ui.perfetto.dev in runs/mine
  bullet-sim run --trace my.csv.gz --arrivals recorded --time-scale 2 --policy static-96
      a trace of your own (columns arrival_s, prompt_tokens, output_tokens), twice as fast as recorded
  bullet-sim run --policy mine.py:Mine --set policy.options.knob=3 --set device.kv_tokens=200000
      a scheduler of your own; any key of the configuration by --set
  bullet-sim compare --policies bullet,bullet-literal,vllm-1024 --set policy.options.decode_floor=0.2
      an option goes to the policies that have it
  bullet-sim validate rtx4090
      a recorded run of vLLM on an RTX 4090, replayed: simulated beside measured
  bullet-sim validate serving
      what others measured of engines on A100 and H100: simulated beside measured, untuned
  bullet-sim run --config runs/mine/config.toml --seed 1
      a stored run again, with other requests
"""


def _sim_parser() -> argparse.ArgumentParser:
    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": EXAMPLES}
    parser = Parser(prog="bullet-sim", description="Replay LLM serving traces on a modelled GPU under Bullet and its rivals. "
                     "Everything it prints is simulated.", **style)
    commands = parser.add_subparsers(dest="command", metavar="run | compare | validate | list", required=True)
    common = Parser(add_help=False)
    add_workload_arguments(common)
    common.add_argument("--model", help="llama-3.1-8b (default), llama-3.1-70b, qwen3-32b, tiny, or a Hugging Face config.json")
    common.add_argument("--gpu", help="a100-80gb (default), h100, h200, h20, rtx4090")
    common.add_argument("--device-model", metavar="fit|table|DIR", help="fit (default): coefficients; table: measured kernel "
                        "tables, interpolated, for one-lane policies where the GPU's profile has them; DIR: what "
                        "bullet-profile fit --out DIR made of a sweep of your own")
    common.add_argument("--estimator", choices=("srm", "srm-blind", "oracle"), help="what bullet asks (default srm)")
    common.add_argument("--seed", type=whole, metavar="N", help="default 0; same seed, same bytes")
    common.add_argument("--config", metavar="FILE.toml", help="a configuration; flags and --set override it")
    common.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="sets",
                        help="any key of the configuration, repeatable; overrides flags")
    common.add_argument("--out", type=Path, metavar="DIR", help="a fresh folder (default runs/<name>-<time>)")
    common.add_argument("--no-report", action="store_true", help="no plots, HTML or Perfetto trace")
    common.add_argument("--quiet", action="store_true", help="no progress bar")
    run = commands.add_parser("run", parents=[common], help="one policy", description="Replay a trace under one policy.", **style)
    run.add_argument("--policy", metavar="NAME",
                     help="bullet (default), bullet-literal, static-P, naive, sglang-N, sglang-N-mixed, vllm-N, file.py:Class")
    run.set_defaults(handler=_run)
    compare = commands.add_parser("compare", parents=[common], help="several policies on the same requests",
                                  description="Replay the same requests under several policies; one folder each.", **style)
    compare.add_argument("--policies", metavar="A,B,..", default="bullet,sglang-1024,sglang-2048,vllm-1024",
                         help="default %(default)s")
    compare.set_defaults(handler=_compare)
    check = commands.add_parser("validate", help="replay a recorded run of a real engine",
                                description="Replay a recorded run of a real engine: simulated beside measured, one run and the "
                                "mean over runs whose arrivals are moved by up to 20 ms (docs/validation.md).")
    check.add_argument("target", help="rtx4090: vLLM 0.19.0, Llama-3.1-8B, 300 requests; serving: what others measured "
                       "of SGLang, vLLM and TensorRT-LLM on A100 and H100")
    check.add_argument("--jitters", type=whole, metavar="N",
                       help="rtx4090: runs with moved arrivals, seeds 0 to N - 1 (default 8)")
    check.add_argument("--ingredients", action="store_true", help="rtx4090: also leave out or change one part of the engine at a "
                       "time (8 times as long)")
    check.add_argument("--data", type=Path, metavar="DIR", help="rtx4090: a folder with files as in "
                       "profiles/rtx4090/llama-3.1-8b; serving: a folder with runs that cannot be shipped, compared as well")
    check.add_argument("--out", type=Path, metavar="DIR", help="a fresh folder (default runs/validate-<target>-<time>)")
    check.add_argument("--quiet", action="store_true", help="no progress bar")
    check.set_defaults(handler=_validate)
    listing = commands.add_parser("list", help="what is built in", description="Show what is built in.")
    listing.set_defaults(handler=_list)
    return parser


def _simulate(config: RunConfig, workload: Workload, device: DeviceModel, folder: Path,
              args: argparse.Namespace) -> tuple[RunOutcome, dict[str, Any]]:
    """One run into one folder; whatever stops it, its rows are kept."""
    from bullet.config import to_toml
    from bullet.results import metrics, page
    from bullet.results.folder import RunWriter
    from bullet.sim.run import simulate

    with RunWriter(folder) as writer:
        args.kept = folder
        update, close = progress_bar(len(workload), config.policy.name, args.quiet)
        started = time.perf_counter()
        try:
            with stops_between_steps(writer, args):
                outcome = simulate(config, workload=workload, device=device, writer=writer, progress=update)
                wall_s = time.perf_counter() - started
        finally:
            close()
        summary = metrics.summarise(outcome)
        writer.close(outcome, summary, metrics.timing(outcome, wall_s))
    if writer.stopping:
        raise KeyboardInterrupt  # too late for this run, which is whole; not for what would follow
    if not args.no_report:
        page.write_run_report(folder, outcome, summary, to_toml(outcome.config))
    return outcome, summary


def _prepare(args: argparse.Namespace, names: Sequence[str | None]) -> tuple[list[RunConfig], Workload, DeviceModel]:
    """Everything that can be wrong, found before anything is written."""
    from bullet import policies
    from bullet.devices.load import load_device
    from bullet.errors import ConfigError
    from bullet.sim.run import simulate
    from bullet.workload import load_workload

    configs = [build_config(args, name) for name in names]
    chosen = [config.policy.name for config in configs]
    for name in chosen:
        policies.check_name(name)
    if args.estimator is not None and not any(policies.needs_estimator(name) for name in chosen):
        raise ConfigError(f"--estimator {args.estimator} has no effect: {', '.join(chosen)} predicts nothing")
    workload = load_workload(configs[0].workload, configs[0].seed)
    # The count that None stands for, so that the stored configuration is whole.
    configs = [dataclasses.replace(c, workload=dataclasses.replace(c.workload, num_requests=len(workload))) for c in configs]
    device = load_device(configs[0].device)
    # A wrong option shows when the policy is built: try all of them on no request before the first of several long runs.
    nothing = dataclasses.replace(workload, arrival_s=workload.arrival_s[:0], prompt_tokens=workload.prompt_tokens[:0],
                                  output_tokens=workload.output_tokens[:0])
    if len(configs) > 1:
        configs = _share_options(configs, lambda config: simulate(config, workload=nothing, device=device))
    return configs, workload, device


def _share_options(configs: Sequence[RunConfig], build: Callable[[RunConfig], object]) -> list[RunConfig]:
    """Each policy of a comparison with those of the options that it has; an option that none has is refused."""
    from bullet.errors import ConfigError, UnknownOptionError

    shared: list[RunConfig] = []
    refusals: dict[str, list[str]] = {}
    for config in configs:
        fitting: RunConfig | None = None
        while fitting is None:
            try:
                build(config)
                fitting = config
            except UnknownOptionError as exc:
                if exc.option not in config.policy.options:
                    raise
                refusals.setdefault(exc.option, []).append(str(exc))
                options = {name: value for name, value in config.policy.options.items() if name != exc.option}
                config = dataclasses.replace(config, policy=dataclasses.replace(config.policy, options=options))
        shared.append(fitting)
    for messages in refusals.values():
        if len(messages) == len(configs):
            raise ConfigError("; ".join(messages))
    return shared


def _option_notes(configs: Sequence[RunConfig]) -> list[str]:
    """Which options went to some of the policies only."""
    names = sorted({name for config in configs for name in config.policy.options})
    takers = {name: [c.policy.name for c in configs if name in c.policy.options] for name in names}
    return [f"policy.options.{name} is an option of {', '.join(found)} only" for name, found in takers.items()
            if len(found) < len(configs)]


def _run(args: argparse.Namespace) -> int:
    from bullet.results import tables

    (config,), workload, device = _prepare(args, [None])
    folder = fresh_folder(args.out, f"{config.policy.name}-{Path(config.workload.trace).name}")
    _, summary = _simulate(config, workload, device, folder, args)
    print(tables.comparison_table([summary]))
    print_paths(folder, args, ["requests.parquet, steps.parquet, summary.json, timing.json, config.toml"])
    return 0


def _compare(args: argparse.Namespace) -> int:
    from bullet.config import to_toml
    from bullet.errors import ConfigError
    from bullet.files import create_folder, write_text
    from bullet.results import page, tables
    from bullet.results.columns import StepTable

    names = [name.strip() for name in args.policies.split(",") if name.strip()]
    folders = [safe_name(name) for name in names]
    if not names or len(set(folders)) < len(names):
        raise ConfigError(f"--policies {args.policies!r}: must name each policy once, separated by commas")
    configs, workload, device = _prepare(args, names)
    folder = fresh_folder(args.out, f"compare-{Path(configs[0].workload.trace).name}")
    create_folder(folder)
    outcomes, summaries = [], []
    for config, name in zip(configs, folders, strict=True):
        outcome, summary = _simulate(config, workload, device, folder / name, args)
        # The comparison draws requests only: the steps, ten times as many, need not wait in memory.
        outcomes.append(dataclasses.replace(outcome, steps=StepTable.from_rows([])))
        summaries.append(summary)
        tables.write_comparison(folder, summaries)
    table = tables.comparison_table(summaries)
    table = "\n".join([table, *_option_notes(configs)])
    write_text(folder / "comparison.txt", table + "\n")
    if not args.no_report:
        page.write_comparison_report(folder, outcomes, summaries, [folder / name for name in folders],
                                       to_toml(outcomes[0].config))
    print(table)
    print_paths(folder, args, ["comparison.txt, comparison.csv, comparison.json", *(f"{name}/" for name in folders)])
    return 0


def _validate(args: argparse.Namespace) -> int:
    from bullet.errors import ConfigError
    from bullet.files import create_folder
    from bullet.validation import recorded as validate

    if args.target == "serving":
        return _validate_serving(args)
    if args.jitters is None:
        args.jitters = len(validate.JITTER_SEEDS)
    if not 0 <= args.jitters <= 1000:
        raise ConfigError(f"--jitters {args.jitters}: must be 0 to 1000")
    if args.ingredients and not args.jitters:
        raise ConfigError("--ingredients: compares means over --jitters runs, of which there are 0")
    recorded = validate.load_recorded(args.target, args.data)
    ingredients = validate.INGREDIENTS if args.ingredients else ()
    folder = fresh_folder(args.out, f"validate-{args.target}")
    create_folder(folder)
    update, close = progress_bar(validate.runs_of(args.jitters, ingredients), "validate", args.quiet, "run")
    try:
        found = validate.validate(recorded, seeds=range(args.jitters), ingredients=ingredients, progress=update)
    finally:
        close()
    validate.write(folder, found)
    print(validate.table(found))
    print(f"written to {folder}/:\n  validate.json, validate.txt, validate.png, requests.csv")
    return 0


def _validate_serving(args: argparse.Namespace) -> int:
    from bullet.errors import ConfigError
    from bullet.files import create_folder
    from bullet.validation import serving as validate_serving
    from bullet.validation import serving_points

    if args.jitters is not None or args.ingredients:
        raise ConfigError(f"{'--ingredients' if args.ingredients else '--jitters'}: has no effect on validate serving, which "
                          "draws its requests")
    points = serving_points.shipped()
    if args.data is not None:
        points += serving_points.unlicensed(args.data)
    folder = fresh_folder(args.out, "validate-serving")
    create_folder(folder)
    update, close = progress_bar(validate_serving.runs_of(points), "validate", args.quiet, "run")
    try:
        found = validate_serving.validate(points, update)
    finally:
        close()
    validate_serving.write(folder, found)
    print(validate_serving.table(found))
    print(f"written to {folder}/:\n  validate.json, validate.txt, validate.png, points.csv")
    return 0


def _list(args: argparse.Namespace) -> int:
    from bullet import policies
    from bullet.catalog.gpus import GPUS
    from bullet.catalog.models import MODELS
    from bullet.workload import BUILTIN, describe

    four = "mean/p50/p90/max"
    print(f"{'traces':<18} {'rows':>6}   {'prompt ' + four:<24} {'output ' + four:<24} {'req/s':>6} {'CV':>6}   source")
    for name in BUILTIN:
        d = describe(name)
        prompt, output = ("/".join(f"{v:.0f}" for v in numbers) for numbers in (d.prompt, d.output))
        rate, cv = ("-" if v is None else f"{v:.2f}" for v in (d.rate_req_per_s, d.cv))
        print(f"  {name:<16} {d.rows:>6}   {prompt:<24} {output:<24} {rate:>6} {cv:>6}   {BUILTIN[name].source}")
    print("  req/s and CV (of the gaps) as recorded; -: lengths only\n\npolicies")
    for name, description in policies.describe():
        print(f"  {name:<16} {description}")
    print(f"  {'file.py:Class':<16} your own")
    print("\nestimators (what bullet asks)\n  srm (eq. 1-2, recalibrated online), srm-blind (no contention), "
          "oracle (the device itself)")
    print("\nmodels")
    for model in MODELS.values():
        print(f"  {model.name:<16} {model.num_layers} layers, {model.weight_bytes / 2**30:.3g} GiB of weights, "
              f"{model.kv_bytes_per_token / 1024:.0f} KiB of KV a token, context {model.context_tokens}")
    print("  or a Hugging Face config.json\n\nGPUs (data sheet)")
    for gpu in GPUS.values():
        print(f"  {gpu.name:<16} {gpu.num_sms} SMs, {gpu.peak_flops / 1e12:.0f} TFLOPS bf16, "
              f"{gpu.mem_bytes_per_s / 1e9:.0f} GB/s, {gpu.mem_bytes / 2**30:.0f} GiB")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """``bullet-sim``."""
    return guarded("bullet-sim", _sim_parser().parse_args(argv))
