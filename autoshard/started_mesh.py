"""The ranks that torchrun started, or this process alone, as a mesh; and in which order NCCL runs on their GPUs."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cost_model.measure.measure import check_device_type
from cost_model.measure.sampling import check_world
from cost_model.mesh import MeshSpec


@contextmanager
def started_mesh(axes: Mapping[str, int] | None, device_type: str) -> Generator[DeviceMesh]:
    """A mesh over all started processes, one device each; a process group made here ends with the block.

    axes: names and sizes; None: one axis "ranks". Without torchrun this process is the only rank.
    On GPUs a process takes that of its LOCAL_RANK, unless it has joined a process group before.
    Raises ShardingError for devices that are not there, and for a mesh of more or fewer devices than processes.
    """
    joined = dist.is_initialized()
    world = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    spec = MeshSpec({"ranks": world} if axes is None else axes, device_type)
    check_device_type(device_type)
    check_world(spec, world)
    if not joined:
        _join(device_type)
    try:
        yield init_device_mesh(device_type, spec.sizes, mesh_dim_names=spec.names)
    finally:
        if not joined:
            dist.destroy_process_group()


def _join(device_type: str) -> None:
    options: dict[str, Any] = {"backend": "gloo"}
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        ask_for_host_order()
        options = {"backend": "nccl", "device_id": device}
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**options)


_HOST_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_SINCE = (2, 26)


def in_host_order() -> bool:
    """Whether NCCL runs the kernels of several communicators of a GPU in the order in which the host issued them.

    Then they may be in flight together, since every rank issues in one order. [NCCL user guide, "Using
    multiple NCCL communicators concurrently"; since NCCL 2.26]
    """
    if os.environ.get(_HOST_ORDER, "0") in ("", "0") or not torch.cuda.is_available():
        return False
    return nccl.version()[:2] >= _SINCE


def ask_for_host_order() -> None:
    """For scripts of our own, before the process group is made: NCCL reads its environment once."""
    os.environ.setdefault(_HOST_ORDER, "1")
