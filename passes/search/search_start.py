"""From where a search starts and how far it goes; fewer strategies than an op has, where a question allows no more."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes.layout.layout import Assignment, Layout, NodeLayouts
from passes.search.search_space import SearchSpace

Choose = Callable[[Sequence[NodeLayouts]], Sequence[int]]
"""Of an op's strategies the positions of those that are allowed: one at least, or InfeasibleError."""


@dataclass(frozen=True)
class Narrowing:
    """held: layouts of nodes of a graph like this one at other sizes. allowed: by node name.
    still: (reader, position among its tensor operands) -> axes over which the value does not move before it is read:
    they split the same dim of it as it is held and as it is read, or none."""

    held: Mapping[str, NodeLayouts] = field(default_factory=dict)
    allowed: Mapping[str, Choose] = field(default_factory=dict)
    still: Mapping[tuple[str, int], frozenset[str]] = field(default_factory=dict)

    def places(self, name: str, strategies: Sequence[NodeLayouts]) -> tuple[int, ...] | None:
        """Positions of the strategies that node `name` keeps; None: all. A held one that it does not have is no reason
        to keep none."""
        if name in self.allowed:
            return tuple(self.allowed[name](strategies))
        if name in self.held:
            sign = _signature(self.held[name])
            place = next((i for i, s in enumerate(strategies) if _signature(s) == sign), None)
            return None if place is None else (place,)
        return None


def stays(held: Layout, read: Layout, axes: Iterable[str]) -> bool:
    """Whether nothing moves over `axes` between the two layouts of a value, of which neither is pending."""
    return all(held.dim_of(axis) == read.dim_of(axis) for axis in axes)


def _signature(strategy: NodeLayouts) -> Hashable:
    """What of a strategy does not depend on sizes: the axes of every dim, and what is pending."""
    return tuple((layout.dims, layout.partial) for layout in (*strategy.operands, *strategy.results))


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
