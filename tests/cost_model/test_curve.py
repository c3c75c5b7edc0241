import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.measurements import Curve


def test_passes_through_its_points() -> None:
    curve = Curve((1, 10, 1000), (2.0, 3.0, 50.0), 0.1, 0.5)
    assert [curve(x) for x in (1, 10, 1000)] == pytest.approx([2.0, 3.0, 50.0], rel=1e-12)


def test_is_exact_for_a_power_law_between_points() -> None:
    curve = Curve((1, 100), (2.0, 20.0), 0.0, 0.0)  # y = 2 sqrt(x)
    assert curve(25) == pytest.approx(10.0)


def test_is_straight_outside() -> None:
    curve = Curve((100, 200), (5.0, 8.0), 0.03, 0.02)
    assert curve(0) == pytest.approx(2.0)
    assert curve(50) == pytest.approx(3.5)
    assert curve(300) == pytest.approx(10.0)


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-7, 1e-2)), min_size=1, max_size=8),
    st.floats(0, 1),
    st.floats(0, 1e3),
    st.lists(st.floats(0, 1e9), min_size=2, max_size=10),
)
def test_never_falls(
    points: list[tuple[int, float]], below: float, above: float, queries: list[float]
) -> None:
    xs = sorted({x for x, _ in points})
    ys = sorted(y for _, y in points)[: len(xs)]
    curve = Curve(xs, ys, below * ys[0] / xs[0], above)
    values = [curve(x) for x in sorted(queries)]
    assert values[0] >= 0
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(values))
