"""Ops of DTensors that torch lacks or answers for one shard, and that ordinary scripts apply to parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from autoshard.runtime.optimizers import update_shards
from autoshard.runtime.process_groups import is_of_stages
from autoshard.runtime.sharding import like_parameter
from passes.ir.torch_dtensor import (
    answer_new_ops,
    dtensor_from,
    handle_dtensor_op,
    local_of,
    set_dtensor_data_by,
    sharding_of,
    take_place_of,
    take_plain_tensors_as_replicated,
)

__all__ = ["complete_dtensor_ops"]

aten = torch.ops.aten

_OF_WHOLE = (
    aten._local_scalar_dense.default,
    aten._is_any_true.default,
    aten._is_all_true.default,
    aten.allclose.default,
)
"""`.item()`, `float` and `bool`, and what anomaly detection asks. torch reads the rank's own part, of a pending sum
or norm too (`p.grad.norm().item()` is the norm of a shard, without a word), or has no answer."""


def complete_dtensor_ops(device: torch.device) -> None:
    """From now on, in this process: a number read of a DTensor is that of the whole tensor, `copy_` and `p.data = ...`
    take whole tensors, a plain tensor beside DTensors is whole too, the same on all ranks, as outputs and losses are,
    a pending sum is summed before an op that needs all of it writes into it, and optimizers update shards as if they
    were plain. device: of the parameters."""
    for op in _OF_WHOLE:
        handle_dtensor_op(op, _of_whole)
    handle_dtensor_op(aten.copy_.default, _copy)
    handle_dtensor_op(aten.detach.default, _detached)
    answer_new_ops(_summed_first)
    set_dtensor_data_by(_as_laid_out)
    take_plain_tensors_as_replicated(device)
    update_shards()


def _of_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(*(a.full_tensor() if isinstance(a, DTensor) else a for a in args), **kwargs)


def _detached(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch gives, in half the time: autograd detaches every gradient that it stores."""
    (tensor,) = args
    return dtensor_from(op(local_of(tensor)), sharding_of(tensor))


@torch.no_grad()
def _summed_first(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], propagate: Callable[[], Any]
) -> Any:
    """`x.mean().clamp_(min=1e-3)`: torch refuses to write into a sum that is pending, where the op needs the whole."""
    target = args[0] if args else None
    if not op._schema.is_mutable or not isinstance(target, DTensor):
        return NotImplemented
    placements = [Replicate() if p.is_partial() else p for p in target.placements]
    if placements == list(target.placements):
        return NotImplemented
    try:
        return propagate()
    except RuntimeError:
        take_place_of(target, target.redistribute(placements=placements))
        return op(*args, **kwargs)


def _copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain source is the whole tensor, the same on all ranks; a plain target gets the whole tensor."""
    target, source, *rest = args
    if not isinstance(target, DTensor):
        return op(target, source.full_tensor(), *rest, **kwargs)
    source = source if source.shape == target.shape else source.expand(target.shape)
    op(target.to_local(), _as_laid_out(target, source).to_local(), *rest, **kwargs)
    return target


def _as_laid_out(target: DTensor, value: Tensor) -> DTensor:
    """`value`, of the shape of `target`, on its mesh and in its placements."""
    if not isinstance(value, DTensor):
        return like_parameter(value, target)
    if value.device_mesh != target.device_mesh and is_of_stages(value, target):
        return like_parameter(value.full_tensor(), target)
    if value.device_mesh != target.device_mesh or value.placements != target.placements:
        return value.redistribute(target.device_mesh, target.placements)
    return value
