"""Overlap in the objective, against brute force over all choices."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from passes.search.overlapped import CuttingPlanes, charged, solve_overlapped
from passes.search.search_space import CostKinds, recombined
from passes.solver.problem import Array, Infeasible, Problem
from passes.solver.solve import mixed, solve
from tests.solver.oracle import random_problem

COMPUTING, HIDING, EXPOSED = (0, 2), (1, 3), 4
"""Kinds of these tests: per phase computing and communication, and what nothing hides."""


def two_phases(efficiency: float) -> tuple[Array, Array]:
    """Per phase two paths: computing alone, and communication alone."""
    rows = -efficiency * np.eye(5)
    return rows[[1, 0]], rows[[3, 2]]


def random_kinds(problem: Problem, seed: int, efficiency: float) -> CostKinds:
    """Nodes compute in some phase or are exposed; edges hide in some phase or are exposed."""
    rng = np.random.default_rng(seed)
    nodes = [int(rng.choice([EXPOSED, *COMPUTING])) for _ in problem.node_costs]
    edges = [int(rng.choice([EXPOSED, *HIDING])) for _ in problem.edges]
    return CostKinds(tuple(nodes), tuple(edges), 5, two_phases(efficiency))


def step_seconds(problem: Problem, kinds: CostKinds, efficiency: float, choice: tuple[int, ...]) -> float:
    """exposed + C + G - e min(C, G) per phase, written out again."""
    sums = [0.0] * 5
    for kind, costs, a in zip(kinds.nodes, problem.node_costs, choice, strict=True):
        sums[kind] += costs[a]
    for kind, (i, j), costs in zip(kinds.edges, problem.edges, problem.edge_costs, strict=True):
        sums[kind] += costs[choice[i], choice[j]]
    forward = sums[0] + sums[1] - efficiency * min(sums[0], sums[1])
    return sums[EXPOSED] + forward + sums[2] + sums[3] - efficiency * min(sums[2], sums[3])


def least_seconds(problem: Problem, kinds: CostKinds, efficiency: float) -> float:
    best = np.inf
    for choice in itertools.product(*(range(len(vector)) for vector in problem.node_costs)):
        within = problem.limit is None or problem.peak(choice)[0] <= problem.limit
        if within and np.isfinite(problem.cost(choice)):
            best = min(best, step_seconds(problem, kinds, efficiency, choice))
    return best


@pytest.mark.parametrize(
    ("efficiency", "cost", "choice"), [(0.0, 10.0, (0, 0)), (0.25, 10.0, (0, 0)), (1.0, 8.0, (0, 1))]
)
def test_hiding_decides(efficiency: float, cost: float, choice: tuple[int, ...]) -> None:
    """One op, computing 10 or 4, behind a gather of 0 or 8: alone 10 or 12 seconds, hidden 10 or 8."""
    problem = Problem((np.zeros(1), np.array([10.0, 4.0])), ((0, 1),), (np.array([[0.0, 8.0]]),))
    found = solve_overlapped(problem, CostKinds((EXPOSED, 0), (1,), 5, two_phases(efficiency)))
    assert found.choice == choice
    assert found.cost == pytest.approx(cost)
    assert found.lower_bound <= found.cost


@pytest.mark.parametrize("rows_inside", [0, 10**6], ids=["memory priced", "rows inside"])
@pytest.mark.parametrize("seed", range(120))
def test_bound_and_cost_enclose_the_least(seed: int, rows_inside: int) -> None:
    problem = random_problem(seed)
    efficiency = float(np.random.default_rng(seed).choice([0.3, 0.9, 1.0]))
    kinds = random_kinds(problem, seed, efficiency)
    least = least_seconds(problem, kinds, efficiency)
    if not np.isfinite(least):
        with pytest.raises(Infeasible):
            solve_overlapped(problem, kinds, rows_inside=rows_inside)
        return
    found = solve_overlapped(problem, kinds, rows_inside=rows_inside)
    slack = 1e-9 * max(1.0, least)
    assert found.cost == pytest.approx(step_seconds(problem, kinds, efficiency, found.choice))
    assert found.lower_bound <= least + slack
    assert found.cost >= least - slack
    if found.status == "optimal":
        assert found.cost == pytest.approx(least)
    if problem.limit is not None:
        assert problem.peak(found.choice)[0] <= problem.limit


def test_most_small_problems_are_closed() -> None:
    """The bound is strong: a weak one would leave most of these open."""
    closed = total = 0
    for seed in range(120):
        problem = replace(random_problem(seed), limit=None)
        kinds = random_kinds(problem, seed, 0.9)
        least = least_seconds(problem, kinds, 0.9)
        if np.isfinite(least):
            total += 1
            closed += solve_overlapped(problem, kinds).cost <= least * (1 + 1e-9) + 1e-12
    assert closed > 0.85 * total, (closed, total)


@pytest.mark.parametrize("efficiency", [0.0, 0.9])
@pytest.mark.parametrize("kind", [0, 1], ids=["computing", "communication"])
def test_copies_of_a_layer_under_a_limit(efficiency: float, kind: int) -> None:
    """40 layers that take 1 second and 3 bytes or 2 seconds and 1 byte, all live at once, limit 81 bytes: 20 of each.

    At any one price of memory all layers take the same strategy, so only a mix of two solutions is the best. The
    bound mixes them too: 40 + 40 (120 - 81) / (120 - 40) = 59.5.
    """
    layers = 40
    problem = Problem(
        (np.zeros(1), np.zeros(2)) * layers,
        tuple((2 * i, 2 * i + 1) for i in range(layers)),
        (np.array([[1.0, 2.0]]),) * layers,
        ((0, 1), (0, 2 * layers)) * layers,
        (np.zeros(1), np.array([3.0, 1.0])) * layers,
        limit=81.0,
    )
    kinds = CostKinds((0,) * 2 * layers, (kind,) * layers, 5, two_phases(efficiency))
    found = solve_overlapped(problem, kinds, rows_inside=0)
    assert problem.peak(found.choice)[0] == 80
    assert found.cost == pytest.approx(60.0)
    assert found.lower_bound == pytest.approx(59.5, abs=0.05)


def test_the_limit_that_nothing_meets_is_proven_with_memory_priced() -> None:
    problem = Problem((np.zeros(2),) * 3, (), (), ((0, 3),) * 3, (np.array([3, 2]),) * 3, limit=5.0)
    with pytest.raises(Infeasible) as caught:
        solve_overlapped(problem, CostKinds((0,) * 3, (), 5, two_phases(0.5)), rows_inside=-1)
    assert (caught.value.kind, caught.value.bound) == ("memory", 6.0)


def test_memory_prices_by_hand() -> None:
    """Two nodes live in rows 0 and 1 and in row 1 only; 4 seconds at row 0, 2 at row 1, for a limit of 8."""
    problem = Problem(
        (np.zeros(2), np.ones(1)), (), (), ((0, 2), (1, 2)), (np.array([8, 4]), np.array([16])), limit=8.0
    )
    moved = charged(problem, {0: 4.0, 1: 2.0})
    assert moved.limit is None
    assert moved.node_costs[0].tolist() == [6.0, 3.0]
    assert moved.node_costs[1].tolist() == [1.0 + 2.0 * 2]


@pytest.mark.parametrize("seed", range(60))
def test_the_best_mix(seed: int) -> None:
    """Against brute force over what two or three choices take."""
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    choices = [tuple(int(rng.integers(len(c))) for c in problem.node_costs) for _ in range(2 + seed % 2)]
    best = np.inf
    for choice in itertools.product(*map(set, zip(*choices, strict=True))):
        if problem.limit is None or problem.peak(choice)[0] <= problem.limit:
            best = min(best, problem.cost(choice))
    found = mixed(problem, choices, 5.0)
    if found is None:
        assert best == np.inf
    else:
        assert all(a in taken for a, taken in zip(found, zip(*choices, strict=True), strict=True))
        assert problem.cost(found) <= best * (1 + 1e-4) + 1e-12


def test_without_efficiency_it_is_the_plain_search() -> None:
    problem = replace(random_problem(11), limit=None)
    kinds = random_kinds(problem, 11, 0.0)
    assert solve_overlapped(problem, kinds).cost == solve(problem).cost


def test_of_mixes_that_cost_the_same_the_smaller_is_taken() -> None:
    """Two separate nodes cost the same either way; the second choice uses less."""
    same = (np.ones(2), np.ones(2))
    problem = Problem(same, intervals=((0, 2), (1, 2)), usages=(np.array([3, 2]), np.array([3, 2])))
    kinds = CostKinds((0, 0), (), 5, two_phases(0.9))
    assert recombined(problem, kinds, (0, 0), (1, 1)) == (1, 1) == recombined(problem, kinds, (1, 1), (0, 0))


@pytest.mark.parametrize("seed", range(20))
def test_a_mix_is_no_worse_than_either(seed: int) -> None:
    """Ten separate pairs of nodes, with two random choices: the mix takes the better of each."""
    rng = np.random.default_rng(seed)
    costs = tuple(rng.random(2) for _ in range(20))
    edges = tuple((2 * k, 2 * k + 1) for k in range(10))
    problem = Problem(costs, edges, tuple(rng.random((2, 2)) for _ in edges))
    kinds = CostKinds((0,) * 20, (1,) * 10, 5, two_phases(0.9))
    first, second = (
        tuple(int(a) for a in rng.integers(0, 2, 20)),
        tuple(int(a) for a in rng.integers(0, 2, 20)),
    )
    mix = recombined(problem, kinds, first, second)
    both = min(step_seconds(problem, kinds, 0.9, c) for c in (first, second))
    assert step_seconds(problem, kinds, 0.9, mix) <= both
    for i, j in edges:
        assert (mix[i], mix[j]) in ((first[i], first[j]), (second[i], second[j]))
    # With nothing to trade between kinds the best mix is the best of each pair.
    without = replace(kinds, edges=(0,) * 10, paths=two_phases(0.0))
    plain = recombined(problem, without, first, second)

    def pair(choice: tuple[int, ...], i: int, j: int, k: int) -> float:
        return costs[i][choice[i]] + costs[j][choice[j]] + problem.edge_costs[k][choice[i], choice[j]]

    best = sum(min(pair(first, i, j, k), pair(second, i, j, k)) for k, (i, j) in enumerate(edges))
    assert problem.cost(plain) == pytest.approx(best)


def test_layers_that_hold_too_much_in_turn_have_one_price() -> None:
    """Of eight each must hold less in its own step: one price after the other would never come to an end."""
    layers = 8
    problem = Problem(
        (np.array([1.0, 2.0]), np.zeros(1)) * layers,
        (),
        (),
        tuple((step, step + 1) for step in range(2 * layers)),
        (np.array([2.0, 1.0]), np.array([0.5])) * layers,
        1.5,
    )
    kinds = CostKinds((EXPOSED,) * 2 * layers, (), 5, two_phases(1.0))
    search = CuttingPlanes(problem, kinds, math.inf, rows_inside=False, relative_gap=0.0)
    point: Any = search.bound_at
    for _ in range(5):
        if not search.choice:
            search._solve_at(point)
            point = search._next()
    assert search.choice == (1, 0) * layers and search.cost == 16.0 >= search.bound
