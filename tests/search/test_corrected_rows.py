"""Rows that are given what a program holds besides what the search counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from passes.search.state_columns import PARTS, corrected, held_besides, with_parts
from passes.solver.problem import Problem

NAMES = ["a", "b", "c"]
PROBLEM = Problem(
    node_costs=(np.zeros(2), np.zeros(1), np.zeros(1)),
    intervals=((0, 3), (1, 2), (2, 3)),
    usages=(np.array([10.0, 20.0]), np.array([5.0]), np.array([7.0])),
)
"""By hand: the first choice uses 10, 15 and 17."""


def test_what_a_program_holds_more_and_less_by_hand() -> None:
    """A transfer before `b` holds 31; at `c` there are 4 fewer than are counted, and far from the peak that matters
    less."""
    found = held_besides(
        PROBLEM, (0, 0, 0), NAMES, [("start", 0), ("a", 10), ("gather", 31), ("b", 20), ("c", 13)]
    )
    assert {name: more for name, (more, _) in found.items()} == {"a": 0.0, "b": 16.0, "c": -4.0}
    assert found["b"][1] == pytest.approx(2e-3 * 31) and found["c"][1] == pytest.approx(0.3 * 18)


def test_rows_say_what_the_program_of_a_choice_holds() -> None:
    held = [("a", 10), ("b", 31), ("c", 13)]
    besides = held_besides(PROBLEM, (0, 0, 0), NAMES, held)
    problem, raised = corrected(with_parts(PROBLEM), NAMES, besides)
    zeros = (0,) * PARTS
    profile = problem.profile((0, 0, 0, *zeros)) - raised
    assert profile[1] == 31.0
    assert all(profile >= [nbytes for _, nbytes in held])
    assert problem.profile((1, 0, 0, *zeros))[1] - raised == 41.0
    assert not replace(problem, limit=30.0 + raised).fits((0, 0, 0, *zeros))
    assert replace(problem, limit=31.0 + raised).fits((0, 0, 0, *zeros))


def test_where_more_changes_than_there_are_parts_more_is_given() -> None:
    """Of 200 steps, each with other bytes: never less than the program holds."""
    count, rng = 200, np.random.default_rng(0)
    names = [str(step) for step in range(count)]
    intervals = tuple((step, step + 1) for step in range(count))
    problem = Problem(tuple([np.zeros(1)] * count), (), (), intervals, tuple([np.ones(1)] * count))
    held = [(name, int(nbytes)) for name, nbytes in zip(names, rng.integers(1, 1000, count), strict=True)]
    besides = held_besides(problem, (0,) * count, names, held)
    given, raised = corrected(with_parts(problem), names, besides)
    profile = given.profile((0,) * (count + PARTS)) - raised
    assert all(profile >= [nbytes for _, nbytes in held])


def test_of_a_program_of_which_nothing_is_known_nothing_is_given() -> None:
    problem, raised = corrected(with_parts(PROBLEM), NAMES, {})
    assert raised == 0.0
    assert list(problem.profile((0,) * (3 + PARTS))) == [10.0, 15.0, 17.0]
