"""The forward sweep of `PushViews`: which values are known in finer dims than their own, and how views cut dims."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from passes.ir.graph_pass import emit_at, int_at, shape_of, tensor_at


@dataclass(frozen=True)
class Group:
    """One dim: the product of finer dims of `sizes`, major first.

    firm: the flattening is the token kind (batch with sequence), where the finer dims are what the
    model means: an unflattened partner is split to match. Otherwise (heads with head size) the
    flattened dim is what the model means, and the flattening is done when a plain partner appears.
    """

    sizes: tuple[int, ...]
    firm: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    @property
    def ones(self) -> Group:
        """The same structure with every size 1: what broadcasts against this group."""
        return Group((1,) * len(self.sizes))

    @property
    def whole(self) -> Group:
        return Group((self.size,))


def trivial(shape: Iterable[int]) -> tuple[Group, ...]:
    return tuple(Group((size,)) for size in shape)


def flatten(groups: Iterable[Group]) -> tuple[int, ...]:
    """The finer shape."""
    return tuple(itertools.chain.from_iterable(group.sizes for group in groups))


def is_mixed(sizes: Sequence[int]) -> bool:
    """Whether a group really mixes dims: two or more that are not 1."""
    return sum(size != 1 for size in sizes) > 1


def refine(source: Sequence[int], target: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Per target dim, finer sizes such that both shapes are flattenings of the finer shape.

    (4, 16, 32) as (64, 32)      -> ((4, 16), (32,))
    (64, 32)    as (64, 4, 8)    -> ((64,), (4,), (8,))
    (5, 6, 4)   as (5, 8, 3)     -> ((5,), (8,), (3,))        a cut at 8 and one at 6: given up
    (8, 4)      as (2, 16)       -> ((2,), (4, 4))
    (4, 1, 16)  as (64,)         -> ((4, 16),)                no dims of size 1 inside a group
    """
    if 0 in source:
        return tuple((size,) for size in target)
    groups: list[tuple[int, ...]] = []
    i = j = 0
    while j < len(target):
        i0, j0 = i, j
        j += 1
        have, want = 1, target[j0]
        if i < len(source):
            have, i = source[i], i + 1
        while have != want:
            if have < want:
                have, i = have * source[i], i + 1
            else:
                want, j = want * target[j], j + 1
        groups += _block(source[i0:i], target[j0:j])
    return tuple(tuple(size for size in group if size != 1) or (1,) for group in groups)


def _block(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, ...]]:
    """`refine` where no proper prefixes of the two have equal products."""
    if len(target) == 1:
        return [tuple(source)]
    cuts = sorted(_cuts(source) | _cuts(target))
    if any(b % a for a, b in itertools.pairwise(cuts)):
        return [(size,) for size in target]
    groups: list[tuple[int, ...]] = []
    low = 1
    for size in target:
        high = low * size
        inside = [c for c in cuts if low <= c <= high]
        groups.append(tuple(b // a for a, b in itertools.pairwise(inside)) or (1,))
        low = high
    return groups


def _cuts(sizes: Sequence[int]) -> set[int]:
    """Products of the leading sizes: where the flat dim is cut."""
    return set(itertools.accumulate(sizes, operator.mul, initial=1))


def resolve(groups: Sequence[Group]) -> Group:
    """The group that partners of one dim agree on: all have its size.

    A firm group meets plain dims: the firm group. Otherwise the cuts that all have in common.
    """
    firm = any(group.firm for group in groups)
    kinds = {group.sizes for group in groups}
    if len(kinds) == 1:
        return Group(kinds.pop(), firm)
    mixed = {sizes for sizes in kinds if is_mixed(sizes)}
    if firm and len(mixed) == 1:
        return Group(mixed.pop(), True)
    common = set.intersection(*(_cuts(sizes) for sizes in kinds))
    sizes = tuple(b // a for a, b in itertools.pairwise(sorted(common))) or (1,)
    return Group(sizes, firm and is_mixed(sizes))


aten = torch.ops.aten


@dataclass(frozen=True)
class Flat:
    """A value that is `node` with dims merged: one group of `node`'s dims per dim of the value."""

    node: fx.Node
    groups: tuple[Group, ...]

    @property
    def is_plain(self) -> bool:
        return all(len(group.sizes) == 1 for group in self.groups)

    def span(self, dim: int) -> range:
        """Which of `node`'s dims make up `dim`."""
        start = sum(len(group.sizes) for group in self.groups[:dim])
        return range(start, start + len(self.groups[dim].sizes))


@dataclass
class Sweep:
    """flats: the values not (only) available in their own shape. items: the same for the results of
    ops with several. reshapes: (value, shape, phase) -> the reshape already emitted.
    rule_for: how a node computes on finer dims, if it can."""

    rule_for: Callable[[fx.Node], PushRule | None]
    flats: dict[fx.Node, Flat] = field(default_factory=dict)
    items: dict[fx.Node, list[Flat]] = field(default_factory=dict)
    reshapes: dict[tuple[fx.Node, tuple[int, ...], str], fx.Node] = field(default_factory=dict)

    def visit(self, node: fx.Node) -> None:
        if node.op == "output":
            self._materialize_results(node)
        if node.op != "call_function":
            return
        if node.target is aten.reshape.default:
            self.define(node, self._reshape(node))
        elif node.target is operator.getitem and node.args[0] in self.items:
            self._getitem(node)
        elif any(operand in self.flats for operand in node.all_input_nodes):
            rule = self.rule_for(node)
            result = rule(self, node) if rule is not None else None
            if result is None:
                self._materialize_operands(node)
            elif isinstance(result, list):
                self.items[node] = result
            else:
                self.define(node, result)

    def flat(self, node: fx.Node) -> Flat:
        return self.flats.get(node) or Flat(node, trivial(shape_of(node)))

    def define(self, node: fx.Node, flat: Flat) -> None:
        """Readers of `node` get `flat` from now on."""
        if not flat.is_plain:
            self.flats[node] = flat
        elif flat.node is not node:
            node.replace_all_uses_with(flat.node)

    def fitted(self, node: fx.Node, groups: Sequence[Group], reader: fx.Node) -> fx.Node:
        """The value of `node` with its dims as `groups`, for `reader`."""
        flat = self.flat(node)
        return self._shaped(flat.node, flatten(groups), reader, reader)

    def whole(self, node: fx.Node, dims: Sequence[int], reader: fx.Node) -> Flat:
        """`node` with each of `dims` as one dim."""
        flat = self.flat(node)
        groups = tuple(group.whole if d in dims else group for d, group in enumerate(flat.groups))
        return Flat(self.fitted(node, groups, reader), groups)

    def _reshape(self, node: fx.Node) -> Flat:
        flat = self.flat(tensor_at(node))
        source = shape_of(flat.node)
        sizes = refine(source, shape_of(node))
        groups = _firmed([Group(s) for s in sizes], flat, source)
        fine = flatten(groups)
        return Flat(self._shaped(flat.node, fine, node, node), tuple(groups))

    def _shaped(self, node: fx.Node, shape: tuple[int, ...], point: fx.Node, reader: fx.Node) -> fx.Node:
        """`node` reshaped, before `point`. Shared with later readers, but a forward reader never
        reads a reshape that was emitted for the backward."""
        while node.target is aten.reshape.default and shape_of(node) != shape:
            node = tensor_at(node)
        if shape_of(node) == shape:
            return node
        phase = reader.meta["phase"]
        for made_for in ("forward", phase):
            if (node, shape, made_for) in self.reshapes:
                return self.reshapes[node, shape, made_for]
        made = self._remade(node, shape, point, reader)
        self.reshapes[node, shape, phase] = made
        return made

    def _remade(self, node: fx.Node, shape: tuple[int, ...], point: fx.Node, reader: fx.Node) -> fx.Node:
        """A reshape; of a creation, the same creation in another shape."""
        if node.target is aten.full.default:
            return emit_at(point, reader, aten.full.default, (list(shape), node.args[1]), dict(node.kwargs))
        uniform = torch.ops.autoshard.uniform.default
        if node.target is uniform and node.args[0] == node.args[2]:
            args = (list(shape), [0] * len(shape), list(shape), *node.args[3:])  # same linear positions
            return emit_at(point, reader, uniform, args, {})
        return emit_at(point, reader, aten.reshape.default, (node, list(shape)), {})

    def _getitem(self, node: fx.Node) -> None:
        self.define(node, self.items[tensor_at(node)][int_at(node, 1)])

    def _materialize_operands(self, node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            if operand in self.flats:
                node.replace_input_with(operand, self.fitted(operand, trivial(shape_of(operand)), node))

    def _materialize_results(self, output: fx.Node) -> None:
        """Returned values are reshaped where they were, in their own phase."""
        for operand in output.all_input_nodes:
            if operand in self.flats:
                flat = self.flats[operand]
                plain = self._shaped(flat.node, shape_of(operand), operand, operand)
                output.replace_input_with(operand, plain)


def _firmed(groups: list[Group], flat: Flat, source: tuple[int, ...]) -> list[Group]:
    """Says which of the new groups are firm: those that start at the first dim, or hold a firm one.

    A group that is there already keeps what it is. Dims of size 1 do not count.
    """
    fine = flatten(groups)
    kept = [s for s in fine if s != 1] == [s for s in source if s != 1]
    old = dict(zip(_members(flat.groups), flat.groups, strict=True)) if kept else {}
    result: list[Group] = []
    for group, members in zip(groups, _members(groups), strict=True):
        firm = members in old and old[members].firm
        if members not in old:
            inner = any(g.firm and set(m) <= set(members) for m, g in old.items())
            firm = is_mixed(group.sizes) and (members[0] == 0 or inner)
        result.append(Group(group.sizes, firm))
    return result


def _members(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    """Per group, its finer dims, numbered from the left leaving out those of size 1."""
    numbers = itertools.count()
    return [tuple(next(numbers) for size in group.sizes if size != 1) for group in groups]


PushRule = Callable[[Sweep, fx.Node], Flat | list[Flat] | None]
