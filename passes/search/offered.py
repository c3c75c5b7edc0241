"""The search space of a graph of offers: states and layouts together.

A strategy is of one of three kinds more than elsewhere:

    absent            a copy that nothing reads, and what only that reads: costs nothing
    `either`, kept    has the layout of the value that the forward made; reads no copy
    `either`, again   has the layout of the copy; reads nothing of the forward

Costs stay those of nodes and pairs: what is not read costs nothing to bring, what is absent cannot be read.

Where bytes count, a `use` is either the value as it is held, or another copy of it. So is a view that lives on until
the backward. Without a limit both are one strategy, as they cost the same. With one, the first stores nothing.

A node is resident as long as its result is. What an op has for itself is there for its own step only, so it is a search
node beside the op: one strategy per number of bytes, and the op's strategies go with those of their bytes. So is a
parameter that is brought into the layout in which an op reads it: no bytes where it is held in that, else those of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import fx

from cost_model.deadline import NEVER, Deadline
from passes.ir.joint import JointGraph, node_value, node_values, repeats, result_index, tensor_operands
from passes.ir.op_traits import is_either, is_use, is_view, op_signature
from passes.layout.layout import Layout, NodeLayouts
from passes.predict.workspaces import Workspaces, workspaces_on
from passes.rules.core.rule_registry import rule_for
from passes.search.residency import InPlace, OneOf, may_be_another
from passes.search.search_space import Edge, SearchSpace
from passes.search.search_terms import ALL, Boundary, Narrowing
from passes.search.strategy_space import Option, SpaceBuilder
from passes.states.offers import Offers
from passes.strategies.prices import Prices, local_nbytes
from passes.strategies.traffic import OpTraffic

ABSENT = NodeLayouts((), ())


@dataclass
class LimitedBuilder(SpaceBuilder):
    """Of a plan within a limit."""

    made: dict[Hashable, tuple[Option, Option]] = field(default_factory=dict)

    def add(self, node: fx.Node | None, name: str, option: Option) -> int:
        if node is not None and may_be_another(node):
            kind = self.in_place(node)
            option = self.derived(kind, option, partial(_or_in_place, kind))
        return super().add(node, name, option)

    def in_place(self, node: fx.Node) -> type[InPlace]:
        return InPlace

    def derived(self, kind: Hashable, option: Option, make: Callable[[Option], Option]) -> Option:
        """What `make` makes of an option: one object for all nodes that are alike, so their edges share matrices."""
        key = kind, id(option.strategies), id(option.seconds)
        if key not in self.made:
            self.made[key] = option, make(option)  # with the option, so that its ids stay its own
        return self.made[key][1]

    def edge_matrices(
        self, source: fx.Node, edge: Edge, merges: bool, still: frozenset[str]
    ) -> list[np.ndarray]:
        strategies, held = self.options[edge.consumer].strategies, self.options[edge.producer].strategies
        rows = [_held(s, edge.result) for s in held]
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
        if anyhow and (for_all := [i for i in here if isinstance(held[i], _InPlaceForAll)]):
            over[0][np.ix_(for_all, anyhow)] += same_layout([rows[i] for i in for_all], targets(anyhow))
        return over


@dataclass(frozen=True)
class _InPlaceForAll(InPlace):
    """Of a parameter's `use` with several readers: none of them brings it elsewhere. What is brought into a layout for
    two of them is brought there once, and lives from the first to the last."""


def same_layout(sources: Sequence[Layout | None], targets: Sequence[Layout | None]) -> np.ndarray:
    """Seconds of reading a value as it is held: none, or impossible."""
    return np.where([[source == target for target in targets] for source in sources], 0.0, np.inf)


def _or_in_place(kind: type[InPlace], option: Option) -> Option:
    in_place = tuple(kind(s.operands, s.results, s.splits) for s in option.strategies)
    return Option((*option.strategies, *in_place), np.concatenate([option.seconds, option.seconds]))


def with_workspaces(space: SearchSpace, joint: JointGraph, prices: Prices) -> SearchSpace:
    """`space` of `joint` with a node beside each op that needs bytes besides its operands, as they are held, and
    results."""
    workspaces = workspaces_on(prices.mesh.device_type, prices.traffic)
    place = {name: i for i, name in enumerate(space.names)}
    known: dict[Hashable, _Rows] = {}
    beside: list[_Beside] = []
    parameters = set(joint.given_as("param"))

    def offer(ops: tuple[int, ...], step: int, key: Hashable, make: Callable[[], _Rows]) -> None:
        if key not in known:
            known[key] = make()
        if known[key].usage.any():
            beside.append(_Beside(ops, step, known[key]))

    for step, node in enumerate(joint.graph.nodes):
        if node.name not in place or not _computes(node):
            continue
        op = place[node.name]
        own = space.strategies[op]
        if _needs(node, workspaces):
            nbytes = lambda node=node, own=own: _Rows.of(_nbytes(node, own, workspaces, prices))
            offer((op,), step, (id(own), op_signature(node)), nbytes)
        for operand, source in enumerate(tensor_operands(node)):
            if _used(source) in parameters:
                producer, result = result_index(source)
                held, value = space.strategies[place[producer.name]], node_value(source)
                moved = lambda own=own, held=held, source=source, operand=operand: _Rows.of_read(
                    own, held, source, operand, prices
                )
                key = id(own), operand, id(held), result, value.shape, value.dtype
                offer((op, place[producer.name]), step, key, moved)
    return _extended(space, beside) if beside else space


def _needs(node: fx.Node, workspaces: Workspaces) -> bool:
    return bool(workspaces.of_op(node)) or any(way.exchange is not None for way in rule_for(node).ways)


def _computes(node: fx.Node) -> bool:
    """Whether it is an op, and no value or copy of one."""
    return node.op == "call_function" and not may_be_another(node) and not is_either(node)


def _used(node: fx.Node) -> fx.Node:
    """What is there, however it is viewed."""
    while is_use(node) or is_view(node):
        producer, _ = result_index(node)
        node = producer if producer is not node else tensor_operands(node)[0]
    return node


@dataclass(frozen=True)
class _Rows:
    """usage: bytes of each strategy beside an op. matrices: 0 where it goes with one of the op, and of what the op
    reads; inf elsewhere. Ops that are alike share them."""

    usage: np.ndarray
    matrices: tuple[np.ndarray, ...]

    @staticmethod
    def of(nbytes: np.ndarray) -> _Rows:
        """Each number of bytes once."""
        usage = np.unique(nbytes)
        return _Rows(usage, (np.where(nbytes[:, None] == usage[None, :], 0.0, np.inf),))

    @staticmethod
    def of_read(
        own: Sequence[NodeLayouts], held: Sequence[NodeLayouts], source: fx.Node, operand: int, prices: Prices
    ) -> _Rows:
        """Each layout in which an op reads a value twice: as it is held, and brought there; None: not at all."""
        producer, result = result_index(source)
        read, has = [_read(s, operand) for s in own], [_held(s, result) for s in held]
        layouts = list(dict.fromkeys(read))
        nbytes = [0 if one is None else local_nbytes(one, producer, result, prices.mesh) for one in layouts]
        goes, is_held = same_layout(read, layouts), same_layout(has, layouts)
        is_held[:, [one is None for one in layouts]] = 0.0
        return _Rows(
            np.array([*[0] * len(layouts), *nbytes], dtype=np.int64),
            (np.hstack([goes, goes]), np.hstack([is_held, np.zeros_like(is_held)])),
        )


@dataclass(frozen=True)
class _Beside:
    """ops: search nodes that `rows` go with, an op and what it reads. step: at which they are there."""

    ops: tuple[int, ...]
    step: int
    rows: _Rows


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


def _extended(space: SearchSpace, beside: Sequence[_Beside]) -> SearchSpace:
    problem, first = space.problem, len(space.names)
    names = tuple(f"beside {space.names[one.ops[0]]}" for one in beside)
    ends = [(op, place, names[place - first]) for place, one in enumerate(beside, first) for op in one.ops]
    problem = replace(
        problem,
        node_costs=(*problem.node_costs, *(np.zeros(len(one.rows.usage)) for one in beside)),
        edges=(*problem.edges, *((op, place) for op, place, _ in ends)),
        edge_costs=(*problem.edge_costs, *(matrix for one in beside for matrix in one.rows.matrices)),
        intervals=(*problem.intervals, *((one.step, one.step + 1) for one in beside)),
        usages=(*problem.usages, *(one.rows.usage for one in beside)),
    )
    return replace(
        space,
        problem=problem,
        names=(*space.names, *names),
        strategies=(*space.strategies, *((ABSENT,) * len(one.rows.usage) for one in beside)),
        edges=(*space.edges, *(Edge(op, 0, place, None) for op, place, _ in ends)),
        reads=(*space.reads, *((name, 0) for _, _, name in ends)),
    )


_MOST_READ, _MOST_PARAMETER, _MORE = 1 / 8, 1 / 2, 8.0
"""Shares of the limit that an op may read of one value, and of one parameter; and how many times as much as it must in
any case, whatever the limit."""


def build_offered(
    offers: Offers,
    prices: Prices,
    boundary: Boundary,
    narrowing: Narrowing = ALL,
    deadline: Deadline = NEVER,
    limit: float = math.inf,
) -> SearchSpace:
    """The space of the graph of `offers`, within no limit yet. Its assignments hold `ABSENT`. limit: that there will
    be: rows leave out what transfers of values hold, so what would be too much is not offered."""
    given = offers.joint, prices, boundary, narrowing, deadline
    builder = _OfferBuilder(*given, optional=offers.optional, limit=limit)
    return with_workspaces(builder.built(), offers.joint, prices)


@dataclass
class _OfferBuilder(LimitedBuilder):
    optional: frozenset[str] = frozenset()
    limit: float = math.inf

    def in_place(self, node: fx.Node) -> type[InPlace]:
        several = is_use(node) and len(node.users) > 1
        return _InPlaceForAll if several and _used(node).op == "placeholder" else InPlace

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
        if node is not None and _computes(node):
            read = self.derived("read", self.options[place], lambda o: self._of_small_reads(node, o))
            self.options[place] = read
        if name in self.optional:
            self.options[place] = self.derived("optional", self.options[place], _or_absent)
        return place

    def _of_small_reads(self, node: fx.Node, option: Option) -> Option:
        """Without strategies that read far too much."""
        shares = np.zeros(len(option.strategies))
        for operand, source in enumerate(tensor_operands(node)):
            most = _MOST_PARAMETER if _used(source).op == "placeholder" else _MOST_READ
            read = [
                local_nbytes(s.operands[operand], *result_index(source), self.prices.mesh)
                for s in option.strategies
            ]
            shares = np.maximum(shares, np.array(read) / (most * self.limit))
        few = np.flatnonzero(shares <= max(1.0, _MORE * float(shares.min())))
        if len(few) == len(shares):
            return option
        return Option(tuple(option.strategies[place] for place in few), option.seconds[few])

    def _storing(self, node: fx.Node) -> np.ndarray | None:
        """Seconds more of `node` per strategy if its result is stored; None: it is in any case."""
        flow = self.prices.flow(node)
        if flow.writes:
            return None
        strategies, stored = self.options[self.index[node]].strategies, OpTraffic(flow.reads, writes=True)
        priced = lambda traffic: self.prices.strategy_seconds(node, rule_for(node), strategies, traffic)
        return repeats(node) * np.maximum(priced(stored) - priced(flow), 0.0)


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
