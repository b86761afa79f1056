"""The estimators of Fig. 11: exact where their own assumption holds, and the samples they are given."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

from bullet.estimators.base import Sample
from bullet.state import DECODE, PREFILL
from experiments.findings import fig11


def test_as_many_states_as_the_paper() -> None:
    every = fig11.states()
    assert len(every) == len(set(every)) == 7360


def test_alpha_is_linear_between_nodes_and_beyond() -> None:
    def plane(x: float, y: float) -> float:
        return 1 + 0.5 * x - 0.25 * y + 0.1 * x * y

    nodes = [(x, y) for x in (0.0, 2.0, 4.0) for y in (1.0, 3.0)]
    alpha = [plane(*node) for node in nodes]
    for point in ((1.0, 2.0), (4.0, 3.0), (6.0, 5.0), (-1.0, 0.0)):
        assert fig11.interpolate_alpha(nodes, alpha, point) == pytest.approx(plane(*point))
    assert fig11.interpolate_alpha([(1.0,)], [3.0], (9.0,)) == 3.0
    bent = fig11.interpolate_alpha([(0.0,), (1.0,), (2.0,)], [0.0, 1.0, 5.0], (1.5,))
    assert bent == pytest.approx(3.0)


def test_the_regression_finds_a_quadratic() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 1000, (40, 3))
    seconds = 1e-3 + 2e-6 * x[:, 0] + 3e-9 * x[:, 0] ** 2 + 4e-5 * x[:, 1] - 1e-7 * x[:, 2]
    model = fig11.linear(x, seconds, (0,))
    far = np.array([[5000.0, 10.0, 3.0]])
    assert model(far) == pytest.approx(1e-3 + 1e-2 + 0.075 + 4e-4 - 3e-7)


def test_a_forest_learns_and_does_not_extrapolate() -> None:
    x = np.linspace(0, 10, 60)[:, None]
    model = fig11.forest(x, 1 + x[:, 0], 20)
    assert model(np.array([[5.0]])) == pytest.approx(6.0, abs=0.4)
    assert model(np.array([[100.0]]))[0] < 11.01


def test_features_put_each_side_in_its_place() -> None:
    samples = [Sample(PREFILL, 60, 1000, 0, 0.1, 48, 8), Sample(DECODE, 48, 8, 4000, 0.02, 60, 1000),
               Sample(DECODE, 108, 4, 400, 0.01)]
    x, seconds = fig11.features_of(samples, PREFILL)
    assert (x.tolist(), seconds.tolist()) == ([[1000, 60, 8, 0, 48]], [0.1])
    x, _ = fig11.features_of(samples, DECODE)
    assert x.tolist() == [[1000, 60, 8, 4000, 48], [0, 0, 4, 400, 108]]


def test_sampled_rows_are_a_grid_of_the_range() -> None:
    grid = np.array([(t, p) for t in (1, 2, 4, 8, 16) for p in (10, 20, 30, 40)], dtype=float)
    table = fig11.Table("t", ("tokens", "SMs"), grid, np.ones(20), np.ones(20))
    corners = {tuple(row) for row in grid[fig11.sampled(table, 2, True)]}
    assert corners == {(1, 10), (1, 40), (16, 10), (16, 40)}
    half = {tuple(row) for row in grid[fig11.sampled(table, 2, False)]}
    assert half == {(1, 30), (1, 40), (4, 30), (4, 40)}  # short counts, many SMs
    mixed = fig11.Table("t", ("tokens", "SMs"), grid, np.array([1e-6] * 15 + [1e-5] * 5), np.ones(20))
    assert len(mixed.without_launches().points) == 5


def test_errors_are_means_of_absolute_relative_ones() -> None:
    assert fig11.error(np.array([1.1, 0.8]), np.ones(2)) == pytest.approx(0.15)
    assert np.isnan(fig11.error(np.empty(0), np.empty(0)))
    assert fig11._cell(0.015, float("nan")) == "1.5 / -"
