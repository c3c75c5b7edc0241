"""Classes in place of other libraries' own, which do what a parallel model needs. Each module imports its library."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec


def refused(given: str, other: str, remedy: str) -> ShardingError:
    """That an argument does not go with something else."""
    return ShardingError(f"{given} does not go with {other}\n  try: {remedy}")


def mesh_of_all(mesh: DeviceMesh | Mapping[str, int] | None, device_type: str) -> DeviceMesh:
    """A mesh of all processes; None: of one axis. Its sizes may be given by name.

    Raises ShardingError for more or fewer devices than processes."""
    if not dist.is_initialized():
        raise ShardingError(
            "mesh is given, and torchrun did not start this process\n  try: torchrun --nproc-per-node N script.py, "
            "or mesh=None for one process"
        )
    ranks = dist.get_world_size()
    if isinstance(mesh, DeviceMesh):
        spec = MeshSpec.of(mesh)
    else:
        spec = MeshSpec({"ranks": ranks} if mesh is None else mesh, device_type)
    if spec.device_count != ranks:
        raise ShardingError(
            f"mesh {spec} has {spec.device_count} devices, and {ranks} processes run\n"
            f"  try: torchrun --nproc-per-node {spec.device_count}, or sizes of {ranks} in all"
        )
    return (
        mesh
        if isinstance(mesh, DeviceMesh)
        else init_device_mesh(device_type, spec.sizes, mesh_dim_names=spec.names)
    )
