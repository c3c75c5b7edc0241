"""What is done over the dim of chosen rows (`passes.capture.rows`), and what moves it: views, turns, attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.capture.rows import Choice, Rows, filled, in_front, name_of, one_choice, rows_in, unknown
from passes.ir.op_traits import neutral
from passes.ir.torch_tracing import tracing_suspended

Options = dict[str, Any]
_VIEW_NAMES = "chunk split narrow select squeeze unsqueeze unflatten permute expand detach"
_VIEWS, _FIRST_VIEWS = frozenset(_VIEW_NAMES.split()), frozenset(("flatten", "reshape"))
"""Views; and those of memory in order, as it is where rows are the first dim."""
_SAME_NAMES = "to float double half bfloat16 int long bool type_as contiguous flatten reshape"
_SAME = frozenset(_SAME_NAMES.split())
"""Whose results may share memory with their argument."""


def bare(value: Any) -> Any:
    return value.seen if isinstance(value, Rows) else value


def plainly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function of all rows."""
    given: Any = pytree.tree_map(bare, (args, kwargs))
    return func(*given[0], **given[1])


def by_row(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at: int | Callable[[int], int] | None = None
) -> Any:
    """The same of a function that works on each row alone. at: of its results, or ndim -> at; None: that of all its
    rows."""
    rows, name = rows_in((args, kwargs)), name_of(func)
    choice = one_choice(rows)
    first = rows[0]
    if any(one.is_pair or one.back != first.back or (at is None and one.at != first.at) for one in rows):
        raise unknown(name, choice)
    made = plainly(func, args, kwargs)
    if made is first.padded:
        return first
    to = at(pytree.tree_leaves(made)[0].ndim) if callable(at) else first.at if at is None else at
    is_first = not (to or first.at)
    base = first if name in _VIEWS or (is_first and name in _FIRST_VIEWS) else None
    result = pytree.tree_map_only(
        Tensor, lambda seen: choice.rows(seen.movedim(to, 0) if to else seen, at=to, base=base), made
    )
    if base is not None and first.places is not None and isinstance(result, Rows) and is_first:
        with tracing_suspended():
            result.places = func(first.places, *args[1:], **kwargs)
    for one in (*rows, *rows_in(result)) if base is None and name in _SAME else ():
        one.is_aliased, one.copies = True, first.copies
    return result


def over_rows(name: str, rows: Rows, dims: Sequence[int], rest: tuple[Any, ...], kwargs: Options) -> Any:
    """The function named so over those dims, of which one is that of the rows. rest, kwargs: what it was given behind
    the rows."""
    names = ("dim", "unbiased", "keepdim") if name in ("std", "var") else ("dim", "keepdim")
    given = dict(zip(names, rest, strict=False)) | kwargs
    options = {key: given[key] for key in ("unbiased", "correction") if given.get(key) is not None}
    if dtypes := [value for value in (*rest, *kwargs.values()) if isinstance(value, torch.dtype)]:
        options["dtype"] = dtypes[0]
    order = [rows.at, *(d for d in range(rows.padded.ndim) if d != rows.at)]
    dims, keepdim = [order.index(d) for d in dims], bool(given.get("keepdim", False))
    is_pair = name in ("max", "min") and given.get("dim") is not None
    found = (
        OVER[name, "dim"](rows, dims, keepdim, options)
        if is_pair
        else OVER[name](rows, dims, keepdim, options)
    )
    if isinstance(found, Rows):
        return rows.choice.rows(found.padded, at=rows.at)
    back = lambda x: x.movedim(0, rows.at)
    return pytree.tree_map_only(Tensor, back, found) if keepdim and rows.at else found


def _sum(rows: Rows, dims: list[int], keepdim: bool, options: Options) -> Tensor:
    return torch.sum(filled(rows.padded, rows.choice.valid, 0), dims, keepdim=keepdim, **options)


def _count(rows: Rows, dims: list[int]) -> Tensor:
    return rows.choice.valid.sum() * prod(rows.padded.shape[d] for d in dims if d)


def _mean(rows: Rows, dims: list[int], keepdim: bool, options: Options) -> Tensor:
    """Summed in float32 at least, as torch does."""
    dtype = options.get("dtype", rows.padded.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (_sum(rows, dims, keepdim, {"dtype": wide}) / _count(rows, dims)).to(dtype)


def _var(rows: Rows, dims: list[int], keepdim: bool, options: Options) -> Tensor:
    correction = options.get("correction", int(options.get("unbiased", True)))
    away = rows.padded - _mean(rows, dims, True, {})
    return _sum(rows.choice.rows(away.square()), dims, keepdim, {}) / (_count(rows, dims) - correction)


def _std(rows: Rows, dims: list[int], keepdim: bool, options: Options) -> Tensor:
    """Of equal rows it has no slope, as torch has it."""
    var = _var(rows, dims, keepdim, options)
    return torch.where(var == 0, 0.0, torch.where(var == 0, 1.0, var).sqrt())


def _any(rows: Rows, dims: list[int], keepdim: bool, options: Options) -> Tensor:
    return _sum(rows.choice.rows(rows.padded != 0), dims, keepdim, {}) > 0


def _all(rows: Rows, dims: list[int], keepdim: bool, options: Options) -> Tensor:
    return _sum(rows.choice.rows(rows.padded == 0), dims, keepdim, {}) == 0


def _largest(
    function: Callable[..., Any], op: str, rows: Rows, dims: list[int], keepdim: bool, options: Options
) -> Any:
    return function(filled(rows.padded, rows.choice.valid, neutral(op, rows.padded.dtype)), dims, keepdim)


def _with_number(
    function: Callable[..., Any], op: str, rows: Rows, dims: list[int], keepdim: bool, options: Options
) -> Any:
    """A number counts the rows that are there."""
    if len(dims) > 1:
        raise unknown(function.__name__, rows.choice)
    front = filled(in_front(rows), rows.choice.in_front.valid, neutral(op, rows.padded.dtype))
    return function(front, dims[0], keepdim)


def _softmax(
    function: Callable[..., Tensor], rows: Rows, dims: list[int], keepdim: bool, options: Options
) -> Rows:
    return rows.choice.rows(function(_lowest(rows), dims[0], **options))


def _lowest(rows: Rows) -> Tensor:
    """Rows that are not there are low, and not infinite, as all may be."""
    return filled(rows.padded, rows.choice.valid, torch.finfo(rows.padded.dtype).min)


def largest_ones(rows: Rows, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """`torch.topk` over the rows; a number counts those that are there."""
    front = rows.choice.in_front
    if rows.at:
        raise unknown("topk", rows.choice)
    if front.valid.sum() < k:
        raise RuntimeError("selected index k out of range")
    out = neutral("max" if largest else "min", rows.padded.dtype)
    return torch.topk(filled(in_front(rows), front.valid, out), k, 0, largest, sorted)


def _prod(rows: Rows, dims: list[int], keepdim: bool, options: Options) -> Tensor:
    found = filled(rows.padded, rows.choice.valid, 1)
    for dim in sorted(dims, reverse=True):
        found = found.prod(dim, keepdim=keepdim, **options)
    return found


def _logsumexp(rows: Rows, dims: list[int], keepdim: bool, options: Options) -> Tensor:
    return torch.logsumexp(_lowest(rows), dims, keepdim)


def _cumulated(
    function: Callable[..., Tensor], first: int, rows: Rows, dims: list[int], keepdim: bool, options: Options
) -> Rows:
    return rows.choice.rows(function(filled(rows.padded, rows.choice.valid, first), *dims, **options))


OVER: dict[Any, Callable[..., Any]] = {
    "sum": _sum, "mean": _mean, "std": _std, "var": _var, "any": _any, "all": _all,
    "cumsum": partial(_cumulated, torch.cumsum, 0), "prod": _prod, "cumprod": partial(_cumulated, torch.cumprod, 1),
    "amax": partial(_largest, torch.amax, "max"), "amin": partial(_largest, torch.amin, "min"),
    "max": partial(_largest, torch.amax, "max"), "min": partial(_largest, torch.amin, "min"),
    ("max", "dim"): partial(_with_number, torch.max, "max"), ("min", "dim"): partial(_with_number, torch.min, "min"),
    "argmax": partial(_with_number, torch.argmax, "max"), "argmin": partial(_with_number, torch.argmin, "min"),
    "softmax": partial(_softmax, torch.softmax), "log_softmax": partial(_softmax, torch.log_softmax),
    "logsumexp": _logsumexp,
}  # fmt: skip


def _in_one(shape: tuple[Any, ...]) -> list[Any]:
    return list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)


def _view(rows: Rows, *shape: Any) -> Any:
    """[*any, n, *more] as [*others, n, *others]."""
    wanted, seen = _in_one(shape), rows.seen.shape
    if rows.grouped is not None and len(wanted) > 1:
        return _view(rows.grouped, *wanted)
    counted = [i for i, size in enumerate(wanted) if isinstance(size, Tensor)]
    free = [i for i, size in enumerate(wanted) if i not in counted and size == -1]
    at = (counted or free or [0])[0]
    before, after = wanted[:at], wanted[at + 1 :]
    if len(counted) == len(free) == 1:  # it is what the others leave
        known = -prod(before + after)
        before, after = (
            [prod(seen) // seen[rows.at] // known if n == -1 else n for n in part] for part in (before, after)
        )
    ours, others = (prod(before), prod(after)), (prod(seen[: rows.at]), prod(seen[rows.at + 1 :]))
    if len(counted) > 1 or not (counted or free) or ours != others:
        raise unknown("reshape", rows.choice)
    return by_row(Tensor.reshape, (rows, *before, seen[rows.at], *after), {}, at)


def _flatten(rows: Rows, start_dim: int = 0, end_dim: int = -1) -> Any:
    """The rows stay a dim: others that are joined with it are of one."""
    seen, ndim = list(rows.seen.shape), rows.padded.ndim
    first, last = start_dim % ndim, end_dim % ndim
    seen[rows.at] = -1
    joined = -1 if first <= rows.at <= last else prod(seen[first : last + 1])
    return _view(rows, *seen[:first], joined, *seen[last + 1 :])


def _expand(rows: Rows, *shape: Any) -> Rows:
    wanted = _in_one(shape)
    at = len(wanted) - rows.back
    if at < 0 or not (isinstance(wanted[at], Tensor) or wanted[at] == -1):
        raise unknown("expand", rows.choice)
    return by_row(Tensor.expand, (rows, *wanted[:at], rows.padded.shape[0], *wanted[at + 1 :]), {}, at)


def _expand_as(x: Any, other: Any) -> Rows:
    choice = one_choice((x, other))
    if not (isinstance(x, Rows) and isinstance(other, Rows)):
        raise unknown("expand_as", choice)
    return _expand(x, -1, *other.padded.shape[1:])


def _repeat(rows: Rows, *times: Any) -> Rows:
    wanted = _in_one(times)
    at = len(wanted) - rows.back
    if at < 0 or wanted[at] != 1:
        raise unknown("repeat", rows.choice)
    return by_row(Tensor.repeat, (rows, *wanted), {}, at)


def _permute(rows: Rows, *dims: Any) -> Rows:
    order = [d % rows.padded.ndim for d in _in_one(dims)]
    return by_row(torch.permute, (rows, order), {}, order.index(rows.at))


def _transpose(rows: Rows, dim0: int, dim1: int) -> Rows:
    order = list(range(rows.padded.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(rows, order)


def _turned(rows: Rows) -> Rows:
    return _transpose(rows, -1, -2)


def _stack(tensors: Sequence[Any], dim: int = 0) -> Rows:
    first = next(tensor for tensor in tensors if isinstance(tensor, Rows))
    if not all(isinstance(tensor, Rows) for tensor in tensors):
        raise unknown("stack", first.choice)
    at = first.at + (dim % (first.padded.ndim + 1) <= first.at)
    if any(tensor.at != first.at for tensor in tensors):
        raise unknown("stack", first.choice)
    return by_row(torch.stack, (list(tensors), dim), {}, at)


def matmul(x: Any, other: Any) -> Any:
    if isinstance(x, Rows) and isinstance(other, Rows):
        if x.back == 2 and other.back == 1 < other.padded.ndim:
            return paired(one_choice((x, other)), torch.matmul(x.seen, other.seen))
        if x.back == 1 < x.padded.ndim and other.back == 2:
            return torch.matmul(torch.where(one_choice((x, other)).valid, x.seen, 0), other.seen)
        fits = x.back == other.back > 2
    elif isinstance(x, Rows):
        fits = other.ndim <= 2 <= x.back
    else:
        fits = x.ndim <= other.padded.ndim >= 2 and other.back == 1
    if not fits:
        raise unknown("matmul", one_choice((x, other)))
    return by_row(torch.matmul, (x, other), {})


def paired(choice: Choice, seen: Tensor) -> Rows:
    """[*any, n, n], of which the rows of both dims are there."""
    rows = choice.rows(seen.movedim(-2, 0), at=seen.ndim - 2)
    rows.is_pair = True
    return rows


def is_of_pairs(args: tuple[Any, ...], kwargs: Options, is_pointwise: bool) -> bool:
    """Whether rows meet all rows: `a[:, None] >= b[None]`, `softmax(a @ b.T)`."""
    rows = rows_in((args, kwargs))
    return any(one.is_pair for one in rows) or (is_pointwise and {one.back for one in rows} == {1, 2})


def of_pairs(name: str, is_pointwise: bool, func: Any, args: tuple[Any, ...], kwargs: Options) -> Rows:
    choice, first = one_choice((args, kwargs)), args[0] if args else None
    valid = choice.valid
    if is_pointwise and all(map(_is_beside_pairs, pytree.tree_leaves((args, kwargs)))):
        return paired(choice, plainly(func, args, kwargs))
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if (
        name == "unsqueeze"
        and isinstance(first, Rows)
        and isinstance(dim, int)
        and dim in range(first.at + 1)
    ):
        return paired(choice, first.seen.unsqueeze(dim))
    lead = first.padded.ndim - 2 if isinstance(first, Rows) else 0
    if name in ("sum", "mean", "amax", "amin") and isinstance(dim, int) and 0 <= dim < lead:
        return paired(choice, plainly(func, args, kwargs))
    if name in ("view", "reshape") and isinstance(first, Rows):
        wanted = _in_one(args[1:])
        if all(isinstance(size, Tensor) for size in wanted[-2:]):
            return paired(choice, first.seen.reshape(*wanted[:-2], *first.seen.shape[-2:]))
    if name in OVER and isinstance(first, Rows) and dim in (-1, first.padded.ndim - 1):
        return _over_others(name, first, args[1:], kwargs)
    if name == "cross_entropy" and isinstance(first, Rows) and first.padded.ndim == 2:
        return _class_loss(first, *args[1:], **kwargs)
    if name in ("diag", "diagonal") and isinstance(first, Rows) and first.padded.ndim == 2 and not args[1:]:
        return choice.rows(first.padded.diagonal())
    other = args[1] if len(args) > 1 else None
    if name in ("matmul", "bmm") and isinstance(first, Rows) and isinstance(other, Rows) and other.back == 2:
        found = torch.matmul(torch.where(valid, first.seen, 0), other.seen)
        return choice.rows(found.movedim(-2, 0), at=found.ndim - 2)
    raise unknown(name, choice)


def _over_others(name: str, pairs: Rows, rest: tuple[Any, ...], kwargs: Options) -> Any:
    """Over the last dim, of all that are there."""
    choice, last = pairs.choice, pairs.padded.ndim - 1
    found = over_rows(name, choice.rows(pairs.seen.movedim(-1, 0), at=last), [last], rest, kwargs)
    if isinstance(found, Rows):
        return paired(choice, found.seen)
    at = last - 1  # where it is in the result, whether its last dim is kept or not
    return pytree.tree_map_only(Tensor, lambda x: choice.rows(x.movedim(at, 0), at=at), found)


def _class_loss(pairs: Rows, target: Any, weight: Any = None, **kwargs: Any) -> Any:
    """The class of each row is one of those that are there, by its number."""
    choice = pairs.choice
    if weight is not None or kwargs.get("label_smoothing") or not isinstance(target, Rows):
        raise unknown("cross_entropy", choice)
    number = target.padded
    place = torch.where(number < 0, number, choice.order[number.clamp(0)])
    low = torch.where(choice.valid, pairs.padded, torch.finfo(pairs.padded.dtype).min)
    return F.cross_entropy(choice.rows(low), choice.rows(place), **kwargs)


def _is_beside_pairs(value: Any) -> bool:
    """Whether it is broadcast along both dims, or is of the rows there."""
    if not isinstance(value, Tensor):
        return True
    if not isinstance(value, Rows):
        return all(size == 1 for size in value.shape[-2:])
    if value.is_pair:
        return True
    others = value.seen.shape[-2:]
    return others[-1] == 1 if value.back == 2 else value.back == 1 and (len(others) < 2 or others[0] == 1)


def attended(attend: Callable[..., Tensor], q: Any, k: Any, v: Any, given: Any, is_causal: bool) -> Any:
    """`attend(q, k, v, mask)` of rows that are a sequence: each sees those that are there, and itself, as what sees
    nothing has no softmax. given: the mask of the call."""
    rows, of_keys = rows_in((q, k, v)), isinstance(k, Rows)
    choice = one_choice((q, k, v, given))
    alike = of_keys == isinstance(v, Rows) and all(one.back == 2 and not one.is_pair for one in rows)
    masks = given is None or (isinstance(given, Rows) and given.is_pair and len(rows) == 3)
    if not alike or not masks or (is_causal and len(rows) < 3):
        raise unknown("attention with a mask of them" if not masks else "attention", choice)
    mask = choice.valid[None] if of_keys else None
    if of_keys and isinstance(q, Rows):
        place = torch.arange(choice.valid.numel())
        after = place[:, None] - place
        there = (choice.valid & (after >= 0) if is_causal else choice.valid) | (after == 0)
        mask = there if given is None else _both(given.seen, choice.valid)
    found = attend(*(one.seen if isinstance(one, Rows) else one for one in (q, k, v)), mask)
    return choice.rows(found.movedim(-2, 0), at=found.ndim - 2) if isinstance(q, Rows) else found


def _both(mask: Tensor, valid: Tensor) -> Tensor:
    """What a mask of pairs lets rows see of those there. Rows that are not there see something, too."""
    absent = ~valid[:, None]
    return (
        (mask & valid) | absent
        if mask.dtype == torch.bool
        else torch.where(valid | absent, mask, float("-inf"))
    )


MOVES: dict[str, Callable[..., Any]] = {
    "view": _view, "reshape": _view, "flatten": _flatten, "expand": _expand, "expand_as": _expand_as,
    "repeat": _repeat, "permute": _permute, "transpose": _transpose, "swapaxes": _transpose, "swapdims": _transpose,
    "t": _turned, "T": _turned, "mT": _turned, "stack": _stack,
}  # fmt: skip
