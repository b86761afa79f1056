"""``bullet-run replay | steps | recheck | validate``: the real runtime. Heavy imports are inside functions.

:func:`main` is called by ``bullet.cli.run`` and runs alone as ``python -m bullet.cli.run``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bullet.cli.common import (
    FLAGS,
    RUN_FILES,
    Parser,
    add_workload_arguments,
    build_config,
    number,
    out_folder,
    print_paths,
    refuse_idle,
    trace_label,
    watched,
    whole,
)
from bullet.cli.lifecycle import command
from bullet.files import fresh_folder

if TYPE_CHECKING:
    from bullet.config import RunConfig
    from bullet.runtime.serve import Engine

EXAMPLES = """examples:
  bullet-run replay --device cpu --trace my.csv --arrivals recorded --policy bullet --out runs/real
      a small model on this machine's CPU, requests as they arrive; the folder is bullet-sim's
  bullet-run replay --trace sharegpt --rate 8 --num-requests 200 --model llama-3.1-8b --policy sglang-1024
      on the first GPU, random weights in that shape
  bullet-run recheck runs/real.jsonl
      would a fresh policy decide as --record runs/real.jsonl says?
  bullet-run validate --device cpu
      sweep, profile, simulation and real run of the same requests, side by side
"""


def say(text: str = "") -> None:
    """One line to standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def build_parser() -> argparse.ArgumentParser:
    """The command line, without running anything."""
    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": EXAMPLES}
    parser = Parser(prog="bullet-run", description="Serve a real model under the simulator's policies, in wall-clock time.",
                     **style)
    commands = parser.add_subparsers(dest="command", metavar="replay | steps | recheck | validate", required=True)
    device = Parser(add_help=False)
    device.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device.add_argument("--backend", choices=("auto", "green-context", "none"), default="auto",
                        help="how SMs are partitioned; auto: green contexts, else none, labelled so")
    device.add_argument("--weights", type=Path, metavar="DIR", help="safetensors and config.json (default: random from the seed)")
    device.add_argument("--model", help="llama-3.1-8b (default; tiny on a CPU), .. or a Hugging Face config.json")
    device.add_argument("--gpu", help="--device cpu: whose splits the policy is shown (default a100-80gb)")
    device.add_argument("--seed", type=whole, metavar="N", help="default 0: weights, prompts, arrivals")
    device.add_argument("--threads", type=whole, default=1, metavar="N", help="--device cpu: threads of torch (default 1)")
    device.add_argument("--allow-busy", action="store_true", help="go on beside other processes on the card")
    device.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="sets", help="any key of the configuration")
    device.add_argument("--config", metavar="FILE.toml", help="a configuration; flags and --set override it")
    device.add_argument("--out", type=out_folder, metavar="DIR", help="a fresh folder (default runs/<name>-<time>)")
    device.add_argument("--quiet", action="store_true", help="no progress bar")
    device.add_argument("--no-report", action="store_true", help="no plots, HTML or Perfetto trace")
    load = Parser(add_help=False)
    add_workload_arguments(load)
    load.add_argument("--estimator", choices=("srm", "srm-blind", "oracle"), help="what bullet asks (default srm)")
    replay = commands.add_parser("replay", parents=[device, load], help="serve a trace under one policy", **style)
    replay.add_argument("--policy", metavar="NAME", help="bullet (default), static-P, naive, sglang-N, vllm-N, file.py:Class")
    replay.add_argument("--steps", type=Path, metavar="FILE", help="step times that the estimator starts from (bullet-run steps; "
                        "default: taken on the spot on a CPU, the built-in profile on a GPU)")
    replay.add_argument("--record", type=Path, metavar="FILE.jsonl", help="write states, observations and decisions")
    replay.set_defaults(handler=_replay)
    steps = commands.add_parser("steps", parents=[device], help="take the engine's step times", **style)
    steps.add_argument("--max-tokens", type=whole, default=None, help="longest sequence (default: 448 on a CPU, 8704)")
    steps.set_defaults(handler=_steps)
    recheck = commands.add_parser("recheck", help="does a fresh policy decide as recorded?", **style)
    recheck.add_argument("record", type=Path)
    recheck.add_argument("--policy", metavar="FILE.py:Class", help="the record's own policy, if it is a file: not run unless "
                         "you say so")
    recheck.set_defaults(handler=_recheck)
    validate = commands.add_parser("validate", parents=[device], help="simulated against measured, on this machine", **style)
    validate.add_argument("--policies", metavar="A,B,..", default=None, help="default: bullet and one of each other family; "
                          "with --from, files of policies that may be run again")
    validate.add_argument("--num-requests", type=whole, default=None, metavar="N", help="default 100 on a CPU, 60")
    validate.add_argument("--rate", type=number, default=None, metavar="REQ/S", help="default: half of what the steps allow")
    validate.add_argument("--budget-s", type=number, default=None, metavar="S", help="be done within S seconds: "
                          "fewer requests, then fewer policies")
    validate.add_argument("--from", type=Path, dest="source", metavar="DIR",
                          help="run nothing: simulate from the files of a validation and print its table")
    validate.add_argument("--profile", type=Path, metavar="DIR", help="with --from: simulate on this folder of bullet-profile "
                          "fit instead of the step times")
    validate.set_defaults(handler=_validate)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 decisions differ, and those of :func:`bullet.cli.lifecycle.command`."""
    return command("bullet-run", build_parser, argv)


def run_config(args: argparse.Namespace) -> RunConfig:
    """As bullet-sim's; what only a simulation has is zero."""
    from bullet.errors import ConfigError
    from bullet.runtime.serve import real_config

    for name in FLAGS:
        if not hasattr(args, name):
            setattr(args, name, None)
    if args.model is None and args.config is None and args.weights is None:
        args.model = "tiny" if args.device == "cpu" else "llama-3.1-8b"
    if args.weights is not None:
        described = str(args.weights / "config.json")
        if args.model not in (None, described):
            raise ConfigError(f"--model {args.model} beside --weights {args.weights}: the weights' own config.json is taken, "
                              "leave --model out")
        args.model = described
    if args.gpu is not None and args.device == "cuda":
        raise ConfigError("--gpu: with --device cuda the policy is shown the GPU that is there")
    if args.threads is not None and args.threads < 1:
        raise ConfigError(f"--threads {args.threads}: must be 1 or more")
    return real_config(build_config(args))


def engine_of(args: argparse.Namespace) -> Engine:
    """The engine that the flags ask for."""
    from bullet.runtime.serve import Engine

    return Engine(args.device, args.weights, args.backend, args.allow_busy, args.threads, say)


def _replay(args: argparse.Namespace) -> int:
    from bullet.runtime import serve

    config = run_config(args)
    serve.check_parquet()
    refuse_idle(args, [config.policy.name], "estimator", "steps")
    folder = fresh_folder(args.out, f"real-{config.policy.name}-{trace_label(config.workload.trace)}")
    serve.replay(config, engine_of(args), folder, steps=args.steps, record=args.record, report=not args.no_report,
                 watch=watched(args), say=say)
    print_paths(folder, args, RUN_FILES)
    return 0


def _steps(args: argparse.Namespace) -> int:
    from bullet.runtime import serve

    config = run_config(args)
    folder = fresh_folder(args.out, f"steps-{args.device}")
    profile = serve.take_steps(config, engine_of(args), folder, args.max_tokens)
    say(f"measured on {profile.hardware} ({profile.partition}), {profile.model}")
    say("\n".join([*serve.step_lines(profile), f"written to {folder / 'steps.json'}"]))
    return 0


def _recheck(args: argparse.Namespace) -> int:
    from bullet.runtime.serve import recheck

    decisions, differences = recheck(args.record, args.policy)
    for line in differences:
        say(line[:400])
    say(f"{args.record}: {decisions} decisions, " + ("a fresh policy decides the same" if not differences else
                                                     f"{len(differences)}{'+' if len(differences) > 19 else ''} differ"))
    return 1 if differences else 0


def _validate(args: argparse.Namespace) -> int:
    from bullet.errors import ConfigError
    from bullet.runtime.serve import check_parquet
    from bullet.validation import closed_loop

    folder: Path | None = args.source
    names = None if args.policies is None else [n.strip() for n in args.policies.split(",") if n.strip()]
    if folder is None:
        if args.profile is not None:
            raise ConfigError("--profile: goes with --from DIR: what simulates the runs of a validation that was measured")
        check_parquet()
        config = run_config(args)
        folder = fresh_folder(args.out, f"validate-{args.device}")
        args.kept = folder
        closed_loop.measure(config, engine_of(args), folder, policies=names, rate=args.rate, num_requests=args.num_requests,
                            budget_s=args.budget_s, watch=watched(args))
    lines = closed_loop.conclude(folder, args.profile, names or [])
    known = "sweep/, profile/" if (folder / "profile").is_dir() else "steps.json"
    say("\n".join(["", *lines, "", f"written to {folder}/: validation.txt, validation.json, {known}, real/, sim/"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
