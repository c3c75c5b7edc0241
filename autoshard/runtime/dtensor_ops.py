"""Ops of DTensors that torch lacks or answers for one shard, and that ordinary scripts apply to parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.runtime.sharding import like_parameter
from passes.torch_compat import handle_dtensor_op

__all__ = ["complete_dtensor_ops"]

aten = torch.ops.aten

_OF_WHOLE = (aten._local_scalar_dense.default, aten._is_any_true.default, aten._is_all_true.default)
"""`.item()`, `float` and `bool`, and what anomaly detection asks. torch reads the rank's own part, of a pending sum
or norm too (`p.grad.norm().item()` is the norm of a shard, without a word), or has no answer."""


def complete_dtensor_ops() -> None:
    """From now on a number read of a DTensor is that of the whole tensor, and `copy_` takes plain tensors."""
    for op in _OF_WHOLE:
        handle_dtensor_op(op, _of_whole)
    handle_dtensor_op(aten.copy_.default, _copy)


def _of_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(args[0].full_tensor(), **kwargs)


def _copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain source is the whole tensor, the same on all ranks; a plain target gets the whole tensor."""
    target, source, *rest = args
    if not isinstance(target, DTensor):
        return op(target, source.full_tensor(), *rest, **kwargs)
    local = _part(source, target)
    op(target.to_local(), local, *rest, **kwargs)
    return target


def _part(source: Tensor, target: DTensor) -> Tensor:
    """This rank's part of `source` as `target` is laid out."""
    if source.shape != target.shape:
        source = source.expand(target.shape)
    if not isinstance(source, DTensor):
        return like_parameter(source, target).to_local()
    if source.device_mesh != target.device_mesh or source.placements != target.placements:
        source = source.redistribute(target.device_mesh, target.placements)
    return source.to_local()
