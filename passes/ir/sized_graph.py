"""Graphs whose sizes are symbols, and what they are for values of these: the same nodes, with numbers for symbols."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from msgspec import Struct, structs
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from passes.ir.joint import JointGraph
from passes.ir.torch_compat import fake_mode_of, lazy_module
from passes.ir.torch_dispatch import copied_node
from passes.ir.torch_sizes import (
    SYMBOLIC,
    Evaluation,
    Look,
    SizeSymbols,
    evaluation,
    expression_of,
    fakes_of,
    fixed,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """In the place of a number: which one of all that depend on sizes."""

    index: int


class Numbers:
    """All numbers of some graphs that depend on sizes, each once."""

    def __init__(self, symbols: SizeSymbols) -> None:
        self.symbols = symbols
        self._places: dict[Any, Place] = {}

    def place(self, number: Any) -> Any:
        """Itself, if it depends on no size."""
        if not isinstance(number, SYMBOLIC):
            return number
        return self._places.setdefault(expression_of(number), Place(len(self._places)))

    def placed(self, argument: Any) -> Any:
        """An op's arguments, nodes in them included."""
        return map_aggregate(argument, self.place)

    def look(self, value: Tensor) -> Any:
        """How a tensor looks, its `Look` with places in it."""
        every = lambda numbers: tuple(map(self.place, numbers))
        offset = self.place(value.storage_offset())
        return (
            every(value.shape),
            every(value.stride()),
            offset,
            value.dtype,
            value.device,
            value.requires_grad,
        )

    def codes(self) -> list[str]:
        return [self.symbols.code(expression) for expression in self._places]

    def holds(self) -> list[str]:
        return [self.symbols.code(expression) for expression in self.symbols.known()]

    def evaluation(self, count: int, holds: Sequence[str] | None = None) -> Evaluation:
        """holds: what must hold of the sizes; None: what was asked of them here."""
        return evaluation(count, self.holds() if holds is None else holds, self.codes())


def take_numbers(graph: fx.Graph, sizes: Sequence[Any] = ()) -> list[Any]:
    """`sizes` and the numbers in symbols among a graph's arguments: they become placeholders behind those there are."""
    taken: dict[Any, tuple[Any, fx.Node]] = {}
    ends = graph.find_nodes(op="placeholder")
    first = next(node for node in graph.nodes if node.op != "placeholder")

    def input_of(argument: Any) -> Any:
        if not isinstance(argument, SYMBOLIC):
            return argument
        key = expression_of(argument)
        if key not in taken:
            with graph.inserting_before(first):
                taken[key] = argument, graph.placeholder(f"number_{len(taken)}")
        return taken[key][1]

    for size in sizes:
        input_of(size)
    for node in list(graph.nodes):
        if node.op == "call_function":
            args, kwargs = map_aggregate((node.args, node.kwargs), input_of)
            if (args, kwargs) != (node.args, node.kwargs):
                node.args, node.kwargs = args, kwargs
    assert graph.find_nodes(op="placeholder")[: len(ends)] == ends
    return [number for number, _ in taken.values()]


def filled(argument: Any, numbers: Sequence[Any]) -> Any:
    """`argument` with the numbers in their places."""
    if isinstance(argument, Place):
        return numbers[argument.index]
    if isinstance(argument, (tuple, list)):
        return type(argument)([filled(item, numbers) for item in argument])
    if isinstance(argument, dict):
        return {key: filled(item, numbers) for key, item in argument.items()}
    return argument


@dataclass(frozen=True)
class _Looked:
    look: Any


class Sized(Generic[T]):
    """What holds numbers, or tensors, in dataclasses and sequences; for some sizes tensors are without values."""

    def __init__(self, value: T, numbers: Numbers) -> None:
        def placed(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return numbers.place(leaf)
            look = numbers.look(leaf)
            sized = any(isinstance(number, Place) for number in (*look[0], *look[1]))
            return _Looked(look) if sized else _on_meta(look)

        self._value = mapped(value, placed)

    def at(self, numbers: Sequence[Any]) -> T:
        def number_of(leaf: Any) -> Any:
            return (
                _on_meta(filled(leaf.look, numbers)) if isinstance(leaf, _Looked) else filled(leaf, numbers)
            )

        return mapped(self._value, number_of)


def _on_meta(look: Any) -> Tensor:
    return torch.empty_strided(look[0], look[1], dtype=look[3], device="meta")


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """With other leaves of sequences, dataclasses and structs; itself where they are the same."""
    if isinstance(value, (tuple, list)):
        kind = tuple if isinstance(value, tuple) else list
        new = kind(mapped(one, change) for one in value)
        return value if all(map(operator.is_, new, value)) else new
    replaced: Any = replace
    if isinstance(value, Struct):
        names, replaced = value.__struct_fields__, structs.replace
    elif is_dataclass(value) and not isinstance(value, (type, Place, _Looked)):
        names = [field.name for field in fields(value)]
    else:
        return change(value)
    held = {name: getattr(value, name) for name in names}
    new = {name: mapped(one, change) for name, one in held.items()}
    return value if all(new[name] is one for name, one in held.items()) else replaced(value, **new)


class Looks:
    """Fakes of one mode, one for each look. symbols: in which the numbers may be."""

    def __init__(
        self, looks: Iterable[Any], numbers: Sequence[Any], symbols: SizeSymbols | None = None
    ) -> None:
        found: dict[Any, Look] = {look: filled(look, numbers) for look in looks}
        distinct = list(dict.fromkeys(found.values()))
        fakes = dict(zip(distinct, fakes_of(distinct, symbols), strict=True))
        self.fakes = {look: fakes[one] for look, one in found.items()}


def with_fixed_sizes(joint: JointGraph) -> JointGraph:
    """`joint`, in place, with plain numbers for sizes of which tracing has found that the model fixes them."""
    found: dict[int, Tensor] = {}

    def value_of(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in found:
            return found.get(id(value), value)
        sizes, strides = value.shape, value.stride()
        shape, stride, offset = [*map(fixed, sizes)], [*map(fixed, strides)], fixed(value.storage_offset())
        kept = zip((*sizes, *strides), (*shape, *stride), strict=True)
        if all(type(one) is type(other) for one, other in kept):
            return found.setdefault(id(value), value)
        with fake_mode_of(value), torch.no_grad():
            like = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
            like = like.as_strided(shape, stride, offset) if type(offset) is not int or offset else like
        return found.setdefault(id(value), like.requires_grad_(value.requires_grad))

    for node in joint.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), fixed)
        if "val" in node.meta:
            node.meta["val"] = map_aggregate(node.meta["val"], value_of)
    return joint


class SizedModule:
    """One graph to be evaluated. numbers: takes those that it holds."""

    def __init__(self, module: fx.GraphModule, numbers: Numbers) -> None:
        self._module = module
        self._arguments: dict[fx.Node, Any] = {}
        self._values: dict[fx.Node, Any] = {}
        looks: dict[int, Any] = {}
        for node in module.graph.nodes:
            given = node.args, node.kwargs
            if (placed := numbers.placed(given)) != given:
                self._arguments[node] = placed
            if "val" in node.meta:
                self._values[node] = map_aggregate(node.meta["val"], lambda v: _looked(v, looks, numbers))
        self.looks = list(dict.fromkeys(looks.values()))

    def at(self, numbers: Sequence[Any], looks: Looks, name: str = "GraphModule") -> fx.GraphModule:
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        fake_of = lambda value: looks.fakes[value.look] if isinstance(value, _Looked) else value
        for node in self._module.graph.nodes:
            copy = new[node] = copied_node(graph, node, new.__getitem__)
            if node in self._arguments:
                args, kwargs = fx.map_arg(self._arguments[node], new.__getitem__)
                copy.args, copy.kwargs = filled(tuple(args), numbers), filled(dict(kwargs), numbers)
            if node in self._values:
                copy.meta["val"] = map_aggregate(self._values[node], fake_of)
        return lazy_module(graph, name)


def _looked(value: Any, looks: dict[int, Any], numbers: Numbers) -> Any:
    if not isinstance(value, Tensor):
        return value
    if id(value) not in looks:
        looks[id(value)] = numbers.look(value)
    return _Looked(looks[id(value)])


class SizedJoint:
    """A joint graph of symbolic sizes."""

    def __init__(self, symbols: SizeSymbols, count: int, joint: JointGraph) -> None:
        numbers = Numbers(symbols)
        self.joint = joint
        self._module = SizedModule(joint.module, numbers)
        self._evaluate = numbers.evaluation(count)

    def at(self, sizes: Sequence[int], symbols: SizeSymbols | None = None) -> JointGraph | None:
        """None for sizes of which something does not hold that the graph was made under. symbols: in which the graph
        then is; the first are of these sizes."""
        given: Sequence[Any] = sizes if symbols is None else symbols.sizes[: len(sizes)]
        numbers = self._evaluate(given)
        if numbers is None:
            return None
        looks = Looks(self._module.looks, numbers, symbols)
        module = self._module.at(numbers, looks, "JointGraph")
        own = self.joint
        return JointGraph(module, own.inputs, own.outputs, own.constants, own.device, routing=own.routing)


def alike(one: JointGraph, two: JointGraph) -> bool:
    """Whether two graphs are the same, node by node: names, ops, arguments, and how values look."""
    if (one.inputs, one.outputs, one.device) != (two.inputs, two.outputs, two.device):
        return False
    constants = zip(one.constants.items(), two.constants.items(), strict=False)
    if len(one.constants) != len(two.constants) or not all(
        a == b and x.dtype == y.dtype and torch.equal(x, y) for (a, x), (b, y) in constants
    ):
        return False
    return same_nodes(one.graph, two.graph)


def same_nodes(one: fx.Graph, two: fx.Graph) -> bool:
    return len(one.nodes) == len(two.nodes) and all(
        _node_text(a) == _node_text(b) for a, b in zip(one.nodes, two.nodes, strict=True)
    )


def _node_text(node: fx.Node) -> str:
    value = map_aggregate(node.meta.get("val"), _shown)
    said = {key: node.meta[key] for key in sorted(node.meta) if key != "val"}
    return f"{node.name} {node.op} {node.target} {node.args!r} {node.kwargs!r} {value} {said}"


def _shown(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    steps = [
        step if size != 1 else 0 for size, step in zip(value.shape, value.stride(), strict=True)
    ]  # none is taken
    return str((tuple(value.shape), steps, value.storage_offset(), value.dtype, value.requires_grad))
