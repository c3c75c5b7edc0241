"""What can be said of a graph and checked: properties, what a pass keeps, and the error of a pass that breaks one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, Protocol, TypeVar

from torch import fx


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
