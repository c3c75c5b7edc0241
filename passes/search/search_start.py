"""From where a search starts, and how far it goes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from passes.layout.assignment import Assignment, NodeLayouts
from passes.search.search_space import SearchSpace


@dataclass(frozen=True)
class SearchStart:
    """near: the layouts of a plan of the same graph, which may be good under these prices too; None: none is known.
    gap: share of the step by which the plan may be above the bound when the search ends by itself; None: as the task
    says, and where there is none, when nothing is left to try. together: all axes are used together, wherever the ends
    of the graph allow it: a plan at once (`passes.search.coarse_to_fine`)."""

    near: Assignment | None = None
    gap: float | None = None
    together: bool = False

    def ending_at(self, gap: float) -> SearchStart:
        """Where it does not say at which gap it ends: at this one."""
        return self if self.gap is not None else replace(self, gap=gap)

    def choice(self, space: SearchSpace) -> tuple[int, ...] | None:
        """`near` among the strategies of `space`; None where one of it is not listed there."""
        if self.near is None:
            return None
        slots = (slot for slot in space.output_slots if slot is not None)
        ends = zip(slots, self.near["output"].operands, strict=True)
        layouts = {space.names[slot]: NodeLayouts((), (layout,)) for slot, layout in ends} | {**self.near}
        places: list[int] = []
        for name, strategies in zip(space.names, space.strategies, strict=True):
            held = layouts.get(name)
            alike = (i for i, one in enumerate(strategies) if held is not None and same_layouts(one, held))
            if (place := next(alike, None)) is None:
                return None
            places.append(place)
        return tuple(places)


COLD = SearchStart()
"""Nothing is known."""


def same_layouts(one: NodeLayouts, other: NodeLayouts) -> bool:
    """Whether two strategies have the same layouts, whatever is stored for them."""
    return (one.operands, one.results, one.splits) == (other.operands, other.results, other.splits)
