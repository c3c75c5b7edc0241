"""What of a model cannot be run in pieces, and where it stands."""

from __future__ import annotations

from torch import fx

from cost_model.errors import InfeasibleError
from passes.ir.joint import JointGraph, dependents, node_value, result_index, tensor_operands
from passes.ir.op_traits import is_product
from passes.layout.assignment import NodeLayouts
from passes.layout.layout import Layout
from passes.micro_batches.run_times import RunTimes, piece_strategies
from passes.micro_batches.time_axis import TIME, batch_length, even_sizes, time_mesh


class Uncut(InfeasibleError):
    """A batch cannot be run in so many pieces, whatever the layouts."""


def check_long_enough(joint: JointGraph, count: int) -> None:
    """Uncut if the call has fewer samples than pieces."""
    length = batch_length(joint)
    if length < count:
        raise Uncut(
            f"micro_batches={count}: the longest first dim of the call's tensors is {length}\n"
            f"  try: micro_batches={max(1, length)}, or a larger batch"
        )


def check_cut(joint: JointGraph, times: RunTimes) -> None:
    """Uncut if work on the call's tensors would have to be done on the whole batch at once."""
    inputs = [
        n
        for n, spec in zip(joint.placeholders, joint.inputs, strict=True)
        if spec.kind in ("input", "tangent")
    ]
    worked = dependents(joint.graph.nodes, inputs)
    whole = next((n for n in worked if is_product(n) and times.of.get(n.name, "piece") != "piece"), None)
    if whole is None:
        return
    node = _in_the_way(joint, times.count) or whole
    place = ", ".join(str(node.meta[key]) for key in ("module", "source") if node.meta.get(key))
    raise Uncut(
        f"micro_batches={times.count}: {_name(node)}{f' ({place})' if place else ''} needs the whole batch at once\n"
        "  try: micro_batches=1, or what is of each sample alone: GroupNorm or LayerNorm instead of the "
        "batch's statistics, a sum or mean over samples as the loss"
    )


def _name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


def _in_the_way(joint: JointGraph, count: int) -> fx.Node | None:
    """The first op that cannot take its operands as earlier ops, all run in pieces of the first dim, leave them; or
    that needs a sum over all pieces, where pieces go on with what it makes of it, as gradients of a loss's root do."""
    # What needs no product is run before the pieces.
    worked = dependents(joint.graph.nodes, [n for n in joint.graph.nodes if is_product(n)])
    late: dict[fx.Node, fx.Node] = {}
    held: dict[fx.Node, Layout] = {}
    mesh = time_mesh(count)
    for node, spec in zip(joint.placeholders, joint.inputs, strict=True):
        shape = tuple(node_value(node).shape)
        if spec.kind == "input" and shape and shape[0] == batch_length(joint):
            dims = [(TIME,), *[()] * (len(shape) - 1)]
            sizes = [even_sizes(shape[0], count), *[None] * (len(shape) - 1)]
            held[node] = Layout.of(shape, mesh, dims, sizes=sizes)
    strategies = piece_strategies(joint, count)
    for node in joint.graph.nodes:
        if node.op != "call_function" or result_index(node)[0] is not node:
            continue
        operands = tensor_operands(node)
        given = [held.get(operand) for operand in operands]
        waited = next((late[n] for n in map(_producer, operands) if n in late), None)
        if waited is not None:
            if any(layout is not None and not layout.partial for layout in given):
                return waited
            late[node] = waited
            continue
        if not any(given):
            continue
        chosen = next((s for s in strategies(node) if _reads(s, given)), None)
        if chosen is not None:
            for value in (node, *node.users):
                producer, index = result_index(value)
                if producer is node:
                    held[value] = chosen.results[index]
        elif any(layout is not None and not layout.partial for layout in given):
            return node
        elif node in worked:
            late[node] = node
    return None


def _producer(node: fx.Node) -> fx.Node:
    return result_index(node)[0]


def _reads(strategy: NodeLayouts, given: list[Layout | None]) -> bool:
    pairs = list(zip(strategy.operands, given, strict=True))
    return all(wanted == layout if layout is not None else not wanted.partial for wanted, layout in pairs)
