"""Batch norm with `momentum=None`, a plain average over all batches, without reading the count of batches.

torch divides by `float(num_batches_tracked)`, which a trace cannot see. The same with the count left a tensor:

    running = running * (1 - 1 / count) + batch * (1 / count)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["trace_cumulative_averages"]


def trace_cumulative_averages(model: nn.Module) -> None:
    """Give every batch norm of `model` that averages so a forward that can be traced, until `state_kept` undoes it.
    A subclass with a forward of its own is left alone."""
    for module in model.modules():
        norm: Any = module
        if type(module).forward is nn.BatchNorm1d.forward and norm.momentum is None:
            norm.forward = partial(_forward, norm, norm.forward)


def _forward(norm: nn.BatchNorm1d, original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if not norm.training or mean is None or variance is None or count is None:
        return original(x)
    count.add_(1)
    result = F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
    over = [d for d in range(x.ndim) if d != 1]
    seen = torch.var_mean(x.detach().to(mean.dtype), over, correction=1)
    share = count.to(mean.dtype).reciprocal()
    for running, batch in zip((variance, mean), seen, strict=True):
        running.copy_(running * (1.0 - share) + batch * share)
    return result
