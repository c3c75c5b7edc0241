"""The search space of a graph of offers: states and layouts together.

A strategy is of one of three kinds more than elsewhere:

    absent            a copy that nothing reads, and what only that reads: costs nothing
    `either`, kept    has the layout of the value that the forward made; reads no copy
    `either`, again   has the layout of the copy; reads nothing of the forward

Costs stay those of nodes and pairs: what is not read costs nothing to bring, what is absent cannot be read.

Where bytes count, a `use` is either the value as it is held, or another copy of it. So is a view that lives on until
the backward. Without a limit both are one strategy, as they cost the same. With one, the first stores nothing.

A node is resident as long as its result is. What an op has for itself is there for its own step only, so it is a search
node beside the op: one strategy per number of bytes, and the op's strategies go with those of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import fx

from cost_model.deadline import NEVER, Deadline
from passes.ir.joint import JointGraph, node_value, node_values, repeats, result_index, tensor_operands
from passes.ir.op_traits import is_either, op_signature
from passes.layout.layout import Layout, NodeLayouts
from passes.predict.workspaces import Workspaces, workspaces_on
from passes.rules.core.rule_registry import rule_for
from passes.search.residency import InPlace, OneOf, may_be_another
from passes.search.search_space import Edge, SearchSpace
from passes.search.search_terms import ALL, Boundary, Narrowing
from passes.search.strategy_space import Option, SpaceBuilder
from passes.states.offers import Offers
from passes.strategies.prices import Prices
from passes.strategies.traffic import OpTraffic


@dataclass
class LimitedBuilder(SpaceBuilder):
    """Of a plan within a limit."""

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

    def edge_matrices(
        self, source: fx.Node, edge: Edge, merges: bool, still: frozenset[str]
    ) -> list[np.ndarray]:
        read = self.options[edge.consumer].strategies
        in_place = [i for i, strategy in enumerate(read) if isinstance(strategy, InPlace)]
        if not in_place:
            return super().edge_matrices(source, edge, merges, still)
        moved = len(read) - len(in_place)
        sources = [s.results[edge.result] for s in self.options[edge.producer].strategies]
        targets = [s.operands[0] for s in read]
        over = self.priced(sources, targets[:moved], node_value(source), merges, still)
        held = same_layout(sources, targets[moved:])
        beside = [held, *[np.zeros(held.shape)] * (len(over) - 1)]
        return [np.concatenate(both, axis=1) for both in zip(over, beside, strict=True)]


def same_layout(sources: list[Layout], targets: list[Layout]) -> np.ndarray:
    """Seconds of reading a value as it is held: none, or impossible."""
    return np.where([[source == target for target in targets] for source in sources], 0.0, np.inf)


def _or_in_place(option: Option) -> Option:
    in_place = tuple(InPlace(s.operands, s.results, s.splits) for s in option.strategies)
    return Option((*option.strategies, *in_place), np.concatenate([option.seconds, option.seconds]))


_NOTHING = NodeLayouts((), ())


def with_workspaces(space: SearchSpace, joint: JointGraph, prices: Prices) -> SearchSpace:
    """`space` of `joint` with a node beside each op that needs bytes besides its operands and results."""
    workspaces = workspaces_on(prices.mesh.device_type, prices.traffic)
    place = {name: i for i, name in enumerate(space.names)}
    known: dict[Hashable, _Rows] = {}
    beside: list[tuple[int, int, _Rows]] = []
    for step, node in enumerate(joint.graph.nodes):
        if node.op != "call_function" or node.name not in place or not _needs(node, workspaces):
            continue
        op = place[node.name]
        key = id(space.strategies[op]), op_signature(node)
        if key not in known:
            known[key] = _Rows.of(_nbytes(node, space.strategies[op], workspaces, prices))
        if known[key].usage.any():
            beside.append((op, step, known[key]))
    return _extended(space, beside) if beside else space


def _needs(node: fx.Node, workspaces: Workspaces) -> bool:
    return bool(workspaces.of_op(node)) or any(way.exchange is not None for way in rule_for(node).ways)


@dataclass(frozen=True)
class _Rows:
    """usage: each number of bytes once; matrix: 0 where a strategy of the op has it, inf elsewhere. Ops that are alike
    share them."""

    usage: np.ndarray
    matrix: np.ndarray
    strategies: tuple[NodeLayouts, ...]

    @staticmethod
    def of(nbytes: np.ndarray) -> _Rows:
        usage = np.unique(nbytes)
        matrix = np.where(nbytes[:, None] == usage[None, :], 0.0, np.inf)
        return _Rows(usage, matrix, (_NOTHING,) * len(usage))


def _nbytes(
    node: fx.Node, strategies: Sequence[NodeLayouts], workspaces: Workspaces, prices: Prices
) -> np.ndarray:
    """int64[strategies]: on the rank with the largest shards; 0 where it does not run."""
    operands, made = tensor_operands(node), node_values(node)[0] is not None

    def of_strategy(strategy: NodeLayouts) -> int:
        if not strategy.results:
            return 0
        held = dict(zip(operands, strategy.operands, strict=True))
        if made:
            held[node] = strategy.results[0]
        local = {one: _local(one, layout, prices) for one, layout in held.items()}
        return workspaces.of_op(node, local.__getitem__) + prices.ring_nbytes(node, strategy)

    return np.array([of_strategy(strategy) for strategy in strategies], dtype=np.int64)


def _local(node: fx.Node, layout: Layout, prices: Prices) -> torch.Tensor:
    value = node_value(node)
    return torch.empty(layout.max_local_shape(value.shape, prices.mesh), dtype=value.dtype, device="meta")


def _extended(space: SearchSpace, beside: Sequence[tuple[int, int, _Rows]]) -> SearchSpace:
    """beside: of each new node the op that it is beside, that op's step, and its rows."""
    ops, steps, rows = zip(*beside, strict=True)
    problem, first = space.problem, len(space.names)
    places = range(first, first + len(ops))
    names = tuple(f"beside {space.names[op]}" for op in ops)
    problem = replace(
        problem,
        node_costs=(*problem.node_costs, *(np.zeros(len(one.usage)) for one in rows)),
        edges=(*problem.edges, *zip(ops, places, strict=True)),
        edge_costs=(*problem.edge_costs, *(one.matrix for one in rows)),
        intervals=(*problem.intervals, *((step, step + 1) for step in steps)),
        usages=(*problem.usages, *(one.usage for one in rows)),
    )
    return replace(
        space,
        problem=problem,
        names=(*space.names, *names),
        strategies=(*space.strategies, *(one.strategies for one in rows)),
        edges=(*space.edges, *(Edge(op, 0, place, None) for op, place in zip(ops, places, strict=True))),
        reads=(*space.reads, *((name, 0) for name in names)),
    )


ABSENT = NodeLayouts((), ())


def build_offered(
    offers: Offers, prices: Prices, boundary: Boundary, narrowing: Narrowing = ALL, deadline: Deadline = NEVER
) -> SearchSpace:
    """The space of the graph of `offers`, within no limit yet. Its assignments hold `ABSENT`."""
    builder = _OfferBuilder(offers.joint, prices, boundary, narrowing, deadline, optional=offers.optional)
    return with_workspaces(builder.built(), offers.joint, prices)


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
        flow = self.prices.flow(node)
        if flow.writes:
            return None
        strategies, stored = self.options[self.index[node]].strategies, OpTraffic(flow.reads, writes=True)
        priced = lambda traffic: self.prices.strategy_seconds(node, rule_for(node), strategies, traffic)
        return repeats(node) * np.maximum(priced(stored) - priced(flow), 0.0)

    def edge_matrices(
        self, source: fx.Node, edge: Edge, merges: bool, still: frozenset[str]
    ) -> list[np.ndarray]:
        strategies = self.options[edge.consumer].strategies
        rows = [_held(s, edge.result) for s in self.options[edge.producer].strategies]
        columns = [_read(s, edge.operand) for s in strategies]
        here = [i for i, layout in enumerate(rows) if layout is not None]
        anyhow = [j for j, s in enumerate(strategies) if columns[j] is not None and not isinstance(s, _STILL)]
        in_place = [j for j, s in enumerate(strategies) if columns[j] is not None and isinstance(s, _STILL)]
        over = [np.zeros((len(rows), len(columns))) for _ in range(self.prices.redistributor.link_count)]
        over[0][:, anyhow + in_place] = np.inf
        sources = [layout for layout in rows if layout is not None]
        targets = lambda places: [layout for j in places if (layout := columns[j]) is not None]
        if here and anyhow:
            moved = self.priced(sources, targets(anyhow), node_value(source), merges, still)
            for matrix, seconds in zip(over, moved, strict=True):
                matrix[np.ix_(here, anyhow)] = seconds
        if here and in_place:
            over[0][np.ix_(here, in_place)] = same_layout(sources, targets(in_place))
        return over


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
