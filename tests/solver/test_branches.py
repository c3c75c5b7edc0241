"""Branch and bound against brute force, on graphs whose cycles leave the relaxation fractional."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from passes.solver.branches import Branches
from passes.solver.graph import Graph
from passes.solver.problem import Problem, Tables

sys.path.insert(0, str(Path(__file__).parent))
from oracle import brute_force

INF = float("inf")
SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))]


def _frustrated(seed: int) -> Problem:
    """All of 6 nodes of 3 strategies joined: neighbours want to differ, and some pairs may not be chosen."""
    rng = np.random.default_rng(seed)
    edges = tuple((i, j) for i in range(6) for j in range(i))
    matrices = [np.eye(3) * rng.integers(1, 9) + rng.random((3, 3)) for _ in edges]
    for matrix in matrices:
        matrix[rng.random((3, 3)) < 0.1] = INF
    return Problem(tuple(0.1 * rng.random(3) for _ in range(6)), edges, tuple(matrices))


def _branches(problem: Problem, known: float = INF, tolerance: float = 0.0, most: int = 1000) -> Branches:
    return Branches(Graph.of(problem, Tables()), known, tolerance, INF, most)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_choice_is_found_and_proven(seed: int) -> None:
    problem = _frustrated(seed)
    truth = brute_force(problem)
    found = _branches(problem)
    if not truth.possible:
        assert found.best is None
        return
    assert found.best is not None
    assert problem.cost([found.best[node] for node in range(6)]) == pytest.approx(truth.cost)
    assert min(found.bound, found.cutoff) == pytest.approx(truth.cost)


def test_relaxations_of_such_graphs_are_fractional() -> None:
    assert sum(1000 - _branches(_frustrated(seed)).left > 2 for seed in range(40)) > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_left_open_keeps_its_bound(seed: int) -> None:
    problem = _frustrated(seed)
    truth = brute_force(problem)
    for most in (0, 1, 2, 3):
        assert _branches(problem, most=most).bound <= truth.cost * (1.0 + 1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_only_what_is_better_than_a_known_choice_by_the_tolerance_is_looked_for(seed: int) -> None:
    problem = _frustrated(seed)
    truth = brute_force(problem)
    if not truth.possible:
        return
    known = _branches(problem, known=truth.cost * (1.0 - 1e-12))
    assert known.best is None
    assert min(known.bound, known.cutoff) == pytest.approx(truth.cost)
    near = _branches(problem, known=1.05 * truth.cost, tolerance=0.1 * truth.cost)
    assert near.cost - min(near.bound, near.cutoff) <= 0.1 * truth.cost * (1.0 + 1e-9)
    assert min(near.bound, near.cutoff) <= truth.cost * (1.0 + 1e-9)
