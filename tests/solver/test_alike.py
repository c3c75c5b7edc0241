"""Deep problems of equal layers: which nodes are alike, and the solver against a dynamic program."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from passes.solver import core
from passes.solver.graph import REACH, Graph, alike
from passes.solver.problem import Array, Problem, Tables
from passes.solver.solve import solve

INF = float("inf")
SIZE, WITHIN = 3, 3
PAIRS = tuple(itertools.combinations(range(WITHIN), 2))


@dataclass(frozen=True)
class _Layer:
    """Of the nodes of a layer, all joined: their costs, and what every pair of them costs; the first node's is joined
    with that of the layer before."""

    costs: tuple[Array, ...]
    pairs: tuple[Array, ...]
    onward: Array

    @staticmethod
    def random(rng: np.random.Generator) -> _Layer:
        pairs = [rng.random((SIZE, SIZE)) for _ in PAIRS]
        costs = tuple(rng.random(SIZE) for _ in range(WITHIN))
        onward = np.round(3 * rng.random((SIZE, SIZE)), 2)
        onward[rng.integers(SIZE), rng.integers(SIZE)] = INF
        return _Layer(costs, tuple(pairs), onward)

    def least(self) -> Array:
        """[SIZE] The least cost of the layer by what its first node has."""
        least = np.full(SIZE, INF)
        for choice in itertools.product(range(SIZE), repeat=WITHIN):
            cost = sum(self.costs[i][a] for i, a in enumerate(choice))
            for matrix, (i, j) in zip(self.pairs, PAIRS, strict=True):
                cost += matrix[choice[i], choice[j]]
            least[choice[0]] = min(least[choice[0]], cost)
        return least


def _deep(layers: list[_Layer]) -> Problem:
    costs = [cost for layer in layers for cost in layer.costs]
    edges: list[tuple[int, int]] = []
    matrices: list[Array] = []
    for place, layer in enumerate(layers):
        first = place * WITHIN
        if place:
            edges.append((first - WITHIN, first))
            matrices.append(layer.onward)
        edges += [(first + i, first + j) for i, j in PAIRS]
        matrices += layer.pairs
    return Problem(tuple(costs), tuple(edges), tuple(matrices))


def _truth(layers: list[_Layer]) -> float:
    """Layer by layer [Bellman 1957]."""
    best = layers[0].least()
    for layer in layers[1:]:
        best = (best[:, None] + layer.onward).min(axis=0) + layer.least()
    return float(best.min())


def _model(seed: int, depth: int) -> list[_Layer]:
    """Equal layers between two ends of their own, and sometimes another one among them."""
    rng = np.random.default_rng(seed)
    layer = _Layer.random(rng)
    layers = [_Layer.random(rng), *[layer] * depth, _Layer.random(rng)]
    if seed % 2:
        layers[int(rng.integers(1, depth))] = _Layer.random(rng)
    return layers


def _graph(layers: list[_Layer]) -> Graph:
    return Graph.of(_deep(layers), Tables())


@pytest.mark.parametrize("seed", range(10))
def test_deep_problems_are_solved_as_layer_by_layer(seed: int) -> None:
    layers = _model(seed, depth=80)
    # Nothing is reduced before: layers of three joined nodes would be one node each.
    found = core.solve_presolved(_graph(layers), core.Budget(INF, 0.0))
    assert found.cost == pytest.approx(_truth(layers), rel=1e-9)
    assert found.bound == pytest.approx(found.cost, rel=1e-9)
    assert solve(_deep(layers)).cost == pytest.approx(_truth(layers), rel=1e-9)


def test_kinds_are_as_many_however_deep_the_model_is() -> None:
    kinds = [Counter(alike(_graph(_model(0, depth))).values()) for depth in (20, 40, 80)]
    assert len({len(each) for each in kinds}) == 1
    most = max(kinds[2].values())
    assert most >= 80 - 2 * REACH, most


def test_all_that_are_alike_have_the_same_costs_and_matrices() -> None:
    graph = _graph(_model(1, depth=30))
    like = alike(graph)
    for node, first in like.items():
        assert graph.cost[node] is graph.cost[first]
        around = [sorted(map(id, graph.adjacent[each].values())) for each in (node, first)]
        assert around[0] == around[1]


def test_what_differs_in_one_number_is_not_alike() -> None:
    layers = _model(0, depth=30)
    odd = layers[10]
    costs = (odd.costs[0], odd.costs[1] + np.array([0.0, 1e-9, 0.0]), *odd.costs[2:])
    like = alike(_graph([*layers[:10], _Layer(costs, odd.pairs, odd.onward), *layers[11:]]))
    count = Counter(like.values())
    assert count[like[10 * WITHIN + 1]] == 1
    assert count[like[9 * WITHIN]] == 1  # two steps from it
    assert count[like[20 * WITHIN + 1]] > 10
