"""Problems whose equal layers choose alike, against the problems that they are of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from passes.solver.graph import Ties
from passes.solver.problem import Problem
from tests.solver.layered import layered


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_of_kinds_costs_what_it_costs_all_nodes(seed: int) -> None:
    problem = layered(seed, 12, size=3)
    ties = Ties.among(problem)
    tied = ties.problem(problem)
    assert ties.kinds == len(tied.node_costs) < len(problem.node_costs) / 2
    rng = np.random.default_rng(seed)
    for _ in range(10):
        choice = [int(a) for a in rng.integers(0, 3, ties.kinds)]
        assert tied.cost(choice) == pytest.approx(problem.cost(ties.expanded(choice)))


def test_layers_far_from_the_ends_are_of_the_same_kinds() -> None:
    """Two steps from a node are looked at: 3 nodes at either end see it, and those between are of two kinds."""
    ties = Ties.among(layered(0, 12))
    assert len(set(ties.of[4:-4])) == 2
    assert all(ties.of[node] == ties.of[node + 2] for node in range(4, 18))


def test_nodes_that_use_something_else_choose_for_themselves() -> None:
    problem = layered(0, 12)
    usages = list(problem.usages)
    usages[10] = usages[10] + 1
    before, after = Ties.among(problem), Ties.among(replace(problem, usages=tuple(usages)))
    assert before.of[10] == before.of[8] == before.of[12]
    assert after.of[10] not in {*after.of[:10], *after.of[11:]}
    assert after.of[8] == after.of[12]


def test_an_edge_between_nodes_of_one_kind_is_a_cost_of_that_kind() -> None:
    """A ring of six: all nodes are alike, and each pays for what both its ends choose."""
    cost, matrix = np.array([1.0, 2.0]), np.array([[5.0, 7.0], [11.0, 13.0]])
    ring = tuple((i, (i + 1) % 6) for i in range(6))
    problem = Problem((cost,) * 6, ring, (matrix,) * 6)
    ties = Ties.among(problem)
    assert ties.kinds == 1
    assert [float(c) for c in ties.problem(problem).node_costs[0]] == [6 * 6.0, 6 * 15.0]
