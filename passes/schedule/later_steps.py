"""When the further steps of reductions start that only the end of a phase needs: each with the next such reduction.

A gradient that is scattered within hosts, reduced between them and gathered again has three collectives, each of the
result of the one before. Issued one right after the other the first may hide behind computing, and the others are
waited for where they start. So a further step waits for the next reduction's turn, and by then the one before it has
had as long on its way as the backward took to get there:

    turn        of a        of b        of c
    a           scatter
    b           reduce      scatter
    c           gather      reduce      scatter
    the end                 gather      reduce, gather

All ranks find the same: by the graph, the layouts and the turns of the plan alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from passes.ir.joint import JointGraph
from passes.plan.planned_graph import PlannedGraph, Transfer
from passes.plan.transfers import by_segment, transfers
from passes.schedule.issue_order import closing


def later_places(
    joint: JointGraph,
    planned: PlannedGraph,
) -> Mapping[Transfer, tuple[int, ...]]:
    """Of such transfers of several collectives: the place in its phase, as in `Turn`, at which each further one starts,
    before what has its turn there."""
    turns = planned.turns
    count = {transfer: sum(step.kind is not None for step in way) for transfer, way in planned.steps.items()}
    if max(count.values(), default=0) < 2:
        return {}
    found: dict[Transfer, tuple[int, ...]] = {}
    for ops, moves in by_segment(joint, transfers(joint, planned.layouts)):
        ending = [move.transfer for move in closing(ops, joint, moves)]
        places = sorted({turns[transfer][1] for transfer in ending})
        end = max((turns[move.transfer][1] for move in moves), default=0) + 1
        for transfer in ending:
            following = places[places.index(turns[transfer][1]) + 1 :]
            further = count[transfer] - 1
            if further > 0:
                ends = range(end, end + further)
                found[transfer] = (*following, *ends)[:further]
    return found
