"""Plans for pieces of a batch of other sizes than the first: its layouts where they fit."""

from __future__ import annotations

from collections.abc import Callable

from cost_model.deadline import Deadline
from passes.ir.joint import JointGraph
from passes.layout.assignment import Assignment
from passes.micro_batches.other_sizes import first_of_each_size, layouts_like
from passes.plan.decide import decide_lowering
from passes.plan.describe import describe
from passes.plan.records import NodeRecord
from passes.search.find import find_assignment
from passes.search.graph_ends import Boundary
from passes.states.backward_copies import copies_in
from passes.states.compute_again import compute_again
from passes.strategies.prices import Prices

__all__ = ["other_size_records", "piece_places"]


def piece_places(joint: JointGraph) -> list[int]:
    """Per piece the place of its size: 0 is the first piece's."""
    firsts = first_of_each_size((joint, *joint.others))
    order = {place: number for number, place in enumerate(sorted(set(firsts)))}
    return [order[place] for place in firsts]


def other_size_records(
    joint: JointGraph,
    assignment: Assignment,
    prices: Prices,
    boundary: Callable[[JointGraph], Boundary],
    time_limit: float,
) -> tuple[tuple[NodeRecord, ...], ...]:
    """Per size of pieces besides the first's, in order, the plan of the step with one of that size.

    assignment: of the first, whose ops that run again do so in all. time_limit: seconds. Raises InfeasibleError where
    its ends do not fit, and OutOfTime.
    """
    deadline = Deadline.after(time_limit)
    found: list[tuple[NodeRecord, ...]] = []
    again = copies_in(joint)
    graphs = joint, *joint.others
    for place in sorted(set(first_of_each_size(graphs)))[1:]:
        graph = compute_again(graphs[place], again)
        like = layouts_like(assignment, graph)
        held = find_assignment(graph, prices, boundary(graph), narrowing=like, deadline=deadline).assignment
        lowering, moved = decide_lowering(graph, held, prices)
        found.append(describe(graph, held, lowering, moved, prices))
    return tuple(found)
