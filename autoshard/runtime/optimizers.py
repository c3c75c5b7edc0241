"""Optimizers that were made before the parameters became DTensors go on with the new ones."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.sharding import like_parameter
from cost_model.errors import ShardingError

__all__ = ["adopt", "live_optimizers", "retire"]


class RetiredParameter(nn.Parameter):
    """What a replaced parameter becomes: empty, and every use of it an error.

    Reading a stale `.grad` would silently give None, so that clipping a list of parameters made too
    early would clip nothing.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ShardingError(
            "this parameter was replaced by a DTensor when autoshard distributed the model\n"
            "  try: ask the model for its parameters again, after autoshard (or after the first call, "
            "without example_inputs)"
        )


def retire(parameter: nn.Parameter) -> None:
    """Free the parameter's memory, whoever still holds it, and refuse its further use."""
    if not isinstance(parameter, DTensor):
        parameter.data = parameter.data.new_empty(0)
        parameter.__class__ = RetiredParameter


def live_optimizers() -> list[torch.optim.Optimizer]:
    """Every optimizer there is: a parameter does not know who optimizes it."""
    # type(), not isinstance: the latter asks every object, lazily loaded modules included.
    return [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]


def adopt(optimizers: Iterable[torch.optim.Optimizer], moved: Mapping[Tensor, nn.Parameter]) -> None:
    """Replace old parameters by new in every group, and shard the state kept for them.

    State of the old parameter's shape takes the new one's placements (each rank cuts its own values,
    without communication); anything else, such as a step count, stays.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [moved.get(p, p) for p in group["params"]]
        for old in [p for p in optimizer.state if p in moved]:
            optimizer.state[moved[old]] = _sharded_state(optimizer.state.pop(old), moved[old])


def _sharded_state(state: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    return {
        name: like_parameter(value, parameter) if _follows(name, value, parameter) else value
        for name, value in state.items()
    }


def _follows(name: str, value: Any, parameter: nn.Parameter) -> bool:
    """Of a 0-d parameter's 0-d state only the step count is not one value per element."""
    plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return plain and value.shape == parameter.shape and (value.ndim > 0 or name != "step")
