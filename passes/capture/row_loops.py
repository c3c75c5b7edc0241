"""A loop over rows that a mask chose: `for e in hit.nonzero()`, the experts that any token goes to.

The body runs for all of them. Rows that it chooses are there only where its own row is, so what they add is nothing
otherwise. A body that does anything else that lasts is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.capture.rows import Rows, RowsUnknown, rows_in
from passes.ir.torch_compat import function_modes
from passes.ir.torch_tracing import tracing_suspended

__all__ = ["each_row", "loops_ended"]

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

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
        return choice.rows(rows.padded)
