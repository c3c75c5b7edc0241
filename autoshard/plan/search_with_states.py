"""The search within a memory limit that is met by computing again what there is no room to keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from passes.ir.joint import JointGraph
from passes.search.coarse_to_fine import none_together
from passes.search.find import Found
from passes.search.find_states import States
from passes.solver.solve import ROUNDING
from passes.states.compute_again import compute_again

__all__ = ["found_with_states"]

_STATES_SHARE = 0.5
"""Share of the time left in which states must be chosen."""

_SHARES = (1.0, 0.99, 0.96, 0.9)
"""Of the limit, for which states are chosen, until their plan fits. With fewer copies than were offered those that stay
stand nearer to their readers, and what they read lives a little longer."""

Fastest = Callable[[JointGraph, States | None, int | None, int, Deadline], Found]
"""The fastest plan of a graph, of those with the layouts of states, within a limit less a reserve."""


def found_with_states(
    joint: JointGraph,
    fastest: Fastest,
    states: Callable[[Found, int, int, Deadline], States],
    memory_limit: int | None,
    reserve: int,
    deadline: Deadline,
) -> Found:
    """The fastest plan of `joint`, with ops computed again if that is what the limit asks for.

    The fastest of all plans is found first: where it fits, memory decides nothing. If it does not, states are chosen
    together with layouts, and that plan is judged. What is proven holds for all states that were offered.
    """
    if memory_limit is None or memory_limit <= reserve:
        return fastest(joint, None, memory_limit, reserve, deadline)
    room = memory_limit - reserve
    whole = fastest(joint, None, None, reserve, deadline)
    if whole.peak_nbytes <= room:
        return whole
    try:
        return _with_states(joint, fastest, states, whole, memory_limit, reserve, deadline)
    except InfeasibleError as reason:
        raise none_together(reason, whole.joined) from None


def _with_states(
    joint: JointGraph,
    fastest: Fastest,
    states: Callable[[Found, int, int, Deadline], States],
    whole: Found,
    memory_limit: int,
    reserve: int,
    deadline: Deadline,
) -> Found:
    first: States | None = None
    for share in _SHARES:
        chosen = states(whole, int(memory_limit * share), reserve, deadline.share(_STATES_SHARE))
        first = first or chosen
        try:
            found = fastest(compute_again(joint, chosen.again), chosen, memory_limit, reserve, deadline)
        except InfeasibleError:
            if share == _SHARES[-1]:
                raise
        else:
            return _proven(found, first)
    raise AssertionError


def _proven(found: Found, first: States) -> Found:
    """`found` with the bound of all states that were offered within the limit."""
    extra = sum(overlap.extra for overlap in found.overlaps)
    bound = min(found.seconds, first.lower_bound + extra)
    gap = (found.seconds - bound) / max(found.seconds, 1e-300)
    status = "optimal" if gap <= ROUNDING else "feasible"
    return replace(found, lower_bound=bound, gap=gap, status=status)
