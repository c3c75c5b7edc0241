"""Random draws with a known form, as draws that `RandomToUniform` knows: uniform, normal, exponential, integers.

Forms: torch's own (ATen/native/TransformationHelper.h for geometric and Cauchy; `multinomial` races exponentials).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["DRAWS"]

aten = torch.ops.aten


def normal(mean: Tensor | float, std: Tensor | float, *, generator: Any = None) -> Tensor:
    """mean + std z, of the shape that they broadcast to."""
    if generator is not None:
        return NotImplemented
    shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor)))
    like = std if isinstance(std, Tensor) else mean
    assert isinstance(like, Tensor)
    return torch.randn_like(like.expand(shape)) * std + mean


def normal_of_size(
    mean: float, std: float, size: list[int], *, generator: Any = None, **options: Any
) -> Tensor:
    return NotImplemented if generator is not None else torch.randn(size, **options) * std + mean


def log_normal(x: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None) -> Tensor:
    return NotImplemented if generator is not None else torch.exp(torch.randn_like(x) * std + mean)


def geometric(x: Tensor, p: float, *, generator: Any = None) -> Tensor:
    """ceil(log(1 - u) / log(1 - p)), at least 1."""
    if generator is not None:
        return NotImplemented
    tries = (
        torch.rand_like(x, dtype=torch.float32).neg().log1p() / math.log1p(-p)
        if p < 1
        else torch.ones_like(x)
    )
    return tries.ceil().clamp_min(1).to(x.dtype)


def cauchy(x: Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None) -> Tensor:
    """median + sigma tan(pi (u - 1/2))."""
    if generator is not None:
        return NotImplemented
    return torch.tan((torch.rand_like(x) - 0.5) * math.pi) * sigma + median


def random_between(x: Tensor, low: int, high: int | None, *, generator: Any = None) -> Tensor:
    """Whole numbers in [low, high); without `high`, as many as the dtype holds every one of."""
    if generator is not None:
        return NotImplemented
    if high is None:
        exact = 2 / torch.finfo(x.dtype).eps if x.dtype.is_floating_point else torch.iinfo(x.dtype).max
        high = int(exact) + 1
    return torch.randint_like(x, low, high)


def random_below(x: Tensor, high: int, *, generator: Any = None) -> Tensor:
    return random_between(x, 0, high, generator=generator)


def random_any(x: Tensor, *, generator: Any = None) -> Tensor:
    return random_between(x, 0, None, generator=generator)


def multinomial(p: Tensor, samples: int, replacement: bool = False, *, generator: Any = None) -> Tensor:
    """The places of the largest p / e, e exponential: of each sample's own e with replacement, else of one."""
    if generator is not None:
        return NotImplemented
    if replacement and samples > 1:
        p = p.unsqueeze(-2).expand(*p.shape[:-1], samples, p.shape[-1])
    races = p / aten.exponential.default(torch.empty_like(p, memory_format=torch.contiguous_format))
    if replacement and samples > 1:
        return races.argmax(-1)
    return races.argmax(-1, keepdim=True) if samples == 1 else races.topk(samples).indices


def rrelu_with_noise(
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[Tensor, Tensor]:
    """A slope of its own for each element below zero; in evaluation the mean one for all."""
    if generator is not None:
        return NotImplemented
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2)), noise.clone()
    slopes = torch.where(x > 0, 1.0, torch.rand_like(x) * (upper - lower) + lower)
    return x * slopes, slopes


def rrelu_with_noise_backward(
    grad: Tensor, x: Tensor, noise: Tensor, lower: float, upper: float, training: bool, is_result: bool
) -> Tensor:
    return grad * noise if training else torch.where(x > 0, grad, grad * ((lower + upper) / 2))


DRAWS: dict[Any, Callable[..., Any]] = {
    aten.normal.Tensor_float: normal,
    aten.normal.float_Tensor: normal,
    aten.normal.Tensor_Tensor: normal,
    aten.normal.float_float: normal_of_size,
    aten.log_normal.default: log_normal,
    aten.geometric.default: geometric,
    aten.cauchy.default: cauchy,
    getattr(aten.random, "from"): random_between,
    aten.random.to: random_below,
    aten.random.default: random_any,
    aten.multinomial.default: multinomial,
    aten.rrelu_with_noise_functional.default: rrelu_with_noise,
    aten.rrelu_with_noise_backward.default: rrelu_with_noise_backward,
}
