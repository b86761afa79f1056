"""Quantiles, rotation and the co-run window, by hand."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet.errors import ProfileError
from bullet.profiler.timing import Interval, inside, repeats, rotation, solo_count, summarise, train_lengths

positive = st.floats(1e-7, 10, allow_nan=False)


def test_summarise_interpolates():
    assert summarise([3.0, 1.0, 2.0]) == (2.0, pytest.approx(1.4), pytest.approx(2.6), 3, 2.0, pytest.approx(2.9))
    assert summarise([4.0]) == (4.0, 4.0, 4.0, 1, 4.0, 4.0)
    assert summarise([1.0] * 9 + [3.0]).mean_s == pytest.approx(1.2)  # which the median, 1, does not show


@given(st.lists(positive, min_size=1, max_size=40))
def test_summarise_is_ordered_and_has_the_median(values):
    stats = summarise(values)
    assert min(values) <= stats.p20_s <= stats.median_s <= stats.p80_s <= max(values)
    assert stats.median_s == pytest.approx(statistics.median(values))


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [1.0, float("nan")], [-1.0]])
def test_summarise_refuses_what_no_timer_gives(values):
    with pytest.raises(ProfileError):
        summarise(values)


def test_rotation_passes_three_times_l2():
    assert rotation(10, 60, 1e9) == 18
    assert rotation(400, 60, 1e9) == 1
    assert rotation(10, 60, 45) == 4  # memory allows four sets
    assert rotation(10, 60, 5) == 1
    assert rotation(1, 1e6, 1e9) == 64


@given(positive, positive, st.integers(1, 64))
def test_repeats_is_whole_rounds_within_the_cap(once_s, wanted_s, sets):
    count = repeats(once_s, wanted_s, sets)
    assert count % sets == 0
    assert sets <= count <= 1024
    assert count * once_s >= wanted_s * 0.999 or count + sets > 1024


def test_inside_keeps_whole_replays_and_drops_the_first():
    own = [Interval(0, 1), Interval(1, 2), Interval(2, 3), Interval(3, 4), Interval(4, 5)]
    other = [Interval(0.5, 2), Interval(2, 4.5)]
    window = inside(own, other, repetitions=2)
    assert window.seconds == [0.5, 0.5]  # 2-3 and 3-4: from the other's first end on; 4-5 outlasts the other lane
    assert window.window_s == 2.5
    assert window.both_share == pytest.approx(0.5)  # of the own train's 5 s


def test_a_lane_that_only_queued_is_not_a_corunner():
    """Serialised: the other's start event fired at once, but its first replay ended after all of the own."""
    own = [Interval(i, i + 1) for i in range(5)]
    assert inside(own, [Interval(0, 6), Interval(6, 7)], 1) == ([], 0.0, 0.0)


def test_inside_without_overlap_is_empty():
    assert inside([Interval(0, 1), Interval(1, 2)], [Interval(2, 3)], 1).seconds == []
    assert inside([Interval(0, 1)], [Interval(2, 3)], 1).window_s == 0.0
    assert inside([], [], 1) == ([], 0.0, 0.0)


def test_a_window_alone_has_short_replays_by_number_and_long_ones_by_time():
    """25 of a millisecond, 30 ms' worth of 2, six of 20; and one that is dropped."""
    assert [solo_count(s, 25) for s in (1e-3, 2e-3, 20e-3)] == [26, 16, 7]


@given(positive, positive, st.integers(1, 20), st.integers(1, 40))
def test_trains_cover_each_other_and_stay_in_the_queue(a, b, min_a, min_b):
    na, nb = train_lengths(a, b, min_prefill=min_a, min_decode=min_b, limit=300)
    assert 3 <= na <= 300
    assert 3 <= nb <= 300
    if max(na, nb) < 300:  # neither was capped: both lanes are busy for about as long, with the samples wanted
        assert na >= min_a + 2
        assert nb >= min_b + 2
        assert abs(na * a - nb * b) <= 3 * max(a, b) + 1e-9
