"""Trees: a nest of containers taken apart into its tensors and a hashable description of the rest.

Beyond pytrees, any object that holds tensors is taken apart (a key/value cache, a plain class with
tensor attributes) and built again, so that no model needs to register its types.
"""

from __future__ import annotations

import types
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from passes.capture.stand_ins import Awaited, Number


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
class Nest:
    """A list, a tuple, a named tuple, a plain dict, or a node type that torch's pytree knows. keys: of a dict, and what
    pytree knows of its node, `context`, in a form that has a hash."""

    kind: type
    keys: Any
    children: tuple[Tree, ...]
    context: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Instance:
    """Any other object of a plain class: its attributes (a key/value cache, a config). `number` counts instances, for
    `Again`."""

    kind: type
    number: int
    names: tuple[str, ...]
    children: tuple[Tree, ...]


@dataclass(frozen=True)
class Again:
    """Another reference to the instance `number`."""

    number: int


Tree = TensorLeaf | Number | Static | Nest | Instance | Again

_OPAQUE = (
    type, nn.Module, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
    torch.device, torch.dtype,
)  # fmt: skip
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)


def flatten(value: Any, *, arguments: bool = False) -> tuple[list[Tensor], Tree]:
    """(tensors, tree) of `value`. A tensor that appears twice is one tensor, referred to twice.

    arguments: of a call, where objects without tensors are taken apart as well."""
    flattener = _Flattener(arguments)
    tree = flattener.visit(value)
    return flattener.tensors, tree


def retree(value: Any, tensors: Sequence[Tensor]) -> Tree:
    """The tree of a value that was built from these tensors, so that an unchanged one has the tree it was built by."""
    flattener = _Flattener(arguments=True)
    for tensor in tensors:
        flattener.visit(tensor)
    return flattener.visit(value)


class _Flattener:
    """arguments: an object without tensors is taken apart too: a forward may fill it (an empty cache), and two calls
    with equal ones are alike."""

    def __init__(self, arguments: bool) -> None:
        self.arguments = arguments
        self.tensors: list[Tensor] = []
        self.places: dict[int, int] = {}
        self.instances: dict[int, int] = {}
        self.held: list[Any] = []

    def visit(self, value: Any) -> Tree:
        if isinstance(value, Tensor):
            return self._tensor(value)
        kind = type(value)
        if kind in _PLAIN:
            return Static(value)
        if kind is Awaited:
            return Number(self._tensor(value.value).index)
        if kind is dict:
            return Nest(kind, tuple(value), self._each(value.values()))
        if kind in (tuple, list) or _is_named_tuple(kind):
            return Nest(kind, (), self._each(value))
        if (definition := pytree.SUPPORTED_NODES.get(kind)) is not None:
            items, context = definition.flatten_fn(value)
            return Nest(kind, _freeze(context), self._each(items), context)
        return self._instance(value)

    def _each(self, items: Iterable[Any]) -> tuple[Tree, ...]:
        return tuple(self.visit(item) for item in items)

    def _tensor(self, tensor: Tensor) -> TensorLeaf:
        index = self.places.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        return TensorLeaf(index)

    def _instance(self, value: Any) -> Tree:
        if not _is_open(value):
            return Static(value)
        if id(value) in self.instances:
            return Again(self.instances[id(value)])
        number = self.instances[id(value)] = len(self.held)
        self.held.append(value)  # so that its id stays its own
        children = self._each(vars(value).values())
        tree = Instance(type(value), number, tuple(vars(value)), children)
        if self.arguments or has_tensor(tree):
            return tree
        del self.instances[id(value)]
        return Static(value)


def renumbered(tree: Tree, indices: Mapping[int, int]) -> Tree:
    """`tree` over another flat list. indices: of its tensors, old to new."""
    if isinstance(tree, (TensorLeaf, Number)):
        return replace(tree, index=indices[tree.index])
    if isinstance(tree, (Nest, Instance)):
        return replace(tree, children=tuple(renumbered(child, indices) for child in tree.children))
    return tree


def off_meta(tree: Tree, device: str) -> Tree:
    """`tree`, where it names `meta` (a cache that was allocated there) with that device in its place."""
    if isinstance(tree, Static) and isinstance(tree.value, torch.device) and tree.value.type == "meta":
        return Static(torch.device(device))
    if isinstance(tree, (Nest, Instance)):
        return replace(tree, children=tuple(off_meta(child, device) for child in tree.children))
    return tree


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
            case Number(index):
                return self.tensors[index].tolist()
            case Static(value):
                return value
            case Nest():
                return assembled(tree, [self.build(child) for child in tree.children])
            case Instance():
                made = self.instances[tree.number] = object.__new__(tree.kind)
                for name, child in zip(tree.names, tree.children, strict=True):
                    made.__dict__[name] = self.build(child)
                return made
            case Again(number):
                return self.instances[number]


def assembled(tree: Nest, items: list[Any]) -> Any:
    """The container `tree`, of these items."""
    if tree.kind is dict:
        return dict(zip(tree.keys, items, strict=True))
    if _is_named_tuple(tree.kind):
        return tree.kind(*items)
    if tree.kind in (list, tuple):
        return tree.kind(items)
    return pytree.SUPPORTED_NODES[tree.kind].unflatten_fn(items, tree.context)


def items_of(tree: Nest | Instance, value: Any) -> list[Any]:
    """What `value`, whose structure is `tree`, holds, one for each of its children."""
    if isinstance(tree, Instance):
        return [vars(value)[name] for name in tree.names]
    if tree.kind is dict:
        return [value[key] for key in tree.keys]
    if isinstance(value, tuple) or tree.kind is list:
        return list(value)
    return list(pytree.SUPPORTED_NODES[tree.kind].flatten_fn(value)[0])


Step = tuple[str, Any]
"""From a value to what it holds: ("item", key) or ("attribute", name)."""
Path = tuple[Step, ...]


def passed_on(tree: Tree) -> Iterator[Any]:
    """What a call passes on as it is: the forward gets the user's own object, not one like it."""
    if isinstance(tree, Static):
        yield tree.value
    for child in getattr(tree, "children", ()):
        yield from passed_on(child)


def changed_places(before: Tree, after: Tree, value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Where `value`, which was `before` and is now `after`, has changed: the outermost lists, dicts and objects that
    differ, by the path to them, and each as it is now."""
    if before == after:
        return []
    top = len(path) < 2  # the pair of (args, kwargs), and these two
    if isinstance(before, Nest) and isinstance(after, Nest) and before.kind is after.kind:
        fixed = after.kind is tuple or _is_named_tuple(after.kind)
        if (fixed or top) and len(before.children) == len(after.children):
            found: list[tuple[Path, Any]] = []
            keys = after.keys or range(len(after.children))
            for key, old, new in zip(keys, before.children, after.children, strict=True):
                found += changed_places(old, new, value[key], (*path, ("item", key)))
            return found
    return [(path, value)]


def in_objects(tree: Tree, inside: bool = False) -> set[int]:
    """The tensors that objects hold, somewhere inside."""
    if isinstance(tree, TensorLeaf):
        return {tree.index} if inside else set()
    inside = inside or isinstance(tree, Instance)
    return {index for child in getattr(tree, "children", ()) for index in in_objects(child, inside)}


def has_tensor(tree: Tree) -> bool:
    leaf = isinstance(tree, (TensorLeaf, Number, Again))
    return leaf or any(has_tensor(child) for child in getattr(tree, "children", ()))


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_open(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, _OPAQUE) and _is_plain_class(type(value))


@cache
def _is_plain_class(kind: type) -> bool:
    """Whether all that an object holds is in its `__dict__`: no C code and no slots keep anything beside it."""
    made_plainly = kind.__new__ is object.__new__ or isinstance(kind.__new__, types.FunctionType)
    slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return made_plainly and not slots and not issubclass(kind, (Enum, BaseException, Generator))


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
