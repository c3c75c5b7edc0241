"""What a rank holds of a global value."""

from __future__ import annotations

import torch

from autoshard.runtime.sharding import shard_of
from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout

__all__ = ["held_value"]


def held_value(value: torch.Tensor, layout: Layout, mesh: MeshSpec, rank: int) -> torch.Tensor:
    """What `rank` holds of a global `value`: its shard; of a pending sum, index 0 of the axis holds all."""
    part = shard_of(value, layout, mesh, rank)
    here = mesh.coordinate(rank)
    if any(here[axis] != 0 for axis, op in layout.partial if op == "sum"):
        return torch.zeros_like(part)
    return part.contiguous()
