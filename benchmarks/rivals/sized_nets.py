"""Networks drawn at random that take inputs of any size: the same for the same number."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Drawn", "drawn"]

WIDTH, WORDS = 4, 12

Line = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Of what two lines before it left, both [batch, sequence, WIDTH], the next."""


def _attention(mix: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    q, k, v = mix(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _scores(mix: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores = mix(x) @ y.transpose(1, 2) / x.shape[1] ** 0.5
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ y


def _picked(mix: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    value, which = mix(x).topk(2, -1)
    return torch.zeros_like(y).scatter(-1, which, value.softmax(-1)) * y


def _shifted(mix: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[:, :1], y[:, 1:]], 1) if x.shape[1] > 1 else x


def _halves(mix: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    middle = (x.shape[1] + 1) // 2
    return torch.cat([x[:, middle:], y[:, :middle]], 1)


_LAYERS: Mapping[str, tuple[Callable[[], nn.Module], Line]] = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), lambda mix, x, y: mix(x)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
        lambda mix, x, y: x + mix(y),
    ),
    "norm": (lambda: nn.LayerNorm(WIDTH), lambda mix, x, y: mix(x)),
    "attention": (lambda: nn.Linear(WIDTH, 3 * WIDTH), _attention),
    "scores": (lambda: nn.Linear(WIDTH, WIDTH), _scores),
    "picked": (lambda: nn.Linear(WIDTH, WIDTH), _picked),
    "positions": (
        nn.Identity,
        lambda mix, x, y: x + torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1) / x.shape[1],
    ),
    "product": (nn.Identity, lambda mix, x, y: x * y.tanh()),
    "softmax": (nn.Identity, lambda mix, x, y: x.softmax(1)),
    "mean": (nn.Identity, lambda mix, x, y: x - y.mean(1, keepdim=True)),
    "over the batch": (nn.Identity, lambda mix, x, y: x - y.mean(0, keepdim=True)),
    "sums": (nn.Identity, lambda mix, x, y: x.cumsum(1) / x.shape[1]),
    "shifted": (nn.Identity, _shifted),
    "halves": (nn.Identity, _halves),
    "largest": (nn.Identity, lambda mix, x, y: x + y.amax(1, keepdim=True)),
    "flat": (
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda mix, x, y: mix(x.flatten(0, 1)).unflatten(0, x.shape[:2]).relu(),
    ),
    "across": (nn.Identity, lambda mix, x, y: (x.transpose(1, 2) @ y / x.shape[1]).sum(1, keepdim=True) + x),
    "padded": (nn.Identity, lambda mix, x, y: F.pad(x, (0, 0, 2, 0))[:, : x.shape[1]] + y),
    "flipped": (nn.Identity, lambda mix, x, y: x.flip(1) + y),
    "rolled": (nn.Identity, lambda mix, x, y: x.roll(1, 1) * y),
    "branch": (nn.Identity, lambda mix, x, y: x * 2.0 if x.shape[0] > 4 else x + y),
    "clamped": (nn.Identity, lambda mix, x, y: x.clamp(-1.0, 1.0) + y.abs()),
}


class Drawn(nn.Module):
    """Lines of `_LAYERS`, of tokens or features; a loss, or one for each sample. split: dims in which inputs may be."""

    split = (0, 1)

    def __init__(self, generator: random.Random) -> None:
        super().__init__()
        self.tokens = generator.random() < 0.5
        self.ndim = 2 if self.tokens else 3
        self.embed = nn.Embedding(WORDS, WIDTH) if self.tokens else nn.Linear(WIDTH, WIDTH)
        names = [generator.choice(list(_LAYERS)) for _ in range(generator.choice((1, 1, 2, 2, 3)))]
        self.read = [(name, generator.random(), generator.random()) for name in names]
        self.layers = nn.ModuleList(_LAYERS[name][0]() for name in names)
        self.ends = generator.choice(("loss", "mean", "last", "each"))

    def forward(self, x: Tensor) -> Tensor:
        made = [self.embed(x)]
        for (name, one, other), layer in zip(self.read, self.layers, strict=True):
            line = _LAYERS[name][1]
            made.append(line(layer, made[int(one * len(made))], made[int(other * len(made))]))
        last = made[-1] * made[len(made) // 2]
        if self.ends == "loss" and self.tokens:
            scores = last @ self.embed.weight.T
            return F.cross_entropy(scores.flatten(0, 1), x.flatten())
        if self.ends == "last":
            return last[:, -1].square().sum()
        return last.square().sum((1, 2)) if self.ends == "each" else last.square().mean()

    def __str__(self) -> str:
        return f"{'tokens' if self.tokens else 'features'}, {', '.join(name for name, *_ in self.read)}, {self.ends}"

    def inputs(self, batch: int, sequence: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.tokens:
            return torch.randint(0, WORDS, (batch, sequence), generator=generator)
        return torch.randn(batch, sequence, WIDTH, generator=generator, dtype=torch.float64)


class Images(nn.Module):
    """Convolutions and what changes an image's size."""

    split, ndim = (0, 2, 3), 4

    def __init__(self, generator: random.Random) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, WIDTH, 3, padding=1)
        kinds = ("convolution", "pool", "norm", "resize", "mean", "relu")
        self.kinds = [generator.choice(kinds) for _ in range(generator.randint(0, 2))]
        self.layers = nn.ModuleList(
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1) if kind == "convolution" else nn.GroupNorm(2, WIDTH)
            for kind in self.kinds
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind in ("convolution", "norm"):
                x = layer(x)
            elif kind == "pool":
                x = F.avg_pool2d(x, 2)
            elif kind == "resize":
                x = F.interpolate(x, scale_factor=2)
            else:
                x = x.relu() if kind == "relu" else x - x.mean((2, 3), keepdim=True)
        return x.square().mean()

    def __str__(self) -> str:
        return f"images, {', '.join(self.kinds)}"

    def inputs(self, batch: int, height: int, seed: int) -> Tensor:
        """[batch, 2, height, height + 2], of a height that its pools leave a row of."""
        generator, height = torch.Generator().manual_seed(seed), max(height, 2 ** self.kinds.count("pool"))
        return torch.randn(batch, 2, height, height + 2, generator=generator, dtype=torch.float64)


def drawn(generator: random.Random) -> Drawn | Images:
    torch.manual_seed(generator.randrange(2**31))
    kinds: Sequence[type[Drawn] | type[Images]] = (Drawn,) * 7 + (Images,)
    return generator.choice(kinds)(generator).double()
