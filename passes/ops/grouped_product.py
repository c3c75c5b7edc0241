"""`autoshard::grouped_mm`: one matrix product for each group of a jagged dim, as mixtures of experts have them.

    grouped_mm(a, b, offs, first, count) -> result

`offs` (int32 or int64, rising) are the ends of all groups along a dim of length L: group g is [offs[g-1], offs[g]),
offs[-1] meaning 0, and ends outside [0, L] are taken to be 0 or L. The op computes groups first .. first + count:

    rows:     a [L, k],        b [count, k, n]  ->  [L, n]         rows of other groups, and of none, are 0
    columns:  a [count, m, k], b [k, L]         ->  [m, L]         the same of columns
    summed:   a [m, L],        b [L, n]         ->  [count, m, n]  groups without members are 0

so a rank may hold some of the groups, or a part of the dim (offs less where its part begins). The gradients are
grouped products too. torch's own `aten::_grouped_mm` leaves what is in no group undefined, takes all groups, and its
fakes take bfloat16 alone; on CUDA it is what runs, where its operands' dtype and layout allow.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from passes.ops.registration import differentiable_operator

Kind = Literal["rows", "columns", "summed"]

_ALIGN = 16
"""Bytes: rows, or columns, of torch's kernel begin at multiples of it (`check_valid_strides`)."""


def kind_of(a_dims: int, b_dims: int) -> Kind:
    """By the number of dims of both operands."""
    kinds: dict[tuple[int, int], Kind] = {(2, 3): "rows", (3, 2): "columns", (2, 2): "summed"}
    return kinds[a_dims, b_dims]


def jagged_length(a: Tensor, b: Tensor) -> int:
    """L: the length of the dim that the groups divide."""
    return int({"rows": a.shape[0], "columns": b.shape[-1], "summed": a.shape[-1]}[kind_of(a.ndim, b.ndim)])


def _shape(a: Tensor, b: Tensor, count: int) -> list[int]:
    plain = [a.shape[-2], b.shape[-1]]
    return [count, *plain] if a.ndim == b.ndim == 2 else plain


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    """Reads `offs` on the host, except where torch's fused product runs."""
    return _fused(a, b, offs, first, count) if is_fused(a, b) else _by_group(a, b, offs, first, count)


grouped_mm = differentiable_operator(
    "grouped_mm(Tensor a, Tensor b, Tensor offs, int first, int count) -> Tensor",
    _grouped_mm,
    lambda a, b, offs, first, count: a.new_empty(_shape(a, b, count)),
)
"""See the module."""


def grouped_mm_reference(a: Tensor, b: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    """The op as ATen ops where torch's fused product can run, else the op itself: a loop over groups whose sizes are
    values is no graph."""
    return _fused(a, b, offs, first, count) if is_fused(a, b) else grouped_mm(a, b, offs, first, count)


def is_fused(a: Tensor, b: Tensor) -> bool:
    """Whether torch's kernel takes these: bfloat16 on CUDA, nothing empty, every group beginning at an aligned address.

    Groups begin at any row, so the jagged dim must be the outer one in memory, with rows of whole 16-byte vectors. Of
    `columns` it is the inner one of the result: not fused. (No model has it; it is the gradient of `summed`.)
    """
    if a.device.type != "cuda" or torch.version.hip is not None or not a.dtype == b.dtype == torch.bfloat16:
        return False
    kind, step = kind_of(a.ndim, b.ndim), _ALIGN // a.element_size()
    if kind == "columns" or not (a.numel() and b.numel()):
        return False
    if kind == "summed":
        return a.shape[0] % step == 0 and b.shape[1] % step == 0
    return a.shape[1] % step == 0 and (
        _by_rows(b) or _by_rows(b.transpose(-1, -2)) or b.shape[-1] % step == 0
    )


def _by_rows(x: Tensor) -> bool:
    """Row-major in its last two dims, with rows and `x` beginning at aligned addresses (`check_valid_strides`)."""
    step = _ALIGN // x.element_size()
    outer, inner = x.stride()[-2:]
    whole = x.storage_offset() % step == 0 and (x.ndim == 2 or x.stride(0) % step == 0)
    return whole and inner == 1 and outer >= max(1, x.shape[-1]) and outer % step == 0


def _in_rows(x: Tensor, order: Tensor | None = None) -> Tensor:
    """`x`, its rows in that order, row-major; a copy only where it is not."""
    x = x if order is None else x.index_select(0, order)
    return x if _by_rows(x) else x.clone(memory_format=torch.contiguous_format)


def _fused(a: Tensor, b: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    """By torch's kernel, whose groups begin at 0: what lies before them is turned behind them and back."""
    rows, length = b.ndim == 3, jagged_length(a, b)
    ends = offs.clamp(0, length)
    places = torch.arange(length, device=a.device)
    mine, begin, turned = ends.narrow(0, first, count), None, None
    if first:
        begin = ends.narrow(0, first - 1, 1)
        mine, turned = mine - begin, (places + begin) % length
    product, groups = torch.ops.aten._grouped_mm.default, mine.to(torch.int32)
    if not rows:
        return _packed(product(_in_rows(a.t(), turned).t(), _in_rows(b, turned), groups))
    b = b if _by_rows(b.transpose(-1, -2)) else _in_rows(b)
    result = product(_in_rows(a, turned), b, groups)
    inside = places < mine.narrow(0, count - 1, 1)
    result = torch.where(inside.unsqueeze(-1), result, 0.0)
    return _packed(result if begin is None else result.index_select(0, (places - begin) % length))


def _packed(x: Tensor) -> Tensor:
    """torch's kernel pads rows to whole vectors."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _by_group(a: Tensor, b: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    kind, length = kind_of(a.ndim, b.ndim), jagged_length(a, b)
    ends = [0, *offs.clamp(0, length).tolist()]
    result = a.new_zeros(_shape(a, b, count))
    for group in range(count):
        begin, end = ends[first + group], ends[first + group + 1]
        if begin >= end:
            continue
        match kind:
            case "rows":
                result[begin:end] = a[begin:end] @ b[group]
            case "columns":
                result[:, begin:end] = a[group] @ b[:, begin:end]
            case "summed":
                result[group] = a[:, begin:end] @ b[begin:end]
    return result


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, offs, first, count = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, offs)
    ctx.first, ctx.count = first, count


def _gradient(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    """dA = dC B^T and dB = A^T dC, group by group: of rows, rows and summed; of columns, summed and columns; of
    summed, columns and rows."""
    if grad is None:
        return (None,) * 5
    a, b, offs = ctx.saved_tensors
    wants_a, wants_b, *_ = ctx.needs_input_grad
    groups = (offs, ctx.first, ctx.count)
    of_a = grouped_mm(grad, b.transpose(-1, -2), *groups) if wants_a else None
    of_b = grouped_mm(a.transpose(-1, -2), grad, *groups) if wants_b else None
    return of_a, of_b, None, None, None


grouped_mm.register_autograd(_gradient, setup_context=_setup_context)
