"""Real runs, whole: a trace served into one folder, the engine's step times, a record checked. ``bullet-run`` calls these.

No torch here: :mod:`bullet.runtime.machine` asks for it when a device is opened.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bullet import policies
from bullet.catalog.gpus import GpuSpec, get_gpu
from bullet.catalog.models import ModelSpec, get_model, model_label
from bullet.config import KV_BLOCK_TOKENS, RunConfig, resolve_slo, to_toml
from bullet.devices import profile_folder
from bullet.devices.base import Device
from bullet.devices.coefficients import DeviceCoefficients, analytic_coefficients
from bullet.devices.fitted import DeviceModel
from bullet.devices.measured import MeasuredDevice, StepProfile
from bullet.errors import ConfigError, ResultsError
from bullet.files import Claim, write_text
from bullet.policies.base import Policy
from bullet.results import metrics, page, tables
from bullet.results.columns import RunOutcome
from bullet.results.folder import RunWriter
from bullet.runtime import machine as machines
from bullet.runtime import record as records
from bullet.runtime import step_times
from bullet.runtime.driver import Replay
from bullet.runtime.record import RecordWriter
from bullet.signals import Say, Watch, silent, unwatched
from bullet.state import SplitTable
from bullet.workload import Workload, load_workload, resolved
from bullet.workload.report import run_lines

CPU_TOKENS, GPU_TOKENS = 448, 8704
"""Longest sequence of the step times, unless another is asked for."""


@dataclass(frozen=True)
class Engine:
    """Which engine on which device: ``device`` cuda or cpu, ``weights`` a folder (none: random), ``backend`` how SMs are
    partitioned, ``threads`` of torch on a CPU; ``say`` hears what is found on the way."""

    device: str = "cuda"
    weights: Path | None = None
    backend: str = "auto"
    allow_busy: bool = False
    threads: int = 1
    say: Say = silent

    @property
    def cpu(self) -> bool:
        """Whether it runs without a GPU."""
        return self.device == "cpu"

    def open(self, config: RunConfig, max_tokens: int) -> AbstractContextManager[machines.Opened]:
        """As :func:`bullet.runtime.machine.open_machine`."""
        return machines.open_machine(self.device, config, max_tokens, weights=self.weights, backend=self.backend,
                                     allow_busy=self.allow_busy, threads=self.threads, say=self.say)

    def step_tokens(self, model: ModelSpec) -> int:
        """Longest sequence whose step times are taken by default."""
        return min(CPU_TOKENS if self.cpu else GPU_TOKENS, model.context_tokens)


def real_config(config: RunConfig) -> RunConfig:
    """A simulation's configuration for a real run: delays, host time and noise are zero, since here they happen by themselves."""
    if config.device.tensor_parallel != 1:
        raise ConfigError(f"device.tensor_parallel = {config.device.tensor_parallel}: the engine runs on one device")
    if config.layout is not None:
        raise ConfigError(f"cluster.layout = {config.layout!r}: the engine runs on one device")
    if config.device.kv_dtype == "fp8":
        raise ConfigError("device.kv_dtype = 'fp8': the engine keeps KV in the width of its activations")
    return dataclasses.replace(config, device=dataclasses.replace(
        config.device, publish_delay_s=0.0, reconfigure_s=0.0, noise_std=0.0, host_step_s=0.0, host_prefill_step_s=0.0,
        host_request_s=0.0, host_launch_s=0.0, device_launch_s=0.0))


def estimator_device(model: ModelSpec, gpu: GpuSpec, profile: StepProfile | None) -> Device:
    """What the estimator takes its samples from: measured step times, else the built-in profile of that GPU."""
    if profile is not None:
        return MeasuredDevice(profile.shown(gpu), model, gpu)
    own = profile_folder(gpu, model)
    fits = sorted(own.parent.glob("*/fit.json"), key=lambda path: (path.parent != own, path))
    return DeviceModel(model, gpu, DeviceCoefficients.from_json(fits[0]) if fits else analytic_coefficients(gpu))


# ------------------------------------------------------------------------------------------------ runs


def serve(config: RunConfig, workload: Workload, opened: machines.Opened, profile: StepProfile | None, folder: Path, *,
          record: Path | None = None, report: bool = True, watch: Watch = unwatched,
          say: Say = silent) -> tuple[RunOutcome, dict[str, Any]]:
    """One real run on an open machine into one folder; whatever stops it, its rows are kept. Returns what happened and the
    summary; ``record``: a file for :func:`recheck`; ``say`` hears the table, when the files are written and nothing is drawn."""
    machine = opened.machine
    model = get_model(config.device.model)
    device = estimator_device(model, opened.gpu, profile) if policies.needs_estimator(config.policy.name) else None
    policy = policies.build_policy(config, model, opened.gpu, machine.splits, device)
    with RunWriter(folder, source="measured") as writer:
        writer.resolved(config, offered=len(workload))
        writer.metadata |= {"gpu": machine.name, "partition": machine.partition}
        run = Replay(config, workload, machine, policy, writer, machines.prompts_of(workload, model.vocab_size, config.seed),
                     stop=writer.poll)
        recorder: Any = nullcontext()
        if record is not None:
            slos = [run.ttft_slo_s(int(t)) for t in workload.prompt_tokens]
            recorder = run.record = RecordWriter(
                record, config, machine.splits, machine.kv_blocks, run.state.num_layers, slos, workload,
                {"gpu": dataclasses.asdict(opened.gpu), "model": dataclasses.asdict(model),
                 "steps": None if profile is None else dataclasses.asdict(profile)})
        started = time.perf_counter()
        try:
            with recorder, watch(writer, len(workload), config.policy.name) as run.progress:
                run.run()
        except BaseException as exc:
            told = run.break_off(exc)
            if told is not exc:
                raise told from exc
            raise
        outcome = run.outcome()
        summary = metrics.summarise(outcome)
        timing = run.timing(time.perf_counter() - started)
        writer.close(outcome, summary, timing)
    say("\n".join([tables.comparison_table([summary]), *host_lines(timing)]))
    if report and find_spec("matplotlib") is None:
        say("no plots: matplotlib is not installed here")
    elif report:
        page.drawn(lambda: page.write_run_report(writer.folder, outcome, summary, to_toml(outcome.config)))
    return outcome, summary


def replay(config: RunConfig, engine: Engine, folder: Path, *, steps: Path | None = None, record: Path | None = None,
           report: bool = True, watch: Watch = unwatched, say: Say = silent) -> tuple[RunOutcome, dict[str, Any]]:
    """Serve a trace under one policy on a real engine, into ``folder``. Returns what happened and the summary, as :func:`serve`.

    ``steps``: a file of step times that the estimator starts from. ``record``: a file to write states, observations and
    decisions to (:func:`recheck`). What can be wrong is found before a device is opened and a folder made.
    """
    check_parquet()
    policies.check_name(config.policy.name)
    if config.workload.arrivals == "closed":
        raise ConfigError("workload.arrivals (--concurrency) = 'closed': a real run sends requests at times known beforehand: "
                          "use --arrivals recorded, poisson, constant or gamma")
    model = get_model(config.device.model)
    workload = load_workload(config.workload, config.seed)
    profile = None if steps is None else StepProfile.from_json(steps)
    if profile is not None and profile.model not in (model.name, model_label(model)):
        raise ConfigError(f"{steps}: step times of {profile.model}, the model is {model.name}: measure its own with "
                          "bullet-run steps")
    config = dataclasses.replace(
        config, workload=resolved(config.workload, workload),
        slo=resolve_slo(config.slo, config.workload.trace, workload.mean_prompt_tokens))
    engine.say("\n".join(run_lines(workload, config.workload)) + "\n")
    if record is not None:
        check_record(record, folder)
    # On a CPU at least what step times need.
    most = max(machines.longest(config, workload), engine.step_tokens(model) if engine.cpu else 0)
    with engine.open(config, most) as opened:
        machine = opened.machine
        profile = None if profile is None else profile.shown(opened.gpu)
        if profile is not None and (profile.hardware, profile.num_sms) != (machine.name, machine.splits.num_sms):
            raise ConfigError(f"{steps}: step times of {profile.hardware} with {profile.num_sms} SMs, this is "
                              f"{machine.name} with {machine.splits.num_sms}: measure them here with bullet-run steps")
        config = on_machine(config, opened)
        if profile is None and engine.cpu and policies.needs_estimator(config.policy.name):
            engine.say("taking step times, for the estimator to start from")
            profile = step_times.measure_steps(opened, model, seed=config.seed)
        return serve(config, workload, opened, profile, folder, record=record, report=report, watch=watch, say=say)


def on_machine(config: RunConfig, opened: machines.Opened) -> RunConfig:
    """With the GPU that the policy believes in and the KV that there is."""
    return dataclasses.replace(config, device=dataclasses.replace(
        config.device, gpu=opened.gpu.name, kv_tokens=opened.machine.kv_blocks * KV_BLOCK_TOKENS))


def check_parquet() -> None:
    """Found before a device is opened: a run's rows cannot be kept without it."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as exc:
        raise ResultsError(f"pyarrow is not installed ({exc}): a run's rows are kept as parquet: pip install pyarrow") from None


def check_record(record: Path, folder: Path) -> None:
    """Found before a device is opened and a run's folder made: whether ``record`` can be written. Leaves nothing."""
    if not record.parent.is_dir():
        if record.parent in (folder, *folder.parents):  # the run makes it
            return
        raise ResultsError(f"{record}: no folder {record.parent}: make it, or choose another --record")
    try:
        record.open("x").close()
    except FileExistsError:
        raise ResultsError(f"{record}: exists already: choose another --record (nothing is overwritten)") from None
    except OSError as exc:
        raise ResultsError(f"{record}: cannot be written ({exc.strerror}): choose another --record") from None
    record.unlink()


def host_lines(timing: Mapping[str, Any]) -> list[str]:
    """Table 5's rows, of this run, in microseconds; the paper's beside them."""
    paper = {"prediction": "10.2 / 24.5 / 25.8", "reconfiguration": "4.1 / 4.2 / 5.9", "hand_over": "210 / 890 / 1540"}
    lines = [f"host times on {timing['device']} (mean / P90 / P99 us; the paper's Table 5 on an A100 in brackets):"]
    for name, row in timing["host"].items():
        found = "-" if not row["count"] else f"{row['mean_us']:.1f} / {row['p90_us']:.1f} / {row['p99_us']:.1f}"
        lines.append(f"  {name.replace('_', '-'):<16} {row['count']:>7} x  {found:<24} [{paper[name]}]")
    return lines


# ------------------------------------------------------------------------------------------------ step times, records


def take_steps(config: RunConfig, engine: Engine, folder: Path, max_tokens: int | None = None) -> StepProfile:
    """The engine's step times, into ``folder`` as steps.json; ``max_tokens``: the longest sequence."""
    model = get_model(config.device.model)
    most, least = max_tokens or engine.step_tokens(model), step_times.LEAST_TOKENS[engine.device]
    if not least <= most <= model.context_tokens:
        raise ConfigError(f"--max-tokens {most}: step times take {least} or more on {engine.device}, up to "
                          f"{model.name}'s {model.context_tokens}")
    with Claim(folder) as claim:
        with engine.open(config, most) as opened:
            profile = step_times.measure_steps(opened, model, seed=config.seed)
        write_text(claim.folder / "steps.json", profile.to_json())
    return profile


def step_lines(profile: StepProfile) -> list[str]:
    """Step times as text, milliseconds."""
    def row(title: str, sizes: Sequence[int], seconds: Sequence[float]) -> str:
        return f"  {title}:  " + ", ".join(f"{n}: {s * 1e3:.1f}" for n, s in zip(sizes, seconds, strict=True))

    return [row("prefill, ms at tokens", profile.prefill_tokens, profile.prefill_s),
            *(row(f"decode of {batch}, ms at context", profile.contexts, seconds)
              for batch, seconds in zip(profile.batches, profile.decode_s, strict=True))]


def policy_of_record(header: records.Header, config: RunConfig, splits: SplitTable) -> Policy:
    """A fresh policy with the estimator that the recorded one began with; the model's file need not be at hand."""
    gpu, model = header.gpu or get_gpu(config.device.gpu), header.model or get_model(config.device.model)
    return policies.build_policy(config, model, gpu, splits, estimator_device(model, gpu, header.steps))


def recheck(path: Path, named: str | None = None) -> tuple[int, list[str]]:
    """Would a fresh policy decide as the record says? How many decisions there were, and those that differ (first 20).

    ``named``: the policy's file if it is a user's own, which a record does not run by itself.
    """
    def fresh(header: records.Header, config: RunConfig, splits: SplitTable) -> Policy:
        policies.check_trusted(config.policy.name, [] if named is None else [named], str(path), "--policy")
        if named not in (None, config.policy.name):
            raise ConfigError(f"--policy {named}: {path} is of {config.policy.name}")
        return policy_of_record(header, config, splits)

    return records.replay(path, fresh)
