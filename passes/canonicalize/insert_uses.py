from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

import passes.ops.graph_marks  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::use)
from passes.canonicalize.matmul_to_contract import PRODUCTS_ARE_CONTRACTS
from passes.canonicalize.merge_duplicates import NO_DUPLICATES
from passes.ir.graph_pass import GraphPass
from passes.ir.graph_properties import NO_DEAD_CODE, NO_USES
from passes.ir.joint import JointGraph, tensor_operands
from passes.ir.op_traits import when_read
from passes.ir.properties import Property, described
from passes.rules.core.rule_registry import rule_for

__all__ = ["READERS_SHARE", "InsertUses"]


def _unshared(joint: JointGraph) -> str | None:
    for node in joint.graph.nodes:
        if not _is_value(node) or node.target is torch.ops.autoshard.use.default:
            continue
        for phase in ("forward", "backward"):
            readers = [user for user in node.users if user.meta.get("phase") == phase and user.op != "output"]
            if len(readers) > 1:
                return f"{described(node)}: read in the {phase} by {readers}"
    return None


READERS_SHARE = Property("the readers of a value in one phase read one use of it", _unshared)


@dataclass(frozen=True)
class InsertUses(GraphPass):
    """Put one `use` between a value and its readers of a phase, where there are two or more.

        %q: f32[8, 16] = contract(%x, %wq, ...)
        %k: f32[8, 16] = contract(%x, %wk, ...)
        ->
        %u: f32[8, 8]  = use(%x)
        %q: f32[8, 16] = contract(%u, %wq, ...)
        %k: f32[8, 16] = contract(%u, %wk, ...)

    A `use` is the identity: the layout that one phase's readers share. Without it, a value gathered
    for three readers would be priced as three gathers, though it runs as one. A reader that wants
    another layout still redistributes from the use's. The returned tuple is not a reader, and a
    constant (`full`) needs no use: every reader can have it in any layout for nothing.

    What the forward reads through a window the backward often reads through the same (a convolution's input, for
    the weight's gradient). Both then share the forward's use: a halo is kept, and not exchanged again.

    Last of the pipeline: no other pass looks through a `use`.
    """

    requires = (PRODUCTS_ARE_CONTRACTS, NO_DUPLICATES, NO_DEAD_CODE, NO_USES)
    ensures = (READERS_SHARE,)
    breaks = (NO_DUPLICATES, NO_USES)

    def __call__(self, joint: JointGraph) -> JointGraph:
        order = {node: position for position, node in enumerate(joint.graph.nodes)}
        for node in list(order):
            if _is_value(node):
                _insert(node, order)
        return joint


def _is_value(node: fx.Node) -> bool:
    if node.op not in ("placeholder", "call_function") or node.target is torch.ops.aten.full.default:
        return False
    return isinstance(node.meta["val"], torch.Tensor)


def _insert(node: fx.Node, order: dict[fx.Node, int]) -> None:
    readers = sorted((user for user in node.users if user.op == "call_function"), key=order.__getitem__)
    forward = [reader for reader in readers if reader.meta["phase"] == "forward"]
    backward = [reader for reader in readers if reader.meta["phase"] == "backward"]
    kept: list[fx.Node] = []
    if forward and backward and any(_through_window(reader, node) for reader in forward):
        kept = [reader for reader in backward if _through_window(reader, node)]
    for phase, group in (
        ("forward", sorted([*forward, *kept], key=order.__getitem__)),
        ("backward", [reader for reader in backward if reader not in kept]),
    ):
        if len(group) >= 2:
            _share(node, phase, group)


def _share(node: fx.Node, phase: str, group: Sequence[fx.Node]) -> None:
    with node.graph.inserting_before(group[0]):
        use = node.graph.call_function(torch.ops.autoshard.use.default, (node,))
    origin = group[0] if node.op == "placeholder" else node
    use.meta = {"val": node.meta["val"], "phase": phase}
    use.meta.update({key: origin.meta[key] for key in ("module", "source") if key in origin.meta})
    use.meta.update(when_read(node, group))
    for reader in group:
        reader.replace_input_with(node, use)


def _through_window(reader: fx.Node, node: fx.Node) -> bool:
    """Whether `reader` sees `node` through a window."""
    windows = rule_for(reader).windows
    return any(tensor_operands(reader)[t] is node for t, _ in windows if t < len(tensor_operands(reader)))
