"""The few edits that passes make to a graph: emit a node with its value, replace one, erase the dead."""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import fx
from torch.fx.node import map_arg

from passes.ir.fake_calls import FakeCalls
from passes.ir.joint import JointGraph
from passes.ir.torch_compat import fake_mode_of, lazy_module
from passes.ir.torch_dispatch import copied_node

INHERITED = ("phase", "module", "source", "checkpoint", "saved", "runs", "repeats")


def tensor_at(node: fx.Node, position: int = 0) -> fx.Node:
    """The tensor operand that is argument `position`."""
    operand = node.args[position]
    assert isinstance(operand, fx.Node), f"argument {position} of {node.format_node()} is no tensor"
    return operand


def int_at(node: fx.Node, position: int) -> int:
    """The number (a dim, an index) that is argument `position`."""
    return int(cast(int, node.args[position]))


def ints_at(node: fx.Node, position: int) -> list[int]:
    """The list of numbers (dims, sizes) that is argument `position`."""
    return list(cast(Sequence[int], node.args[position]))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Global shape of a node with one result."""
    return tuple(node.meta["val"].shape)


_CALLS: WeakKeyDictionary[fx.Graph, FakeCalls] = WeakKeyDictionary()
"""A graph that is rewritten -> the ops run for it: those of equal layers are run once."""


def inherit(node: fx.Node, origin: fx.Node) -> None:
    """Give `node` the phase, module and source of `origin`."""
    for key in INHERITED:
        if key in origin.meta:
            node.meta[key] = origin.meta[key]


def emit_at(
    point: fx.Node, origin: fx.Node, target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> fx.Node:
    """A new op right before `point`, with the phase, module and source of `origin`.

    Its value is computed under the fake mode of `origin`'s value (a tensor or a tuple of tensors).
    """
    with point.graph.inserting_before(point):
        node = point.graph.call_function(target, tuple(args), kwargs)
    inherit(node, origin)
    calls = _CALLS.setdefault(point.graph, FakeCalls())
    node.meta["val"] = calls(target, args, kwargs, fake_mode_of(origin.meta["val"]))
    return node


def emit(anchor: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """`emit_at` before, and on behalf of, one and the same node."""
    return emit_at(anchor, anchor, target, args, kwargs)


def call_like(node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    """`emit` of `node`'s own op on other arguments."""
    return emit(node, cast(Callable[..., Any], node.target), *args, **kwargs)


def replace(node: fx.Node, new: fx.Node) -> None:
    """Let every reader of `node` read `new`, and erase `node`."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def erase_dead(graph: fx.Graph) -> None:
    """Erase ops that nothing reads. Legal because the graph is functional."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def copy_joint(joint: JointGraph) -> JointGraph:
    """The same graph in new nodes, so that passes can rewrite it.

    Placeholders are renamed after what they are ("layers.0.w.weight" -> layers_0_w_weight), ops
    after their aten op with a number, in graph order: the same model always gets the same names.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    names = iter(joint.inputs)
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            name = _identifier(next(names).name)
            copy = graph.create_node("placeholder", name, name=name)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), new.__getitem__)
            copy = graph.create_node(node.op, node.target, args, kwargs, name=_op_name(node))
        if node.op == "placeholder":
            copy.target = copy.name  # names are made unique; the generated signature prints the target
        copy.meta = dict(node.meta)
        new[node] = copy
    return dataclasses.replace(joint, module=lazy_module(graph, "JointGraph"))


def duplicate_joint(joint: JointGraph) -> JointGraph:
    """The same graph in new nodes of the same names, by which its ops are known: a stage's are those of the call."""
    return dataclasses.replace(joint, module=duplicate_module(joint.module, "JointGraph"))


def duplicate_module(module: fx.GraphModule, name: str = "GraphModule") -> fx.GraphModule:
    """The same nodes once more, of the same names, so that they can be ordered or changed. name: of its class."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        new[node] = copied_node(graph, node, new.__getitem__)
        assert new[node].name == node.name, (new[node], node)
    return lazy_module(graph, name)


def _op_name(node: fx.Node) -> str | None:
    """ "add" for aten.add.Tensor: fx appends a number where it is taken. None: fx chooses."""
    packet = getattr(node.target, "overloadpacket", None)
    return None if packet is None else str(packet.__name__)


def _identifier(name: str) -> str:
    text = re.sub(r"\W+", "_", name).strip("_")
    return f"_{text}" if not text or text[0].isdigit() or keyword.iskeyword(text) else text
