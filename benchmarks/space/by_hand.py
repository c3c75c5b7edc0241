"""What a PyTorch user writes: the network on a rank's rows, with a halo from the neighbours before each convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from autoshard import halo_exchange
from benchmarks.space.networks import SPLIT_DIM, ConvStack

__all__ = ["Padded", "SpaceStack", "functional_halo", "neighbour_messages"]

Padded = Callable[[Tensor], Tensor]
"""A rank's rows -> with one more on each side: a neighbour's, or zeros at the end of the image."""


class SpaceStack(nn.Module):
    """`ConvStack` on this rank's rows. pad: how it gets one more on each side."""

    def __init__(self, stack: ConvStack, pad: Padded) -> None:
        super().__init__()
        self.convs = stack.convs
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            inner = (0, *(1 for _ in range(x.ndim - SPLIT_DIM - 1)))
            convolve = F.conv2d if x.ndim == 4 else F.conv3d
            x = F.relu(convolve(self.pad(x), conv.weight, conv.bias, padding=inner))
        return x


def functional_halo(mesh: DeviceMesh) -> Padded:
    """By `autoshard.halo_exchange`: one all-to-all an exchange."""
    rank, last = mesh.get_local_rank(), mesh.size() - 1

    def pad(x: Tensor) -> Tensor:
        y = halo_exchange(x, mesh, {SPLIT_DIM: (1, 1)})
        sides = [0, 0] * (x.ndim - SPLIT_DIM - 1) + [int(rank == 0), int(rank == last)]
        return F.pad(y, sides) if any(sides) else y

    return pad


def neighbour_messages(mesh: DeviceMesh) -> Padded:
    """By isend and irecv to and from the one or two neighbours."""
    rank, last = mesh.get_local_rank(), mesh.size() - 1
    ranks = dist.get_process_group_ranks(mesh.get_group())
    neighbours = _Neighbours(
        None if rank == 0 else ranks[rank - 1], None if rank == last else ranks[rank + 1]
    )

    # Messages between two ranks are no ops of a graph: a compiler compiles what lies between them.
    @torch.compiler.disable
    def pad(x: Tensor) -> Tensor:
        return _Halo.apply(x, neighbours)

    return pad


class _Neighbours:
    """before, after: the ranks that hold the rows before and after this one's; None at an end of the image."""

    def __init__(self, before: int | None, after: int | None) -> None:
        self.before = before
        self.after = after

    def swap(self, first: Tensor, last: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Send `first` to the one before and `last` to the one after; what these send here."""
        work: list[dist.P2POp] = []
        received: list[Tensor | None] = []
        for peer, row in ((self.before, first), (self.after, last)):
            arriving = None
            if peer is not None:
                row, arriving = row.contiguous(), torch.empty(row.shape, dtype=row.dtype, device=row.device)
                work += [dist.P2POp(dist.isend, row, peer), dist.P2POp(dist.irecv, arriving, peer)]
            received.append(arriving)
        for started in dist.batch_isend_irecv(work) if work else []:
            started.wait()
        return received[0], received[1]


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, neighbours: _Neighbours) -> Tensor:
        ctx.neighbours = neighbours
        rows = x.shape[SPLIT_DIM]
        first, last = x.narrow(SPLIT_DIM, 0, 1), x.narrow(SPLIT_DIM, rows - 1, 1)
        sides = neighbours.swap(first, last)
        before, after = (torch.zeros_like(first) if side is None else side for side in sides)
        return torch.cat([before, x, after], SPLIT_DIM)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (grad,) = grad_outputs
        rows = grad.shape[SPLIT_DIM] - 2
        first, last = grad.narrow(SPLIT_DIM, 0, 1), grad.narrow(SPLIT_DIM, rows + 1, 1)
        before, after = ctx.neighbours.swap(first, last)
        inner = grad.narrow(SPLIT_DIM, 1, rows).contiguous()
        if before is not None:
            inner.narrow(SPLIT_DIM, 0, 1).add_(before)
        if after is not None:
            inner.narrow(SPLIT_DIM, rows - 1, 1).add_(after)
        return inner, None
