"""Objects that take the place of a number or a container while a forward is traced, and tell of their uses.

Numbers that a forward reads out of tensors and only keeps, `self.log.append(loss.item())`, `return y, loss.item()`, are
known after the call. While it is traced, an `Awaited` is in the place of each, which can be stored and returned. In the
structure of what a call leaves it is a leaf, `Number`: an output of the program, read when the call has run.

Counters and logs are attributes that a forward changes at every call and never looks at:

    self.calls += 1            # a number that only grows
    self.losses.append(loss)   # a list that is only appended to

A program would be made again at every call, since what the forward read has changed. So the forward is traced once
more with a `Counted` or a `Stored` in those places, which are no numbers and no lists: they can be added and appended
to, and note any other use.

`AwaitedCount` is a number of rows that is not known before the call has run, and that a forward computes with and cuts
by, `rows[start : start + counts[i]]`.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_BOTH = "bool eq ne lt le gt ge mul rmul str format hash iter len getitem contains reversed"
NUMBERS = (
    f"{_BOTH} add radd sub rsub int float complex index truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos "
    "abs round divmod rdivmod trunc floor ceil"
)
CONTAINERS = f"{_BOTH} add radd delitem iadd or ior"
"""Special methods, which Python looks up on the class."""


def note_uses(kind: type, names: str) -> None:
    """Give `kind` the special methods that it has not, each as a call of its `_looked(method, *args)`."""
    for name in names.split():
        method = f"__{name}__"
        if method not in vars(kind):
            setattr(kind, method, _noted(method))


def _noted(method: str) -> Any:
    return lambda self, *args: self._looked(method, *args)


@dataclass(frozen=True)
class Number:
    """The number in the tensor at `index` of the flat list; lists of them, of a tensor with dims."""

    index: int


class Awaited:
    """In place of `value.tolist()`. look: the error for a use of it, by the name of a special method."""

    __slots__ = ("_look", "value")

    def __init__(self, value: Tensor, look: Callable[[str], Any]) -> None:
        self.value, self._look = widest(value), look

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """For `isinstance`."""
        return self._kind

    @property
    def _kind(self) -> type:
        if self.value.dim():
            return list
        if self.value.is_floating_point():
            return float
        return complex if self.value.is_complex() else bool if self.value.dtype == torch.bool else int

    def __deepcopy__(self, memo: dict[int, Any]) -> Awaited:
        return self

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._kind, name):
            raise AttributeError(f"{self._kind.__name__!r} object has no attribute {name!r}")
        raise self._look(name)

    def _looked(self, method: str, *args: Any) -> Any:
        found = self._look(method)
        if isinstance(found, str):
            return found
        raise found

    def _is(self, comparison: Callable[[Any, Any], Any], other: Any) -> bool:
        """A branch on one number, by another."""
        if self.value.dim() or not isinstance(other, (bool, int, float)):
            raise self._look(comparison.__name__)
        return bool(comparison(self.value, other.value if isinstance(other, Awaited) else other))

    def __bool__(self) -> bool:
        return self._is(operator.ne, 0)


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def _compared(kind: type) -> None:
    """Give `kind` comparisons as calls of its `_is`."""
    for name in _COMPARISONS:
        setattr(kind, f"__{name}__", partialmethod(kind._is, getattr(operator, name)))  # type: ignore[attr-defined]


_compared(Awaited)
note_uses(Awaited, f"{NUMBERS} {CONTAINERS} repr")


def widest(value: Tensor) -> Tensor:
    """With the precision of Python's numbers."""
    if value.is_floating_point() or value.is_complex():
        return value.to(torch.complex128 if value.is_complex() else torch.float64)
    return value if value.dtype == torch.bool else value.to(torch.int64)


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


Terms = frozenset[tuple[Any, int]]


class AwaitedCount(Awaited):
    """A number of rows, `counts.tolist()[i]`. some: whether one is not 0. terms: of what it is the sum, with `more`;
    equal for equal numbers, as far as is known."""

    __slots__ = ("more", "some", "terms")

    def __init__(
        self,
        value: Tensor,
        look: Callable[[str], Any],
        some: Callable[[Tensor], bool],
        terms: Terms | None = None,
        more: int = 0,
    ) -> None:
        super().__init__(value, look)
        self.some, self.more = some, more
        self.terms: Terms = frozenset({(object(), 1)}) if terms is None else terms

    def _plus(self, other: Any, sign: int, method: str) -> AwaitedCount:
        if type(other) not in (AwaitedCount, int):
            raise self._look(method)
        terms, more = (other.terms, other.more) if type(other) is AwaitedCount else ((), other)
        summed = dict(self.terms)
        for one, factor in terms:
            summed[one] = summed.get(one, 0) + sign * factor
        left = frozenset((one, factor) for one, factor in summed.items() if factor)
        value = self.value + sign * number_in(other)
        return AwaitedCount(value, self._look, self.some, left, self.more + sign * more)

    def __add__(self, other: Any) -> AwaitedCount:
        return self._plus(other, 1, "__add__")

    __radd__ = __iadd__ = __add__

    def __sub__(self, other: Any) -> AwaitedCount:
        return self._plus(other, -1, "__sub__")

    def _is(self, comparison: Callable[[Any, Any], Any], other: Any) -> bool:
        """Where none is told from any, `some` says which it is; all else is a branch like others."""
        if type(other) not in (AwaitedCount, int):
            raise self._look(comparison.__name__)
        none, one, many = (comparison(n, 0 if type(other) is AwaitedCount else other) for n in (0, 1, 2))
        is_equality = comparison in (operator.eq, operator.ne)
        if none != one == many and (type(other) is int or is_equality):
            return self.some(self.value - other.value if type(other) is AwaitedCount else self.value) == one
        return bool(comparison(self.value, number_in(other)))


class AwaitedCounts(Awaited):
    """A list of numbers of rows, `counts.tolist()`, or an array."""

    __slots__ = ("numbers", "some")

    def __init__(
        self,
        value: Tensor,
        look: Callable[[str], Any],
        some: Callable[[Tensor], bool],
        numbers: Sequence[AwaitedCount] | None = None,
    ) -> None:
        super().__init__(value, look)
        self.some = some
        self.numbers = numbers or [AwaitedCount(one, look, some) for one in self.value.unbind(0)]

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[AwaitedCount]:
        return iter(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return self.numbers[index]

    def __getattr__(self, name: str) -> Any:
        if hasattr(np.ndarray, name) and not name.startswith("__"):
            raise self._look(name)
        return super().__getattr__(name)

    def tolist(self) -> AwaitedCounts:
        return self

    def sum(self, **options: Any) -> AwaitedCount:
        return sum(self.numbers, 0)  # type: ignore[return-value]

    def cumsum(self, axis: Any = None, **options: Any) -> AwaitedCounts:
        return AwaitedCounts(self.value.cumsum(0), self._look, self.some, [*accumulate(self.numbers)])


def number_in(value: Any) -> Any:
    """As tensors compute with it."""
    return value.value if type(value) is AwaitedCount else value


_compared(AwaitedCount)
