"""What a tensor that no op makes may look like, and where the order of its axes is free."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, tensor_operands
from passes.ir.op_traits import is_cast, is_use
from passes.layout.layout import Layout
from passes.rules.core.rule import OpRule


def tensor_rule(shape: Sequence[int]) -> OpRule:
    """The rule of a tensor that simply is: every dim a factor of its own."""
    names = [f"d{i}" if length > 1 else "" for i, length in enumerate(shape)]
    dims = tuple((name,) if name else () for name in names)
    return OpRule((), (dims,), {n: length for n, length in zip(names, shape, strict=True) if n})


def is_storable(layout: Layout, shape: Sequence[int], mesh: MeshSpec) -> bool:
    """DTensor states an axis order other than the mesh's only where the split is even."""
    for length, axes in zip(shape, layout.dims, strict=True):
        in_order = sorted(axes, key=mesh.index) == list(axes)
        if not in_order and length % mesh.size(*axes):
            return False
    return True


def free_axis_order(joint: JointGraph) -> set[fx.Node]:
    """Nodes that only pass a parameter or a gradient along: there the order of axes matters."""
    found: set[fx.Node] = set()
    parameters = {
        node for node, spec in zip(joint.placeholders, joint.inputs, strict=True) if spec.kind == "param"
    }
    for node in joint.graph.nodes:
        passes_on = is_use(node) or is_cast(node)
        if passes_on and tensor_operands(node)[0] in parameters | found:
            found.add(node)
    for node in reversed(joint.graph.nodes):
        passes_on = is_use(node) or is_cast(node)
        if passes_on and all(user.op == "output" or user in found for user in node.users):
            found.add(node)
    return found
