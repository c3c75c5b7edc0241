"""The search within a memory limit that is met by computing again what there is no room to keep."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field, replace

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
_TRIES, _FULL = 6, 0.95
"""Choices of states; and the share of the room at which a plan uses it well enough."""

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
    """What the search counts is more than what the program holds, by what plans differ in. So states are chosen for
    several rooms as the search counts, until the program of their plan fits and uses the room well.

    tried: (as counted, bytes of the program), in the order of what was counted. none: rooms for which there is no plan.
    """

    joint: JointGraph
    fastest: Fastest
    states: Callable[[Found, int, int, Deadline], States]
    whole: Found
    room: int
    reserve: int
    deadline: Deadline
    tried: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    none: float = 0.0

    def run(self) -> Found:
        best: Found | None = None
        least = self.whole
        reason: InfeasibleError | None = None
        self.tried.append((self.whole.counted_nbytes, self.whole.peak_nbytes))
        counted = self.whole.counted_nbytes * self.room / self.whole.peak_nbytes
        for _ in range(_TRIES):
            try:
                found = self._chosen(counted)
            except InfeasibleError as error:
                reason, self.none = error, max(self.none, counted)
            else:
                insort(self.tried, (counted, found.peak_nbytes))
                least = min(least, found, key=lambda one: one.peak_nbytes)
                if found.peak_nbytes <= self.room and (best is None or found.seconds < best.seconds):
                    best = found
            if best is not None and best.peak_nbytes >= _FULL * self.room:
                break
            counted = self._next()
        if best is None:
            raise reason or self._too_much(least)
        return best

    def _next(self) -> float:
        """As counted: between what fits and what does not, where a straight line meets the room."""
        above = next((one for one in self.tried if one[1] > self.room), self.tried[-1])
        below = [one for one in self.tried if one[1] <= self.room and one[0] < above[0]]
        low = below[-1] if below else (self.none, 0)
        if self.none > low[0]:
            low = self.none, low[1]
        share = (self.room - low[1]) / max(above[1] - low[1], 1)
        return low[0] + (above[0] - low[0]) * min(max(share, 0.1), 0.9)

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
