"""Messages of many edges at a time: the same as edge by edge, and a bound of every choice."""

from __future__ import annotations

import numpy as np
import pytest

from passes.solver import passing
from passes.solver.graph import Graph
from passes.solver.passing import MessagePassing
from passes.solver.problem import Problem, Tables
from tests.solver.oracle import brute_force

INF = float("inf")


def _problem(seed: int) -> Problem:
    """Six nodes of different sizes, one of them joined to no other."""
    rng = np.random.default_rng(seed)
    sizes = [3, 1, 4, 2, 3, 2]
    edges = ((0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (3, 4))
    matrices = tuple(rng.random((sizes[i], sizes[j])) for i, j in edges)
    return Problem(tuple(rng.random(size) for size in sizes), edges, matrices)


@pytest.mark.parametrize("seed", range(4))
def test_edges_together_are_as_edges_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem(seed)
    graph = Graph.of(problem, Tables())
    together = MessagePassing(graph)
    monkeypatch.setattr(passing, "LARGE", 8)  # some of both
    apart = MessagePassing(graph)
    weak = together.lower_bound(together.zeros())
    settled = together.ascend(together.zeros(), 5, INF)
    assert np.array_equal(settled, apart.ascend(apart.zeros(), 5, INF))
    assert apart.lower_bound(settled) == pytest.approx(together.lower_bound(settled), rel=1e-12)
    assert weak < together.lower_bound(settled) <= brute_force(problem).cost + 1e-12
    for backward in (False, True):
        choice = together.decode(settled, backward)
        assert problem.cost([choice[node] for node in range(6)]) >= brute_force(problem).cost - 1e-12
    packed = together.packed(together.unpacked(settled))
    assert np.array_equal(packed, settled)
