"""What can be said of a graph and checked: what holds before and after every pass, and what passes keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import fx

from passes.ir.joint import GraphInput, GraphOutput, JointGraph, node_values
from passes.ir.op_traits import is_collective


class BrokenGraphError(AssertionError):
    """A pass was given, or has made, a graph that is not as it should be: an error of the pass, not of the model."""


class HasGraph(Protocol):
    """A `JointGraph` or an `fx.GraphModule`."""

    @property
    def graph(self) -> fx.Graph: ...


G = TypeVar("G", bound=HasGraph)


@dataclass(frozen=True)
class Property(Generic[G]):
    """Something true of a graph, or not.

    name:      the sentence that holds.
    violation: what of a graph is against it, with the node and its source line; None if nothing is.
    """

    name: str
    violation: Callable[[G], str | None]


@dataclass(frozen=True)
class Kept(Generic[G]):
    """Something that a pass does not change.

    name: what it is. lines: it, written down; sort them if their order is free.
    """

    name: str
    lines: Callable[[G], Sequence[str]]

    def change(self, before: Sequence[str], after: Sequence[str]) -> str | None:
        """The first place where the two differ."""
        for old, new in zip_longest(before, after):
            if old != new:
                return f"was {old or 'at its end'}\n  is  {new or 'at its end'}"
        return None


def of_ops(name: str, complaint: Callable[[fx.Node], str | None]) -> Property[Any]:
    """The property that `complaint` has nothing to say of any op. It returns what is wrong with one, in a clause."""

    def violation(graph: HasGraph) -> str | None:
        for node in graph.graph.nodes:
            wrong = complaint(node) if node.op == "call_function" else None
            if wrong is not None:
                return f"{described(node)}: {wrong}"
        return None

    return Property(name, violation)


def described(node: fx.Node) -> str:
    """`%mm_1 = aten.mm.default(%x, %w), layers.0, model.py:12`: a node, its layer and its source line."""
    places = [str(node.meta[key]) for key in ("module", "source") if node.meta.get(key)]
    return ", ".join([_call(node), *places])


def _call(node: fx.Node) -> str:
    if node.op != "call_function":
        return f"%{node.name} ({node.op})"
    operands = ", ".join(f"%{operand.name}" for operand in node.all_input_nodes)
    return f"%{node.name} = {node.target}({operands})"


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
    inputs = [_end(spec, node) for node, spec in joint.given if spec.kind != "seed"]
    return [*inputs, *(_end(spec, node) for spec, node in joint.returned)]


def _end(spec: GraphInput | GraphOutput, node: fx.Node | None) -> str:
    return f"{spec.kind} {spec.name} ({spec.index}): {None if node is None else _types(node)}"


def _types(node: fx.Node) -> str:
    return ", ".join("None" if v is None else f"{v.dtype}{list(v.shape)}" for v in node_values(node))


ENDS: Kept[JointGraph] = Kept("inputs, outputs, their shapes and dtypes", _ends)


NO_DEAD_CODE = of_ops("every op is read", lambda node: None if node.users else "nothing reads it")
NO_USES = of_ops(
    "there is no `use` yet", lambda node: "a use" if str(node.target) == "autoshard.use.default" else None
)


aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_MOVING = (
    aten.cat.default,
    aten.clone.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.view.default,
)


def is_start(node: fx.Node) -> bool:
    """Whether `node` starts a collective."""
    return is_collective(node) and node.target is not _WAIT


def group_of(start: fx.Node) -> str:
    """The name of the process group of a collective: its last argument, but for the name of what it serves."""
    named = str(start.target).startswith("autoshard_c10d_functional.")
    return str(start.args[-2 if named else -1])


def _unawaited(node: fx.Node) -> str | None:
    if is_start(node):
        readers = [user.name for user in node.users]
        waits = [user for user in node.users if user.target is _WAIT]
        return None if len(waits) == len(readers) == 1 else f"is read by {readers}, not by its wait alone"
    if node.target is _WAIT and not is_start(node.all_input_nodes[0]):
        return "waits for no collective"
    return None


RANK_INVARIANTS: tuple[Property[Any], ...] = (
    IN_ORDER,
    of_ops("every op has meta val", lambda node: None if "val" in node.meta else "has none"),
    of_ops("every collective is waited for once, and read by nothing else", _unawaited),
)
"""Of every rank's graph. A wait stands behind its collective, as every node stands behind its operands."""


def _ops(graph: HasGraph) -> Sequence[str]:
    return sorted(described(node) for node in graph.graph.nodes)


def _computing(graph: HasGraph) -> Sequence[str]:
    """Without operands: a pass may put other pieces of the same values in."""
    ops = [node for node in graph.graph.nodes if node.op == "call_function" and not is_collective(node)]
    return sorted(f"%{node.name} = {node.target}" for node in ops if node.target not in _MOVING)


def _collectives(graph: HasGraph) -> Sequence[str]:
    """In place or not is all the same."""
    starts = [node for node in graph.graph.nodes if is_start(node)]
    return [f"{str(node.target).replace('_.default', '.default')} in {group_of(node)}" for node in starts]


def _unmarked(graph: HasGraph) -> Sequence[str]:
    starts = [node for node in graph.graph.nodes if is_start(node) and "marked" not in node.meta]
    return [f"{node.target} in {group_of(node)}" for node in starts]


OPS: Kept[Any] = Kept("all nodes and their operands", _ops)
COMPUTING: Kept[Any] = Kept("the ops that neither move data nor communicate", _computing)
UNMARKED: Kept[Any] = Kept("the collectives that move no rows of experts, in their order", _unmarked)
COLLECTIVES: Kept[Any] = Kept("the collectives, in their order", _collectives)
