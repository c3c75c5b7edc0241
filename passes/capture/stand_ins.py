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
from functools import partialmethod, reduce
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

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

    def _is(self, comparison: Callable[[Any, Any], Any], other: Any) -> Any:
        """A branch on one number, by another; of tensors a tensor."""
        if isinstance(other, Tensor):
            return _beside_tensors(comparison, (self, other), {})
        return bool(comparison(*self._numbers(comparison.__name__, self, other)))

    def _numbers(self, method: str, *operands: Any) -> list[Any]:
        """Of whole numbers and floats, which are computed with as Python does."""
        for operand in operands:
            if not isinstance(operand, (bool, int, float)) or (
                isinstance(operand, Awaited) and operand.value.dim()
            ):
                raise self._look(method)
        return [operand.value.detach() if isinstance(operand, Awaited) else operand for operand in operands]

    def _computed(self, operation: Callable[..., Any], method: str, *operands: Any) -> Any:
        """One number more; of tensors a tensor."""
        if any(isinstance(operand, Tensor) for operand in operands):
            return _beside_tensors(operation, operands, {})
        numbers = self._numbers(method, *operands)
        if operation in (operator.truediv, operator.floordiv, operator.mod) and operands[1] == 0:
            raise ZeroDivisionError("division by zero")
        if operation is operator.pow and not (type(operands[1]) is int and operands[1] >= 0):
            raise self._look(method)  # it may be complex, or a division
        if operation is operator.truediv:
            numbers = [n.double() if isinstance(n, Tensor) else float(n) for n in numbers]
        return Awaited(
            operation(*(+n if isinstance(n, bool) else n for n in map(_whole, numbers))), self._look
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _beside_tensors(func, args, kwargs or {})

    def __bool__(self) -> bool:
        return self._is(operator.ne, 0)


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def _compared(kind: type) -> None:
    """Give `kind` comparisons as calls of its `_is`."""
    for name in _COMPARISONS:
        setattr(kind, f"__{name}__", partialmethod(kind._is, getattr(operator, name)))  # type: ignore[attr-defined]


def _beside_tensors(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A number beside tensors is one of their dtype where it is of the same kind, as torch has it. Arithmetic of 16
    bits takes it in 32, so that the result would have 32 too where no tensor has dims."""
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    awaited = [leaf for leaf in leaves if isinstance(leaf, Awaited)]
    keys = args[1] if func in (Tensor.__getitem__, Tensor.__setitem__) else ()
    is_key = any(isinstance(leaf, Awaited) for leaf in pytree.tree_leaves(keys))
    if is_key or not tensors or any(one.value.dim() for one in awaited):
        raise awaited[0]._look("index" if is_key else "__torch_function__")
    common = torch.empty(1, dtype=reduce(torch.promote_types, [t.dtype for t in tensors]), device="meta")
    is_wide = func.__name__.strip("_") in _WIDE and common.dtype in (torch.bfloat16, torch.float16)

    def beside(number: Awaited) -> Tensor:
        dtype = torch.float32 if is_wide else torch.result_type(common, number._kind(1))
        return number.value.detach().to(dtype)

    args, kwargs = pytree.tree_map_only(Awaited, beside, (args, kwargs))
    try:
        result = func(*args, **kwargs)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise awaited[0]._look(func.__name__) from error  # it takes a number alone
    return result.to(common.dtype) if is_wide and not any(t.dim() for t in tensors) else result


_WIDE = frozenset(
    f"{how}{name}" for how in ("", "r", "i") for name in ["add", "sub", "mul", "div", "truediv", "pow"]
)
"""Of an op with a number: PyTorch's `BinaryOpsKernel.cpp`, `opmath_t`."""


def _whole(number: Any) -> Any:
    return number.to(torch.int64) if isinstance(number, Tensor) and number.dtype == torch.bool else number


def _computing(kind: type) -> None:
    """Give `kind` arithmetic as calls of its `_computed`."""
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs"):
        method, operation = f"__{name}__", getattr(operator, name)
        setattr(kind, method, lambda self, *other, o=operation, m=method: self._computed(o, m, self, *other))
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        method, operation = f"__r{name}__", getattr(operator, name)
        setattr(kind, method, lambda self, other, o=operation, m=method: self._computed(o, m, other, self))


_compared(Awaited)
_computing(Awaited)
note_uses(Awaited, f"{NUMBERS} {CONTAINERS} repr")


AT_COMPUTED = "of the tensor i, x.index_select(0, i).squeeze(0) for x[i], and x[i.reshape(1)] = value"
"""What to do about an index that is computed."""


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

    def _plus(self, other: Any, sign: int, method: str) -> Any:
        if type(other) not in (AwaitedCount, int):
            return self._computed(operator.add if sign > 0 else operator.sub, method, self, other)
        terms, more = (other.terms, other.more) if type(other) is AwaitedCount else ((), other)
        summed = dict(self.terms)
        for one, factor in terms:
            summed[one] = summed.get(one, 0) + sign * factor
        left = frozenset((one, factor) for one, factor in summed.items() if factor)
        value = self.value + sign * number_in(other)
        return AwaitedCount(value, self._look, self.some, left, self.more + sign * more)

    def __add__(self, other: Any) -> Any:
        return self._plus(other, 1, "__add__")

    __radd__ = __iadd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._plus(other, -1, "__sub__")

    def _is(self, comparison: Callable[[Any, Any], Any], other: Any) -> bool:
        """Where none is told from any, `some` says which it is; all else is a branch like others."""
        if type(other) not in (AwaitedCount, int):
            return super()._is(comparison, other)
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
