"""Bytes of a GPU that no tensor can have: CUDA's context and NCCL's communicators.

They are published figures, rounded to what was printed; no machine of this project has measured them. `docs/cuda.md`
says how to measure them where a plan runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cost_model.groups import group_ranks, group_shape
from cost_model.mesh import MeshSpec

__all__ = [
    "COMMUNICATOR_BYTES",
    "CONTEXT_BYTES",
    "NETWORK_BYTES",
    "PAIR_BYTES",
    "PEERS_IN_REACH",
    "PEER_BYTES",
    "Axes",
    "communicators",
    "reserve_bytes",
]

Axes = tuple[str, ...]

CONTEXT_BYTES = 600_000_000
"""CUDA's context with the kernels that a training step loads, and cuBLAS's workspaces.

The context took 426 MiB after the first call with torch 2.10 and CUDA 13 [unslothai/unsloth-zoo#1053], "around 400 MB"
since kernels load lazily [pytorch/pytorch#109888]. Kernels add to it as they are used. torch gives cuBLAS and cuBLASLt
32 MiB each on Hopper [torch docs, notes/cuda, cuBLAS workspaces]."""

COMMUNICATOR_BYTES = 688 << 20
"""One communicator of three ranks or more that has run an all-reduce: 688 MB on A100s with NVLink.
[NVIDIA/nccl#964] More channels take more [NVIDIA/nccl#864, #986], and from 2.22 on NCCL allocates what it connects."""

PAIR_BYTES = 544 << 20
"""The same for two ranks. [NVIDIA/nccl#964]"""

PEER_BYTES = 469_000_000
"""Added for every rank in reach of NVLink with which an all-to-all exchanges messages. The first all-to-all of eight
H100s took 4.34 - 1.06 GB, over seven peers. [NVIDIA/nccl#1685]"""

PEERS_IN_REACH = 7
"""Ranks that one is joined to by NVLink in a machine of eight. Those beyond share one buffer. [NVIDIA/nccl#1450]"""

NETWORK_BYTES = 512 << 20
"""The buffer that all messages over a network share. [NVIDIA/nccl#2363]"""


def communicators(mesh: MeshSpec, used: Iterable[Axes] = ()) -> tuple[Axes, ...]:
    """The communicators of one rank, in the order in which they are made; none on CPUs or for one rank.

    The first is that of all ranks (the default process group). One for every mesh axis follows (DeviceMesh makes
    them), then those of several axes in `used`. Each is named by its axes of more than one device, in mesh order.
    Axes that span the same ranks share a communicator.
    """
    world = mesh.real_axes()
    if mesh.device_type != "cuda" or not world:
        return ()
    wanted = {tuple(sorted((a for a in axes if a in world), key=mesh.index)) for axes in used}
    several = sorted(
        (axes for axes in wanted if len(axes) > 1), key=lambda axes: [mesh.index(a) for a in axes]
    )
    return tuple(dict.fromkeys([world, *((axis,) for axis in world), *several]))


def reserve_bytes(mesh: MeshSpec, peers: Mapping[Axes, int] | None = None) -> int:
    """Bytes on every device of `mesh` for CUDA's context and the communicators; 0 on CPUs.

    peers: axes of the collectives that run -> with how many ranks one exchanges messages of its own
           (all-to-all), 0 if all its collectives go around a ring.
    """
    if mesh.device_type != "cuda":
        return 0
    found = CONTEXT_BYTES
    for axes in communicators(mesh, peers or ()):
        found += PAIR_BYTES if mesh.size(*axes) == 2 else COMMUNICATOR_BYTES
    for axes, count in (peers or {}).items():
        near = min(count, _in_reach(mesh, axes))
        found += near * PEER_BYTES + (NETWORK_BYTES if count > near else 0)
    return found


def _in_reach(mesh: MeshSpec, axes: Axes) -> int:
    """Other ranks of a group along `axes` in the same machine, where most are: ranks fill machines in their order."""
    ranks = group_ranks(group_shape(mesh, axes))
    return sum(rank <= PEERS_IN_REACH for rank in ranks) - 1
