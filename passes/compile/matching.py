"""Questions about nodes that patterns are made of, and how what replaces them is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from passes.ir.fake_calls import FakeCalls
from passes.ir.op_traits import is_collective
from passes.ir.torch_compat import fake_mode_of

__all__ = ["OpWriter", "called", "drop_unread", "others", "shape_of", "sole_user", "stand_in", "summed"]

aten = torch.ops.aten


def called(node: object, target: Any, count: int = 2) -> tuple[Any, ...]:
    """The arguments of a node that calls `target` with `count` of them and none by name; `count` times None if it
    does not."""
    if isinstance(node, fx.Node) and node.target is target and not node.kwargs and len(node.args) == count:
        return node.args
    return (None,) * count


def shape_of(node: object) -> list[int] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def summed(node: object, target: Any = aten.sum.dim_IntList, *, kept: bool = True) -> tuple[Any, list[int]]:
    """(operand, dims in order) of a reduction over dims that are `kept` or not; (None, []) if it is none."""
    operand, dims, keeps = called(node, target, 3)
    shape = shape_of(operand)
    if shape is None or bool(keeps) is not kept:
        return None, []
    return operand, sorted(dim % len(shape) for dim in dims)


def others(node: fx.Node, target: Any) -> Iterator[tuple[fx.Node, Any]]:
    """Readers of `node` that call the commutative `target`, and what each takes beside it."""
    for user in node.users:
        first, second = called(user, target)
        if first is node or second is node:
            yield user, second if first is node else first


def sole_user(node: object, target: Any) -> fx.Node | None:
    """The one reader of `node`, if it calls `target`."""
    users = list(node.users) if isinstance(node, fx.Node) else []
    return users[0] if len(users) == 1 and users[0].target is target else None


def stand_in(node: fx.Node, other: fx.Node) -> None:
    """`other` is read in the place of `node`; it runs unread if that did."""
    node.replace_all_uses_with(other)
    if node.meta.pop("timed", False):
        other.meta["timed"] = True


def drop_unread(graph: fx.Graph) -> None:
    """Erase what nothing reads any more. Not collectives: other ranks wait in them. Nor what has the meta "timed"."""
    graph.eliminate_dead_code(
        lambda node: node.op != "call_function" or is_collective(node) or "timed" in node.meta
    )


class OpWriter:
    """Writes ops into a graph, each with its value."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._calls = FakeCalls()

    def __call__(self, like: fx.Node, target: Callable[..., Any], *args: Any) -> fx.Node:
        """`target(*args)` where nodes are being inserted, for the same line of the model as `like`."""
        node = self._graph.call_function(target, args)
        node.meta = {key: like.meta[key] for key in ("phase", "module", "source") if key in like.meta}
        node.meta["val"] = self._calls(target, args, {}, fake_mode_of(like.meta["val"]))
        return node
