"""Means, variances, products with a bias and of three, PReLU, and the place of a number, as sums, pointwise ops and
plain products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["SUMS", "moments", "wide"]

aten = torch.ops.aten


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of `dtype` are taken in: half precisions add up in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.ndim))
    return [d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """sum / count. The sum is exact as `Partial`; a mean would not be over uneven shards."""
    dims = _dims(x, dim)
    result = dtype or x.dtype
    total = aten.sum.dim_IntList(x.to(wide(result)), dims, keepdim)
    return (total / _count(x, dims)).to(result)


def mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    result = dtype or x.dtype
    return (aten.sum.default(x.to(wide(result))) / x.numel()).to(result)


def moments(x: Tensor, dims: Sequence[int], correction: float) -> tuple[Tensor, Tensor]:
    """(variance, mean) over `dims`, dims kept. Two passes: the mean, then the squared deviations,
    which loses no digits where E[x^2] - E[x]^2 would."""
    count = _count(x, dims)
    center = aten.sum.dim_IntList(x, list(dims), True) / count
    deviation = x - center
    variance = aten.sum.dim_IntList(deviation * deviation, list(dims), True) / max(0.0, count - correction)
    return variance, center


def var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    variance, center = moments(x.to(wide(x.dtype)), dims, 1 if correction is None else correction)
    if not keepdim:
        variance, center = variance.squeeze(tuple(dims)), center.squeeze(tuple(dims))
    return variance.to(x.dtype), center.to(x.dtype)


def var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _scaled(x: Tensor, factor: Any) -> Tensor:
    return x if factor == 1 else x * factor


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _scaled(aten.mm.default(a, b), alpha) + _scaled(bias, beta)


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = _scaled(aten.bmm.default(a, b), alpha)
    return product if beta == 0 else product + _scaled(bias, beta)


def addbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = aten.sum.dim_IntList(aten.bmm.default(a, b), [0])
    return _scaled(product, alpha) + _scaled(bias, beta)


def trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """Of `nn.Bilinear`: each operand gets the dims of its `expand`, and dims of their product are summed."""
    letters = "abcdefghijklmnopqrstuvwxyz"[: a.ndim + len(expand1)]
    read = ["".join(x for d, x in enumerate(letters) if d not in new) for new in (expand1, expand2, expand3)]
    left = "".join(x for d, x in enumerate(letters) if d not in sumdim)
    return torch.einsum(f"{','.join(read)}->{left}", a, b, c)


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.where(x > 0, x, weight * x)


def prelu_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(x > 0, grad, weight * grad), torch.where(x > 0, torch.zeros_like(x), x * grad)


def searchsorted(
    row: Tensor,
    number: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Tensor:
    """How many are before a number. One that is not a number is behind all."""
    after = row > number if right or side == "right" else row >= number
    return after.logical_not().sum(dtype=torch.int32 if out_int32 else torch.int64)


def bucketize(number: Any, row: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return searchsorted(row, number, out_int32=out_int32, right=right)


SUMS: dict[Any, Callable[..., Any]] = {
    aten._is_all_true.default: lambda x: x.all(),
    aten._is_any_true.default: lambda x: x.any(),
    aten.mean.dim: mean,
    aten.mean.default: mean_all,
    aten.var_mean.correction: var_mean,
    aten.var.correction: var,
    aten.std.correction: std,
    aten.addmm.default: addmm,
    aten.baddbmm.default: baddbmm,
    aten.addbmm.default: addbmm,
    aten._trilinear.default: trilinear,
    aten.searchsorted.Scalar: searchsorted,
    aten.bucketize.Scalar: bucketize,
    aten._prelu_kernel.default: prelu,
    aten._prelu_kernel_backward.default: prelu_backward,
}
