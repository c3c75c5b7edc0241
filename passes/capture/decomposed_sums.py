"""Means, variances, norms, products with a bias and of three, and the place of a number, as sums, pointwise ops
and plain products. (Gradients of norms that are not here, and RMS norm: torch's own.)

In half precision torch keeps a norm's mean and deviation for the backward in half precision on CPUs and in float32 on
GPUs. Here they are float32 everywhere: what capture sees does not depend on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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


def _per_channel(x: Tensor, like: Tensor) -> Tensor:
    """[c] as [1, c, 1, ...], to broadcast over `like`: [n, c, *spatial]."""
    return x.reshape([1, -1, *([1] * (like.ndim - 2))])


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


def _normalised(x: Tensor, over: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x with mean 0 and deviation 1 over some dims, its mean, 1/deviation and variance there, dims kept."""
    variance, center = moments(x, over, 0)
    rstd = (variance + eps).rsqrt()
    return (x - center) * rstd, center, rstd, variance


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [*lead, *shape]. Returns the normalised x, and mean and 1/deviation, [*lead, 1, ...] each."""
    over = list(range(x.ndim - len(shape), x.ndim))
    hat, center, rstd, _ = _normalised(x.to(wide(x.dtype)), over, eps)
    return _affine(hat, weight, bias).to(x.dtype).contiguous(), center, rstd


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """x: [n, c, *spatial]. Returns the normalised x, mean and 1/deviation as the backward reads them ([c]; empty
    without training), and the new running mean and variance, [c]. The running variance is the unbiased one."""
    work = x.to(wide(x.dtype))
    channel = lambda s: _per_channel(s, x)
    weight, bias = (None if s is None else channel(s) for s in (weight, bias))
    if not training:
        assert running_mean is not None and running_var is not None
        center, variance = running_mean.to(work.dtype), running_var.to(work.dtype)
        result = _affine((work - channel(center)) * channel((variance + eps).rsqrt()), weight, bias)
        return _laid(result.to(x.dtype), x), x.new_zeros((0,)), x.new_zeros((0,)), running_mean, running_var
    over = [d for d in range(x.ndim) if d != 1]
    hat, center, rstd, variance = _normalised(work, over, eps)
    result = _affine(hat, weight, bias).to(x.dtype)
    center, rstd, variance = (s.squeeze(over) for s in (center, rstd, variance))
    if running_mean is not None:
        running_mean = momentum * center + (1 - momentum) * running_mean
    if running_var is not None:
        count = x.numel() / x.shape[1]
        running_var = momentum * (variance * (count / (count - 1))) + (1 - momentum) * running_var
    return _laid(result, x), center, rstd, running_mean, running_var


def _laid(result: Tensor, x: Tensor) -> Tensor:
    """In order, or its channels last as those of `x`: as torch's kernels lay out what a later view reads or writes."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    is_last = not x.is_contiguous() and last is not None and x.is_contiguous(memory_format=last)
    return result if is_last else result.contiguous()


def batch_norm_without_stats(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return batch_norm(x, weight, bias, None, None, training, momentum, eps)[:3]


def batch_norm_frozen(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """In eval mode. torch's own form differs between its versions."""
    return batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [n, c, *spatial]. Returns the normalised x, and mean and 1/deviation, [n, groups] each."""
    grouped = x.reshape(n, groups, c // groups, hw).to(wide(x.dtype))
    hat, center, rstd, _ = _normalised(grouped, (2, 3), eps)
    result = hat.reshape(x.shape)
    if weight is not None:
        result = result * _per_channel(weight, x)
    if bias is not None:
        result = result + _per_channel(bias, x)
    return result.to(x.dtype), center.reshape(n, groups), rstd.reshape(n, groups)


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    center: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    hw: int,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """With h = (x - mean) * rstd and g = grad * weight, per group of m elements:
    grad_x = rstd * (g - sum(g)/m - h * sum(g*h)/m); grad_weight = sum(grad*h); grad_bias = sum(grad)."""
    shape, dtype = [n, groups, c // groups, hw], wide(x.dtype)
    m = c // groups * hw
    rstd = rstd.reshape(n, groups, 1, 1).to(dtype)
    hat = (x.reshape(shape).to(dtype) - center.reshape(n, groups, 1, 1).to(dtype)) * rstd
    over = [d for d in range(x.ndim) if d != 1]
    grad_x = grad_weight = grad_bias = None
    if wanted[0]:
        scaled = grad if weight is None else grad * _per_channel(weight, x)
        g = scaled.to(dtype).reshape(shape)
        mean_g = aten.sum.dim_IntList(g, [2, 3], True) / m
        mean_gh = aten.sum.dim_IntList(g * hat, [2, 3], True) / m
        grad_x = (rstd * (g - mean_g - hat * mean_gh)).reshape(x.shape).to(x.dtype)
    if wanted[1] and weight is not None:
        product = grad.to(dtype) * hat.reshape(x.shape)
        grad_weight = aten.sum.dim_IntList(product, over).to(weight.dtype)
    if wanted[2]:
        grad_bias = aten.sum.dim_IntList(grad.to(dtype), over).to(grad.dtype)
    return grad_x, grad_weight, grad_bias


def weight_norm_backward(
    grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Of v g / |v|, with a norm for each place of `dim`, to v and g."""
    over = [d for d in range(v.ndim) if d != dim % v.ndim]
    along = (grad * v).sum(over, keepdim=True) / norms
    return g / norms * (grad - v * along / norms), along.to(g.dtype)


def or_of_nothing(form: Callable[..., Any]) -> Callable[..., Any]:
    """torch's form of a mean's backward divides by the number of elements in Python. Of none there is no gradient."""

    def backward(gradient: Tensor, x: Tensor, *rest: Any) -> Any:
        try:
            return form(gradient, x, *rest)
        except ZeroDivisionError:
            return torch.zeros_like(x)

    return backward


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
    aten.native_layer_norm.default: layer_norm,
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_stats,
    aten._native_batch_norm_legit_no_training.default: batch_norm_frozen,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten._weight_norm_interface_backward.default: weight_norm_backward,
}
