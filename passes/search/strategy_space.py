"""The search space of a graph: strategies and prices per node, prices per edge, as one `Problem`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import fx

from cost_model.deadline import NEVER, Deadline
from passes.ir.joint import JointGraph, node_value, repeats, result_index, result_shapes, tensor_operands
from passes.ir.op_traits import read_repeats
from passes.ir.op_work import class_key
from passes.layout.layout import Layout, NodeLayouts
from passes.plan.transfers import hidden_reads
from passes.rules.core.rule_registry import rule_for
from passes.search.residency import Residency
from passes.search.search_space import Edge, SearchSpace, distinct
from passes.search.search_terms import (
    ALL,
    Boundary,
    Narrowing,
    free_axis_order,
    is_storable,
    out_of_space,
    stays,
    tensor_rule,
)
from passes.search.step_kinds import StepKinds, step_kinds
from passes.solver.problem import Problem
from passes.strategies.cuts import Cuts, Wider, find_chains, find_cuts, ops_of
from passes.strategies.prices import Prices, local_nbytes
from passes.strategies.strategies import enumerate_strategies, offered_ways
from passes.strategies.traffic import OpTraffic


@dataclass(frozen=True)
class Option:
    """Strategies and seconds shared by all nodes of one class (same op, shapes, arguments)."""

    strategies: tuple[NodeLayouts, ...]
    seconds: np.ndarray


@dataclass
class SpaceBuilder:
    """The labelling problem of `joint` on `prices.mesh`, with the axes `prices.joined` used together.

    One search node per placeholder, op and untied output; one edge per operand, priced by the
    redistribution from the producer's layout to the one the consumer reads.

    narrowing: nodes that do not have all of their strategies. Raises OutOfTime: layouts of a mesh of many axes, and the
    ways between them, are many.
    """

    joint: JointGraph
    prices: Prices
    boundary: Boundary
    narrowing: Narrowing = ALL
    deadline: Deadline = NEVER
    index: dict[fx.Node, int] = field(default_factory=dict)
    nodes: list[fx.Node | None] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    edge_costs: list[np.ndarray] = field(default_factory=list)
    read_of: list[tuple[str, int]] = field(default_factory=list)
    slots: list[int | None] = field(default_factory=list)
    classes: dict[Hashable, Option] = field(default_factory=dict)
    matrices: dict[Hashable, list[np.ndarray]] = field(default_factory=dict)
    kept: dict[Hashable, tuple[Sequence[NodeLayouts], tuple[NodeLayouts, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reads, self.trained = hidden_reads(self.joint), self.joint.trained
        self.narrowing = self.narrowing.of(self.joint)

    def add_nodes(self) -> None:
        ops, mesh = list(ops_of(self.joint)), self.prices.mesh
        cuts = find_cuts(self.joint, mesh, self.boundary.inputs, ops)
        chains = find_chains(ops, mesh, cuts, self.prices.joined)
        ordered = free_axis_order(self.joint)
        kept = out_of_space(ops)
        placeholders = iter(range(len(self.joint.inputs)))
        for node in self.joint.graph.nodes:
            if node.op == "placeholder":
                self.add(node, node.name, self._placeholder(node, next(placeholders)))
            elif node.op == "call_function" and result_index(node)[0] is node:
                wider = chains.get(node.name, {})
                option = self._op(node, cuts, wider, kept.get(node, frozenset()), node in ordered)
                self.add(node, node.name, option)
        for position, result in enumerate(self.joint.results):
            self.slots.append(None if result is None else self._slot(position, result))

    def add_edges(self) -> None:
        for node, consumer in list(self.index.items()):
            for operand, source in enumerate(tensor_operands(node)):
                self._connect(source, consumer, operand, (node.name, operand), read_repeats(node, source))
        ends = itertools.count()
        for result, slot in zip(self.joint.results, self.slots, strict=True):
            if result is not None and slot is not None:
                read = read_repeats(self.joint.output_node, result)
                self._connect(result, slot, None, ("output", next(ends)), read)

    def built(self, memory_limit: int | None = None) -> SearchSpace:
        self.add_nodes()
        self.add_edges()
        strategies = tuple(option.strategies for option in self.options)
        residency = Residency.of(self.joint, self.nodes, strategies, self.prices)
        problem = Problem(
            node_costs=tuple(option.seconds for option in self.options),
            edges=tuple((edge.producer, edge.consumer) for edge in self.edges),
            edge_costs=tuple(self.edge_costs),
            intervals=residency.intervals,
            usages=residency.nbytes,
            limit=memory_limit,
        )
        return SearchSpace(
            problem,
            tuple(self.names),
            strategies,
            tuple(self.edges),
            tuple(self.read_of),
            tuple(self.slots),
            self._kinds(),
            tuple(sorted(self.index[node] for node in self.trained)),
        )

    def _kinds(self) -> StepKinds:
        options = zip(self.names, self.options, strict=True)
        seconds = {name: float(option.seconds.max()) for name, option in options}
        return step_kinds(self.joint, self.reads, seconds, self.prices.redistributor)

    def add(self, node: fx.Node | None, name: str, option: Option) -> int:
        position = len(self.names)
        if node is not None:
            self.index[node] = position
        self.nodes.append(node)
        self.names.append(name)
        self.options.append(self._narrowed(name, option))
        return position

    def _narrowed(self, name: str, option: Option) -> Option:
        places = self.narrowing.places(name, option.strategies)
        if places is None:
            return option
        # One object for all nodes that are alike: their edges share a matrix.
        key = id(option.strategies), places
        if key not in self.kept:
            # With the strategies, so that their id stays their own.
            self.kept[key] = option.strategies, tuple(option.strategies[place] for place in places)
        return Option(self.kept[key][1], option.seconds[list(places)])

    def _placeholder(self, node: fx.Node, position: int) -> Option:
        shape, is_parameter = tuple(node_value(node).shape), self.joint.inputs[position].kind == "param"
        option = self._end(self.boundary.inputs.get(position), shape, is_parameter)
        if node not in self.trained:
            return option
        mesh, seconds = self.prices.mesh, self.prices.optimizer_seconds
        update = [seconds(local_nbytes(s.results[0], node, 0, mesh)) for s in option.strategies]
        return Option(option.strategies, option.seconds + np.array(update))

    def _end(
        self, layouts: Sequence[Layout] | None, shape: tuple[int, ...], any_order: bool = False
    ) -> Option:
        """Of a tensor that may have these layouts; None: any."""
        if layouts is None:
            return self._classed(("placeholder", shape, any_order), lambda: self._free(shape, any_order))
        return Option(tuple(NodeLayouts((), (layout,)) for layout in layouts), np.zeros(len(layouts)))

    def _free(self, shape: tuple[int, ...], any_order: bool) -> Option:
        """Every split of a tensor in torch's own sizes: what a DTensor can hold."""
        mesh, joined, rule = self.prices.mesh, self.prices.joined, tensor_rule(shape)
        ways = enumerate_strategies(rule, (), (shape,), mesh, any_order=any_order, joined=joined)
        results = [found.results for found in ways if is_storable(found.results[0], shape, mesh)]
        return Option(tuple(NodeLayouts((), own) for own in results), np.zeros(len(results)))

    def _op(self, node: fx.Node, cuts: Cuts, wider: Wider, kept: frozenset[str], any_order: bool) -> Option:
        """kept: factors not to be split, though the op's rule would allow it."""
        flow = self.prices.flow(node)
        look = class_key(node), self.prices.orders(node)
        key = (look, flow, any_order, kept, tuple(wider.items()), repeats(node))
        return self._classed(key, lambda: self._enumerated(node, cuts, wider, kept, any_order, flow))

    def _enumerated(
        self, node: fx.Node, cuts: Cuts, wider: Wider, kept: frozenset[str], any_order: bool, flow: OpTraffic
    ) -> Option:
        rule = rule_for(node)
        rule = replace(rule, whole=rule.whole | kept)
        mesh = self.prices.mesh
        operands = [node_value(n).shape for n in tensor_operands(node)]
        strategies = enumerate_strategies(
            rule,
            operands,
            result_shapes(node),
            mesh,
            cuts=cuts,
            wider=wider,
            any_order=any_order,
            joined=self.prices.joined,
            ways=offered_ways(rule, mesh, self.boundary.has_parts(self.joint)),
        )
        seconds = self.prices.strategy_seconds(node, rule, strategies, flow)
        if not np.isfinite(seconds).all():  # a ring, where nothing is to be exchanged so
            strategies = tuple(s for s, x in zip(strategies, seconds, strict=True) if np.isfinite(x))
            seconds = seconds[np.isfinite(seconds)]
        return Option(strategies, repeats(node) * seconds)

    def _classed(self, key: Hashable, make: Callable[[], Option]) -> Option:
        if key not in self.classes:
            self.deadline.check()
            self.classes[key] = make()
        return self.classes[key]

    def _slot(self, position: int, result: fx.Node) -> int:
        """The search node whose layout the graph's result must reach."""
        tied = self.boundary.tied.get(position)
        if tied is not None:
            return self.index[self.joint.placeholders[tied]]
        option = self._end(self.boundary.outputs.get(position), tuple(node_value(result).shape))
        return self.add(None, f"output {position}", option)

    def _connect(
        self, source: fx.Node, consumer: int, operand: int | None, read: tuple[str, int], times: int = 1
    ) -> None:
        node, result = result_index(source)
        edge = Edge(self.index[node], result, consumer, operand)
        still = self.narrowing.still.get(read, frozenset())
        for link, seconds in enumerate(self._matrices(source, edge, read in self.reads.ending, still, times)):
            if not link or seconds.any():
                self.edges.append(replace(edge, link=link))
                self.edge_costs.append(seconds)
                self.read_of.append(read)

    def _matrices(
        self, source: fx.Node, edge: Edge, merges: bool, still: frozenset[str], times: int
    ) -> list[np.ndarray]:
        """Seconds of an edge over each link in a step, in which its redistribution is done so many times."""
        value = node_value(source)
        held = self.options[edge.producer].strategies
        read = self.options[edge.consumer].strategies
        look = tuple(value.shape), value.dtype
        key = (id(held), edge.result, id(read), edge.operand, look, merges, still, times)
        if key not in self.matrices:
            self.deadline.check()
            found = self.edge_matrices(source, edge, merges, still)
            self.matrices[key] = found if times == 1 else [times * seconds for seconds in found]
        return self.matrices[key]

    def edge_matrices(
        self, source: fx.Node, edge: Edge, merges: bool, still: frozenset[str]
    ) -> list[np.ndarray]:
        """Seconds of every pair of strategies at the ends of an edge, over each link."""
        sources = [s.results[edge.result] for s in self.options[edge.producer].strategies]
        read = self.options[edge.consumer].strategies
        targets = [s.results[0] if edge.operand is None else s.operands[edge.operand] for s in read]
        return self.priced(sources, targets, node_value(source), merges, still)

    def priced(
        self,
        sources: list[Layout],
        targets: list[Layout],
        value: torch.Tensor,
        merges: bool,
        still: frozenset[str],
    ) -> list[np.ndarray]:
        """Price each distinct pair of layouts once, then spread over the strategies; over each link."""
        rows, row_of = distinct(sources)
        columns, column_of = distinct(targets)
        prices = self.prices.merged if merges else self.prices.redistributor
        over = prices.by_link(rows, columns, tuple(value.shape), value.element_size(), self.deadline)
        if still:
            allowed = np.array([[stays(row, column, still) for column in columns] for row in rows])
            over[0] = np.where(allowed, over[0], np.inf)
        return [seconds[np.ix_(row_of, column_of)] for seconds in over]
