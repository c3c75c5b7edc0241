"""What torch's functions make of rows that a mask chose (`passes.capture.rows`), by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.capture import row_dims, row_index, row_parts, row_values
from passes.capture.provenance import user_place
from passes.capture.row_dims import by_row, plainly
from passes.capture.row_parts import cat, in_order_of_values, index_add_, is_counted
from passes.capture.row_parts import split as split_in_counts
from passes.capture.row_values import counted, each_row, settled
from passes.capture.rows import (
    LengthAsked,
    Rows,
    RowsUnknown,
    check_first,
    filled,
    name_of,
    one_choice,
    rows_in,
    unknown,
)
from passes.ir.torch_dispatch import python_functions_run

_EACH = """
add sub mul div true_divide floor_divide remainder pow rsub rdiv rpow rfloordiv floordiv mod neg abs sign exp expm1 log
log1p log2 sqrt rsqrt square reciprocal sin cos tan tanh atan atan2 erf sigmoid relu relu6 gelu silu mish elu selu celu
leaky_relu softplus softsign hardswish hardsigmoid hardtanh logsigmoid clamp clip clamp_min clamp_max maximum minimum
where lerp round floor ceil eq ne lt le gt ge logical_and logical_or logical_xor logical_not bitwise_and bitwise_or
bitwise_xor bitwise_not and or xor invert isnan isinf isfinite nan_to_num masked_fill dropout to float double half
bfloat16 int long bool type_as clone detach contiguous xlogy logit zeros_like ones_like full_like empty_like rand_like
randn_like broadcast_tensors
"""
_POINTWISE = frozenset(_EACH.split())
_ALL_DIMS = "softmax log_softmax logsumexp sum mean prod amax amin argmax argmin max min var std cumsum cumprod any all"
_ONE_DIM = "narrow select squeeze gather index_select flip softmin unsqueeze unflatten"
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(f"{_ALL_DIMS} {_ONE_DIM}".split(), (1, None)),
    "norm": (2, None), "normalize": (2, 1), "cosine_similarity": (2, 1), "topk": (2, -1), "chunk": (2, 0),
    "split": (2, 0), "glu": (1, -1), "sort": (1, -1), "argsort": (1, -1), "repeat_interleave": (2, None),
}  # fmt: skip
"""Functions that work along dims, which that of the rows may not be among: where their argument `dim` stands, and its
default; None: all dims."""
_LOSS_NAMES = """
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss
cross_entropy nll_loss poisson_nll_loss cosine_embedding_loss margin_ranking_loss triplet_margin_loss
"""
_LOSSES = frozenset(_LOSS_NAMES.split())
_BATCHED = {
    name: k + 2 for k in (1, 2, 3) for name in (
        f"conv{k}d", f"conv_transpose{k}d", f"max_pool{k}d", f"avg_pool{k}d", f"adaptive_avg_pool{k}d",
        f"adaptive_max_pool{k}d",
    )
} | {"prelu": 2, "group_norm": 2, "instance_norm": 3}  # fmt: skip
_WITH_WEIGHTS = {
    "linear": 2,
    "embedding": 1,
    "layer_norm": 2,
    "rms_norm": 2,
    "one_hot": 1,
    "cdist": 2,
} | _BATCHED
"""Functions of rows and weights: the dims that rows have at least; those of a batch, whose rows are the first."""
_FACT_NAMES = """dtype device layout ndim dim requires_grad is_floating_point is_complex is_cuda is_nested
is_quantized new_zeros new_ones new_full new_empty new_tensor"""
_FACTS = frozenset(_FACT_NAMES.split())


def row_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    args, kwargs = settled((args, kwargs))
    try:
        if rows_in((args, kwargs)):
            return _of_all_rows(name, func, args, kwargs)
    except RowsUnknown as error:
        writes = name == "set" or _is_inplace(name, func, args, kwargs)
        if writes and isinstance(args[0], Rows) and args[0].may_be_shared:
            raise
        args, kwargs = counted((args, kwargs), error)
    answer: Any = ROWS.get(func, func)
    return answer(*args, **kwargs)


def _of_all_rows(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in _FACTS:
        return plainly(func, args, kwargs)
    if row_dims.is_of_pairs(args, kwargs, name in _POINTWISE):
        return row_dims.of_pairs(name, name in _POINTWISE, func, args, kwargs)
    if name in _FIRST:
        check_first((args, kwargs), name)
    if name in _SPECIAL:
        return _SPECIAL[name](*args, **kwargs)
    if name in _LOSSES:
        return _loss(func, args, kwargs)
    if _is_inplace(name, func, args, kwargs):
        return _in_place(name, func, args, kwargs)
    if name in _ALONG and not (name in ("max", "min") and rows_in(args[1:])):
        return _along(name, func, args, kwargs)
    if name in _WITH_WEIGHTS:
        return _with_weights(name, func, args, kwargs)
    if name in _POINTWISE or name in ("max", "min"):
        return _pointwise(func, args, kwargs)
    if inspect.isfunction(func):
        with python_functions_run():
            return func(*args, **kwargs)
    raise unknown(name, one_choice((args, kwargs)))


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is not rows is broadcast along them; of a tensor that says a dtype, that counts alone."""
    if name_of(func) in ("to", "type_as"):
        func, args = Tensor.to, (args[0], *(x.dtype if isinstance(x, Tensor) else x for x in args[1:]))
        if not rows_in(args):
            return func(*args, **kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    rows = rows_in(tensors)
    back = rows[0].back
    for leaf in tensors:
        if isinstance(leaf, Rows):
            fits = leaf.back == back
        else:
            fits = leaf.ndim < back or leaf.shape[-back] == 1
        if not fits:
            shape = f"a tensor of shape {list(leaf.shape)}" if not isinstance(leaf, Rows) else "others"
            raise unknown(f"{name_of(func)} of them and of {shape}", rows[0].choice)
    ndim = max(leaf.padded.ndim if isinstance(leaf, Rows) else leaf.ndim for leaf in tensors)
    return by_row(func, args, kwargs, ndim - back)


def _is_inplace(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """By its name, or whether its argument `inplace` is set; activations and dropout are functions in Python."""
    if name.endswith("_"):
        return True
    if getattr(func, "__module__", "") != "torch.nn.functional":
        return False
    return bool(inspect.signature(func).bind(*args, **kwargs).arguments.get("inplace"))


_NEW: dict[str, Callable[..., Any]] = {
    "zero_": torch.zeros_like,
    "fill_": lambda rows, value: torch.zeros_like(rows) + value,
    "copy_": lambda rows, value, *_: torch.zeros_like(rows) + value.to(rows.dtype),
}
"""What tensors become that are written over."""


def _in_place(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As a new value of the rows, which no others may share."""
    rows = args[0]
    plain = _NEW.get(name, getattr(Tensor, name[:-1], None)) if name.endswith("_") else func
    is_known = name in _NEW or name.removesuffix("_") in _POINTWISE
    if not isinstance(rows, Rows) or rows.is_aliased or not is_known:
        raise unknown(name, one_choice((args, kwargs)))
    if plain is func:
        given = inspect.signature(func).bind(*args, **kwargs)
        given.arguments["inplace"] = False
        args, kwargs = given.args, given.kwargs
    result = _pointwise(plain, args, kwargs)
    if result.dtype != rows.dtype or result.padded.shape != rows.padded.shape:
        raise unknown(name, rows.choice)
    rows.write(result.padded)
    return rows


def _along(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place, default = _ALONG[name]
    dim = kwargs.get("dim", args[place] if len(args) > place else default)
    rows = args[0] if args else None
    if not isinstance(rows, Rows) or isinstance(dim, Tensor):
        raise unknown(name, one_choice((args, kwargs)))
    ndim = rows.padded.ndim + (name == "unsqueeze")
    dims = range(ndim) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    dims = [d % ndim for d in dims]
    if name == "unsqueeze":
        return by_row(func, args, kwargs, rows.at + (dims[0] <= rows.at))
    if rows.at not in dims:  # those before that of the rows may be gone after it, or be more
        before, ndim = sum(d < rows.at for d in dims), rows.padded.ndim
        return by_row(func, args, kwargs, lambda n: rows.at + before * (n - ndim) // len(dims))
    if name in ("sort", "argsort") and not rows.at:
        given = dict(zip(("dim", "descending"), args[1:], strict=False)) | kwargs
        found = in_order_of_values(rows, bool(given.get("descending", False)))
        return found if name == "sort" else found[1]
    if name == "topk":
        return row_dims.largest_ones(rows, *args[1:], **kwargs)
    if name not in row_dims.OVER or isinstance(dim, bool):
        raise unknown(name, rows.choice)
    return row_dims.over_rows(name, rows, dims, args[1:], kwargs)


def _loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is left out of a class loss is the class that it ignores; other losses are summed over their rows."""
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    choice = one_choice(options)
    name, reduction, target = func.__name__, options["reduction"], options.get("target")
    rows = rows_in(list(options.values())[:2])
    if len(rows) != 2 or options.get("size_average") is not None or options.get("reduce") is not None:
        raise unknown(name, choice)
    if (
        "ignore_index" in options
        and isinstance(target, Rows)
        and not target.is_floating_point()
        and reduction != "none"
    ):
        options["target"] = filled(target.padded, choice.valid, options["ignore_index"])
        return plainly(func, given.args, given.kwargs)
    options["reduction"] = "none"
    each = (by_row if "ignore_index" in options else _pointwise)(func, given.args, given.kwargs)
    if reduction == "none":
        return each
    total = each.sum()
    if reduction == "sum":
        return total
    return total / choice.valid.sum() if reduction == "batchmean" else each.mean()


def _with_weights(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = args[0] if args else None
    least = _WITH_WEIGHTS[name]
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        least = 1 + len(shape)
    if name == "one_hot" and kwargs.get("num_classes", args[1] if len(args) > 1 else -1) < 0:
        least = 9
    if not isinstance(rows, Rows) or len(rows_in((args, kwargs))) > 1 or rows.back < least:
        raise unknown(name, one_choice((args, kwargs)))
    return by_row(func, args, kwargs)


def _added_product(input: Any, one: Any, other: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return torch.add(input if beta == 1 else input * beta, torch.matmul(one, other), alpha=alpha)


def _einsum(equation: str, *operands: Any) -> Any:
    """Of rows and others, or of rows by all rows, `nd,md->nm`."""
    given = list(operands[0]) if isinstance(operands[0], (list, tuple)) else list(operands)
    choice, rows = one_choice(given), rows_in(given)
    terms, arrow, out = equation.replace(" ", "").partition("->")
    letters = [
        term[one.at] for term, one in zip(terms.split(","), given, strict=True) if isinstance(one, Rows)
    ]
    names = list(dict.fromkeys(letters))
    if not arrow or "." in equation or any(one.is_pair for one in rows):
        raise unknown("einsum", choice)
    if any(terms.count(name) != letters.count(name) for name in names):
        raise unknown("einsum", choice)
    if len(names) == 2 and out.endswith("".join(names)):
        return row_dims.paired(choice, torch.einsum(equation, *map(row_dims.bare, given)))
    if len(names) > 1:
        raise unknown("einsum", choice)
    if names[0] not in out:
        first = next(i for i, one in enumerate(given) if isinstance(one, Rows))
        given[first] = torch.where(choice.valid.reshape(-1, *[1] * (rows[0].back - 1)), rows[0].seen, 0)
        return torch.einsum(equation, *map(row_dims.bare, given))
    at = out.index(names[0])
    return choice.rows(torch.einsum(equation, *map(row_dims.bare, given)).movedim(at, 0), at=at)


def _shape(rows: Rows) -> tuple[Any, ...]:
    shape: list[Any] = list(rows.seen.shape)
    shape[rows.at] = rows.choice.valid.sum()
    shape[rows.at].counts = rows.choice
    return tuple(shape)


def _size(rows: Rows, dim: int | None = None) -> Any:
    return _shape(rows) if dim is None else _shape(rows)[dim]


def _numel(rows: Rows) -> Tensor:
    return rows.choice.valid.sum() * prod(rows.padded.shape[1:])


def _unbind(rows: Rows, dim: int = 0) -> Any:
    """In rows, what a loop over them goes through."""
    if dim % rows.padded.ndim != rows.at:
        return tuple(_along("select", torch.select, (rows, dim, i), {}) for i in range(rows.seen.shape[dim]))
    if rows.places is None:
        text = f"a loop over the rows chosen at {rows.choice.made}"
        raise RowsUnknown(text, "a loop over all, with torch.where")
    return each_row(rows)


def _length(rows: Rows) -> int:
    text = f"len() is asked of the rows chosen at {rows.choice.made}"
    raise LengthAsked(RowsUnknown(text, "rows.shape[0], or mask.sum()", user_place()))


def _indexed(function: Callable[..., Any]) -> Callable[..., Any]:
    return partial(function, row_function)


def _split(tensor: Any, split_size: Any = None, dim: int = 0, *, split_size_or_sections: Any = None) -> Any:
    """The same arguments and results as `torch.split` and `Tensor.split`."""
    sizes = split_size if split_size_or_sections is None else split_size_or_sections
    if is_counted(sizes):
        return split_in_counts(row_function, tensor, sizes, dim)
    try:
        if isinstance(tensor, Rows):
            return _along("split", torch.split, (tensor, sizes, dim), {})
    except RowsUnknown as error:
        tensor = counted(tensor, error)
    return torch.split(tensor, sizes, dim)


def _gather(input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if isinstance(input, Rows) or dim % input.ndim:
        return _along("gather", torch.gather, (input, dim, index), {})
    return index.choice.rows(torch.gather(input, 0, index.padded))


def _index_select(input: Any, dim: int, index: Any) -> Any:
    if isinstance(input, Rows) or dim % input.ndim:
        return _along("index_select", torch.index_select, (input, dim, index), {})
    return _getitem(input, index)


def _copied(x: Tensor, dim: int, index: Any, source: Any) -> Tensor:
    if isinstance(x, Rows) or dim % x.ndim:
        raise unknown("index_copy", one_choice((x, index, source)))
    _setitem(x, index, source)
    return x


def _on_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: function(x.clone(), *args, **kwargs)


@row_index.key_noted
def _getitem(x: Any, index: Any) -> Any:
    return row_values.getitem(row_function, x, index)


_setitem, _put = _indexed(row_values.setitem), _indexed(row_index.put)
_SCATTERS = ("scatter_", "scatter_add_", "scatter_reduce_")
_SPECIAL: dict[str, Callable[..., Any]] = {
    "getitem": _getitem, "setitem": _setitem, "index_add_": index_add_,
    "index_add": _on_copy(index_add_), "index_copy_": _copied, "index_copy": _on_copy(_copied),
    **{name: getattr(row_parts, name) for name in _SCATTERS},
    **{name.removesuffix("_"): _on_copy(getattr(row_parts, name)) for name in _SCATTERS},
    "gather": _gather, "index_select": _index_select, "cat": cat, "split": _split, "einsum": _einsum,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), row_dims.matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _added_product),
    "index_put_": _put, "index_put": _on_copy(_put), "_is_all_true": lambda x: x.all(),
    "masked_scatter": partial(row_index.filled_in, torch.masked_scatter),
    "masked_scatter_": partial(row_index.filled_in, Tensor.masked_scatter_), "shape": _shape, "size": _size,
    **dict.fromkeys(("numel", "nelement"), _numel), "len": _length,
    **dict.fromkeys(("repr", "format"), lambda rows, *_: f"rows chosen at {rows.choice.made}"),
    "unbind": _unbind, **row_dims.MOVES,
}  # fmt: skip
_FIRST_NAMES = """
setitem index_add_ index_add index_copy_ index_copy scatter_add_ scatter_add scatter_reduce_ scatter_reduce gather
index_select len expand_as
"""
_FIRST = frozenset({*_FIRST_NAMES.split(), *_LOSSES, *_BATCHED})
"""Functions of rows that are the first dim."""


def _where(*args: Any, **kwargs: Any) -> Any:
    if len(args) + len(kwargs) == 1:
        return row_index.chosen_places(row_function, *args, *kwargs.values())
    return torch.where(*args, **kwargs)


def _comparisons() -> dict[Any, Callable[..., Any]]:
    names = "eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not bool"
    views = "__eq__ __and__ __or__ __invert__ view reshape flatten unsqueeze sum to sort"
    owned = [getattr(owner, name, None) for owner in (torch, Tensor) for name in f"{names} {views}".split()]
    return {function: row_index.key_noted(function) for function in owned if function is not None}


ROWS: dict[Any, Callable[..., Any]] = {
    **_comparisons(),
    Tensor.tolist: lambda x: x.tolist(),
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    torch.where: _where,
    **dict.fromkeys((torch.masked_select, Tensor.masked_select), _indexed(row_index.masked_select)),
    **dict.fromkeys((torch.split, Tensor.split), _split),
    **dict.fromkeys(
        (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere), _indexed(row_index.places_listed)
    ),
}
"""Torch functions to answer otherwise while tracing."""
