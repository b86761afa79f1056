"""``bullet-run validate``: the loop closed on one machine, simulated against measured.

    CPU   sweep of the engine -> profile of its rows (bullet-profile fit) --+
    GPU   check -> the engine's step times ---------------------------------+-> real runs of some requests
                                                                            +-> the same requests simulated, one table

The simulated side knows the machine through files alone: ``profile/`` on a CPU, ``steps.json`` on a GPU, or the folder of a fit
of that GPU's sweep (``--profile``). It has the same policies, requests, KV and splits. All that is needed is in the folder, the
model's config.json too, so that it can run later and elsewhere (``--from``). Stands above runtime and sim.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import MODELS, ModelSpec, get_model
from bullet.catalog.reader import read_object
from bullet.config import RunConfig, load_run_config, resolve_slo
from bullet.devices.base import Device
from bullet.devices.load import load_device
from bullet.devices.measured import MeasuredDevice, StepProfile
from bullet.errors import ConfigError, ProfileError, ResultsError
from bullet.files import Claim, safe_name, write_json, write_text
from bullet.policies import build_policy, check_name, check_trusted
from bullet.profiler import session, shapes
from bullet.results import metrics
from bullet.results.columns import StepTable
from bullet.results.folder import load_run
from bullet.results.tables import cell_text
from bullet.runtime import step_times
from bullet.runtime.serve import Engine, on_machine, serve
from bullet.signals import Watch, unwatched
from bullet.state import SplitTable
from bullet.workload import Workload, load_workload

CPU_POLICIES = ("bullet", "naive", "sglang-64", "vllm-256")
GPU_POLICIES = ("bullet", "sglang-1024", "vllm-1024", "naive")
"""In order of importance: a budget cuts the list at its end."""
FIGURES = (("mean TTFT ms", "mean_ttft_ms"), ("P90 TTFT ms", "p90_ttft_ms"), ("mean TPOT ms", "mean_tpot_ms"),
           ("P90 TPOT ms", "p90_tpot_ms"), ("req/s", "request_throughput"), ("tokens/s", "output_throughput"))
LOAD_SHARE = 0.5
"""Share of the machine's capacity, as its step times tell it, that the requests ask for."""
CLOSING_S = 8.0
"""Kept of a budget for closing the device and for the table. *Assumed*."""
LEAST_REQUESTS = 8


# ------------------------------------------------------------------------------------------------ measured


def measure(config: RunConfig, engine: Engine, folder: Path, *, policies: Sequence[str] | None = None,
            rate: float | None = None, num_requests: int | None = None, budget_s: float | None = None,
            watch: Watch = unwatched) -> None:
    """Step times before and after, and a real run of each policy, into ``folder``, which must be fresh.

    ``rate``: default :data:`LOAD_SHARE` of what the step times allow. ``budget_s``: be done within it, with fewer requests, then
    fewer policies. ``config``: of :func:`bullet.runtime.serve.real_config`; its trace and policy are not used.
    """
    cpu = engine.cpu
    names = policies if policies is not None else CPU_POLICIES if cpu else GPU_POLICIES
    if not names:
        raise ConfigError("--policies: names at least one")
    for name in names:
        check_name(name)
    if budget_s is not None and budget_s <= 0:
        raise ConfigError(f"--budget-s {budget_s:g}: must be positive")
    with Claim(folder):
        _measure(config, engine, folder, names, rate, num_requests, budget_s, watch)


def _measure(config: RunConfig, engine: Engine, folder: Path, names: Sequence[str], rate: float | None, num_requests: int | None,
             budget_s: float | None, watch: Watch) -> None:
    cpu, model = engine.cpu, get_model(config.device.model)
    if config.device.model.endswith(".json"):
        keep_model(Path(config.device.model), folder)
    started = time.monotonic()

    def say(text: str) -> None:
        engine.say(f"[{time.monotonic() - started:4.0f} s] {text}")

    def left_s() -> float:
        assert budget_s is not None
        return budget_s - CLOSING_S - (time.monotonic() - started)

    profile = None
    if cpu:
        say("check: a CPU has no SM partitions to prove; lanes take turns, and everything is labelled CPU")
        sweep(config, engine, folder / "sweep", budget_s, say)
        profile = profile_of_sweep(folder, model).shown(get_gpu(config.device.gpu))
        say(f"profile of its rows: {folder / 'profile'}/steps.json, interpolated (nothing is fitted to a CPU: SOURCE.md there)")
    steps_s = time.monotonic() - started
    with engine.open(config, engine.step_tokens(model)) as opened:
        say(f"{opened.machine.name}; partition: {opened.machine.partition}")
        if profile is None:
            began = time.monotonic()
            profile = step_times.measure_steps(opened, model, seed=config.seed, repeats=3)
            steps_s = time.monotonic() - began
            write_text(folder / "steps.json", profile.to_json())
            say("step times taken")
        rate = rate or LOAD_SHARE * capacity(profile, cpu)
        count = num_requests or (100 if cpu else 60)
        if budget_s is not None:
            names, count = fitting(names, count, rate, left_s())
            say(f"within {budget_s:g} s: {count} requests each for {', '.join(names)}")
        write_text(folder / "trace.csv", synthetic(count, rate, cpu, config.seed))
        load = dataclasses.replace(config.workload, trace=str(folder / "trace.csv"), arrivals="recorded", num_requests=None,
                                   rate_req_per_s=None)
        workload = load_workload(load, config.seed)
        config = dataclasses.replace(on_machine(config, opened), workload=load,
                                     slo=resolve_slo(config.slo, load.trace, workload.mean_prompt_tokens))
        for name in names:
            one = dataclasses.replace(config, policy=dataclasses.replace(config.policy, name=name))
            _, summary = serve(one, workload, opened, profile, folder / "real" / safe_name(name), report=False, watch=watch)
            say(f"{name}: {summary['completed']} of {summary['offered']} requests at {rate:.2f} req/s, mean TTFT "
                f"{summary['mean_ttft_ms'] or 0:.0f} ms")
        if budget_s is not None and left_s() < steps_s:
            say("no time is left to take the step times again: the drift stays unknown")
            return
        try:
            if cpu:
                sweep(config, engine, folder / "sweep-after", budget_s, say, again=True)
            else:
                after = step_times.measure_steps(opened, model, seed=config.seed, repeats=1, corun_s=0.2)
                write_text(folder / "steps-after.json", after.to_json())
        except ProfileError as exc:  # the runs are there: they are worth their table without it
            say(f"no second step times ({exc}): the drift stays unknown")
            return
        say("step times taken again")


MODEL_FILE = "model.json"


def keep_model(source: Path, folder: Path) -> None:
    """The model's config.json, its name with it (else the folder's): a validation can be made again where that file is not."""
    config = read_object(source)
    write_json(folder / MODEL_FILE, {**config, "_name_or_path": get_model(str(source)).name})


SWEEP_S = 45.0
"""Budget of a CPU's sweep, which takes a quarter of it on an idle core."""


def sweep(config: RunConfig, engine: Engine, out: Path, budget_s: float | None, say: Callable[[str], None], *,
          again: bool = False) -> None:
    """``bullet-profile sweep --device cpu`` of the engine's layers and steps into ``out``, as the command does it; ``again``: the
    steps alone. Torch's operations play no part here, and a busy machine changes while they are swept."""
    budget_s = SWEEP_S if budget_s is None else min(SWEEP_S, 0.3 * budget_s)
    wanted = {"gemm_lm_head", *(() if again else shapes.ENGINE_LAYERS)}
    # Its plan and summary are in its folder.
    result = session.sweep(session.Target("cpu", threads=engine.threads), out, model=config.device.model, budget_s=budget_s,
                           seed=config.seed, skip=[op for op in shapes.OPS if op not in wanted])
    if result.interrupt is not None:
        raise result.interrupt
    if result.status:
        raise ProfileError(f"{out}: the sweep ended with status {result.status}: see summary.txt there")
    say(result.lines[0])


def profile_of_sweep(folder: Path, model: ModelSpec, which: str = "sweep", out: str | None = "profile") -> StepProfile:
    """``bullet-profile fit`` of a CPU's sweep: its files, and what they say."""
    from bullet.profiles.fit import Fitted
    from bullet.profiles.step_times import profile_of
    from bullet.profiles.sweeps import model_of, read_rows

    _, rows = model_of(read_rows(folder / which), None if model.name in MODELS else str(folder / MODEL_FILE), str(folder / which))
    profile = profile_of(rows, model)
    if out is not None:
        Fitted(profile, rows, model).write(folder / out)
    return profile


def fitting(names: Sequence[str], count: int, rate: float, left_s: float) -> tuple[Sequence[str], int]:
    """What ``left_s`` seconds allow: fewer requests for every policy, down to a few, then fewer policies.

    A run is taken to last half as long again as its arrivals: the last requests are still served then.
    """
    for kept in range(len(names), 0, -1):
        fit = int(rate * left_s / (1.5 * kept))
        if fit >= min(count, LEAST_REQUESTS):
            return names[:kept], min(count, fit)
    raise ProfileError(f"--budget-s: {max(left_s, 0):.0f} s are left after the step times (kept), too few for "
                       f"{min(count, LEAST_REQUESTS)} requests at {rate:.2f} req/s: give more, or a higher --rate")


LENGTHS = {True: ((16, 192), (2, 16)), False: ((128, 4096), (16, 256))}
"""Prompt and output lengths, drawn uniformly in the logarithm, on a CPU and on a GPU: synthetic."""


def synthetic(count: int, rate: float, cpu: bool, seed: int) -> str:
    """A trace: Poisson arrivals, log-uniform lengths."""
    rng = np.random.default_rng([seed, 0x7A])
    (p0, p1), (o0, o1) = LENGTHS[cpu]
    arrival = np.cumsum(rng.exponential(1 / rate, count))
    prompts = np.exp(rng.uniform(np.log(p0), np.log(p1), count)).astype(int)
    outputs = np.exp(rng.uniform(np.log(o0), np.log(o1), count)).astype(int)
    rows = [f"{a:.6f},{p},{o}" for a, p, o in zip(arrival, prompts, outputs, strict=True)]
    return "arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n"


def capacity(profile: StepProfile, cpu: bool) -> float:
    """Requests per second that the step times allow, decodes batched by four: for choosing a rate, never a result."""
    device = MeasuredDevice(profile, get_model_of(profile), get_gpu("a100-80gb"))
    (p0, p1), (o0, o1) = LENGTHS[cpu]
    prompt, output = round((p0 * p1) ** 0.5), round((o0 * o1) ** 0.5)
    whole = device.prefill_work([(prompt, 0)], device.model.num_layers, logits_seqs=1).seconds
    return 1.0 / (whole + output * device.decode_work(4, 4 * prompt).seconds / 4)


def get_model_of(profile: StepProfile) -> Any:
    """The built-in model of a profile, or the tiny one, whose layer count alone matters for whole steps."""
    try:
        return get_model(profile.model)
    except ConfigError:
        return get_model("tiny")


# ------------------------------------------------------------------------------------------------ simulated


def splits_of(profile: StepProfile, config: RunConfig) -> SplitTable:
    """The splits that the machine granted, or on one processor those of the nominal device."""
    granted = [sms for sms, _ in profile.decode_sms if sms < profile.num_sms]
    if granted:
        return SplitTable(profile.num_sms, np.array(granted, dtype=np.int64))
    return SplitTable.every(profile.num_sms, config.device.partition_step_sms)


def stored_steps(folder: Path) -> StepProfile:
    """The machine as the folder's step times have it: on a CPU from its sweep, on a GPU from the engine."""
    swept = folder / "profile" / "steps.json"
    return StepProfile.from_json(swept if swept.is_file() else folder / "steps.json")


def device_of(config: RunConfig, steps: StepProfile, given: Path | None) -> Device:
    """What simulates: the step times, or the folder of a fit that was given."""
    if given is not None:
        return load_device(dataclasses.replace(config.device, timing=str(given)))
    gpu = dataclasses.replace(get_gpu(config.device.gpu), num_sms=steps.num_sms)
    return MeasuredDevice(steps, get_model(config.device.model), gpu)


def conclude(folder: Path, given: Path | None = None, named: Sequence[str] = ()) -> list[str]:
    """Simulate the runs that :func:`measure` left in ``folder``, on the folder of a fit if one is ``given``. Returns the table's
    lines, which are also kept, as validation.txt and validation.json. ``named``: files of a user's own policies that may be run.
    """
    result = compare(folder, given, named)
    lines = table(result)
    write_json(folder / "validation.json", result)
    write_text(folder / "validation.txt", "\n".join(lines) + "\n")
    return lines


def compare(folder: Path, given: Path | None = None, named: Sequence[str] = ()) -> dict[str, Any]:
    """Simulate every real run of the folder on its profile; figures of both sides, and of steps by lane and SMs."""
    from bullet.sim.run import simulate

    real = sorted((folder / "real").glob("*/config.toml"))
    if not real:
        raise ResultsError(f"{folder}/real: holds no run: is it the folder of bullet-run validate?")
    measured = stored_steps(folder)
    runs, left_out, offered, seed, source = [], [], 0, 0, ""
    for path in real:
        stored = load_run(path.parent)
        if not stored.summary["complete"]:
            left_out.append(stored.config.policy.name)
            continue
        check_trusted(stored.config.policy.name, named, str(path), "--policies")
        offered, seed = stored.summary["offered"], stored.summary["seed"]
        config = here(load_run_config(path), folder)
        workload: Workload = load_workload(config.workload, config.seed)
        profile = measured.shown(get_gpu(config.device.gpu))
        device = device_of(config, profile, given)
        source = device.source
        gpu = dataclasses.replace(get_gpu(config.device.gpu), num_sms=profile.num_sms)
        policy = build_policy(config, get_model(config.device.model), gpu, splits_of(profile, config), device)
        outcome = simulate(config, workload=workload, device=device, policy=policy)
        summary = metrics.summarise(outcome)
        (folder / "sim").mkdir(exist_ok=True)
        write_json(folder / "sim" / f"{path.parent.name}.json", summary)
        runs.append({"policy": config.policy.name,
                     "figures": {title: [summary[key], stored.summary[key]] for title, key in FIGURES},
                     "prediction_error": [summary["prediction_error_mean"], stored.summary["prediction_error_mean"]],
                     "completed": [summary["completed"], stored.summary["completed"]],
                     "steps": step_rows(outcome.steps, stored.steps, device)})
    if not runs:
        raise ResultsError(f"{folder}/real: no run came to its end: bullet-run validate again, into another folder")
    return {"hardware": profile.hardware, "partition": profile.partition, "model": profile.model, "device": source,
            "known_by": known_by(folder, given), "requests": offered, "seed": seed, "left_out": left_out,
            "drift": found_drift(folder, config), "runs": runs}


def here(config: RunConfig, folder: Path) -> RunConfig:
    """A stored configuration with the folder's own trace and model: neither need be where they were when it was measured."""
    model = folder / MODEL_FILE
    return dataclasses.replace(
        config, workload=dataclasses.replace(config.workload, trace=str(folder / "trace.csv")),
        device=dataclasses.replace(config.device, model=str(model)) if model.is_file() else config.device)


def known_by(folder: Path, given: Path | None) -> str:
    """Through what the simulator knows the machine, for the table's head."""
    if given is not None:
        return f"the profile {given} alone"
    return "rows of its sweep alone, interpolated" if (folder / "profile").is_dir() else "its step times alone"


def found_drift(folder: Path, config: RunConfig) -> list[float] | None:
    """Of the step times after the runs, where they were taken."""
    before = stored_steps(folder)
    try:
        if (folder / "steps-after.json").is_file():
            return drift(before, StepProfile.from_json(folder / "steps-after.json"))
        if not (folder / "sweep-after").is_dir():
            return None
        return drift(before, profile_of_sweep(folder, get_model(config.device.model), "sweep-after", None))
    except ProfileError:  # cut short
        return None


def drift(before: StepProfile, after: StepProfile) -> list[float]:
    """Step times after the runs over those before, at the sizes that both have: median, least, greatest. What no simulation can
    know."""
    def times(profile: StepProfile) -> dict[tuple[int, ...], float]:
        decodes = {(b, c): s for b, row in zip(profile.batches, profile.decode_s, strict=True)
                   for c, s in zip(profile.contexts, row, strict=True)}
        return {**{(t,): s for t, s in zip(profile.prefill_tokens, profile.prefill_s, strict=True)}, **decodes}

    first, second = times(before), times(after)
    ratios = [second[size] / first[size] for size in first if size in second]
    if not ratios:
        raise ProfileError("drift: the step times before and after have no size in common")
    return [float(np.median(ratios)), min(ratios), max(ratios)]


def step_rows(simulated: StepTable, measured: StepTable, device: Device) -> list[dict[str, Any]]:
    """Steps by lane, SMs and whether anything ran beside them: counts and medians of both sides. For steps alone also the
    median error of the step times at the very work of each real step, as its row has it."""
    rows = []
    keys = sorted({(str(lane), int(sms), bool(beside)) for t in (simulated, measured)
                   for lane, sms, beside in zip(t["lane"], t["sms"], t["corun_s"] > 0, strict=True)})
    for lane, sms, beside in keys:
        sides = []
        for t in (simulated, measured):
            mask = (t["lane"] == lane) & (t["sms"] == sms) & ((t["corun_s"] > 0) == beside)
            sides.append({name: t[name][mask] for name in t.columns})
        errors = [] if beside else [same_work_s(device, lane, sms, sides[1], i) / sides[1]["actual_s"][i] - 1
                                    for i in range(len(sides[1]["sms"]))]
        medians = [float(np.median(side["actual_s"])) if len(side["sms"]) else None for side in sides]
        rows.append({"lane": lane, "sms": sms, "beside": beside, "count": [len(side["sms"]) for side in sides],
                     "median_s": medians, "same_work_error": float(np.median(errors)) if errors else None,
                     "same_work_abs_error": float(np.median(np.abs(errors))) if errors else None})
    return rows


def same_work_s(device: Device, lane: str, sms: int, side: Mapping[str, Any], i: int) -> float:
    """The step times' answer for one real step alone; a batch of prompts counts as one of their sum."""
    tokens, seqs, context = (int(side[name][i]) for name in ("prefill_tokens", "decode_seqs", "context_tokens"))
    layers, first = int(side["layers"][i]), int(side["first_layer"][i])
    pieces = [(tokens, 0)]
    if lane == "prefill":
        work = device.prefill_work(pieces, layers, logits_seqs=int(first + layers == device.model.num_layers))
    elif tokens:
        work = device.hybrid_work(pieces, seqs, context, logits_seqs=seqs + 1)
    else:
        work = device.decode_work(seqs, context)
    return device.solo_seconds(work, sms)


# ------------------------------------------------------------------------------------------------ the table


def _percent(simulated: float | None, measured: float | None) -> str:
    if simulated is None or not measured:
        return "-"
    return f"{100 * (simulated / measured - 1):+.0f} %"


def table(result: Mapping[str, Any]) -> list[str]:
    """Both sides as text, under 120 columns; says first on what it was measured."""
    lines = [f"Simulated against measured on {result['hardware']} (partition: {result['partition']}), {result['model']},",
             f"{result['requests']} synthetic requests, seed {result['seed']}; the simulator knows the machine by "
             f"{result['known_by']}", "", f"{'policy':<14} {'figure':<14} {'simulated':>10} {'measured':>10} {'error':>8}"]
    lines.append("-" * len(lines[-1]))
    for run in result["runs"]:
        for title, (simulated, measured) in run["figures"].items():
            lines.append(f"{run['policy']:<14} {title:<14} {cell_text(simulated, '.2f'):>10} {cell_text(measured, '.2f'):>10} "
                         f"{_percent(simulated, measured):>8}")
        if run["prediction_error"][1] is not None:
            cells = ("-" if v is None else f"{100 * v:.0f} %" for v in run["prediction_error"])
            lines.append(f"{run['policy']:<14} {'estimator err.':<14} " + " ".join(f"{c:>10}" for c in cells) + f" {'':>8}")
    if result["left_out"]:
        lines += ["", f"Left out, stopped before its end: {', '.join(result['left_out'])}"]
    lines += ["", "Steps by lane and SMs (the most frequent; median ms; same work: the step times at each real step's work)",
              f"{'policy':<14} {'lane':<8} {'SMs':>4} {'beside':<7} {'n sim':>6} {'n real':>6} {'sim':>8} {'real':>8} "
              f"{'error':>8} {'same work':>10}"]
    lines.append("-" * len(lines[-1]))
    for run in result["runs"]:
        for row in _frequent(run["steps"]):
            cells = ["-" if v is None else f"{v * 1e3:.2f}" for v in row["median_s"]]
            same = row["same_work_error"]
            lines.append(f"{run['policy']:<14} {row['lane']:<8} {row['sms']:>4} {'other' if row['beside'] else 'alone':<7} "
                         f"{row['count'][0]:>6} {row['count'][1]:>6} {cells[0]:>8} {cells[1]:>8} {_percent(*row['median_s']):>8} "
                         + (f"{100 * same:+.0f} %" if same is not None else "-").rjust(10))
    if result["drift"] is not None:
        median, least, greatest = result["drift"]
        lines += ["", f"The machine's own drift, step times after / before: median {median:.2f}, {least:.2f} to {greatest:.2f}"]
    return lines


def _frequent(rows: Sequence[dict[str, Any]], most: int = 4) -> list[dict[str, Any]]:
    return sorted(sorted(rows, key=lambda r: -sum(r["count"]))[:most], key=lambda r: (r["lane"], r["sms"], r["beside"]))
