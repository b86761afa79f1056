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

from bullet.config import WorkloadConfig
from bullet.results.columns import BATCH_ROWS, RequestTable, RunOutcome, StepTable
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


def weighted_percentiles(values: Array, counts: NDArray[Any], percents: Sequence[float]) -> list[float | None]:
    """Percentiles of values that stand ``counts`` times each, as ``np.percentile`` of them written out would give them."""
    total = int(counts.sum())
    if total == 0:
        return [None] * len(percents)
    if len(values) <= BATCH_ROWS:
        order = np.argsort(values, kind="stable")
        values, counts = values[order], counts[order]
    found: list[float | None] = []
    for percent in percents:
        place = (total - 1) * percent / 100
        low = int(place)
        below, above = (_ranked(values, counts, rank) for rank in (low, min(low + 1, total - 1)))
        found.append(float(below + (above - below) * (place - low)))
    return found


def _weighted_sum(values: Array, counts: NDArray[Any]) -> float:
    """A batch at a time: the products of all would stand in memory."""
    return sum(float((values[i:i + BATCH_ROWS] * counts[i:i + BATCH_ROWS]).sum()) for i in range(0, len(values), BATCH_ROWS))


def _ranked(values: Array, counts: NDArray[Any], rank: int) -> float:
    """The value of that rank (from 0). Of many values those in one of 4,096 bins are sorted alone: millions of gaps between
    tokens stand in memory once."""
    while len(values) > BATCH_ROWS:
        least, most = float(values.min()), float(values.max())
        if least == most:
            return least
        scale = 4095 / (most - least)

        def bins(begin: int) -> NDArray[np.int64]:
            return ((values[begin:begin + BATCH_ROWS] - least) * scale).astype(np.int64)  # noqa: B023

        held = np.zeros(4097)
        for begin in range(0, len(values), BATCH_ROWS):
            held += np.bincount(bins(begin), counts[begin:begin + BATCH_ROWS], 4097)
        upto = np.cumsum(held)
        chosen = int(np.searchsorted(upto, rank, side="right"))
        rank -= int(upto[chosen - 1]) if chosen else 0
        inside = np.concatenate([bins(begin) == chosen for begin in range(0, len(values), BATCH_ROWS)])
        values, counts = values[inside], counts[inside]
    order = np.argsort(values, kind="stable")
    return float(values[order[np.searchsorted(np.cumsum(counts[order]), rank, side="right")]])


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
    for percent, value in zip(PERCENTILES, np.percentile(milli, PERCENTILES, overwrite_input=True), strict=True):
        result["median_" + name + "_ms" if percent == 50 else f"p{percent}_{name}_ms"] = float(value)
    return result


def summarise(outcome: RunOutcome) -> dict[str, Any]:
    """All figures of a run that do not depend on the machine it ran on; docs/results.md says what each one is.

    Names, units (ms, per second) and percentiles (linear, as ``np.percentile``) are those of the serving benchmarks of
    vLLM and SGLang where they have the figure. Equal outcomes give equal dictionaries, in equal order.

    With ``workload.warmup`` the requests of the start are left out of everything that is counted of requests, and the steps that
    began before the first of the others arrived of what is counted of steps; gaps between tokens are not kept by request: those
    count that ended after the driver had noticed the first of the others. SM shares and KV figures are of the whole run.
    """
    requests, steps, gaps_s, counts = outcome.requests, outcome.steps, outcome.itl_s, outcome.itl_counts
    warmup, since_s = outcome.config.workload.warmup, -np.inf
    if warmup is not None:
        requests, since_s = after_warmup(requests, warmup)
    of_steps = _of_steps(steps, since_s)  # before all that is made of a million requests: what it reads stands in memory
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
    total_sm_s = outcome.num_sms * outcome.span_s
    given_sm_s = sum(outcome.sm_seconds.values())
    assert abs(given_sm_s - total_sm_s) <= 1e-6 * max(1.0, total_sm_s), f"I5: {given_sm_s} SM-seconds of {total_sm_s}"
    load, slo = outcome.config.workload, outcome.config.slo
    summary: dict[str, Any] = {
        "source": outcome.source, "system": outcome.system, "gpu": outcome.device.get("gpu"),
        "tensor_parallel": outcome.config.device.tensor_parallel,
        "model": outcome.device.get("model"), "device_source": outcome.device.get("source"),
        "estimator": outcome.config.policy.estimator if of_steps["prediction_error_mean"] is not None else None,
        "trace": outcome.config.workload.trace, "workload_source": outcome.device.get("workload"),
        "request_rate": _request_rate(load),
        "seed": outcome.config.seed,
        "offered": offered, "completed": finished, "rejected": rejected, "unfinished": unfinished,
        "rejected_by_reason": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "duration": duration, "request_throughput": per_second(finished), "output_throughput": per_second(tokens_out),
        "total_token_throughput": per_second(tokens_in + tokens_out), "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        **_statistics("ttft", ttft_s(requests)), **_statistics("tpot", tpot_s(requests)), **_statistics("e2el", e2e_s(requests)),
        **_statistics("queue", (requests["admitted_s"] - requests["arrival_s"])[done]),
        **_statistics("normalized_latency", e2e_s(requests) / np.maximum(1, requests["output_tokens"][done])),
        "mean_itl_ms": _weighted_sum(gaps_s, counts) / float(counts.sum()) * 1e3 if counts.sum() else None,
        "max_itl_ms": float(gaps_s.max() * 1e3) if len(counts) else None,
    }
    for percent, value in zip(PERCENTILES, weighted_percentiles(gaps_s, counts, PERCENTILES), strict=True):
        summary["median_itl_ms" if percent == 50 else f"p{percent}_itl_ms"] = None if value is None else value * 1e3
    for reading in READINGS:
        met = attained(requests, reading, outcome.tpot_slo_s)
        summary[f"slo_attainment_{reading}"] = float(met.mean()) if offered else None
        if reading == "mean_length":  # one objective for all, as vLLM's benchmark has
            summary["request_goodput"] = per_second(float(met.sum()))
    summary |= {
        "ttft_slo_s": float(requests["ttft_slo_mean_length_s"][0]) if offered else slo.ttft_s,
        "ttft_slo_s_per_token": slo.ttft_s_per_token, "mean_prompt_tokens": slo.mean_prompt_tokens,
        "tpot_slo_s": outcome.tpot_slo_s, "slo_by_default": slo.by_default,
        "tpot_slo_ms": outcome.tpot_slo_s * 1e3, "preemptions": int(requests["preemptions"].sum()),
        **of_steps,
        "sm_share": {name: value / total_sm_s if total_sm_s else None for name, value in outcome.sm_seconds.items()},
        "split_changes_per_s": outcome.split_changes / outcome.span_s if outcome.span_s else None,
        "kv_blocks": outcome.kv_blocks, "kv_peak_blocks": outcome.device.get("kv_peak_blocks"),
        "num_sms": outcome.num_sms, "span_s": outcome.span_s,
        **{key: outcome.device.get(key) for key in (
            "prefix_hit_rate", "host_time", "parameters", "weight_bytes", "kv_bytes_per_token", "window_kv_bytes_per_token",
            "window_tokens", "model_notes")},
    }
    summary |= outcome.device.get("cluster", {})
    if load.arrivals == "closed":
        summary |= {"max_concurrency": load.concurrency, "think_time_s": load.think_time_s, "think": load.think}
    if warmup is not None:
        summary |= {"warmup": warmup, "warmup_requests": len(outcome.requests) - offered}
    return summary


def _request_rate(load: WorkloadConfig) -> float | None:
    """Of arrivals drawn at a rate; where rates change, their mean."""
    if load.arrivals in ("recorded", "closed"):
        return None
    if load.rate_req_per_s is not None:
        return load.rate_req_per_s
    from bullet.workload.schedule import mean_rate

    return mean_rate(load)


def after_warmup(requests: RequestTable, warmup: str) -> tuple[RequestTable, float]:
    """The requests after the warm-up (bullet/workload/cuts.py), and when the first of them arrived."""
    counted = counted_from(warmup, requests["id"], requests["arrival_s"])
    kept = RequestTable({name: column[counted] for name, column in requests.data.items()})
    return kept, float(kept["arrival_s"].min()) if len(kept) else np.inf


def _of_steps(steps: StepTable, since_s: float) -> dict[str, int | float | None]:
    """Figures of the steps that began from ``since_s`` on."""
    count = decodes = predictions = 0
    longest_s = decoding_s = error = 0.0
    for batch in steps.batches("start_s", "end_s", "decode_seqs", "predicted_s", "actual_s"):
        start_s, end_s, decode_seqs, predicted_s, actual_s = (column[batch["start_s"] >= since_s] for column in batch.values())
        count += len(start_s)
        decode_s = (end_s - start_s)[decode_seqs > 0]
        decodes += len(decode_s)
        decoding_s += float(decode_s.sum())
        longest_s = max(longest_s, float(decode_s.max())) if len(decode_s) else longest_s
        predicted = ~np.isnan(predicted_s)
        predictions += int(predicted.sum())
        error += float(np.abs(predicted_s[predicted] / actual_s[predicted] - 1).sum())
    return {"steps": count, "decode_steps": decodes, "mean_decode_step_ms": decoding_s / decodes * 1e3 if decodes else None,
            "max_decode_step_ms": longest_s * 1e3 if decodes else None,
            "prediction_error_mean": error / predictions if predictions else None}


def timing(outcome: RunOutcome, wall_s: float) -> dict[str, Any]:
    """Wall-clock figures of the simulation itself."""
    return {"wall_s": wall_s, "requests_per_wall_s": len(outcome.requests) / wall_s if wall_s else None,
            "decisions": outcome.decisions,
            "mean_decision_us": outcome.decision_wall_s / outcome.decisions * 1e6 if outcome.decisions else None}
