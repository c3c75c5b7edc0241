"""What a forward can reach beside its arguments: attributes, containers, and what functions hold on to."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from passes.capture.places import Root, Via
from passes.capture.provenance import is_user_file

__all__ = [
    "OWN",
    "Container",
    "containers_of",
    "held_by",
    "is_open",
    "is_own",
    "module_attributes",
    "module_hooks",
]

OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has: its tables of parameters, of modules and of hooks, its training flag."""

_DEPTH = 4
_MOST = 20_000
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_CLOSED = (
    nn.Module, Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    functools.partial, torch.device, torch.dtype, torch.Generator, torch.optim.Optimizer,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Container:
    """A list, dict, set or deque, or the attributes of a plain object (`value` is then their dict).

    where: the path to it; for attributes, to the object. of_object: whether it is an object's attributes."""

    where: Root | Via
    value: Any
    of_object: bool = False


def containers_of(model: nn.Module) -> list[Container]:
    """Every container that the model's forward can reach: in attributes of its modules, in plain objects held there
    (a config), in what hooks close over, and in globals that a forward names. Each once."""
    walk = _Walk()
    for name, module in model.named_modules():
        for key, value in module_attributes(module).items():
            walk.visit(Via(Root(module, name), key, True), value, _DEPTH)
        for hook in module_hooks(module):
            walk.function(hook, f"a hook of {name or 'the model'}")
        walk.globals_of(type(module).forward)
    return walk.found


def held_by(where: Root | Via, value: Any) -> list[Container]:
    """The containers in one attribute's `value`, itself included."""
    walk = _Walk()
    walk.visit(where, value, _DEPTH)
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
    if isinstance(value, _CLOSED) or not getattr(value, "__dict__", None):
        return False
    return not type(value).__module__.startswith(("torch.", "autoshard."))


class _Walk:
    def __init__(self) -> None:
        self.found: list[Container] = []
        self._seen: set[int] = set()

    def visit(self, where: Root | Via, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth == 0 or len(self.found) > _MOST:
            return
        if isinstance(value, (list, dict, set, deque)):
            self._seen.add(id(value))
            self.found.append(Container(where, value))
            self._inside(where, value, depth)
        elif isinstance(value, tuple):
            self._inside(where, value, depth)
        elif is_open(value):
            self._seen.add(id(value))
            self.found.append(Container(where, vars(value), of_object=True))
            for key, item in list(vars(value).items()):
                self.visit(Via(where, key, True), item, depth - 1)

    def _inside(self, where: Root | Via, value: Any, depth: int) -> None:
        if isinstance(value, set):
            return
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(pairs):
            if not isinstance(item, (int, float, str, type(None))):
                self.visit(Via(where, key, False), item, depth - 1)

    def function(self, function: Any, text: str) -> None:
        """What a hook holds on to: its closure, its object, the arguments of a partial."""
        if isinstance(function, functools.partial):
            for value in (*function.args, *function.keywords.values()):
                self.visit(Root(value, text), value, _DEPTH)
            self.function(function.func, text)
            return
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, nn.Module):
            self.visit(Root(owner, text), owner, _DEPTH)
        for cell in getattr(function, "__closure__", None) or ():
            try:
                value = cell.cell_contents
            except ValueError:  # a name that was never assigned
                continue
            if not isinstance(value, nn.Module):
                self.visit(Root(value, text), value, _DEPTH)
        self.globals_of(function)

    def globals_of(self, function: Any) -> None:
        """Lists and dicts of the user's file that the function names."""
        code = getattr(function, "__code__", None)
        if code is None or not is_user_file(code.co_filename):
            return
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, (list, dict, set, deque)):
                self.visit(Root(value, f"the global {name}"), value, 1)
