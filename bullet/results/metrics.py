"""Requests to TTFT, TPOT, ITL, throughput, attainment and goodput. From timestamps only.

TTFT = first token - arrival. TPOT = (last - first token) / (output - 1): waits between tokens count; one-token outputs
meet any TPOT objective and are left out of its mean. Rejected requests count as missed objectives. Throughput =
finished / (last finish - first arrival), drain included. Goodput = highest rate with attainment >= 0.9. Latencies are of
finished requests; what is undefined (no request finished) is ``None``, null in JSON, never NaN.

Source: whatever the outcome's ``source`` says; a figure is as good as the timestamps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullet.results.columns import RequestTable, RunOutcome, StepTable
from bullet.workload.cuts import counted_from

Array = NDArray[np.float64]
READINGS = ("per_request", "mean_length")
PERCENTILES = (50, 90, 95, 99)


def ttft_s(requests: RequestTable) -> Array:
    """Of finished requests, shape (finished,)."""
    done = requests["status"] == "finished"
    return np.asarray((requests["first_token_s"] - requests["arrival_s"])[done])


def tpot_s(requests: RequestTable) -> Array:
    """Of finished requests with more than one output token."""
    many = (requests["status"] == "finished") & (requests["output_tokens"] > 1)
    return np.asarray(_seconds_per_token(requests)[many])


def _seconds_per_token(requests: RequestTable) -> Array:
    """After the first; shape (offered,), of one-token outputs without meaning."""
    return np.asarray((requests["finish_s"] - requests["first_token_s"]) / np.maximum(1, requests["output_tokens"] - 1))


def e2e_s(requests: RequestTable) -> Array:
    """Last token - arrival of finished requests."""
    done = requests["status"] == "finished"
    return np.asarray((requests["finish_s"] - requests["arrival_s"])[done])


def attained(requests: RequestTable, reading: str, tpot_slo_s: float) -> NDArray[np.bool_]:
    """Whether each request met both objectives; shape (offered,). Rejected and unfinished ones did not."""
    first_in_time = requests["first_token_s"] - requests["arrival_s"] <= requests[f"ttft_slo_{reading}_s"]
    rest_in_time = (requests["output_tokens"] <= 1) | (_seconds_per_token(requests) <= tpot_slo_s)
    return np.asarray((requests["status"] == "finished") & first_in_time & rest_in_time)


def weighted_percentile(values: Array, counts: NDArray[np.int64], percent: float) -> float | None:
    """Percentile of values that stand ``counts`` times each, as ``np.percentile`` of them written out would give it."""
    total = int(counts.sum())
    if total == 0:
        return None
    order = np.argsort(values, kind="stable")
    upto = np.cumsum(counts[order])
    place = (total - 1) * percent / 100
    low = int(place)
    below, above = values[order][np.searchsorted(upto, (low, min(low + 1, total - 1)), side="right")].tolist()
    return float(below + (above - below) * (place - low))


def goodput(rates: Sequence[float], attainments: Sequence[float], goal: float = 0.9) -> float | None:
    """Highest rate with attainment >= ``goal``, linear between measured rates; ``None`` if none reaches it.

    Where the highest measured rate still reaches it, that rate: a lower bound. Where attainment falls under the goal and
    rises again, the last crossing counts, as the definition says.
    """
    assert len(rates) == len(attainments), f"{len(rates)} rates, {len(attainments)} attainments"
    order = np.argsort(rates)
    x, y = np.asarray(rates, dtype=float)[order], np.asarray(attainments, dtype=float)[order]
    reached = np.flatnonzero(y >= goal)
    if not len(reached):
        return None
    i = int(reached[-1])
    if i == len(x) - 1:
        return float(x[i])
    return float(x[i] + (x[i + 1] - x[i]) * (y[i] - goal) / (y[i] - y[i + 1]))


def _statistics(name: str, values: Array) -> dict[str, float | None]:
    """mean, median, std and percentiles in ms, named as vLLM's and SGLang's serving benchmarks name them."""
    if not len(values):
        return {f"{part}_{name}_ms": None for part in ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES[1:]))}
    milli = values * 1e3
    result: dict[str, float | None] = {f"mean_{name}_ms": float(milli.mean()), f"std_{name}_ms": float(milli.std())}
    for percent, value in zip(PERCENTILES, np.percentile(milli, PERCENTILES), strict=True):
        result["median_" + name + "_ms" if percent == 50 else f"p{percent}_{name}_ms"] = float(value)
    return result


def summarise(outcome: RunOutcome) -> dict[str, Any]:
    """All figures of a run that do not depend on the machine it ran on; docs/results.md says what each one is.

    Names, units (ms, per second) and percentiles (linear, as ``np.percentile``) are those of the serving benchmarks of
    vLLM and SGLang where they have the figure. Equal outcomes give equal dictionaries, in equal order.

    With ``workload.warmup`` the requests of the start are left out of everything that is counted of requests, and the steps that
    began before the first of the others arrived of what is counted of steps; gaps between tokens are not kept by request, so
    their figures are ``None``. SM shares and KV figures are of the whole run.
    """
    requests, steps, gaps_s, counts = outcome.requests, outcome.steps, outcome.itl_s, outcome.itl_counts
    warmup = outcome.config.workload.warmup
    if warmup is not None:
        requests, steps = after_warmup(requests, steps, warmup)
        gaps_s, counts = gaps_s[:0], counts[:0]
    status = requests["status"]
    done = status == "finished"
    offered, finished = len(requests), int(done.sum())
    rejected = int((status == "rejected").sum())
    unfinished = int((status == "unfinished").sum())
    assert offered == finished + rejected + unfinished, f"I1: {offered} != {finished} + {rejected} + {unfinished}"
    reasons = requests["reason"][status == "rejected"].tolist()
    duration = float(requests["finish_s"][done].max() - requests["arrival_s"].min()) if finished else None

    def per_second(amount: float) -> float | None:
        return amount / duration if duration else None

    tokens_in, tokens_out = int(requests["prompt_tokens"][done].sum()), int(requests["output_tokens"][done].sum())
    normalised = e2e_s(requests) / np.maximum(1, requests["output_tokens"][done])
    waits = (requests["admitted_s"] - requests["arrival_s"])[done]
    decode = (steps["end_s"] - steps["start_s"])[steps["decode_seqs"] > 0]
    predicted = ~np.isnan(steps["predicted_s"])
    error = np.abs(steps["predicted_s"][predicted] / steps["actual_s"][predicted] - 1)
    total_sm_s = outcome.num_sms * outcome.span_s
    given_sm_s = sum(outcome.sm_seconds.values())
    assert abs(given_sm_s - total_sm_s) <= 1e-6 * max(1.0, total_sm_s), f"I5: {given_sm_s} SM-seconds of {total_sm_s}"
    summary: dict[str, Any] = {
        "source": outcome.source, "system": outcome.system, "gpu": outcome.device.get("gpu"),
        "tensor_parallel": outcome.config.device.tensor_parallel,
        "model": outcome.device.get("model"), "device_source": outcome.device.get("source"),
        "estimator": outcome.config.policy.estimator if predicted.any() else None,
        "trace": outcome.config.workload.trace, "workload_source": outcome.device.get("workload"),
        "request_rate": outcome.config.workload.rate_req_per_s if outcome.config.workload.arrivals != "recorded" else None,
        "seed": outcome.config.seed,
        "offered": offered, "completed": finished, "rejected": rejected, "unfinished": unfinished,
        "rejected_by_reason": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "duration": duration, "request_throughput": per_second(finished), "output_throughput": per_second(tokens_out),
        "total_token_throughput": per_second(tokens_in + tokens_out), "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        **_statistics("ttft", ttft_s(requests)), **_statistics("tpot", tpot_s(requests)), **_statistics("e2el", e2e_s(requests)),
        **_statistics("queue", waits), **_statistics("normalized_latency", normalised),
        "mean_itl_ms": float((gaps_s * counts).sum() / counts.sum() * 1e3) if counts.sum() else None,
        "max_itl_ms": float(gaps_s.max() * 1e3) if len(counts) else None,
    }
    for percent in PERCENTILES:
        value = weighted_percentile(gaps_s, counts, percent)
        summary["median_itl_ms" if percent == 50 else f"p{percent}_itl_ms"] = None if value is None else value * 1e3
    for reading in READINGS:
        met = attained(requests, reading, outcome.tpot_slo_s)
        summary[f"slo_attainment_{reading}"] = float(met.mean()) if offered else None
    summary |= {
        "tpot_slo_ms": outcome.tpot_slo_s * 1e3, "preemptions": int(requests["preemptions"].sum()),
        "steps": len(steps), "decode_steps": len(decode),
        "max_decode_step_ms": float(decode.max() * 1e3) if len(decode) else None,
        "prediction_error_mean": float(error.mean()) if len(error) else None,
        "sm_share": {name: value / total_sm_s if total_sm_s else None for name, value in outcome.sm_seconds.items()},
        "split_changes_per_s": outcome.split_changes / outcome.span_s if outcome.span_s else None,
        "kv_blocks": outcome.kv_blocks, "kv_peak_blocks": outcome.device.get("kv_peak_blocks"),
        "num_sms": outcome.num_sms, "span_s": outcome.span_s,
    }
    if warmup is not None:
        summary |= {"warmup": warmup, "warmup_requests": len(outcome.requests) - offered}
    return summary


def after_warmup(requests: RequestTable, steps: StepTable, warmup: str) -> tuple[RequestTable, StepTable]:
    """The requests after the warm-up (bullet/workload/cuts.py), and the steps from the first one's arrival on."""
    counted = counted_from(warmup, requests["id"], requests["arrival_s"])
    kept = RequestTable({name: column[counted] for name, column in requests.data.items()})
    start_s = float(kept["arrival_s"].min()) if len(kept) else np.inf
    later = steps["start_s"] >= start_s
    return kept, StepTable({name: column[later] for name, column in steps.data.items()})


def timing(outcome: RunOutcome, wall_s: float) -> dict[str, Any]:
    """Wall-clock figures of the simulation itself."""
    return {"wall_s": wall_s, "requests_per_wall_s": len(outcome.requests) / wall_s if wall_s else None,
            "decisions": outcome.decisions,
            "mean_decision_us": outcome.decision_wall_s / outcome.decisions * 1e6 if outcome.decisions else None}
