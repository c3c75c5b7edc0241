"""Chosen rows whose values or number are needed: loops over them, and what is not known row by row.

    for e in hit.nonzero(): ...        torch.cat([z[keep], w])      x[i, j] = z[keep]      z[keep].tolist()

The body of a loop, over the experts that any token goes to, runs for all rows. Rows that it chooses are there only
where its own row is, so what they add is nothing otherwise. A body that does anything else that lasts is an error.

What is not known row by row is done with as many rows as there are. The number is asked as other values are
(`passes.capture.questions`): it must follow from what the call is given, and a call in which it is another is one of
another kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.capture import row_index
from passes.capture.rows import (
    Choice,
    Rows,
    RowsUnknown,
    front_key,
    in_front,
    in_order,
    rows_in,
    written_and_read,
)
from passes.ir.torch_compat import function_modes
from passes.ir.torch_tracing import is_value_missing, tracing_suspended

_LASTS = (
    "the body of a loop over chosen rows changes something beside index_add_ of rows that it chooses",
    "loop over all of them, range(count), and let torch.where choose what is changed",
)


def each_row(rows: Rows) -> Generator[Tensor]:
    """The rows as numbers, which are known: they are places in a mask."""
    assert rows.places is not None
    frame: Any = sys._getframe(1)
    before = {name: value for name, value in frame.f_locals.items() if not _is_of_loop(value)}
    for i in range(rows.places.shape[0]):
        with tracing_suspended():
            row = rows.places[i].clone()
        body = _Body(rows.choice.valid[i], row, rows.choice.made)
        body.__enter__()
        try:
            yield row
        except GeneratorExit:  # by `break`
            body.is_left = True
            raise
        body.__exit__(None, None, None)
        if any(frame.f_locals.get(name) is not value for name, value in before.items()):
            raise RowsUnknown(*_LASTS)


def _is_of_loop(value: Any) -> bool:
    """Whether a name is left from the body of an earlier loop."""
    return isinstance(value, Rows) or getattr(value, "_of_loop", False)


@contextmanager
def loops_ended() -> Generator[None]:
    """A loop that is left by `break` or an error leaves its mode on, which ends here; RowsUnknown for `break`."""
    count = len(function_modes())
    try:
        yield
        if left := function_modes()[count:]:
            raise _left_by_break(left[-1])
    finally:
        for mode in reversed(function_modes()[count:]):
            mode.__exit__(None, None, None)


def _left_by_break(body: Any) -> RowsUnknown:
    return RowsUnknown("a loop over chosen rows is left by break", "a loop over all of them", body.made)


class _Body(TorchFunctionMode):
    def __init__(self, there: Tensor, row: Tensor, made: str) -> None:
        super().__init__()
        self.made = made
        self.there, self.known, self.is_left = there, [row], False
        row._of_loop = True  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is computed of the row's number alone is a number, too."""
        if self.is_left:
            raise _left_by_break(self)
        given = (args, kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        if tensors and all(self._is_known(t) for t in tensors):
            with tracing_suspended():
                result = func(*args, **given[1])
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    leaf._of_loop = True  # type: ignore[attr-defined]
                    self.known.append(leaf)
            return result
        name = func.__name__
        if (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))) and not rows_in(given):
            raise RowsUnknown(*_LASTS)
        given = pytree.tree_map_only(Tensor, self._number, given)
        return pytree.tree_map_only(Rows, self._chosen, func(*given[0], **given[1]))

    def _is_known(self, tensor: Tensor) -> bool:
        return any(tensor is known for known in self.known)

    def _number(self, tensor: Tensor) -> Any:
        if not self._is_known(tensor) or tensor.ndim:
            return tensor
        with tracing_suspended():
            return tensor.item()

    def _chosen(self, rows: Rows) -> Rows:
        """Not there where the loop's own row is not."""
        key = rows.choice.key
        if isinstance(key, tuple) and key[0] is self:
            return rows
        choice = replace(rows.choice, valid=rows.choice.valid & self.there, key=(self, key), found=[])
        return choice.rows(rows.padded, rows.places)


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
        if isinstance(x, Rows) and x.may_be_shared:
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
    """`tree`, where rows that have been counted are what they were counted as, and the same ones in front or not are in
    front."""
    for rows in rows_in(tree):
        rows.follow()
        _check_unwritten(rows)
    tree = pytree.tree_map_only(Rows, lambda rows: rows if rows.counted is None else rows.counted, tree)
    choices = [rows.choice for rows in rows_in(tree)]
    if any(rows.is_pair for rows in rows_in(tree)):
        return tree
    if len({in_order(choice.key) for choice in choices}) > 1 and len(set(map(front_key, choices))) == 1:
        forward = lambda rows: rows.choice.in_front.rows(in_front(rows), at=rows.at)
        return pytree.tree_map_only(Rows, forward, tree)
    return tree


def _check_unwritten(rows: Rows) -> None:
    if any(copy._version != version for copy, version in rows.copies if copy is not rows.counted):
        raise written_and_read(rows.choice)


def _those_there(rows: Rows) -> Tensor:
    _check_unwritten(rows)
    if rows.counted is None:
        found = rows.padded.index_select(0, _places(rows.choice))
        found = found.index_select(-1, _places(rows.choice)) if rows.is_pair else found
        rows.counted = found.movedim(0, rows.at)
        rows.copies.append((rows.counted, rows.counted._version))
    return rows.counted


def _places(choice: Choice) -> Tensor:
    """[count], in order; any places where that is not the number, which the call is told of after it has run."""
    if not choice.found:
        choice.found.append(choice.order[: int(choice.valid.sum())])
    return choice.found[0]
