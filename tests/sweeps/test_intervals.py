"""Student's t against tables and closed forms; means and paired differences by hand."""

from __future__ import annotations

import math

import pytest

from bullet.results.student import student_t
from bullet.sweeps.intervals import Estimate, interval, paired


def test_t_of_one_and_two_degrees_has_closed_forms() -> None:
    assert student_t(1) == pytest.approx(math.tan(0.475 * math.pi), rel=1e-12)  # Cauchy
    assert student_t(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-12)


@pytest.mark.parametrize(("freedom", "t"), [(3, 3.182446), (4, 2.776445), (5, 2.570582), (7, 2.364624), (10, 2.228139),
                                            (29, 2.045230), (120, 1.979930)])
def test_t_of_the_tables(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, abs=5e-7)


def test_t_at_another_confidence() -> None:
    assert student_t(9, 0.99) == pytest.approx(3.249836, abs=5e-7)


def test_a_mean_with_its_interval() -> None:
    found = interval([1.0, 2.0, 3.0])  # deviation 1, error 1 / sqrt 3
    assert found == Estimate(2.0, pytest.approx(4.302653 / math.sqrt(3), abs=1e-6), 3)
    assert (found.low, found.high) == (pytest.approx(-0.484, abs=1e-3), pytest.approx(4.484, abs=1e-3))


def test_one_value_has_no_interval() -> None:
    assert interval([5.0]) == (5.0, None, 1)
    assert interval([5.0]).low is None
    assert interval([5.0]).text(".1f") == "5.0"


def test_pairs_take_the_seed_out() -> None:
    noisy = [0.0, 10.0, 20.0, 30.0]
    better = [value + gain for value, gain in zip(noisy, [1.0, 2.0, 1.0, 2.0], strict=True)]
    found = paired(better, noisy)
    assert found.mean == 1.5
    assert found.half_width == pytest.approx(3.182446 * math.sqrt(1 / 3) / 2, abs=1e-6)
    assert interval(better).half_width > 20
    assert found.text("+.1f") == "+1.5 ± 0.9"


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(AssertionError, match="2 and 1"):
        paired([1.0, 2.0], [1.0])
