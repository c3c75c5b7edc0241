"""Rows sorted by expert once, where products with experts follow each other."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from passes.canonicalize.mark_rows import Region, leading, regions
from passes.compile.join_linears import OpWriter, drop_unread
from passes.ir.graph_pass import (
    RankPass,
    duplicate_module,
    int_at,
    ints_at,
    run_rank_passes,
    shape_of,
    tensor_at,
)
from passes.ir.graph_properties import COLLECTIVES
from passes.ir.joint import node_values, tensor_operands
from passes.ir.routing import BALANCED
from passes.ops.routed_ops import READ_ROWS, ROUTED
from passes.rules.core.row_wise import has_rows

aten, ours = torch.ops.aten, torch.ops.autoshard


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
    count as large as where experts have equally many. Put back, rows of others are 0.
    """

    keeps = (COLLECTIVES,)

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        for number, region in enumerate(regions(module.graph)):
            experts = region.readers[0].meta.get("experts", 0)
            kind = _OwnRows if region.experts < experts else _Sorting
            kind(module.graph, region, experts, number).run()
        drop_unread(module.graph)
        return module


@dataclass
class _Sorting:
    """The products with one tensor of ids, and all rows.

    experts: how many there are; 0 if that is not known. number: of the region.
    sorted:  values -> the same, sorted.
    """

    graph: fx.Graph
    region: Region
    experts: int
    number: int
    sorted: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._emit = OpWriter(self.graph)
        self._ids = tensor_at(self.region.readers[0], -3)
        self._shape = shape_of(self._ids)
        self._length = math.prod(self._shape)
        self._products = self.readers()
        self._wanted = self.wanted()

    def readers(self) -> list[fx.Node]:
        return [node for node in self.region.readers if node.target in ROUTED]

    def wanted(self) -> set[fx.Node]:
        """What is made of products row by row and leads to products so."""
        region = self.region
        return set(leading(self.graph, self._products, region.others, region.made) & region.made) - set(
            self._products
        )

    def run(self) -> None:
        nodes = list(self._later())
        with self.graph.inserting_before(nodes[0]):
            self._order_rows(self._products[0])
        for node in nodes:
            if node in self._products or node in self._wanted:
                with self.graph.inserting_before(node):
                    self._sort(node)
        for node in [n for n in self.graph.nodes if n in self._wanted or n in self._products]:
            self._put_back(node)

    def _later(self) -> Iterator[fx.Node]:
        """What stands behind the ids."""
        node = self._ids.next
        while node.op == "placeholder":
            node = node.next
        while node.op != "root":
            yield node
            node = node.next

    def _order_rows(self, first: fx.Node) -> None:
        """Emits the order, its inverse, and the ends of the groups."""
        emit = self._emit
        flat = emit(self._ids, aten.view.default, self._ids, [self._length])
        pair = emit(flat, aten.sort.stable, flat, stable=True)
        found, self._order = (emit(flat, operator.getitem, pair, i) for i in range(2))
        ids = self._ids.meta["val"]
        counted = partial(emit, flat, aten.arange.start_step, 0, device=ids.device, pin_memory=False)
        groups = counted(int_at(first, -2) + int_at(first, -1), 1, dtype=ids.dtype)
        self._ends = emit(flat, aten.searchsorted.Tensor, found, groups, right=True)
        self._places = counted(self._length, 1, dtype=torch.int64)
        self._invert(flat)

    def _invert(self, like: fx.Node) -> None:
        self._back = self._emit(like, aten.index_put.default, self._places, [self._order], self._places)

    def _sort(self, node: fx.Node) -> None:
        if node in self._products:
            self._product(node)
        elif node.target is operator.getitem:
            self.sorted[node] = self._emit(node, operator.getitem, self.sorted[tensor_at(node)], node.args[1])
        else:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), self._in_order)
            self.sorted[node] = self._emit(node, node.target, *args, **kwargs)  # type: ignore[arg-type]

    def _product(self, node: fx.Node) -> None:
        emit, groups = self._emit, (self._ends, *node.args[-2:])
        rows = [self._in_order(operand) for operand in tensor_operands(node)[: READ_ROWS[node.target]]]
        flat = [self._flat(row) for row in rows]
        if node.target is ours.routed_mm.default:
            y = emit(node, ours.grouped_mm.default, flat[0], tensor_at(node, 1), *groups)
            self.sorted[node] = self._apart(y)
        elif node.target is ours.routed_outer.default:
            turned = emit(node, aten.permute.default, flat[0], [1, 0])
            node.replace_all_uses_with(emit(node, ours.grouped_mm.default, turned, flat[1], *groups))

    def _flat(self, x: fx.Node) -> fx.Node:
        """Rows counted by one dim."""
        return self._emit(x, aten.reshape.default, x, [self._length, *shape_of(x)[len(self._shape) :]])

    def _apart(self, x: fx.Node) -> fx.Node:
        """Rows of one dim in as many as the ids have."""
        return self._emit(x, aten.view.default, x, [*self._shape, *shape_of(x)[1:]])

    def _in_order(self, node: fx.Node) -> fx.Node:
        """`node` sorted, if it has rows."""
        if node not in self.sorted:
            if not has_rows(node, self._shape):
                return node
            self.sorted[node] = self._apart(self._taken(node))
        return self.sorted[node]

    def _taken(self, value: fx.Node) -> fx.Node:
        """Its rows in order. Of rows that are one row of a token several times, that one."""
        emit, source, places = self._emit, value, self._order
        if value.target is aten.expand.default:
            token, last, shape = shape_of(tensor_at(value)), len(self._shape) - 1, shape_of(value)
            if shape[last] > 1 and token == (*shape[:last], 1, *shape[last + 1 :]):
                source = tensor_at(value)
                places = emit(value, aten.floor_divide.default, places, shape[last])
        n = len(self._shape)
        rows = emit(
            value, aten.reshape.default, source, [math.prod(shape_of(source)[:n]), *shape_of(source)[n:]]
        )
        return emit(value, aten.index.Tensor, rows, [places])

    def _put_back(self, node: fx.Node) -> None:
        """Readers that are not sorted read the rows in their order."""
        if node not in self.sorted:
            return
        readers = [user for user in node.users if user not in self.sorted]
        if readers and isinstance(node.meta["val"], torch.Tensor):
            with self.graph.inserting_before(node):
                unsorted = self._unsorted(node, self._flat(self.sorted[node]))
            for reader in readers:
                reader.replace_input_with(node, unsorted)

    def _unsorted(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        found = self._emit(node, aten.index.Tensor, rows, [self._back])
        return self._emit(node, aten.view.default, found, list(shape_of(node)))


def _counted_dim(node: fx.Node) -> int | None:
    """The dim that counts rows of own experts."""
    if node.target is ours.own_places.default:
        return 0
    read = [n.meta["counted"][0] for n in node.all_input_nodes if "counted" in n.meta]
    whole = node.target in (aten.index_put.default, aten.index_add.default)
    if not read or whole or (node.target is ours.grouped_mm.default and node.meta["val"].ndim == 3):
        return None
    (dim, *_) = read
    if node.target is aten.permute.default:
        return ints_at(node, 1).index(dim)
    if node.target is aten.select.int:
        return dim - (int_at(node, 1) < dim)
    return dim + (node.target is aten.unsqueeze.default and int_at(node, 1) <= dim)


class _OwnRows(_Sorting):
    """The same where a rank has some of the experts: of the rows of these. How many come is known at run time, so no
    op is told sizes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        write = self._emit

        def counted(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            node = write(like, target, *args, **kwargs)
            dim = _counted_dim(node)
            if dim is not None:
                node.meta["counted"] = dim, self.number
            return node

        self._emit = counted

    def readers(self) -> list[fx.Node]:
        return list(self.region.readers)

    def wanted(self) -> set[fx.Node]:
        told = lambda node: any(list(v.shape) in node.args for v in node_values(node) if v is not None)
        later = set(self._later())
        return {node for node in self.region.rows & later if not told(node)} - set(self.region.readers)

    def _invert(self, like: fx.Node) -> None:
        """Rows of own experts are a part of the order; groups begin with it."""
        first, count = (int_at(self._products[0], i) for i in (-2, -1))
        emit = self._emit
        routing = self._products[0].meta.get("routing", BALANCED)
        length = routing.reckoned(self._length, self.experts, count)
        self._order = emit(like, ours.own_places.default, self._order, self._ends, first, length)
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
            end = self._unsorted if node.target is ours.own_rows.default else self._summed
            node.replace_all_uses_with(end(node, rows))

    def _summed(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        """In float32 at least, as a sum is."""
        dtype = rows.meta["val"].dtype
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        rows = rows if wide is dtype else self._emit(node, aten._to_copy.default, rows, dtype=wide)
        token = self._emit(node, aten.floor_divide.default, self._order, self._shape[-1])
        shape = [self._length // self._shape[-1], *shape_of(rows)[1:]]
        total = self._emit(node, aten.index_add.default, self._zeros(rows, shape), 0, token, rows)
        total = total if wide is dtype else self._emit(node, aten._to_copy.default, total, dtype=dtype)
        return self._emit(node, aten.view.default, total, list(shape_of(node)))

    def _unsorted(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        zeros = self._zeros(rows, [self._length, *shape_of(rows)[1:]])
        found = self._emit(node, aten.index_put.default, zeros, [self._order], rows)
        return self._emit(node, aten.view.default, found, list(shape_of(node)))

    def _zeros(self, like: fx.Node, shape: list[int]) -> fx.Node:
        value = like.meta["val"]
        kind = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        return self._emit(like, aten.full.default, shape, 0, **kind)
