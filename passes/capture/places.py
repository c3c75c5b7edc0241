"""Places outside a call where a forward may leave something: attributes, items of dicts, ends of lists. What containers
hold, read and put back past what their classes do instead (`__getitem__`, `copy`, `clear`)."""

from __future__ import annotations

import types
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

CACHE = type(lru_cache(len))
"""What `functools.lru_cache` makes of a function."""
CONTAINERS = (OrderedDict, dict, list, set, deque)
"""The classes whose methods read and write a container of a class below them."""
_ABSENT = object()


@dataclass(frozen=True, eq=False)
class Members:
    """Attributes of `owner` that are not in its `__dict__`: slots, the contents of a cell. members: their
    descriptors."""

    owner: Any
    members: Mapping[str, Any]

    def get(self, name: str) -> Any:
        try:
            return self.members[name].__get__(self.owner, type(self.owner))
        except (AttributeError, ValueError):  # nothing was assigned
            return _ABSENT

    def put(self, name: str, value: Any) -> None:
        if value is _ABSENT:
            self.members[name].__delete__(self.owner)
        else:
            self.members[name].__set__(self.owner, value)


@dataclass(frozen=True, eq=False)
class Names:
    """Those `members` of a class or of globals that code names, bound now or not."""

    owner: type | dict[str, Any]
    members: frozenset[str]

    def get(self, name: str) -> Any:
        return (vars(self.owner) if isinstance(self.owner, type) else self.owner).get(name, _ABSENT)

    def put(self, name: str, value: Any) -> None:
        put: Any = setattr if isinstance(self.owner, type) else dict.__setitem__
        drop: Any = delattr if isinstance(self.owner, type) else dict.__delitem__
        drop(self.owner, name) if value is _ABSENT else put(self.owner, name, value)


def slots_of(value: Any) -> Members | None:
    """The slots of an object, by the names that they have in its classes; None: it has none."""
    members = _slots(type(value))
    return Members(value, members) if members else None


@lru_cache(maxsize=1024)
def _slots(kind: type) -> Mapping[str, Any]:
    slotted = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return {k: m for names in slotted for k, m in names.items() if isinstance(m, types.MemberDescriptorType)}


def cell_of(cell: types.CellType) -> Members:
    return Members(cell, {"cell_contents": vars(types.CellType)["cell_contents"]})


def contents(value: Any) -> Any:
    """A plain dict or list of what `value` holds: a container's items, an object's members. A cache's misses."""
    if isinstance(value, (Members, Names)):
        found = ((name, value.get(name)) for name in value.members)
        return {name: held for name, held in found if held is not _ABSENT}
    if isinstance(value, CACHE):
        return value.cache_info().misses
    kind = kind_of(value)
    return dict(kind.items(value)) if issubclass(kind, dict) else list(kind.__iter__(value))


def refill(value: Any, old: Any) -> None:
    """What `contents` read in `value` again, unless it is there. References that have died since are left out."""
    new = contents(value)
    if isinstance(value, CACHE):
        if new != old:
            value.cache_clear()
    elif unchanged(new, old):
        return
    elif isinstance(value, (Members, Names)):
        for name in {**new, **old}:
            if new.get(name, _ABSENT) is not old.get(name, _ABSENT):
                value.put(name, old.get(name, _ABSENT))
    else:
        kind: Any = kind_of(value)
        kind.clear(value)
        if isinstance(old, dict):
            for key, item in old.items():
                if not (_is_dead(key) or _is_dead(item)):
                    kind.__setitem__(value, key, item)
        else:
            alive = [item for item in old if not _is_dead(item)] if issubclass(kind, set) else old
            (kind.update if issubclass(kind, set) else kind.extend)(value, alive)


def kind_of(value: Any) -> Any:
    """The class whose methods read and write `value` as it is."""
    return next((kind for kind in CONTAINERS if isinstance(value, kind)), type(value))


def unchanged(new: Any, old: Any) -> bool:
    """Whether two times of `contents` are the same objects."""
    if isinstance(old, dict):
        return _identical(new, old) and _identical(new.values(), old.values())
    return new == old if isinstance(old, int) else _identical(new, old)


def _identical(new: Iterable[Any], old: Iterable[Any]) -> bool:
    new, old = list(new), list(old)
    return len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))


def _is_dead(value: Any) -> bool:
    return isinstance(value, weakref.ref) and value() is None


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

    def put(self, value: Any) -> None:
        """What was left there is what the holder's class made of it, and a frozen one takes it too."""
        held = self.holder.get()
        if not self.attribute:
            kind_of(held).__setitem__(held, self.key, value)
        elif isinstance(held, nn.Module):
            setattr(held, self.key, value)
        else:
            object.__setattr__(held, self.key, value)

    def __str__(self) -> str:
        step = f".{self.key}" if self.attribute else f"[{self.key!r}]"
        return f"{self.holder}{step}".removeprefix(".")


class Place(ABC):
    """Somewhere that a forward leaves a value at every call."""

    def get(self, call: Call) -> Any:
        """What is there after a call; None where that is no tensor."""
        return None

    @abstractmethod
    def put(self, call: Call, value: Any) -> None:
        """Do with `value` what the forward did."""


@dataclass(frozen=True, eq=False)
class Assigned(Place):
    """`holder.name = value`, or `holder[key] = value`, at every call."""

    at: Via

    def get(self, call: Call) -> Any:
        return self.at.get()

    def put(self, call: Call, value: Any) -> None:
        self.at.put(value)


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

    at: Via

    def put(self, call: Call, value: Any) -> None:
        self.at.put(self.at.get() + value)
