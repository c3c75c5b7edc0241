"""Time as a mesh axis: how many pieces there are, and along which dims tensors of a call may be cut into them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, dependents, node_value
from passes.ir.op_traits import is_product
from passes.layout.layout import Layout

TIME = "time"


def time_mesh(count: int) -> MeshSpec:
    """`count` pieces, one after the other."""
    return MeshSpec({TIME: count})


def even_sizes(length: int, count: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, the larger first: 8 in 5 is 2, 2, 2, 1, 1 (torch.chunk makes 4 of it)."""
    small, more = divmod(length, count)
    return tuple(small + (place < more) for place in range(count))


def batch_length(joint: JointGraph) -> int:
    """The longest first dim of the call's tensors; 0 if none has a dim."""
    shapes = (
        tuple(node_value(node).shape)
        for node, spec in zip(joint.placeholders, joint.inputs, strict=True)
        if spec.kind == "input"
    )
    return max((shape[0] for shape in shapes if shape), default=0)


def trains(joint: JointGraph) -> bool:
    """Whether a call has gradients: without, nothing is kept that pieces would make less of."""
    ends = zip(joint.outputs, joint.results, strict=True)
    return any(end.kind == "grad" and result is not None for end, result in ends)


def call_products(joint: JointGraph) -> list[fx.Node]:
    """Products of what is made of the call's tensors, in order."""
    ends = zip(joint.placeholders, joint.inputs, strict=True)
    made = dependents(joint.graph.nodes, [n for n, spec in ends if spec.kind in ("input", "tangent")])
    return [node for node in joint.graph.nodes if node in made and is_product(node)]


def given_layouts(joint: JointGraph, count: int) -> Mapping[int, list[Layout]]:
    """Of every tensor of the call, by its position, each dim cut into `count` pieces of even sizes."""
    mesh = time_mesh(count)
    found: dict[int, list[Layout]] = {}
    for position, (node, spec) in enumerate(zip(joint.placeholders, joint.inputs, strict=True)):
        if spec.kind in ("input", "tangent"):
            shape = tuple(node_value(node).shape)
            found[position] = [_cut(shape, d, mesh) for d, n in enumerate(shape) if n >= count]
    return found


def _cut(shape: tuple[int, ...], dim: int, mesh: MeshSpec) -> Layout:
    dims = [(TIME,) if d == dim else () for d in range(len(shape))]
    sizes = [even_sizes(n, mesh.size(TIME)) if d == dim else None for d, n in enumerate(shape)]
    return Layout.of(shape, mesh, dims, sizes=sizes)
