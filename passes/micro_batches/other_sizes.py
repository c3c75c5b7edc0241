"""Pieces of other sizes: the same layouts at their ends, and as like as can be within."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import fx

from cost_model.errors import InfeasibleError
from passes.ir.joint import JointGraph, result_index, result_shapes, tensor_operands
from passes.ir.op_traits import is_collect, is_piece
from passes.layout.assignment import Assignment, NodeLayouts
from passes.search.narrowing import Choose, Narrowing


def first_of_each_size(graphs: Sequence[JointGraph]) -> list[int]:
    """Per graph the first whose values all have the same shapes."""
    if len(graphs) == 1:  # of a whole batch nothing is to be compared
        return [0]
    seen: dict[tuple[object, ...], int] = {}
    return [seen.setdefault(_shapes(graph), place) for place, graph in enumerate(graphs)]


def piece_places(joint: JointGraph) -> list[int]:
    """Per piece the place of its size: 0 is the first piece's."""
    firsts = first_of_each_size((joint, *joint.others))
    order = {place: number for number, place in enumerate(sorted(set(firsts)))}
    return [order[place] for place in firsts]


def layouts_like(assignment: Assignment, graph: JointGraph) -> Narrowing:
    """Of `graph`, a piece of another size than that of `assignment`: what runs before and after has the layouts
    that it has there, so that both can share it; what a piece does has them where they fit.
    """
    allowed: dict[str, Choose] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or result_index(node)[0] is not node or node.name not in assignment:
            continue
        held = assignment[node.name]
        if node.meta["runs"] != "piece":
            allowed[node.name] = partial(_same, node, held)
        elif is_piece(node):
            allowed[node.name] = partial(_same_operand, node, held)
        elif is_collect(node):
            allowed[node.name] = partial(_same_result, node, held)
    for node in graph.placeholders:
        allowed[node.name] = partial(_same, node, assignment[node.name])
    return Narrowing(held=assignment, allowed=allowed)


def _shapes(graph: JointGraph) -> tuple[object, ...]:
    return tuple(tuple(map(tuple, result_shapes(n))) for n in graph.graph.nodes if n.op != "output")


def _same(node: fx.Node, held: NodeLayouts, strategies: Sequence[NodeLayouts]) -> list[int]:
    content = lambda s: (s.operands, s.results, s.splits)
    return _some(node, [i for i, s in enumerate(strategies) if content(s) == content(held)])


def _same_operand(node: fx.Node, held: NodeLayouts, strategies: Sequence[NodeLayouts]) -> list[int]:
    return _some(node, [i for i, s in enumerate(strategies) if s.operands == held.operands])


def _same_result(node: fx.Node, held: NodeLayouts, strategies: Sequence[NodeLayouts]) -> list[int]:
    return _some(node, [i for i, s in enumerate(strategies) if s.results == held.results])


def _some(node: fx.Node, found: list[int]) -> list[int]:
    if found:
        return found
    shapes = ", ".join(str(list(shape)) for n in tensor_operands(node) for shape in result_shapes(n))
    raise InfeasibleError(
        f"micro-batches of several sizes: the smaller cannot have the layouts of the larger at {node.name} ({shapes})"
        "\n  try: micro_batches that divides the batch"
    )
