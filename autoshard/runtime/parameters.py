"""Turn a model's parameters into DTensors, in place: each rank keeps its shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.experimental import implicit_replication

from autoshard.runtime.devices import local_device
from autoshard.runtime.dtensor_ops import complete_dtensor_ops
from autoshard.runtime.optimizers import adopt, live_optimizers, retire
from autoshard.runtime.process_groups import holders_mesh, spec_of
from autoshard.runtime.sharding import differing, distributed, like_parameter
from autoshard.runtime.stage_ops import complete_stage_ops
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.ir.torch_compat import move_gradient_hooks
from passes.layout.layout import Layout
from passes.layout.placements import placements_to_layout

__all__ = ["Place", "StagePlaced", "distribute_parameters", "distribute_stage_parameters", "stage_places"]


def distribute_parameters(
    model: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Sequence[Placement]]
) -> None:
    """Make every parameter of `model` a DTensor on `mesh` with the placements of its name.

    Names, `requires_grad`, gradients, gradient hooks, tied weights (any of its names may be given) and attributes
    set on a parameter stay. A DTensor is another Python object than the parameter it replaces (torch cannot
    turn one into the other in place), so every live `torch.optim.Optimizer` is given the new ones, and
    its state is sharded likewise; any other use of an old one raises and says so. Values are rank 0's:
    those that differ on another rank are broadcast, in pieces, the others are cut without
    communication. A `meta` parameter becomes a `meta` shard; `model.to_empty(device=...)` then makes
    room for the shard alone.

    Call it on every rank of the mesh. Raises ShardingError, before anything is changed, for a name
    that no parameter has, or placements that its shape or the mesh does not allow.
    """
    place_parameters(model, mesh, {name: Place(mesh, tuple(placed)) for name, placed in placements.items()})


@dataclass(frozen=True)
class Place:
    """Where a parameter goes: its mesh, and a placement for each of its axes."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]


def place_parameters(model: nn.Module, mesh: DeviceMesh, places: Mapping[str, Place]) -> None:
    """`distribute_parameters`, of which each may have a mesh of its own: `mesh` or a part that `holders_mesh` took of
    it. Those that have no place are replicated on `mesh`."""
    complete_dtensor_ops(local_device(mesh))
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
        return distributed(value, mesh, placements, self.layout, spec_of(mesh), from_first=from_first)


def _plans(model: nn.Module, mesh: DeviceMesh, places: Mapping[str, Place]) -> list[_Planned]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    known = {name for group in names.values() for name in group}
    for name in places:
        if name not in known:
            raise ShardingError(
                f"placements name {name!r}, which is no parameter of the model\n"
                f"  its parameters are {', '.join(sorted(known)[:8])}{', ...' if len(known) > 8 else ''}"
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
        with implicit_replication():
            return self.hook(gradient)


@dataclass(frozen=True)
class StagePlaced:
    """Where one parameter is: the stages that hold it, ascending, and a placement for each axis of the mesh.

    On the axis of the stages that is Replicate().
    """

    holders: tuple[int, ...]
    placements: tuple[Placement, ...]


def distribute_stage_parameters(
    model: nn.Module, mesh: DeviceMesh, axis: str, placed: Mapping[str, StagePlaced]
) -> None:
    """`distribute_parameters` of a model whose stages are along `axis` of `mesh`.

    Every rank has every parameter, a DTensor of its whole shape on `holders_mesh(mesh, axis, holders)`. On a rank of
    another stage its local tensor is empty (of a parameter of no dims, a zero that means nothing), and so must its
    gradient be, which has to be there where its own ranks have one. What no name of `placed` is of
    is replicated on all ranks.

    What reads or changes a parameter is for all ranks of `mesh` together: `full_tensor()`, clipping, an optimizer's
    step, states.

    Call it on every rank of the mesh. Raises ShardingError as `distribute_parameters` does, before anything is changed.
    """
    place_parameters(model, mesh, stage_places(mesh, axis, placed))


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
