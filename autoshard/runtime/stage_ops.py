"""What scripts do with parameters and gradients, where each is on the ranks of its stages."""

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
from torch.utils import _pytree as pytree

from autoshard.runtime.process_groups import (
    PartOf,
    local_device,
    part_of,
    pipeline_mesh_of,
    place_in,
    whole_group,
)
from autoshard.runtime.sharding import like_parameter
from autoshard.runtime.stage_mixing import mix_stages
from cost_model.errors import ShardingError
from passes.ir.torch_dtensor import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    DISTRIBUTE_STATE,
    GATHER_STATE,
    TOTAL_NORM,
    is_partial,
    local_of,
    unscaling_op,
    whole_value,
    wrap_attribute,
    wrap_dtensor_handler,
    wrap_in_torch,
)


def _for_all_stages(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
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


def _unscale(plain: Callable[..., Any]) -> Callable[..., Any]:
    def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gradients, found, inverse = args
        pipeline = _pipeline_of(gradients)
        if pipeline is None:
            return plain(op, args, kwargs)
        parts = [part for part in map(local_of, gradients) if part.numel()]
        if parts:
            op(parts, found, inverse, **kwargs)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=whole_group(pipeline))
        return None

    return unscale


def _total_norm(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @torch.no_grad()
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        given = _listed(tensors)
        pipeline = _pipeline_of(given)
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


def _clip(plain: Callable[..., None]) -> Callable[..., None]:
    """By norm or by value: of this rank's parts."""

    @torch.no_grad()
    def clip(parameters: Any, *rest: Any, **options: Any) -> None:
        given = _listed(parameters)
        if _pipeline_of([p.grad for p in given]) is None:
            return plain(given, *rest, **options)
        others = {name: whole_value(value) for name, value in options.items()}
        plain(_parts(given), *map(whole_value, rest), **others)
        return increment_version([p.grad for p in given if isinstance(p.grad, DTensor)])

    return clip


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
    """The share of this rank's part in the norm: the sum of powers, the number of those not 0 for order 0, and the
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
    if is_partial(tensor):
        tensor = tensor.redistribute(mesh, [Replicate() if p.is_partial() else p for p in tensor.placements])
    copies = (i for i, p in zip(place, tensor.placements, strict=True) if p.is_replicate())
    return None if any(copies) else local_of(tensor)


def _gather(plain: Callable[..., Any]) -> Callable[..., Any]:
    """With whole tensors in the place of what some stages hold, one after the other to the host."""

    def gather(state_dict: Any, *, cpu_offload: bool = False, ranks_only: Any = (), **options: Any) -> Any:
        def whole(value: Any) -> Any:
            if not _is_of_stages(value):
                return value
            found = value.detach().full_tensor()
            if ranks_only and dist.get_rank() not in ranks_only:
                return None
            return found.cpu() if cpu_offload else found

        gathered = pytree.tree_map(whole, state_dict)
        return plain(gathered, cpu_offload=cpu_offload, ranks_only=ranks_only, **options)

    return gather


def _distribute(plain: Callable[..., None]) -> Callable[..., None]:
    """Loads this rank's parts: of a tensor that it has no part of, torch would copy all into what is there."""

    def distribute(local_state_dict: dict[str, Any], keys: list[str], *rest: Any, **options: Any) -> None:
        pairs = {key: local_state_dict.get(key) for key in keys}
        ours = [key for key, pair in pairs.items() if isinstance(pair, tuple) and _is_of_stages(pair[0])]
        for key in ours:
            local, whole = local_state_dict[key]
            shard = like_parameter(whole, local)
            local_state_dict[key] = shard if local.is_meta else local.copy_(shard)
        plain(local_state_dict, [key for key in keys if key not in ours], *rest, **options)

    return distribute


def complete_stage_ops() -> None:
    """From now on, in this process: whole values (`full_tensor()`, differentiable), norms and clipping of
    `torch.nn.utils`, `unscale_` and `step` of a gradient scaler, and full state dicts are those of all stages. Nothing
    changes for other tensors. All ranks of a pipeline call such a function together."""
    wrap_attribute(DTensor, "full_tensor", _for_all_stages)
    mix_stages()
    wrap_in_torch(TOTAL_NORM, _total_norm)
    wrap_in_torch(CLIP_BY_NORM, _clip)
    wrap_in_torch(CLIP_BY_VALUE, _clip)
    wrap_dtensor_handler(unscaling_op(), _unscale)
    wrap_in_torch(GATHER_STATE, _gather)
    wrap_in_torch(DISTRIBUTE_STATE, _distribute)


def _is_of_stages(*values: Any) -> bool:
    """Whether one of them is a DTensor that not all stages hold."""
    return any(isinstance(v, DTensor) and part_of(v.device_mesh) is not None for v in values)


def _pipeline_of(tensors: Iterable[Any]) -> DeviceMesh | None:
    """The mesh of all stages of which some hold one of `tensors`; None where there is none such."""
    meshes = (value.device_mesh for value in tensors if isinstance(value, DTensor))
    return next((found for mesh in meshes if (found := pipeline_mesh_of(mesh)) is not None), None)
