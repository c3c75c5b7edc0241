"""Norms and clipping of gradients that different stages hold: exact, and the same on the ranks of all stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard.runtime.devices import local_device
from autoshard.runtime.process_groups import whole_group
from autoshard.runtime.stage_mesh import pipeline_mesh_of, pipeline_of
from cost_model.errors import ShardingError
from passes.ir.torch_dtensor import CLIP_BY_NORM, CLIP_BY_VALUE, TOTAL_NORM, local_of, wrap_in_torch

__all__ = ["clip_over_stages"]


def clip_over_stages() -> None:
    """From now on, in this process: `torch.nn.utils.get_total_norm`, `clip_grad_norm_`, `clip_grads_with_norm_` and
    `clip_grad_value_` take gradients of several stages."""
    wrap_in_torch(TOTAL_NORM, _total_norm)
    wrap_in_torch(CLIP_BY_NORM, _clip_by_norm)
    wrap_in_torch(CLIP_BY_VALUE, _clip_by_value)


def _total_norm(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @torch.no_grad()
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        given = _listed(tensors)
        pipeline = pipeline_of(given)
        if pipeline is None:
            return plain(given, norm_type, error_if_nonfinite, foreach)
        total = torch.linalg.vector_norm(_norms(given, float(norm_type), pipeline), float(norm_type))
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite, so it "
                "cannot be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        total = total.to(reduce(torch.promote_types, (t.dtype for t in given)))
        # As of gradients on one mesh, it is a DTensor.
        return DTensor.from_local(total, pipeline, [Replicate()] * pipeline.ndim, run_check=False)

    return get_total_norm


def _clip_by_norm(plain: Callable[..., None]) -> Callable[..., None]:
    @torch.no_grad()
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        given = _listed(parameters)
        if pipeline_of([p.grad for p in given]) is None:
            return plain(given, max_norm, total_norm, foreach)
        total = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
        plain(_parts(given), max_norm, total, foreach)
        return _mark_changed(given)

    return clip_grads_with_norm_


def _clip_by_value(plain: Callable[..., None]) -> Callable[..., None]:
    @torch.no_grad()
    def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        given = _listed(parameters)
        if pipeline_of([p.grad for p in given]) is None:
            return plain(given, clip_value, foreach)
        plain(_parts(given), clip_value, foreach)
        return _mark_changed(given)

    return clip_grad_value_


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


@dataclass(frozen=True)
class _Part:
    """This rank's part of a parameter's gradient, for functions that ask a parameter for its gradient only."""

    grad: Tensor


def _parts(parameters: Iterable[Tensor]) -> list[_Part]:
    """A gradient without a part here does not count."""
    grads = [local_of(p.grad) for p in parameters if p.grad is not None]
    return [_Part(grad) for grad in grads if grad.numel()]


def _mark_changed(parameters: Iterable[Tensor]) -> None:
    increment_version([p.grad for p in parameters if isinstance(p.grad, DTensor)])


def _norms(tensors: Sequence[Tensor], order: float, pipeline: DeviceMesh) -> Tensor:
    """The norm of each, of all its parts on all ranks: float64."""
    device = local_device(pipeline)
    parts = [_share(tensor, order, pipeline) for tensor in tensors]
    shares = torch.stack([part.to(device, torch.float64) for part in parts])
    group = whole_group(pipeline)
    if math.isinf(order):
        return _greatest(shares, order, group)
    dist.all_reduce(shares, group=group)
    return shares if order == 0 else shares ** (1 / order)


def _greatest(shares: Tensor, order: float, group: dist.ProcessGroup) -> Tensor:
    """The maximum over ranks for inf, the minimum for -inf; NaN where there is one, which not every backend keeps."""
    sign = 1.0 if order > 0 else -1.0
    missing = shares.isnan()
    both = torch.stack([(sign * shares).masked_fill(missing, -math.inf), missing.double()])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    greatest, missing = both
    return (sign * greatest).masked_fill(missing > 0, math.nan)


def _share(tensor: Tensor, order: float, pipeline: DeviceMesh) -> Tensor:
    """What this rank's part adds to the norm: the sum of powers, the number of those not 0 for order 0, and the
    extreme itself for inf. Of ranks with the same part one counts it."""
    part = _own_part(tensor, pipeline)
    if part is None or not part.numel():
        nothing = {math.inf: 0.0, -math.inf: math.inf}.get(order, 0.0)
        return torch.tensor(nothing, dtype=torch.float64)
    wide = torch.promote_types(part.dtype, torch.float32)
    norm = torch.linalg.vector_norm(part, order, dtype=wide).double()
    return norm if order == 0 or math.isinf(order) else norm**order


def _own_part(tensor: Tensor, pipeline: DeviceMesh) -> Tensor | None:
    if not isinstance(tensor, DTensor):
        return tensor if pipeline.get_rank() == 0 else None
    mesh = tensor.device_mesh
    if mesh != pipeline and pipeline_mesh_of(mesh) != pipeline:
        raise ShardingError(
            f"gradients are on {mesh} and on stages of {pipeline}\n  try: clip those of each mesh for themselves"
        )
    place = mesh.get_coordinate()
    if place is None:
        return None
    if any(p.is_partial() for p in tensor.placements):
        tensor = tensor.redistribute(mesh, [Replicate() if p.is_partial() else p for p in tensor.placements])
    copies = (i for i, p in zip(place, tensor.placements, strict=True) if p.is_replicate())
    return None if any(copies) else local_of(tensor)
