"""The search within a room of what prices bring, with layers alike and without, against brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

import passes.search.state_columns as state_columns
from passes.search.search_space import CostKinds
from passes.search.state_columns import ROUGH, Columns
from passes.solver.graph import Ties
from passes.solver.problem import Infeasible, Problem, Solution
from tests.search.test_overlapped import random_kinds
from tests.solver.layered import layered

LAYERS = 6


def layers_of_kinds(problem: Problem, seed: int, efficiency: float) -> CostKinds:
    """Those of the first layer, in all."""
    kinds = random_kinds(problem, seed, efficiency)
    nodes = [kinds.nodes[node % 2] for node in range(2 * LAYERS)]
    edges = [kinds.edges[edge % 2] for edge in range(len(problem.edges))]
    return CostKinds(tuple(nodes), tuple(edges), kinds.count, kinds.paths)


@pytest.fixture(params=[0, math.inf], ids=["alike", "apart"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every problem is one that is not solved as a whole; whether it is one of many layers."""
    monkeypatch.setattr(state_columns, "SMALL", 0)
    monkeypatch.setattr(state_columns, "LARGE", request.param)
    monkeypatch.setattr(state_columns, "MANY", 0.6)
    return request.param == 0


def least_of(problem: Problem, kinds: CostKinds) -> float:
    every = itertools.product(range(2), repeat=2 * LAYERS)
    return min((kinds.seconds(problem, one) for one in every if problem.fits(one)), default=math.inf)


@pytest.mark.parametrize("efficiency", [0.0, 0.5])
def test_what_is_found_fits_and_no_bound_is_above_the_best(large: bool, efficiency: float) -> None:
    optimal = 0
    for seed in range(6):
        problem = layered(seed, LAYERS)
        kinds, room = layers_of_kinds(problem, seed, efficiency), problem.limit
        columns, least = Columns(replace(problem, limit=None), kinds), least_of(problem, kinds)
        assert room is not None
        if least == math.inf:
            with pytest.raises(Infeasible, match="memory"):
                columns.find(room, 60.0, 5e-3)
            continue
        found = columns.find(room, 60.0, 5e-3)
        assert problem.fits(found.choice) and found.cost == kinds.seconds(problem, found.choice)
        assert found.lower_bound <= least * (1.0 + 1e-9) <= found.cost * (1.0 + 2e-9)
        assert found.cost <= 1.1 * least
        ties = Ties.among(problem)
        alike = [ties.expanded(one) for one in itertools.product(range(2), repeat=ties.kinds)]
        fitting = [kinds.seconds(problem, one) for one in alike if problem.fits(one)]
        assert not large or found.cost <= min(fitting) * (1.0 + 5e-3)
        optimal += found.cost <= least * (1.0 + 5e-3)
    assert optimal >= 3


def test_what_was_found_for_one_room_is_where_another_starts(large: bool) -> None:
    """For a smaller one, which it may not fit; for the first again; and with rows of other bytes."""
    problem = layered(0, LAYERS)
    kinds, room = layers_of_kinds(problem, 0, 0.5), problem.limit
    assert room is not None
    columns = Columns(replace(problem, limit=None), kinds)
    first, smaller = columns.find(room, 60.0, 5e-3), columns.find(0.9 * room, 60.0, 5e-3)
    again = columns.find(room, 60.0, 5e-3)
    assert replace(problem, limit=0.9 * room).fits(smaller.choice)
    assert again.cost <= first.cost <= smaller.cost
    less = replace(problem, limit=None, usages=tuple(0.5 * usage for usage in problem.usages))
    assert columns.corrected(less, kinds).find(0.5 * room, 60.0, 5e-3).cost == again.cost


def test_the_whole_is_searched_once_where_layers_are_alike(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a rough answer, nor counted anew, nor of other rooms: layers alike say enough of where to look."""
    wholes, solved = list[int](), state_columns._Generation._solved

    def counted(self: Any, inner: Problem, gap: float) -> Solution:
        wholes.append(self.ties is None)
        return solved(self, inner, gap)

    monkeypatch.setattr(state_columns._Generation, "_solved", counted)
    problem = layered(4, LAYERS)
    kinds, room = layers_of_kinds(problem, 4, 0.5), problem.limit
    assert room is not None
    columns = Columns(replace(problem, limit=None), kinds)
    columns.find(room, 60.0, ROUGH)
    assert any(wholes) != large
    columns.find(room, 60.0, 0.0)
    first = sum(wholes)
    found = columns.corrected(columns.problem, kinds).find(room, 60.0, 0.09)
    assert first and (sum(wholes) == first) == large
    assert found.cost <= 1.1 * least_of(problem, kinds)
