"""Every gradient that passes a boundary is said to be that of a value that passed it: of the same shape and dtype,
in all pieces of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from passes.ir.op_traits import is_use
from passes.stages.graph_parts import GraphParts, model_line

_SUM = torch.ops.aten.add.Tensor


def pair_gradients(
    parts: GraphParts,
    sent: Sequence[Sequence[fx.Node]],
    returning: Sequence[Sequence[fx.Node]],
) -> tuple[Mapping[fx.Node, fx.Node], ...]:
    """Per boundary: value sent -> gradient returned. A pair that passes several boundaries is one at all of them.

    Among values alike, the one that comes from the line of the model that the gradient goes back to. A gradient that is
    like nothing that was sent (of a view that an output of the call is, too) is paired with itself.
    """
    known: dict[fx.Node, fx.Node] = {}
    found: list[Mapping[fx.Node, fx.Node]] = []
    for values, gradients in zip(sent, returning, strict=True):
        free = [value for value in values if value in parts.differentiable]
        pairs: dict[fx.Node, fx.Node] = {}
        for gradient in sorted(gradients, key=lambda n: known.get(n) not in free):
            value = known[gradient] if known.get(gradient) in free else _match(parts, gradient, free)
            known[gradient] = value
            pairs[value] = gradient
            if value is not gradient:
                free.remove(value)
        alone = [gradient for gradient in gradients if pairs.get(gradient) is gradient]
        found.append({value: pairs[value] for value in (*values, *alone) if value in pairs})
    return tuple(found)


def _match(parts: GraphParts, gradient: fx.Node, values: Sequence[fx.Node]) -> fx.Node:
    kinds = parts.kinds(gradient)
    alike = [value for value in values if parts.kinds(value) == kinds]
    if not alike:
        return gradient
    lines = _read_by(gradient)
    return max(
        alike, key=lambda value: (model_line(value) in lines, model_line(value)[0] in {m for m, _ in lines})
    )


def _read_by(gradient: fx.Node) -> set[tuple[str, str]]:
    """The lines of the ops that differentiate by the value of which `gradient` is one, behind sums."""
    stack, found, seen = list(gradient.users), set[tuple[str, str]](), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in seen or node.op == "output":
            continue
        seen.add(node)
        if is_use(node) or node.target is _SUM:
            stack.extend(node.users)
        else:
            found.add(model_line(node))
    return found
