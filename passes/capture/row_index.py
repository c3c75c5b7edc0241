"""Rows that a mask chooses, `x[mask]`, `x[torch.where(mask)]`, and what is read and written by them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from math import prod
from typing import Any

import torch
from torch import Tensor

from passes.capture.provenance import user_place
from passes.capture.row_dims import paired
from passes.capture.row_parts import by_number, index_add_, part_of, set_part, write_at_rows
from passes.capture.rows import (
    Choice,
    Rows,
    RowsUnknown,
    all_places,
    check_first,
    filled,
    in_front,
    in_order,
    one_choice,
    rows_in,
    unknown,
)
from passes.capture.stand_ins import Awaited
from passes.ir.torch_tracing import tracing_suspended

Answer = Callable[..., Any]
_ALL = slice(None)


def getitem(answer: Answer, x: Tensor, index: Any) -> Any:
    """`x[index]`: rows where `x` or a part of `index` is, or where that is a mask."""
    parts = index if isinstance(index, tuple) else (index,)
    if parts and (part := part_of(x, parts[0], answer)) is not None:
        return _of_rows(part, (_ALL, *parts[1:])) if parts[1:] else part
    if isinstance(x, Rows):
        return _of_rows(x, parts)
    if rows_in(index):
        return _at_rows(x, parts)
    x, parts = _numbered(x, parts)
    found = _mask(x, parts)
    if found is None:
        return Tensor.__getitem__(x, parts)
    lead, mask = found
    if lead:
        raise RowsUnknown(f"a mask chooses along dim {lead}", "x.movedim(dim, 0)[mask], or torch.where")
    rows = _choice(answer, mask).rows(x.reshape(mask.numel(), *x.shape[mask.ndim :]))
    return rows if len(parts) == 1 else _of_rows(rows, (_ALL, *parts[1:]))


def setitem(answer: Answer, x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`; by a mask, `x` becomes one of the two in every place."""
    value = _without_ones(value)
    check_first((x, index, value), "a write at them")
    parts = index if isinstance(index, tuple) else (index,)
    found = None
    if len(parts) == 1 and not isinstance(x, Rows) and (part := part_of(x, index, answer)) is not None:
        set_part(part, value)
        return
    if not (isinstance(x, Rows) or rows_in(index)):
        x, parts = _numbered(x, parts)
        found = _mask(x, parts)
    if found is None and not rows_in((x, index, value)):
        Tensor.__setitem__(x, parts, value)
        return
    if found is None and isinstance(x, Rows) and not any(isinstance(part, Tensor) for part in parts):
        set_part(_of_rows(x, parts), value)
        return
    if found is None and isinstance(x, Rows) and len(parts) == 1 and parts[0].dtype == torch.bool:
        _write_some(x, parts[0], value)
        return
    if found is None:
        write_at_rows(x, parts, value)
        return
    lead, mask = found
    rest = parts[lead + 1 :]
    if rest and rest != (Ellipsis,):
        x = Tensor.__getitem__(x, (*[_ALL] * (lead + mask.ndim), *rest))
    here = mask.reshape(*mask.shape, *[1] * (x.ndim - lead - mask.ndim))
    x.copy_(torch.where(here, _spread(answer, x, mask, lead, value), x))


def _write_some(x: Rows, mask: Any, value: Any) -> None:
    """`rows[mask] = value`, a number or as many rows as it says."""
    choice = one_choice((x, mask))
    if not isinstance(mask, Rows) or x.is_aliased:
        raise unknown("a write at a mask", choice)
    some = isinstance(value, Rows) and value.choice.key == (choice.key, mask_key(mask.padded))
    lone = not isinstance(value, Tensor) or not value.ndim
    if not lone and not (some and mask.padded.ndim == 1):
        raise unknown("a write at a mask", choice)
    here = mask.padded & choice.valid.reshape(-1, *[1] * (mask.padded.ndim - 1))
    here = here.reshape(*here.shape, *[1] * (x.padded.ndim - here.ndim))
    new = value.padded if isinstance(value, Rows) else torch.as_tensor(value, dtype=x.dtype)
    x.write(torch.where(here, new, x.padded))


def _without_ones(value: Any) -> Any:
    """`[1, n, *any]`, which is written as `[n, *any]` is."""
    if not isinstance(value, Rows) or any(size != 1 for size in value.seen.shape[: value.at]):
        return value
    return value.choice.rows(value.seen.reshape(value.seen.shape[value.at :]))


def _spread(answer: Answer, x: Tensor, mask: Tensor, lead: int, value: Any) -> Tensor:
    """`value`, [*lead, rows, *rest] or what is broadcast to it, in the places that the mask chooses."""
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=x.dtype)
    if not value.ndim:
        return value.to(x.dtype)
    if value.dtype != x.dtype:
        raise RowsUnknown(f"{value.dtype} is written to {x.dtype}", f"value.to({x.dtype}), as torch wants it")
    rest = x.ndim - lead - mask.ndim
    if isinstance(value, Rows):
        if lead or value.padded.ndim != rest + 1:
            raise unknown("a write at a mask", value.choice)
        if in_order(value.choice.key) == in_order(mask_key(mask)):
            return value.padded.reshape(*mask.shape, *value.padded.shape[1:])
        row, count, value = 0, value.choice.valid.sum(), in_front(value)
    elif value.ndim <= rest:
        return value
    else:
        row = value.ndim - rest - 1
        count = value.shape[row]
        if count == 1:
            return value.reshape(*value.shape[:row], *[1] * mask.ndim, *value.shape[row + 1 :])
    if mask.sum() != count:
        raise IndexError("shape mismatch: other values are written than a mask has places for")
    value = value.index_select(row, (mask.reshape(-1).cumsum(0) - 1).clamp(0, max(value.shape[row] - 1, 0)))
    return value.reshape(*value.shape[:row], *mask.shape, *value.shape[row + 1 :])


def masked_select(answer: Answer, input: Tensor, mask: Tensor) -> Rows:
    """Where the mask is the same along the last dims, the values may be seen as rows of those (`row_dims.MOVES`)."""
    x, whole = torch.broadcast_tensors(input, mask) if input.shape != mask.shape else (input, mask)
    found = _choice(answer, whole).rows(x.reshape(-1))
    lead, alike = (
        whole,
        mask if mask.ndim == x.ndim else mask.reshape(*[1] * (x.ndim - mask.ndim), *mask.shape),
    )
    while lead.ndim > 1 and alike.shape[lead.ndim - 1] == 1:
        lead = lead.select(-1, 0)
    if lead.ndim < x.ndim:
        found.grouped = _choice(answer, lead, _before_ones(mask_key(mask))).rows(x.flatten(0, lead.ndim - 1))
        found.is_aliased = found.grouped.is_aliased = True
    return found


def _before_ones(key: Hashable) -> Hashable:
    """Of the mask to which dims of one element were added: `keep` of `keep.unsqueeze(-1)` and `keep[..., None]`."""
    while isinstance(key, tuple) and (key[0] == "unsqueeze" or (key[0] == "_getitem" and _adds_dims(key[3]))):
        key = key[2]
    return key


def _adds_dims(index: Any) -> bool:
    """Whether nothing is taken by an index of which this is the key."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part in ("None", "Ellipsis", ("None", "None", "None")) for part in parts)


def put(answer: Answer, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    if accumulate and len(indices) == 1 and not isinstance(x, Rows):
        return index_add_(x, 0, indices[0], values)
    if accumulate:
        raise unknown("index_put", one_choice((x, indices, values)))
    setitem(answer, x, tuple(indices), values)
    return x


def filled_in(scatter: Callable[..., Any], x: Any, mask: Any, source: Any) -> Any:
    """The values of rows that are there, one after another, where a mask says."""
    if not isinstance(source, Rows) or source.at or rows_in((x, mask)):
        raise unknown("masked_scatter", one_choice((x, mask, source)))
    return scatter(x, mask, in_front(source))


def chosen_places(answer: Answer, condition: Tensor) -> tuple[Rows, ...]:
    """`torch.where(condition)`: the indices of each dim; of rows, their numbers among those that are there."""
    if isinstance(condition, Rows):
        check_first(condition, "where")
        same, holds = condition.choice, condition.padded != 0
        if holds.ndim > 1:
            raise unknown("where", same)
        return (_among(same.rows(same.valid.cumsum(0) - 1), same, holds),)
    choice = _choice(answer, condition)
    if not choice.shape:
        raise RowsUnknown("places in a tensor without dims")
    with tracing_suspended():
        known = all_places(choice.shape)
    return tuple(map(choice.rows, all_places(choice.shape), known))


def places_listed(answer: Answer, input: Tensor, *, as_tuple: bool = False) -> Any:
    places = chosen_places(answer, input)
    if as_tuple:
        return places
    with tracing_suspended():
        known = None if isinstance(input, Rows) else torch.stack([place.places for place in places], 1)  # type: ignore[misc]
    return places[0].choice.rows(torch.stack([place.padded for place in places], 1), known)


def _numbered(x: Tensor, parts: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
    """`x[:, 3]` and what is left, `(:, mask)`, of `x[:, 3, mask]`."""
    for i, part in enumerate(parts[:-1]):
        if isinstance(part, int) and not isinstance(part, bool) and isinstance(parts[i + 1], (int, Tensor)):
            x = Tensor.__getitem__(x, parts[: i + 1])
            return _numbered(x, (*[_ALL] * i, *parts[i + 1 :]))
        if not isinstance(part, slice):
            break
    return x, parts


def _mask(x: Tensor, parts: tuple[Any, ...]) -> tuple[int, Tensor] | None:
    """How many dims come before those of the mask in an index, and the mask; None: there is none."""
    lead = next((i for i, part in enumerate(parts) if not (isinstance(part, slice) and part == _ALL)), 0)
    if len(parts) == 2 and parts[0] is Ellipsis and isinstance(parts[1], Tensor):
        lead, parts = x.ndim - parts[1].ndim, (*[_ALL] * (x.ndim - parts[1].ndim), parts[1])
    mask, rest = parts[lead] if len(parts) > lead else None, parts[lead + 1 :]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not mask.ndim:
        return None
    fits = mask.shape == x.shape[lead : lead + mask.ndim]
    plain = all(part is Ellipsis or part is None or isinstance(part, (int, slice)) for part in rest)
    return (lead, mask) if fits and plain else None


def _of_rows(x: Rows, parts: tuple[Any, ...]) -> Any:
    """`rows[:, 0]`, `rows[..., None]`, `rows[None]`, `rows[chosen]`."""
    first = parts[0]
    if x.is_pair and all(part is None for part in parts):
        return paired(x.choice, x.seen[parts])
    if x.is_pair:
        raise unknown("an index", x.choice)
    if x.padded.ndim == 2 and not x.at and _is_of_both(x.choice, parts):
        return paired(x.choice, x.padded)
    if isinstance(first, Tensor) and first.ndim and not x.at:
        if isinstance(first, Rows) and first.dtype == torch.bool and len(parts) == 1:
            check_first(first, "an index")
            same = one_choice((x, first))
            return _among(x, same, first.padded)
        if first.dtype in (torch.int64, torch.int32):
            found, places = by_number(x, first.padded if isinstance(first, Rows) else first)
            at = first.choice.rows(places, at=first.at) if isinstance(first, Rows) else places
            return getitem(x.choice.answer, found, (at, *parts[1:]))
    at, before, dim = None, 0, 0
    for part in _every(parts, x.padded.ndim):
        if dim == x.at and part is not None:
            at = before if isinstance(part, slice) and part == _ALL else None
        dim, before = dim + (part is not None), before + (part is None or isinstance(part, slice))
    if at is None or any(isinstance(part, Tensor) for part in parts):
        raise RowsUnknown("some of the rows are taken by their number")
    seen = Tensor.__getitem__(x.seen, parts)
    places = None if at or x.at else _of_known(x.places, parts)
    return x.choice.rows(seen.movedim(at, 0), places, at, x)


def _is_of_both(choice: Choice, parts: tuple[Any, ...]) -> bool:
    """Whether `x[mask][:, mask]` is taken by the mask that chose those rows."""
    if len(parts) != 2 or not isinstance(parts[0], slice) or parts[0] != _ALL:
        return False
    mask = parts[1]
    if not isinstance(mask, Tensor) or isinstance(mask, Rows) or mask.dtype != torch.bool:
        return False
    return tuple(mask.shape) == choice.shape and in_order(mask_key(mask)) == in_order(choice.key)


def _of_known(places: Tensor | None, parts: tuple[Any, ...]) -> Tensor | None:
    if places is None:
        return None
    with tracing_suspended():
        return Tensor.__getitem__(places, parts)


def _every(parts: tuple[Any, ...], ndim: int) -> list[Any]:
    """Of an index, what is taken of each dim."""
    rest = [_ALL] * (ndim - sum(part is not None and part is not Ellipsis for part in parts))
    place = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    return [*parts[:place], *rest, *parts[place + 1 :]]


def _among(x: Rows, same: Choice, mask: Tensor) -> Rows:
    """Those of the rows, or of the places in them, where `mask`, [n, *some], holds."""
    lead = mask.shape
    valid = (filled(mask, same.valid, 0)).reshape(-1)
    choice = Choice(valid, (same.key, mask_key(mask)), tuple(lead), user_place(), same.answer)
    return choice.rows(x.padded.reshape(prod(lead), *x.padded.shape[len(lead) :]))


def _at_rows(x: Tensor, parts: tuple[Any, ...]) -> Rows:
    """`x[i, j]` of places that a mask chose: [n, *the rest of x]; `x[None, i]`: [1, n, *the rest]."""
    if parts[0] is None:
        rows = _at_rows(x, parts[1:])
        return rows.choice.rows(rows.padded.unsqueeze(1), at=rows.at + 1)
    first = next(i for i, part in enumerate(parts) if isinstance(part, Rows))
    if first:
        x = Tensor.__getitem__(x, parts[:first])
    after = [i for i, part in enumerate(parts) if isinstance(part, Rows)]
    numbers = all(rows.dtype in (torch.int64, torch.int32) for rows in rows_in(parts))
    others = [part for part in parts if isinstance(part, Tensor) and not isinstance(part, Rows)]
    lead = all(isinstance(part, int) for part in parts[:first])
    if not (numbers and lead and after == list(range(first, first + len(after)))) or others:
        raise RowsUnknown("an index of chosen rows and of something else")
    index: Any = tuple(part.seen if isinstance(part, Rows) else part for part in parts[first:])
    choice, rows = one_choice(parts), rows_in(parts)
    if any(one.is_pair or one.back != rows[0].back for one in rows):
        raise unknown("an index", choice)
    at = max(one.padded.ndim for one in rows) - rows[0].back
    return choice.rows(Tensor.__getitem__(x, index).movedim(at, 0), at=at)


def _choice(answer: Answer, mask: Tensor, key: Hashable = None) -> Choice:
    valid = mask.clone() if mask.dtype == torch.bool else mask != 0
    return Choice(valid.reshape(-1), key or mask_key(mask), tuple(mask.shape), user_place(), answer)


def mask_key(mask: Tensor) -> Hashable:
    """Equal for tensors of equal values, as far as it is known how they came about (`key_noted`)."""
    key, version = getattr(mask, "_row_key", (None, None))
    return key if version == mask._version else (_Same(mask), mask._version)


class _Same:
    """Equal for one object, which is kept, so that no other gets its identity."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


def key_noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose results of the same arguments are known to be the same: `z[y != 0]` and `y[y != 0]`."""

    @wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        leaves = enumerate(result if isinstance(result, tuple) else (result,))
        results = [(i, r) for i, r in leaves if isinstance(r, Tensor) and all(r is not a for a in args)]
        if not results or rows_in((result, args, kwargs)):
            return result
        given = [*map(_key_of, (*args, *kwargs.values()))]
        for place, leaf in results if None not in given else ():
            leaf._row_key = ((function.__name__, place, *given), leaf._version)  # type: ignore[attr-defined]
        return result

    return noted


_PLAIN = (bool, int, float, str, type(None), type(Ellipsis), torch.dtype, torch.device)


def _key_of(given: Any) -> Hashable:
    """Of an argument; None for one of which it is not known when another is the same."""
    if isinstance(given, Tensor):
        return mask_key(given)
    if isinstance(given, slice):
        return _key_of((given.start, given.stop, given.step))
    if isinstance(given, (tuple, list)):
        keys = tuple(map(_key_of, given))
        return None if None in keys else keys
    return repr(given) if isinstance(given, _PLAIN) and not isinstance(given, Awaited) else None
