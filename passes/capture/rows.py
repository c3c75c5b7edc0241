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

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.ir.torch_dtensor import bare_tensor
from passes.ir.torch_tracing import tracing_suspended

_FRONT = "front"
"""Begins the key of a choice of rows that come first."""
_REMEDY = "compute on all rows, leave out the others by torch.where(mask, value, 0), and divide by mask.sum()"


class RowsUnknown(Exception):
    """What is done with rows is not known. place: the user's line, where it is not the one that runs."""

    def __init__(self, what: str, remedy: str = _REMEDY, place: str | None = None) -> None:
        super().__init__(what)
        self.what, self.remedy, self.place = what, remedy, place


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

    def rows(self, padded: Tensor, places: Tensor | None = None, at: int = 0) -> Rows:
        """[n, *any], of which these are there."""
        rows = bare_tensor(Rows, padded)
        rows.padded, rows.choice = filled(padded, self.valid), self
        rows.places, rows.is_aliased, rows.at, rows.is_pair = places, False, at, False
        rows.counted, rows.copies, rows.root = None, [], None
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
    is_aliased: another may share its memory, in a run of the forward. counted: as many as there are, which stand for
    all that is done from then on; copies: of those that share its memory, with their versions. root: all rows, of which
    it is a part in the same memory."""

    padded: Tensor
    choice: Choice
    at: int
    is_pair: bool
    places: Tensor | None
    is_aliased: bool
    counted: Tensor | None
    copies: list[tuple[Tensor, int]]
    root: Tensor | None

    @property
    def seen(self) -> Tensor:
        """All rows, as it is computed with."""
        return self.padded.movedim(0, self.at) if self.at else self.padded

    @property
    def back(self) -> int:
        """Which dim the rows are from the end: 1 for the last."""
        return self.padded.ndim - self.at

    def follow(self) -> None:
        """Be what the root has become."""
        if self.root is not None and self.copies != [(self.root, self.root._version)]:
            self.padded = filled(self.root, self.choice.valid)
            self.copies = [(self.root, self.root._version)]

    def write(self, padded: Tensor) -> None:
        self.padded, self.places = padded, None
        if self.root is not None:
            here = self.choice.valid.reshape(-1, *[1] * (padded.ndim - 1))
            self.root.copy_(torch.where(here, padded, self.root))
            self.copies = [(self.root, self.root._version)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return rows_in((args, kwargs))[0].choice.answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RowsUnknown(f"{func} takes rows that a mask chose")


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


_VIEW_NAMES = """
chunk split narrow select squeeze unsqueeze flatten unflatten reshape permute expand to float double half bfloat16 int
long bool type_as detach contiguous
"""
_VIEWS = frozenset(_VIEW_NAMES.split())
"""Whose results may share memory with their argument."""


def name_of(func: Any) -> str:
    name = func.__name__
    if name == "__get__":
        return func.__self__.__name__
    return name.strip("_") if name.startswith("__") else name


def unknown(name: str, choice: Choice) -> RowsUnknown:
    return RowsUnknown(f"it is not known what {name} makes of the rows chosen at {choice.made}")


def plainly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function of all rows."""
    bare: Any = pytree.tree_map_only(Rows, lambda rows: rows.seen, (args, kwargs))
    return func(*bare[0], **bare[1])


def by_row(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at: int | Callable[[int], int] | None = None
) -> Any:
    """The same of a function that works on each row alone. at: of its results, or ndim -> at; None: that of all its
    rows."""
    rows, is_view = rows_in((args, kwargs)), name_of(func) in _VIEWS
    choice = one_choice(rows)
    first = rows[0]
    if any(one.is_pair or one.back != first.back or (at is None and one.at != first.at) for one in rows):
        raise unknown(name_of(func), choice)
    made = plainly(func, args, kwargs)
    if made is rows[0].padded:
        return rows[0]
    to = at(pytree.tree_leaves(made)[0].ndim) if callable(at) else rows[0].at if at is None else at
    result = pytree.tree_map_only(
        Tensor, lambda seen: choice.rows(seen.movedim(to, 0) if to else seen, at=to), made
    )
    if is_view and rows[0].places is not None and isinstance(result, Rows) and not (to or rows[0].at):
        with tracing_suspended():
            result.places = func(rows[0].places, *args[1:], **kwargs)
    for one in (*rows, *rows_in(result)) if is_view else ():
        one.is_aliased, one.copies = True, rows[0].copies
    return result


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is not rows is broadcast along them."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    rows = rows_in(tensors)
    back = rows[0].back
    for leaf in tensors:
        if isinstance(leaf, Rows):
            fits = leaf.back == back
        else:
            fits = leaf.ndim < back or leaf.shape[-back] == 1
        if not fits:
            shape = f"a tensor of shape {list(leaf.shape)}" if not isinstance(leaf, Rows) else "others"
            raise unknown(f"{name_of(func)} of them and of {shape}", rows[0].choice)
    ndim = max(leaf.padded.ndim if isinstance(leaf, Rows) else leaf.ndim for leaf in tensors)
    return by_row(func, args, kwargs, ndim - back)
