"""Parameters of a model placed by their placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from autoshard.runtime.parameters import Place, StagePlaced, place_parameters, stage_places

__all__ = ["distribute_parameters", "distribute_stage_parameters"]


def distribute_parameters(
    model: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Sequence[Placement]]
) -> None:
    """All on `mesh`."""
    place_parameters(model, mesh, {name: Place(mesh, tuple(placed)) for name, placed in placements.items()})


def distribute_stage_parameters(
    model: nn.Module, mesh: DeviceMesh, axis: str, placed: Mapping[str, StagePlaced]
) -> None:
    """With stages along `axis` of `mesh`."""
    place_parameters(model, mesh, stage_places(mesh, axis, placed))
