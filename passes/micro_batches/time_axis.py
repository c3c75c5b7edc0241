"""Time as a mesh axis: how many pieces there are, along which dims tensors of a call may be cut into them, and what
pieces run of an op, and whether all run the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import fx

import passes.ops.registration  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers what rules emit)
from cost_model.mesh import MeshSpec
from passes.ir.joint import (
    FakeCalls,
    JointGraph,
    dependents,
    map_operands,
    node_value,
    tensor_operands,
    tensor_shapes,
)
from passes.ir.op_traits import is_product
from passes.ir.torch_compat import fake_mode_of
from passes.layout.layout import Layout, NodeLayouts
from passes.lower.op_on_rank import Emit, OpOnRank
from passes.rules.core.rule import OpRule

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
    shapes = (tuple(node_value(node).shape) for node in joint.given_as("input"))
    return max((shape[0] for shape in shapes if shape), default=0)


def call_products(joint: JointGraph) -> list[fx.Node]:
    """Products of what is made of the call's tensors, in order."""
    made = dependents(joint.graph.nodes, joint.given_as("input", "tangent"))
    return [node for node in joint.graph.nodes if node in made and is_product(node)]


def given_layouts(joint: JointGraph, count: int) -> Mapping[int, list[Layout]]:
    """Of every tensor of the call, by its position, each dim cut into `count` pieces of even sizes."""
    mesh = time_mesh(count)
    found: dict[int, list[Layout]] = {}
    for position, (node, spec) in enumerate(joint.given):
        if spec.kind in ("input", "tangent"):
            shape = tuple(node_value(node).shape)
            found[position] = [_cut(shape, d, mesh) for d, n in enumerate(shape) if n >= count]
    return found


def _cut(shape: tuple[int, ...], dim: int, mesh: MeshSpec) -> Layout:
    dims = [(TIME,) if d == dim else () for d in range(len(shape))]
    sizes = [even_sizes(n, mesh.size(TIME)) if d == dim else None for d, n in enumerate(shape)]
    return Layout.of(shape, mesh, dims, sizes=sizes)


def on_piece(
    emit: Emit,
    node: fx.Node,
    operands: Sequence[fx.Node],
    rule: OpRule,
    layouts: NodeLayouts,
    mesh: MeshSpec,
    index: int,
) -> Any:
    """What piece `index` makes of its operands, written by the rule of `node`: a node, or one per result."""
    args, kwargs = map_operands(node, operands)
    way = rule.splitting(split.factor for split in layouts.splits)
    context = OpOnRank(emit, mesh, index, node, args, kwargs, way, layouts)
    if way.localize is not None:
        return way.localize(context)
    return context.call(node.target, *args, **kwargs)  # type: ignore[arg-type]


def run_alike(node: fx.Node, rule: OpRule, layouts: NodeLayouts, mesh: MeshSpec, calls: FakeCalls) -> bool:
    """Whether all pieces run the same ops. It is not so where one piece alone has the row that is read, or is padded.

    Their numbers and sizes may differ, but not along a window: those say what is read of where.
    """
    way = rule.splitting(split.factor for split in layouts.splits)
    if way.localize is None or not layouts.splits:
        return True
    runs = [_written(node, way, layouts, mesh, index, calls) for index in range(mesh.size(TIME))]
    if len({_without_numbers(graph) for _, graph in runs}) > 1:
        return False
    split = {(one.factor,) for one in layouts.splits}
    windowed = any(way.operands_and_results[tensor][dim] in split for tensor, dim in way.windows)
    return not windowed or len({(shapes, str(graph)) for shapes, graph in runs}) == 1


_Shapes = tuple[tuple[int, ...], ...]


class _Meta(dict[str, Any]):
    """The meta of a node whose value is worked out when it is read, which few rules do."""

    def __init__(self, value: Callable[[], Any]) -> None:
        super().__init__()
        self.value = value

    def __missing__(self, key: str) -> Any:
        assert key == "val", key
        self[key] = self.value()
        return self[key]


def _written(
    node: fx.Node, rule: OpRule, layouts: NodeLayouts, mesh: MeshSpec, index: int, calls: FakeCalls
) -> tuple[_Shapes, fx.Graph]:
    """The shapes of a piece's operands and results, and what it runs."""
    graph, wholes = fx.Graph(), tensor_operands(node)

    def emit(_: fx.Node, target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> fx.Node:
        made = graph.call_function(target, tuple(args), kwargs)
        made.meta = _Meta(lambda: calls(target, args, kwargs, fake_mode_of(node.meta["val"])))
        return made

    def part(whole: fx.Node, shape: Sequence[int]) -> fx.Node:
        made = graph.placeholder(whole.name)
        made.meta = _Meta(lambda: node_value(whole)[tuple(map(slice, shape))])
        return made

    shapes = tuple(
        layout.local_shape(shape, mesh, index)
        for shape, layout in zip(tensor_shapes(node), layouts.tensors, strict=True)
    )
    operands = [part(*pair) for pair in zip(wholes, shapes, strict=False)]
    graph.output(on_piece(emit, node, operands, rule, layouts, mesh, index))
    return shapes, graph


def _without_numbers(graph: fx.Graph) -> Hashable:
    return tuple((node.target, *(n.name for n in node.all_input_nodes)) for node in graph.nodes)
