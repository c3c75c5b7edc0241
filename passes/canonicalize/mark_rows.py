"""What works on rows of experts, so that a rank may have those of its own experts alone: where that ends, and marks."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from passes.canonicalize.insert_uses import InsertUses
from passes.ir.graph_pass import GraphPass, Sweep, copy_joint, emit, emit_at, replace, shape_of, tensor_at
from passes.ir.joint import JointGraph, tensor_operands
from passes.ir.op_traits import is_collective, is_pointwise, is_use, is_view, storage_root
from passes.ir.routing import Routing, check_experts, copies_of, sum_of
from passes.layout.layout import ROUTED
from passes.ops.collective_ops import returned, sent
from passes.ops.routed_ops import READ_ROWS
from passes.rules.core.rule_registry import RoutedRows, has_rows, is_by_rows

aten, ours = torch.ops.aten, torch.ops.autoshard


@dataclass(frozen=True)
class EndRows(GraphPass):
    """Say where rows of experts become rows of all: a rank that has those of its own experts has zeros for others, or
    adds up those of each token.

        %z: f32[32, 2, 8] = routed_mm(%h, %down, %ids, 0, 6)
        %w: f32[32, 2, 8] = aten.mul(%z, %weights)                   // %weights: f32[32, 2, 1]
        %y: f32[32, 8]    = aten.sum(%w, [1])
        ->
        %y: f32[32, 8]    = sum_rows(%w, %ids, 0, 6)

    What is done row by row behind products, with nothing as large beside, is done before.
    """

    def __call__(self, joint: JointGraph) -> JointGraph:
        for products in _by_ids(joint.graph).values():
            _repeat_tokens(products)
            read = leading(products, frozenset(), _made(products, frozenset()))
            rows = _behind(products, read)
            ordered = sorted(rows.union(products))  # a set has no order
            for node in reversed(ordered):
                _repeat_condition(node, products, rows)
            for node in ordered:
                if (
                    not isinstance(node.meta["val"], (tuple, list))
                    and node.target is not ours.routed_outer.default
                ):
                    _end(node, products, rows)
        return joint


@dataclass(frozen=True)
class MarkRows(GraphPass):
    """Mark what works row by row on what products with experts make, and leads to products with the same or to an end.

        %y: f32[32, 2, 16] = routed_mm(%x, %up, %ids, 0, 6)         // rows: its operand and its result
        %h: f32[32, 2, 16] = relu(%y)                               // the same
        %z: f32[32, 2, 8]  = routed_mm(%h, %down, %ids, 0, 6)       // the same
        %y: f32[32, 8]     = sum_rows(%z, %ids, 0, 6)               // its operand; its result is a sum

    With experts split, such rows count on the rank of their expert (`Layout.partial`).
    """

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in joint.graph.nodes:
            node.meta.pop("rows", None)  # of a larger graph
        for region in regions(joint.graph):
            region.mark(joint.routing)
        return joint


def _ended(target: Any, ids: tuple[int, ...], experts: int, routing: Routing) -> str:
    """How a result of the op is pending, where experts are split. ids: their shape."""
    if target is ours.own_rows.default:
        return sum_of(routing.choice(1, experts))
    return sum_of(routing.choice(ids[-1], experts)) if target is ours.sum_rows.default else "sum"


def is_copied(value: fx.Node, ids: tuple[int, ...]) -> bool:
    """Whether the rows of each token are one, several times. ids: their shape."""
    n, rows = len(ids), shape_of(value)
    if value.target is not aten.expand.default or rows[n - 1] == 1:
        return False
    return shape_of(tensor_at(value)) == (*rows[: n - 1], 1, *rows[n:])


LAST: tuple[GraphPass, ...] = (EndRows(), InsertUses(), MarkRows())
"""Of every graph that is searched: only marks look through a use."""


def with_routing(joint: JointGraph, routing: Routing) -> JointGraph:
    """The canonical graph with other loads of experts. ShardingError where its experts have none such."""
    check_experts(routing, experts_of(joint.graph))
    return MarkRows()(dataclasses.replace(copy_joint(joint), routing=routing))


@dataclass(frozen=True)
class Region:
    """ids: the expert of every row. readers: products with the matrices of these, and ends. rows: what of a row may
    count on the rank of its expert alone. made: values made of products row by row. others: values of which that may be
    said for other ids."""

    ids: fx.Node
    readers: tuple[fx.Node, ...]
    rows: frozenset[fx.Node]
    made: frozenset[fx.Node]
    others: frozenset[fx.Node]

    @property
    def experts(self) -> int:
        return int(self.readers[0].args[-1])  # type: ignore[arg-type]

    def mark(self, routing: Routing) -> None:
        shape = shape_of(self.ids)
        for node in {*self.readers, *self.rows}:
            if node.target is not operator.getitem:
                read = enumerate(tensor_operands(node)[: READ_ROWS.get(node.target)])
                routed = (
                    (i, self._pending(operand, routing))
                    for i, operand in read
                    if operand not in self.others and has_rows(operand, shape)
                )
                pending = ROUTED if node in self.rows else _ended(node.target, shape, self.experts, routing)
                pending = None if node.target is ours.routed_outer.default else pending
                node.meta["rows"] = RoutedRows(self.experts, frozenset(routed), pending, routing)

    def _pending(self, operand: fx.Node, routing: Routing) -> str:
        """How it is, where its rows count on the ranks of their experts."""
        shape, made = shape_of(self.ids), operand
        while is_use(made):
            made = tensor_at(made)
        copied = operand not in self.rows and is_copied(made, shape)
        return copies_of(routing.choice(shape[-1], self.experts)) if copied else ROUTED


def experts_of(graph: fx.Graph) -> set[int]:
    """How many there are, of all products with some."""
    return {int(node.args[-1]) for node in graph.nodes if node.target in READ_ROWS}  # type: ignore[arg-type]


def regions(graph: fx.Graph) -> list[Region]:
    """One for each tensor of ids. No value is in two: whose rows count where is said once."""
    found: list[Region] = []
    for readers in _by_ids(graph).values():
        others = frozenset(node for region in found for node in region.rows)
        made = _made(readers, others)
        rows = leading(readers, others, made)
        found.append(Region(_ids(readers[0]), tuple(readers), rows, made, others))
    return found


def _by_ids(graph: fx.Graph) -> dict[Hashable, list[fx.Node]]:
    found: dict[Hashable, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in READ_ROWS:
            found.setdefault((_as_moved(_ids(node)), *node.args[-2:]), []).append(node)
    return found


def _as_moved(node: fx.Node) -> str:
    """The same for what ranks gathered twice of one value."""
    if not (is_collective(node) or is_view(node) or node.target is aten.cat.default):
        return node.name
    return str((node.target, map_arg((node.args, node.kwargs), _as_moved)))


def _ids(node: fx.Node) -> fx.Node:
    ids = tensor_at(node, -3)
    while is_use(ids):
        ids = tensor_at(ids)
    return ids


def _reads_rows(node: fx.Node, operand: fx.Node) -> bool:
    return operand in tensor_operands(node)[: READ_ROWS[node.target]]


def _made(readers: list[fx.Node], others: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """What products make, and what is made of that row by row."""
    shape = shape_of(_ids(readers[0]))
    made = {node for node in readers if node.target is ours.routed_mm.default}
    sweep = Sweep(user for node in made for user in node.users)
    for node in sweep:
        if node not in others and node not in readers and _is_by_rows(node, shape):
            made.add(node)
            sweep.add(node.users)
    return frozenset(made)


def leading(
    readers: list[fx.Node], others: frozenset[fx.Node], made: frozenset[fx.Node]
) -> frozenset[fx.Node]:
    """What of `made` leads to `readers` row by row; and what else leads there alone."""
    shape, read = shape_of(_ids(readers[0])), set[fx.Node]()
    sweep = Sweep((node for reader in readers for node in reader.all_input_nodes), last_first=True)
    for node in sweep:
        reads = [user in read or (user in readers and _reads_rows(user, node)) for user in node.users]
        alone = all(reads) and node not in others and node not in readers
        alone = alone and (is_use(node) or not is_view(node) or storage_root(node).target is sent)
        if any(reads) and (node in made or (alone and _is_by_rows(node, shape))):
            read.add(node)
            sweep.add(node.all_input_nodes)
    of_op = lambda node: node.target is not operator.getitem or tensor_at(node) in read | made
    return frozenset(filter(of_op, read))


def _is_by_rows(node: fx.Node, shape: tuple[int, ...]) -> bool:
    if node.target in READ_ROWS or node.target in (sent, returned) or is_collective(node):
        return False
    return node.target is operator.getitem or is_by_rows(node, shape)


def _repeat_tokens(products: list[fx.Node]) -> None:
    """What an op reads of tokens beside their rows is one for each row: `x[:, :, None] * weights[..., None]`."""
    shape, made = shape_of(_ids(products[0])), _made(products, frozenset())
    repeated: dict[fx.Node, fx.Node] = {}
    if len(shape) < 2 or shape[-1] == 1:
        return
    beside = {user for node in made for user in node.users}.union(
        *(node.all_input_nodes for node in products)
    )
    for node in sorted(beside):
        if not (is_pointwise(node) and has_rows(node, shape)):
            continue
        for operand in node.all_input_nodes:
            if has_rows(operand, (*shape[:-1], 1)) and len(shape_of(operand)) == len(shape_of(node)):
                if operand not in repeated:
                    whole = [*shape, *shape_of(operand)[len(shape) :]]
                    repeated[operand] = emit(node, aten.expand.default, operand, whole)
                node.replace_input_with(operand, repeated[operand])


def _end(node: fx.Node, products: list[fx.Node], rows: set[fx.Node]) -> None:
    """Let what reads `node` and is none of `rows` read it where it is of all rows again."""
    groups = products[0].args[-3:]
    outside = _outside(node, products, rows)
    last = len(shape_of(_ids(products[0]))) - 1
    sums = [
        u
        for u in outside
        if u.target is aten.sum.dim_IntList and list(u.args[1:]) == [[last], False] and last
    ]
    for reader in sums:
        replace(reader, emit(reader, ours.sum_rows.default, node, *groups))
    left = [reader for reader in outside if reader not in sums]
    if left and (node in rows or sums):
        _read_instead(node, left, ours.own_rows.default, (node, *groups), {})


def _repeat_condition(node: fx.Node, products: list[fx.Node], rows: set[fx.Node]) -> None:
    """There is no sum of conditions: what reads one for all rows reads one that is computed of all rows."""
    value, outside = node.meta["val"], _outside(node, products, rows)
    if not (outside and isinstance(value, torch.Tensor) and value.dtype == torch.bool):
        return
    if len(outside) == len(node.users):
        rows.discard(node)
    else:
        _read_instead(node, outside, node.target, node.args, node.kwargs)


def _outside(node: fx.Node, products: list[fx.Node], rows: set[fx.Node]) -> list[fx.Node]:
    """Readers that are none of `rows`."""
    return [u for u in node.users if u not in rows and not (u in products and _reads_rows(u, node))]


def _read_instead(node: fx.Node, readers: list[fx.Node], target: Any, args: Any, kwargs: Any) -> None:
    """What these read in place of `node`: of its shape, before the first of them."""
    first = next(n for n in _following(node) if n in readers)
    made = emit_at(first, node, target, args, kwargs)
    for reader in readers:
        reader.replace_input_with(node, made)


def _following(node: fx.Node) -> Iterator[fx.Node]:
    while node.op != "root":
        yield (node := node.next)


def _behind(products: list[fx.Node], read: frozenset[fx.Node]) -> set[fx.Node]:
    """`read`, and what is made of it and of products row by row, of nothing else as large but what tokens repeat."""
    shape, found = shape_of(_ids(products[0])), set(read)
    sources = {node for node in products if has_rows(node, shape)}
    sweep = Sweep(user for node in read | sources for user in node.users)
    for node in sweep:
        inside = [n for n in node.all_input_nodes if n in found or n in sources]
        if node in found or not _is_by_rows(node, shape):
            continue
        tensors = (n.meta["val"] for n in inside if isinstance(n.meta["val"], torch.Tensor))
        size = max((made.numel() for made in tensors), default=0)
        others = (n for n in node.all_input_nodes if n not in inside and n.target is not aten.expand.default)
        if all(n.meta["val"].numel() < size for n in others):
            found.add(node)
            sweep.add(node.users)
    return found
