"""What is done over the dim of chosen rows (`passes.capture.rows`), and what moves it: views, turns, attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.capture.rows import Choice, Rows, by_row, filled, in_front, one_choice, plainly, rows_in, unknown
from passes.ir.op_traits import neutral

Options = dict[str, Any]


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


def _logsumexp(rows: Rows, dims: list[int], keepdim: bool, options: Options) -> Tensor:
    return torch.logsumexp(_lowest(rows), dims, keepdim)


def _cumsum(rows: Rows, dims: list[int], keepdim: bool, options: Options) -> Rows:
    return rows.choice.rows(filled(rows.padded, rows.choice.valid, 0).cumsum(*dims, **options))


OVER: dict[Any, Callable[..., Any]] = {
    "sum": _sum, "mean": _mean, "std": _std, "var": _var, "any": _any, "all": _all, "cumsum": _cumsum,
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
    if name in ("softmax", "log_softmax") and isinstance(first, Rows) and dim in (-1, first.padded.ndim - 1):
        low = torch.where(valid, first.seen, torch.finfo(first.padded.dtype).min)
        return paired(choice, func(low, *args[1:], **kwargs))
    other = args[1] if len(args) > 1 else None
    if name == "matmul" and isinstance(first, Rows) and isinstance(other, Rows) and other.back == 2:
        found = torch.matmul(torch.where(valid, first.seen, 0), other.seen)
        return choice.rows(found.movedim(-2, 0), at=found.ndim - 2)
    raise unknown(name, choice)


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


def _of_heads(*args: Any, **kwargs: Any) -> tuple[Rows, None]:
    """`nn.MultiheadAttention` of rows [n, batch, width], without weights among its results."""
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    q, k, v = (given[name] for name in ("query", "key", "value"))
    unset = ("attn_mask", "key_padding_mask", "bias_k", "bias_v", "static_k", "static_v", "add_zero_attn")
    alike = all(isinstance(x, Rows) and x.padded.ndim == 3 and not x.at for x in (q, k, v))
    is_set = given["need_weights"] or any(given[name] not in (None, False) for name in unset)
    if is_set or not alike:
        raise unknown("attention with a mask or weights of them", one_choice((q, k, v)))
    weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    if not given["use_separate_proj_weight"]:
        weights = given["in_proj_weight"].chunk(3)
    biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    made = (F.linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True))
    heads = (x.unflatten(-1, (given["num_heads"], -1)).permute(1, 2, 0, 3) for x in made)
    dropped = given["dropout_p"] if given["training"] else 0.0
    found: Any = F.scaled_dot_product_attention(*heads, dropout_p=dropped)
    return F.linear(
        found.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"]
    ), None  # type: ignore[return-value]


MOVES: dict[str, Callable[..., Any]] = {
    "view": _view, "reshape": _view, "flatten": _flatten, "expand": _expand, "expand_as": _expand_as,
    "repeat": _repeat, "permute": _permute, "transpose": _transpose, "swapaxes": _transpose, "swapdims": _transpose,
    "t": _turned, "T": _turned, "mT": _turned, "stack": _stack,
    "multi_head_attention_forward": _of_heads,
}  # fmt: skip
