"""Parts of rows whose lengths are computed, `x[start:end]`, `x.split(counts.tolist())`, as all rows and a mask."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from passes.capture.awaited_counts import AwaitedCount, number_in
from passes.capture.provenance import user_place
from passes.capture.rows import Choice, Rows, RowsUnknown, rows_in, unknown

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
