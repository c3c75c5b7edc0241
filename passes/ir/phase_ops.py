"""Which ops run in the forward and which in the backward, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from passes.ir.joint import JointGraph, ancestors

__all__ = ["ops_by_phase"]


def ops_by_phase(joint: JointGraph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The ops of the forward (what outputs and new buffers depend on) and of the backward (the rest)."""
    ops = [n for n in joint.graph.nodes if n.op == "call_function"]
    ends = zip(joint.outputs, joint.results, strict=True)
    forward = ancestors(n for spec, n in ends if n is not None and spec.kind != "grad")
    tangents = {n for n, spec in zip(joint.placeholders, joint.inputs, strict=True) if spec.kind == "tangent"}
    dependent = set(tangents)
    for node in ops:
        if any(n in dependent for n in node.all_input_nodes):
            dependent.add(node)
    late = [n for n in ops if n not in forward]
    order: dict[fx.Node, None] = {}
    for root in [*(n for n in late if n in dependent), *late]:
        for node in _path_to(root, order, forward):
            order[node] = None
    return [n for n in ops if n in forward], list(order)


def _path_to(root: fx.Node, done: Mapping[fx.Node, None], given: set[fx.Node]) -> list[fx.Node]:
    """The ops that lead from `done` and `given` to `root`, and `root` itself, each after its operands."""
    order: dict[fx.Node, None] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        if node in order or node in done or node in given or node.op != "call_function":
            stack.pop()
            continue
        missing = [
            n
            for n in node.all_input_nodes
            if n.op == "call_function" and n not in order and n not in done and n not in given
        ]
        if missing:
            stack.extend(reversed(missing))
            continue
        order[node] = None
        stack.pop()
    return list(order)
