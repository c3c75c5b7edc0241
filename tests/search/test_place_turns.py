"""Turns: one kind of place of a choice, turned over to what another choice has there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from passes.search.rival_choices import turns
from passes.search.search_space import CostKinds
from passes.solver.problem import Problem
from tests.search.test_overlapped import random_kinds
from tests.solver.oracle import random_problem


def layers(count: int) -> tuple[Problem, CostKinds]:
    """Pairs of an op that is expensive or cheap and a second one, with a way between them."""
    expensive, same, way = np.array([1.0, 3.0]), np.array([1.0, 1.0]), np.array([[0.0, 2.0], [2.0, 0.5]])
    edges = tuple((2 * k, 2 * k + 1) for k in range(count))
    problem = Problem((expensive, same) * count, edges, (way,) * count)
    return problem, CostKinds((0,) * 2 * count, (0,) * count, 1, ())


@pytest.mark.parametrize("count", [3, 20])
def test_equal_layers_are_turned_over_together(count: int) -> None:
    """Of every pair the second op differs, and of the last the first as well: two kinds of place."""
    problem, kinds = layers(count)
    base = (0, 0) * count
    other = (0, 1) * (count - 1) + (1, 1)
    found = turns(problem, kinds, base, [other])
    # The last pair costs 3 - 1 more in its op, and 0.5 in its way; each other one 2 in its way.
    assert [turn.seconds for turn in found] == [pytest.approx(2.5), pytest.approx(2.0 * (count - 1))]
    assert [turn.of(base) for turn in found] == [(0, 0) * (count - 1) + (1, 1), (0, 1) * (count - 1) + (0, 0)]


def test_a_turn_that_several_have_is_listed_once() -> None:
    problem, kinds = layers(2)
    other = (0, 0, 1, 1)
    assert len(turns(problem, kinds, (0, 0, 0, 0), [other, other, (0, 0, 0, 0)])) == 1


def possible(seed: int) -> Problem:
    """A random one in which nothing is impossible."""
    problem = random_problem(seed)
    finite = lambda costs: np.where(np.isfinite(costs), costs, 30.0)
    costs, between = (tuple(map(finite, group)) for group in (problem.node_costs, problem.edge_costs))
    return replace(problem, node_costs=costs, edge_costs=between, limit=None)


@pytest.mark.parametrize("seed", range(10))
def test_seconds_are_what_the_objective_grows_by(seed: int) -> None:
    problem = possible(seed)
    kinds = random_kinds(problem, seed, 0.5)
    rng = np.random.default_rng(seed)

    base, other = ([int(rng.integers(len(costs))) for costs in problem.node_costs] for _ in range(2))
    found = turns(problem, kinds, base, [other])
    for turn in found:
        grown = kinds.seconds(problem, turn.of(base)) - kinds.seconds(problem, base)
        assert turn.seconds == pytest.approx(grown)
        assert all(turn.of(base)[node] == other[node] for node in turn.chosen)
    # All places are turned over, each by one turn.
    assert sorted(node for turn in found for node in turn.chosen) == [
        node for node, (a, b) in enumerate(zip(base, other, strict=True)) if a != b
    ]
