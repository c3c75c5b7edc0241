"""Models so small that one is planned in a second, drawn at random: the same for the same number."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from autoshard import MeshSpec, Profile
from autoshard.call_ends import output_layouts
from autoshard.plan.task import CallLayouts, Task
from autoshard.planning import canonical_capture

__all__ = ["tiny_task"]

MESHES: Sequence[Mapping[str, int]] = ({"a": 2}, {"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2})
PROFILES = ("cpu", "cpu", "h100", "a100")


def _mlp(generator: random.Random) -> tuple[nn.Module, tuple[Tensor, ...]]:
    widths = [generator.choice((8, 24, 32, 64, 128)) for _ in range(generator.choice((2, 2, 3)))]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        act = generator.choice((nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh))()
        layers += [nn.Linear(before, after, bias=generator.random() < 0.7), act]
    if generator.random() < 0.3:
        layers.append(nn.LayerNorm(widths[-1]))
    return nn.Sequential(*layers), (torch.zeros(generator.choice((4, 16, 48, 256)), widths[0]),)


class _Residual(nn.Module):
    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def _residual(generator: random.Random) -> tuple[nn.Module, tuple[Tensor, ...]]:
    width = generator.choice((16, 32, 64))
    model = _Residual(width, generator.choice((1, 2, 4)) * width, 1)
    return model, (torch.zeros(generator.choice((8, 32, 128)), generator.choice((1, 4)), width),)


class _Convolutions(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


def _convolutions(generator: random.Random) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = _Convolutions(generator.choice((4, 8, 16)), generator.choice((4, 32)))
    size = generator.choice((8, 16))
    return model, (torch.zeros(generator.choice((2, 8)), 3, size, size),)


class _Words(nn.Module):
    """Embedding and head, tied or not."""

    def __init__(self, words: int, width: int, tied: bool) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.layer(self.embed(x))))
        return nn.functional.cross_entropy(scores.flatten(0, 1), x.flatten())


def _words(generator: random.Random) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = _Words(generator.choice((64, 256)), generator.choice((16, 32)), generator.random() < 0.5)
    return model, (torch.zeros(generator.choice((2, 8)), 16, dtype=torch.int64),)


_KINDS: Sequence[Callable[[random.Random], tuple[nn.Module, tuple[Tensor, ...]]]] = (
    *(_mlp, _mlp, _mlp, _mlp),
    _residual,
    _convolutions,
    _words,
)


def tiny_task(number: int) -> tuple[str, Task, int]:
    """In words, the task, and into how many pieces its batch is cut: the same for the same number."""
    generator = random.Random(number)
    with torch.device("meta"):
        model, inputs = generator.choice(_KINDS)(generator)
    profile = generator.choice(PROFILES)
    mesh = MeshSpec(generator.choice(MESHES), "cpu" if profile == "cpu" else "cuda")
    backend, optimizer = generator.choice(("eager", "inductor")), generator.choice(("adamw", "adamw", "sgd"))
    pieces = generator.choice((1, 1, 1, 2))
    sizes = ", ".join("x".join(map(str, p.shape)) for p in model.parameters() if p.ndim > 1)
    rows = "x".join(map(str, inputs[0].shape))
    title = f"{number}: {sizes} on {rows}, {mesh}, {profile}, {backend}, {optimizer}, {pieces} pieces"
    captured = canonical_capture(model, inputs, {}, device=torch.device(mesh.device_type))
    call = CallLayouts({}, output_layouts(captured, mesh, None))
    prices = Profile.load(profile)
    if "b" in mesh.names and number % 2:
        # Hosts of two: two links, on GPUs side by side.
        near, *others = prices.links
        prices, title = (
            replace(prices, links=(replace(near, ranks=2), *(others or [near]))),
            f"{title}, 2 hosts",
        )
    return title, Task(captured, prices, mesh, call, {}, None, backend, 60.0, optimizer=optimizer), pieces
