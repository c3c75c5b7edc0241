"""Rows of a rank's own experts: sorted by expert once, where products follow each other, sent there by the ranks of
their tokens, and returned."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from passes.canonicalize.mark_rows import regions
from passes.compile.join_linears import drop_unread
from passes.ir.graph_pass import (
    RankPass,
    duplicate_module,
    int_at,
    ints_at,
    run_rank_passes,
    shape_of,
    tensor_at,
)
from passes.ir.graph_properties import UNMARKED
from passes.ir.joint import node_values
from passes.ir.routing import BALANCED, Choice, Routing
from passes.layout.layout import nested_sizes
from passes.lower.row_order import Sorting
from passes.ops.collective_ops import add_rows, exchange_rows, own_spans, returned, routes, sent
from passes.ops.routed_ops import READ_ROWS, ROUTED
from passes.schedule.schedule import behind_ids

aten, ours = torch.ops.aten, torch.ops.autoshard


class _Routes(NamedTuple):
    """choice: of tokens' experts. Tokens that are sent, and where those for each rank end; of own rows their tokens'
    places among those that arrive; as many numbers as arrive, and where those of each rank end."""

    choice: Choice
    sent: fx.Node
    leaving: fx.Node
    places: fx.Node
    arriving: fx.Node
    coming: fx.Node


Counted = tuple[int, int]
"""A dim of as many elements as come, and a number that all of as many have."""


def _counted(node: fx.Node) -> Counted | None:
    """Of what an op makes, from its operands."""
    if node.target in (routes, aten.index_put.default):
        return None
    if node.target is aten.index.Tensor:
        indices = [*enumerate(node.args[1])]  # type: ignore[arg-type]
        counted = [
            (i, n.meta["counted"]) for i, n in indices if isinstance(n, fx.Node) and "counted" in n.meta
        ]
        if counted:
            (place, (dim, number)), *_ = counted
            return place + dim, number
    if node.target in (exchange_rows, add_rows):
        return tensor_at(node, 1 if node.target is exchange_rows else 2).meta.get("counted")
    read = [n.meta["counted"] for n in node.all_input_nodes if "counted" in n.meta]
    if not read or (node.target is ours.grouped_mm.default and node.meta["val"].ndim == 3):
        return None
    (dim, number), *_ = read
    if node.target is aten.permute.default:
        return ints_at(node, 1).index(dim), number
    if node.target is aten.select.int:
        return dim - (int_at(node, 1) < dim), number
    return dim + (node.target is aten.unsqueeze.default and int_at(node, 1) <= dim), number


@dataclass
class OwnRows(Sorting):
    """The same where a rank has some of the experts: of the rows of these. How many come is known at run time, so no
    op is told sizes."""

    numbers: Iterator[int]
    routes: dict[tuple[int, ...], _Routes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        write = self._emit

        def counted(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            node = write(like, target, *args, **kwargs)
            found = _counted(node)
            if found is not None:
                node.meta["counted"] = found
            return node

        self._emit = counted

    def readers(self) -> list[fx.Node]:
        return list(self.region.readers)

    def wanted(self) -> set[fx.Node]:
        told = lambda node: any(list(v.shape) in node.args for v in node_values(node) if v is not None)
        later = {*self._later(), *self._sent()}
        return {node for node in self.region.rows & later if not told(node)} - set(self.region.readers)

    def _sent(self) -> Iterator[fx.Node]:
        """What is made row by row of rows that are sent, also before the ids are known: it is done behind."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            made = node in self.region.rows and not found.isdisjoint(node.all_input_nodes)
            if made or node.target is sent:
                found.add(node)
                yield node

    def _in_order(self, node: fx.Node) -> fx.Node:
        if node not in self.sorted and node in self._wanted:
            self._sort(node)
        return super()._in_order(node)

    def _taken(self, value: fx.Node, places: fx.Node) -> fx.Node:
        n, alike = len(self._shape), value.target is sent and int_at(value, 7) > 1
        if value.target is not sent or max(ints_at(value, 2)) >= n - alike:
            return super()._taken(value, places)
        part, count = tensor_at(value, 1), self._shape[-1] if alike else 1
        routes, emit = self._routes(value, count), self._emit
        tokens = emit(value, aten.select.int, part, n - 1, 0) if count > 1 else part
        dims = shape_of(part)[n:]
        flat = emit(value, aten.reshape.default, tokens, [math.prod(shape_of(part)[:n]) // count, *dims])
        rows = emit(value, aten.index.Tensor, flat, [routes.sent])
        arrived = self._exchanged(value, routes, rows, routes.arriving, routes.leaving, routes.coming)
        return emit(value, aten.index.Tensor, arrived, [routes.places])

    def _returned(self, mark: fx.Node, node: fx.Node, rows: fx.Node) -> None:
        """Rows go back to their tokens, those of one added up here and there. node: `own_rows` or `sum_rows`."""
        summed = node.target is ours.sum_rows.default
        routes, emit = self._routes(mark, self._shape[-1] if summed else 1), self._emit
        leaving = emit(mark, add_rows, rows, routes.places, routes.arriving)
        found = self._exchanged(mark, routes, leaving, routes.sent, routes.coming, routes.leaving)
        tokens = self._zeros(routes.leaving, [math.prod(shape_of(mark)[: len(self._shape) - summed])])
        found = emit(mark, add_rows, found, routes.sent, tokens)
        mark.replace_all_uses_with(emit(mark, aten.view.default, found, list(shape_of(mark))))

    def _exchanged(self, mark: fx.Node, routes: _Routes, *operands: fx.Node) -> fx.Node:
        started = self._emit(mark, exchange_rows, *operands, mark.args[-1])
        waited = self._emit(mark, torch.ops._c10d_functional.wait_tensor.default, started)
        for made in (started, waited):
            made.meta = {**mark.meta, **made.meta}
        started.meta["choice"] = routes.choice
        return waited

    def _routes(self, mark: fx.Node, count: int) -> _Routes:
        args: tuple[Any, ...] = mark.args
        dims, sizes, parts, index, ways = args[2:7]
        key = (count, *dims, *parts, *sizes)
        if key not in self.routes:
            experts, ranks = list(nested_sizes(self.experts, tuple(ways))), math.prod(parts)
            read = self._ids, self._order, dims, sizes, parts, index, experts, count
            choice = self._routing.choice(count, self.experts)
            wanted = choice.ranks(ranks)
            tokens = self._length // count
            lengths = {dim: length for dim, (_, length) in own_spans(dims, sizes, parts, index).items()}
            own = math.prod(lengths.get(d, n) for d, n in enumerate(self._shape)) // count
            with self.graph.inserting_before(self._behind):  # of all that is sent and returned so
                made = self._emit(mark, routes, *read)
                leave, leaving, places, coming = (
                    self._emit(mark, operator.getitem, made, i) for i in range(4)
                )
                places.meta["counted"] = self._order.meta["counted"]
                listed = lambda order, ends, length: self._listed(mark, order, ends, 0, math.ceil(length))
                sent = listed(leave, leaving, own * wanted)
                arriving = listed(places, coming, min(shape_of(places)[0], tokens * wanted / ranks))
                self.routes[key] = _Routes(choice, sent, leaving, places, arriving, coming)
        return self.routes[key]

    def _listed(self, like: fx.Node, order: fx.Node, ends: fx.Node, first: int, length: int) -> fx.Node:
        """Those of `order` from group `first` on; length: that is reckoned with."""
        node = self._emit(like, ours.own_places.default, order, ends, first, length)
        node.meta["counted"] = 0, next(self.numbers)
        return node

    @property
    def _routing(self) -> Routing:
        return self._products[0].meta.get("routing", BALANCED)

    def _invert(self, like: fx.Node) -> None:
        """Rows of own experts are a part of the order; groups begin with it."""
        first, count = (int_at(self._products[0], i) for i in (-2, -1))
        emit = self._emit
        length = self._routing.reckoned(self._length, self.experts, count)
        self._order = self._listed(like, self._order, self._ends, first, length)
        if first:
            begin = emit(like, aten.select.int, self._ends, 0, first - 1)
            self._ends = emit(like, aten.sub.Tensor, self._ends, begin)

    def _flat(self, x: fx.Node) -> fx.Node:
        for _ in self._shape[1:]:
            x = self._emit(x, aten.select.int, x, 0, 0)
        return x

    def _apart(self, x: fx.Node) -> fx.Node:
        for _ in self._shape[1:]:
            x = self._emit(x, aten.unsqueeze.default, x, 0)
        return x

    def _product(self, node: fx.Node) -> None:
        if node.target in ROUTED:
            super()._product(node)
        else:
            rows = self._flat(self._in_order(tensor_at(node)))
            for mark in [user for user in node.users if user.target is returned and user.args[1] is node]:
                if max(ints_at(mark, 2)) < len(self._shape) - (node.target is ours.sum_rows.default):
                    with self.graph.inserting_before(mark):
                        self._returned(mark, node, rows)
            end = self._unsorted if node.target is ours.own_rows.default else self._summed
            node.replace_all_uses_with(end(node, rows))

    def _summed(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        token = self._emit(node, aten.floor_divide.default, self._order, self._shape[-1])
        tokens = self._zeros(token, [self._length // self._shape[-1]])
        total = self._emit(node, add_rows, rows, token, tokens)
        return self._emit(node, aten.view.default, total, list(shape_of(node)))

    def _unsorted(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        zeros = self._zeros(rows, [self._length, *shape_of(rows)[1:]])
        found = self._emit(node, aten.index_put.default, zeros, [self._order], rows)
        return self._emit(node, aten.view.default, found, list(shape_of(node)))

    def _zeros(self, like: fx.Node, shape: list[int]) -> fx.Node:
        value = like.meta["val"]
        kind = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        return self._emit(like, aten.full.default, shape, 0, **kind)


def with_sorted_rows(module: fx.GraphModule) -> fx.GraphModule:
    """`module`, or where it has products with experts a copy after `SortRows`."""
    if not any(node.target in READ_ROWS for node in module.graph.nodes):
        return module
    return run_rank_passes(duplicate_module(module), (SortRows(),))


@dataclass(frozen=True)
class SortRows(RankPass):
    """Sort rows before the first product with their experts, and put them back after the last.

        %y: f32[64, 16] = routed_mm(%x, %up, %ids, 0, 6)
        %h: f32[64, 16] = relu(%y)
        %z: f32[64, 8]  = routed_mm(%h, %down, %ids, 0, 6)
        ->
        %order, %ends   = ...                                    // of %ids; once for all products with them
        %s: f32[64, 8]  = aten.index(%x, [%order])
        %y: f32[64, 16] = grouped_mm(%s, %up, %ends, 0, 6)
        %h: f32[64, 16] = relu(%y)
        %t: f32[64, 8]  = grouped_mm(%h, %down, %ends, 0, 6)
        %z: f32[64, 8]  = aten.index(%t, [%back])

    For a rank's joint graph. Ops between two products are done in the sorted order if they work on every row by itself.

    A rank with some of the experts has rows of these alone: %order is `own_places`, as many as there come, and values
    count as large as where experts have equally many. Put back, rows of others are 0. Tokens that were gathered for
    such rows are sent there instead, and sums that were scattered come back (`passes.ops.collective_ops`).
    """

    keeps = (UNMARKED,)

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = module.graph
        moves = {node: _moves_of(node) for node in graph.nodes if node.target in (sent, returned)}
        numbers = itertools.count()
        for region in regions(graph):
            experts = region.readers[0].meta.get("experts", 0)
            own = region.experts < experts
            (OwnRows(graph, region, experts, numbers) if own else Sorting(graph, region, experts)).run()
        drop_unread(graph)
        _drop_marks(graph, moves)
        behind_ids(graph)
        return module


def _moves_of(mark: fx.Node) -> list[fx.Node]:
    """What makes the first operand of the second, readers first."""
    moved, source = mark.args[:2]
    found, left = dict[fx.Node, None](), [moved]
    while left:
        node = left.pop()
        if node is not source and node not in found:
            found[node] = None  # type: ignore[index]
            left += node.all_input_nodes  # type: ignore[union-attr]
    return sorted(found, reverse=True)


def _drop_marks(graph: fx.Graph, moves: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """And what moved for them alone. Where a value is read as it was marked, it moves so."""
    alive = set(graph.nodes)
    for mark, nodes in moves.items():
        if mark in alive:
            mark.replace_all_uses_with(mark.args[0])  # type: ignore[arg-type]
            graph.erase_node(mark)
        for node in nodes:
            if node in alive and not node.users:
                graph.erase_node(node)
                alive.discard(node)
