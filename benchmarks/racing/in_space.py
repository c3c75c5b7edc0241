"""A U-Net on a rank's rows of an image, as a user writes it: halos before convolutions, statistics over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.space.by_hand import Padded

__all__ = ["rows_of", "split_in_space"]


def rows_of(batch: tuple[Tensor, Tensor], rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """A rank's rows of images [n, c, h, w] and of labels [n, h, w]."""
    images, labels = batch
    return images.chunk(ranks, 2)[rank].contiguous(), labels.chunk(ranks, 1)[rank].contiguous()


def split_in_space(model: nn.Module, pad: Padded, group: dist.ProcessGroup) -> nn.Module:
    """`model` for rows, in place: its 3 x 3 convolutions and group norms. Pooling and growing by 2 stay in a rank."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Conv2d) and child.kernel_size == (3, 3):
                setattr(module, name, _RowConv(child, pad))
            elif isinstance(child, nn.GroupNorm):
                setattr(module, name, _RowNorm(child, group))
    return model


class _RowConv(nn.Module):
    def __init__(self, conv: nn.Conv2d, pad: Padded) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        self._pad = pad

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self._pad(x), self.weight, self.bias, padding=(0, 1))


class _RowNorm(nn.Module):
    """A group norm whose mean and variance are of all ranks' rows."""

    def __init__(self, norm: nn.GroupNorm, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self._groups, self._eps, self._group = norm.num_groups, norm.eps, group

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (self._groups, -1)).flatten(2)
        sums = torch.stack([parts.sum(-1), parts.square().sum(-1)])
        sums = _all_sum(sums, self._group) / (parts.shape[-1] * self._group.size())
        mean, square = sums.unbind()
        scale = (square - mean.square() + self._eps).rsqrt()
        normed = ((parts - mean.unsqueeze(-1)) * scale.unsqueeze(-1)).view_as(x)
        return normed * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


@torch.compiler.disable
def _all_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Over the ranks; so is its gradient."""
    return dist_nn.all_reduce(x, group=group)
