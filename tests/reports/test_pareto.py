"""The Pareto front, by hand and by its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stickymoe.reports.pareto import dominates, pareto_front

COSTS = st.integers(0, 6).map(float)  # few values, so that points tie
POINTS = st.lists(st.tuples(COSTS, COSTS), max_size=20)


def front(points):
    return pareto_front(points, dominates)


def test_by_hand():
    points = [(1.0, 9.0), (2.0, 7.0), (3.0, 8.0), (4.0, 5.0), (4.0, 6.0), (0.5, 9.0)]
    assert front(points) == [(2.0, 7.0), (4.0, 5.0), (0.5, 9.0)]
    assert front([(1.0, 1.0), (1.0, 1.0)]) == [(1.0, 1.0)] * 2, "equal points do not beat each other"
    assert front([]) == []


@given(POINTS)
def test_no_point_of_the_front_is_dominated_and_every_other_point_is(points):
    optimal = front(points)
    assert not any(dominates(a, b) for a in points for b in optimal)
    assert all(any(dominates(a, b) for a in optimal) for b in points if b not in optimal)


@given(POINTS)
def test_the_front_of_the_front_is_the_front(points):
    assert front(front(points)) == front(points)


def test_beats_need_not_be_transitive():
    """Rows are compared over common seeds, so a may beat b and b beat c while a and c cannot be compared."""
    pairs = {("a", "b"), ("b", "c")}
    assert pareto_front(["a", "b", "c", "d"], lambda x, y: (x, y) in pairs) == ["a", "d"]
