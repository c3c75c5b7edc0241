"""Choices in which one kind of transfer is done behind its reader: against all that the reader could have."""

from __future__ import annotations

import numpy as np
import pytest

from passes.search.rival_choices import past_transfers
from passes.solver.problem import Problem
from tests.solver.oracle import random_problem


def test_a_sum_is_divided_before_it_is_reduced() -> None:
    """A sum is whole, or a part on every rank, which takes 5 to add up; who divides it may take it either way, and the
    end wants it whole. One way to take the part is more expensive. Two such layers, and one whose transfer is too short
    to be looked at."""
    made, same = np.array([0.0]), np.array([0.0, 3.0, 0.0])
    read, end = np.array([[5.0, 0.0, 0.0]]), np.array([[0.0], [5.0], [5.0]])
    short = np.array([[0.1, 0.0, 0.0]])
    edges = tuple((3 * k + i, 3 * k + i + 1) for k in range(3) for i in range(2))
    problem = Problem((made, same, made) * 3, edges, (read, end, read, end, short, end))
    found = list(past_transfers(problem, (0,) * 9, 1.0))
    assert found == [(0, 2, 0, 0, 2, 0, 0, 0, 0)]
    assert list(past_transfers(problem, found[0], 6.0)) == []


@pytest.mark.parametrize("seed", range(20))
def test_each_reader_has_what_costs_least_of_what_reads_for_nothing(seed: int) -> None:
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    base = tuple(int(rng.integers(len(costs))) for costs in problem.node_costs)
    for choice in past_transfers(problem, base, 1e-9):
        for node in (n for n, place in enumerate(choice) if place != base[n]):
            assert cost_with(problem, base, node, choice[node]) in least_of_free(problem, base, node)


def cost_with(problem: Problem, base: tuple[int, ...], node: int, place: int) -> float:
    return problem.cost([place if n == node else known for n, known in enumerate(base)])


def least_of_free(problem: Problem, base: tuple[int, ...], node: int) -> list[float]:
    """Of every transfer to `node`, the least cost of all strategies that it has to read it for nothing."""
    found: list[float] = []
    for (i, j), costs in zip(problem.edges, problem.edge_costs, strict=True):
        if j == node and costs[base[i], base[j]] > 0.0:
            free = [place for place, way in enumerate(costs[base[i]]) if way == 0.0]
            found.append(min((cost_with(problem, base, node, place) for place in free), default=np.inf))
    return found
