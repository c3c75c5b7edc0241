"""Deep problems of equal layers: what is alike is held as one, and what that proves, against a dynamic program."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from passes.solver import core
from passes.solver.alike import REACH, Alike, Side
from passes.solver.branches import prune
from passes.solver.graph import Graph
from passes.solver.marginal import Relaxation, build_program
from passes.solver.passing import MessagePassing, bound_of
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
def test_the_relaxation_of_what_is_alike_is_a_bound_near_that_of_the_whole(seed: int) -> None:
    layers = _model(seed, depth=40)
    graph = _graph(layers)
    whole, folded = Relaxation(graph).solve(INF), Relaxation(graph, Alike.of(graph)).solve(INF)
    assert whole is not None and folded is not None
    truth, bound = _truth(layers), bound_of(graph, folded.messages)
    assert bound <= truth * (1.0 + 1e-9)
    plain = bound_of(graph, whole.messages)
    assert plain - 0.01 * truth <= bound <= plain * (1.0 + 1e-9)


def test_deep_problems_are_solved_as_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    relaxed: list[Alike | None] = []

    def relaxation(graph: Graph, alike: Alike | None = None, integers: bool = False) -> Relaxation:
        relaxed.append(alike)
        return Relaxation(graph, alike, integers)

    monkeypatch.setattr(core, "Relaxation", relaxation)
    monkeypatch.setattr(core, "QUICK", 100)
    for seed in range(10):
        layers = _model(seed, depth=80)
        # Nothing is reduced before: layers of three joined nodes would be one node each.
        found = core.solve_presolved(_graph(layers), core.Budget(INF, 0.0))
        assert found.cost == pytest.approx(_truth(layers), rel=1e-9)
        assert found.bound == pytest.approx(found.cost, rel=1e-9)
        assert solve(_deep(layers)).cost == pytest.approx(_truth(layers), rel=1e-9)
    assert sum(alike is not None for alike in relaxed) >= 3, "nothing was relaxed as one"


@pytest.mark.parametrize("seed", [1, 3, 4, 6])
def test_what_is_forbidden_leaves_alike_what_is_alike(seed: int) -> None:
    layers = _model(seed, depth=40)
    graph, truth = _graph(layers), _truth(layers)
    alike = Alike.of(graph)
    passing = MessagePassing(graph)
    settled = passing.ascend(passing.zeros(), 5, INF)
    bound, messages = passing.lower_bound(settled), passing.unpacked(settled)
    cutoff = truth + 1e-6 + 0.02 * (truth - bound)
    alone, together = graph.copy(), graph.copy()
    alone_least = prune(alone, messages, bound, cutoff)
    assert prune(together, messages, bound, cutoff, alike) >= alone_least
    forbidden = lambda pruned: sum(
        int(np.isinf(m).sum()) for a in pruned.adjacent.values() for m in a.values()
    )
    assert forbidden(graph) < forbidden(together) <= forbidden(alone)
    for node, first in alike.like.items():
        assert together.cost[node] is together.cost[first]
    kinds: dict[tuple[Side, Side], Array] = {}
    for node, other in alike.side_like:
        matrix = together.adjacent[node][other]
        assert kinds.setdefault(alike.kind(node, other), matrix) is matrix
    assert core.solve_graph(together, core.Budget(INF, 0.0)).cost == pytest.approx(truth, rel=1e-9)


def test_kinds_are_as_many_however_deep_the_model_is() -> None:
    kinds = [Alike.of(_graph(_model(0, depth))) for depth in (20, 40, 80)]
    assert len({len(each.count) for each in kinds}) == 1
    assert len({len(each.edges) for each in kinds}) == 1
    most = max(kinds[2].count.values())
    assert most >= 80 - 2 * REACH, most


def test_all_that_are_alike_have_the_same_costs_and_sides() -> None:
    graph = _graph(_model(1, depth=30))
    alike = Alike.of(graph)
    for node, first in alike.like.items():
        assert graph.cost[node] is graph.cost[first]
        sides = [
            sorted(alike.side_like[each, other] for other in graph.adjacent[each]) for each in (node, first)
        ]
        assert sides[0] == sides[1]
    for (node, other), (first, beside) in alike.side_like.items():
        assert graph.adjacent[node][other] is graph.adjacent[first][beside]


def test_what_differs_in_one_number_is_not_alike() -> None:
    layers = _model(0, depth=30)
    odd = layers[10]
    costs = (odd.costs[0], odd.costs[1] + np.array([0.0, 1e-9, 0.0]), *odd.costs[2:])
    alike = Alike.of(_graph([*layers[:10], _Layer(costs, odd.pairs, odd.onward), *layers[11:]]))
    assert alike.count[alike.like[10 * WITHIN + 1]] == 1
    assert alike.count[alike.like[9 * WITHIN]] == 1  # two steps from it
    assert alike.count[alike.like[20 * WITHIN + 1]] > 10


def test_a_node_may_have_several_sides_that_are_alike() -> None:
    """A ring of equal nodes whose matrix is the same from both sides: every node has two of the one kind."""
    matrix, cost = np.array([[2.0, 0.5], [0.5, 1.0]]), np.array([0.0, 0.3])
    count = 12
    edges = tuple((node, (node + 1) % count) for node in range(count))
    problem = Problem((cost,) * count, edges, (matrix,) * count)
    graph = Graph.of(problem, Tables())
    alike = Alike.of(graph)
    assert list(alike.count.values()) == [count]
    assert alike.times[alike.side_like[0, 1]] == 2
    relaxed = Relaxation(graph, alike).solve(INF)
    assert relaxed is not None
    # Every second one: 12 edges of 0.5, and 0.3 six times.
    assert bound_of(graph, relaxed.messages) == pytest.approx(12 * 0.5 + 6 * 0.3)
    assert len(build_program(graph, alike).cost) == 2 + 4
