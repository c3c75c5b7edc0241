"""Search states and layouts together: what the forward keeps, and what the backward computes again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from passes.ir.joint import JointGraph
from passes.layout.assignment import Assignment, NodeLayouts
from passes.search.agree import first_overlaps
from passes.search.find import explained
from passes.search.graph_ends import Boundary
from passes.search.narrowing import Narrowing
from passes.search.offered import ABSENT, build_offered
from passes.search.overlapped import solve_overlapped
from passes.solver.problem import Infeasible
from passes.states.cut_points import Place, places
from passes.states.offers import EITHER, Offers, offered, without_either
from passes.strategies.prices import Prices

__all__ = ["States", "find_states"]


ROWS_INSIDE = 50_000
"""Edge entries of the largest problem that is solved with its memory rows: states make many rows bind at once."""
ENOUGH = 5e-3
"""Relative gap at which states are good enough."""


@dataclass(frozen=True)
class States:
    """again: ops of the forward that run once more. layouts: of the graph with these copies, by node name.
    lower_bound: no states that were offered, with any layouts, take fewer seconds."""

    again: tuple[str, ...]
    layouts: Assignment
    lower_bound: float

    def narrowing(self, allowed: Narrowing) -> Narrowing:
        """That allows these layouts only, of those that `allowed` does."""
        return replace(allowed, allowed={name: partial(_alike, held) for name, held in self.layouts.items()})


def find_states(
    joint: JointGraph,
    prices: Prices,
    boundary: Boundary,
    *,
    room: int,
    limit: tuple[int, int],
    deadline: Deadline,
    narrowing: Narrowing | None = None,
) -> States:
    """The states of the fastest plan within `room` bytes, as the search counts them.

    limit: what an error says instead: the memory limit of the program, and what of it is reserved.

    Copies live as long as the backward of the part of the forward that they are of (`passes.states.cut_points`). Small
    parts are tried first; twice as large ones if no plan fits, as then less is kept. Raises InfeasibleError if none
    does.
    """
    least: tuple[float, InfeasibleError] | None = None
    for kept in _coarser(places(joint)):
        offers = offered(joint, kept, prices.traffic)
        space = build_offered(
            offers,
            prices,
            boundary,
            memory_limit=room,
            narrowing=narrowing,
            deadline=deadline,
        )
        try:
            found = solve_overlapped(
                space.problem,
                space.kinds(first_overlaps(prices.overlap_efficiency)),
                time_limit=deadline.left,
                rows_inside=ROWS_INSIDE,
                relative_gap=ENOUGH,
            )
        except Infeasible as reason:
            scale = (limit[0] - limit[1]) / room
            reason.bound *= scale
            error = explained(reason, offers.joint, space, prices.mesh, limit)
            if reason.kind != "memory":
                raise error from None
            if least is None or reason.bound < least[0]:
                least = reason.bound, error
            continue
        return _states(offers, space.assignment(found.choice), found.lower_bound)
    assert least is not None
    raise least[1]


def _coarser(kept: tuple[Place, ...]) -> Iterator[tuple[Place, ...]]:
    """All places, then every second, fourth ... from the last on; at the end none."""
    step = 1
    while step <= len(kept):
        yield kept[::-1][::step][::-1]
        step *= 2
    yield ()


def _states(offers: Offers, assignment: Assignment, lower_bound: float) -> States:
    present = {name: layouts for name, layouts in assignment.items() if layouts != ABSENT}
    again = {offers.copies[name] for name in present if name in offers.copies}
    layouts = {
        without_either(name, again): held for name, held in present.items() if not name.endswith(EITHER)
    }
    return States(tuple(sorted(again)), layouts, lower_bound)


def _alike(held: NodeLayouts, strategies: Sequence[NodeLayouts]) -> list[int]:
    """Those with the layouts `held`, whatever is stored for them; all, if there are none."""
    content = lambda s: (s.operands, s.results, s.splits)
    return [i for i, s in enumerate(strategies) if content(s) == content(held)] or list(
        range(len(strategies))
    )
