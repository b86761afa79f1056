"""Straight lines between points, by hand."""

import numpy as np
import pytest

from bullet.piecewise import between, linear, piece

NODES = [1.0, 2.0, 4.0]


@pytest.mark.parametrize(("x", "begins", "share"), [
    (0.0, 0, -1.0), (1.0, 0, 0.0), (1.5, 0, 0.5), (2.0, 0, 1.0), (2.5, 1, 0.25), (4.0, 1, 1.0), (8.0, 1, 3.0)])
def test_where_a_value_lies(x, begins, share):
    """At a node it is the end of the piece before; beyond the nodes the outermost piece goes on."""
    assert piece(x, NODES) == begins
    assert between(x, NODES) == (begins, share)
    values = [10.0, 30.0, 20.0]
    assert linear(x, NODES, values) == values[begins] + share * (values[begins + 1] - values[begins])


def test_values_may_be_arrays_and_one_node_holds_everywhere():
    assert linear(3.0, NODES, [np.zeros(2), np.array([2.0, 4.0]), np.array([4.0, 0.0])]).tolist() == [3.0, 2.0]
    assert linear(7.0, [1.0], [5.0]) == 5.0
