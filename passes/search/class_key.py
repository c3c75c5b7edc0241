"""What of an op decides its strategies and their prices: layers that are alike share them."""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from passes.ir.joint import first_value, map_operands, node_value, result_shapes, tensor_operands


def class_key(node: fx.Node) -> Hashable:
    """Nodes with equal keys have equal rules, strategies and seconds."""
    tokens = [f"<{tuple(node_value(n).shape)} {node_value(n).dtype}>" for n in tensor_operands(node)]
    return (
        str(node.target),
        repr(map_operands(node, tokens)),
        str(result_shapes(node)),
        str(first_value(node).dtype),
        node.meta.get("rows"),
    )
