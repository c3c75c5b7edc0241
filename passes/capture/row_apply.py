"""A torch function called with all rows for those that a mask chose, where it works on each row alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from passes.capture.rows import Choice, Rows, RowsUnknown, one_choice, rows_in
from passes.ir.torch_tracing import tracing_suspended

__all__ = ["by_row", "name_of", "plainly", "pointwise", "unknown"]

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
    bare: Any = pytree.tree_map_only(Rows, lambda rows: rows.padded, (args, kwargs))
    return func(*bare[0], **bare[1])


def by_row(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same of a function that works on each row alone."""
    rows, is_view = rows_in((args, kwargs)), name_of(func) in _VIEWS
    choice = one_choice(rows)
    result = pytree.tree_map_only(Tensor, choice.rows, plainly(func, args, kwargs))
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
