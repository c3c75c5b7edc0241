"""Reductions alone: what they leave has the same optimum, and they leave little."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from passes.solver.branches import prune
from passes.solver.graph import DeadEnd, Graph
from passes.solver.passing import MessagePassing
from passes.solver.presolve import presolve, propagate
from passes.solver.problem import Array, Problem, Tables

sys.path.insert(0, str(Path(__file__).parent))
from oracle import brute_force, chain, random_problem

INF = float("inf")


def remaining(graph: Graph) -> Problem:
    """What is left as a problem of its own, its nodes renumbered; rows keep `Problem.steps` of their own."""
    at = {node: position for position, node in enumerate(graph.cost)}
    edges = [(i, j) for i in graph.cost for j in graph.adjacent[i] if i < j]
    return Problem(
        tuple(graph.cost.values()),
        tuple((at[i], at[j]) for i, j in edges),
        tuple(graph.adjacent[i][j] for i, j in edges),
    )


@pytest.mark.parametrize("seed", range(60))
def test_presolve_keeps_the_optimum_and_the_way_back(seed: int) -> None:
    problem = replace(random_problem(seed), limit=None)
    truth = brute_force(problem)
    graph = Graph.of(problem, Tables())
    try:
        presolve(graph)
    except DeadEnd:
        assert not truth.possible
        return
    left = remaining(graph)
    best = min((left.cost(c), c) for c in np.ndindex(*(len(v) for v in left.node_costs)))
    assert graph.constant + best[0] == pytest.approx(truth.cost)
    if np.isfinite(truth.cost):
        full = graph.expand(dict(zip(graph.cost, best[1], strict=True)))
        assert problem.cost([full[node] for node in range(len(problem.node_costs))]) == pytest.approx(
            truth.cost
        )


@pytest.mark.parametrize("latest", [INF, -INF], ids=["in time", "late"])
@pytest.mark.parametrize("seed", range(60))
def test_presolve_with_memory_rows_keeps_the_optimum(seed: int, latest: float) -> None:
    problem = random_problem(seed)
    if problem.limit is None:
        problem = replace(problem, limit=12.0)
    graph = Graph.of(problem, Tables())
    graph.add_rows(problem)
    truth = brute_force(problem)
    try:
        presolve(graph, latest=latest)
    except DeadEnd:
        assert truth.cost == INF
        return
    for node, vector in graph.cost.items():  # what messages and programs rely on
        assert np.isfinite(vector).all()
        assert all(np.isfinite(matrix).any(axis=1).all() for matrix in graph.adjacent[node].values())
    best, rows = INF, graph.rows()
    for choice in np.ndindex(*(len(graph.cost[node]) for node in graph.cost)):
        left = dict(zip(graph.cost, choice, strict=True))
        full = graph.expand(left)
        ordered = [full[node] for node in range(len(problem.node_costs))]
        fits = problem.peak(ordered)[0] <= (problem.limit or 0.0)
        assert fits == rows.fits(left)
        best = min(best, problem.cost(ordered) if fits else INF)
    assert best == pytest.approx(truth.cost)


def test_equality_chain_becomes_one_choice() -> None:
    """100 nodes that must agree, every tenth under another name for the strategies: cost is the best column."""
    rng = np.random.default_rng(0)
    same = np.where(np.eye(4, dtype=bool), 0.0, INF)
    turned = same[:, [1, 2, 3, 0]]
    costs = rng.integers(0, 50, (100, 4)).astype(np.float64)
    problem = Problem(
        tuple(costs),
        tuple((i, i + 1) for i in range(99)),
        tuple(turned if i % 10 == 9 else same for i in range(99)),
    )
    graph = Graph.of(problem, Tables())
    presolve(graph)
    assert not graph.cost
    turns = np.arange(100) // 10
    totals = [sum(costs[i, (a - turns[i]) % 4] for i in range(100)) for a in range(4)]
    assert graph.constant == min(totals)


def test_equality_clique_with_memory_adds_usages() -> None:
    same = np.where(np.eye(3, dtype=bool), 0.0, INF)
    usage = np.array([9, 5, 1])
    problem = Problem(
        (*(np.array([0.0, 1.0, 5.0]),) * 3, np.array([0.0, 1.0])),
        ((0, 1), (1, 2), (2, 0)),
        (same,) * 3,
        ((0, 1),) * 4,
        (*(usage,) * 3, np.array([4, 0])),
        16.0,
    )
    graph = Graph.of(problem, Tables())
    graph.add_rows(problem)
    presolve(graph)
    node, _ = graph.cost  # the last stays: with it the row can overflow
    assert graph.cost[node].tolist() == [3.0, 15.0]  # 27 bytes fit nowhere: the first strategy is gone
    usage = graph.usage(node)
    assert usage is not None
    assert usage.used.tolist() == [[12.0, 0.0]]
    assert graph.slack.tolist() == [13.0]


def test_separable_edges_vanish() -> None:
    rows, columns = np.array([1.0, 2.0, 4.0]), np.array([0.5, 7.0])
    tables = Tables()
    parts = tables.separate(tables.intern(rows[:, None] + columns))
    assert parts is not None
    assert (parts[0][:, None] + parts[1] == rows[:, None] + columns).all()
    assert tables.separate(tables.intern(np.array([[0.0, 1.0], [1.0, 0.0]]))) is None


def test_equal_tables_are_one_and_are_computed_with_once() -> None:
    """A chain of 400 nodes with 3 distinct matrices: reducing it makes far fewer tables than nodes."""
    problem = chain(400, 5, seed=0, skip=400)
    copies = replace(problem, edge_costs=tuple(matrix.copy() for matrix in problem.edge_costs))
    tables = Tables()
    presolve(Graph.of(copies, tables))
    once = Tables()
    presolve(Graph.of(problem, once))
    assert tables.size == once.size
    assert tables.size < 5 * 400


def test_late_reductions_leave_the_nodes() -> None:
    problem = chain(40, 5, seed=0, skip=40)
    graph = Graph.of(problem, Tables())
    presolve(graph, latest=-INF)
    assert len(graph.cost) == 40 and not graph.trail


def test_tables_of_a_part_share_what_is_known_of_the_whole() -> None:
    whole = Tables()
    matrix = whole.intern(np.array([[1.0, 2.0], [3.0, 4.0]]))
    part = Tables(whole)
    assert part.intern(matrix.copy()) is matrix
    assert part.transpose(matrix) is whole.transpose(matrix)
    assert part.transpose(part.transpose(matrix)) is matrix
    before = whole.size
    own = part.add(matrix, matrix)
    assert part.transpose(own).tolist() == [[2.0, 6.0], [4.0, 8.0]]
    assert whole.size == before


def test_dead_strategies_spread_along_edges() -> None:
    allowed = np.array([[0.0, INF], [0.0, 0.0]])  # j's second strategy needs i's second
    problem = Problem((np.zeros(2), np.array([INF, 0.0])), ((0, 1),), (allowed,))
    graph = Graph.of(problem, Tables())
    propagate(graph)
    assert graph.expand({0: 0, 1: 0}) == {0: 1, 1: 1}


def pair_minimum(problem: Problem, i: int, a: int) -> float:
    costs = [
        problem.cost(choice) for choice in np.ndindex(*(len(v) for v in problem.node_costs)) if choice[i] == a
    ]
    return min(costs)


def test_messages_bound_and_prune_only_what_is_worse() -> None:
    rng = np.random.default_rng(7)
    edges = ((0, 1), (1, 2), (2, 3), (3, 0), (0, 2))
    tables: tuple[Array, ...] = tuple(rng.integers(0, 30, (3, 3)).astype(np.float64) for _ in edges)
    problem = Problem(tuple(rng.integers(0, 9, 3).astype(np.float64) for _ in range(4)), edges, tables)
    best = brute_force(problem).cost
    graph = Graph.of(problem, Tables())
    passing = MessagePassing(graph)
    weak = passing.lower_bound(passing.zeros())
    settled = passing.ascend(passing.zeros(), 20, INF)
    bound, messages = passing.lower_bound(settled), passing.unpacked(settled)
    assert weak < bound <= best + 1e-9
    least = prune(graph, messages, bound, best + 3)
    assert least >= best + 3 - 1e-9
    pruned = [(i, a) for i in range(4) for a in range(3) if not np.isfinite(graph.cost[i][a])]
    assert pruned
    assert all(pair_minimum(problem, i, a) >= best + 3 - 1e-9 for i, a in pruned)
