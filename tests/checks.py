"""The invariants of a finished run, each computed again from its rows by walking them. Numbers as in the design."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bullet.catalog.models import get_model
from bullet.results.columns import RunOutcome
from bullet.state import DECODE, HYBRID, PREFILL, Wait

BLOCK = 16
Rows = Sequence[tuple[float, int, int]]


class Recorder:
    """The decisions of a run: (lane, time, decision)."""

    def __init__(self) -> None:
        self.decisions: list[tuple[str, float, Any]] = []

    def __call__(self, kind: str, values: tuple[Any, ...]) -> None:
        if kind == "next_step":
            lane, _, now_s, decision = values
            self.decisions.append((lane, now_s, decision))


def step_rows(outcome: RunOutcome) -> list[tuple[Any, ...]]:
    """Steps as rows in which the last bit counts (and NaN equals NaN)."""
    steps = outcome.steps
    return list(zip(*(map(repr, steps[name].tolist()) for name in steps.columns), strict=True))


def check_conservation(outcome: RunOutcome, rows: Rows) -> None:
    """I1, I2: each request closed once, refused only for what can never be served, with its tokens else."""
    r = outcome.requests
    assert sorted(r["id"].tolist()) == list(range(len(rows)))
    context = get_model(outcome.config.device.model).context_tokens
    for i, status, reason, made in zip(r["id"].tolist(), r["status"], r["reason"], r["generated_tokens"], strict=True):
        _, prompt, output = rows[i]
        if prompt + output > context:
            assert (status, reason, made) == ("rejected", "over_context", 0)
        elif -(-(prompt + output - 1) // BLOCK) > outcome.kv_blocks:  # the last token is never cached
            assert (status, reason, made) == ("rejected", "over_kv_capacity", 0)
        else:
            assert (status, reason, made) == ("finished", "", output)


def finished(outcome: RunOutcome) -> dict[int, dict[str, float]]:
    """Rows of finished requests by id."""
    r = outcome.requests
    columns = [r[name].tolist() for name in r.columns]
    table = [dict(zip(r.columns, values, strict=True)) for values in zip(*columns, strict=True)]
    return {row["id"]: row for row in table if row["status"] == "finished"}


def check_causality(outcome: RunOutcome, device: Any, *, noisy: bool) -> None:
    """I3: arrival <= admission < first token <= finish, and no first token sooner than the device could at best."""
    for row in finished(outcome).values():
        assert row["arrival_s"] <= row["admitted_s"] < row["first_token_s"] <= row["finish_s"]
        assert (row["first_token_s"] < row["finish_s"]) == (row["output_tokens"] > 1)
        if not noisy:  # noise may shorten a step
            least = device.min_prefill_seconds(row["prompt_tokens"])
            assert row["first_token_s"] - row["arrival_s"] >= least


def check_kv(outcome: RunOutcome) -> None:
    """I4, as far as rows show it; SystemState.check recounts it at each boundary of a debug run."""
    used = outcome.steps["kv_used_blocks"]
    assert np.all((used > 0) & (used <= outcome.kv_blocks))
    assert outcome.device["kv_peak_blocks"] == (used.max() if len(used) else 0)


def check_time(outcome: RunOutcome) -> None:
    """I6: steps are listed as they end, and a lane's steps do not overlap."""
    steps = outcome.steps
    assert np.all(np.diff(steps["end_s"]) >= 0)
    assert np.all(steps["end_s"] > steps["start_s"])
    for lane in (PREFILL, DECODE, HYBRID):
        mine = steps["lane"] == lane
        assert np.all(steps["start_s"][mine][1:] >= steps["end_s"][mine][:-1])


def check_sm_seconds(outcome: RunOutcome, rows: Rows) -> None:
    """I5: at each instant the SMs add up to N, and the account equals a walk over the instants between steps' ends."""
    steps, total = outcome.steps, outcome.num_sms
    arrivals = [row[0] for row in rows]  # the span begins with the first; one refused after all else may end it
    cuts = sorted({*arrivals, *steps["start_s"].tolist(), *steps["end_s"].tolist()})
    spans = np.diff(np.array(cuts))
    owned = {lane: np.zeros(len(spans)) for lane in (PREFILL, DECODE, HYBRID)}
    place = {cut: i for i, cut in enumerate(cuts)}
    for lane, start, end, sms in zip(steps["lane"], steps["start_s"].tolist(), steps["end_s"].tolist(),
                                     steps["sms"].tolist(), strict=True):
        owned[lane][place[start] : place[end]] += sms
    p, d, h = owned[PREFILL], owned[DECODE], owned[HYBRID]
    shared = np.maximum(0, p + d - total)
    expected = {"prefill_only": p - shared, "decode_only": d - shared, "shared": shared, "hybrid": h,
                "idle": total - (p + d - shared) - h}
    for name, sms in expected.items():
        assert np.all(sms >= 0), name
        assert outcome.sm_seconds[name] == pytest.approx(float((sms * spans).sum()), rel=1e-6, abs=1e-6), name
    assert sum(outcome.sm_seconds.values()) == pytest.approx(total * outcome.span_s, rel=1e-6, abs=1e-9)


def check_queue(outcome: RunOutcome) -> None:
    """I11: the integrated queue length equals the sum of the waits; without preemption also that of the rows."""
    waits = outcome.device["wait_sum_s"]
    assert outcome.device["queue_integral_s"] == pytest.approx(waits, rel=1e-9, abs=1e-9)
    done = finished(outcome).values()
    if not any(row["preemptions"] for row in done):
        assert waits == pytest.approx(sum(row["admitted_s"] - row["arrival_s"] for row in done), rel=1e-9, abs=1e-9)


def check_gaps(outcome: RunOutcome) -> None:
    """Inter-token gaps: as many as tokens after the first, and their sum is last token less first, over all."""
    done = finished(outcome).values()
    assert int(outcome.itl_counts.sum()) == sum(row["generated_tokens"] - 1 for row in done)
    expected = sum(row["finish_s"] - row["first_token_s"] for row in done)
    assert float((outcome.itl_s * outcome.itl_counts).sum()) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert not len(outcome.itl_s) or outcome.itl_s.min() > 0


def check_idling(outcome: RunOutcome, recorder: Recorder) -> None:
    """I8: wherever a lane idles although a request was there for it, the policy had said Wait at that very instant.

    The instants that matter lie between two steps of the lane: the end of the first, and each arrival or first token
    (work that appears) before the next begins.
    """
    steps, done = outcome.steps, finished(outcome).values()
    waited = {(lane, now) for lane, now, decision in recorder.decisions if isinstance(decision, Wait)}
    appear = sorted({row["arrival_s"] for row in done} | {row["first_token_s"] for row in done})
    for lane in set(steps["lane"]):
        mine = steps["lane"] == lane
        ends = [0.0, *steps["end_s"][mine].tolist()]
        starts = [*steps["start_s"][mine].tolist(), float("inf")]
        for end, start in zip(ends, starts, strict=True):
            for instant in [end, *(t for t in appear if end < t < start)]:
                if instant == start:
                    continue
                if lane == PREFILL:
                    work = any(row["arrival_s"] <= instant < row["admitted_s"] for row in done)
                elif lane == DECODE:
                    # Only requests never preempted are decode's for sure: the others are prefill's again meanwhile.
                    work = any(row["first_token_s"] <= instant < row["finish_s"] and not row["preemptions"]
                               for row in done)
                else:
                    work = any(row["arrival_s"] <= instant < row["finish_s"] for row in done)
                assert not work or (lane, instant) in waited, f"{lane} idles at {instant} until {start}"


def check_all(outcome: RunOutcome, rows: Rows, device: Any, recorder: Recorder) -> None:
    """Every invariant that rows can show."""
    check_conservation(outcome, rows)
    check_causality(outcome, device, noisy=outcome.config.device.noise_std > 0)
    check_kv(outcome)
    check_time(outcome)
    check_sm_seconds(outcome, rows)
    check_queue(outcome)
    check_gaps(outcome)
    check_idling(outcome, recorder)
