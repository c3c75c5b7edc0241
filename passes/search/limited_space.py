"""The search space where bytes count: a `use` is either the value as it is held, or another copy of it. So is a view
that lives on until the backward.

Without a limit both are one strategy, as they cost the same. With one, the first stores nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from cost_model.deadline import NEVER, Deadline
from passes.ir.joint import JointGraph, node_value
from passes.layout.layout import Layout
from passes.search.graph_ends import Boundary
from passes.search.narrowing import Narrowing
from passes.search.residency import InPlace, may_be_another
from passes.search.search_space import Edge, SearchSpace
from passes.search.strategy_space import Option, SpaceBuilder
from passes.strategies.prices import Prices


def build_limited(
    joint: JointGraph,
    prices: Prices,
    boundary: Boundary,
    *,
    memory_limit: int,
    narrowing: Narrowing | None = None,
    deadline: Deadline = NEVER,
) -> SearchSpace:
    """`build_space` within `memory_limit` bytes."""
    return LimitedBuilder.of(joint, prices, boundary, narrowing, deadline).built(memory_limit)


@dataclass
class LimitedBuilder(SpaceBuilder):
    made: dict[Hashable, tuple[Option, Option]] = field(default_factory=dict)

    def add(self, node: fx.Node | None, name: str, option: Option) -> int:
        if node is not None and may_be_another(node):
            option = self.derived("in place", option, _or_in_place)
        return super().add(node, name, option)

    def derived(self, kind: Hashable, option: Option, make: Callable[[Option], Option]) -> Option:
        """What `make` makes of an option: one object for all nodes that are alike, so their edges share matrices."""
        key = kind, id(option.strategies), id(option.seconds)
        if key not in self.made:
            self.made[key] = option, make(option)  # with the option, so that its ids stay its own
        return self.made[key][1]

    def edge_matrix(self, source: fx.Node, edge: Edge, merges: bool, still: frozenset[str]) -> np.ndarray:
        read = self.options[edge.consumer].strategies
        in_place = [i for i, strategy in enumerate(read) if isinstance(strategy, InPlace)]
        if not in_place:
            return super().edge_matrix(source, edge, merges, still)
        moved = len(read) - len(in_place)
        sources = [s.results[edge.result] for s in self.options[edge.producer].strategies]
        targets = [s.operands[0] for s in read]
        seconds = self.priced(sources, targets[:moved], node_value(source), merges, still)
        return np.concatenate([seconds, same_layout(sources, targets[moved:])], axis=1)


def same_layout(sources: list[Layout], targets: list[Layout]) -> np.ndarray:
    """Seconds of reading a value as it is held: none, or impossible."""
    return np.where([[source == target for target in targets] for source in sources], 0.0, np.inf)


def _or_in_place(option: Option) -> Option:
    in_place = tuple(InPlace(s.operands, s.results, s.splits) for s in option.strategies)
    return Option((*option.strategies, *in_place), np.concatenate([option.seconds, option.seconds]))
