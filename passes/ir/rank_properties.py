"""What holds of one rank's forward or backward, before and after every pass, and what its passes keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes.ir.graph_properties import IN_ORDER
from passes.ir.op_traits import is_collective
from passes.ir.properties import HasGraph, Kept, Property, described, of_ops

aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_MOVING = (
    aten.cat.default,
    aten.clone.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.view.default,
)


def is_start(node: fx.Node) -> bool:
    """Whether `node` starts a collective."""
    return is_collective(node) and node.target is not _WAIT


def group_of(start: fx.Node) -> str:
    """The name of the process group of a collective: its last argument, but for the name of what it serves."""
    named = str(start.target).startswith("autoshard_c10d_functional.")
    return str(start.args[-2 if named else -1])


def _unawaited(node: fx.Node) -> str | None:
    if is_start(node):
        readers = [user.name for user in node.users]
        waits = [user for user in node.users if user.target is _WAIT]
        return None if len(waits) == len(readers) == 1 else f"is read by {readers}, not by its wait alone"
    if node.target is _WAIT and not is_start(node.all_input_nodes[0]):
        return "waits for no collective"
    return None


INVARIANTS: tuple[Property[Any], ...] = (
    IN_ORDER,
    of_ops("every op has meta val", lambda node: None if "val" in node.meta else "has none"),
    of_ops("every collective is waited for once, and read by nothing else", _unawaited),
)
"""Of every rank's graph. A wait stands behind its collective, as every node stands behind its operands."""


def _ops(graph: HasGraph) -> Sequence[str]:
    return sorted(described(node) for node in graph.graph.nodes)


def _computing(graph: HasGraph) -> Sequence[str]:
    """Without operands: a pass may put other pieces of the same values in."""
    ops = [node for node in graph.graph.nodes if node.op == "call_function" and not is_collective(node)]
    return sorted(f"%{node.name} = {node.target}" for node in ops if node.target not in _MOVING)


def _collectives(graph: HasGraph) -> Sequence[str]:
    """In place or not is all the same."""
    starts = [node for node in graph.graph.nodes if is_start(node)]
    return [f"{str(node.target).replace('_.default', '.default')} in {group_of(node)}" for node in starts]


OPS: Kept[Any] = Kept("all nodes and their operands", _ops)
COMPUTING: Kept[Any] = Kept("the ops that neither move data nor communicate", _computing)
COLLECTIVES: Kept[Any] = Kept("the collectives, in their order", _collectives)
