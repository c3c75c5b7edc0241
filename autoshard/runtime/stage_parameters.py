"""Parameters of a pipelined model: each is held by the ranks of the stages that read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from autoshard.runtime.parameters import Place, place_parameters
from autoshard.runtime.stage_mesh import holders_mesh
from autoshard.runtime.stage_ops import complete_stage_ops
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec

__all__ = ["StagePlaced", "distribute_stage_parameters", "stage_places"]


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
