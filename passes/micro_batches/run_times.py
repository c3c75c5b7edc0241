"""When each op runs if a batch is run in pieces: once before them, in each of them, or once after.

An op of a piece splits a factor of its rule over time, or carries sums that are pending over the pieces, as over any
mesh axis. Of the moves between layouts only those that need no other piece are there:

    whole, before -> split          a part is read
    whole, before -> whole          read as it is, by every piece
    pending, split -> whole, after  results are added up, or put side by side

What that costs is for who asks (`Weights`). For a batch what is run whole costs what it computes and stores, what runs
in pieces nothing: so the search, the one that layouts have, leaves out of the pieces only what must be.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import (
    FakeCalls,
    JointGraph,
    node_value,
    result_index,
    result_shapes,
    results_nbytes,
    tensor_operands,
    tensor_shapes,
)
from passes.ir.op_traits import is_view, is_zeros
from passes.ir.op_work import class_key, global_flops
from passes.layout.layout import ROUTED, Layout, NodeLayouts
from passes.micro_batches.time_axis import TIME, call_products, given_layouts, run_alike, time_mesh
from passes.rules.core.rule import OpRule
from passes.solver.problem import Array, Problem
from passes.solver.solve import solve
from passes.strategies.cuts import Cuts, find_cuts, ops_of
from passes.strategies.strategies import enumerate_strategies

RunTime = Literal["before", "piece", "after"]

READ_PART = 1e-3
"""Bytes that reading a part of one dim costs, times the dim."""


@dataclass(frozen=True)
class RunTimes:
    """of: op -> when it runs. layouts: of the ops that run in pieces, over `mesh`: the pieces, unless it is said what
    else (`passes.micro_batches.cut_batch`). count: of pieces."""

    of: Mapping[str, RunTime]
    layouts: Mapping[str, NodeLayouts]
    count: int
    mesh: MeshSpec

    def cut(self, joint: JointGraph) -> Iterator[tuple[tuple[int, ...], Layout, int]]:
        """Of all that is cut in time the shape, the layout, and the dim."""
        for node in joint.graph.nodes:
            if (layouts := self.layouts.get(node.name)) is not None:
                yield from _cut(node, layouts)


def _cut(node: fx.Node, layouts: NodeLayouts) -> Iterator[tuple[tuple[int, ...], Layout, int]]:
    for shape, layout in zip(tensor_shapes(node), layouts.tensors, strict=True):
        if (dim := layout.dim_of(TIME)) is not None:
            yield shape, layout, dim


@dataclass(frozen=True)
class Weights:
    """What is weighed, in bytes. whole, piece: of an op, run whole or in pieces.
    read: of a tensor of `ndim` dims of which parts along `dim` are read. together: of a value that is put side by side
    over the pieces, for each reader; what is added up over them weighs a thousandth of its bytes."""

    whole: Callable[[fx.Node], float]
    piece: Callable[[fx.Node], float]
    read: Callable[[int, int], float]
    together: Callable[[fx.Node], float]


def _work(node: fx.Node) -> float:
    # Operations that weigh as much as a byte: what is run whole is weighed, not timed.
    return 0.0 if is_view(node) else results_nbytes(node) + global_flops(node) / 50.0


def of_a_batch(joint: JointGraph) -> Weights:
    """As little as can be is left out, and of products with the call's tensors none where that can be. The first dim
    that can be is cut."""
    ops = [node for node in joint.graph.nodes if node.op == "call_function"]
    products = set(call_products(joint))
    all_others = sum(_work(node) + len(node.users) * results_nbytes(node) for node in ops)
    return Weights(
        lambda node: _work(node) + all_others * (node in products),
        lambda _: 0.0,
        lambda dim, _: (dim + 1) * READ_PART,
        results_nbytes,
    )


@dataclass(frozen=True)
class _Label:
    time: RunTime
    layouts: NodeLayouts


_Labels = tuple[_Label, ...]
_Side = tuple[RunTime, Layout]


def find_run_times(
    joint: JointGraph, count: int, weights: Weights | None = None, *, alike: bool = True
) -> RunTimes:
    """What runs in `count` pieces, and how it is cut, at the least weight. `joint` has no `use`.

    weights: None: those of a batch.
    alike: pieces run the same ops, so that one plan is of all."""
    labels = _Labeller(joint, count, weights or of_a_batch(joint), FakeCalls() if alike else None)
    labels.add_ops()
    labels.add_outputs()
    found = solve(labels.problem(), time_limit=60.0, relative_gap=1e-3)
    chosen = {
        name: labels.labels[place][found.choice[place]]
        for name, place in labels.places.items()
        if name in labels.ops
    }
    layouts = {name: label.layouts for name, label in chosen.items() if label.time == "piece"}
    return RunTimes({name: label.time for name, label in chosen.items()}, layouts, count, time_mesh(count))


def piece_strategies(joint: JointGraph, count: int) -> Callable[[fx.Node], list[NodeLayouts]]:
    """How an op of `joint` can run in `count` pieces."""
    mesh, ops = time_mesh(count), list(ops_of(joint))
    cuts, rules, calls = find_cuts(joint, mesh, given_layouts(joint, count), ops), dict(ops), FakeCalls()

    def of(node: fx.Node) -> list[NodeLayouts]:
        labels = _op_labels(node, rules[node], mesh, cuts, calls)
        return [label.layouts for label in labels if label.time == "piece"]

    return of


@dataclass
class _Labeller:
    joint: JointGraph
    count: int
    weights: Weights
    calls: FakeCalls | None
    labels: list[_Labels] = field(default_factory=list)
    costs: list[Array] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    edge_costs: list[Array] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    ops: set[str] = field(default_factory=set)
    classes: dict[Hashable, _Labels] = field(default_factory=dict)
    matrices: dict[Hashable, Array] = field(default_factory=dict)
    given: set[fx.Node] = field(default_factory=set)

    def problem(self) -> Problem:
        return Problem(tuple(self.costs), tuple(self.edges), tuple(self.edge_costs))

    def add_ops(self) -> None:
        mesh, ops = time_mesh(self.count), list(ops_of(self.joint))
        cuts = find_cuts(self.joint, mesh, given_layouts(self.joint, self.count), ops)
        for node, spec in self.joint.given:
            ndim = node_value(node).ndim
            if spec.kind in ("input", "tangent"):
                self.given.add(node)
            self._add(node.name, self._classed((spec.kind, ndim), lambda n=ndim: _whole(n)))
        for node, rule in ops:
            operands = tensor_operands(node)
            labels = self._classed(
                (class_key(node), *map(is_zeros, operands)),
                lambda n=node, r=rule: _op_labels(n, r, mesh, cuts, self.calls),
            )
            whole, piece = self.weights.whole(node), self.weights.piece(node)
            self._add(node.name, labels, [piece if label.time == "piece" else whole for label in labels])
            self.ops.add(node.name)
            for position, operand in enumerate(operands):
                self._connect(operand, node.name, position)

    def add_outputs(self) -> None:
        for place, result in enumerate(self.joint.results):
            if result is not None:
                name, ndim = f"output {place}", node_value(result).ndim
                self._add(name, self._classed(("output", ndim), lambda n=ndim: _returned(n)))
                self._connect(result, name, 0)

    def _classed(self, key: Hashable, make: Callable[[], _Labels]) -> _Labels:
        if key not in self.classes:
            self.classes[key] = make()
        return self.classes[key]

    def _add(self, name: str, labels: _Labels, costs: Sequence[float] = (0.0,)) -> None:
        self.places[name] = len(self.labels)
        self.labels.append(labels)
        self.costs.append(np.array(costs))

    def _connect(self, operand: fx.Node, reader: str, position: int) -> None:
        producer, result = result_index(operand)
        source, target = self.places[producer.name], self.places[reader]
        given = producer in self.given
        nbytes = results_nbytes(operand)
        together = self.weights.together(operand)
        key = id(self.labels[source]), result, id(self.labels[target]), position, nbytes, together, given
        if key not in self.matrices:
            rows: list[_Side] = [(one.time, one.layouts.results[result]) for one in self.labels[source]]
            columns: list[_Side] = [(one.time, one.layouts.operands[position]) for one in self.labels[target]]
            shape, mesh, once = node_value(operand).shape, time_mesh(self.count), 1.0 if given else 2.0

            def parts(layout: Layout, dim: int) -> float:
                sizes = layout.split_sizes(shape, mesh, dim)
                # By how much more reading parts weighs at most, the smaller one is beside the largest.
                uneven = 1.0 + 0.01 * (1.0 - min(sizes) / max(sizes))
                return self.weights.read(dim, len(shape)) * uneven * once

            self.matrices[key] = np.array(
                [[_move(row, column, nbytes, together, parts) for column in columns] for row in rows]
            )
        self.edges.append((source, target))
        self.edge_costs.append(self.matrices[key])


def _whole(ndim: int) -> _Labels:
    return (_Label("before", NodeLayouts((), (Layout.replicated(ndim),))),)


def _returned(ndim: int) -> _Labels:
    return (_Label("after", NodeLayouts((Layout.replicated(ndim),), ())),)


def _op_labels(node: fx.Node, rule: OpRule, mesh: MeshSpec, cuts: Cuts, calls: FakeCalls | None) -> _Labels:
    operands = [node_value(n).shape for n in tensor_operands(node)]
    found: list[_Label] = []
    for strategy in enumerate_strategies(rule, operands, result_shapes(node), mesh, cuts=cuts):
        if all(not layout.axes for layout in strategy.tensors) and not strategy.splits:
            found += [_Label("before", strategy), _Label("after", strategy)]
        elif _in_pieces(strategy, node, rule, mesh, calls):
            found.append(_Label("piece", strategy))
    return tuple(found)


def _in_pieces(
    strategy: NodeLayouts, node: fx.Node, rule: OpRule, mesh: MeshSpec, calls: FakeCalls | None
) -> bool:
    """All run the same ops, and none reads what is another's."""
    if any(layout.has_halo or (TIME, ROUTED) in layout.partial for layout in strategy.tensors):
        return False
    if _cuts_to_nothing(strategy, node, mesh):
        return False
    if any(
        hi <= lo
        for split in strategy.splits
        for lo, hi in split.parts(rule.splitting([split.factor]).sizes[split.factor], mesh)
    ):
        return False
    return calls is None or run_alike(node, rule, strategy, mesh, calls)


def _cuts_to_nothing(strategy: NodeLayouts, node: fx.Node, mesh: MeshSpec) -> bool:
    """Whether a piece has nothing of a tensor, as of one operand of a `cat` that is cut between them: it would not run
    what makes that."""
    return any(0 in layout.split_sizes(shape, mesh, dim) for shape, layout, dim in _cut(node, strategy))


def _move(
    source: _Side, target: _Side, nbytes: int, together: float, parts: Callable[[Layout, int], float]
) -> float:
    """Bytes that a read costs; inf where a piece would need another. parts: that of parts of a dim."""
    (made, held), (read, wanted) = source, target
    if read == "piece":
        if made == "piece":
            return 0.0 if held == wanted else np.inf
        if made == "after" or wanted.partial:
            return np.inf
        cut = next((d for d, axes in enumerate(wanted.dims) if axes), None)
        return 0.0 if cut is None else parts(wanted, cut)
    if made == "piece":
        if read == "before" or not held.axes:
            return np.inf
        return 1e-3 * nbytes if held.partial else together
    return np.inf if (made, read) == ("after", "before") else 0.0
