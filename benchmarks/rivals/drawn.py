"""Small models drawn at random, each with a call, a mesh and prices: the same for the same number."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.racing.models import FeedForward

__all__ = ["KINDS", "Drawn", "drawn"]

MESHES: tuple[dict[str, int], ...] = (
    {"a": 2},
    {"a": 3},
    {"a": 4},
    {"a": 8},
    {"a": 32},
    {"a": 2, "b": 2},
    {"a": 4, "b": 2},
    {"a": 8, "b": 8},
    {"a": 2, "b": 2, "c": 2},
)
PROFILES = ("h100", "a100", "cpu")
BATCHES = (4, 8, 16, 32, 64, 256, 2048)


@dataclass(frozen=True)
class Drawn:
    """title: kind, sizes and batch. model, inputs: on `meta`; the call returns a loss. mesh: axis -> devices."""

    title: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    mesh: Mapping[str, int]
    profile: str
    backend: str

    @property
    def device_type(self) -> str:
        return "cpu" if self.profile == "cpu" else "cuda"


def drawn(number: int) -> Drawn:
    generator = random.Random(number)
    kind = generator.choice(sorted(KINDS))
    with torch.device("meta"):
        sizes, model, inputs = KINDS[kind](generator)
    mesh, profile = generator.choice(MESHES), generator.choice(PROFILES)
    backend = generator.choice(("eager", "inductor"))
    title = f"{kind} {sizes}, batch {len(inputs[0])}, {profile}, {backend}"
    return Drawn(title, model, inputs, mesh, profile, backend)


Case = tuple[str, nn.Module, tuple[Tensor, ...]]
"""Its sizes in words, the model, a call's tensors."""


class _Distance(nn.Module):
    """Mean squared distance of what a network makes of `x` to `y`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.network(x), y)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(read.transpose(1, 2).reshape(batch, length, width))


class _PreNorm(nn.Module):
    """x and what `inner` makes of its norm."""

    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class _Words(nn.Module):
    """Embedding, one layer, a head of its own."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layer = _PreNorm(width, FeedForward(width, 4 * width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layer(self.embed(x))).flatten(0, 1), y.flatten())


def _mlp(generator: random.Random) -> Case:
    widths = [generator.choice((32, 64, 128, 512, 1024, 4096)) for _ in range(generator.randint(2, 5))]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [
            nn.Linear(before, after),
            generator.choice((nn.ReLU, nn.GELU, nn.SiLU, nn.Identity))(),
        ]
    if generator.random() < 0.4:
        layers.append(nn.LayerNorm(widths[-1]))
    batch = generator.choice(BATCHES)
    inputs = torch.zeros(batch, widths[0]), torch.zeros(batch, widths[-1])
    return "-".join(map(str, widths)), _Distance(nn.Sequential(*layers)), inputs


def _transformer(generator: random.Random) -> Case:
    width, heads, length = generator.choice(((64, 4, 32), (256, 8, 128), (512, 8, 2048), (1024, 16, 512)))
    layers, batch = generator.randint(1, 2), generator.choice(BATCHES[:5])
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [_PreNorm(width, _Attention(width, heads)), _PreNorm(width, FeedForward(width, 4 * width))]
    inputs = torch.zeros(batch, length, width), torch.zeros(batch, length, width)
    return f"{layers} x {width}, {length} tokens", _Distance(nn.Sequential(*parts)), inputs


def _recurrent(generator: random.Random) -> Case:
    width, batch = generator.choice((32, 128)), generator.choice(BATCHES[:5])
    inputs = torch.zeros(batch, 3, width), torch.zeros(batch, 3, width)
    return f"{width}, 3 steps", _Distance(_Recurrent(width)), inputs


def _convolutions(generator: random.Random) -> Case:
    width, size = generator.choice((8, 32, 128)), generator.choice((16, 64))
    batch, classes = generator.choice(BATCHES[:5]), generator.choice((10, 64, 1000))
    norm = generator.choice((nn.BatchNorm2d(width), nn.GroupNorm(4, width), nn.Identity()))
    network = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        norm,
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * (size // 2) ** 2, classes),
    )
    inputs = torch.zeros(batch, 3, size, size), torch.zeros(batch, classes)
    return f"{width} channels, {size} x {size}, {classes} classes", _Distance(network), inputs


def _words(generator: random.Random) -> Case:
    vocabulary, width = generator.choice((1000, 32000)), generator.choice((64, 512))
    tokens = torch.zeros(generator.choice(BATCHES[:5]), 64, dtype=torch.int64)
    return f"{vocabulary} words, {width}", _Words(vocabulary, width), (tokens, tokens)


KINDS: Mapping[str, Callable[[random.Random], Case]] = {
    "mlp": _mlp,
    "transformer": _transformer,
    "recurrent": _recurrent,
    "convolutions": _convolutions,
    "words": _words,
}
