"""Torch functions that are answered otherwise while a forward is traced, whatever it is traced for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import reduce, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from cost_model.errors import UnsupportedOpError
from passes.capture.operator_calls import (
    attention_for,
    ctc_loss,
    grouped_functions,
    grouped_product,
    multilabel_margin_loss,
    pad,
)
from passes.capture.packed_calls import PACKED
from passes.capture.row_dims import paired
from passes.capture.row_table import ROWS
from passes.capture.rows import Choice, Rows, one_choice, rows_in, unknown
from passes.ir.torch_dispatch import replaced_attribute
from passes.ir.torch_tracing import tracing_suspended


def tensor(
    data: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False, **options: Any
) -> Tensor:
    """The same arguments and result as `torch.tensor`, which reads values that traced tensors do not have."""
    leaves = pytree.tree_leaves(data) if isinstance(data, (list, tuple)) else []
    if requires_grad or not any(isinstance(leaf, Tensor) for leaf in leaves):
        return torch.tensor(data, dtype=dtype, requires_grad=requires_grad, **options)
    parts = [leaf.detach() if isinstance(leaf, Tensor) else torch.tensor(leaf) for leaf in leaves]
    kind = dtype or reduce(torch.promote_types, [part.dtype for part in parts])
    return _stacked(data, iter([part.to(kind) for part in parts]))


def new_tensor(x: Tensor, data: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """The same arguments and result as `Tensor.new_tensor`."""
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(data)):
        return tensor(data, dtype=dtype or x.dtype, **options)
    return Tensor.new_tensor(x, data, dtype=dtype, **options)


def _stacked(data: Any, parts: Any) -> Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(part, parts) for part in data])
    return next(parts)


def array(x: Tensor, *args: Any, dtype: Any = None, force: bool = False) -> Any:
    """The values are asked for. Nothing can be written to them, since no tensor would have it."""
    if type(x) is Tensor or (x.requires_grad and not force):
        return Tensor.numpy(x, force=force)
    values = x.tolist()
    with tracing_suspended():
        found = torch.tensor(values, dtype=x.dtype).reshape(x.shape).numpy()
    found.flags.writeable = False
    wanted = args[0] if args else dtype
    return found if wanted is None else found.astype(wanted, copy=False)


def _dense(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs)
        given.arguments.pop("sparse", None)
        return function(**given.arguments)

    return call


def _dense_gather(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, sparse_grad=False, **kwargs: function(*args, **kwargs)


_RESULTS: Any = torch.return_types  # it does not name all to type checkers


class _Residuals:
    """Where torch chooses the driver it gives some on a GPU, on a CPU none: what is done with them is an error."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedOpError(
            "lstsq: whether there are residuals depends on the device\n"
            "  try: driver='gels', for matrices of full rank, or (A @ solution - B).square().sum(-2)"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls().used


def lstsq(A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """The same arguments and results as `torch.linalg.lstsq`."""
    if driver not in (None, "gels", "gelsy"):
        raise UnsupportedOpError(
            f"lstsq: driver={driver!r}\n  try: driver='gelsy', which has the same solution"
        )
    vectors = B.ndim == 1 or B.shape == A.shape[:-1]
    right = B.unsqueeze(-1) if vectors else B
    x = torch.linalg.pinv(A, rtol=rcond) @ right
    solution, none = x.squeeze(-1) if vectors else x, A.new_zeros(0)
    if driver == "gels":
        rows, columns = A.shape[-2:]
        residuals = (A @ x - right).abs().square().sum(-2) if rows > columns else none
        return _RESULTS.linalg_lstsq((solution, residuals, none.long(), none))
    rank = torch.linalg.matrix_rank(A, rtol=rcond)
    residuals = _Residuals() if driver is None else none
    return _RESULTS.linalg_lstsq((solution, residuals, rank, none))


def set_data(x: Tensor, value: Tensor) -> None:
    """`x.data = value`, as a write that tracing sees. Raises UnsupportedOpError for another shape or dtype."""
    if (x.shape, x.dtype) != (value.shape, value.dtype):
        raise UnsupportedOpError(
            f"it puts a {value.dtype} of shape {list(value.shape)} in place of the data of a {x.dtype} of shape "
            f"{list(x.shape)}\n  try: another name for the new tensor, or x.data = value outside of forward"
        )
    x.data.copy_(value)


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """The same arguments and result as `torch.combinations`, which chooses by a mask of as many dims."""
    if input.dim() != 1 or r < 1:
        return torch.combinations(input, r, with_replacement)
    chosen = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = list(chosen(range(input.shape[0]), r))
    return input[torch.tensor(places, dtype=torch.int64).reshape(-1, r)]


def repeat_interleave(
    input: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """The same arguments and result as `torch.repeat_interleave`."""
    if repeats is None:
        return _repeated(input, output_size)
    x, dim = (input.reshape(-1), 0) if dim is None else (input, dim)
    if not isinstance(repeats, Tensor):
        return torch.repeat_interleave(x, repeats, dim, output_size=output_size)
    if repeats.numel() == 1:
        repeats = repeats.reshape(1).expand(x.shape[dim])
    if repeats.shape != (x.shape[dim],):
        raise RuntimeError("repeats must have the same size as input along dim")
    return x.index_select(dim, _repeated(repeats, output_size))


def _repeated(repeats: Tensor, length: int | None) -> Tensor:
    """[length], place i as often as `repeats[i]` says."""
    if repeats.dim() != 1 or repeats.is_floating_point():
        raise RuntimeError("repeat_interleave only accepts 1D vectors of integers as repeat")
    ends = repeats.cumsum(0, dtype=torch.int64)
    if length is None:
        length = int(ends[-1]) if repeats.numel() else 0
    elif ((repeats < 0).any() | (repeats.sum() != length)).any():
        raise RuntimeError(
            f"repeat_interleave: repeats are negative, or do not add up to output_size={length}"
        )
    return torch.searchsorted(ends, torch.arange(length), right=True).clamp(max=max(0, repeats.numel() - 1))


def unique(
    input: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """The same arguments and results as `torch.unique`."""
    if dim is not None:
        return torch.unique(input, sorted, return_inverse, return_counts, dim)
    x, order = input.reshape(-1).sort(stable=True)
    values, inverse, counts = _runs(x)
    inverse = torch.zeros_like(inverse).scatter(0, order, inverse)
    return _wanted(values, return_inverse and inverse.reshape(input.shape), return_counts and counts)


def unique_consecutive(
    input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """The same arguments and results as `torch.unique_consecutive`."""
    if dim is not None:
        return torch.unique_consecutive(input, return_inverse, return_counts, dim)
    values, inverse, counts = _runs(input.reshape(-1))
    return _wanted(values, return_inverse and inverse.reshape(input.shape), return_counts and counts)


def _runs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The value of each run of equal ones, the run of each value, and how long each is."""
    begins = torch.cat([torch.ones_like(x[:1], dtype=torch.bool), x[1:] != x[:-1]])
    count = int(begins.sum()) if x.numel() else 0
    first = begins.logical_not().to(torch.uint8).argsort(dim=0, stable=True)[:count]
    ends = torch.cat([first[1:], torch.full_like(first[:1], x.numel())])
    return x[first], begins.cumsum(0) - 1, ends - first


def _wanted(*results: Any) -> Any:
    given = tuple(result for result in results if isinstance(result, Tensor))
    return given if given[1:] else given[0]


def histc(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """The same arguments and result as `torch.histc`: [*any] -> [bins], how many elements lie in each of `bins` equal
    parts of [min, max], its end in the last part. Integers are divided as integers, as torch's CUDA kernel does."""
    if min >= max:
        return torch.histc(input, bins, min, max)  # the bounds are the values' own
    flat = input.reshape(-1)
    if input.is_floating_point():
        place = ((flat - min) * bins / (max - min)).floor()
    else:
        place = torch.div((flat - int(min)) * bins, int(max) - int(min), rounding_mode="floor")
    inside = (flat >= min) & (flat <= max)
    place = torch.where(place >= bins, bins - 1, place).to(torch.int64)
    counted = (place.unsqueeze(-1) == torch.arange(bins, device=input.device)) & inside.unsqueeze(-1)
    return counted.to(input.dtype).sum(0, dtype=input.dtype)


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """The same arguments and result as `torch.bincount`: [n] -> [minlength], how often each number is there.

    Raises where one is not below `minlength`: torch's result is longer then. Without it the values are asked."""
    if input.dim() != 1 or input.is_floating_point() or input.dtype == torch.bool:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    rows = rows_in((input, weights))
    if rows and len(rows) != 2 - (weights is None):
        raise unknown("bincount", rows[0].choice)
    x, weights = (t.padded if isinstance(t, Rows) else t for t in (input, weights))
    assert x is not None
    if weights is not None and weights.shape != x.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    there = one_choice(rows).valid if rows else torch.ones_like(x, dtype=torch.bool)
    length = minlength if minlength or not x.numel() else int(torch.where(there, x, 0).max()) + 1
    outside = (x < 0) | (x >= length)
    if (outside & there).any():
        raise ValueError(
            f"bincount: a number is negative, or not below minlength={length}\n"
            "  try: a greater minlength, on which the other counts do not depend"
        )
    there = there & ~outside
    return _added_up(torch.where(there, x, 0).to(torch.int64), there, weights, length)


def _added_up(places: Tensor, there: Tensor, weights: Tensor | None, length: int) -> Tensor:
    if weights is None:
        each = there.to(torch.int64)
    else:
        dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
        each = torch.where(there, weights.to(dtype), 0.0)
    return each.new_zeros(length).scatter_add(0, places, each)


def _by_number(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of sizes, of which one may be that of chosen rows, `torch.zeros(len(rows), 8)`: rows, too."""

    @wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        for sizes in (args, *(part for part in given if isinstance(part, (tuple, list)))):
            for i, size in enumerate(sizes):
                choice = getattr(size, "counts", None)
                if choice is not None and not (function is Tensor.expand and rows_in(args)):
                    plain: Any = pytree.tree_map_only(Tensor, _in_full, (args, kwargs))
                    return _as_rows(function, choice, function(*plain[0], **plain[1]), len(sizes) - i)
        return function(*args, **kwargs)

    return made


def _in_full(value: Tensor) -> Any:
    if isinstance(value, Rows):
        return value.seen
    choice = getattr(value, "counts", None)
    return value if choice is None else choice.valid.numel()


def _as_rows(function: Callable[..., Any], choice: Choice, made: Tensor, back: int) -> Any:
    if function is torch.randperm:
        drawn = torch.where(choice.valid, torch.rand(choice.valid.shape), 2.0)
        return choice.rows(drawn.argsort().argsort().to(made.dtype))
    if function is torch.eye:
        return paired(choice, made)
    if function is torch.arange:
        if made.shape != choice.valid.shape:
            raise unknown("arange from or by another number", choice)
        return choice.rows((choice.valid.cumsum(0) - 1).to(made.dtype))
    at = made.ndim - back
    return choice.rows(made.movedim(at, 0), at=at)


def _copied_to(name: str) -> Callable[..., Any]:
    """The method of that name, whose values torch makes contiguous: not as those of a view are that it writes to,
    `x.reshape(b, n, h, d).transpose(1, 2)`, so that it finds no way back."""
    write, made = getattr(Tensor, name), getattr(Tensor, name.removesuffix("_"))

    @wraps(write)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if rows_in((x, args, kwargs)) or x.is_contiguous():
            return write(x, *args, **kwargs)
        return x.copy_(made(x.clone(), *args, **kwargs))

    return call


def fill_diagonal_(x: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """The same arguments and result as `Tensor.fill_diagonal_`, which writes to no view in a trace."""
    if rows_in(x):
        return Tensor.fill_diagonal_(x, fill_value, wrap)
    return x.copy_(Tensor.fill_diagonal_(x.clone(), fill_value, wrap))


_MADE_CONTIGUOUS = """masked_fill_ masked_scatter_ scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ cumsum_
cumprod_ tril_ triu_ renorm_"""
_NEW_NAMES = (
    "zeros ones empty full eye arange rand randn randperm new_zeros new_ones new_empty new_full expand"
)
_MAKERS = [getattr(torch, name, None) or getattr(Tensor, name) for name in _NEW_NAMES.split()]
_OF_BOTH = (repeat_interleave, unique, unique_consecutive, histc, bincount)
"""Of `torch` and of `Tensor`, by their names."""
_ANSWERED: dict[Any, Callable[..., Any]] = {
    torch.tensor: tensor,
    Tensor.new_tensor: new_tensor,
    Tensor.numpy: array,
    Tensor.__array__: array,
    torch.linalg.lstsq: lstsq,
    torch.combinations: combinations,
    Tensor.data.__set__: set_data,  # type: ignore[attr-defined]
    Tensor.fill_diagonal_: fill_diagonal_,
    F.pad: pad,
    F.ctc_loss: ctc_loss,
    torch.ctc_loss: ctc_loss,
    F.multilabel_margin_loss: multilabel_margin_loss,
    F.embedding: _dense(F.embedding),
    F.embedding_bag: _dense(F.embedding_bag),
    torch.gather: _dense_gather(torch.gather),
    Tensor.gather: _dense_gather(Tensor.gather),
    **{getattr(owner, answer.__name__): answer for owner in (torch, Tensor) for answer in _OF_BOTH},
    **PACKED,
    **ROWS,
    **{maker: _by_number(maker) for maker in _MAKERS},
    **{getattr(Tensor, name): _copied_to(name) for name in _MADE_CONTIGUOUS.split()},
}
"""Torch function -> what is called in its place, whatever a forward is traced for."""


@contextmanager
def torch_calls_answered(device_type: str) -> Generator[dict[Any, Callable[..., Any]]]:
    """Torch function -> what is called in its place while a forward is traced, by a TorchFunctionMode.

    That does not see calls made inside torch's own composite functions (nn.MultiheadAttention), so the name by which
    they look up attention is exchanged too, and put back at the end."""
    original, attention = F.scaled_dot_product_attention, attention_for(device_type)
    with replaced_attribute(F, "scaled_dot_product_attention", attention):
        yield {original: attention, **_ANSWERED, **dict.fromkeys(grouped_functions(), grouped_product)}
