"""A gradient scaler over stages: where one rank finds an overflow, every rank skips the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autoshard.runtime.process_groups import whole_group
from autoshard.runtime.stage_mesh import pipeline_of
from passes.ir.torch_dtensor import local_of, unscaling_op, wrap_dtensor_handler

__all__ = ["scale_over_stages"]


def scale_over_stages() -> None:
    """From now on, in this process: `torch.amp.GradScaler.unscale_` and `step` take gradients of several stages."""
    wrap_dtensor_handler(unscaling_op(), _unscale)


def _unscale(plain: Callable[..., Any]) -> Callable[..., Any]:
    def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gradients, found, inverse = args
        pipeline = pipeline_of(gradients)
        if pipeline is None:
            return plain(op, args, kwargs)
        parts = [part for part in map(local_of, gradients) if part.numel()]
        if parts:
            op(parts, found, inverse, **kwargs)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=whole_group(pipeline))
        return None

    return unscale
