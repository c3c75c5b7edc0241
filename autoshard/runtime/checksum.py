"""Find out, in one small exchange, which tensors are not the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.devices import local_device
from autoshard.runtime.process_groups import whole_group

__all__ = ["checksum", "differing"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 22


def checksum(tensor: Tensor) -> tuple[int, int]:
    """Two 64-bit sums of the tensor's words, plain and weighted by position (modulo 2^64).

    Equal tensors have equal sums; tensors of two random seeds have not. Bits are compared, so NaNs
    are like any value.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = real.contiguous().view(-1).view(_WORDS[real.element_size()])
    plain = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weighted = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        position = torch.arange(start + 1, start + 1 + piece.numel(), device=tensor.device)
        plain += piece.sum()
        weighted += (piece * position).sum()
    return int(plain), int(weighted)


def differing(tensors: Sequence[Tensor], mesh: DeviceMesh) -> list[bool]:
    """Per tensor, whether some rank of the mesh has other values than rank 0. The same on all ranks.

    Every rank must pass tensors of the same shapes.
    """
    if mesh.size() == 1 or not tensors:
        return [False] * len(tensors)
    mine = torch.tensor([checksum(t) for t in tensors], dtype=torch.int64, device=local_device(mesh))
    low, high = mine.clone(), mine.clone()
    group = whole_group(mesh)
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    return (low != high).any(1).tolist()
