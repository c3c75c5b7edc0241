"""Rows sorted by expert once, where products with experts follow each other."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import fx
from torch.fx.node import map_arg

from passes.compile.join_linears import OpWriter, drop_unread
from passes.ir.graph_pass import RankPass, duplicate_module, int_at, run_rank_passes, shape_of, tensor_at
from passes.ir.graph_properties import COLLECTIVES
from passes.ops.routed_ops import ROUTED
from passes.rules.core.row_wise import rows_through

aten, ours = torch.ops.aten, torch.ops.autoshard


def with_sorted_rows(module: fx.GraphModule) -> fx.GraphModule:
    """`module`, or where it has products with experts a copy after `SortRows`."""
    if not any(node.target in ROUTED for node in module.graph.nodes):
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
    """

    keeps = (COLLECTIVES,)

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        routed: dict[fx.Node, list[fx.Node]] = {}
        for node in module.graph.nodes:
            if node.target in ROUTED:
                routed.setdefault(tensor_at(node, 2), []).append(node)
        for ids, products in routed.items():
            _Sorting(module.graph, ids, products).run()
        drop_unread(module.graph)
        return module


@dataclass
class _Sorting:
    """The products with one tensor of ids.

    made:   results of products, and of ops on these row by row -> whether they are wanted sorted.
    sorted: values -> the same, sorted.
    """

    graph: fx.Graph
    ids: fx.Node
    products: list[fx.Node]
    sorted: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._emit = OpWriter(self.graph)
        self._shape = shape_of(self.ids)
        self._rows = tuple(range(len(self._shape)))
        self._length = math.prod(self._shape)

    def run(self) -> None:
        wanted = self._wanted(self._made())
        first = self.products[0]
        with self.graph.inserting_before(first):
            self._order_rows(first)
        for node in list(self.graph.nodes):
            if node in self.products or node in wanted:
                with self.graph.inserting_before(node):
                    self._sort(node)
        for node in [n for n in self.graph.nodes if n in wanted or n in self.products]:
            self._put_back(node)

    def _made(self) -> set[fx.Node]:
        """What products make, and ops make of it row by row."""
        made: dict[fx.Node, None] = {}
        for node in self.graph.nodes:
            if node in self.products:
                if node.target is ours.routed_mm.default:
                    made[node] = None
            elif any(operand in made for operand in node.all_input_nodes) and self._by_rows(node):
                made[node] = None
        return set(made)

    def _by_rows(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        if node.target is operator.getitem:
            return True
        rows = {n: self._rows for n in node.all_input_nodes if self._has_rows(n)}
        found = rows_through(node, rows) if rows else None
        return found is not None and all(dims == self._rows for dims in found)

    def _has_rows(self, node: fx.Node) -> bool:
        value = node.meta["val"]
        return isinstance(value, torch.Tensor) and tuple(value.shape[: len(self._shape)]) == self._shape

    def _wanted(self, made: set[fx.Node]) -> set[fx.Node]:
        """Of those, what products read, by way of other such ops."""
        wanted: set[fx.Node] = set()
        left = [operand for product in self.products for operand in self._sorted_operands(product)]
        while left:
            node = left.pop()
            if node in made and node not in wanted and node not in self.products:
                wanted.add(node)
                left += node.all_input_nodes
        return wanted

    def _sorted_operands(self, product: fx.Node) -> list[fx.Node]:
        return [tensor_at(product, i) for i in range(ROUTED[product.target])]

    def _order_rows(self, first: fx.Node) -> None:
        """Emits the order, its inverse, and the ends of the groups."""
        emit, count = self._emit, int_at(first, 3) + int_at(first, 4)
        flat = emit(self.ids, aten.view.default, self.ids, [self._length])
        pair = emit(flat, aten.sort.stable, flat, stable=True)
        found, self._order = (emit(flat, operator.getitem, pair, i) for i in range(2))
        ids = self.ids.meta["val"]
        counted = partial(emit, flat, aten.arange.start_step, 0, device=ids.device, pin_memory=False)
        groups = counted(count, 1, dtype=ids.dtype)
        self._ends = emit(flat, aten.searchsorted.Tensor, found, groups, right=True)
        places = counted(self._length, 1, dtype=torch.int64)
        self._back = emit(flat, aten.index_put.default, places, [self._order], places)

    def _sort(self, node: fx.Node) -> None:
        if node in self.products:
            self._product(node)
        elif node.target is operator.getitem:
            self.sorted[node] = self._emit(node, operator.getitem, self.sorted[tensor_at(node)], node.args[1])
        else:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), self._in_order)
            self.sorted[node] = self._emit(node, node.target, *args, **kwargs)  # type: ignore[arg-type]

    def _product(self, node: fx.Node) -> None:
        emit, groups = self._emit, (self._ends, *node.args[3:])
        rows = [self._in_order(operand) for operand in self._sorted_operands(node)]
        flat = [emit(row, aten.reshape.default, row, [self._length, shape_of(row)[-1]]) for row in rows]
        if node.target is ours.routed_mm.default:
            y = emit(node, ours.grouped_mm.default, flat[0], tensor_at(node, 1), *groups)
            self.sorted[node] = emit(node, aten.view.default, y, list(shape_of(node)))
        else:
            turned = emit(node, aten.permute.default, flat[0], [1, 0])
            node.replace_all_uses_with(emit(node, ours.grouped_mm.default, turned, flat[1], *groups))

    def _in_order(self, node: fx.Node) -> fx.Node:
        """`node` sorted, if it has rows."""
        if node not in self.sorted:
            if not self._has_rows(node):
                return node
            self.sorted[node] = self._taken(node, node, self._order)
        return self.sorted[node]

    def _taken(self, like: fx.Node, value: fx.Node, places: fx.Node) -> fx.Node:
        """Rows of `value` at `places`, in its shape. Of rows that are one row of a token several times, that one."""
        emit, shape = self._emit, list(shape_of(value))
        source = value
        if value.target is aten.expand.default and places is self._order:
            token = shape_of(tensor_at(value))
            last = len(self._shape) - 1
            if shape[last] > 1 and token == (*shape[:last], 1, *shape[last + 1 :]):
                source = tensor_at(value)
                places = emit(like, aten.floor_divide.default, places, shape[last])
        count = math.prod(shape_of(source)[: len(self._shape)])
        rows = emit(like, aten.reshape.default, source, [count, *shape[len(self._shape) :]])
        return emit(like, aten.view.default, emit(like, aten.index.Tensor, rows, [places]), shape)

    def _put_back(self, node: fx.Node) -> None:
        """Readers that are not sorted read the rows in their order."""
        if node not in self.sorted:
            return
        readers = [user for user in node.users if user not in self.sorted]
        if readers and isinstance(node.meta["val"], torch.Tensor):
            with self.graph.inserting_before(node):
                unsorted = self._taken(node, self.sorted[node], self._back)
            for reader in readers:
                reader.replace_input_with(node, unsorted)
