"""Which ops run in the forward and which in the backward, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import fx

from passes.ir.joint import JointGraph, ancestors, dependents
from passes.ir.torch_dispatch import input_nodes


@dataclass(frozen=True)
class Segments:
    """The ops of a step in the order in which they run: what runs before the pieces of a batch, forward and backward of
    each piece, what runs after. Where nothing is in pieces, all is forward and backward."""

    before: tuple[fx.Node, ...]
    forward: list[fx.Node]
    backward: list[fx.Node]
    after: tuple[fx.Node, ...]


def segments(joint: JointGraph) -> Segments:
    """The ops of `joint` by the part of a step in which they run."""
    forward, backward = ops_by_phase(joint)
    if joint.pieces == 1:
        return Segments((), forward, backward, ())
    whole = [*forward, *backward]
    of = lambda ops, runs: [node for node in ops if node.meta["runs"] == runs]
    piece = of(forward, "piece"), of(backward, "piece")
    return Segments(tuple(of(whole, "before")), *piece, tuple(of(whole, "after")))


def ops_by_phase(joint: JointGraph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The ops of the forward (what outputs and new buffers depend on) and of the backward (the rest)."""
    ops = [n for n in joint.graph.nodes if n.op == "call_function"]
    ends = zip(joint.outputs, joint.results, strict=True)
    forward = ancestors(n for spec, n in ends if n is not None and spec.kind != "grad")
    dependent = after_tangents(joint)
    late = [n for n in ops if n not in forward]
    roots = [*(n for n in late if n in dependent), *late]
    return [n for n in ops if n in forward], on_demand(roots, forward)


def after_tangents(joint: JointGraph) -> set[fx.Node]:
    """The tangents, and every op that depends on one."""
    ends = zip(joint.placeholders, joint.inputs, strict=True)
    return dependents(joint.graph.nodes, (node for node, spec in ends if spec.kind == "tangent"))


def on_demand(roots: Iterable[fx.Node], available: AbstractSet[fx.Node] = frozenset()) -> list[fx.Node]:
    """The ops that lead from `available` values and placeholders to `roots`, each right before its
    first reader: what the backward computes again or gathers lives no longer than it must."""
    order: dict[fx.Node, None] = {}
    unmet = lambda node: node.op == "call_function" and node not in order and node not in available
    for root in roots:
        stack = [root]
        while stack:
            missing = [n for n in input_nodes(stack[-1]) if unmet(n)] if unmet(stack[-1]) else []
            if missing:
                stack.extend(reversed(missing))
            elif unmet(node := stack.pop()):
                order[node] = None
    return list(order)
