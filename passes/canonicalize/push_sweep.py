"""The forward sweep of `PushViews`: which values are known in finer dims than their own."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from passes.canonicalize.dim_groups import Group, flatten, is_mixed, refine, trivial
from passes.ir.rewrite import emit_at, int_at, shape_of, tensor_at

__all__ = ["Flat", "PushRule", "Sweep"]

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
