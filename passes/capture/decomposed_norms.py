"""Layer, batch and group norm, the same on every device. (Their other gradients and RMS norm: torch's own.)

In half precision torch keeps mean and deviation for the backward in half precision on CPUs and in float32 on GPUs.
Here they are float32 everywhere: what capture sees does not depend on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.capture.decomposed_sums import moments, wide

__all__ = ["NORMS"]

aten = torch.ops.aten


def _per_channel(x: Tensor, like: Tensor) -> Tensor:
    """[c] as [1, c, 1, ...], to broadcast over `like`: [n, c, *spatial]."""
    return x.reshape([1, -1, *([1] * (like.ndim - 2))])


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [*lead, *shape]. Returns the normalised x, and mean and 1/deviation, [*lead, 1, ...] each."""
    over = list(range(x.ndim - len(shape), x.ndim))
    work = x.to(wide(x.dtype))
    variance, center = moments(work, over, 0)
    rstd = (variance + eps).rsqrt()
    return _affine((work - center) * rstd, weight, bias).to(x.dtype), center, rstd


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
        return result.to(x.dtype), x.new_zeros((0,)), x.new_zeros((0,)), running_mean, running_var
    over = [d for d in range(x.ndim) if d != 1]
    variance, center = moments(work, over, 0)
    rstd = (variance + eps).rsqrt()
    result = _affine((work - center) * rstd, weight, bias).to(x.dtype)
    center, rstd, variance = (s.squeeze(over) for s in (center, rstd, variance))
    if running_mean is not None:
        running_mean = momentum * center + (1 - momentum) * running_mean
    if running_var is not None:
        count = x.numel() / x.shape[1]
        running_var = momentum * (variance * (count / (count - 1))) + (1 - momentum) * running_var
    return result, center, rstd, running_mean, running_var


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
    variance, center = moments(grouped, (2, 3), 0)
    rstd = (variance + eps).rsqrt()
    result = ((grouped - center) * rstd).reshape(x.shape)
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


NORMS: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: layer_norm,
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_stats,
    aten._native_batch_norm_legit_no_training.default: batch_norm_frozen,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten._weight_norm_interface_backward.default: weight_norm_backward,
}
