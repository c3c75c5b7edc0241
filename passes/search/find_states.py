"""Search states and layouts together: what the forward keeps, and what the backward computes again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cost_model.deadline import Deadline
from passes.ir.joint import JointGraph
from passes.search.agree import AWAITED
from passes.search.graph_ends import Boundary
from passes.search.narrowing import Narrowing
from passes.search.offered import ABSENT, build_offered
from passes.search.overlapped import solve_overlapped
from passes.search.step_kinds import Overlap
from passes.solver.problem import Infeasible
from passes.states.offers import Offers, offered
from passes.states.places import Place, places
from passes.strategies.prices import Prices

__all__ = ["States", "find_states"]


ROWS_INSIDE = 50_000
"""Edge entries of the largest problem that is solved with its memory rows: states make many rows bind at once."""
ENOUGH = 2e-3
"""Relative gap at which states are good enough."""


@dataclass(frozen=True)
class States:
    """again: ops of the forward that run once more. lower_bound: no states that were offered, with any layouts, take
    fewer seconds. places: how many places of the forward were kept."""

    again: tuple[str, ...]
    lower_bound: float
    places: int


def find_states(
    joint: JointGraph,
    prices: Prices,
    boundary: Boundary,
    *,
    memory_limit: int,
    deadline: Deadline,
    narrowing: Narrowing | None = None,
) -> States:
    """The states of the fastest plan within `memory_limit` bytes.

    Copies live as long as the backward of the part of the forward that they are of (`passes.states.places`). Small parts
    are tried first; twice as large ones if no plan fits, as then less is kept. Raises `Infeasible` if none does.
    """
    problem: Infeasible | None = None
    for kept in _coarser(places(joint)):
        offers = offered(joint, kept, prices.traffic)
        space = build_offered(
            offers, prices, boundary, memory_limit=memory_limit, narrowing=narrowing, deadline=deadline
        )
        try:
            found = solve_overlapped(
                space.problem,
                space.kinds((Overlap(prices.overlap_efficiency), Overlap(prices.overlap_efficiency, AWAITED))),
                time_limit=deadline.left,
                rows_inside=ROWS_INSIDE,
                relative_gap=ENOUGH,
            )
        except Infeasible as reason:
            problem = reason
            continue
        return States(_again(offers, space.assignment(found.choice)), found.lower_bound, len(kept))
    assert problem is not None
    raise problem


def _coarser(kept: tuple[Place, ...]) -> Iterator[tuple[Place, ...]]:
    """All places, then every second, fourth ... from the last on; at the end none."""
    step = 1
    while step <= len(kept):
        yield kept[::-1][::step][::-1]
        step *= 2
    yield ()


def _again(offers: Offers, assignment) -> tuple[str, ...]:
    present = {name for name in offers.copies if name in assignment and assignment[name] != ABSENT}
    return tuple(sorted(offers.copies[name] for name in present))
