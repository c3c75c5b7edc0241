"""Networks whose single sample is worth splitting in space."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from autoshard.neighborhood import na2d

__all__ = ["NETWORKS", "network"]


class Block(nn.Module):
    """A residual block; its shortcut is a strided 1 x 1 convolution."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(3))
        self.shortcut = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.one(x)).relu()
        return (self.norms[1](self.two(y)) + self.norms[2](self.shortcut(x))).relu()


class ResNet(nn.Module):
    """Stem of ResNet-50 (7 x 7 by 2, max-pooling 3 x 3 by 2), and three basic blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.norm(self.stem(x)).relu())
        return self.head(self.blocks(x).mean((2, 3))).square().mean()


class UNet(nn.Module):
    """Two levels in three dims: kernel 4, stride 2 down and up, skips concatenated at odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv3d(1, 4, 4, 2, 1), nn.Conv3d(4, 8, 4, 2, 1)])
        self.up = nn.ModuleList([nn.ConvTranspose3d(8, 4, 4, 2, 1), nn.ConvTranspose3d(8, 2, 4, 2, 1)])
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down[0](x).relu()
        two = self.norm(self.up[0](self.down[1](one).relu())).relu()
        d, h, w = (min(a, b) for a, b in zip(one.shape[2:], two.shape[2:], strict=True))
        both = torch.cat([one[:, :, :d, :h, :w], two[:, :, :d, :h, :w]], 1)
        return self.up[1](both).square().mean()


class ConvNeXt(nn.Module):
    """Patches, then depthwise 7 x 7 convolutions with layer norm over channels; average pooling between."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.depthwise = nn.ModuleList(nn.Conv2d(8, 8, 7, padding=3, groups=8) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(8, 32) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(32, 8) for _ in range(2))
        self.pool = nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        for depthwise, norm, up, down in zip(self.depthwise, self.norms, self.up, self.down, strict=True):
            y = norm(depthwise(x).permute(0, 2, 3, 1))
            x = self.pool(x + down(nn.functional.gelu(up(y))).permute(0, 3, 1, 2))
        return x.square().mean()


class Weather(nn.Module):
    """Longitude is a circle, latitude is mirrored at the poles; half the resolution and back."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.pad(x, (1, 1, 0, 0), mode="circular")
        y = self.one(nn.functional.pad(y, (0, 0, 1, 1), mode="reflect")).tanh()
        y = nn.functional.avg_pool2d(y, 2, ceil_mode=True)
        y = self.two(nn.functional.pad(y, (2, 2, 2, 2), mode="replicate"))
        y = nn.functional.interpolate(y, x.shape[2:], mode="bilinear", align_corners=False)
        return (x + y).square().mean()


class NeighborhoodBlock(nn.Module):
    """Pre-norm neighbourhood attention over two dims, of two heads, and an MLP; [batch, rows, columns, width]."""

    def __init__(
        self, width: int, kernel: tuple[int, int], dilation: int, is_causal: tuple[bool, bool]
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.window = (kernel, 1, dilation, is_causal)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)) for part in self.project(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(na2d(q, k, v, *self.window).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class NeighborhoodViT(nn.Module):
    """A vision transformer whose patches attend to those near them: odd windows, then even and dilated ones, causal in
    their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.Sequential(
            NeighborhoodBlock(8, (5, 5), 1, (False, False)),
            NeighborhoodBlock(8, (4, 6), 2, (True, False)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.patches(x).permute(0, 2, 3, 1)).square().mean()


class Moving(nn.Module):
    """What moves data along space: odd sizes padded and cropped, a skip joined along rows, flips and rolls."""

    def __init__(self, rolls: bool) -> None:
        super().__init__()
        self.rolls = rolls
        self.one = nn.Conv2d(2, 8, 3, padding=1)
        self.down, self.up = nn.Conv2d(8, 8, 4, 2, 1), nn.ConvTranspose2d(8, 8, 4, 2, 1)
        self.last = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x).relu()
        y = self.down(nn.functional.pad(one, (1, 2, 3, 0), value=0.5)).relu()
        y = self.up(y).relu()[..., : x.shape[-2], : x.shape[-1]]
        y = torch.cat([y, one[..., 1::2, :].flip(-2), one], -2)
        y = y.roll((5, -3), (-2, -1)) if self.rolls else y.flip(-1)
        return self.last(y[..., 7:-4, :]).square().mean()


class Circles(nn.Module):
    """Convolutions on a torus, and one that is padded further than the smallest shard is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(2, 6, 5, padding=2, padding_mode="circular")
        self.two = nn.Conv2d(
            6, 2, (3, 9), stride=(1, 2), padding=(1, 20), dilation=(1, 5), padding_mode="circular"
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).tanh()).square().mean()


class Pixels(nn.Module):
    """Super-resolution: rows and columns go to channels and back."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 18, 3, padding=1), nn.Conv2d(2, 2, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.pixel_unshuffle(x, 2)
        y = nn.functional.pixel_shuffle(self.one(y).relu(), 3)
        return self.two(y).square().mean()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet": (ResNet, (3, 97, 101)),
    "unet": (UNet, (1, 21, 19, 26)),
    "convnext": (ConvNeXt, (3, 97, 101)),
    "vit": (NeighborhoodViT, (3, 53, 61)),
    "even_vit": (NeighborhoodViT, (3, 48, 64)),
    "weather": (Weather, (2, 45, 91)),
    "moving": (lambda: Moving(rolls=False), (2, 57, 43)),
    "rolling": (lambda: Moving(rolls=True), (2, 57, 43)),
    "circles": (Circles, (2, 41, 67)),
    "pixels": (Pixels, (2, 46, 34)),
}
"""name -> the network, and the shape of one sample."""


def network(name: str, batch: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    """The network with seeded weights, and a batch for it."""
    make, sample = NETWORKS[name]
    torch.manual_seed(0)
    return make().to(dtype), torch.randn(batch, *sample, dtype=dtype)
