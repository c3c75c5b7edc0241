"""What a module holds beside parameters and buffers: containers, plain objects and plain tensors, kept as they are."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Contents", "PlainTensor", "contents_of"]

_OPAQUE = frozenset({"torch", "numpy", "autoshard", "passes", "cost_model"}) | sys.stdlib_module_names
"""Packages whose objects are not looked into: a forward changes none of them but through their methods."""
_CONTAINERS = (dict, list, set, deque)


@dataclass(frozen=True)
class PlainTensor:
    """A tensor that is neither parameter nor buffer. name: where the model holds it, "layers.0.table"."""

    name: str
    tensor: Tensor
    before: Tensor | None

    @property
    def changed(self) -> bool:
        return self.before is not None and not _equal(self.tensor.detach(), self.before)

    def restore(self) -> None:
        """In place, so that views of it see the old values too."""
        if self.before is not None:
            with torch.no_grad():
                self.tensor.detach().copy_(self.before)


@dataclass(frozen=True)
class Contents:
    """Copies of everything found, to compare with and to put back."""

    containers: Sequence[tuple[Any, list[Any]]]
    tensors: Sequence[PlainTensor]

    def restore(self) -> list[str]:
        """Put everything back; the names of the plain tensors whose values had changed."""
        for container, items in self.containers:
            if not _identical(_items(container), items):
                _refill(container, items)
        changed = [kept for kept in self.tensors if kept.changed]
        for kept in changed:
            kept.restore()
        return [kept.name for kept in changed]


def contents_of(model: nn.Module) -> Contents:
    """What `model` and its modules hold: containers of any depth, hooks among them, and the attributes of objects."""
    walk = _Walk(model)
    for name, module in model.named_modules():
        walk.run(name, module)
    return Contents(walk.containers, walk.tensors)


class _Walk:
    def __init__(self, model: nn.Module) -> None:
        self.containers: list[tuple[Any, list[Any]]] = []
        self.tensors: list[PlainTensor] = []
        registered = (t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()))
        self._seen = {id(tensor) for tensor in registered}

    def run(self, name: str, module: nn.Module) -> None:
        pending: list[tuple[str, Any, bool]] = [(name, module, True)]
        while pending:
            where, value, into_objects = pending.pop()
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if isinstance(value, Tensor):
                self._tensor(where, value)
            elif isinstance(value, (*_CONTAINERS, tuple)):
                pending += [(at, v, into_objects) for at, v in self._entries(where, value)]
            elif into_objects or isinstance(value, nn.Module):
                # Not into what an object holds in its turn: a trainer leads to loaders and data sets.
                pending += [(at, v, isinstance(value, nn.Module)) for at, v in self._attributes(where, value)]

    def _entries(self, where: str, value: Any) -> Iterable[tuple[str, Any]]:
        if not isinstance(value, tuple):
            self.containers.append((value, _items(value)))
        if isinstance(value, set):
            return []
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [(f"{where}[{key!r}]", entry) for key, entry in pairs if _may_change(entry)]

    def _attributes(self, where: str, value: Any) -> Iterable[tuple[str, Any]]:
        attributes = vars(value)
        self.containers.append((attributes, _items(attributes)))
        prefix = f"{where}." if where else ""
        return [(prefix + str(key), entry) for key, entry in attributes.items() if _may_change(entry)]

    def _tensor(self, where: str, value: Tensor) -> None:
        # Parameters and sparse tensors keep to what `find_slots` says; a value on `meta` cannot change.
        plain = type(value) is Tensor and value.layout == torch.strided and not value.is_meta
        self.tensors.append(PlainTensor(where, value, value.detach().clone() if plain else None))


def _may_change(value: Any) -> bool:
    """Whether there is something in `value` to keep: most of what modules hold are numbers, strings and functions."""
    if isinstance(value, (Tensor, nn.Module, tuple, SimpleNamespace, Namespace, *_CONTAINERS)):
        return True
    if isinstance(value, type) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return type(value).__module__.partition(".")[0] not in _OPAQUE


def _items(container: Any) -> list[Any]:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _identical(now: list[Any], before: list[Any]) -> bool:
    """The same objects in the same order; of a dict, pairs."""
    return len(now) == len(before) and all(_same(a, b) for a, b in zip(now, before, strict=True))


def _same(a: Any, b: Any) -> bool:
    if type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2:
        return (a[0] is b[0] or a[0] == b[0]) and a[1] is b[1]
    return a is b


def _refill(container: Any, items: list[Any]) -> None:
    fill: Callable[[Iterator[Any]], Any]
    fill = container.extend if isinstance(container, (list, deque)) else container.update
    container.clear()
    fill(iter(items))


def _equal(now: Tensor, before: Tensor) -> bool:
    if torch.equal(now, before):
        return True
    floating = now.is_floating_point() or now.is_complex()
    return (
        floating and now.shape == before.shape and torch.allclose(now, before, rtol=0, atol=0, equal_nan=True)
    )
