"""Parts of rows whose lengths are computed, `x[start:end]`, `x.split(counts.tolist())`, as all rows and a mask, and
chosen rows by their numbers; what is written at rows that a mask chose, `x[rows] = value`, and added there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from passes.capture.provenance import user_place
from passes.capture.row_dims import by_row
from passes.capture.rows import (
    Choice,
    Rows,
    RowsUnknown,
    all_places,
    check_first,
    filled,
    in_front,
    one_choice,
    rows_in,
    unknown,
)
from passes.capture.stand_ins import AwaitedCount, number_in
from passes.ir.op_traits import neutral
from passes.ir.torch_tracing import tracing_suspended

_PART = "part"
"""Begins the key of a choice: of how many rows it is a part, and its ends."""
_ALL = slice(None)


def part_of(x: Tensor, index: Any, answer: Callable[..., Any]) -> Rows | None:
    """`x[start:end]`; None where that is known."""
    ends = (index.start, index.stop) if isinstance(index, slice) else ()
    is_whole = not isinstance(x, Rows) or ends in ((), (None, None))
    if (isinstance(x, Rows) and x.at) or (is_whole and not any(type(end) is AwaitedCount for end in ends)):
        return None
    if index.step not in (None, 1):
        raise RowsUnknown("rows are taken by a step, to an end that is computed")
    found, whole = _numbered(x)
    start, end = (other if end is None else end for end, other in zip(ends, (0, found.shape[0]), strict=True))
    return _part(found, start, end, answer, whole)


def _numbered(x: Tensor) -> tuple[Tensor, Choice | None]:
    """Rows at the places of their numbers, and which there are."""
    return (in_front(x), x.choice.in_front) if isinstance(x, Rows) else (x, None)


def _part(x: Tensor, start: Any, end: Any, answer: Callable[..., Any], whole: Choice | None) -> Rows:
    places, count = torch.arange(x.shape[0]), x.shape[0] if whole is None else whole.valid.sum()
    first, stop = (_from_front(number_in(place), count) for place in (start, end))
    valid = (places >= first) & (places < stop)
    key = _key(x.shape[0] if whole is None else whole.key, start, end)
    valid = valid if whole is None else valid & whole.valid
    part = Choice(valid, key, tuple(places.shape), user_place(), answer, whole).rows(x)
    if whole is None:
        part.root, part.copies = x, [(x, x._version)]
    part.is_aliased = whole is not None  # it may be a copy of rows that lie in one memory
    return part


def set_part(part: Rows, value: Any) -> None:
    """`x[start:end] = value`"""
    if isinstance(value, Rows):
        one_choice((part, value))
        value = value.padded
    value = torch.as_tensor(value, dtype=part.dtype)
    if value.ndim >= part.padded.ndim and value.shape != part.padded.shape:
        raise RowsUnknown("values are written to rows up to an end that is computed", "x.index_copy_")
    part.write(value.expand(part.padded.shape))


def _from_front(place: Any, count: Any) -> Any:
    if isinstance(place, Tensor):
        return torch.where(place < 0, place + count, place)
    return place + count if place < 0 else place


def _key(whole: Hashable, *ends: Any) -> Hashable:
    """whole: of how many rows, or of which."""
    return (
        _PART,
        whole,
        *((end.terms, end.more) if type(end) is AwaitedCount else (frozenset(), end) for end in ends),
    )


def is_counted(sizes: Any) -> bool:
    """Whether a size of those is computed."""
    return isinstance(sizes, (list, tuple)) and any(type(size) is AwaitedCount for size in sizes)


def split(answer: Callable[..., Any], x: Tensor, sizes: Sequence[Any], dim: int) -> tuple[Rows, ...]:
    """`x.split(counts.tolist())`"""
    if dim % x.ndim:
        raise RowsUnknown(f"dim {dim} is split in sizes that are computed")
    check_first(x, "split")
    ends = [0, *accumulate(sizes)]
    if isinstance(x, Rows) and x.choice.key == _key(x.padded.shape[0], 0, ends[-1]):
        found, whole = x.padded, None
    else:
        found, whole = _numbered(x)
        _check_all(number_in(ends[-1]), found.shape[0] if whole is None else whole.valid.sum())
    return tuple(_part(found, start, end, answer, whole) for start, end in pairwise(ends))


def _check_all(found: Any, count: Any) -> None:
    if found != count:
        raise RuntimeError("parts of rows, their lengths computed, do not add up to all rows")


def cat(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Parts that follow each other and are all of them are these; others are rows one after another."""
    parts, found = list(tensors), rows_in(list(tensors))
    keys: list[Any] = [rows.choice.key for rows in found]
    if any(rows.at != found[0].at for rows in found):
        raise unknown("cat", found[0].choice)
    if dim % found[0].padded.ndim != found[0].at:
        if len(found) < len(parts):
            raise unknown("cat", found[0].choice)
        return by_row(torch.cat, (parts, dim), {})
    alike = all(isinstance(key, tuple) and key[0] == _PART and key[1] == keys[0][1] for key in keys)
    if len(found) < len(parts) or not alike or not _follow(keys):
        return _one_after_another(parts, found[0])
    padded, valid, whole = found[0].padded, found[0].choice.valid, found[0].choice.whole
    for rows in found[1:]:
        here = rows.choice.valid.reshape(-1, *[1] * (rows.padded.ndim - 1))
        padded, valid = torch.where(here, rows.padded, padded), valid | rows.choice.valid
    _check_all(valid.sum(), valid.shape[0] if whole is None else whole.valid.sum())
    return padded if whole is None else whole.rows(padded)


def _one_after_another(parts: Sequence[Tensor], first: Rows) -> Rows:
    whole = lambda x: (x, torch.ones(len(x), dtype=torch.bool), len(x))
    own = lambda x: (x.padded, x.choice.valid, x.choice.key)
    each = (own(part) if isinstance(part, Rows) else whole(part.movedim(first.at, 0)) for part in parts)
    padded, valid, keys = zip(*each, strict=True)
    there = torch.cat(valid)
    choice = Choice(there, ("cat", *keys), tuple(there.shape), user_place(), first.choice.answer)
    return choice.rows(torch.cat(padded), at=first.at)


def _follow(keys: Sequence[Any]) -> bool:
    return keys[0][2] == (frozenset(), 0) and all(one[3] == next_[2] for one, next_ in pairwise(keys))


def in_order_of_values(rows: Rows, descending: bool) -> Any:
    """`rows.sort(0)`: what is not there is last, and numbers count those that are there."""
    choice, x = rows.choice.in_front, in_front(rows)
    last = (
        torch.nan
        if x.is_floating_point() and not descending
        else neutral("max" if descending else "min", x.dtype)
    )
    found = filled(x, choice.valid, last)
    values, numbers = found.sort(dim=0, descending=descending, stable=True)
    return torch.return_types.sort((choice.rows(values), choice.rows(numbers)))


def by_number(rows: Rows, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows and the numbers of some: all rows, and places in them."""
    count = rows.choice.valid.sum()
    if not isinstance(numbers, Rows) and numbers.numel() and numbers.max() >= count:
        raise IndexError("the number of a row that a mask chose is out of range")
    return in_front(rows), _from_front(numbers, count)


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
        place = place * size + _from_front(rows.padded, size)
    place = torch.where(valid, place, flat.shape[0])
    return torch.cat([flat, flat[:1]]).index_put((place,), value)[:-1].reshape(x.shape)


def index_add_(x: Tensor, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Tensor:
    return x.index_add_(0, *_added(x, dim, index, source), alpha=alpha)


def scatter_(
    x: Tensor, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: Any = None
) -> Tensor:
    """Of one dim it is `x[index] = src`."""
    if x.ndim != 1 or reduce is not None:
        raise unknown("scatter", one_choice((x, index, src)))
    x[index] = src if value is None else value
    return x


def scatter_add_(x: Tensor, dim: int, index: Any, src: Any) -> Tensor:
    return x.scatter_add_(0, *_added(x, dim, index, src))


def scatter_reduce_(
    x: Tensor, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Tensor:
    if reduce != "sum" or not include_self:
        raise RowsUnknown(f"rows that a mask chose are reduced by {reduce}", "scatter_add_, of all rows")
    return scatter_add_(x, dim, index, src)


def _added(x: Tensor, dim: int, index: Any, source: Any) -> tuple[Tensor, Tensor]:
    """Where and what is added to `x`: what is not there adds 0."""
    choice = one_choice((x, index, source))
    if isinstance(x, Rows) or dim % x.ndim or not (isinstance(index, Rows) and isinstance(source, Rows)):
        raise RowsUnknown("rows are added where they do not all come from")
    return index.padded, filled(source.padded, choice.valid, 0)
