"""Fewer strategies than an op has: those that another plan holds, and those that a question allows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from passes.layout.assignment import NodeLayouts

__all__ = ["Choose", "Narrowing"]

Choose = Callable[[Sequence[NodeLayouts]], Sequence[int]]
"""Of an op's strategies the positions of those that are allowed: one at least, or InfeasibleError."""

Strategies = tuple[NodeLayouts, ...]


@dataclass(frozen=True)
class Narrowing:
    """held: layouts of nodes of a graph like this one at other sizes; allowed: by node name."""

    held: Mapping[str, NodeLayouts] = field(default_factory=dict)
    allowed: Mapping[str, Choose] = field(default_factory=dict)
    _known: dict[tuple[int, tuple[int, ...]], tuple[Strategies, Strategies]] = field(default_factory=dict)

    def places(self, name: str, strategies: Strategies) -> tuple[int, ...] | None:
        """Positions of the strategies that node `name` keeps; None: all. A held one that it does not have is no reason
        to keep none."""
        if name in self.allowed:
            return tuple(self.allowed[name](strategies))
        if name in self.held:
            sign = _signature(self.held[name])
            place = next((i for i, s in enumerate(strategies) if _signature(s) == sign), None)
            return None if place is None else (place,)
        return None

    def kept(self, strategies: Strategies, places: tuple[int, ...]) -> Strategies:
        """One object for all nodes that are alike: their edges share a matrix."""
        key = id(strategies), places
        if key not in self._known:
            found = tuple(strategies[place] for place in places)
            self._known[key] = strategies, found  # with the strategies, so that their id stays their own
        return self._known[key][1]


def _signature(strategy: NodeLayouts) -> Hashable:
    """What of a strategy does not depend on sizes: the axes of every dim, and what is pending."""
    return tuple((layout.dims, layout.partial) for layout in (*strategy.operands, *strategy.results))
