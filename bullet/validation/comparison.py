"""Simulated against measured: a recorded run of a real engine, replayed by the ordinary simulator.

Everything here is either *measured* (the recorded run) or *simulated* (ours, and the peer simulator's published figures), and
every table says which. Kernel times are measured tables, the scheduler is what the engine does, the host costs nothing. Two
lines are given:

- **tables alone**: nothing is fitted;
- **in full**: with the publisher's own times of unequal contexts (:mod:`bullet.devices.table_skew`) and one factor for
  CUDA graphs and compilation, which the tables were measured without. The factor is what makes the mean TPOT of the first 30
  requests, in the run with arrivals as sent, the measured one (:mod:`bullet.validation.calibration`). So all other requests are
  out of sample.

A system that runs with a full KV cache is chaotic: a request that arrives milliseconds later shifts preemptions, and they
shift everything after. So one replay's errors are luck within some per cent. What is judged is the mean of each statistic
over replays whose arrivals are moved by up to 20 ms each (seeds 0 .. 7, fixed before the first run), and its spread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bullet.config import KV_BLOCK_TOKENS
from bullet.errors import ProfileError
from bullet.files import write_json, write_text
from bullet.results.plots import plot_validation, save
from bullet.validation.calibration import LEFT_OUT, OTHER_CHOICES, Calibration, calibrate
from bullet.validation.recorded import METRICS, NAMES, Array, Recorded
from bullet.validation.replay import JITTER_S, JITTER_SEEDS, Replay, Scenario, graph_tokens, replay, run_config

ROWS = "requests.csv"


def errors(simulated: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Relative errors, signed."""
    return {name: simulated[name] / measured[name] - 1 for name in NAMES}


def worst(found: Mapping[str, float]) -> tuple[str, float]:
    """The statistic with the largest error, and the error."""
    name = max(found, key=lambda n: abs(found[n]))
    return name, found[name]


def mean_absolute(found: Mapping[str, float]) -> float:
    """Mean of the absolute errors."""
    return float(np.mean([abs(e) for e in found.values()]))


def average(replays: Sequence[Replay], first: int = 0) -> dict[str, float]:
    """Mean of each statistic over replays, from request ``first`` on."""
    each = [r.statistics(first) for r in replays]
    return {name: float(np.mean([s[name] for s in each])) for name in NAMES}


def series_errors(recorded: Recorded, run: Replay) -> dict[str, float]:
    """Mean absolute difference of the running and waiting counts at the recorded seconds, and the recorded means."""
    found: dict[str, float] = {}
    at = np.searchsorted(run.series["t"], recorded.series["t"], side="right") - 1
    done = recorded.series["t"] > run.last_s.max()
    for name in ("running", "waiting"):
        ours = np.where(done | (at < 0), 0.0, run.series[name][np.maximum(at, 0)])
        found[f"{name}_mean_measured"] = float(recorded.series[name].mean())
        found[f"{name}_mean_simulated"] = float(ours.mean())
        found[f"{name}_mean_absolute_difference"] = float(np.abs(ours - recorded.series[name]).mean())
    return found


def request_errors(recorded: Recorded, run: Replay) -> dict[str, Array]:
    """Signed relative error of each request's TTFT, TPOT and latency."""
    ours, real = run.per_request(), recorded.per_request()
    return {metric: ours[metric] / real[metric] - 1 for metric in METRICS}


# ------------------------------------------------------------------------------------------- the whole of it


@dataclass(frozen=True)
class Validation:
    """``one``: the run with arrivals as sent; ``moved``: those with moved arrivals, both in full; ``summary``: all figures."""

    recorded: Recorded
    one: Replay
    moved: Sequence[Replay]
    summary: Mapping[str, Any]


def runs_of(seeds: int, ingredients: Sequence[Scenario]) -> int:
    """How often :func:`validate` reports progress."""
    return 1 + len(OTHER_CHOICES) + 2 * (1 + seeds) + (seeds * (3 + len(ingredients)) if ingredients else 0)


def validate(recorded: Recorded, *, seeds: Sequence[int] = JITTER_SEEDS, ingredients: Sequence[Scenario] = (),
             progress: Callable[[int], None] | None = None) -> Validation:
    """Take the graph factor; replay once, and once per seed with moved arrivals, in full and on the tables alone; then each
    ingredient's variant with the same seeds: in full but for that."""
    def run(scenario: Scenario, seed: int | None) -> Replay:
        found = replay(recorded, scenario, seed)
        if progress is not None:
            progress(1)
        return found

    def factor_of(requests: int | None) -> Calibration:
        found = calibrate(recorded, requests or len(recorded))
        if progress is not None:
            progress(1)
        return found

    graphs = factor_of(LEFT_OUT)
    others = [(n, factor_of(n)) for n in OTHER_CHOICES if n is None or n < len(recorded)]
    plain, engine = Scenario(), Scenario("in full", skew=True, graph_factor=graphs.factor)
    alone = run(plain, None), [run(plain, seed) for seed in seeds]
    one, moved = run(engine, None), [run(engine, seed) for seed in seeds]
    if ingredients:
        ingredients = (dataclasses.replace(engine, name="without skew", skew=False),
                       dataclasses.replace(engine, name="without the graph factor", graph_factor=1.0),
                       dataclasses.replace(plain, name="without both: tables alone"),
                       *(dataclasses.replace(s, skew=True, graph_factor=graphs.factor) for s in ingredients))
    variants = []
    for scenario in ingredients:
        try:
            variants.append(_variant(recorded, scenario.name, [run(scenario, seed) for seed in seeds]))
        except ProfileError as exc:
            variants.append({"name": scenario.name, "refused": str(exc)})
    off = request_errors(recorded, one)
    summary = {
        "target": recorded.target, "gpu": recorded.gpu, "model": recorded.model, "requests": len(recorded),
        "sources": {"measured": recorded.source, "simulated": one.device_source,
                    "peer": "simulated by LLMServingSim, as its authors publish it"},
        "policy": run_config(recorded, engine).policy.name, "policy_options": dict(run_config(recorded, engine).policy.options),
        "kv_blocks": run_config(recorded, engine).device.kv_tokens // KV_BLOCK_TOKENS,  # type: ignore[operator]
        "graph_factor": {
            "factor": graphs.factor, "from_first": LEFT_OUT, "standard_error": graphs.standard_error, "runs": graphs.runs,
            "up_to_tokens": graph_tokens(recorded),
            "other_choices": [{"from": "all, circular" if n is None else f"first {n}", "factor": c.factor,
                               "standard_error": c.standard_error} for n, c in others]},
        "assumed": list(recorded.assumed), "host_overhead_s": 0.0, "jitter_s": JITTER_S, "jitter_seeds": list(seeds),
        "statistics": _comparison(recorded, one, moved, 0),
        f"statistics_without_first_{LEFT_OUT}": _comparison(recorded, one, moved, LEFT_OUT),
        "tables_alone": {"simulated": alone[0].device_source, "statistics": _comparison(recorded, *alone, 0),
                         f"statistics_without_first_{LEFT_OUT}": _comparison(recorded, *alone, LEFT_OUT)},
        "runs": [{"jitter_seed": seed, "steps": r.steps, "preemptions": r.preemptions, "recomputed_tokens": r.recomputed_tokens}
                 for seed, r in zip((None, *seeds), (one, *moved), strict=True)],
        "request_errors": {m: {"median_absolute": float(np.median(np.abs(e))), "p90_absolute": float(
            np.percentile(np.abs(e), 90)), "largest_absolute": float(np.abs(e).max())} for m, e in off.items()},
        "counts": series_errors(recorded, one),
        "ingredients": variants,
    }
    return Validation(recorded, one, moved, summary)


def _comparison(recorded: Recorded, one: Replay, moved: Sequence[Replay], first: int) -> dict[str, Any]:
    """Measured, one run, mean and spread over runs, errors; seconds and fractions."""
    real, single = recorded.statistics(first), one.statistics(first)
    found: dict[str, Any] = {"measured_s": real, "one_run_s": single, "one_run_error": errors(single, real)}
    sums = [("one_run", found["one_run_error"])]
    if moved:
        each = [r.statistics(first) for r in moved]
        found["mean_s"] = average(moved, first)
        found["mean_error"] = errors(found["mean_s"], real)
        found["spread_s"] = {n: float(np.std([s[n] for s in each], ddof=min(1, len(each) - 1))) for n in NAMES}
        found["largest_error_of_each"] = [dict(zip(("statistic", "error"), worst(errors(s, real)), strict=True)) for s in each]
        found["mean_absolute_error_of_each"] = [mean_absolute(errors(s, real)) for s in each]
        sums.append(("mean", found["mean_error"]))
    if not first and recorded.peer:
        peer = {n: recorded.peer[n]["peer_simulated_ms"] / recorded.peer[n]["measured_ms"] - 1 for n in NAMES}
        found["peer_error"] = peer
        sums.append(("peer", peer))
    for name, error in sums:
        found[f"{name}_largest"] = dict(zip(("statistic", "error"), worst(error), strict=True))
        found[f"{name}_mean_absolute"] = mean_absolute(error)
    return found


def _variant(recorded: Recorded, name: str, runs: Sequence[Replay]) -> dict[str, Any]:
    error = errors(average(runs), recorded.statistics())
    statistic, largest = worst(error)
    return {"name": name, "largest_statistic": statistic, "largest_error": largest, "mean_absolute_error": mean_absolute(error),
            "errors": error, "preemptions": float(np.mean([r.preemptions for r in runs])),
            "recomputed_tokens": float(np.mean([r.recomputed_tokens for r in runs]))}


# ------------------------------------------------------------------------------------------- printing


def label(name: str) -> str:
    """``ttft_p50`` as it is printed."""
    metric, statistic = name.split("_")
    return f"{metric.upper() if metric != 'latency' else 'Latency'} {statistic if statistic == 'mean' else statistic.upper()}"


def table(v: Validation) -> str:
    """Everything in one page of text."""
    s = v.summary
    count = len(v.moved)
    settings = v.recorded.settings
    lines = [
        f"{s['target']}: {s['requests']} requests, {s['model']}, vLLM {settings['vllm_version']} on "
        f"{v.recorded.tables.tensor_parallel if v.recorded.tables.tensor_parallel > 1 else 'one'} {v.recorded.device_name}",
        f"measured:  {s['sources']['measured']}",
        f"simulated: {s['policy']} with " + ", ".join(f"{k}={x}" for k, x in s["policy_options"].items())
        + f", {s['kv_blocks']} KV blocks, host overhead 0",
        f"           device {s['sources']['simulated']}",
        *([f"assumed:   {'; '.join(s['assumed'])}"] if s["assumed"] else []),
        *([f"peer:      {s['sources']['peer']}"] if v.recorded.peer else []), "", *_factor_lines(s["graph_factor"])]
    without = f"statistics_without_first_{LEFT_OUT}"
    for title, found in (("IN FULL: tables, longest context as published, graph factor of the first 30 requests", s),
                         ("TABLES ALONE: nothing fitted", s["tables_alone"])):
        lines += ["", title, "", *_statistics_table(found["statistics"], count, f"all {s['requests']} requests"),
                  "", *_statistics_table(found[without], count, f"without the first {LEFT_OUT} requests")]
    lines += ["", "single requests, one run: absolute error of simulated against measured, %",
              f"  {'':<10}{'median':>8}{'P90':>8}{'largest':>9}"]
    for metric, e in s["request_errors"].items():
        name = label(f"{metric}_mean").split()[0]
        lines.append(f"  {name:<10}{e['median_absolute'] * 100:>8.2f}{e['p90_absolute'] * 100:>8.2f}"
                     f"{e['largest_absolute'] * 100:>9.1f}")
    counts = s["counts"]
    lines += ["", "requests at each recorded second, one run",
              f"  {'':<10}{'measured':>10}{'simulated':>11}{'mean |difference|':>19}"]
    for name in ("running", "waiting"):
        lines.append(f"  {name:<10}{counts[f'{name}_mean_measured']:>10.2f}{counts[f'{name}_mean_simulated']:>11.2f}"
                     f"{counts[f'{name}_mean_absolute_difference']:>19.2f}")
    runs = s["runs"]
    lines += ["", f"simulated, one run: {runs[0]['steps']:,} steps, {runs[0]['preemptions']} preemptions, "
                  f"{runs[0]['recomputed_tokens']:,} tokens computed again"]
    if s["ingredients"]:
        lines += ["", *_ingredients_table(s, count)]
    return "\n".join(lines) + "\n"


def _factor_lines(g: Mapping[str, Any]) -> list[str]:
    def text(factor: float, error: float) -> str:
        return f"{factor:.4f} (standard error {error:.4f})"

    others = "; ".join(f"{o['from']}: {text(o['factor'], o['standard_error'])}" for o in g["other_choices"])
    return [f"graph factor on steps of up to {g['up_to_tokens']} tokens: {text(g['factor'], g['standard_error'])}",
            f"  fitted: the mean TPOT of the first {g['from_first']} requests is then the measured one ({g['runs']} runs);",
            f"  so only the statistics without the first {g['from_first']} are out of sample",
            f"  from other requests, used for nothing: {others}"]


def _statistics_table(c: Mapping[str, Any], count: int, title: str) -> list[str]:
    times, errors_of = [("measured", "measured_s"), ("simulated", "one_run_s")], [("one run", "one_run")]
    if count:
        times += [(f"mean of {count}", "mean_s"), ("spread", "spread_s")]
        errors_of.append((f"mean of {count}", "mean"))
    if "peer_error" in c:
        errors_of.append(("peer", "peer"))
    heads = [f"{title:<34}", *(head for head, _ in times + errors_of)]
    units = [" " * 34, *["ms"] * len(times), *["error %"] * len(errors_of)]
    lines = ["".join(f"{x:>11}" for x in row) for row in (heads, units)]
    for name in NAMES:
        digits = 1 if name.startswith("tpot") else 0
        lines.append(f"  {label(name):<32}" + "".join(f"{c[key][name] * 1e3:>11,.{digits}f}" for _, key in times)
                     + "".join(f"{c[f'{who}_error'][name] * 100:>+11.2f}" for _, who in errors_of))
    room = " " * (11 * len(times))
    return [*lines, f"  {'largest':<32}{room}" + "".join(f"{c[f'{who}_largest']['error'] * 100:>+11.2f}" for _, who in errors_of),
            f"  {'mean absolute':<32}{room}" + "".join(f"{c[f'{who}_mean_absolute'] * 100:>11.2f}" for _, who in errors_of)]


def _ingredients_table(s: Mapping[str, Any], count: int) -> list[str]:
    lines = [f"one thing left out or changed (simulated; error of the mean over {count} runs against measured, %)",
             f"  {'':<48}{'TTFT mean':>10}{'TPOT mean':>10}{'TPOT P90':>10}{'largest':>10}  {'of':<14}{'mean abs.':>9}"
             f"{'preempt.':>10}"]
    c = s["statistics"]
    whole = {"name": "in full", "errors": c["mean_error"], "largest_error": c["mean_largest"]["error"],
             "largest_statistic": c["mean_largest"]["statistic"], "mean_absolute_error": c["mean_mean_absolute"],
             "preemptions": float(np.mean([r["preemptions"] for r in s["runs"][1:]]))}
    for v in (whole, *s["ingredients"]):
        if "refused" in v:
            lines.append(f"  {v['name']:<48}not simulated: {v['refused']}")
            continue
        e = v["errors"]
        lines.append(f"  {v['name']:<48}" + "".join(f"{e[n] * 100:>+10.2f}" for n in ("ttft_mean", "tpot_mean", "tpot_p90"))
                     + f"{v['largest_error'] * 100:>+10.2f}  {label(v['largest_statistic']):<14}"
                     f"{v['mean_absolute_error'] * 100:>9.2f}{v['preemptions']:>10.0f}")
    return lines


def write(folder: Path, v: Validation) -> str:
    """validate.json, validate.txt and the requests of the one run beside the recorded ones. Returns the text."""
    text = table(v)
    write_json(folder / "validate.json", v.summary)
    write_text(folder / "validate.txt", text)
    r, one = v.recorded, v.one
    real, ours = r.per_request(), one.per_request()
    rows = ["id,prompt_tokens,output_tokens," + ",".join(f"{who}_{m}_s" for m in METRICS for who in ("measured", "simulated"))]
    for i in range(len(r)):
        numbers = ",".join(f"{x[m][i]:.6f}" for m in METRICS for x in (real, ours))
        rows.append(f"{i},{r.prompt_tokens[i]},{r.output_tokens[i]},{numbers}")
    write_text(folder / ROWS, "\n".join(rows) + "\n")
    return text


def draw(folder: Path, v: Validation) -> None:
    """validate.png."""
    r, one = v.recorded, v.one
    real, ours = r.per_request(), one.per_request()
    figure = plot_validation({"measured": real, "simulated": ours}, {"measured": r.series, "simulated": one.series},
                             f"{r.target}, {r.model}: measured and simulated (one run, in full)")
    save(figure, folder / "validate.png")
