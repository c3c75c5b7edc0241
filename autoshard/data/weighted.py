"""Metrics over parts of different sizes."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard.data.parts import member
from autoshard.runtime.devices import local_device
from autoshard.runtime.process_groups import whole_group
from cost_model.checked_arguments import reject

__all__ = ["weighted_mean"]


@torch.no_grad()
def weighted_mean(value: Tensor | float, weight: float, mesh: DeviceMesh) -> Tensor:
    """sum(value * weight) / sum(weight) over all ranks, in float64, on every rank; by one all-reduce.

        accuracy = autoshard.weighted_mean(correct / max(rows, 1), rows, mesh)

    For metrics made of each rank's own part outside the model: a mean of the ranks' means is wrong where
    parts differ in size. A mean *in* the model is that of the global tensor already.

    value:  of the same shape on all ranks; ranks that hold the same part count alike, which changes
            nothing. Gradients do not flow back.
    weight: how many elements the value is the mean of. With 0 the value is left out, even if it is nan;
            0 on all ranks gives nan.
    """
    member(mesh)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
        raise reject("weight", weight, "how many elements the value is the mean of, at least 0")
    if not isinstance(value, (int, float, Tensor)) or (isinstance(value, Tensor) and value.is_complex()):
        raise reject("value", value, "a number, or a tensor of real ones")
    mine = _sent(value, local_device(mesh))
    weighed = mine * weight if weight else torch.zeros_like(mine)
    total = torch.cat([weighed.reshape(-1), weighed.new_full((1,), weight)])
    torch.distributed.all_reduce(total, group=whole_group(mesh))
    return (total[:-1] / total[-1]).view(mine.shape)


def _sent(value: Tensor | float, device: torch.device) -> Tensor:
    """In float64 on `device`, without waiting for it."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)
