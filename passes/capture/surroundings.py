"""What a forward can reach beside its arguments: attributes, containers, and what functions hold on to."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from passes.capture.places import CACHE, CONTAINERS, Names, Root, Via, cell_of, contents, slots_of
from passes.capture.provenance import is_user_file

OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: its tables of parameters, of modules and of hooks, its training flag."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, CACHE)
_CLOSED = (
    nn.Module, Tensor, type, types.ModuleType, types.BuiltinFunctionType, *_FUNCTIONS,
    torch.device, torch.dtype, torch.Generator, torch.optim.Optimizer,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Container:
    """A list, dict, set or deque, or the attributes of an object (`value` is then their dict, or its `Members`).

    where: the path to it; for attributes, to the object. of_object: whether it is an object's attributes. repeated:
    whether a call does again what the forward does to it, which it does not to names that code binds anew (a
    global, an attribute of a class) and to caches of functions."""

    where: Root | Via
    value: Any
    of_object: bool = False
    repeated: bool = True


def containers_of(model: nn.Module, arguments: Iterable[Any] = ()) -> list[Container]:
    """Every container that the model's forward can reach: in attributes of its modules and of their classes, in plain
    objects held there (a config), in modules that are none of its own, in what hooks close over, in globals that a
    forward and the functions below it name, in `arguments`. Each once."""
    walk = _Walk(model)
    for value in arguments:
        walk.visit(Root(value, f"an argument ({type(value).__name__})"), value)
    for name, module in model.named_modules():
        for key, value in module_attributes(module).items():
            walk.visit(Via(Root(module, name), key, True), value)
        for hook in module_hooks(module):
            walk.function(hook, f"a hook of {name or 'the model'}")
        walk.function(type(module).forward, name or "the model", type(module))
    return walk.found


def held_by(where: Root | Via, value: Any) -> list[Container]:
    """The containers in one attribute's `value`, itself included."""
    walk = _Walk()
    walk.visit(where, value)
    return walk.found


def module_attributes(module: nn.Module) -> dict[str, Any]:
    """What the user's class keeps in `vars(module)`: all that is not every module's own."""
    return {key: value for key, value in vars(module).items() if not is_own(module, key)}


def is_own(module: nn.Module, name: str) -> bool:
    """Whether an attribute is torch's bookkeeping: recurrent layers list their parameters anew in every forward."""
    return name in OWN or (name.startswith("_flat_weight") and issubclass(type(module), nn.RNNBase))


def module_hooks(module: nn.Module) -> Iterator[Any]:
    for table in _HOOKS:
        yield from vars(module)[table].values()


def is_open(value: Any) -> bool:
    """Whether `value` is a plain object, whose attributes count as the model's: no module, tensor, function, or
    object of torch's (a process group, a mesh)."""
    if isinstance(value, _CLOSED) or not (hasattr(value, "__dict__") or slots_of(value)):
        return False
    return not type(value).__module__.startswith(("torch.", "autoshard."))


class _Walk:
    """model: whose modules are looked at by themselves; None: no module or function is looked into."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.found: list[Container] = []
        self._closed = None if model is None else {id(module) for module in model.modules()}
        self._seen: set[int] = set()
        self._named: set[tuple[types.CodeType, type | None]] = set()

    def visit(self, where: Root | Via, value: Any, depth: int = 8) -> None:
        if isinstance(value, weakref.ref):
            value = value()
            where = Root(value, f"{where}()")
        if id(value) in self._seen or depth == 0 or len(self.found) > 20_000:
            return
        if isinstance(value, CONTAINERS):
            self._add(Container(where, value))
            self._inside(where, value, depth)
        elif isinstance(value, tuple):
            self._inside(where, value, depth)
        elif isinstance(value, _FUNCTIONS) and self._closed is not None:
            self.function(value, str(where))
        elif is_open(value) or self._is_hidden(value):
            self._seen.add(id(value))
            self._attributes(where, value, depth)

    def _add(self, container: Container) -> None:
        self._seen.add(id(container.value))
        self.found.append(container)

    def _is_hidden(self, value: Any) -> bool:
        """Whether it is a module that the model holds, but not as a part of its own."""
        return isinstance(value, nn.Module) and self._closed is not None and id(value) not in self._closed

    def _attributes(self, where: Root | Via, value: Any, depth: int) -> None:
        for attributes in (getattr(value, "__dict__", None), slots_of(value)):
            if attributes is not None:
                self._add(Container(where, attributes, of_object=True))
                for key, item in contents(attributes).items():
                    self.visit(Via(where, key, True), item, depth - 1)

    def _inside(self, where: Root | Via, value: Any, depth: int) -> None:
        if isinstance(value, set):
            return
        held = contents(value) if isinstance(value, CONTAINERS) else value
        for key, item in held.items() if isinstance(held, dict) else enumerate(held):
            if not isinstance(item, (int, float, str, type(None))):
                self.visit(Via(where, key, False), item, depth - 1)
            if isinstance(key, weakref.ref):
                self.visit(Root(key, f"a key of {where}"), key, depth - 1)

    def function(self, function: Any, text: str, owner: type | None = None) -> None:
        """What a function holds on to: its closure, its object, the arguments of a partial, and what its code names.

        owner: the class whose method it is."""
        if isinstance(function, functools.partial):
            for value in (*function.args, *function.keywords.values()):
                self.visit(Root(value, text), value)
            self.function(function.func, text)
            return
        if isinstance(function, CACHE):
            if id(function) not in self._seen:
                self._add(Container(Root(function, text), function, repeated=False))
            function = function.__wrapped__
        held = getattr(function, "__self__", None)
        if held is not None and not isinstance(held, nn.Module):
            self.visit(Root(held, text), held)
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is None or not is_user_file(code.co_filename) or (code, owner) in self._named:
            return
        self._named.add((code, owner))
        for cell in function.__closure__ or ():
            self._add(Container(Root(cell, text), cell_of(cell), repeated=False))
            for value in contents(cell_of(cell)).values():
                self.visit(Root(value, text), value)
        self._names(_names_of(code), function.__globals__, text, owner)

    def _names(self, names: frozenset[str], known: dict[str, Any], text: str, owner: type | None) -> None:
        """Values of the user's that code names: globals, and attributes of its class."""
        spaces = {"the global": known} | {
            b.__name__: b for b in getattr(owner, "__mro__", ()) if _is_users(b)
        }
        for space_name, space in spaces.items():
            self.found.append(Container(Root(space, text), Names(space, names), repeated=False))
            for name, value in contents(Names(space, names)).items():
                where = Root(value, f"{space_name} {name}" if space is known else f"{space_name}.{name}")
                method = value.fget if isinstance(value, property) else value
                if isinstance(method, _FUNCTIONS):
                    self.function(method, where.text, None if space is known else owner)
                elif isinstance(value, CONTAINERS) or _is_users(type(value)):
                    self.visit(where, value)


def _names_of(code: types.CodeType) -> frozenset[str]:
    inner = (_names_of(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _is_users(kind: type) -> bool:
    """Whether a class is of a user's or a model library's file. One that was run as text is of no module."""
    if kind.__module__ in ("weakref", "__main__"):
        return True
    known = getattr(sys.modules.get(kind.__module__), "__file__", None)
    made = (
        value.__code__.co_filename for value in vars(kind).values() if isinstance(value, types.FunctionType)
    )
    return is_user_file(known or next(made, "<>"))
