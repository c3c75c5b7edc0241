"""As many rows as values say, `z[keep]`, as all the rows and a mask of those that count.

    F.cross_entropy(z[keep], y[keep])      h[mask] = token      i, j = torch.where(routed == e)

A trace has one shape for every call. So `z[keep]` stays in place: all of z, and `keep`. What computes row by row does
so on all of them; a sum, a mean or a loss leaves out those that do not count; what is written back goes where it came
from. The rows that do not count hold 1 (0 for integers), after each op anew, so that none of their values, and no
gradient through them, which may be infinite, reaches anything. What is not known of rows (`passes.capture.row_table`)
wants their number (`passes.capture.row_values`), and is an error at the user's line where values that are computed say
it.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.ir.torch_dispatch import replaced_attribute
from passes.ir.torch_dtensor import bare_tensor

_FRONT = "front"
"""Begins the key of a choice of rows that come first."""
_REMEDY = "compute on all rows, leave out the others by torch.where(mask, value, 0), and divide by mask.sum()"


class RowsUnknown(Exception):
    """What is done with rows is not known. place: the user's line, where it is not the one that runs."""

    def __init__(self, what: str, remedy: str = _REMEDY, place: str | None = None) -> None:
        super().__init__(what)
        self.what, self.remedy, self.place = what, remedy, place


class LengthAsked(BaseException):
    """Python's own `len` was asked for the number of rows before there were any, or by code in C, for which `error`
    is: the trace begins again under `rows_have_lengths`."""

    def __init__(self, error: RowsUnknown) -> None:
        super().__init__(error.what)
        self.error = error


@dataclass(frozen=True, eq=False)
class Choice:
    """valid: [n], which rows there are, in this order. key: equal for the same rows. shape: of the mask that chose
    them. made: the user's line that did. answer: what torch's functions do with such rows. whole: of which they are a
    part, if not of all rows. found: the places of those there, once they have been counted."""

    valid: Tensor
    key: Hashable
    shape: tuple[int, ...]
    made: str
    answer: Callable[..., Any]
    whole: Choice | None = None
    found: list[Tensor] = field(default_factory=list)

    def rows(
        self, padded: Tensor, places: Tensor | None = None, at: int = 0, base: Rows | None = None
    ) -> Rows:
        """[n, *any], of which these are there; a view of `base`, or in memory of their own."""
        rows = bare_tensor(Rows, padded)
        rows.padded, rows.choice = filled(padded, self.valid) if base is None else padded, self
        rows.places, rows.is_aliased, rows.at, rows.is_pair = places, False, at, False
        rows.counted, rows.copies, rows.root, rows.base, rows.grouped = None, [], None, None, None
        if base is not None:
            rows.base = base.base = base if base.base is None else base.base
            rows.copies, rows.is_aliased = base.copies, base.is_aliased
        return rows

    @cached_property
    def order(self) -> Tensor:
        """[n]: in front, in their order, the places of those that are there."""
        last = self.valid.numel() - 1
        return torch.where(self.valid, torch.arange(last + 1), last).sort()[0]

    @cached_property
    def in_front(self) -> Choice:
        """The same rows, one after another: those of `in_front(rows)`."""
        count, key = self.valid.numel(), front_key(self)
        if key == self.key:
            return self
        valid = torch.arange(count) < self.valid.sum()
        return replace(self, valid=valid, key=key, shape=(count,), whole=None, found=[])


class Rows(Tensor):
    """padded: [n, *any]. at: which dim n is where it is computed with, `x[None, i]` is [1, n, *any]. is_pair: whether
    the last dim is of the same rows, behind that of n. places: its values in all rows, real ones, where they are places
    in a mask.
    base: of which it is a view, as others may be; None: it has none. is_aliased: whether it is not known if another
    shares its memory. counted: as many as there are, which stand for all that is done from then on; copies: of those
    that share its memory, with their versions. root: all rows, of which it is a part in the same memory. grouped: where
    a mask chose rows whole, those whose values these are."""

    padded: Tensor
    choice: Choice
    at: int
    is_pair: bool
    places: Tensor | None
    is_aliased: bool
    counted: Tensor | None
    copies: list[tuple[Tensor, int]]
    root: Tensor | None
    base: Rows | None
    grouped: Rows | None

    @property
    def seen(self) -> Tensor:
        """All rows, as it is computed with."""
        return self.padded.movedim(0, self.at) if self.at else self.padded

    @property
    def back(self) -> int:
        """Which dim the rows are from the end: 1 for the last."""
        return self.padded.ndim - self.at

    @property
    def may_be_shared(self) -> bool:
        """Whether others may have its memory."""
        return self.is_aliased or self.base is not None or self.root is not None

    def follow(self) -> None:
        """Be what the root has become."""
        if self.root is not None and self.copies != [(self.root, self.root._version)]:
            self.padded, self.base = filled(self.root, self.choice.valid), None
            self.copies = [(self.root, self.root._version)]

    def write(self, padded: Tensor) -> None:
        """To all that share its memory."""
        top = self if self.base is None else self.base
        self.places = None
        if self.base is None:
            self.padded = padded
        elif any(copy is not top.root for copy, _ in self.copies):
            raise written_and_read(self.choice)
        else:
            self.padded.copy_(padded)
        if top.root is not None:
            here = top.choice.valid.reshape(-1, *[1] * (top.padded.ndim - 1))
            top.root.copy_(torch.where(here, top.padded, top.root))
            top.copies[:] = [(top.root, top.root._version)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return rows_in((args, kwargs))[0].choice.answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RowsUnknown(f"{func} takes rows that a mask chose")


def rows_have_lengths() -> AbstractContextManager[None]:
    """Inside, `len(rows)` is as many as there are, a tensor, which Python's own cannot return."""
    own = len
    return replaced_attribute(builtins, "len", lambda of: of.size(0) if type(of) is Rows else own(of))


def in_front(rows: Rows) -> Tensor:
    """[n, *any]: those that are there, then others, so that their numbers are their places."""
    choice = rows.choice
    return rows.padded if choice.in_front is choice else rows.padded.index_select(0, choice.order)


def front_key(choice: Choice) -> Hashable:
    """Of `choice.in_front`."""
    key = choice.key
    return key if isinstance(key, tuple) and key[0] == _FRONT else (_FRONT, in_order(key))


def all_places(shape: tuple[int, ...]) -> list[Tensor]:
    """Of the elements of that shape, in order, the index in each dim."""
    below = [[1] * (len(shape) - 1 - d) for d in range(len(shape))]
    return [
        torch.arange(n).reshape(-1, *ones).expand(shape).reshape(-1)
        for n, ones in zip(shape, below, strict=True)
    ]


def rows_in(tree: Any) -> list[Rows]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Rows)]


def check_first(tree: Any, what: str) -> None:
    """RowsUnknown where the rows are another dim than the first, or two."""
    for rows in rows_in(tree):
        if rows.at or rows.is_pair:
            raise unknown(what, rows.choice)


def one_choice(tree: Any) -> Choice:
    """Of all rows in `tree`."""
    choices = [rows.choice for rows in rows_in(tree)]
    if any(in_order(choice.key) != in_order(choices[0].key) for choice in choices):
        raise RowsUnknown(
            "rows of one mask meet those of another", "one mask for both: keep = ...; x[keep], y[keep]"
        )
    return choices[0]


def in_order(key: Hashable) -> Hashable:
    """Of the mask of which it is the key of a view with the same order: the rows are the same."""
    while isinstance(key, tuple) and key[0] in ("view", "reshape", "flatten"):
        key = key[2]
    return key


def filled(padded: Tensor, valid: Tensor, value: float | None = None) -> Tensor:
    """`padded`, with `value` in the rows that are not there; None: one that most functions can be asked for."""
    if value is None:
        value = 1 if padded.is_floating_point() or padded.is_complex() else 0
    mask = valid.reshape(-1, *[1] * (padded.ndim - 1))
    return torch.where(mask, padded, torch.full((), value, dtype=padded.dtype))


def name_of(func: Any) -> str:
    name = func.__name__
    if name == "__get__":
        return func.__self__.__name__
    return name.strip("_") if name.startswith("__") else name


def unknown(name: str, choice: Choice) -> RowsUnknown:
    return RowsUnknown(f"it is not known what {name} makes of the rows chosen at {choice.made}")


def written_and_read(choice: Choice) -> RowsUnknown:
    what = "chosen rows are written, and read where they share memory"
    return RowsUnknown(what, "write to a clone()", choice.made)
