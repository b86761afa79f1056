"""A cell's rows, the ratio of means and its interval, and what a partition's check makes of blocks and GEMMs."""

from __future__ import annotations

import random

import pytest

from bullet.gpu.splits import Split
from bullet.profiler import cells, timing
from bullet.profiler.cells import Side
from bullet.profiler.check import Reading, concurrent_share, judge, judge_gemm, merged
from bullet.profiler.plan import Point
from bullet.profiler.shapes import decode, prefill

A, B = prefill("engine_prefill_layer", 512), decode("engine_decode_layer", 8, 1024)
CORUN = Point("corun", Split(112, 20), "both", A, B)


def side(lane, seconds, shape=None, **state):
    return Side(lane, shape, 112 if lane == "prefill" else 20, seconds, 3, 0.5, 0.9, 1e12, state)


def test_a_cells_windows_become_six_rows_and_slowdowns_of_their_own_neighbours():
    """By hand: A alone takes 1 and 1.2 ms, beside B 2.2; B alone 4 and 4, beside A 5 on average, one phase in five at 9."""
    asked = []

    def windows(steps):
        asked.extend(steps)
        return [[side("prefill", [1e-3] * 8, A)], [side("decode", [4e-3] * 8, B)],
                [side("prefill", [2.2e-3] * 8, A, clock_window_hz=1.5e9), side("decode", [4e-3, 4e-3, 4e-3, 4e-3, 9e-3] * 4, B)],
                [side("decode", [4e-3] * 8, B)], [side("prefill", [1.2e-3] * 8, A)]]

    rows = cells.measure(CORUN, windows)
    assert asked == ["a", "b", "ab", "b", "a"]
    assert [(m.lane, m.part, m.step) for m in rows] == [
        ("prefill", "alone before", 0), ("decode", "alone before", 1), ("prefill", "", 2), ("decode", "", 2),
        ("decode", "alone after", 3), ("prefill", "alone after", 4)]
    p, d = rows[2:4]
    assert p.columns["slowdown"] == pytest.approx(2.0)
    assert p.columns["solo_mean_s"] == pytest.approx(1.1e-3)
    assert p.columns["solo_drift"] == pytest.approx(0.2)
    assert p.columns["clock_window_hz"] == 1.5e9
    assert p.columns["slowdown_low"] == pytest.approx(p.columns["slowdown_high"])  # nothing varies
    assert d.stats.median_s == 4e-3  # the median does not see the phase that contends
    assert d.stats.mean_s == pytest.approx(5e-3)
    assert d.columns["slowdown"] == pytest.approx(1.25)
    assert d.columns["slowdown_low"] < 1.25 < d.columns["slowdown_high"]
    assert (d.corunner, d.corunner_shape, d.corunner_sms, p.corunner) == ("engine_prefill_layer", A, 112, "engine_decode_layer")


def test_a_control_gives_three_rows_and_its_load_none():
    point = Point("control", Split(112, 20), "decode", B, control="l2_stream")
    rows = cells.measure(point, lambda steps: [
        [side("decode", [1e-3] * 6, B)] + [side("prefill", [], None)] * (which == "ab") for which in steps])
    assert [(m.part, m.step, m.corunner) for m in rows] == [("alone before", 0, "idle"), ("", 1, "l2_stream"),
                                                            ("alone after", 2, "idle")]
    assert rows[1].corunner_sms == 112


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Independent noise of 10 % on both sides, truth 1.5: at least 90 % of a hundred intervals of 95 % hold it."""
    generator = random.Random(7)

    def window(mean):
        return [mean * generator.lognormvariate(0, 0.1) for _ in range(60)]

    held = 0
    for seed in range(100):
        _, low, high = timing.ratio_of_means(window(1.5), [window(1.0), window(1.0)], seed)
        held += low <= 1.5 <= high
        assert high - low < 0.2
    assert held >= 90


def test_blocks_that_take_turns_are_no_partition_though_their_ranges_overlap():
    """Slices of 100 ns in turn: the ranges overlap for nearly all their time, the blocks never."""
    mine = tuple((t, t + 100) for t in range(0, 1000, 200))
    theirs = tuple((t + 100, t + 200) for t in range(0, 1000, 200))
    first = Reading(frozenset(range(112)), 0, 900, 10, 10, mine)
    second = Reading(frozenset(range(112, 132)), 100, 1000, 10, 10, theirs)
    assert concurrent_share(first, second) == 0
    reasons = judge(Split(112, 20), (first, second), (first, second))
    assert reasons == [f"{mode}: blocks of both lanes ran at once for 0 % of the shorter probe: time slices?"
                       for mode in ("eager", "graph")]
    whole = second._replace(spans=((100, 1000),))
    assert concurrent_share(first, whole) == pytest.approx(400 / 500)
    assert judge(Split(112, 20), (first, whole), (first, whole)) == []
    assert concurrent_share(first, second._replace(spans=())) is None


def test_spans_are_merged():
    assert merged([(5, 9), (0, 3), (2, 4), (9, 12)]) == ((0, 4), (5, 12))


@pytest.mark.parametrize(("lane_s", "clocks", "said"), [
    (4e-3, (None, None), ""), (3.2e-3, (1.9e9, 1.5e9), ""), (1.1e-3, (None, None), "its kernels leave the lane"),
    (9e-3, (None, None), "it does not use the lane"), (2.5e-3, (None, None), "its kernels leave the lane"),
    (2.5e-3, (1.9e9, 1.5e9), "")])
def test_a_gemm_on_a_quarter_of_the_sms_takes_about_four_times_as_long(lane_s, clocks, said):
    reasons = judge_gemm(33, 132, lane_s, 1e-3, clocks)
    assert bool(reasons) == bool(said)
    assert all(said in reason for reason in reasons)
