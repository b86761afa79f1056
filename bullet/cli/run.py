"""``bullet-run replay | steps | recheck | validate``: the real runtime. Heavy imports are inside functions.

:func:`main` is called by ``bullet.cli.run`` and runs alone as ``python -m bullet.cli.run``. ``replay`` needs no simpy; the
simulated side of ``validate`` does, and runs afterwards from the files where it is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bullet.cli.common import (
    FLAGS,
    Parser,
    add_workload_arguments,
    build_config,
    fresh_folder,
    guarded,
    number,
    print_paths,
    progress_bar,
    stops_between_steps,
    whole,
)

if TYPE_CHECKING:
    from bullet.catalog.gpus import GpuSpec
    from bullet.catalog.models import ModelSpec
    from bullet.config import RunConfig
    from bullet.devices.fitted import DeviceModel
    from bullet.devices.measured import StepProfile
    from bullet.policies.base import Policy
    from bullet.results.columns import RunOutcome
    from bullet.runtime.machine import Opened
    from bullet.state import SplitTable
    from bullet.workload import Workload

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
    device.add_argument("--out", type=Path, metavar="DIR", help="a fresh folder (default runs/<name>-<time>)")
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
    recheck.set_defaults(handler=_recheck)
    validate = commands.add_parser("validate", parents=[device], help="simulated against measured, on this machine", **style)
    validate.add_argument("--policies", metavar="A,B,..", default=None, help="default: bullet and one of each other family")
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
    """Exit status: 0 done, 1 decisions differ, 2 the user's to repair, 130 Ctrl-C, 143 SIGTERM."""
    args = build_parser().parse_args(argv)
    with _terminates_as_interrupt(args):
        return guarded("bullet-run", args)


@contextmanager
def _terminates_as_interrupt(args: argparse.Namespace) -> Iterator[None]:
    """Outside a run too (opening a device, step times) SIGTERM unwinds as Ctrl-C does: contexts are destroyed, and said."""
    def stop(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: a second one would strike the cleaning up
        args.stopped_by = number
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------------------------------------------ replay


def run_config(args: argparse.Namespace, policy: str | None = None) -> RunConfig:
    """As bullet-sim's; what only a simulation has (delays, noise) is zero, since here it happens by itself."""
    from bullet.errors import ConfigError

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
    config = build_config(args, policy)
    if config.device.tensor_parallel != 1:
        raise ConfigError(f"device.tensor_parallel = {config.device.tensor_parallel}: the engine runs on one device")
    return dataclasses.replace(config, device=dataclasses.replace(
        config.device, publish_delay_s=0.0, reconfigure_s=0.0, noise_std=0.0))


def make_policy_for(config: RunConfig, gpu: GpuSpec, splits: SplitTable, device: DeviceModel | None,
                    model: ModelSpec | None = None) -> Policy:
    """The policy object that the simulator would use; its estimator starts from ``device``. ``model``: the configuration's,
    where its file need not be at hand."""
    from bullet import policies
    from bullet.catalog.models import get_model
    from bullet.estimators.make import make_estimator

    model = model or get_model(config.device.model)
    assert config.slo.tpot_s is not None
    estimator = None
    if policies.needs_estimator(config.policy.name):
        assert device is not None
        estimator = make_estimator(config.policy.estimator, device=device.sampled(), model=model, gpu=gpu, splits=splits,
                                   seed=config.seed, recalibrate=config.policy.recalibrate, error=config.policy.estimator_error)
    return policies.make_policy(config.policy.name, policies.PolicyContext(model, gpu, splits, config.slo.tpot_s, estimator,
                                                                           config.policy.options))


def estimator_device(model: ModelSpec, gpu: GpuSpec, profile: StepProfile | None) -> DeviceModel:
    """What the estimator takes its samples from: measured step times, else the built-in profile of that GPU."""
    from bullet.devices.coefficients import PROFILES, DeviceCoefficients, analytic_coefficients
    from bullet.devices.fitted import DeviceModel
    from bullet.devices.measured import MeasuredDevice

    if profile is not None:
        return MeasuredDevice(profile.shown(gpu), model, gpu)
    fits = sorted(PROFILES.glob(f"{gpu.name}/*/fit.json"), key=lambda path: (path.parent.name != model.name, path))
    return DeviceModel(model, gpu, DeviceCoefficients.from_json(fits[0]) if fits else analytic_coefficients(gpu))


def serve(config: RunConfig, workload: Workload, opened: Opened, profile: Any, folder: Path, args: argparse.Namespace,
          record: Path | None = None) -> tuple[RunOutcome, dict[str, Any]]:
    """One real run into one folder; whatever stops it, its rows are kept."""
    from bullet import policies
    from bullet.catalog.models import get_model
    from bullet.config import to_toml
    from bullet.results import metrics, page
    from bullet.results.folder import RunWriter
    from bullet.runtime.driver import Replay
    from bullet.runtime.machine import prompts_of
    from bullet.runtime.record import RecordWriter

    machine = opened.machine
    model = get_model(config.device.model)
    device = estimator_device(model, opened.gpu, profile) if policies.needs_estimator(config.policy.name) else None
    policy = make_policy_for(config, opened.gpu, machine.splits, device)
    with RunWriter(folder, source="measured") as writer:
        args.kept = folder
        writer.resolved(config, offered=len(workload))
        writer.metadata |= {"gpu": machine.name, "partition": machine.partition}
        update, close = progress_bar(len(workload), config.policy.name, args.quiet)
        run = Replay(config, workload, machine, policy, writer, prompts_of(workload, model.vocab_size, config.seed),
                     stop=lambda: writer.stopping, progress=update)
        recorder: Any = nullcontext()
        if record is not None:
            slos = [run.mean_slo_s if run.policy_reads_mean else run.slo_per_token_s * int(t) for t in workload.prompt_tokens]
            recorder = run.record = RecordWriter(
                record, config, machine.splits, machine.kv_blocks, run.state.num_layers, slos, workload,
                {"gpu": dataclasses.asdict(opened.gpu), "model": dataclasses.asdict(model),
                 "steps": None if profile is None else dataclasses.asdict(profile)})
        started = time.perf_counter()
        try:
            with recorder, stops_between_steps(writer, args):
                run.run()
        except BaseException:
            run.close_unfinished()  # offered = finished + rejected + unfinished, whatever stopped it
            raise
        finally:
            close()
        outcome = run.outcome(*writer.tables(), workload)
        summary = metrics.summarise(outcome)
        writer.close(outcome, summary, run.timing(time.perf_counter() - started))
    if writer.stopping:
        raise KeyboardInterrupt
    if not args.no_report and find_spec("matplotlib") is None:
        say("no plots: matplotlib is not installed here")
        args.no_report = True
    if not args.no_report:
        page.write_run_report(folder, outcome, summary, to_toml(outcome.config))
    return outcome, summary


def check_parquet() -> None:
    """Found before a device is opened: a run's rows cannot be kept without it."""
    from bullet.errors import ResultsError

    try:
        import pyarrow  # noqa: F401
    except ImportError as exc:
        raise ResultsError(f"pyarrow is not installed ({exc}): a run's rows are kept as parquet: pip install pyarrow") from None


def check_new_file(record: Path) -> None:
    """Found before a device is opened and a run's folder made: whether ``--record`` can be written. Leaves nothing."""
    from bullet.errors import ResultsError

    try:
        record.open("x").close()
    except FileExistsError:
        raise ResultsError(f"{record}: exists already: choose another --record (nothing is overwritten)") from None
    except OSError as exc:
        raise ResultsError(f"{record}: cannot be written ({exc.strerror}): choose another --record") from None
    record.unlink()


def _replay(args: argparse.Namespace) -> int:
    import json

    from bullet import policies
    from bullet.catalog.models import get_model, model_label
    from bullet.config import resolve_slo
    from bullet.devices.measured import StepProfile
    from bullet.errors import ConfigError, ResultsError
    from bullet.results import tables
    from bullet.runtime.machine import longest, measure_steps, open_machine
    from bullet.workload import load_workload

    config = run_config(args)
    check_parquet()
    policies.check_name(config.policy.name)
    for flag, value in (("--estimator", args.estimator), ("--steps", args.steps)):
        if value is not None and not policies.needs_estimator(config.policy.name):
            raise ConfigError(f"{flag} {value} has no effect: {config.policy.name} predicts nothing")
    workload = load_workload(config.workload, config.seed)
    profile = None if args.steps is None else StepProfile.from_json(args.steps)
    model = get_model(config.device.model)
    if profile is not None and profile.model not in (model.name, model_label(model)):
        raise ConfigError(f"{args.steps}: step times of {profile.model}, the model is {get_model(config.device.model).name}: "
                          "measure its own with bullet-run steps")
    config = dataclasses.replace(
        config, workload=dataclasses.replace(config.workload, num_requests=len(workload)),
        slo=resolve_slo(config.slo, config.workload.trace, workload.mean_prompt_tokens))
    folder = fresh_folder(args.out, f"real-{config.policy.name}-{Path(config.workload.trace).name}")
    if args.record is not None and not (args.record.parent.is_dir() or args.record.parent in (folder, *folder.parents)):
        raise ResultsError(f"{args.record}: no folder {args.record.parent}: make it, or choose another --record")
    if args.record is not None and args.record.parent.is_dir():
        check_new_file(args.record)
    # On a CPU at least what step times need.
    most = max(longest(config, workload), min(448, get_model(config.device.model).context_tokens) if args.device == "cpu" else 0)
    with open_machine(args.device, config, most, weights=args.weights, backend=args.backend, allow_busy=args.allow_busy,
                      threads=args.threads, say=say) as opened:
        machine = opened.machine
        profile = None if profile is None else profile.shown(opened.gpu)
        if profile is not None and (profile.hardware, profile.num_sms) != (machine.name, machine.splits.num_sms):
            raise ConfigError(f"{args.steps}: step times of {profile.hardware} with {profile.num_sms} SMs, this is "
                              f"{machine.name} with {machine.splits.num_sms}: measure them here with bullet-run steps")
        config = dataclasses.replace(config, device=dataclasses.replace(config.device, gpu=opened.gpu.name,
                                                                        kv_tokens=machine.kv_blocks * 16))
        if profile is None and args.device == "cpu" and policies.needs_estimator(config.policy.name):
            say("taking step times, for the estimator to start from")
            profile = measure_steps(opened, get_model(config.device.model), seed=config.seed)
        _, summary = serve(config, workload, opened, profile, folder, args, args.record)
    say(tables.comparison_table([summary]))
    timing = json.loads((folder / "timing.json").read_text(encoding="utf-8"))
    for line in host_lines(timing):
        say(line)
    print_paths(folder, args, ["requests.parquet, steps.parquet, summary.json, timing.json, config.toml"])
    return 0


def host_lines(timing: dict[str, Any]) -> list[str]:
    """Table 5's rows, of this run, in microseconds; the paper's beside them."""
    paper = {"prediction": "10.2 / 24.5 / 25.8", "reconfiguration": "4.1 / 4.2 / 5.9", "hand_over": "210 / 890 / 1540"}
    lines = [f"host times on {timing['device']} (mean / P90 / P99 us; the paper's Table 5 on an A100 in brackets):"]
    for name, row in timing["host"].items():
        found = "-" if not row["count"] else f"{row['mean_us']:.1f} / {row['p90_us']:.1f} / {row['p99_us']:.1f}"
        lines.append(f"  {name.replace('_', '-'):<16} {row['count']:>7} x  {found:<24} [{paper[name]}]")
    return lines


# ------------------------------------------------------------------------------------- the other commands


def _steps(args: argparse.Namespace) -> int:
    from bullet.catalog.models import get_model
    from bullet.errors import ConfigError
    from bullet.files import create_folder, write_text
    from bullet.runtime.machine import LEAST_TOKENS, measure_steps, open_machine

    config = run_config(args)
    model = get_model(config.device.model)
    most = args.max_tokens or min(448 if args.device == "cpu" else 8704, model.context_tokens)
    if not LEAST_TOKENS[args.device] <= most <= model.context_tokens:
        raise ConfigError(f"--max-tokens {most}: step times take {LEAST_TOKENS[args.device]} or more on {args.device}, up to "
                          f"{model.name}'s {model.context_tokens}")
    folder = fresh_folder(args.out, f"steps-{args.device}")
    made = create_folder(folder)
    try:
        with open_machine(args.device, config, most, weights=args.weights, backend=args.backend, allow_busy=args.allow_busy,
                          threads=args.threads, say=say) as opened:
            profile = measure_steps(opened, model, seed=config.seed)
    except BaseException:
        if made:
            with suppress(OSError):  # somebody else's files are in there by now
                folder.rmdir()
        raise
    write_text(folder / "steps.json", profile.to_json())
    say(f"measured on {profile.hardware} ({profile.partition}), {model.name}")
    prefills = zip(profile.prefill_tokens, profile.prefill_s, strict=True)
    say("  prefill, ms at tokens:  " + ", ".join(f"{t}: {s * 1e3:.1f}" for t, s in prefills))
    for batch, row in zip(profile.batches, profile.decode_s, strict=True):
        say(f"  decode of {batch}, ms at context:  "
            + ", ".join(f"{c}: {s * 1e3:.1f}" for c, s in zip(profile.contexts, row, strict=True)))
    say(f"written to {folder / 'steps.json'}")
    return 0


def policy_of_record(header: dict[str, Any], config: RunConfig, splits: SplitTable) -> Policy:
    """A fresh policy with the estimator that the recorded one began with."""
    from bullet.catalog.gpus import GpuSpec
    from bullet.catalog.models import ModelSpec
    from bullet.devices.measured import StepProfile

    raw, model = header["gpu"], ModelSpec(**header["model"])
    gpu = GpuSpec(**{**raw, "compute_capability": tuple(raw["compute_capability"])})
    profile = None if header["steps"] is None else StepProfile.from_dict(header["steps"])
    return make_policy_for(config, gpu, splits, estimator_device(model, gpu, profile), model)


def _recheck(args: argparse.Namespace) -> int:
    from bullet.runtime.record import replay

    build: Callable[..., Policy] = policy_of_record
    decisions, differences = replay(args.record, build)
    for line in differences:
        say(line[:400])
    say(f"{args.record}: {decisions} decisions, " + ("a fresh policy decides the same" if not differences else
                                                     f"{len(differences)}{'+' if len(differences) > 19 else ''} differ"))
    return 1 if differences else 0


def _validate(args: argparse.Namespace) -> int:
    from bullet.validation.closed_loop import validate

    return validate(args)


if __name__ == "__main__":
    sys.exit(main())
