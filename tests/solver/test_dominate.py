"""Strategies are told apart by a few columns first: the same are found as by comparing every pair in every column."""

from __future__ import annotations

import numpy as np
import pytest

from passes.solver.presolve import dominated_pairs
from passes.solver.problem import Array, Tables


def _drawn(rng: np.random.Generator, rows: int, columns: int) -> Array:
    """Few distinct values, so that there are ties; some entries impossible; some rows alike, or impossible."""
    matrix = rng.integers(0, 4, (rows, columns)).astype(float)
    matrix[rng.random(matrix.shape) < 0.2] = np.inf
    matrix[rng.integers(rows)] = matrix[rng.integers(rows)]
    if rng.random() < 0.3:
        matrix[rng.integers(rows)] = np.inf
    return matrix


def _by_every_column(cost: Array, matrices: list[Array]) -> set[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    for a in range(len(cost)):
        for b in range(len(cost)):
            total = cost[a] - cost[b]
            for matrix in matrices:
                allowed = [k for k in range(matrix.shape[1]) if np.isfinite(matrix[b, k])]
                total += max((matrix[a, k] - matrix[b, k] for k in allowed), default=-np.inf)
            if a != b and total <= 0:  # nan, of inf - inf, is not
                found.add((a, b))
    return found


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("seed", range(60))
def test_the_pairs_are_those_of_every_column(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 9))
    cost = rng.integers(0, 3, count).astype(float)
    matrices = [_drawn(rng, count, int(rng.integers(1, 6))) for _ in range(rng.integers(0, 4))]
    first, second = dominated_pairs(cost, matrices)
    assert set(zip(first.tolist(), second.tolist(), strict=True)) == _by_every_column(cost, matrices)


def test_once_makes_one_result_per_key() -> None:
    tables = Tables()
    one, two = np.zeros(2), np.zeros(2)
    asked = (("a", one), ("b", one), ("a", two), ("a", one))
    made = [tables.once(name, (array,), lambda name=name: [name]) for name, array in asked]
    assert made == [["a"], ["b"], ["a"], ["a"]]
    assert made[0] is made[3]
    assert made[0] is not made[2]
