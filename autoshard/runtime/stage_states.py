"""State dicts of all stages: whole ones on every rank, and shards of whole ones."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autoshard.runtime.sharding import like_parameter
from autoshard.runtime.stage_mesh import is_of_stages
from passes.ir.torch_dtensor import DISTRIBUTE_STATE, GATHER_STATE, wrap_in_torch

__all__ = ["states_of_all_stages"]


def states_of_all_stages() -> None:
    """From now on, in this process: `torch.distributed.checkpoint.state_dict` gathers and loads full state dicts of a
    pipelined model."""
    wrap_in_torch(GATHER_STATE, _gather)
    wrap_in_torch(DISTRIBUTE_STATE, _distribute)


def _gather(plain: Callable[..., Any]) -> Callable[..., Any]:
    def gather(state_dict: Any, *, cpu_offload: bool = False, ranks_only: Any = (), **options: Any) -> Any:
        whole = _whole(state_dict, cpu_offload, ranks_only)
        return plain(whole, cpu_offload=cpu_offload, ranks_only=ranks_only, **options)

    return gather


def _whole(state: Any, cpu_offload: bool, ranks_only: Collection[int]) -> Any:
    """`state` with whole tensors in the place of what some stages hold, one after the other to the host."""
    if isinstance(state, dict):
        return {key: _whole(value, cpu_offload, ranks_only) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_whole(value, cpu_offload, ranks_only) for value in state)
    if not is_of_stages(state):
        return state
    value = state.detach().full_tensor()
    if ranks_only and dist.get_rank() not in ranks_only:
        return None
    return value.cpu() if cpu_offload else value


def _distribute(plain: Callable[..., None]) -> Callable[..., None]:
    """Of a tensor that this rank has no part of, torch would copy all of it into what is there."""

    def distribute(local_state_dict: dict[str, Any], keys: list[str], *rest: Any, **options: Any) -> None:
        ours = [key for key in keys if _is_pair_of_stages(local_state_dict.get(key))]
        for key in ours:
            local, whole = local_state_dict[key]
            local_state_dict[key] = _filled(local, whole)
        plain(local_state_dict, [key for key in keys if key not in ours], *rest, **options)

    return distribute


def _is_pair_of_stages(value: Any) -> bool:
    return isinstance(value, tuple) and is_of_stages(value[0])


def _filled(local: Tensor, whole: Tensor) -> Tensor:
    shard = like_parameter(whole, local)
    return shard if local.is_meta else local.copy_(shard)
