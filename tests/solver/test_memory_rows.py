"""Usage over time, the rows that bind, warm starts: against sums over nodes, and brute force."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from passes.solver import memory_rows, row_programs
from passes.solver.branches import Search
from passes.solver.graph import Graph
from passes.solver.memory_rows import improve_prices
from passes.solver.problem import Problem, Tables
from passes.solver.solve import solve
from passes.solver.usage import Rows, Usage, combine

sys.path.insert(0, str(Path(__file__).parent))
from oracle import brute_force, chain, random_problem

INF = float("inf")


def dense(usage: Usage, rows: int) -> np.ndarray:
    total = np.zeros((rows, usage.used.shape[1]))
    for first, last, used in zip(usage.first, usage.last, usage.used, strict=True):
        total[first:last] += used
    return total


@pytest.mark.parametrize("seed", range(20))
def test_usages_add_up_row_by_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts: list[Usage] = []
    for _ in range(int(rng.integers(1, 9))):
        first, last = sorted(int(row) for row in rng.choice(12, 2, replace=False))
        parts.append(Usage.of(first, last, rng.integers(0, 3, 4).astype(np.float64)))
    total = combine(parts)
    assert (dense(total, 12) == sum(dense(part, 12) for part in parts)).all()
    assert (total.first[1:] >= total.last[:-1]).all()


def with_rows(seed: int) -> tuple[Problem, Graph, Rows]:
    problem = replace(random_problem(seed), limit=11.0)
    graph = Graph.of(problem, Tables())
    graph.add_rows(problem)
    return problem, graph, graph.rows()


@pytest.mark.parametrize("seed", range(40))
def test_rows_that_are_left_bind_as_all_do(seed: int) -> None:
    problem, _, rows = with_rows(seed)
    for choice in np.ndindex(*(len(vector) for vector in problem.node_costs)):
        assert rows.fits(dict(enumerate(choice))) == (problem.peak(choice)[0] <= 11.0)


@pytest.mark.parametrize("seed", range(20))
def test_priced_rows_are_the_prices_of_the_profile(seed: int) -> None:
    problem, _, rows = with_rows(seed)
    prices = np.random.default_rng(seed).random(len(rows.slack))
    choice = dict.fromkeys(range(len(problem.node_costs)), 0)
    first = sum(extra[0] for extra in rows.priced(prices).values())
    assert first == pytest.approx(prices @ rows.profile(choice))


def limited_chain(limit_share: float) -> tuple[Problem, Graph, Rows]:
    free = chain(40, 5, seed=1, skip=5)
    limit = limit_share * free.peak(solve(free).choice)[0]
    problem = chain(40, 5, seed=1, skip=5, limit=limit)
    graph = Graph.of(problem, Tables())
    graph.add_rows(problem)
    return problem, graph, graph.rows()


def test_prices_bound_what_fits_and_beat_the_bound_without_rows() -> None:
    problem, graph, rows = limited_chain(0.8)
    best = solve(problem).cost
    unlimited = solve(replace(problem, limit=None)).cost
    seen: list[float] = []

    def offer(choice: dict[int, int], prices: np.ndarray) -> float:
        search = Search(graph, rows, choice, {})
        if search.repair(1e-3, INF):
            assert problem.peak([search.choice[node] for node in range(40)])[0] <= (problem.limit or 0.0)
            seen.append(graph.value(search.choice))
        return min(seen, default=INF)

    bound = improve_prices(graph, rows, None, INF, offer, 0.0).bound
    assert unlimited < bound <= best * (1 + 1e-12)
    assert min(seen) >= best * (1 - 1e-12)


def test_search_state_is_that_of_its_choice() -> None:
    _, graph, rows = limited_chain(0.8)
    search = Search(graph, rows, dict.fromkeys(range(40), 0), {})
    search.repair(1e-3, INF)
    again = Search(graph, rows, search.choice, {})
    assert search.over[:-1] == pytest.approx(again.over[:-1])
    for node in range(40):
        assert search.around[node] == pytest.approx(again.around[node])


@pytest.mark.parametrize("seed", range(0, 200, 5))
def test_a_warm_start_changes_no_optimum(seed: int) -> None:
    problem = random_problem(seed)
    truth = brute_force(problem)
    if np.isfinite(truth.cost):
        for warm in ([0] * len(problem.node_costs), solve(problem).choice):
            assert solve(problem, warm=warm).cost == pytest.approx(truth.cost, rel=1e-9)


def test_a_warm_start_is_the_least_that_comes_back() -> None:
    free = chain(200, 12, seed=4, skip=4)
    limit = 0.7 * free.peak(solve(free).choice)[0]
    problem = chain(200, 12, seed=4, skip=4, limit=limit)
    known = solve(problem, time_limit=3.0)
    again = solve(problem, time_limit=0.0, warm=known.choice)
    assert again.cost <= known.cost
    assert again.lower_bound <= known.cost


@pytest.mark.parametrize("seed", range(40))
def test_the_way_of_large_graphs_is_exact_where_programs_end_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_rows, "SMALL", -1)
    problem = random_problem(seed)
    truth = brute_force(problem)
    if np.isfinite(truth.cost):
        solution = solve(problem)
        assert solution.cost == pytest.approx(truth.cost, rel=1e-9)
        assert solution.status == "optimal"


@pytest.mark.parametrize("seed", range(12))
def test_the_way_of_large_graphs_without_programs_bounds_and_fits(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_rows, "SMALL", -1)
    monkeypatch.setattr(memory_rows, "PROGRAM_LIMIT", -1)
    free = chain(7, 3, seed=seed, skip=3)
    problem = chain(7, 3, seed=seed, skip=3, limit=0.7 * free.peak(solve(free).choice)[0])
    truth = brute_force(problem)
    solution = solve(problem, time_limit=0.2)
    assert solution.lower_bound <= truth.cost * (1 + 1e-12)
    assert truth.cost <= solution.cost * (1 + 1e-12)
    assert problem.peak(solution.choice)[0] <= (problem.limit or 0.0)


def test_pruning_may_leave_a_graph_without_a_row_that_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no relaxation to be had of the rows; seed 541 is one where that happens."""
    monkeypatch.setattr(row_programs, "WORTHWHILE", 2.0)  # one pruning, then integers
    rng = np.random.default_rng(541)
    count = int(rng.integers(4, 7))
    edges = tuple((i, j) for i in range(count) for j in range(i))
    costs = tuple(rng.integers(0, 6, 3).astype(np.float64) for _ in range(count))
    matrices = tuple(rng.integers(0, 8, (3, 3)).astype(np.float64) for _ in edges)
    usages = [np.where(rng.random(3) < 0.4, rng.integers(1, 10, 3), 0) for _ in range(2)]
    usages += [np.zeros(3, dtype=np.int64)] * (count - 2)
    limit = float(sum(usage.max() for usage in usages) - 1)
    problem = Problem(costs, edges, matrices, ((0, 1),) * count, tuple(usages), limit)
    assert solve(problem).cost == brute_force(problem).cost


@pytest.mark.parametrize("seed", range(40))
def test_what_is_left_to_relaxations_is_proven(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no integer program searched is in the gap that is told."""
    monkeypatch.setattr(row_programs, "SMALL_PART", 0)
    rng = np.random.default_rng(seed)
    costs = tuple(rng.integers(0, 20, 3).astype(np.float64) for _ in range(6))
    edges = tuple((i, i + 1) for i in range(5))
    matrices = tuple(rng.integers(0, 5, (3, 3)).astype(np.float64) for _ in edges)
    usages = tuple(np.sort(rng.integers(1, 30, 3))[np.argsort(np.argsort(-cost))] for cost in costs)
    limit = float(sum(usage.min() + 0.4 * np.ptp(usage) for usage in usages))
    problem = Problem(costs, edges, matrices, ((0, 1),) * 6, usages, limit)
    found, best = solve(problem, enough=10.0), brute_force(problem).cost
    assert found.lower_bound <= best + 1e-9 and found.cost >= best - 1e-9
    assert problem.fits(found.choice) and found.cost == pytest.approx(problem.cost(found.choice))
