"""Trees: a nest of containers taken apart into its tensors and a hashable description of the rest.

Beyond pytrees, any object that holds tensors is taken apart (a key/value cache, a plain class with
tensor attributes) and built again, so that no model needs to register its types.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["Tree", "flatten", "tensor_paths", "unflatten"]


@dataclass(frozen=True)
class TensorLeaf:
    """The tensor at `index` of the flat list."""

    index: int


@dataclass(frozen=True, eq=False)
class Static:
    """Anything else: kept as it is, compared by type and value (by identity if it has no hash)."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or (_hashable(self.value) and bool(self.value == other.value))

    def __hash__(self) -> int:
        return hash(self.value) if _hashable(self.value) else id(self.value)


@dataclass(frozen=True)
class Sequenced:
    """A list, a tuple or a named tuple."""

    kind: type
    children: tuple[Tree, ...]


@dataclass(frozen=True)
class Mapped:
    """A plain dict."""

    keys: tuple[Any, ...]
    children: tuple[Tree, ...]


@dataclass(frozen=True)
class Registered:
    """A node type that torch's pytree knows."""

    kind: type
    frozen_context: Any
    children: tuple[Tree, ...]
    context: Any = field(compare=False, repr=False)


@dataclass(frozen=True)
class Instance:
    """Any other object with tensors inside: its attributes. `number` counts instances, for `Again`."""

    kind: type
    number: int
    names: tuple[str, ...]
    children: tuple[Tree, ...]


@dataclass(frozen=True)
class Again:
    """Another reference to the instance `number`."""

    number: int


Tree = TensorLeaf | Static | Sequenced | Mapped | Registered | Instance | Again

_OPAQUE = (
    type, nn.Module, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
    torch.device, torch.dtype,
)  # fmt: skip
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)


def flatten(value: Any) -> tuple[list[Tensor], Tree]:
    """(tensors, tree) of `value`. A tensor that appears twice is one tensor, referred to twice."""
    flattener = _Flattener()
    tree = flattener.visit(value)
    return flattener.tensors, tree


class _Flattener:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.places: dict[int, int] = {}
        self.instances: dict[int, int] = {}

    def visit(self, value: Any) -> Tree:
        if isinstance(value, Tensor):
            return self._tensor(value)
        kind = type(value)
        if kind in _PLAIN:
            return Static(value)
        if kind is dict:
            return Mapped(tuple(value), tuple(self.visit(item) for item in value.values()))
        if kind is tuple or kind is list or (isinstance(value, tuple) and hasattr(value, "_fields")):
            return Sequenced(kind, tuple(self.visit(item) for item in value))
        definition = pytree.SUPPORTED_NODES.get(kind)
        if definition is not None:
            items, context = definition.flatten_fn(value)
            return Registered(kind, _freeze(context), tuple(self.visit(item) for item in items), context)
        return self._instance(value)

    def _tensor(self, tensor: Tensor) -> TensorLeaf:
        index = self.places.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        return TensorLeaf(index)

    def _instance(self, value: Any) -> Tree:
        attributes = getattr(value, "__dict__", None)
        if not attributes or isinstance(value, _OPAQUE):
            return Static(value)
        if id(value) in self.instances:
            return Again(self.instances[id(value)])
        found = len(self.tensors)
        number = self.instances[id(value)] = len(self.instances)
        children = tuple(self.visit(item) for item in attributes.values())
        if not any(_has_tensor(child) for child in children) and len(self.tensors) == found:
            return Static(value)
        return Instance(type(value), number, tuple(attributes), children)


def unflatten(tree: Tree, tensors: Sequence[Any]) -> Any:
    """The value whose `flatten` gave `tree`, with these tensors in it; instances are new ones."""
    return _Builder(tensors).build(tree)


class _Builder:
    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = tensors
        self.instances: dict[int, Any] = {}

    def build(self, tree: Tree) -> Any:
        match tree:
            case TensorLeaf(index):
                return self.tensors[index]
            case Static(value):
                return value
            case Mapped(keys, children):
                return {key: self.build(child) for key, child in zip(keys, children, strict=True)}
            case Sequenced(kind, children):
                items = [self.build(child) for child in children]
                return kind(*items) if hasattr(kind, "_fields") else kind(items)
            case Registered():
                items = [self.build(child) for child in tree.children]
                return pytree.SUPPORTED_NODES[tree.kind].unflatten_fn(items, tree.context)
            case Instance():
                made = self.instances[tree.number] = object.__new__(tree.kind)
                for name, child in zip(tree.names, tree.children, strict=True):
                    made.__dict__[name] = self.build(child)
                return made
            case Again(number):
                return self.instances[number]


def tensor_paths(tree: Tree, root: str = "") -> dict[int, str]:
    """Where each tensor first appears: {0: "x", 1: "cache.layers[0].keys"}."""
    paths: dict[int, str] = {}
    for index, path in _paths(tree, root):
        paths.setdefault(index, path)
    return paths


def _paths(tree: Tree, path: str) -> Iterator[tuple[int, str]]:
    if isinstance(tree, TensorLeaf):
        yield tree.index, path
    elif isinstance(tree, (Sequenced, Mapped, Registered, Instance)):
        for step, child in zip(_steps(tree), tree.children, strict=True):
            yield from _paths(child, path + step)


def _steps(tree: Sequenced | Mapped | Registered | Instance) -> list[str]:
    if isinstance(tree, Mapped):
        return [f"[{key!r}]" for key in tree.keys]
    if isinstance(tree, Instance):
        return [f".{name}" for name in tree.names]
    if isinstance(tree, Registered) and isinstance(tree.frozen_context, tuple):
        keys = tree.frozen_context
        if len(keys) == len(tree.children) and all(isinstance(key, str) for key in keys):
            return [f".{key}" for key in keys]
    return [f"[{i}]" for i in range(len(tree.children))]


def _has_tensor(tree: Tree) -> bool:
    if isinstance(tree, (Sequenced, Mapped, Registered, Instance)):
        return any(_has_tensor(child) for child in tree.children)
    return isinstance(tree, TensorLeaf)


def _freeze(context: Any) -> Any:
    """A pytree context in a form that has a hash."""
    if isinstance(context, (list, tuple)):
        return tuple(_freeze(item) for item in context)
    return context if isinstance(context, (str, type(None))) else Static(context)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
