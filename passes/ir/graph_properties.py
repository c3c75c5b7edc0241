"""What holds of every joint graph, before and after every pass, and the properties that no single pass is about.

A property that one pass brings about is stated beside that pass (`passes/canonicalize/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from passes.ir.joint import GraphInput, GraphOutput, JointGraph, node_values
from passes.ir.properties import HasGraph, Kept, Property, described, of_ops

_META = ("val", "phase", "module", "source")


def _disorder(graph: HasGraph) -> str | None:
    """Placeholders, ops, one output; every node after its operands."""
    stages = {"placeholder": 0, "call_function": 1, "output": 2}
    stage, node = 0, None
    for node in graph.graph.nodes:
        own = stages.get(node.op)
        if own is None:
            return f"{described(node)}: a node of kind {node.op}"
        if own < stage or own == stage == 2:
            return f"{described(node)}: stands behind nodes of kind {list(stages)[stage]}"
        stage = own
    if node is None or node.op != "output":
        return "the graph has no output"
    return _late_operand(graph.graph)


def _late_operand(graph: fx.Graph) -> str | None:
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        late = next((operand for operand in node.all_input_nodes if operand not in seen), None)
        if late is not None:
            return f"{described(node)}: stands before its operand %{late.name}, or that is of no graph"
        seen.add(node)
    return None


def _unlinted(graph: HasGraph) -> str | None:
    try:
        graph.graph.lint()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return None


def _unlike_ends(joint: JointGraph) -> str | None:
    nodes = joint.placeholders
    if len(nodes) != len(joint.inputs):
        return f"{len(nodes)} placeholders for {len(joint.inputs)} inputs"
    if len(joint.results) != len(joint.outputs):
        return f"{len(joint.results)} values returned for {len(joint.outputs)} outputs"
    for place, spec in enumerate(joint.inputs):
        if spec.kind == "seed" and place != len(nodes) - 1:
            return f"{described(nodes[place])}: the seed is not the last input"
    for spec in joint.outputs:
        names = {"grad": spec.name, "buffer": spec.name}
        if spec.kind in names and joint.inputs[spec.index].name != spec.name:
            return f"{spec.kind} {spec.name} points at the input {joint.inputs[spec.index].name}"
    return None


def _writes(node: fx.Node) -> str | None:
    schema = getattr(node.target, "_schema", None)
    return "writes to an operand" if schema is not None and schema.is_mutable else None


def _incomplete(node: fx.Node) -> str | None:
    missing = [key for key in _META if key not in node.meta]
    if missing:
        return f"has no meta {', '.join(missing)}"
    if node.meta["phase"] not in ("forward", "backward"):
        return f"is in the phase {node.meta['phase']!r}"
    return None


def _too_early(node: fx.Node) -> str | None:
    if node.meta.get("phase") != "forward":
        return None
    late = [operand.name for operand in node.all_input_nodes if operand.meta.get("phase") == "backward"]
    return f"reads %{late[0]}, of the backward" if late else None


IN_ORDER: Property[Any] = Property("placeholders, ops, one output: every node after its operands", _disorder)
FUNCTIONAL = of_ops("the graph is functional", _writes)

INVARIANTS: tuple[Property[Any], ...] = (
    IN_ORDER,
    Property("fx finds no fault with the graph", _unlinted),
    Property("inputs parallel the placeholders, outputs what is returned", _unlike_ends),
    FUNCTIONAL,
    of_ops(f"every op has meta {', '.join(_META)}", _incomplete),
    of_ops("the forward reads nothing of the backward", _too_early),
)
"""Of every joint graph."""


def _ends(joint: JointGraph) -> Sequence[str]:
    """A pass may append a seed."""
    given = zip(joint.inputs, joint.placeholders, strict=True)
    inputs = [_end(spec, node) for spec, node in given if spec.kind != "seed"]
    returned = zip(joint.outputs, joint.results, strict=True)
    return [*inputs, *(_end(spec, node) for spec, node in returned)]


def _end(spec: GraphInput | GraphOutput, node: fx.Node | None) -> str:
    return f"{spec.kind} {spec.name} ({spec.index}): {None if node is None else _types(node)}"


def _types(node: fx.Node) -> str:
    return ", ".join("None" if v is None else f"{v.dtype}{list(v.shape)}" for v in node_values(node))


ENDS: Kept[JointGraph] = Kept("inputs, outputs, their shapes and dtypes", _ends)


NO_DEAD_CODE = of_ops("every op is read", lambda node: None if node.users else "nothing reads it")
NO_USES = of_ops(
    "there is no `use` yet", lambda node: "a use" if str(node.target) == "autoshard.use.default" else None
)

CAPTURED = (NO_USES,)
"""What holds of a captured graph."""
