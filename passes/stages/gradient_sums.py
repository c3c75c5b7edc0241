"""The last ops before a parameter's gradient is returned: sums, and views and casts of them.

A parameter that several stages read (a tied embedding) gets its gradient from all of them. What it is summed from is
computed where each part belongs; the sum is not computed in one place, but each stage returns its own part of it:

    %a = contract(...)                              // stage 3
    %b = embedding_dense_backward(...)              // stage 0
    %c = add(%a, %b)           ->  grad w           // stage 3 returns %a, stage 0 returns %b
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.ir.op_traits import is_cast, is_collect, is_use, is_view
from passes.stages.graph_parts import GraphParts, is_glued, operands

_aten = torch.ops.aten
_SCALED = (_aten.neg.default, _aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar)


@dataclass(frozen=True)
class GradientSum:
    """result: the gradient of `param`. ops: the sum, in the graph's order. parts: what is summed."""

    param: fx.Node
    result: fx.Node
    ops: tuple[fx.Node, ...]
    parts: tuple[fx.Node, ...]

    def part_of(self, here: frozenset[fx.Node]) -> tuple[fx.Node | None, dict[fx.Node, fx.Node | None]]:
        """The gradient if all parts but `here` are zero, and what each op of the sum then is: None for zero, another
        value where a sum has one operand left."""
        made: dict[fx.Node, fx.Node | None] = {part: part if part in here else None for part in self.parts}
        for node in self.ops:
            left = [x for x in (made[x] for x in operands(node) if x in made) if x is not None]
            whole = len(left) == sum(x in made for x in operands(node))
            made[node] = node if whole else left[0] if left else None
        return made[self.result], made


def gradient_sums(parts: GraphParts) -> dict[int, GradientSum]:
    """By position among `joint.outputs`; every gradient that is one."""
    returned = Counter(parts.results)
    found: dict[int, GradientSum] = {}
    for position, (spec, result) in enumerate(zip(parts.joint.outputs, parts.results, strict=True)):
        if spec.kind == "grad" and result is not None:
            ops = _ops(parts, result, returned)
            leaves = dict.fromkeys(x for n in ops for x in operands(n) if x in parts.after and x not in ops)
            order = [n for n in parts.backward if n in ops] if len(ops) > 1 else list(ops)
            param = parts.joint.placeholders[spec.index]
            found[position] = GradientSum(param, result, tuple(order), tuple(leaves) or (result,))
    return found


def _ops(parts: GraphParts, result: fx.Node, returned: Mapping[fx.Node | None, int]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [result]
    while stack:
        node = stack.pop()
        wanted = 1 if node is result else 0
        if node in found or returned[node] != wanted or not all(n in found for n in _readers(node)):
            continue
        if node in parts.in_backward and node in parts.after and _is_linear(node, parts):
            found.add(node)
            stack.extend(operands(node))
    return found


def _is_linear(node: fx.Node, parts: GraphParts) -> bool:
    """Whether `node` may be done for every part of the sum by itself."""
    read = operands(node)
    if node.target is _aten.add.Tensor and len(read) == 2:
        value = node_value(node)
        alike = [n for n in read if node_value(n).shape == value.shape and node_value(n).dtype == value.dtype]
        return len(alike) == len(node.args) == 2 and not node.kwargs and set(read) <= parts.after
    if is_collect(node):
        return node.args[1] == "sum"
    if len(read) != 1 or is_glued(node):
        return False
    return is_view(node) or is_cast(node) or node.target in _SCALED


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if is_use(user):
            yield from _readers(user)
        elif user.op != "output":
            yield user
