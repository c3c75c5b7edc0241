"""One op as a piece runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import map_operands
from passes.layout.assignment import NodeLayouts
from passes.lower.op_on_rank import Emit, OpOnRank
from passes.rules.core.rule_registry import rule_for


def op_in_piece(
    emit: Emit, node: fx.Node, operands: Sequence[fx.Node], layouts: NodeLayouts, mesh: MeshSpec, index: int
) -> Any:
    """What piece `index` makes of its `operands`, written by the rule of `node`. layouts: of the op, over time, which
    is the one axis of `mesh`."""
    args, kwargs = map_operands(node, operands)
    rule = rule_for(node).splitting(split.factor for split in layouts.splits)
    context = OpOnRank(emit, mesh, index, node, args, kwargs, rule, layouts)
    if rule.localize is not None:
        return rule.localize(context)
    return context.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
