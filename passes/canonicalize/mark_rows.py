"""Which ops work on rows of experts, so that a rank may have those of its own experts alone."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from passes.ir.graph_pass import GraphPass
from passes.ir.joint import JointGraph, tensor_operands
from passes.ir.op_traits import is_use
from passes.ir.rewrite import int_at, shape_of, tensor_at
from passes.ops.routed_ops import ROUTED
from passes.rules.core.routed import RoutedRows
from passes.rules.core.row_wise import is_by_rows


@dataclass(frozen=True)
class MarkRows(GraphPass):
    """Mark what works row by row on what products with experts make, and leads to products with the same of them.

        %y: f32[32, 2, 16] = routed_mm(%x, %up, %ids, 0, 6)         // rows: its result
        %h: f32[32, 2, 16] = relu(%y)                               // rows: its operand and its result
        %z: f32[32, 2, 8]  = routed_mm(%h, %down, %ids, 0, 6)       // rows: its operand

    With experts split, rows of %y and %h count on the rank of their expert, and %z is a sum (`Layout.partial`).
    """

    def __call__(self, joint: JointGraph) -> JointGraph:
        for region in regions(joint.graph):
            region.mark()
        return joint


@dataclass(frozen=True)
class Region:
    """ids: the expert of every row. rows: values between products with them, of which a row may count on the rank of
    its expert alone."""

    ids: fx.Node
    products: tuple[fx.Node, ...]
    rows: frozenset[fx.Node]

    @property
    def experts(self) -> int:
        return int_at(self.products[0], 4)

    def mark(self) -> None:
        for node in {*self.products, *self.rows}:
            if node.target is not operator.getitem:
                node.meta["rows"] = RoutedRows(
                    self.experts,
                    frozenset(i for i, operand in enumerate(_rows_read(node)) if operand in self.rows),
                    node in self.rows,
                )


def regions(graph: fx.Graph) -> list[Region]:
    """One for each tensor of ids. No value is in two: whose rows count where is said once."""
    products: dict[Hashable, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in ROUTED:
            products.setdefault((_behind_uses(tensor_at(node, 2)), *node.args[3:]), []).append(node)
    found: list[Region] = []
    for members in products.values():
        taken = frozenset(node for region in found for node in region.rows)
        rows = frozenset(_between(graph, members, taken))
        found.append(Region(_behind_uses(tensor_at(members[0], 2)), tuple(members), rows))
    return found


def _behind_uses(node: fx.Node) -> fx.Node:
    while is_use(node):
        node = tensor_at(node)
    return node


def _rows_read(node: fx.Node) -> list[fx.Node]:
    return tensor_operands(node)[: ROUTED.get(node.target)]


def _between(graph: fx.Graph, products: list[fx.Node], taken: frozenset[fx.Node]) -> Iterator[fx.Node]:
    """Values made row by row of what products make, that lead to products so; and what else leads there alone."""
    shape = shape_of(tensor_at(products[0], 2))
    made: set[fx.Node] = set()
    for node in graph.nodes:
        if node in products:
            if node.target is torch.ops.autoshard.routed_mm.default:
                made.add(node)
        elif node not in taken and any(operand in made for operand in node.all_input_nodes):
            if node.target is operator.getitem or is_by_rows(node, shape):
                made.add(node)
    read: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        reads = [user in read or (user in products and node in _rows_read(user)) for user in node.users]
        alone = all(reads) and node not in taken and node not in products
        if any(reads) and (node in made or (alone and is_by_rows(node, shape))):
            read.add(node)
            yield node
