"""Rows that a model sorts by expert, put back into the order of their tokens. Whether a model's groups are the ids that
it sorted is tried, as histograms are written in many ways.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from passes.canonicalize.normalize_arguments import NO_DUPLICATES, ONE_SPELLING
from passes.ir.graph_pass import GraphPass, Sweep, emit, erase_dead, int_at, replace, shape_of, tensor_at
from passes.ir.graph_properties import NO_USES
from passes.ir.joint import JointGraph, node_value
from passes.ir.op_traits import is_zeros
from passes.ir.torch_sizes import counts_as
from passes.ops.routed_ops import ROUTED
from passes.rules.core.rule_registry import rows_through

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
        if not _counts_groups(groups, self.sort, int_at(node, 4), self.tried):
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


def _counts_groups(groups: fx.Node, sort: fx.Node, experts: int, tried: dict[Hashable, bool]) -> bool:
    """Whether `groups` are the sorted ids, whatever these are: computed for some, most for one expert, none for
    another."""
    steps = _steps_from(groups, sort)
    if steps is None:
        return False
    numbers = {node: i for i, node in enumerate([*_as_they_come(sort), sort, *steps])}
    look = lambda node: (node.target, map_arg((node.args, node.kwargs), lambda n: ("node", numbers[n])))
    key = repr((*map(look, steps), [*map(shape_of, _as_they_come(sort))], experts))
    if key not in tried:
        fewer = _Fewer.of(steps, sort, experts)
        tried[key] = all(
            torch.equal(fewer.computed(steps, sort, ids)[groups], ids.sort().values)
            for ids in _tries(fewer(counts_as(shape_of(tensor_at(sort))[0])), experts)
        )
    return tried[key]


def _steps_from(groups: fx.Node, sort: fx.Node) -> list[fx.Node] | None:
    """The ops from the sorted ids to `groups`, in order; None if they read anything else."""
    given = {sort, *_as_they_come(sort)}
    needed, left = set[fx.Node](), [groups]
    while left:
        node = left.pop()
        if node in needed or node in given:
            continue
        if node.op != "call_function" or len(needed) > 64:
            return None
        needed.add(node)
        left += node.all_input_nodes
    return sorted(needed)


def _as_they_come(sort: fx.Node) -> list[fx.Node]:
    """The ids that are sorted, and what they are a reshape of."""
    found = [tensor_at(sort)]
    while found[-1].target is aten.reshape.default:
        found.append(tensor_at(found[-1]))
    return found


@dataclass(frozen=True)
class _Fewer:
    """How many ids are tried in place of those of the call, of which a histogram as one-hot rows can be 30 GB:
    numbers of the graph that are multiples of `tokens` are divided by `scale`."""

    tokens: int
    scale: int

    @staticmethod
    def of(steps: Sequence[fx.Node], sort: fx.Node, experts: int) -> _Fewer:
        """All, unless each number of `steps` is a multiple of the tokens or no more than there are experts: any other
        may be a limit, as of an expert's capacity, that fewer would not reach."""
        shapes = [[counts_as(size) for size in shape_of(node)] for node in _as_they_come(sort)]
        tokens = shapes[-1][0]
        numbers = set[int]()
        map_aggregate([(n.args, n.kwargs) for n in steps], lambda value: _add_integer(numbers, value))
        # Tokens an expert that are tried at least.
        least = 64 * experts
        if (
            max(map(len, shapes)) > 2
            or any(abs(n) > experts and n % tokens for n in numbers)
            or tokens < 2 * least
        ):
            return _Fewer(tokens, 1)
        return _Fewer(tokens, next(n for n in range(tokens // least, 0, -1) if tokens % n == 0))

    def __call__(self, number: Any) -> Any:
        scaled = isinstance(number, int) and not isinstance(number, bool) and number % self.tokens == 0
        return number // self.scale if scaled else number

    def computed(self, steps: Sequence[fx.Node], sort: fx.Node, ids: torch.Tensor) -> dict[fx.Node, Any]:
        come = {
            node: ids.reshape([self(counts_as(n)) for n in shape_of(node)]) for node in _as_they_come(sort)
        }
        values: dict[fx.Node, Any] = {**come, sort: ids.sort(stable=True)}
        for node in steps:
            given = map_arg((node.args, node.kwargs), values.__getitem__)
            args, kwargs = map_aggregate(given, lambda value: self(counts_as(value)))
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return values


def _add_integer(numbers: set[int], value: Any) -> Any:
    if isinstance(counted := counts_as(value), int):
        numbers.add(int(counted))
    return value


def _tries(length: int, experts: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    yield torch.randint(experts, (length,), generator=generator)
    yield torch.where(torch.rand(length, generator=generator) < 0.9, experts - 1, 0)
