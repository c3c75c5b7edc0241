"""Group norm and its backward. (Layer, batch and RMS norm: torch's own, over our variance.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.decomposed.sums import moments, wide

__all__ = ["NORMS"]

aten = torch.ops.aten


def _per_channel(x: Tensor, like: Tensor) -> Tensor:
    """[c] as [1, c, 1, ...], to broadcast over `like`: [n, c, *spatial]."""
    return x.reshape([1, -1, *([1] * (like.ndim - 2))])


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [n, c, *spatial]. Returns the normalised x, and mean and 1/deviation, [n, groups] each."""
    grouped = x.reshape(n, groups, c // groups, hw).to(wide(x.dtype))
    variance, center = moments(grouped, (2, 3), 0)
    rstd = (variance + eps).rsqrt()
    result = ((grouped - center) * rstd).reshape(x.shape)
    if weight is not None:
        result = result * _per_channel(weight, x)
    if bias is not None:
        result = result + _per_channel(bias, x)
    center, rstd = (s.reshape(n, groups).to(x.dtype) for s in (center, rstd))
    return result.to(x.dtype), center, rstd


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


NORMS: dict[Any, Callable[..., Any]] = {
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
}
