"""The network: convolutions of kernel 3 on an image or a volume, split over ranks in its first dim of space."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["SPLIT_DIM", "ConvStack", "Work"]

SPLIT_DIM = 2


@dataclass(frozen=True)
class Work:
    """space: 2 or 3 dims, each `size` long. Input and output have `channels` as every layer does."""

    space: int
    size: int
    channels: int
    layers: int
    batch: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, self.channels, *(self.size for _ in range(self.space)))

    @property
    def text(self) -> str:
        extent = " x ".join(str(self.size) for _ in range(self.space))
        return f"{self.layers} convolutions, {self.channels} channels, batch {self.batch}, {extent}"

    def network(self) -> ConvStack:
        """The same weights on every rank."""
        torch.manual_seed(0)
        return ConvStack(self.space, self.channels, self.layers)

    def part(self, seed: int, rank: int, ranks: int) -> Tensor:
        """A rank's rows of a random tensor of `shape`; the rows of all ranks are the tensor of one."""
        rows = torch.arange(self.size).chunk(ranks)[rank].tolist()
        width = (*self.shape[:2], 1, *self.shape[3:])
        generators = (torch.Generator().manual_seed(seed * self.size + row) for row in rows)
        return torch.cat([torch.randn(width, generator=generator) for generator in generators], SPLIT_DIM)


class ConvStack(nn.Module):
    """relu(conv(x)), `layers` times; every convolution keeps the size."""

    def __init__(self, space: int, channels: int, layers: int) -> None:
        super().__init__()
        kind = nn.Conv2d if space == 2 else nn.Conv3d
        self.convs = nn.ModuleList(kind(channels, channels, 3, padding=1) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.relu(conv(x))
        return x
