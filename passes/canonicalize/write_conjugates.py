from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.ir.graph_pass import GraphPass
from passes.ir.joint import JointGraph, node_values
from passes.ir.properties import of_ops

__all__ = ["CONJUGATES_WRITTEN", "WRITTEN", "WriteConjugates"]

aten = torch.ops.aten

WRITTEN: dict[Any, Any] = {
    aten._conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}


def _noted(node: fx.Node) -> str | None:
    values = [v for v in node_values(node) if isinstance(v, torch.Tensor)]
    is_noted = node.target in WRITTEN or any(v.is_conj() or v.is_neg() for v in values)
    return "a conjugate that is only noted" if is_noted else None


CONJUGATES_WRITTEN = of_ops("conjugates are written out", _noted)


@dataclass(frozen=True)
class WriteConjugates(GraphPass):
    """Compute conjugates and their negated imaginary parts, which torch only notes in a bit of the tensor.

        %c: c64[8, 5] = aten._conj(%x)
        ->
        %c: c64[8, 5] = aten.conj_physical(%x)

    A clone that takes the bit away is then a copy like any other, and a collective moves what it should: it
    sends memory and knows nothing of the bit. The conjugate of a Python number, in the gradient of `w * 2j`, is one.
    """

    ensures = (CONJUGATES_WRITTEN,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in joint.graph.nodes:
            if node.op == "call_function":
                node.target = WRITTEN.get(node.target, node.target)
                if node.target is aten.conj_physical.default and isinstance(node.args[0], complex):
                    _replace(node, node.args[0].conjugate())
                else:
                    _clear(node)
        return joint


def _replace(node: fx.Node, number: complex) -> None:
    for user in list(node.users):
        swapped = fx.map_arg((user.args, user.kwargs), lambda operand: number if operand is node else operand)
        user.args, user.kwargs = swapped  # type: ignore[misc]
    node.graph.erase_node(node)


def _clear(node: fx.Node) -> None:
    """Views of a conjugate have its bit too."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
        node.meta["val"] = value.resolve_conj().resolve_neg()
    elif isinstance(value, (tuple, list)):
        parts = [v.resolve_conj().resolve_neg() if isinstance(v, torch.Tensor) else v for v in value]
        node.meta["val"] = type(value)(parts)
