"""Choices in which equal layers are alike, within a memory limit, against brute force over all choices."""

from __future__ import annotations

import itertools
import time

import pytest

from passes.search.cost_kinds import CostKinds
from passes.search.tied_planes import TiedPlanes
from passes.solver.alike import Ties
from passes.solver.problem import Infeasible, Problem
from tests.search.test_overlapped import random_kinds
from tests.solver.layered import layered

LAYERS = 6


def layers_of_kinds(problem: Problem, seed: int, efficiency: float) -> CostKinds:
    """Those of the first layer, in all."""
    kinds = random_kinds(problem, seed, efficiency)
    nodes = [kinds.nodes[node % 2] for node in range(2 * LAYERS)]
    edges = [kinds.edges[edge % 2] for edge in range(len(problem.edges))]
    return CostKinds(tuple(nodes), tuple(edges), kinds.count, kinds.paths)


def searched(problem: Problem, kinds: CostKinds) -> TiedPlanes:
    search = TiedPlanes(problem, kinds, Ties.among(problem), time.monotonic() + 60.0, 1e-3)
    search.run()
    return search


@pytest.mark.parametrize("efficiency", [0.0, 0.5])
def test_it_is_as_good_as_the_best_of_layers_alike_or_a_mix_is_better(efficiency: float) -> None:
    optimal = 0
    for seed in range(16):
        problem = layered(seed, LAYERS)
        kinds = layers_of_kinds(problem, seed, efficiency)
        every = itertools.product(range(2), repeat=2 * LAYERS)
        least = min((kinds.seconds(problem, one) for one in every if problem.fits(one)), default=None)
        if least is None:
            with pytest.raises(Infeasible):
                searched(problem, kinds)
            continue
        found = searched(problem, kinds)
        assert problem.fits(found.choice)
        assert found.cost == kinds.seconds(problem, found.choice) >= least * (1.0 - 1e-12)
        ties = found.ties
        alike = [ties.expanded(one) for one in itertools.product(range(2), repeat=ties.kinds)]
        fitting = [kinds.seconds(problem, one) for one in alike if problem.fits(one)]
        assert found.cost <= min(fitting) * (1.0 + 1e-3)
        optimal += found.cost <= least * (1.0 + 1e-3)
    assert optimal >= 10
