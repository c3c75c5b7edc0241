"""Turn a model's parameters into DTensors, in place: each rank keeps its shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.experimental import implicit_replication

from autoshard.runtime.checksum import differing
from autoshard.runtime.devices import local_device
from autoshard.runtime.dtensor_ops import complete_dtensor_ops
from autoshard.runtime.optimizers import adopt, live_optimizers, retire
from autoshard.runtime.sharding import distributed, like_parameter
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.ir.torch_compat import move_gradient_hooks
from passes.layout.layout import Layout
from passes.layout.placements import placements_to_layout

__all__ = ["distribute_parameters"]


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
    complete_dtensor_ops(local_device(mesh))
    spec = MeshSpec.of(mesh)
    plans = _plans(model, spec, placements)
    whole = [p for p, _, _ in plans if not isinstance(p, DTensor) and not p.is_meta]
    stale = differing([p.detach() for p in whole], mesh)
    unequal = {id(p) for p, differs in zip(whole, stale, strict=True) if differs}
    holders = _holders(model)
    moved: dict[Tensor, nn.Parameter] = {}
    for old, placed, layout in plans:
        if isinstance(old, DTensor) and tuple(old.placements) == placed:
            continue
        if isinstance(old, DTensor):
            new = old.redistribute(mesh, placed).detach()
        else:
            new = distributed(old.detach(), mesh, placed, layout, spec, from_first=id(old) in unequal)
        moved[old] = _replacement(old, new)
        for module, name in holders[old]:
            setattr(module, name, moved[old])  # some modules keep their own list, as RNNs do
        retire(old)
    adopt(live_optimizers(), moved)


Planned = tuple[nn.Parameter, tuple[Placement, ...], Layout]


def _plans(model: nn.Module, spec: MeshSpec, placements: Mapping[str, Sequence[Placement]]) -> list[Planned]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    known = {name for group in names.values() for name in group}
    for name in placements:
        if name not in known:
            raise ShardingError(
                f"placements name {name!r}, which is no parameter of the model\n"
                f"  its parameters are {', '.join(sorted(known)[:8])}{', ...' if len(known) > 8 else ''}"
            )
    replicated = (Replicate(),) * len(spec.names)
    plans: list[Planned] = []
    for parameter, group in names.items():
        given = next((placements[name] for name in group if name in placements), replicated)
        layout = placements_to_layout(given, parameter.shape, spec, what=group[0])
        if layout.partial:
            raise ShardingError(f"parameter {group[0]} cannot be Partial\n  try: Replicate() or Shard(dim)")
        plans.append((parameter, tuple(given), layout))
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
