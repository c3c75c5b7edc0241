"""Rows of a region in the order of their experts."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx
from torch.fx.node import map_arg

from passes.canonicalize.mark_rows import Region, is_copied, leading
from passes.compile.join_linears import OpWriter
from passes.ir.graph_pass import int_at, shape_of, tensor_at
from passes.ir.joint import tensor_operands
from passes.ops.routed_ops import READ_ROWS, ROUTED
from passes.rules.core.rule_registry import has_rows

aten, ours = torch.ops.aten, torch.ops.autoshard


@dataclass
class Sorting:
    """The products with one tensor of ids, and all rows.

    experts: how many there are; 0 if that is not known.
    sorted:  values -> the same, sorted.
    """

    graph: fx.Graph
    region: Region
    experts: int

    def __post_init__(self) -> None:
        self.sorted: dict[fx.Node, fx.Node] = {}
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
        return set(leading(self._products, region.others, region.made) & region.made) - set(self._products)

    def run(self) -> None:
        nodes = list(self._later())
        self._behind = nodes[0]
        with self.graph.inserting_before(self._behind):
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
            self.sorted[node] = self._emit(
                node, operator.getitem, self._in_order(tensor_at(node)), node.args[1]
            )
        else:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), self._in_order)
            self.sorted[node] = self._emit(node, node.target, *args, **kwargs)  # type: ignore[arg-type]

    def _product(self, node: fx.Node) -> None:
        emit, groups = self._emit, (self._ends, *node.args[-2:])
        rows = [self._in_order(operand) for operand in tensor_operands(node)[: READ_ROWS[node.target]]]
        flat = [self._flat(row) for row in rows]
        if node.target is ours.routed_mm.default:
            b = tensor_at(node, 1)
            b = emit(node, aten.permute.default, b, [0, 2, 1]) if node.kwargs.get("turned") else b
            y = emit(node, ours.grouped_mm.default, flat[0], b, *groups)
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
            self.sorted[node] = self._apart(self._taken(node, self._order))
        return self.sorted[node]

    def _taken(self, value: fx.Node, places: fx.Node) -> fx.Node:
        """Its rows at `places`. Of rows that are one row of a token several times, that one."""
        emit, source, n = self._emit, value, len(self._shape)
        if is_copied(value, self._shape):
            source = tensor_at(value)
            places = emit(value, aten.floor_divide.default, places, self._shape[-1])
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
            with self.graph.inserting_before(self.sorted[node].next):
                unsorted = self._unsorted(node, self._flat(self.sorted[node]))
            for reader in readers:
                reader.replace_input_with(node, unsorted)

    def _unsorted(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        found = self._emit(node, aten.index.Tensor, rows, [self._back])
        return self._emit(node, aten.view.default, found, list(shape_of(node)))
