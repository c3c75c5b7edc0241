"""Rows that a mask chooses, with their number: what is not known row by row is done with as many rows as there are.

    torch.cat([z[keep], w])      x[i, j] = z[keep]      z[keep].tolist()      torch.repeat_interleave(x, times)

The number is asked as other values are (`passes.capture.questions`): it must follow from what the call is given, and a
call in which it is another is one of another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.capture import row_index
from passes.capture.row_index import masked_select
from passes.capture.rows import Choice, Rows, RowsUnknown, rows_in
from passes.ir.torch_tracing import is_value_missing

__all__ = ["count_leaving", "counted", "distinct", "distinct_in_a_row", "getitem", "repeated", "setitem"]

Answer = Callable[..., Any]


def counted(tree: Any, error: RowsUnknown | None = None) -> Any:
    """`tree` with the rows that are there instead of all of them. Raises `error` where their number is not known."""
    try:
        return pytree.tree_map_only(Rows, _those_there, tree)
    except Exception as missing:
        if error is not None and is_value_missing(missing):
            raise error from None
        raise


def count_leaving(outputs: Sequence[Any]) -> None:
    """Of rows that are returned or kept, how many: what is asked later has no answer."""
    for rows in rows_in(outputs):
        what, remedy = "rows that a mask chooses are returned, or kept", "return all rows, and the mask"
        counted(rows, RowsUnknown(what, remedy, rows.choice.made))


def getitem(answer: Answer, x: Any, index: Any) -> Any:
    try:
        return row_index.getitem(answer, x, index)
    except RowsUnknown as error:
        return Tensor.__getitem__(counted(x, error), _counted_index(answer, index, error))


def setitem(answer: Answer, x: Any, index: Any, value: Any) -> None:
    try:
        row_index.setitem(answer, x, index, value)
    except RowsUnknown as error:
        if isinstance(x, Rows):
            raise
        Tensor.__setitem__(x, _counted_index(answer, index, error), counted(value, error))


def _counted_index(answer: Answer, index: Any, error: RowsUnknown) -> tuple[Any, ...]:
    """Masks as the places that they choose."""
    found: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, Tensor) and part.dtype == torch.bool and part.ndim
        found += row_index.chosen_places(answer, counted(part, error)) if is_mask else [part]
    return counted(tuple(found), error)


def _those_there(rows: Rows) -> Tensor:
    return rows.padded.index_select(0, _places(rows.choice))


def _places(choice: Choice) -> Tensor:
    """[count], in order."""
    if not choice.found:
        size, count = choice.valid.numel(), int(choice.valid.sum())
        choice.found.append(torch.where(choice.valid, torch.arange(size), size).sort()[0][:count])
    return choice.found[0]


def repeated(
    answer: Answer, input: Any, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """`torch.repeat_interleave`: a place of the result is as far in `input` as there are places that end before it."""
    if repeats is None:
        return repeated(answer, torch.arange(len(input)), input, 0, output_size=output_size)
    if not isinstance(repeats, Tensor) or repeats.numel() <= 1:
        repeats = repeats if isinstance(repeats, int) else int(repeats)
        return torch.repeat_interleave(input, repeats, dim, output_size=output_size)
    x, dim = (input.reshape(-1), 0) if dim is None else (input, dim)
    ends = repeats.cumsum(0)
    count = int(ends[-1]) if output_size is None else output_size
    ended = torch.zeros(count + 1, dtype=ends.dtype).index_add(0, ends, torch.ones_like(ends))
    return x.index_select(dim, ended.cumsum(0)[:count])


def distinct_in_a_row(
    answer: Answer,
    input: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """`torch.unique_consecutive`: a mask chooses those that differ from the one before."""
    if return_counts or dim is not None:
        raise RowsUnknown("how often each value occurs, or distinct rows")
    flat = input.reshape(-1)
    first = torch.cat([torch.ones_like(flat[:1], dtype=torch.bool), flat[1:] != flat[:-1]])
    chosen = masked_select(answer, flat, first)
    return (chosen, (first.cumsum(0) - 1).reshape(input.shape)) if return_inverse else chosen


def distinct(
    answer: Answer,
    input: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """`torch.unique`."""
    if return_inverse or return_counts or dim is not None:
        raise RowsUnknown("how often or where each value occurs, or distinct rows")
    return distinct_in_a_row(answer, input.reshape(-1).sort()[0])
