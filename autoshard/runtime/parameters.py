"""Turn a model's parameters into DTensors, in place: each rank keeps its shard; and complete what DTensors do.

Ops that torch lacks or answers for one shard, and that ordinary scripts apply to parameters, are of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from autoshard.runtime.optimizers import adopt, live_optimizers, retire, shard_when_loaded, update_shards
from autoshard.runtime.process_groups import holders_mesh, local_device, spec_of
from autoshard.runtime.sharding import as_laid_out, differing, distributed, like_parameter
from autoshard.runtime.stage_ops import complete_stage_ops
from autoshard.runtime.whole_ops import (
    as_strided,
    convolved,
    least_or_greatest,
    multiplied,
    on_whole,
    whole_on,
)
from cost_model.errors import ShardingError, few
from cost_model.mesh import MeshSpec
from passes.ir.torch_compat import move_gradient_hooks
from passes.ir.torch_dtensor import (
    SET_PARAMETRIZED,
    answer_new_ops,
    dtensor_from,
    handle_dtensor_op,
    leave_plain_what_is_plain,
    local_of,
    read_dtensors_whole,
    set_dtensor_data_by,
    sharding_of,
    take_gradients_of_dtensors,
    take_plain_tensors_as_replicated,
    whole_value,
    wrap_dtensor_handler,
    wrap_in_torch,
)
from passes.layout.layout import Layout
from passes.layout.placements import placements_to_layout

aten = torch.ops.aten

_OF_WHOLE = (
    aten._local_scalar_dense.default,
    aten._is_any_true.default,
    aten._is_all_true.default,
    aten.allclose.default,
    aten.equal.default,
)
"""`.item()`, `float` and `bool`, and what anomaly detection asks. torch reads the rank's own part, of a pending sum
or norm too (`p.grad.norm().item()` is the norm of a shard, without a word), or has no answer."""


def complete_dtensor_ops(device: torch.device, meshes: Iterable[DeviceMesh] = ()) -> None:
    """From now on, in this process: a number read of a DTensor is that of the whole tensor, `copy_` and `p.data = ...`
    take whole tensors, a plain tensor beside DTensors is whole too, the same on all ranks, as outputs and losses are,
    a pending sum is summed before an op that needs all of it writes into it, and optimizers update shards as if they
    were plain. device: of the parameters. meshes: on which ops that torch errs on or refuses are of whole tensors; on
    others a script's own DTensors may have torch's answers."""
    whole_on(meshes)
    for op in _OF_WHOLE:
        handle_dtensor_op(op, _of_whole)
    handle_dtensor_op(aten.mul.Scalar, multiplied)
    handle_dtensor_op(aten.copy_.default, _copy)
    handle_dtensor_op(aten.detach.default, _detached)
    answer_new_ops(on_whole)
    leave_plain_what_is_plain()
    wrap_dtensor_handler(aten.as_strided.default, as_strided)
    for op in (aten.argmin.default, aten.argmax.default):
        wrap_dtensor_handler(op, least_or_greatest)
    for op in (aten.convolution.default, aten.convolution_backward.default):
        wrap_dtensor_handler(op, convolved)
    wrap_in_torch(SET_PARAMETRIZED, _set_data)
    set_dtensor_data_by(lambda target, value: as_laid_out(value, target))
    take_plain_tensors_as_replicated(device)
    take_gradients_of_dtensors()
    read_dtensors_whole()
    update_shards()
    shard_when_loaded()


def _of_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(*map(whole_value, args), **kwargs)


def _detached(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of torch's own op, in half the time: autograd detaches every gradient that it stores."""
    (tensor,) = args
    return dtensor_from(op(local_of(tensor)), sharding_of(tensor))


def _set_data(plain: Callable[..., None]) -> Callable[..., None]:
    """`remove_parametrizations`: torch swaps the parameter with a value, which may be whole."""

    def put(target: Tensor, value: Tensor) -> None:
        if isinstance(target, DTensor):
            target.data = value.detach()
        else:
            plain(target, value)

    return put


def _copy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain source is the whole tensor, the same on all ranks; a plain target gets the whole tensor."""
    target, source, *rest = args
    if not isinstance(target, DTensor):
        return op(target, source.full_tensor(), *rest, **kwargs)
    source = source if source.shape == target.shape else source.expand(target.shape)
    op(target.to_local(), as_laid_out(source, target).to_local(), *rest, **kwargs)
    return target


@dataclass(frozen=True)
class Place:
    """The place of a parameter: its mesh, and a placement for each of its axes."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]


def place_parameters(model: nn.Module, mesh: DeviceMesh, places: Mapping[str, Place]) -> None:
    """Make every parameter of `model` a DTensor at the place of its name, or replicated on `mesh` where it has none.

    The mesh of a place is `mesh` or a part that `holders_mesh` took of it. On a rank of another stage a parameter's
    local tensor is empty (of a parameter of no dims, a zero that means nothing), and so must its gradient be, which has
    to be there where its own ranks have one.

    Names, `requires_grad`, gradients, gradient hooks, tied weights (any of its names may be given) and attributes
    set on a parameter stay. A DTensor is another Python object than the parameter it replaces (torch cannot
    turn one into the other in place), so every live `torch.optim.Optimizer` is given the new ones, and
    its state is sharded likewise; any other use of an old one raises and says so. Values are rank 0's:
    those that differ on another rank are broadcast, in pieces, the others are cut without
    communication. A `meta` parameter becomes a `meta` shard; `model.to_empty(device=...)` then makes
    room for the shard alone.

    What reads or changes a parameter is for all ranks of `mesh` together: `full_tensor()`, clipping, an optimizer's
    step, states. Call it on every rank of the mesh. Raises ShardingError, before anything is changed, for a name
    that no parameter has, or placements that its shape or the mesh does not allow.
    """
    complete_dtensor_ops(local_device(mesh), {mesh, *(place.mesh for place in places.values())})
    plans = _plans(model, mesh, places)
    whole = [plan.old for plan in plans if not isinstance(plan.old, DTensor) and not plan.old.is_meta]
    stale = differing([p.detach() for p in whole], mesh)
    unequal = {id(p) for p, differs in zip(whole, stale, strict=True) if differs}
    holders = _holders(model)
    moved: dict[Tensor, nn.Parameter] = {}
    for plan in plans:
        old = plan.old
        if plan.is_done():
            continue
        moved[old] = _replacement(old, plan.placed(from_first=id(old) in unequal))
        for module, name in holders[old]:
            setattr(module, name, moved[old])  # some modules keep their own list, as RNNs do
        retire(old)
    adopt(live_optimizers(), moved)


@dataclass(frozen=True)
class _Planned:
    old: nn.Parameter
    place: Place
    layout: Layout

    def is_done(self) -> bool:
        old, place = self.old, self.place
        return (
            isinstance(old, DTensor)
            and old.device_mesh == place.mesh
            and tuple(old.placements) == place.placements
        )

    def placed(self, *, from_first: bool) -> DTensor:
        mesh, placements = self.place.mesh, self.place.placements
        value = self.old.detach()
        if isinstance(value, DTensor):
            if value.device_mesh == mesh:
                return value.redistribute(mesh, placements)
            value = value.full_tensor()
        return distributed(value, mesh, placements, self.layout, from_first=from_first)


def _plans(model: nn.Module, mesh: DeviceMesh, places: Mapping[str, Place]) -> list[_Planned]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    known = {name for group in names.values() for name in group}
    for name in places:
        if name not in known:
            raise ShardingError(
                f"placements name {name!r}, which is no parameter of the model\n"
                f"  its parameters are {few(sorted(known), 8, ', ...')}"
            )
    everywhere = Place(mesh, (Replicate(),) * mesh.ndim)
    plans: list[_Planned] = []
    for parameter, group in names.items():
        place = next((places[name] for name in group if name in places), everywhere)
        spec = spec_of(place.mesh)
        layout = placements_to_layout(place.placements, parameter.shape, spec, what=group[0])
        if layout.partial:
            raise ShardingError(f"parameter {group[0]} cannot be Partial\n  try: Replicate() or Shard(dim)")
        plans.append(_Planned(parameter, place, layout))
    return plans


def _holders(model: nn.Module) -> dict[Tensor, list[tuple[nn.Module, str]]]:
    """Parameter -> where it sits, tied places included."""
    holders: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    return holders


def _replacement(old: nn.Parameter, new: Tensor) -> nn.Parameter:
    """A parameter of `new` with everything else of `old`; `old.grad` and hooks go along."""
    parameter = nn.Parameter(new, requires_grad=old.requires_grad)
    move_gradient_hooks(old, parameter, _GradientHook.of)
    vars(parameter).update({k: v for k, v in vars(old).items() if k not in vars(parameter)})
    gradient = old.grad
    if gradient is not None:
        old.grad = None
        parameter.grad = gradient if isinstance(gradient, DTensor) else like_parameter(gradient, parameter)
    return parameter


@dataclass(frozen=True)
class _GradientHook:
    """A hook that was written for a plain gradient: tensors that it has, such as a mask, are whole on every rank."""

    hook: Callable[[Any], Any]

    @staticmethod
    def of(hook: Callable[[Any], Any]) -> _GradientHook:
        return hook if isinstance(hook, _GradientHook) else _GradientHook(hook)

    def __call__(self, gradient: Any) -> Any:
        return self.hook(gradient)


@dataclass(frozen=True)
class StagePlaced:
    """The place of one parameter: the stages that hold it, ascending, and a placement for each axis of the mesh.

    On the axis of the stages that is Replicate().
    """

    holders: tuple[int, ...]
    placements: tuple[Placement, ...]


def stage_places(mesh: DeviceMesh, axis: str, placed: Mapping[str, StagePlaced]) -> dict[str, Place]:
    """Per parameter the mesh of its holders and its placements there. Every rank of the mesh calls it, with the same.
    Raises ShardingError for one that is split over `axis`."""
    complete_stage_ops()
    dim = MeshSpec.of(mesh).index(axis)
    for name, one in placed.items():
        if dim < len(one.placements) and not one.placements[dim].is_replicate():
            raise ShardingError(
                f"parameter {name} has {one.placements[dim]} on axis {axis!r}, which is that of the stages\n"
                "  try: Replicate() there, and holders for the stages"
            )
    # The meshes first and in one order: their process groups are made by all ranks together.
    sets = sorted({one.holders for one in placed.values()})
    meshes = {holders: holders_mesh(mesh, axis, holders) for holders in sets}
    return {name: Place(meshes[one.holders], one.placements) for name, one in placed.items()}
