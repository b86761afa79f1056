"""Commands: parse, build a configuration, call one function, print a table. Heavy imports are inside functions."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bullet.cli import sweep
from bullet.cli.common import (
    COMMON,
    RUN_FILES,
    Parser,
    add_debug,
    add_workload_arguments,
    build_config,
    group_of,
    out_folder,
    print_paths,
    progress_bar,
    refuse_idle,
    trace_label,
    watched,
    whole,
    width,
)
from bullet.cli.figures import add_figures
from bullet.cli.inspect import add_inspect
from bullet.cli.lifecycle import command
from bullet.files import fresh_folder, safe_name

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
  bullet-sim compare --policies bullet@4,vllm-2048@4,vllm-2048@3p1d --rate 20
      multiplex or disaggregate: four replicas, or three that prefill for one that decodes
  bullet-sim compare --policies bullet,bullet-literal,vllm-1024 --set policy.options.decode_floor=0.2
      an option goes to the policies that have it
  bullet-sim sweep --policies bullet,vllm-1024 --rates 2:8:0.5 --seeds 8
      a grid of runs over all cores, cached; means over seeds with their intervals
  bullet-sim figures fig05 table2
      the paper's figures, ours beside its own (all of them: bullet-sim figures)
  bullet-sim validate rtx4090
      a recorded run of vLLM on an RTX 4090, replayed: simulated beside measured
  bullet-sim validate serving
      what others measured of engines on A100 and H100: simulated beside measured, untuned
  bullet-sim run --config runs/mine/config.toml --seed 1
      a stored run again, with other requests
"""


if TYPE_CHECKING:
    from bullet.config import RunConfig

RUN_EXAMPLES = """examples:
  bullet-sim run --trace sharegpt --rate 15 --policy bullet --out runs/mine
  bullet-sim run --trace my.csv --arrivals recorded --policy vllm-1024 \\
      --ttft 500ms --tpot 30ms
  bullet-sim run --trace azure-code --concurrency 32 --policy sglang-2048 \\
      --gpu h100 --seeds 5
"""
COMPARE_EXAMPLES = """examples:
  bullet-sim compare --trace azure-code --rate 5
  bullet-sim compare --trace sharegpt --rate 15 --policies bullet,vllm-1024 \\
      --ttft 500ms --tpot 30ms --seeds 5
  bullet-sim compare --trace result.json --arrivals recorded \\
      --policies vllm-2048 --measured result.json
"""
OUTPUT = "output"


def _simulation_arguments(parser: argparse.ArgumentParser, *, sweeps: bool = False) -> None:
    """What the commands that simulate share: the common options first. ``sweeps`` have their own seeds and help."""
    add_workload_arguments(parser)
    common = group_of(parser, COMMON)
    common.add_argument("--seed", type=whole, metavar="N", help="default 0; same seed, same bytes")
    if not sweeps:
        common.add_argument("--seeds", type=whole, metavar="N", help="N runs, seeds --seed to --seed + N - 1: means with their "
                            "95 %% intervals")
    common.add_argument("--model", help="llama-3.1-8b (default), llama-3.1-70b, qwen3-32b, tiny, or a Hugging Face config.json")
    common.add_argument("--gpu", help="a100-80gb (default), h100, h200, .. or a card.toml (bullet-sim list)")
    common.add_argument("--out", type=out_folder, metavar="DIR", help="a fresh folder (default runs/<name>-<time>)")
    device = group_of(parser, "device and estimator")
    device.add_argument("--kv-dtype", choices=("auto", "fp8", "16"), help="KV cache; auto: as the checkpoint says, else 16 bits")
    device.add_argument("--max-model-len", type=whole, metavar="N", help="longest prompt and output, if less than the model's")
    device.add_argument("--device-model", metavar="fit|table|DIR", help="fit (default): coefficients; table: measured kernel "
                        "tables, interpolated, for one-lane policies where the GPU's profile has them; DIR: what "
                        "bullet-profile fit --out DIR made of a sweep of your own")
    device.add_argument("--estimator", choices=("srm", "srm-blind", "oracle"), help="what bullet asks (default srm)")
    many = group_of(parser, "several devices")
    many.add_argument("--cluster", metavar="N|xPyD", help="4: replicas behind a router; 3p1d: devices that prefill, devices that "
                      "decode; a policy's name may say its own: bullet@4,vllm-1024@3p1d (docs/cluster.md)")
    many.add_argument("--router", choices=("round-robin", "least-loaded", "shortest-queue", "prefix-aware"), help="which device "
                      "a request goes to (default round-robin)")
    rest = group_of(parser, "everything else")
    rest.add_argument("--config", metavar="FILE.toml", help="a configuration; flags and --set override it")
    rest.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="sets",
                      help="any key of the configuration, repeatable; overrides flags")
    output = group_of(parser, OUTPUT)
    output.add_argument("--no-report", action="store_true", help="no plots, HTML or Perfetto trace")
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    if not sweeps:
        add_debug(output)
        output.add_argument("-h", "--help", action="help", help="show this and exit")


def _sim_parser() -> argparse.ArgumentParser:
    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": EXAMPLES}
    parser = Parser(prog="bullet-sim", description="Replay LLM serving traces on a modelled GPU under Bullet and its rivals. "
                     "Everything it prints is simulated.", **style)
    commands = parser.add_subparsers(dest="command", required=True,
                                     metavar="run | compare | sweep | goodput | bound | sensitivity | figures | inspect | "
                                             "validate | list")
    run = commands.add_parser("run", help="one policy", description="Replay a trace under one policy.", epilog=RUN_EXAMPLES,
                              usage="bullet-sim run [options]", add_help=False, formatter_class=style["formatter_class"])
    group_of(run, COMMON).add_argument("--policy", metavar="NAME", help="bullet (default), bullet-literal, static-P, naive, "
                                       "sglang-N, sglang-N-mixed, vllm-N, file.py:Class")
    _simulation_arguments(run)
    run.set_defaults(handler=_run)
    compare = commands.add_parser("compare", help="several policies on the same requests", description="Replay the same requests "
                                  "under several policies; one folder each.", epilog=COMPARE_EXAMPLES,
                                  usage="bullet-sim compare [options]", add_help=False, formatter_class=style["formatter_class"])
    group_of(compare, COMMON).add_argument("--policies", metavar="A,B,..", default="bullet,sglang-1024,sglang-2048,vllm-1024",
                                           help="default %(default)s")
    _simulation_arguments(compare)
    group_of(compare, OUTPUT).add_argument("--bound", action=argparse.BooleanOptionalAction,
                                           help="the share of the fluid bound that each reached (default: where known)")
    group_of(compare, OUTPUT).add_argument("--measured", type=Path, metavar="FILE", help="result file of vllm bench serve or "
                                           "sglang.bench_serving: a measured row beside the simulated ones")
    compare.set_defaults(handler=_compare)
    check = commands.add_parser("validate", help="replay a recorded run of a real engine",
                                description="Replay a recorded run of a real engine: simulated beside measured, one run and the "
                                "mean over runs whose arrivals are moved by up to 20 ms (docs/validation.md).")
    check.add_argument("target", nargs="?", help="default: all of them, in one table and on one page; rtx4090, rtxpro6000: vLLM "
                       "0.19.0, Llama-3.1-8B, 300 requests; a FOLDER laid out like profiles/rtx4090/llama-3.1-8b; serving: what "
                       "others measured of SGLang, vLLM and TensorRT-LLM")
    check.add_argument("--jitters", type=whole, metavar="N",
                       help="a recorded run: runs with moved arrivals, seeds 0 to N - 1 (default 8)")
    check.add_argument("--ingredients", action="store_true", help="a recorded run: also leave out or change one part of the "
                       "engine at a time (8 times as long)")
    check.add_argument("--data", type=Path, metavar="DIR", help="a recorded run: a folder instead of the shipped one; serving: a "
                       "folder with runs that cannot be shipped, compared as well")
    check.add_argument("--html", type=Path, metavar="FILE", help="without a target: the page there as well, a picture a run")
    check.add_argument("--out", type=out_folder, metavar="DIR", help="a fresh folder (default runs/validate-<target>-<time>)")
    check.add_argument("--quiet", action="store_true", help="no progress bar")
    check.set_defaults(handler=_validate)
    shared = Parser(add_help=False)
    _simulation_arguments(shared, sweeps=True)
    sweep.add_commands(commands, shared)
    add_figures(commands)
    add_inspect(commands)
    listing = commands.add_parser("list", help="what is built in", description="Show what is built in.")
    listing.set_defaults(handler=_list)
    return parser


def _run(args: argparse.Namespace) -> int:
    from bullet import api

    config = build_config(args)
    refuse_idle(args, [config.policy.name], "estimator")
    out = fresh_folder(args.out, f"{config.policy.name}-{trace_label(config.workload.trace)}")
    if args.seeds is not None:
        return _over_seeds(args, config, None, out)
    api.simulate(config, out=out, report=not args.no_report, watch=watched(args), say=print, width=width())
    print_paths(out, args, RUN_FILES)
    return 0


def _over_seeds(args: argparse.Namespace, config: RunConfig, policies: str | None, out: Path) -> int:
    from bullet import api

    api.over_seeds(config, args.seeds, policies, out=out, report=not args.no_report, watch=watched(args), say=print,
                   width=width(), bound=getattr(args, "bound", None))
    print_paths(out, args, "seeds.txt, seeds.json", f"seed-{config.seed}/ to seed-{config.seed + args.seeds - 1}/")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from bullet import api
    from bullet.errors import ConfigError

    config, names = build_config(args), api.split_names(args.policies)
    refuse_idle(args, names, "estimator")
    out = fresh_folder(args.out, f"compare-{trace_label(config.workload.trace)}")
    if args.seeds is not None:
        if args.measured is not None:
            raise ConfigError(f"--measured: is of one seed: leave --seeds {args.seeds} out")
        return _over_seeds(args, config, args.policies, out)
    api.compare(config, args.policies, out=out, report=not args.no_report, watch=watched(args), say=print, width=width(),
                measured=args.measured, bound=args.bound)
    print_paths(out, args, "comparison.txt, comparison.csv, comparison.json", *(f"{safe_name(name)}/" for name in names))
    return 0


def _validate(args: argparse.Namespace) -> int:
    from functools import partial

    from bullet.errors import ConfigError
    from bullet.files import Claim
    from bullet.results.page import drawn

    if args.target is None:
        return _validate_all(args)
    if args.html is not None:
        raise ConfigError("--html: only without a target, when all are on one page")
    if args.target == "serving":
        from bullet.validation import serving as validation
        from bullet.validation import serving_points

        if args.jitters is not None or args.ingredients:
            raise ConfigError(f"{'--ingredients' if args.ingredients else '--jitters'}: has no effect on validate serving, which "
                              "draws its requests")
        points = serving_points.shipped() + ([] if args.data is None else serving_points.unlicensed(args.data))
        runs, validate = validation.runs_of(points), partial(validation.validate, points)
    else:
        from bullet.validation import comparison as validation
        from bullet.validation.recorded import load_recorded
        from bullet.validation.replay import INGREDIENTS, JITTER_SEEDS

        jitters = len(JITTER_SEEDS) if args.jitters is None else args.jitters
        if not 0 <= jitters <= 1000:
            raise ConfigError(f"--jitters {jitters}: must be 0 to 1000")
        if args.ingredients and not jitters:
            raise ConfigError("--ingredients: compares means over --jitters runs, of which there are 0")
        ingredients = INGREDIENTS if args.ingredients else ()
        runs, validate = validation.runs_of(jitters, ingredients), partial(
            validation.validate, load_recorded(args.target, args.data), seeds=range(jitters), ingredients=ingredients)
    with Claim(fresh_folder(args.out, f"validate-{Path(args.target).name}")) as claim:
        update, close = progress_bar(runs, "validate", args.quiet, "run")
        try:
            found = validate(progress=update)
        finally:
            close()
        args.kept = claim.folder
        print(validation.write(claim.folder, found))
        picture = ", validate.png" if drawn(lambda: validation.draw(claim.folder, found)) else ""
    print(f"written to {claim.folder}/:\n  validate.json, validate.txt{picture}, {validation.ROWS}")
    return 0


def _validate_all(args: argparse.Namespace) -> int:
    from bullet.errors import ConfigError
    from bullet.files import Claim, write_text
    from bullet.validation import everything
    from bullet.validation.replay import JITTER_SEEDS

    jitters = len(JITTER_SEEDS) if args.jitters is None else args.jitters
    if not 0 <= jitters <= 1000:
        raise ConfigError(f"--jitters {jitters}: must be 0 to 1000")
    if args.ingredients:
        raise ConfigError("--ingredients: of one recorded run: name it")
    if args.html is not None and args.html.exists():
        raise ConfigError(f"--html {args.html}: exists already (nothing is overwritten)")
    wanted = everything.entries(jitters, args.data)
    with Claim(fresh_folder(args.out, "validate-all")) as claim:
        args.kept = claim.folder
        update, close = progress_bar(sum(entry.runs for entry in wanted), "validate", args.quiet, "run")
        try:
            found = everything.validate(wanted, claim.folder, update or (lambda _: None))
        finally:
            close()
        print(everything.write(claim.folder, found))
        if args.html is not None:
            write_text(args.html, everything.page(found), replace=False)
    where = "" if args.html is None else f"\n  {args.html}"
    print(f"written to {claim.folder}/:\n  validate.txt, validate.csv, validate.html; a picture a run{where}")
    return 0


def _list(args: argparse.Namespace) -> int:
    from bullet import policies
    from bullet.catalog.gpus import GPUS
    from bullet.catalog.models import MODELS
    from bullet.workload import BUILTIN, describe
    from bullet.workload.named import NAMED

    def lines(text: str, first: str = "  ") -> None:
        print(textwrap.fill(text, width(), initial_indent=first, subsequent_indent=" " * 19, break_on_hyphens=False))

    four = "mean/p50/p90/max"
    print(f"{'traces':<14} {'rows':>6}   {'prompt ' + four:<23} {'output ' + four:<23} {'req/s':>5}")
    for name in BUILTIN:
        d = describe(name)
        prompt, output = ("/".join(f"{v:.0f}" for v in numbers) for numbers in (d.prompt, d.output))
        rate = "-" if d.rate_req_per_s is None else f"{d.rate_req_per_s:.2f}"
        print(f"  {name:<12} {d.rows:>6}   {prompt:<23} {output:<23} {rate:>5}")
    print("  req/s as recorded; -: lengths only (bullet-sim inspect NAME)")
    for name in BUILTIN:
        print(f"  {name:<16} {BUILTIN[name].source}")
    print("\nworkloads in which sharing is hard (--workload NAME)")
    for name, one in NAMED.items():
        lines(one.description, f"  {name:<16} ")
    print("\npolicies")
    for name, description in [*policies.describe(), ("file.py:Class", "your own")]:
        lines(description, f"  {name:<16} ")
    print("\nestimators (what bullet asks)")
    lines("srm (eq. 1-2, recalibrated online), srm-blind (no contention), oracle (the device itself)")
    print(f"\n{'models':<18} {'layers':>6} {'GiB':>6} {'KiB of KV a token':>18} {'context':>8}")
    for model in MODELS.values():
        print(f"  {model.name:<16} {model.num_layers:>6} {model.weight_bytes / 2**30:>6.1f} "
              f"{model.kv_bytes_per_token / 1024:>18.0f} {model.context_tokens:>8}")
    print(f"  or a Hugging Face config.json\n\n{'GPUs (data sheet)':<18} {'SMs':>6} {'TFLOPS bf16':>12} {'GB/s':>6} {'GiB':>4}")
    for gpu in GPUS.values():
        print(f"  {gpu.name:<16} {gpu.num_sms:>6} {gpu.peak_flops / 1e12:>12.0f} {gpu.mem_bytes_per_s / 1e9:>6.0f} "
              f"{gpu.mem_bytes / 2**30:>4.0f}")
    print("  or a card.toml")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """``bullet-sim``."""
    return command("bullet-sim", _sim_parser, argv)
