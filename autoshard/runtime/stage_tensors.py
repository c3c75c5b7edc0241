"""DTensors on the ranks of some stages: whole values come to the ranks of all stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.runtime.devices import local_device
from autoshard.runtime.sharding import like_parameter
from autoshard.runtime.stage_mesh import PartOf, part_of, place_in
from cost_model.errors import ShardingError

__all__ = ["complete_whole_values"]


def complete_whole_values() -> None:
    """From now on, in this process: `full_tensor()` of a DTensor that some stages hold gives its value to all ranks of
    the pipeline, which call it together. It is differentiable as any `full_tensor()` is."""
    plain = DTensor.full_tensor
    if not hasattr(plain, "of_stage"):
        DTensor.full_tensor = _for_all_stages(plain)  # type: ignore[method-assign]


def _for_all_stages(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(plain)
    def full_tensor(self: DTensor, *, grad_placements: Any = None) -> Tensor:
        part = part_of(self.device_mesh)
        if part is None:
            return plain(self, grad_placements=grad_placements)
        if grad_placements is not None:
            raise ShardingError(
                "full_tensor(grad_placements=...) of a tensor that one stage holds\n"
                "  try: full_tensor(), whose gradient is the same on all ranks"
            )
        return _Whole.apply(self, part, plain)  # type: ignore[return-value]

    full_tensor.of_stage = plain  # type: ignore[attr-defined]
    return full_tensor


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: DTensor, part: PartOf, plain: Callable[..., Tensor]) -> Tensor:
        detached = value.detach()
        assert isinstance(detached, DTensor)
        ctx.value = detached
        return _gathered(detached, part, plain)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return like_parameter(gradient, ctx.value), None, None


def _gathered(value: DTensor, part: PartOf, plain: Callable[..., Tensor]) -> Tensor:
    """Its holders gather it, and the first of them sends it along the axis of the stages."""
    if value.is_meta:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if place_in(value.device_mesh) is None:
        whole = torch.empty(value.shape, dtype=value.dtype, device=local_device(part.whole))
    else:
        # A copy where nothing was gathered: what is broadcast into must not be the parameter.
        gathered = plain(value)
        whole = gathered.clone() if gathered.data_ptr() == value.to_local().data_ptr() else gathered
        whole = whole.contiguous()
    if whole.numel():
        group = part.whole.get_group(part.axis)
        dist.broadcast(whole, group=group, group_src=part.holders[0])
    return whole
