"""Metrics of three requests worked out by hand."""

import dataclasses

import numpy as np
import pytest

from bullet.config import RunConfig
from bullet.results import columns, metrics
from bullet.results.columns import RequestTable, RunOutcome, StepTable

NAN = float("nan")
# id, arrival, prompt, output, status, reason, admitted, first, finish, generated, preemptions, slo per request, slo mean
ROWS = [
    (0, 0.0, 100, 5, "finished", "", 0.0, 1.0, 3.0, 5, 0, 0.5, 2.0),  # TTFT 1, TPOT 2 / 4 = 0.5
    (1, 1.0, 300, 1, "finished", "", 1.5, 4.0, 4.0, 1, 1, 3.0, 2.0),  # TTFT 3, one token: no TPOT
    (2, 2.0, 900, 9, "rejected", "over_context", NAN, NAN, NAN, 0, 0, 9.0, 2.0),
]


def outcome(rows: list[tuple], itl: list[tuple[float, int]] = ()) -> RunOutcome:  # type: ignore[type-arg,assignment]
    gaps, counts = zip(*itl, strict=True) if itl else ((), ())
    return RunOutcome(RunConfig(), "toy", StepTable.from_rows([]), RequestTable.from_rows(rows), np.array(gaps, dtype=float),
                      np.array(counts, dtype=np.int64), {"idle": 8.0}, 4.0, 2, 10, 6, 3, 1e-3, 0.4, {"gpu": "toy"})


def test_the_summary_by_hand() -> None:
    s = metrics.summarise(outcome(ROWS, [(0.5, 3), (2.0, 1)]))
    assert (s["offered"], s["completed"], s["rejected"], s["unfinished"]) == (3, 2, 1, 0)
    assert s["rejected_by_reason"] == {"over_context": 1}
    assert s["mean_ttft_ms"] == 2000
    assert s["median_ttft_ms"] == 2000
    assert s["mean_tpot_ms"] == 500  # the one-token output is left out
    assert s["mean_e2el_ms"] == 3000
    assert s["duration"] == 4.0  # last finish - first arrival, drain included
    assert s["request_throughput"] == 0.5
    assert s["output_throughput"] == 1.5
    assert s["mean_itl_ms"] == pytest.approx((3 * 500 + 2000) / 4)
    assert s["median_itl_ms"] == 500
    assert s["p99_itl_ms"] == pytest.approx(500 + 0.97 * 1500)  # three gaps of 0.5 s, one of 2: linear, as numpy's
    assert s["split_changes_per_s"] == 1.5
    assert s["sm_share"] == {"idle": 1.0}
    assert s["source"] == "simulated"


def test_the_estimators_error_is_the_mean_of_single_steps() -> None:
    """1 s predicted of 2 (50 %), 3 of 2 (50 %), 2 of 1.6 (25 %), one step without a prediction: 41.7 %. Signs do not cancel."""
    def step(predicted_s: float | None, actual_s: float) -> tuple[object, ...]:
        return (0, "decode", "decode", 0.0, actual_s, 12, 0, 4, 40, 0, 4, predicted_s, actual_s, 0.0, 0, 0, 0, 12, 12, "")

    toy = outcome(ROWS)
    steps = StepTable.from_rows([step(1.0, 2.0), step(3.0, 2.0), step(2.0, 1.6), step(None, 9.0)])
    assert metrics.summarise(dataclasses.replace(toy, steps=steps))["prediction_error_mean"] == pytest.approx(1.25 / 3)
    assert metrics.summarise(toy)["prediction_error_mean"] is None


def test_attainment_under_both_readings() -> None:
    """TPOT SLO 0.4 s: request 0 misses it (0.5). Request 1, one token, meets any; its TTFT of 3 s meets its own 3 s, not the
    mean's 2 s. The rejected one counts as missed."""
    table = RequestTable.from_rows(ROWS)
    assert metrics.attained(table, "per_request", 0.4).tolist() == [False, True, False]
    assert metrics.attained(table, "mean_length", 0.4).tolist() == [False, False, False]
    assert metrics.attained(table, "mean_length", 0.6).tolist() == [True, False, False]


def test_nothing_finished_is_null_not_nan() -> None:
    s = metrics.summarise(outcome(ROWS[2:]))
    assert s["mean_ttft_ms"] is None
    assert s["request_throughput"] is None
    assert s["slo_attainment_mean_length"] == 0.0
    assert metrics.summarise(outcome([]))["slo_attainment_mean_length"] is None


def test_goodput_between_measured_rates() -> None:
    assert metrics.goodput([4, 5, 6], [1.0, 0.95, 0.85]) == pytest.approx(5.5)
    assert metrics.goodput([6, 4, 5], [0.92, 1.0, 0.95]) == 6
    assert metrics.goodput([4, 5], [0.5, 0.4]) is None


def test_weighted_percentile_equals_numpys_on_the_values_spelt_out() -> None:
    values, counts = np.array([3.0, 1.0, 2.0]), np.array([1, 8, 1])
    for percent in (0, 50, 80, 90, 99, 100):
        assert metrics.weighted_percentiles(values, counts, [percent])[0] == pytest.approx(
            float(np.percentile(np.repeat(values, counts), percent)))
    assert metrics.weighted_percentiles(np.array([]), np.array([], dtype=np.int64), [50]) == [None]


def test_percentiles_of_many_gaps_are_those_of_the_sorted_ones() -> None:
    """More gaps than a batch are binned first: the same values come out, outliers and ties or not."""
    rng = np.random.default_rng(3)
    many = columns.BATCH_ROWS + 5000
    for values in (rng.exponential(0.02, many), np.r_[rng.exponential(0.02, many), 1e4], np.round(rng.random(many), 2),
                   np.full(many, 0.03)):
        counts = rng.integers(1, 5, len(values)).astype(np.int32)
        written_out = np.repeat(values, counts)
        for percent in (0, 37.3, 50, 99, 100):
            assert metrics.weighted_percentiles(values, counts, [percent])[0] == pytest.approx(
                float(np.percentile(written_out, percent)), rel=1e-12)
