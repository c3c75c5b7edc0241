"""Counters and logs: attributes that a forward changes at every call and never looks at.

    self.calls += 1            # a number that only grows
    self.losses.append(loss)   # a list that is only appended to

A program would be made again at every call, since what the forward read has changed. So the forward is traced once
more with stand-ins in those places, which are no numbers and no lists: they can be added and appended to, and note any
other use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from passes.capture.places import Appended, Attribute, Incremented, Item, Place, Root, Via
from passes.capture.stand_ins import CONTAINERS, NUMBERS, note_uses

__all__ = ["Counted", "Spot", "Stored", "Uses", "incremented", "put_stand_ins", "write_only_candidates"]

Spot = tuple[nn.Module, str]
"""One attribute of one module."""


@dataclass
class Uses:
    """looked_at: whether any stand-in was used for more than adding or storing."""

    looked_at: bool = False


@dataclass(frozen=True, eq=False)
class Counted:
    """In place of a number. change: what was added to it so far."""

    value: Any
    uses: Uses = field(repr=False)
    change: Any = 0

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            self.uses.looked_at = True
            return self.value + other
        return Counted(self.value + other, self.uses, self.change + other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -other if isinstance(other, (int, float)) else self._looked("__sub__", other)

    def _looked(self, method: str, *args: Any) -> Any:
        self.uses.looked_at = True
        return getattr(self.value, method)(*args)


class Stored:
    """In place of a list, deque or dict, which it fills."""

    def __init__(self, held: Any, uses: Uses) -> None:
        self._held, self._uses = held, uses
        if isinstance(held, (list, deque)):
            self.append, self.extend = held.append, held.extend

    @property
    def held(self) -> Any:
        return self._held

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(self._held, dict):
            self._uses.looked_at = True
        self._held[key] = value

    def __getattr__(self, name: str) -> Any:
        self._uses.looked_at = True
        return getattr(self._held, name)

    def _looked(self, method: str, *args: Any) -> Any:
        self._uses.looked_at = True
        return getattr(self._held, method)(*args)


note_uses(Counted, NUMBERS)
note_uses(Stored, CONTAINERS)


def write_only_candidates(
    writes: Sequence[tuple[Place, Any]], reads: Mapping[nn.Module, set[str]]
) -> list[Spot]:
    """Attributes that were read and changed, numbers by numbers and containers by appending or storing."""
    found: dict[tuple[int, str], Spot] = {}
    for place, value in writes:
        spot = _spot(place, value)
        if spot is not None and spot[1] in reads.get(spot[0], ()):
            found.setdefault((id(spot[0]), spot[1]), spot)
    return list(found.values())


def _spot(place: Place, value: Any) -> Spot | None:
    holder = getattr(place, "holder", None)
    if isinstance(place, Attribute) and isinstance(holder, Root) and isinstance(holder.value, nn.Module):
        old = vars(holder.value).get(place.name)
        numbers = type(old) is type(value) and type(value) in (int, float)
        return (holder.value, place.name) if numbers else None
    if isinstance(place, (Appended, Item)) and isinstance(holder, Via) and isinstance(holder.holder, Root):
        module = holder.holder.value
        return (module, holder.key) if holder.attribute and isinstance(module, nn.Module) else None
    return None


def put_stand_ins(spots: Sequence[Spot], uses: Uses) -> None:
    """Put them in the modules; a `Snapshot` puts back what was there."""
    for module, name in spots:
        held = vars(module)[name]
        vars(module)[name] = Counted(held, uses) if isinstance(held, (int, float)) else Stored(held, uses)


def incremented(place: Attribute, value: Counted) -> tuple[Incremented, Any]:
    return Incremented(place.holder, place.name), value.change
