"""Rows that a model sorts by expert, put back into the order of their tokens."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.canonicalize.normalize_arguments import NO_DUPLICATES, ONE_SPELLING
from passes.canonicalize.sorted_groups import counts_groups
from passes.ir.graph_pass import GraphPass, Sweep, emit, erase_dead, int_at, replace, shape_of, tensor_at
from passes.ir.graph_properties import NO_USES
from passes.ir.joint import JointGraph, node_value
from passes.ir.op_traits import is_zeros
from passes.ops.routed_ops import ROUTED
from passes.rules.core.row_wise import rows_through

aten = torch.ops.aten


class TokenOrder(GraphPass):
    """Compute on rows as their tokens come, and not sorted by expert.

        %order: i64[64]   = aten.sort(%ids)[1]                        // %ids: i64[64], 2 experts for each of 32 tokens
        %token: i64[64]   = aten.floor_divide(%order, 2)
        %rows: f32[64, 8] = aten.index(%x, [%token])                  // %x: f32[32, 8]
        %y: f32[64, 4]    = routed_mm(%rows, %w, bucketize(arange(64), %ends, right=True), 0, 6)
        %back: i64[64]    = aten.index_put(%zeros, [%order], arange(64))
        %z: f32[64, 4]    = aten.index(%y, [%back])
        ->
        %rows: f32[64, 8] = aten.reshape(aten.expand(aten.reshape(%x, [32, 1, 8]), [32, 2, 8]), [64, 8])
        %z: f32[64, 4]    = routed_mm(%rows, %w, %ids, 0, 6)

    A sort over all tokens wants all of them on every rank. Its order is undone where every op from the sorted rows to
    the rows put back works row by row, or adds all rows up, as its rule says. That `%ends` are the ends of the sorted
    groups is tried on numbers: histograms are written in many ways.
    """

    requires = (ONE_SPELLING, NO_USES)
    breaks = (NO_DUPLICATES,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        tried: dict[Hashable, bool] = {}
        for node in list(joint.graph.nodes):
            if node.target is aten.sort.default and _sorts_ids(node):
                region = _Region(node, tried)
                if region.is_row_by_row():
                    region.rewrite()
        erase_dead(joint.graph)
        return joint


def _sorts_ids(node: fx.Node) -> bool:
    ids = node_value(tensor_at(node))
    return ids.ndim == 1 and not ids.is_floating_point() and not any(node.args[2:])


@dataclass
class _Region:
    """What is computed in the order of one sort.

    rows:   values in that order -> the dim of the rows, of several results that of each.
    starts: the nodes that bring values into it -> how many rows a token has; 0 for the ids themselves.
    ends:   the nodes that put rows back, likewise.
    """

    sort: fx.Node
    tried: dict[Hashable, bool]
    rows: dict[fx.Node, int | tuple[int | None, ...]] = field(default_factory=dict)
    starts: dict[fx.Node, int] = field(default_factory=dict)
    ends: dict[fx.Node, int] = field(default_factory=dict)

    @property
    def ids(self) -> fx.Node:
        return tensor_at(self.sort)

    @property
    def length(self) -> int:
        return shape_of(self.ids)[0]

    def is_row_by_row(self) -> bool:
        """Whether the order can be undone; finds starts, rows and ends."""
        order = _result(self.sort, 1)
        if order is None:
            return False
        found = _result(self.sort, 0)
        if found is not None:
            self._start(found, 0)
        maps: dict[fx.Node, int] = {order: 1}  # places -> rows a token has
        back: list[fx.Node] = []
        for node in order.users:
            if _divides(node):
                maps[node] = int_at(node, 1)
            elif _is_inverse(node, order):
                back.append(node if node.target is not aten.sort.default else _result(node, 1) or node)
        return self._all_found(maps, back) and bool(self.ends) and self._spreads()

    def _all_found(self, maps: dict[fx.Node, int], back: list[fx.Node]) -> bool:
        """Readers of the order, of its tokens and of its inverse bring rows in or put them back."""
        for places, count in maps.items():
            for node in places.users:
                if node in maps or node in back or _is_inverse(node, places):
                    continue
                if _looks_up(node, places) and shape_of(tensor_at(node))[0] * count == self.length:
                    self._start(node, count)
                elif _adds_at(node, places, count == 1) and shape_of(node)[0] * count == self.length:
                    self.ends[node] = count
                else:
                    return False
        for places in back:
            for node in places.users:
                if _looks_up(node, places):
                    self.ends[node] = 1
                elif _adds_at(node, places, unique=True):
                    self._start(node, 1)
                else:
                    return False
        return True

    def _start(self, node: fx.Node, count: int) -> None:
        self.starts[node] = count
        self.rows[node] = 0

    def _spreads(self) -> bool:
        """Follows the rows to their ends: False where an op does more than work on each, or add up all."""
        sweep = Sweep((*self.ends, *(user for start in self.rows for user in start.users)))
        for node in sweep:
            known = len(self.rows)
            if node in self.ends:
                if self.rows.get(_moved(node)) != 0:
                    return False
            elif node not in self.starts and not self._follows(node):
                return False
            for made in itertools.islice(self.rows, known, None):
                sweep.add(user for user in made.users if node < user)
        return True

    def _follows(self, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            dims = self.rows[tensor_at(node)]
            return isinstance(dims, tuple) and self._makes(node, dims[int_at(node, 1)])
        if node.op != "call_function" or not self._ids_are_groups(node):
            return False
        found = rows_through(node, {n: (dim,) for n, dim in self.rows.items() if isinstance(dim, int)})
        if found is None:
            return False
        dims = tuple(None if rows is None else rows[0] for rows in found)
        return self._makes(node, dims if isinstance(node.meta["val"], (tuple, list)) else dims[0])

    def _makes(self, node: fx.Node, dim: int | tuple[int | None, ...] | None) -> bool:
        if dim is not None:
            self.rows[node] = dim
        return True

    def _ids_are_groups(self, node: fx.Node) -> bool:
        """Whether the groups of a product of sorted rows are those that were sorted; they become its ids then."""
        if node.target not in ROUTED or tensor_at(node, 2) in self.rows:
            return True
        groups = tensor_at(node, 2)
        if not counts_groups(groups, self.sort, int_at(node, 4), self.tried):
            return False
        self._start(groups, 0)
        return True

    def rewrite(self) -> None:
        """Rows go from start to end in the order of tokens; only the nodes that changed it change."""
        for node, count in self.starts.items():
            replace(node, _repeated(node, _moved(node), count) if count else self.ids)
        for node, count in self.ends.items():
            replace(node, _summed(node, _moved(node), count))


def _moved(node: fx.Node) -> fx.Node:
    """The operand whose rows a start or an end moves."""
    return tensor_at(node, _MOVED[node.target])


_MOVED: dict[Any, int] = {
    aten.index.Tensor: 0,
    aten.index_select.default: 0,
    aten.index_put.default: 2,
    aten.index_add.default: 3,
}


def _repeated(node: fx.Node, value: fx.Node, count: int) -> fx.Node:
    if count == 1:
        return value
    tokens, *rest = shape_of(value)
    one = emit(node, aten.reshape.default, value, [tokens, 1, *rest])
    many = emit(node, aten.expand.default, one, [tokens, count, *rest])
    return emit(node, aten.reshape.default, many, [tokens * count, *rest])


def _summed(node: fx.Node, value: fx.Node, count: int) -> fx.Node:
    """Rows of each token added up, to what they are added to."""
    if count > 1:
        rows, *rest = shape_of(value)
        apart = emit(node, aten.reshape.default, value, [rows // count, count, *rest])
        value = emit(node, aten.sum.dim_IntList, apart, [1], False)
    added = node.target is aten.index_add.default and not is_zeros(tensor_at(node))
    return emit(node, aten.add.Tensor, tensor_at(node), value) if added else value


def _result(node: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in node.users if user.args[1:] == (index,)), None)


def _divides(node: fx.Node) -> bool:
    return node.target is aten.floor_divide.default and isinstance(node.args[1], int)


def _looks_up(node: fx.Node, places: fx.Node) -> bool:
    """`value[places]`"""
    if node.target is aten.index_select.default:
        return bool(node.args[1:] == (0, places))
    return node.target is aten.index.Tensor and list(node.args[1]) == [places]  # type: ignore[call-overload]


def _adds_at(node: fx.Node, places: fx.Node, unique: bool) -> bool:
    """Rows added up at their places. unique: no two have one, so that they may be set as well."""
    if node.target is aten.index_add.default:
        return bool(node.args[1:3] == (0, places)) and len(node.args) == 4 and not node.kwargs
    if node.target is not aten.index_put.default or list(node.args[1]) != [places]:  # type: ignore[call-overload]
        return False
    added = len(node.args) > 3 and bool(node.args[3])
    fits = shape_of(tensor_at(node, 2))[:1] == shape_of(places)
    return fits and (is_zeros(tensor_at(node)) if added else unique)


def _is_inverse(node: fx.Node, order: fx.Node) -> bool:
    """Places by row: `order.argsort()`, or 0, 1, 2 ... put at the places of `order`."""
    if node.target is aten.sort.default:
        return not any(node.args[2:]) and _result(node, 0) is None
    if not (node.target is aten.index_put.default and _adds_at(node, order, unique=True)):
        return False
    counted = tensor_at(node, 2)
    return counted.target is aten.arange.start_step and tuple(counted.args) == (0, shape_of(order)[0], 1)
