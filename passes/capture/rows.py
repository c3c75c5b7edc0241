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

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.capture.provenance import user_place
from passes.capture.stand_ins import AwaitedCount, number_in
from passes.ir.torch_dtensor import bare_tensor
from passes.ir.torch_tracing import tracing_suspended

_REMEDY = "compute on all rows, leave out the others by torch.where(mask, value, 0), and divide by mask.sum()"


class RowsUnknown(Exception):
    """What is done with rows is not known. place: the user's line, where it is not the one that runs."""

    def __init__(self, what: str, remedy: str = _REMEDY, place: str | None = None) -> None:
        super().__init__(what)
        self.what, self.remedy, self.place = what, remedy, place


@dataclass(frozen=True, eq=False)
class Choice:
    """valid: [n], which rows there are, in this order. key: equal for the same rows. shape: of the mask that chose
    them. made: the user's line that did. answer: what torch's functions do with such rows. found: the places of those
    there, once they have been counted."""

    valid: Tensor
    key: Hashable
    shape: tuple[int, ...]
    made: str
    answer: Callable[..., Any]
    found: list[Tensor] = field(default_factory=list)

    def rows(self, padded: Tensor, places: Tensor | None = None) -> Rows:
        """[n, *any], of which these are there."""
        rows = bare_tensor(Rows, padded)
        rows.padded, rows.choice = filled(padded, self.valid), self
        rows.places, rows.is_aliased, rows.ones = places, False, 0
        rows.counted, rows.copies = None, []
        return rows


class Rows(Tensor):
    """padded: [n, *any]. ones: dims of one in front of the rows, `x[None, i]`. places: its values in all rows, real
    ones, where they are places in a mask.
    is_aliased: another may share its memory, in a run of the forward. counted: as many as there are, which stand for
    all that is done from then on; copies: of those that share its memory, with their versions."""

    padded: Tensor
    choice: Choice
    ones: int
    places: Tensor | None
    is_aliased: bool
    counted: Tensor | None
    copies: list[tuple[Tensor, int]]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return rows_in((args, kwargs))[0].choice.answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RowsUnknown(f"{func} takes rows that a mask chose")


def all_places(shape: tuple[int, ...]) -> list[Tensor]:
    """Of the elements of that shape, in order, the index in each dim."""
    below = [[1] * (len(shape) - 1 - d) for d in range(len(shape))]
    return [
        torch.arange(n).reshape(-1, *ones).expand(shape).reshape(-1)
        for n, ones in zip(shape, below, strict=True)
    ]


def rows_in(tree: Any) -> list[Rows]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Rows)]


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
chunk split narrow select squeeze unsqueeze flatten reshape to float double half bfloat16 int long bool type_as detach
contiguous
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
    whole = lambda rows: rows.padded[(None,) * rows.ones] if rows.ones else rows.padded
    bare: Any = pytree.tree_map_only(Rows, whole, (args, kwargs))
    return func(*bare[0], **bare[1])


def by_row(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same of a function that works on each row alone."""
    rows, is_view = rows_in((args, kwargs)), name_of(func) in _VIEWS
    choice = one_choice(rows)
    made = plainly(func, args, kwargs)
    if made is rows[0].padded:
        return rows[0]
    result = pytree.tree_map_only(Tensor, choice.rows, made)
    if is_view and rows[0].places is not None and isinstance(result, Rows):
        with tracing_suspended():
            result.places = func(rows[0].places, *args[1:], **kwargs)
    for one in (*rows, *rows_in(result)) if is_view else ():
        one.is_aliased, one.copies = True, rows[0].copies
    return result


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is not rows is broadcast along them."""
    rows = rows_in((args, kwargs))
    ndim = rows[0].padded.ndim
    for leaf in pytree.tree_leaves((args, kwargs)):
        if not isinstance(leaf, Tensor):
            continue
        if isinstance(leaf, Rows):
            fits = leaf.padded.ndim == ndim
        else:
            fits = leaf.ndim < ndim or (leaf.ndim == ndim and leaf.shape[0] == 1)
        if not fits:
            raise unknown(
                f"{name_of(func)} of them and of a tensor of shape {list(leaf.shape)}", rows[0].choice
            )
    return by_row(func, args, kwargs)


def without_ones(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows:
    """Where the dims in front of the rows are taken off again: `x[None, i].reshape(-1, x.shape[-1])`."""
    rows = args[0] if args else None
    if name in ("reshape", "view", "flatten", "squeeze") and isinstance(rows, Rows):
        made = plainly(func, args, kwargs)
        if made.shape == rows.padded.shape:
            plain = rows.choice.rows(made)
            plain.copies = rows.copies
            plain.is_aliased = rows.is_aliased = True
            return plain
    raise unknown(name, one_choice((args, kwargs)))


_ALL = slice(None)


def write_at_rows(x: Tensor, parts: tuple[Any, ...], value: Any) -> None:
    """`x[i, j] = value` at places that a mask chose, or at others that are chosen alike; of those that are one place
    the last counts, as in torch's kernel for CPUs."""
    at = tuple(part for part in parts if isinstance(part, Rows))
    choice, rest = one_choice((x, at, value)), x.ndim - len(at)
    after = parts[len(at) :]
    fits = isinstance(value, Rows) and value.padded.ndim == rest + 1 and value.dtype == x.dtype
    lone = not isinstance(value, Tensor)
    if isinstance(value, Tensor) and not isinstance(value, Rows):
        lone = value.ndim <= rest and (not value.ndim or value.dtype == x.dtype)
    whole = all(part is Ellipsis or (isinstance(part, slice) and part == _ALL) for part in after)
    if isinstance(x, Rows) or len(at) + len(after) != len(parts) or not (whole and (fits or lone)):
        raise RowsUnknown(
            "values are written to chosen rows", "x.index_add_(0, rows, values), or torch.where"
        )
    shape = (choice.valid.numel(), *x.shape[len(at) :])
    value = value.padded if isinstance(value, Rows) else torch.as_tensor(value, dtype=x.dtype)
    value, dims = value.broadcast_to(shape), _dims_of(at, x)
    if dims is None:
        x.copy_(_put(x, at, choice.valid, value))
        return
    order = [*dims, *(d for d in range(len(choice.shape)) if d not in dims)]
    lead, last = tuple(x.shape[: len(at)]), len(at)
    over = [*order, *range(len(order), len(order) + rest)]
    here = choice.valid.reshape(choice.shape).permute(order).reshape(*lead, -1)
    value = value.reshape(*choice.shape, *shape[1:]).permute(over).reshape(*lead, -1, *shape[1:])
    if here.shape[last] > 1:
        here = here & (here.flip(last).cumsum(last).flip(last) == 1)
    alone = here.reshape(*here.shape, *[1] * rest)
    value = torch.where(alone, value, torch.zeros((), dtype=x.dtype)).sum(last, dtype=x.dtype)
    x.copy_(torch.where(alone.any(last), value, x))


def _dims_of(at: tuple[Rows, ...], x: Tensor) -> list[int] | None:
    """Of the mask, those whose indices these are, where they are as long as the dims of `x`; None: not all are known
    to be."""
    if any(rows.places is None for rows in at):
        return None
    with tracing_suspended():
        every = all_places(at[0].choice.shape)
        found = [[d for d, places in enumerate(every) if places.equal(rows.places)] for rows in at]  # type: ignore[arg-type]
    dims = [ds[0] for ds in found if ds]
    fits = len(set(dims)) == len(at) and all(x.shape[i] == at[0].choice.shape[d] for i, d in enumerate(dims))
    return dims if fits else None


def _put(x: Tensor, at: tuple[Rows, ...], valid: Tensor, value: Tensor) -> Tensor:
    """`x` with values at other places; those that are not there are put in a row that is left out."""
    flat = x.reshape(-1, *x.shape[len(at) :])
    place = torch.zeros_like(valid, dtype=torch.int64)
    for rows, size in zip(at, x.shape, strict=False):
        place = place * size + torch.where(rows.padded < 0, rows.padded + size, rows.padded)
    place = torch.where(valid, place, flat.shape[0])
    return torch.cat([flat, flat[:1]]).index_put((place,), value)[:-1].reshape(x.shape)


def index_add_(x: Tensor, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Tensor:
    return x.index_add_(0, *_added(x, dim, index, source), alpha=alpha)


def scatter_add_(x: Tensor, dim: int, index: Any, src: Any) -> Tensor:
    return x.scatter_add_(0, *_added(x, dim, index, src))


def _added(x: Tensor, dim: int, index: Any, source: Any) -> tuple[Tensor, Tensor]:
    """Where and what is added to `x`: what is not there adds 0."""
    choice = one_choice((x, index, source))
    if isinstance(x, Rows) or dim % x.ndim or not (isinstance(index, Rows) and isinstance(source, Rows)):
        raise RowsUnknown("rows are added where they do not all come from")
    return index.padded, filled(source.padded, choice.valid, 0)


_PART = "part"
"""Begins the key of a choice: of how many rows it is a part, and its ends."""


def part_of(x: Tensor, index: Any, answer: Callable[..., Any]) -> Rows | None:
    """`x[start:end]`; None where both are numbers."""
    ends = (index.start, index.stop) if isinstance(index, slice) else ()
    if not any(type(end) is AwaitedCount for end in ends):
        return None
    if index.step not in (None, 1):
        raise RowsUnknown("rows are taken by a step, to an end that is computed")
    start, end = (other if end is None else end for end, other in zip(ends, (0, x.shape[0]), strict=True))
    return _part(x, start, end, answer)


def _part(x: Tensor, start: Any, end: Any, answer: Callable[..., Any]) -> Rows:
    count = x.shape[0]
    places = torch.arange(count)
    first, stop = (_from_front(number_in(place), count) for place in (start, end))
    choice = Choice(
        (places >= first) & (places < stop), _key(count, start, end), (count,), user_place(), answer
    )
    return choice.rows(x)


def _from_front(place: Any, count: int) -> Any:
    if isinstance(place, Tensor):
        return torch.where(place < 0, place + count, place)
    return place + count if place < 0 else place


def _key(count: int, *ends: Any) -> Hashable:
    return (
        _PART,
        count,
        *((end.terms, end.more) if type(end) is AwaitedCount else (frozenset(), end) for end in ends),
    )


def is_counted(sizes: Any) -> bool:
    """Whether a size of those is computed."""
    return isinstance(sizes, (list, tuple)) and any(type(size) is AwaitedCount for size in sizes)


def split(answer: Callable[..., Any], x: Tensor, sizes: Sequence[Any], dim: int) -> tuple[Rows, ...]:
    """`x.split(counts.tolist())`"""
    if dim % x.ndim:
        raise RowsUnknown(f"dim {dim} is split in sizes that are computed")
    ends = [0, *accumulate(sizes)]
    if isinstance(x, Rows):
        if x.choice.key != _key(x.padded.shape[0], 0, ends[-1]):
            raise unknown("split", x.choice)
        x = x.padded
    else:
        _check_all(number_in(ends[-1]), x.shape[0])
    return tuple(_part(x, start, end, answer) for start, end in pairwise(ends))


def _check_all(found: Any, count: int) -> None:
    if found != count:
        raise RuntimeError(f"parts of rows, their lengths computed, do not add up to all {count} rows")


def cat(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Parts that follow each other, which have to be all."""
    parts, found = list(tensors), rows_in(list(tensors))
    keys: list[Any] = [rows.choice.key for rows in found]
    alike = all(isinstance(key, tuple) and key[:2] == (_PART, found[0].padded.shape[0]) for key in keys)
    if len(found) < len(parts) or dim % found[0].padded.ndim or not alike or not _follow(keys):
        raise unknown("cat", found[0].choice)
    whole, valid = found[0].padded, found[0].choice.valid
    for rows in found[1:]:
        here = rows.choice.valid.reshape(-1, *[1] * (rows.padded.ndim - 1))
        whole, valid = torch.where(here, rows.padded, whole), valid | rows.choice.valid
    _check_all(valid.sum(), valid.shape[0])
    return whole


def _follow(keys: Sequence[Any]) -> bool:
    return keys[0][2] == (frozenset(), 0) and all(one[3] == next_[2] for one, next_ in pairwise(keys))
