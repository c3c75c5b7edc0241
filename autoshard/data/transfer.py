"""Tensors of any dtype from one rank of a mesh to another, or to all, as bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.devices import local_device
from autoshard.runtime.process_groups import whole_group

__all__ = ["broadcast", "open_group", "receive", "send"]


def open_group(mesh: DeviceMesh) -> None:
    """Every rank of the mesh calls it before the first `send`: torch allows point-to-point messages among
    a few ranks of a group only after all of them took part in something."""
    dist.broadcast(torch.zeros(1, device=local_device(mesh)), 0, group=whole_group(mesh))


def send(value: Tensor, to: int, mesh: DeviceMesh) -> None:
    """One message of a contiguous `value`, which may be overwritten afterwards."""
    _point_to_point(dist.isend, value, to, mesh)


def receive(into: Tensor, source: int, mesh: DeviceMesh) -> None:
    """Fill a contiguous `into` with what `source` sends."""
    _point_to_point(dist.irecv, into, source, mesh)


def broadcast(value: Tensor, source: int, mesh: DeviceMesh) -> None:
    """`source`'s contiguous `value` on all ranks, in place."""
    dist.broadcast(_as_bytes(value), source, group=whole_group(mesh))


def _point_to_point(operation: Callable, value: Tensor, peer: int, mesh: DeviceMesh) -> None:
    # A batch of one: alone, NCCL would open a communicator for every pair of ranks.
    batch = [dist.P2POp(operation, _as_bytes(value), peer, whole_group(mesh))]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


def _as_bytes(value: Tensor) -> Tensor:
    """The same memory: backends disagree on which dtypes they carry."""
    return value.view(-1).view(torch.uint8)
