"""The search within a memory limit that is met by computing again what there is no room to keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from cost_model.units import format_bytes
from passes.ir.joint import JointGraph
from passes.search.coarse_to_fine import none_together
from passes.search.find import Found
from passes.search.find_states import States
from passes.solver.solve import ROUNDING
from passes.states.compute_again import compute_again

__all__ = ["found_with_states"]

_STATES_SHARE = 0.3
"""Share of the time left in which states must be chosen, each time."""
_TRIES, _STEP, _FURTHEST = 10, 0.94, 0.7
"""Rooms as counted for which states are chosen; each as a share of the one before, at most and at least."""
_REFUSED = 2
"""Of these without any plan, after which there is none."""

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
        return _Search(joint, fastest, states, whole, room, reserve, deadline).run()
    except InfeasibleError as reason:
        raise none_together(reason, whole.joined) from None


@dataclass
class _Search:
    """The search counts more than a program holds, by a share in which plans differ. So states are chosen for several
    rooms as it counts, from the largest that could do down, until the program of their plan fits."""

    joint: JointGraph
    fastest: Fastest
    states: Callable[[Found, int, int, Deadline], States]
    whole: Found
    room: int
    reserve: int
    deadline: Deadline

    def run(self) -> Found:
        least, reason, refused = self.whole, None, 0
        counted = self.whole.counted_nbytes * self.room / self.whole.peak_nbytes
        step = _STEP
        for _ in range(_TRIES):
            try:
                found = self._chosen(counted)
            except InfeasibleError as error:
                # Back, half way to what there was a plan for.
                reason, counted, step = error, counted / step, (1.0 + step) / 2
                refused += 1
                if refused >= _REFUSED and least is self.whole:
                    break
            else:
                if found.peak_nbytes <= self.room:
                    return found
                least = min(least, found, key=lambda one: one.peak_nbytes)
                # Of what is too much a part only is kept values: it takes twice the share to lose it.
                over = 1.0 - self.room / found.peak_nbytes
                counted *= min(1.0, max(1.0 - 2.0 * over, _FURTHEST) / step)
            counted *= step
        raise reason or self._too_much(least)

    def _chosen(self, counted: float) -> Found:
        latest = self.deadline.share(_STATES_SHARE)
        chosen = self.states(self.whole, int(counted), self.reserve, latest)
        found = self.fastest(
            compute_again(self.joint, chosen.again), chosen, None, self.reserve, self.deadline
        )
        return _proven(found, chosen)

    def _too_much(self, found: Found) -> InfeasibleError:
        needs = format_bytes(found.peak_nbytes + self.reserve)
        return InfeasibleError(
            f"no plan fits memory_limit={format_bytes(self.room + self.reserve)} per device: the smallest that was "
            f"found holds {format_bytes(found.peak_nbytes)} at {found.peak_node}\n"
            f"  try: memory_limit={needs}, more devices, or a smaller batch"
        )


def _proven(found: Found, chosen: States) -> Found:
    """`found` with the bound of all states that were offered within that room."""
    extra = sum(overlap.extra for overlap in found.overlaps)
    bound = min(found.seconds, chosen.lower_bound + extra)
    gap = (found.seconds - bound) / max(found.seconds, 1e-300)
    status = "optimal" if gap <= ROUNDING else "feasible"
    return replace(found, lower_bound=bound, gap=gap, status=status)
