"""The search space of a graph of offers: states and layouts together.

A strategy is of one of three kinds more than elsewhere:

    absent            a copy that nothing reads, and what only that reads: costs nothing
    `either`, kept    has the layout of the value that the forward made; reads no copy
    `either`, again   has the layout of the copy; reads nothing of the forward

Costs stay those of nodes and pairs: what is not read costs nothing to bring, what is absent cannot be read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import fx

from cost_model.deadline import NEVER, Deadline
from passes.ir.joint import node_value, repeats, result_index, tensor_operands
from passes.ir.op_traits import is_either
from passes.layout.assignment import NodeLayouts
from passes.layout.layout import Layout
from passes.rules.core.rule_registry import rule_for
from passes.search.graph_ends import Boundary
from passes.search.limited_space import LimitedBuilder, same_layout
from passes.search.narrowing import Narrowing
from passes.search.residency import InPlace, OneOf
from passes.search.search_space import Edge, SearchSpace
from passes.search.strategy_space import Option
from passes.search.workspace_rows import with_workspaces
from passes.states.offers import Offers
from passes.strategies.prices import Prices, strategy_seconds
from passes.strategies.traffic import OpTraffic

ABSENT = NodeLayouts((), ())


def build_offered(
    offers: Offers,
    prices: Prices,
    boundary: Boundary,
    *,
    narrowing: Narrowing | None = None,
    deadline: Deadline = NEVER,
) -> SearchSpace:
    """`build_space` of the graph of `offers`, within no limit yet. Its assignments hold `ABSENT`."""
    builder = _OfferBuilder.of(offers.joint, prices, boundary, narrowing, deadline)
    builder.optional = offers.optional
    return with_workspaces(builder.built(None), offers.joint, prices)


@dataclass
class _OfferBuilder(LimitedBuilder):
    optional: frozenset[str] = frozenset()

    def add(self, node: fx.Node | None, name: str, option: Option) -> int:
        if node is not None and is_either(node):
            producer, result = result_index(tensor_operands(node)[0])
            kept = self.options[self.index[producer]]
            storing = self._storing(producer)
            one, other = tensor_operands(node)
            option = self.derived(
                ("either", result, storing is None, one is other),
                kept,
                lambda o: _either(o, result, storing, one is other),
            )
        place = super().add(node, name, option)
        if name in self.optional:
            self.options[place] = self.derived("optional", self.options[place], _or_absent)
        return place

    def _storing(self, node: fx.Node) -> np.ndarray | None:
        """Seconds more of `node` per strategy if its result is stored; None: it is in any case."""
        flow, mesh = self.prices.traffic(node), self.prices.mesh
        if flow.writes:
            return None
        strategies, stored = self.options[self.index[node]].strategies, OpTraffic(flow.reads, writes=True)
        priced = lambda traffic: strategy_seconds(
            node, rule_for(node), strategies, traffic, mesh, self.prices.compute
        )
        return repeats(node) * np.maximum(priced(stored) - priced(flow), 0.0)

    def edge_matrix(self, source: fx.Node, edge: Edge, merges: bool, still: frozenset[str]) -> np.ndarray:
        strategies = self.options[edge.consumer].strategies
        rows = [_held(s, edge.result) for s in self.options[edge.producer].strategies]
        columns = [_read(s, edge.operand) for s in strategies]
        here = [i for i, layout in enumerate(rows) if layout is not None]
        anyhow = [j for j, s in enumerate(strategies) if columns[j] is not None and not isinstance(s, _STILL)]
        in_place = [j for j, s in enumerate(strategies) if columns[j] is not None and isinstance(s, _STILL)]
        matrix = np.zeros((len(rows), len(columns)))
        matrix[:, anyhow + in_place] = np.inf
        sources = [layout for layout in rows if layout is not None]
        targets = lambda places: [layout for j in places if (layout := columns[j]) is not None]
        if here and anyhow:
            matrix[np.ix_(here, anyhow)] = self.priced(
                sources, targets(anyhow), node_value(source), merges, still
            )
        if here and in_place:
            matrix[np.ix_(here, in_place)] = same_layout(sources, targets(in_place))
        return matrix


_STILL = (InPlace, OneOf)


def _or_absent(option: Option) -> Option:
    return Option((*option.strategies, ABSENT), np.append(option.seconds, 0.0))


def _either(option: Option, result: int, storing: np.ndarray | None, kept_only: bool) -> Option:
    """storing: what keeping the value costs, per strategy of the op that makes it. kept_only: there is no copy."""
    seconds: dict[Layout, float] = {}
    for place, strategy in enumerate(option.strategies):
        if strategy.results:
            layout, more = strategy.results[result], 0.0 if storing is None else float(storing[place])
            seconds[layout] = min(seconds.get(layout, more), more)
    layouts = list(seconds)
    kept = [OneOf((layout, layout), (layout,), kept=True) for layout in layouts]
    again = [] if kept_only else [OneOf((layout, layout), (layout,), kept=False) for layout in layouts]
    strategies = (*kept, *again, ABSENT)
    return Option(strategies, np.array([*seconds.values(), *[0.0] * (len(again) + 1)]))


def _held(strategy: NodeLayouts, result: int) -> Layout | None:
    return strategy.results[result] if strategy.results else None


def _read(strategy: NodeLayouts, operand: int | None) -> Layout | None:
    """In which layout a strategy reads an operand; None: it does not."""
    if operand is None:
        return strategy.results[0]
    if not strategy.operands or (isinstance(strategy, OneOf) and strategy.kept != (operand == 0)):
        return None
    return strategy.operands[operand]
