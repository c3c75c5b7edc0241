"""Rows that a mask chooses, with their number: what is not known row by row is done with as many rows as there are.

    torch.cat([z[keep], w])      x[i, j] = z[keep]      z[keep].tolist()

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
from passes.capture.rows import Choice, Rows, RowsUnknown, rows_in
from passes.ir.torch_tracing import is_value_missing

__all__ = ["count_leaving", "counted", "getitem", "setitem", "settled"]

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
    x, index = settled((x, index))
    try:
        return row_index.getitem(answer, x, index)
    except RowsUnknown as error:
        return Tensor.__getitem__(counted(x, error), _counted_index(answer, index, error))


def setitem(answer: Answer, x: Any, index: Any, value: Any) -> None:
    x, index, value = settled((x, index, value))
    try:
        row_index.setitem(answer, x, index, value)
    except RowsUnknown as error:
        if isinstance(x, Rows) and x.is_aliased:
            raise
        Tensor.__setitem__(counted(x, error), _counted_index(answer, index, error), counted(value, error))


def _counted_index(answer: Answer, index: Any, error: RowsUnknown) -> tuple[Any, ...]:
    """Masks as the places that they choose."""
    found: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, Tensor) and part.dtype == torch.bool and part.ndim
        found += row_index.chosen_places(answer, counted(part, error)) if is_mask else [part]
    return counted(tuple(found), error)


def settled(tree: Any) -> Any:
    """`tree`, where rows that have been counted are what they were counted as."""
    for rows in rows_in(tree):
        _check_unwritten(rows)
    return pytree.tree_map_only(Rows, lambda rows: rows if rows.counted is None else rows.counted, tree)


def _check_unwritten(rows: Rows) -> None:
    if any(copy._version != version for copy, version in rows.copies if copy is not rows.counted):
        what = "chosen rows are written, and read where they share memory"
        raise RowsUnknown(what, "write to a clone()", rows.choice.made)


def _those_there(rows: Rows) -> Tensor:
    _check_unwritten(rows)
    if rows.counted is None:
        rows.counted = rows.padded.index_select(0, _places(rows.choice))
        rows.copies.append((rows.counted, rows.counted._version))
    return rows.counted


def _places(choice: Choice) -> Tensor:
    """[count], in order; any places where that is not the number, which the call is told of after it has run."""
    if not choice.found:
        last, count = choice.valid.numel() - 1, int(choice.valid.sum())
        ordered = torch.where(choice.valid, torch.arange(last + 1), last).sort()[0]
        choice.found.append(ordered[:count])
    return choice.found[0]
