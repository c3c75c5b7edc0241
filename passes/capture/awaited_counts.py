"""Numbers of rows that are not known before the call has run, and that a forward computes with and cuts by.

counts = torch.bincount(ids).tolist()
rows[start : start + counts[i]]        # passes.capture.row_parts
if counts[i] == 0: continue            # taken to be some
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partialmethod
from typing import Any

from torch import Tensor

from passes.capture.stand_ins import Awaited

Terms = frozenset[tuple[Any, int]]


class AwaitedCount(Awaited):
    """A number of rows, `counts.tolist()[i]`. some: whether one is not 0. terms: of what it is the sum, with `more`;
    equal for equal numbers, as far as is known."""

    __slots__ = ("more", "some", "terms")

    def __init__(
        self,
        value: Tensor,
        look: Callable[[str], Exception],
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

    __radd__ = __add__

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

    def __bool__(self) -> bool:
        return self._is(operator.ne, 0)


class AwaitedCounts(Awaited):
    """A list of numbers of rows, `counts.tolist()`."""

    __slots__ = ("numbers",)

    def __init__(
        self, value: Tensor, look: Callable[[str], Exception], some: Callable[[Tensor], bool]
    ) -> None:
        super().__init__(value, look)
        self.numbers = [AwaitedCount(one, look, some) for one in self.value.unbind(0)]

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[AwaitedCount]:
        return iter(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return self.numbers[index]


def number_in(value: Any) -> Any:
    """As tensors compute with it."""
    return value.value if type(value) is AwaitedCount else value


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(AwaitedCount, f"__{_name}__", partialmethod(AwaitedCount._is, getattr(operator, _name)))
