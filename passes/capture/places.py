"""Places outside a call where a forward may leave something: attributes, items of dicts, ends of lists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from passes.capture.contents import kind_of
from passes.capture.trees import Step

__all__ = [
    "Added",
    "Appended",
    "Argument",
    "Attribute",
    "Hooked",
    "Incremented",
    "Item",
    "Place",
    "Root",
    "Via",
]

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""(args, kwargs)"""


@dataclass(frozen=True, eq=False)
class Root:
    """An object that a path starts from. text: how the user would name it ("layers.0", "hook keep")."""

    value: Any
    text: str

    def get(self) -> Any:
        return self.value

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class Via:
    """What `holder` holds under `key`: an attribute, or an item of a dict, list or tuple."""

    holder: Root | Via
    key: Any
    attribute: bool

    def get(self) -> Any:
        held = self.holder.get()
        return getattr(held, self.key) if self.attribute else kind_of(held).__getitem__(held, self.key)

    def __str__(self) -> str:
        step = f".{self.key}" if self.attribute else f"[{self.key!r}]"
        return f"{self.holder}{step}".removeprefix(".")


def _assign(holder: Any, name: str, value: Any) -> None:
    """What was left there is what the holder's class made of it, and a frozen one takes it too."""
    (setattr if isinstance(holder, nn.Module) else object.__setattr__)(holder, name, value)


class Place(ABC):
    """Somewhere that a forward leaves a value at every call."""

    def get(self, call: Call) -> Any:
        """What is there after a call; None where that is no tensor."""
        return None

    @abstractmethod
    def put(self, call: Call, value: Any) -> None:
        """Do with `value` what the forward did."""


@dataclass(frozen=True, eq=False)
class Attribute(Place):
    """`holder.name = value` at every call."""

    holder: Root | Via
    name: str

    def get(self, call: Call) -> Any:
        return getattr(self.holder.get(), self.name)

    def put(self, call: Call, value: Any) -> None:
        _assign(self.holder.get(), self.name, value)


@dataclass(frozen=True, eq=False)
class Item(Place):
    """`holder[key] = value` at every call."""

    holder: Root | Via
    key: Hashable

    def get(self, call: Call) -> Any:
        held = self.holder.get()
        return kind_of(held).__getitem__(held, self.key)

    def put(self, call: Call, value: Any) -> None:
        held = self.holder.get()
        kind_of(held).__setitem__(held, self.key, value)


@dataclass(frozen=True, eq=False)
class Appended(Place):
    """`holder.append(value)` at every call. from_end: of what one call appends, 1 is the last."""

    holder: Root | Via
    from_end: int

    def get(self, call: Call) -> Any:
        held = self.holder.get()
        return kind_of(held).__getitem__(held, -self.from_end)

    def put(self, call: Call, value: Any) -> None:
        held = self.holder.get()
        kind_of(held).append(held, value)


@dataclass(frozen=True, eq=False)
class Added(Place):
    """`holder.add(value)`, for a set, at every call. There is nothing to get: what is hashed is no tensor."""

    holder: Root | Via

    def put(self, call: Call, value: Any) -> None:
        set.add(self.holder.get(), value)


@dataclass(frozen=True, eq=False)
class Hooked(Place):
    """A hook that the forward registered on a module of its own, once."""

    table: Any
    number: int

    def put(self, call: Call, value: Any) -> None:
        self.table[self.number] = value


@dataclass(frozen=True, eq=False)
class Incremented(Place):
    """`holder.name += value` at every call: a counter that the forward does not otherwise read."""

    holder: Root | Via
    name: str

    def put(self, call: Call, value: Any) -> None:
        held = self.holder.get()
        _assign(held, self.name, getattr(held, self.name) + value)


@dataclass(frozen=True, eq=False)
class Argument(Place):
    """A list, dict or object among a call's arguments, which the forward changes: it gets what `value` holds.

    path: steps from (args, kwargs)."""

    path: tuple[Step, ...]

    def get(self, call: Call) -> Any:
        held: Any = call
        for kind, key in self.path:
            held = held[key] if kind == "item" else getattr(held, key)
        return held

    def put(self, call: Call, value: Any) -> None:
        held = self.get(call)
        if isinstance(held, list):
            held[:] = value
            return
        old, new = (held, value) if isinstance(held, dict) else (vars(held), vars(value))
        old.clear()
        old.update(new)
