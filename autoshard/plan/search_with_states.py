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
from passes.search.find_states import ENOUGH, NoStates, OfferedStates, States
from passes.solver.solve import ROUNDING
from passes.states.compute_again import compute_again

__all__ = ["StatesWithin"]

_STATES_SHARE = 0.3
"""Share of the time left in which states must be chosen, each time."""
_TRIES = 8
"""Rooms as counted for which states are chosen, at most."""
_LESS = 1.05
"""What is too much, so often, is how much smaller the next room is."""
_MORE = 1e-3
"""Where no plan fits as counted: share by which the next room is larger than the least that any plan needs."""

Fastest = Callable[[JointGraph, States | None, int | None, int, Deadline], Found]
"""The fastest plan of a graph, of those with the layouts of states, within a limit less a reserve."""


@dataclass
class StatesWithin:
    """The fastest plan within limits, with ops computed again if that is what a limit asks for.

    The fastest of all plans is found first: where it fits, memory decides nothing. If it does not, states are chosen
    together with layouts, and that plan is judged. What is proven holds for all states that were offered. What one
    limit needs, another may need as well: nothing is found or offered twice.
    """

    joint: JointGraph
    fastest: Fastest
    offer: Callable[[Found], OfferedStates]
    _whole: Found | None = None
    _offered: OfferedStates | None = None

    def found(self, memory_limit: int | None, reserve: int, deadline: Deadline) -> Found:
        """Raises InfeasibleError, and OutOfTime."""
        if memory_limit is not None and memory_limit <= reserve:
            return self.fastest(self.joint, None, memory_limit, reserve, deadline)
        whole = self._whole = self._whole or self.fastest(self.joint, None, None, reserve, deadline)
        if memory_limit is None or whole.peak_nbytes <= memory_limit - reserve:
            return whole
        offered = self._offered = self._offered or self.offer(whole)
        limit = memory_limit, reserve
        try:
            return _Search(self.joint, self.fastest, offered, whole, limit, deadline).run()
        except InfeasibleError as reason:
            raise none_together(reason, whole.joined) from None


@dataclass
class _Search:
    """The search counts a little more or less than a program holds, by what differs between plans. So states are
    chosen for several rooms as it counts, from the limit's down, until the program of their plan fits."""

    joint: JointGraph
    fastest: Fastest
    offered: OfferedStates
    whole: Found
    limit: tuple[int, int]
    deadline: Deadline

    @property
    def room(self) -> int:
        return self.limit[0] - self.limit[1]

    def run(self) -> Found:
        """States for layouts as they are known first; where their program fits, with what other layouts can do."""
        least, best, reason, counted = self.whole, None, None, self.room
        for _ in range(_TRIES):
            try:
                chosen = self._states(counted, prove=best is not None)
            except NoStates as refused:
                # What it counts may be more than what the program holds.
                larger = int(refused.least * (1.0 + _MORE))
                if best is not None or reason is not None or larger <= counted:
                    reason = reason or refused
                    break
                reason, counted = refused, larger
                continue
            if best is not None and chosen.seconds >= best[1].seconds * (1.0 - ENOUGH):
                return _proven(best[0], best[1].seconds - chosen.lower_bound)
            found = self._judged(chosen)
            if found.peak_nbytes <= self.room:
                best = found, chosen
                continue
            least = min(least, found, key=lambda one: one.peak_nbytes)
            counted = min(chosen.nbytes, counted) - int(_LESS * (found.peak_nbytes - self.room))
        if best is not None:
            return _proven(best[0], best[0].seconds)
        raise reason or self._too_much(least)

    def _states(self, counted: int, *, prove: bool) -> States:
        latest = self.deadline.share(_STATES_SHARE)
        return self.offered.find(room=counted, limit=self.limit, deadline=latest, prove=prove)

    def _judged(self, chosen: States) -> Found:
        graph = compute_again(self.joint, chosen.again)
        return self.fastest(graph, chosen, None, self.limit[1], self.deadline)

    def _too_much(self, found: Found) -> InfeasibleError:
        needs = format_bytes(found.peak_nbytes + self.limit[1])
        return InfeasibleError(
            f"no plan fits memory_limit={format_bytes(self.limit[0])} per device: the smallest that was "
            f"found holds {format_bytes(found.peak_nbytes)} at {found.peak_node}\n"
            f"  try: memory_limit={needs}, more devices, or a smaller batch"
        )


def _proven(found: Found, missing: float) -> Found:
    """`found`, of which no states that were offered within its room save more than so many seconds."""
    bound = max(0.0, found.seconds - max(0.0, missing))
    gap = (found.seconds - bound) / max(found.seconds, 1e-300)
    status = "optimal" if gap <= ROUNDING else "feasible"
    return replace(found, lower_bound=bound, gap=gap, status=status)
