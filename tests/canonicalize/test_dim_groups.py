from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.canonicalize.push_sweep import Group, flatten, refine, resolve

Shape = tuple[int, ...]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((4, 16, 32), (64, 32), ((4, 16), (32,))),
        ((64, 32), (64, 4, 8), ((64,), (4,), (8,))),
        ((5, 6, 4), (5, 8, 3), ((5,), (8,), (3,))),
        ((8, 4), (2, 16), ((2,), (4, 4))),
        ((4, 1, 16), (64,), ((4, 16),)),
        ((1, 16), (16,), ((16,),)),
        ((16,), (1, 16, 1), ((1,), (16,), (1,))),
        ((2, 3), (3, 2), ((3,), (2,))),
        ((0, 4), (4, 0), ((4,), (0,))),
        ((), (1, 1), ((1,), (1,))),
        ((1, 1), (), ()),
    ],
)
def test_refine(source: Shape, target: Shape, expected: tuple[Shape, ...]) -> None:
    assert refine(source, target) == expected


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=5), st.data())
def test_a_refinement_flattens_to_the_target(source: list[int], data: st.DataObject) -> None:
    total, target = math.prod(source), []
    while total > 1:
        target.append(data.draw(st.sampled_from([d for d in range(2, total + 1) if total % d == 0])))
        total //= target[-1]
        if data.draw(st.booleans()):
            target.append(1)
    groups = refine(source, target)
    assert [math.prod(group) for group in groups] == target
    assert all(group == (1,) or 1 not in group for group in groups)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([Group((4, 8)), Group((4, 8))], Group((4, 8))),
        ([Group((4, 8), True), Group((32,))], Group((4, 8), True)),
        ([Group((4, 8)), Group((32,))], Group((32,))),
        ([Group((2, 2, 8), True), Group((4, 8))], Group((4, 8), True)),
        ([Group((2, 16)), Group((4, 8))], Group((32,))),
        ([Group((1, 8)), Group((8,))], Group((8,))),
    ],
)
def test_resolve(groups: list[Group], expected: Group) -> None:
    assert resolve(groups) == expected


def test_flatten_of_groups_is_the_finer_shape() -> None:
    assert flatten([Group((4, 8)), Group((3,)), Group((4, 8)).ones]) == (4, 8, 3, 1, 1)
