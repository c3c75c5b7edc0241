"""Fewer strategies than an op has: those that another plan holds, and those that a question allows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from passes.layout.assignment import NodeLayouts
from passes.layout.layout import Layout

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
