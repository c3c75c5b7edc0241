"""What is written at rows that a mask chose, `x[rows] = value`, and added there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.capture.rows import Rows, RowsUnknown, all_places, filled, one_choice
from passes.ir.torch_tracing import tracing_suspended

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
