"""The whole search against brute force, by hand, and on long chains."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from passes.solver.graph import Graph
from passes.solver.problem import Infeasible, Problem, Tables
from passes.solver.solve import no_room, solve

sys.path.insert(0, str(Path(__file__).parent))
from oracle import brute_force, chain, on_nodes, random_problem

INF = float("inf")


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_equals_brute_force(start: int) -> None:
    for seed in range(start, start + 20):
        problem, truth = random_problem(seed), brute_force(random_problem(seed))
        if not np.isfinite(truth.cost):
            with pytest.raises(Infeasible) as caught:
                solve(problem)
            assert caught.value.kind == ("memory" if truth.possible else "edges"), seed
            continue
        solution = solve(problem)
        assert solution.cost == pytest.approx(truth.cost, rel=1e-9), seed
        assert solution.cost == problem.cost(solution.choice)
        assert solution.status == "optimal"
        assert solution.lower_bound <= truth.cost * (1 + 1e-12)
        assert problem.limit is None or problem.peak(solution.choice)[0] <= problem.limit


def test_contradictions_are_explained_by_nodes_that_have_no_joint_choice() -> None:
    seen = 0
    for seed in range(120):
        problem, truth = random_problem(seed), brute_force(random_problem(seed))
        if truth.possible:
            continue
        with pytest.raises(Infeasible) as caught:
            solve(problem)
        named = set(caught.value.nodes)
        assert not brute_force(on_nodes(problem, named)).possible, seed
        for node in named:
            assert brute_force(on_nodes(problem, named - {node})).possible, seed
        seen += 1
    assert seen > 10


def test_two_pins_apart_name_the_way_between_them() -> None:
    same = np.array([[0.0, INF], [INF, 0.0]])
    free, left, right = np.zeros(2), np.array([0.0, INF]), np.array([INF, 0.0])
    problem = Problem((free, left, free, free, right, free), tuple((i, i + 1) for i in range(5)), (same,) * 5)
    with pytest.raises(Infeasible) as caught:
        solve(problem)
    assert caught.value.kind == "edges"
    assert set(caught.value.nodes) == {1, 2, 3, 4}


def test_memory_by_hand() -> None:
    """Cheap strategies use 10, expensive ones 4. Nodes 0 and 1 overlap at step 1, node 2 is alone."""
    cost, usage = np.array([1.0, 5.0]), np.array([10, 4])
    problem = Problem((cost, cost + 1, cost), (), (), ((0, 2), (1, 3), (3, 4)), (usage,) * 3, limit=14.0)
    solution = solve(problem)
    assert solution.cost == 8.0  # 1 + 6 + 1, or 5 + 2 + 1
    assert problem.peak(solution.choice) == (14.0, 1)


def test_no_room_at_all() -> None:
    cost, usage = np.array([1.0, 5.0]), np.array([10, 4])
    problem = Problem((cost,) * 3, (), (), ((0, 2), (5, 9), (7, 8)), (usage, usage, usage * 2), limit=11.0)
    with pytest.raises(Infeasible) as caught:
        solve(problem)
    assert (caught.value.kind, caught.value.bound, caught.value.step) == ("memory", 12.0, 7)
    assert caught.value.nodes == (2, 1)


def test_no_room_for_any_pair_that_an_edge_allows() -> None:
    """Each node alone could use 4, but the edge lets only one of them."""
    cost, usage = np.zeros(2), np.array([10, 4])
    one_only = np.array([[0.0, 0.0], [0.0, INF]])
    problem = Problem((cost, cost), ((0, 1),), (one_only,), ((0, 2), (0, 2)), (usage, usage), limit=13.0)
    with pytest.raises(Infeasible) as caught:
        solve(problem)
    assert caught.value.kind == "memory"
    assert caught.value.bound == pytest.approx(14.0)


def test_late_only_the_fullest_step_is_explained() -> None:
    """Step 0 is fuller, and there is room; at step 1 an edge lets only one of two nodes use little."""
    cost, usage = np.zeros(2), np.array([10, 4])
    one_only = np.array([[0.0, 0.0], [0.0, INF]])
    lives = ((0, 1), (0, 1), (1, 2), (1, 2))
    problem = Problem(
        (cost,) * 4, ((2, 3),), (one_only,), lives, (usage + 1, usage + 1, usage, usage), limit=13.0
    )
    base = Graph.of(problem, Tables())
    reason = no_room(problem, base, INF)
    assert reason is not None and reason.step == 1
    assert no_room(problem, base, -INF) is None


def test_the_limit_is_met_exactly_or_not_at_all() -> None:
    cost, usage = np.array([0.0, 1.0]), np.array([1 << 40, 0])
    problem = Problem((cost,) * 2, (), (), ((0, 1),) * 2, (usage,) * 2, limit=float(1 << 40))
    assert solve(problem).cost == 1.0
    problem = Problem((cost,) * 2, (), (), ((0, 1),) * 2, (usage,) * 2, limit=float((1 << 40) - 1))
    assert solve(problem).cost == 2.0


def test_long_chain_with_residuals_is_as_dynamic_programming_says() -> None:
    problem = chain(500, 6, seed=3, skip=7)
    solution = solve(problem)
    assert solution.status == "optimal"
    assert solution.cost == pytest.approx(_ladder(problem, 6, 7), rel=1e-9)


def _ladder(problem: Problem, size: int, skip: int) -> float:
    """By dynamic programming over (node, last node with a residual): at most two are ever open."""
    best = problem.node_costs[0][:, None] + np.where(
        np.eye(size, dtype=bool), 0.0, INF
    )  # [now, last with residual]
    matrices = dict(zip(problem.edges, problem.edge_costs, strict=True))
    for node in range(1, len(problem.node_costs)):
        step = matrices[node - 1, node]
        best = (best[:, None, :] + step[:, :, None]).min(axis=0) + problem.node_costs[node][:, None]
        if node % skip == 0:
            now = (best + matrices[node - skip, node].T).min(axis=1)
            best = now[:, None] + np.where(np.eye(size, dtype=bool), 0.0, INF)
    return float(best.min())


def test_chain_within_a_limit_is_bounded_and_deterministic() -> None:
    free = chain(60, 5, seed=1, skip=5)
    limit = 0.8 * free.peak(solve(free).choice)[0]
    problem = chain(60, 5, seed=1, skip=5, limit=limit)
    first, second = solve(problem), solve(problem)
    assert first == second
    assert first.status == "optimal"
    assert problem.peak(first.choice)[0] <= limit
    assert first.cost > solve(free).cost


def test_relative_gap_is_kept() -> None:
    problem = chain(120, 5, seed=2, skip=3)
    exact, rough = solve(problem), solve(problem, relative_gap=0.2)
    assert rough.gap <= 0.2
    assert rough.lower_bound <= exact.cost <= rough.cost


def test_what_is_enough_is_not_searched_by_integers() -> None:
    """Ten nodes, each beside each other, with costs of all pairs: relaxations leave a gap."""
    rng, pairs = np.random.default_rng(0), tuple(itertools.combinations(range(10), 2))
    costs = tuple(rng.random((3, 3)) for _ in pairs)
    free = tuple(np.zeros(3) for _ in range(10))
    problem = Problem(free, pairs, costs, ((0, 0),) * 10, free, None)
    exact, rough = solve(problem), solve(problem, enough=1.0)
    assert exact.status == "optimal" and exact.cost == pytest.approx(brute_force(problem).cost)
    assert rough.status == "feasible" and rough.lower_bound < exact.cost <= rough.cost
    assert solve(problem, enough=rough.gap / 2).status == "optimal"


def test_out_of_time_is_feasible_with_a_gap() -> None:
    free = chain(200, 12, seed=4, skip=4)
    limit = 0.7 * free.peak(solve(free).choice)[0]
    problem = chain(200, 12, seed=4, skip=4, limit=limit)
    solution = solve(problem, time_limit=0.3)
    assert problem.peak(solution.choice)[0] <= limit
    assert solution.lower_bound <= solution.cost
    assert solution.status == ("optimal" if solution.gap < 1e-8 else "feasible")


def test_costs_of_microseconds_are_as_exact_as_large_ones() -> None:
    large = chain(40, 5, seed=5, skip=3)
    small = Problem(
        tuple(v * 1e-9 for v in large.node_costs), large.edges, tuple(m * 1e-9 for m in large.edge_costs)
    )
    assert solve(small).cost == pytest.approx(solve(large).cost * 1e-9, rel=1e-9)
    assert solve(small).status == "optimal"


def test_nothing_to_choose() -> None:
    assert solve(Problem(())).choice == ()
    assert solve(Problem((np.zeros(1),), (), (), ((0, 0),), (np.array([9]),), limit=0.0)).cost == 0.0


def test_where_no_time_is_left_what_was_known_has_a_bound() -> None:
    """Brute force says what is least; of problems with a limit time decides as well whether anything is proven."""
    for seed in range(40):
        problem, truth = random_problem(seed), brute_force(random_problem(seed))
        if problem.limit is None and np.isfinite(truth.cost):
            late = solve(problem, time_limit=-1.0, warm=solve(problem).choice)
            assert late.cost == pytest.approx(truth.cost, rel=1e-9), seed
            assert -np.inf < late.lower_bound <= truth.cost * (1 + 1e-12), seed
