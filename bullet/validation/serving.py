"""Simulated serving against figures that others measured, untuned: the shipped profile as it is, host time 0.

What runs is the ordinary simulator with the ordinary policies; :data:`ENGINES` says which policy and settings stand for which
engine, from the engines' and benchmarks' own documentation. Where a target is missed, :func:`explaining_gap` and
:func:`beyond_kernels` put figures to the cause: which exposed host time a step would explain the difference, and whether it is
the same at other batch sizes. These are diagnoses: nothing is set from them.

ShareGPT is simulated twice: *as shipped*, rows of the built-in trace that pass the benchmark's filter, and *as sent*, the same
rows drawn with weights such that the mean prompt and output are those that the benchmark's client reports
(:data:`SENT_MEANS`). The weights are exp(a prompt + b output), the least change that brings about two means. They follow from the
workload alone, and *as sent* is what the targets are held against: this was settled before the first run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet.catalog.gpus import get_gpu
from bullet.catalog.models import get_model
from bullet.config import KV_BLOCK_TOKENS, DeviceConfig, RunConfig, WorkloadConfig, load_run_config
from bullet.devices.fitted import DeviceModel
from bullet.devices.load import kv_capacity_tokens, load_fitted
from bullet.errors import ConfigError
from bullet.files import write_json, write_text
from bullet.results.columns import RunOutcome
from bullet.results.plots import plot_points, save
from bullet.units import GIB, MILLI
from bullet.validation import serving_points
from bullet.validation.serving_points import Point
from bullet.workload import Workload, load_builtin, stream
from bullet.workload.arrivals import draw_arrivals

Array = NDArray[np.float64]
MODEL = "llama-3.1-8b"
ROWS = "points.csv"
SEEDS = tuple(range(4))
"""Lengths and arrivals are drawn: means over these, fixed before the first run."""
SENT_MEANS = (1130466 / 5000, 971613 / 5000)
"""Mean prompt and output tokens of the benchmark's 5,000 ShareGPT requests, as SGLang's client printed them for Llama-3.1-8B
(sgl-project/sglang, issues of September 2024); 971,613 / 5,000 = 194.3 is also output / request throughput in its README."""
FILTER = "prompt 4 to 1,024, output 4 or more, both together 2,048 at most"
"""The benchmark's own."""
WORKLOADS: Mapping[str, tuple[str, ...]] = {
    "sharegpt": ("as sent", "as shipped"), "static": ("equal",), "constant": ("system prompt shared", "prompts repeat")}
"""Kind of point -> its workloads, the one that is judged first."""
WARM_UP = 0.25
"""Share of the requests of a constant-rate run that is left out while the batch fills."""
SYSTEM_PROMPT_BLOCKS = 6
"""Full KV blocks in the 100 tokens of system prompt that the constant-rate runs share."""
TARGETS = {"tpot": 0.10, "ttft": 0.20, "batch": 0.10}
"""Relative error aimed at; a static batch's time is nearly all TPOT."""


@dataclass(frozen=True)
class Engine:
    """Which policy and settings stand for an engine. ``memory``: share of the device's memory for weights and KV; ``reserve``:
    what of it is kept for activations. ``reported_only``: metrics that the model cannot be expected to meet, with the reason."""

    policy: str
    why: str
    memory: float = 0.9
    reserve_bytes: int = 2 * GIB
    options: Mapping[str, Any] = field(default_factory=dict)
    reported_only: Mapping[str, str] = field(default_factory=dict)


MULTI_STEP = "ten decode steps a schedule (--num-scheduler-steps 10) are not modelled"
ENGINES: Mapping[str, Engine] = {
    "SGLang 0.3.0": Engine("sglang-8192", "chunked_prefill_size 8192, its default; mem_frac 0.88; radix cache off; torch.compile",
                           0.88, 0),
    "vLLM 0.6.0": Engine("sglang-4096", "V0: whole prompts ahead of decodes, max_model_len = 4,096 tokens a step, 256 sequences",
                         options={"max_running_requests": 256},
                         reported_only={"ttft_p50": MULTI_STEP, "itl_p50": MULTI_STEP, "latency_p50": MULTI_STEP}),
    "vLLM CI 2024": Engine("vllm-8192", "benchmark_latency: one batch, 256 prompt tokens fit a step in any case"),
    "vLLM 2024": Engine("vllm-8192", "one batch at once; max_model_len 8,192 tokens a step, 256 sequences"),
    "TensorRT-LLM 2024": Engine("vllm-8192", "as vLLM: one batch at once"),
    "vLLM 0.15.1": Engine("vllm-{budget}", "V1: max_num_seqs 128, prefix cache, chunked prefill, asynchronous scheduling",
                          options={"max_num_seqs": 128, "prefix_cache": True, "admission": "check", "steps_in_flight": 2}),
}


def get_engine(point: Point) -> Engine:
    """The engine of a point; :class:`ConfigError` names those that are known."""
    if point.engine not in ENGINES:
        raise ConfigError(f"point {point.name!r}: unknown engine {point.engine!r}: allowed are {', '.join(ENGINES)}")
    return ENGINES[point.engine]


def build_device(point: Point, host_gap_s: float = 0.0) -> DeviceModel:
    """The shipped profile of the point's GPU, or the data sheet's, with a host gap for diagnosis."""
    device = load_fitted(DeviceConfig(model=point.model, gpu=point.gpu, tensor_parallel=point.tensor_parallel))
    coefficients = dataclasses.replace(device.coefficients, host_gap_s=device.coefficients.host_gap_s + host_gap_s)
    return DeviceModel(device.model, device.gpu, coefficients, tensor_parallel=point.tensor_parallel)


def run_config(point: Point, seed: int = 0) -> RunConfig:
    """The ordinary run configuration that stands for a point's engine."""
    engine = get_engine(point)
    memory = DeviceConfig(model=point.model, gpu=point.gpu, tensor_parallel=point.tensor_parallel,
                          memory_utilization=point.kv_share or engine.memory, reserve_bytes=engine.reserve_bytes)
    return load_run_config(None, {
        "workload.trace": "sharegpt", "workload.num_requests": None, "seed": seed,
        "device.gpu": point.gpu, "device.model": point.model, "device.tensor_parallel": point.tensor_parallel,
        "device.kv_tokens": kv_capacity_tokens(get_model(point.model), get_gpu(point.gpu), memory),
        "policy.name": engine.policy.format(budget=point.budget_tokens), "policy.options": dict(engine.options)})


# ------------------------------------------------------------------------------------------- workloads


def tilt(rows: NDArray[np.int64], means: tuple[float, float]) -> Array:
    """Weights exp(a x + b y), summing to 1, under which the two columns of ``rows`` (n, 2) have these means.

    Of all weights with these means they are the closest to equal ones (relative entropy). Newton's method on the convex dual.
    """
    target = np.asarray(means, dtype=float)
    if not (np.all(rows.min(axis=0) < target) and np.all(target < rows.max(axis=0))):
        raise ConfigError(f"means {means}: must lie inside the rows' own ranges")
    scale = rows.max(axis=0).astype(float)
    x, target = rows / scale, target / scale
    slope = np.zeros(2)

    def weights(at: Array) -> tuple[float, Array]:
        exponent = x @ at
        top = float(exponent.max())
        raw = np.exp(exponent - top)
        return top + float(np.log(raw.sum())) - float(at @ target), raw / raw.sum()

    value, found = weights(slope)
    for _ in range(100):
        mean = found @ x
        if np.abs(mean - target).max() < 1e-12:
            break
        spread = (x - mean).T @ ((x - mean) * found[:, None])
        step = np.linalg.solve(spread, target - mean)
        size = 1.0
        while (trial := weights(slope + size * step))[0] > value and size > 1e-6:
            size /= 2
        slope = slope + size * step
        value, found = trial
    return found


def sharegpt_rows() -> NDArray[np.int64]:
    """(prompt, output) of the built-in trace's rows that pass the benchmark's filter; shape (n, 2)."""
    table = load_builtin("sharegpt")
    prompt, output = table.prompt_tokens, table.output_tokens
    passes = (prompt >= 4) & (output >= 4) & (prompt <= 1024) & (prompt + output <= 2048)
    return np.stack([prompt[passes], output[passes]], axis=1)


def build_workload(point: Point, variant: str | None = None, seed: int = 0) -> Workload:
    """The requests of one run of a point; ``variant``: one of its kind's :data:`WORKLOADS`."""
    variant = variant or WORKLOADS[point.kind][0]
    assert variant in WORKLOADS[point.kind], variant
    if point.kind == "static":
        count, arrival_s = point.batch, np.zeros(point.batch)
        prompt, output = np.full(count, point.prompt_tokens), np.full(count, point.output_tokens)
        return Workload(point.name, "equal requests", arrival_s, prompt, output, float(point.prompt_tokens))
    count = point.requests
    if point.kind == "constant":
        arrival_s = np.arange(1, count + 1) / point.rate_req_per_s
        if variant == "prompts repeat":
            blocks = point.prompt_tokens // KV_BLOCK_TOKENS
            shared = {i: (i - point.distinct_prompts, blocks) for i in range(point.distinct_prompts, count)}
        else:
            shared = dict.fromkeys(range(1, count), (0, SYSTEM_PROMPT_BLOCKS))
        return Workload(point.name, f"equal requests, {variant}", arrival_s, np.full(count, point.prompt_tokens),
                        np.full(count, point.output_tokens), float(point.prompt_tokens), shared)
    rows = sharegpt_rows()
    weights = None if variant == "as shipped" else tilt(rows, SENT_MEANS)
    picked = rows[stream(seed, "lengths").choice(len(rows), count, p=weights)]
    arrival_s = draw_arrivals(WorkloadConfig("sharegpt", "poisson", point.rate_req_per_s), count, seed)
    return Workload("sharegpt", f"efeslab/Nanoflow, {FILTER}, {variant}", arrival_s, picked[:, 0], picked[:, 1],
                    float(rows[:, 0].mean()))


# ------------------------------------------------------------------------------------------- one run


def metrics_of(point: Point, outcome: RunOutcome) -> dict[str, float]:
    """What is compared, seconds; and ``batch_mean``: decodes in a step, met by the average token."""
    table = outcome.requests
    assert (table["status"] == "finished").all(), f"{point.name}: a request was refused"
    decodes = outcome.steps["decode_seqs"].astype(float)
    found = {"batch_mean": float((decodes**2).sum() / max(1.0, decodes.sum())),
             "prefill_share": float(np.sum(outcome.steps["end_s"] - outcome.steps["start_s"], where=decodes == 0)
                                    / outcome.span_s)}
    if point.kind == "static":
        found["batch"] = float(table["finish_s"].max())
        return found
    by_arrival = np.argsort(table["arrival_s"], kind="stable")
    if point.kind == "constant" and not point.whole:
        by_arrival = by_arrival[int(WARM_UP * len(by_arrival)):]
    first, last, arrival = (table[name][by_arrival] for name in ("first_token_s", "finish_s", "arrival_s"))
    output = table["output_tokens"][by_arrival]
    several = output > 1
    tpot = (last - first)[several] / (output[several] - 1)
    if point.kind == "constant":
        ttft_s, latency_s = float(np.mean(first - arrival)), float(np.mean(last - arrival))
        return {**found, "ttft_mean": ttft_s, "tpot_mean": float(np.mean(tpot)), "latency_mean": latency_s}
    order = np.argsort(outcome.itl_s)
    tokens = np.cumsum(outcome.itl_counts[order])
    itl_s = float(outcome.itl_s[order][np.searchsorted(tokens, tokens[-1] / 2)])
    return {**found, "ttft_p50": float(np.median(first - arrival)), "tpot_p50": float(np.median(tpot)), "itl_p50": itl_s,
            "latency_p50": float(np.median(last - arrival))}


def simulate_point(point: Point, variant: str | None = None, seed: int = 0, host_gap_s: float = 0.0) -> dict[str, float]:
    """One simulated run of a point: metric -> seconds."""
    from bullet.sim.run import simulate

    outcome = simulate(run_config(point, seed), workload=build_workload(point, variant, seed),
                       device=build_device(point, host_gap_s))
    return metrics_of(point, outcome)


# ------------------------------------------------------------------------------------------- comparing


def judged(point: Point, metric: str) -> float | None:
    """The relative error aimed at, or ``None``: a figure that is only reported."""
    if metric in get_engine(point).reported_only:
        return None
    return TARGETS.get(metric.split("_", maxsplit=1)[0])


def seeds_of(point: Point) -> tuple[int, ...]:
    """Only ShareGPT's lengths and arrivals are drawn."""
    return SEEDS if point.kind == "sharegpt" else SEEDS[:1]


def compare(point: Point, tick: Callable[[int], None]) -> dict[str, Any]:
    """One point: measured, simulated on each of its workloads (mean and spread over seeds), errors and the explaining gap."""
    variants = {}
    for variant in WORKLOADS[point.kind]:
        runs = []
        for seed in seeds_of(point):
            runs.append(simulate_point(point, variant, seed))
            tick(1)
        mean = {m: float(np.mean([r[m] for r in runs])) for m in runs[0]}
        spread = {m: float(np.std([r[m] for r in runs], ddof=1)) if len(runs) > 1 else 0.0 for m in point.measured}
        variants[variant] = {"simulated_s": {m: mean[m] for m in point.measured}, "spread_s": spread,
                             "batch_mean": mean["batch_mean"],
                             "error": {m: mean[m] / measured_s - 1 for m, measured_s in point.measured.items()}}
    return {"point": point.name, "kind": point.kind, "engine": point.engine, "gpu": point.gpu, "source": point.source,
            "licensed": point.licensed, "batch": point.batch, "prompt_tokens": point.prompt_tokens,
            "output_tokens": point.output_tokens, "model": point.model,
            "group": "" if point.licensed else serving_points.group_of(point), "policy": run_config(point).policy.name,
            "kv_tokens": run_config(point).device.kv_tokens, "device": build_device(point).source,
            "measured_s": dict(point.measured), "workloads": variants,
            "target": {m: judged(point, m) for m in point.measured},
            "diagnosis": explaining_gap(point, variants, tick) if diagnosed(point) else {}}


def diagnosed(point: Point) -> bool:
    """The profiles' own model on one GPU: elsewhere host time is not the first cause to look for."""
    return point.model == MODEL and point.tensor_parallel == 1


def explaining_gap(point: Point, variants: Mapping[str, Any], tick: Callable[[int], None]) -> dict[str, float]:
    """Host time a step, added on top, with which the simulation would take as long as was measured; seconds.

    A static batch: the difference over its steps, exactly. Served requests: from a second run with 1 ms, linearly, since slower
    steps mean more requests at once; and what TTFT would be on the same line. Negative: the simulation is too slow already.
    """
    simulated = variants[WORKLOADS[point.kind][0]]["simulated_s"]
    if point.kind == "static":
        return {"gap_s": (point.measured["batch"] - simulated["batch"]) / max(1, point.output_tokens)}
    tpot, ttft = (next(m for m in point.measured if m.startswith(kind)) for kind in ("tpot", "ttft"))
    step_s = MILLI
    base, slower = (simulate_point(point, seed=SEEDS[0], host_gap_s=s) for s in (0.0, step_s))
    tick(2)
    gap_s = (point.measured[tpot] - base[tpot]) / (slower[tpot] - base[tpot]) * step_s
    ttft_s = base[ttft] + (slower[ttft] - base[ttft]) * gap_s / step_s
    return {"gap_s": gap_s, "ttft_at_gap_s": ttft_s, "ttft_left_s": point.measured[ttft] - ttft_s}


def runs_of(points: Sequence[Point]) -> int:
    """How many simulations :func:`validate` makes."""
    return sum(len(WORKLOADS[p.kind]) * len(seeds_of(p)) + (2 if diagnosed(p) and p.kind != "static" else 0) for p in points)


def validate(points: Sequence[Point], progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Every point compared, and what the static batches say of a step's cost beyond the kernels."""
    found = [compare(point, progress or (lambda _: None)) for point in points]
    engines = {p.engine: dataclasses.asdict(get_engine(p)) for p in points}
    return {"target": "serving", "model": MODEL, "fitted": "nothing", "seeds": list(SEEDS), "aims": TARGETS,
            "sharegpt": {"filter": FILTER, "as_sent_mean_tokens": SENT_MEANS}, "engines": engines, "points": found,
            "beyond_kernels_s": beyond_kernels(found), "groups": groups(found)}


def groups(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Of the points that are not shipped: group -> workload -> points, median absolute error of TTFT and TPOT, and the median of
    what TTFT lacks, in seconds. Which workload was sent is not known beyond doubt, so each has its own."""
    by: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for row in found:
        if row["group"]:
            for name, variant in row["workloads"].items():
                error, ttft_s = variant["error"], row["measured_s"]["ttft_mean"]
                by.setdefault(row["group"], {}).setdefault(name, []).append(
                    (abs(error["ttft_mean"]), abs(error["tpot_mean"]), -error["ttft_mean"] * ttft_s))
    return {group: {name: {"points": len(rows), **dict(zip(("ttft", "tpot", "ttft_lacks_s"), map(
        float, np.median(rows, axis=0)), strict=True))} for name, rows in variants.items()} for group, variants in by.items()}


def beyond_kernels(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Static batches: measured less simulated seconds an output token, by engine and GPU, by batch; the mean over lengths.

    2,048 tokens are left out (a 40 GB cache does not hold 64 of them, so both sides schedule), and batches of one token.
    """
    by: dict[str, dict[int, list[float]]] = {}
    for row in found:
        if row["kind"] == "static" and 1 < row["output_tokens"] <= 1024:
            batches = by.setdefault(f"{row['engine']}, {row['gpu']}", {})
            batches.setdefault(row["batch"], []).append(row["diagnosis"]["gap_s"])
    return {name: {str(batch): float(np.mean(gaps)) for batch, gaps in sorted(batches.items())} for name, batches in by.items()}


# ------------------------------------------------------------------------------------------- printing


def table(v: Mapping[str, Any]) -> str:
    """Everything in one page of text; milliseconds."""
    sources = sorted({row["source"] for row in v["points"]})
    lines = [f"{MODEL} where no other model is named: served as measured by others, and simulated. Nothing is fitted or tuned; "
             "host time 0.",
             *(f"measured {i}: {source}" for i, source in enumerate(sources, 1)),
             *(f"simulated: device {gpu}: {source}" for gpu, source in sorted({(r['gpu'], r['device']) for r in v["points"]})),
             *(f"simulated: {name} as {e['policy']} ({e['why']})" for name, e in v["engines"].items()),
             f"ShareGPT: {FILTER}; as sent: mean prompt and output {SENT_MEANS[0]:.1f} and {SENT_MEANS[1]:.1f}; means over "
             f"{len(SEEDS)} seeds",
             f"aims: TPOT and the time of a static batch within {TARGETS['tpot']:.0%}, TTFT within {TARGETS['ttft']:.0%}; "
             "-: reported only", "",
             f"{'':<48}{'':<22}{'':>4}{'measured':>10}{'simulated':>11}{'spread':>8}{'error':>9}{'aim':>8}",
             f"{'point':<48}{'workload':<22}{'':>4}{'ms':>10}{'ms':>11}{'ms':>8}{'%':>9}"]
    for row in v["points"]:
        for variant, found in row["workloads"].items():
            first = variant == next(iter(row["workloads"]))
            for metric, measured_s in row["measured_s"].items():
                error, aim = found["error"][metric], row["target"][metric] if first else None
                verdict = "-" if aim is None else "met" if abs(error) <= aim else "missed"
                static = row["kind"] == "static"
                name = row["point"] if static else f"{row['point']} {metric}"
                spread = f"{found['spread_s'][metric] * 1e3:.2f}" if row["kind"] == "sharegpt" else ""
                lines.append(f"{name:<48}{'' if static else variant:<22}{sources.index(row['source']) + 1:>3} "
                             f"{measured_s * 1e3:>10,.2f}{found['simulated_s'][metric] * 1e3:>11,.2f}{spread:>8}"
                             f"{error * 100:>+9.1f}{verdict:>8}")
    return "\n".join([*lines, "", *_groups(v), *_diagnosis(v)]) + "\n"


def _groups(v: Mapping[str, Any]) -> list[str]:
    if not v["groups"]:
        return []
    rows = [f"  {f'{group}, {name}':<66}{one['points']:>4}{one['ttft'] * 100:>8.1f}{one['tpot'] * 100:>8.1f}"
            f"{one['ttft_lacks_s'] * 1e3:>+14.1f}" for group, variants in v["groups"].items() for name, one in variants.items()]
    head = f"{'points that are not shipped: medians of absolute errors, %':<72}{'TTFT':>8}{'TPOT':>8}{'TTFT lacks, ms':>16}"
    return [head, *rows, ""]


def _diagnosis(v: Mapping[str, Any]) -> list[str]:
    lines = ["where the differences lie (simulated against measured; not used for anything)",
             f"{'host time a step that would explain TPOT':<46}{'sequences':>10}{'ms':>8}{'TTFT then':>11}{'TTFT left':>11}"]
    for row in v["points"]:
        d = row["diagnosis"]
        if row["kind"] != "static" and d:
            found = next(iter(row["workloads"].values()))
            numbers = f"{d['gap_s'] * 1e3:>8.2f}{d['ttft_at_gap_s'] * 1e3:>11.1f}{d['ttft_left_s'] * 1e3:>11.1f}"
            lines.append(f"  {row['point']:<44}{found['batch_mean']:>10.1f}{numbers}")
    lines.append("measured less simulated, ms a step of a static batch, by sequences (to 1,024 tokens)")
    for name, batches in v["beyond_kernels_s"].items():
        lines.append(f"  {name:<30}" + "".join(f"{f'{batch}: {gap_s * 1e3:+.2f}':>12}" for batch, gap_s in batches.items()))
    return lines


def write(folder: Path, v: Mapping[str, Any]) -> str:
    """validate.json, validate.txt and points.csv. Returns the text."""
    text = table(v)
    write_json(folder / "validate.json", v)
    write_text(folder / "validate.txt", text)
    rows = ["point,engine,gpu,workload,metric,measured_s,simulated_s,error"]
    for row in v["points"]:
        for variant, found in row["workloads"].items():
            rows += [f"{row['point']},{row['engine']},{row['gpu']},{variant},{metric},{measured_s:.7g},"
                     f"{found['simulated_s'][metric]:.7g},{found['error'][metric]:.5f}"
                     for metric, measured_s in row["measured_s"].items()]
    write_text(folder / ROWS, "\n".join(rows) + "\n")
    return text


def draw(folder: Path, v: Mapping[str, Any]) -> None:
    """validate.png."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in v["points"]:
        found = next(iter(row["workloads"].values()))
        for metric, measured_s in row["measured_s"].items():
            kind = "batch seconds" if metric == "batch" else metric.split("_")[0].upper()
            if kind in ("TTFT", "TPOT", "batch seconds") and metric not in v["engines"][row["engine"]]["reported_only"]:
                groups.setdefault(f"{kind}, {row['gpu']}", []).append((measured_s, found["simulated_s"][metric]))
    save(plot_points(groups, f"{MODEL}: measured by others and simulated, nothing fitted"), folder / "validate.png")
