"""The search within a room where layers are many: those that are alike first, against brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import passes.search.state_columns as state_columns
from passes.search.cost_kinds import CostKinds
from passes.search.overlapped import TiedPlanes
from passes.search.state_columns import Columns
from passes.solver.problem import Infeasible, Problem
from tests.search.test_overlapped import LAYERS, layers_of_kinds
from tests.solver.layered import layered


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every problem is one that is not solved as a whole, and one of many layers; the rooms of those that were."""
    monkeypatch.setattr(state_columns, "SMALL", 0)
    monkeypatch.setattr(state_columns, "LARGE", 0)
    monkeypatch.setattr(state_columns, "MANY", 0.6)
    rooms: list[float] = []

    class Noted(TiedPlanes):
        def run(self) -> None:
            assert self.problem.limit is not None
            rooms.append(self.problem.limit)
            super().run()

    monkeypatch.setattr(state_columns, "TiedPlanes", Noted)
    return rooms


def columns(seed: int) -> tuple[Columns, CostKinds, Problem, float]:
    """Known is one choice, which may not fit; and the room in which to search."""
    problem = layered(seed, LAYERS)
    kinds = layers_of_kinds(problem, seed, 0.5)
    assert problem.limit is not None
    room = problem.limit
    return (
        Columns(replace(problem, limit=None), kinds, [{0} for _ in problem.node_costs]),
        kinds,
        problem,
        room,
    )


@pytest.mark.parametrize("prove", [False, True])
def test_what_is_found_fits_and_no_bound_is_above_the_best(large: list[float], prove: bool) -> None:
    for seed in range(16):
        found, kinds, problem, room = columns(seed)
        every = itertools.product(range(2), repeat=2 * LAYERS)
        least = min((kinds.seconds(problem, one) for one in every if problem.fits(one)), default=None)
        search = found.proven if prove else found.fitting
        if least is None:
            with pytest.raises(Infeasible, match="memory"):
                search(room, 60.0, 5e-3)
            continue
        solution = search(room, 60.0, 5e-3)
        assert problem.fits(solution.choice)
        assert solution.lower_bound <= least * (1.0 + 1e-9) <= solution.cost * (1.0 + 2e-9)
        assert solution.cost <= 1.1 * least
    assert len(large) >= 16


def test_a_room_is_searched_so_once(large: list[float]) -> None:
    """Then for a smaller one, which what was found for the larger one may not fit, and for the first again."""
    found, kinds, problem, room = columns(0)
    first = found.fitting(room, 60.0, 5e-3)
    smaller = found.fitting(0.9 * room, 60.0, 5e-3)
    again = found.fitting(room, 60.0, 5e-3)
    assert large == [room, 0.9 * room]
    assert replace(problem, limit=0.9 * room).fits(smaller.choice)
    assert again.cost <= first.cost <= smaller.cost
    # Under another overlap what was found before says nothing.
    found.corrected(found.problem, kinds).fitting(room, 60.0, 5e-3)
    assert large == [room, 0.9 * room, room]
