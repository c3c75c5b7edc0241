"""What pieces run of an op that is cut in time, and whether all run the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import fx

import passes.ops.registration  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers what rules emit)
from cost_model.mesh import MeshSpec
from passes.ir.fake_calls import FakeCalls
from passes.ir.joint import map_operands, node_value, result_shapes, tensor_operands
from passes.ir.torch_compat import fake_mode_of
from passes.layout.layout import NodeLayouts
from passes.lower.op_on_rank import Emit, OpOnRank
from passes.micro_batches.time_axis import TIME
from passes.rules.core.rule import OpRule


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

    all_shapes = [*(tuple(node_value(n).shape) for n in wholes), *result_shapes(node)]
    shapes = tuple(
        layout.local_shape(shape, mesh, index)
        for shape, layout in zip(all_shapes, (*layouts.operands, *layouts.results), strict=True)
    )
    operands = [part(*pair) for pair in zip(wholes, shapes, strict=False)]
    graph.output(on_piece(emit, node, operands, rule, layouts, mesh, index))
    return shapes, graph


def _without_numbers(graph: fx.Graph) -> Hashable:
    return tuple((node.target, *(n.name for n in node.all_input_nodes)) for node in graph.nodes)
