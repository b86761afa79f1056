"""Sweeps of cards whose truth is known: every coefficient comes back inside its interval, and the intervals are no wider than the
errors ask for. `python benchmarks/dry_card.py` does it for as many seeds as wanted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bullet.devices.fitted import DeviceModel
from bullet.profiles.contention import CorunRows, clock_ratios, corun_rows, fit_contention
from bullet.profiles.layer_axis import axis_of_layers, slowness
from bullet.profiles.least_squares import intervals, solve
from tests.dry_card import GPU, LLAMA, PREFILLS, SPLITS, DryCard, Recovered, recovered

SEEDS = range(20)
WIDEST = {"prefill_contention_loss": 0.11, "decode_contention_loss": 0.08, "decode_l2_loss": 0.025, "shared_prefill_share": 0.025,
          "rate_slope": 0.12, "rate_cap": 0.02, "bandwidth_knee": 0.016, "bandwidth_sharpness": 0.6,
          "clock_loss_arithmetic": 0.0025, "clock_loss_bandwidth": 0.0025}
"""Half an interval in the median seed: of losses drawn from 0.1 to 0.5, shares from 0.4 to 0.85, clocks' from 0.01 to 0.1."""


@pytest.fixture(scope="module")
def found() -> list[Recovered]:
    return [recovered(seed) for seed in SEEDS]


@pytest.mark.parametrize("name", WIDEST)
def test_a_coefficient_comes_back_inside_its_interval_in_19_of_20_seeds(found, name):
    inside = [r.low[name] <= r.truth[name] <= r.high[name] for r in found]
    assert sum(inside) >= 19, [(r.truth[name], r.low[name], r.high[name]) for r in found]
    half = np.array([(r.high[name] - r.low[name]) / 2 for r in found])
    assert np.median(half) < WIDEST[name]
    # Right, not huge: errors fill a good part of them (of 99 % ones they should be a 2.6th in the root mean square, or less where
    # few groups of rows tell a coefficient).
    error = np.array([r.value[name] - r.truth[name] for r in found])
    assert 0.1 < np.sqrt(np.mean((error / half) ** 2)) < 0.7


def test_what_the_rows_do_not_tell_is_said_and_in_the_other_loss():
    """Prefill is bound by arithmetic: what L2 costs its few bytes cannot be told from what bandwidth does."""
    assert all("prefill_l2_loss" not in recovered(seed, left_out=False).value for seed in (0, 1))
    card = DryCard(0, prefill_l2_loss=0.3)
    rows = card.sweep()
    device = DeviceModel(LLAMA, GPU, dataclasses.replace(card.coefficients, prefill_contention_loss=None, prefill_l2_loss=None))
    fit = fit_contention(rows, device)
    assert "prefill_l2_loss 0: not told from what bandwidth costs, and in that" in fit.assumed
    assert fit.errors["slowdown_fitted"]["p90"] < 0.04


def test_medians_would_miss_the_phases_that_contend():
    """One phase in five contends three times as much: the mean holds it, the median does not."""
    card = DryCard(3)
    rows = card.sweep()
    medians = {(r["cell"], r["lane"], r["op"]): r["median_s"] for r in rows if r["kind"] == "solo" and r["cell"]}
    by_median = [{**r, "slowdown": r["median_s"] / medians[r["cell"], r["lane"], r["op"]]} if r["kind"] == "corun" else r
                 for r in rows]
    device = DeviceModel(LLAMA, GPU, dataclasses.replace(card.coefficients, prefill_contention_loss=None,
                                                        decode_contention_loss=None, decode_l2_loss=None))
    by_mean, median = (fit_contention(table, device).coefficients["contention_loss"] for table in (rows, by_median))
    assert median < 0.7 * by_mean


def test_arrays_say_what_the_device_says():
    card = DryCard(5)
    rows = corun_rows(card.sweep(), split=True) + corun_rows(card.rows_, split=False)
    pairs = [r for r in rows if r["kind"] == "corun"]
    data = CorunRows([{**r, "clock_window_hz": None} for r in pairs], [], card.device)
    truth = card.coefficients
    array = data.slowdowns([truth.prefill_contention_loss, truth.decode_contention_loss, truth.prefill_l2_loss,
                            truth.decode_l2_loss], truth.shared_prefill_share)
    for row, ratio in list(zip(pairs, array, strict=True))[::7]:
        size, other = (("prefill", row["tokens"]), row["corunner_batch"]) if row["op"] == "prefill_layer" else (
            ("decode", row["batch"]), row["corunner_tokens"])
        works = {"prefill": card.work(("prefill_layer", size[1] if size[0] == "prefill" else other)),
                 "decode": card.work(("decode_layer", size[1] if size[0] == "decode" else other))}
        sms = {size[0]: row["sms"], {"prefill": "decode", "decode": "prefill"}[size[0]]: row["corunner_sms"]}
        both = card.device.corun_seconds(works["prefill"], sms["prefill"], works["decode"], sms["decode"])
        own = both[0 if size[0] == "prefill" else 1]
        assert ratio == pytest.approx(own / card.device.solo_seconds(works[size[0]], row["sms"]), rel=1e-12)


def test_clocks_are_compared_within_a_cell_and_drift_is_told_from_sms():
    card = DryCard(2)
    rows = card.sweep()
    beside = [r for r in rows if r["kind"] == "corun" and r["split_prefill_sms"] == SPLITS[0]]
    ratios = clock_ratios(beside, rows)
    assert np.all((ratios > 0.85) & (ratios < 1.02))
    assert np.isnan(clock_ratios(beside, [])).all()
    alone = [r for r in rows if r["kind"] == "solo" and r["op"] == "prefill_layer" and r["tokens"] == PREFILLS[1]]
    slow = slowness(alone)
    assert slow.max() / slow.min() == pytest.approx(1.1, abs=0.03)
    assert slowness([{**r, "clock_window_hz": None, "drift": 0.02} for r in alone]) == pytest.approx(1.02)


def test_too_few_sm_counts_leave_the_axis_to_others():
    rows = [r for r in DryCard(1).sweep() if r["sms"] in (132, 112, 20)]
    assert axis_of_layers(rows, DryCard(1).unfitted()) is None


def test_intervals_of_a_line_by_hand():
    """y = a: the jackknife over groups of one row each is the standard error of a mean; equal rows in a group count once."""
    values = np.array([1.0, 2.0, 4.0, 5.0])

    def residual(at):
        return at[0] - values

    at = solve(residual, [0.0], [-10.0], [10.0])
    assert at[0] == pytest.approx(3.0)
    t = 5.8409  # Student, 99 %, 3 degrees of freedom
    single = intervals(residual, at, [-10.0], [10.0], [0, 1, 2, 3])
    assert single.half[0] == pytest.approx(t * values.std(ddof=1) / 2, rel=1e-4)
    twice = np.repeat(values, 2)
    double = intervals(lambda at: at[0] - twice, at, [-10.0], [10.0], np.repeat(range(4), 2).tolist())
    assert double.half[0] == pytest.approx(single.half[0], rel=1e-6)
    nothing = intervals(lambda at: at[0] - values + 0 * at[1], np.array([3.0, 0.0]), [-10, -1], [10, 1], [0, 1, 2, 3])
    assert np.isinf(nothing.half[1])
