"""Small models in float64, their canonical graphs, and values for every input."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.planning import canonical_capture
from passes.ir.joint import JointGraph
from passes.simulate.reference import reference_inputs
from passes.stages.graph_parts import graph_parts
from tests.models import seeded
from tests.spatial.networks import UNet


class Mlp(nn.Module):
    """Six layers of different widths, a loss."""

    def __init__(self) -> None:
        super().__init__()
        widths = [6, 12, 8, 16, 8, 4, 3]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(self.layers[-1](x), wanted)


class Normed(nn.Module):
    """Convolutions with batch norm, whose buffers change; a head that shares its weight with the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x * self.scale)).relu()
        return (x * self.scale).square().mean()


Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _t5() -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    start: dict[str, Any] = {"decoder_start_token_id": 0}
    config = T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, **start
    )  # fmt: skip
    tokens = torch.randint(1, 96, (2, 8))
    return (
        T5ForConditionalGeneration(config).train(),
        (),
        {"input_ids": tokens, "labels": tokens[:, :6].contiguous()},
    )


def _of_text(name: str, layers: int = 2, **options: float) -> Callable[[], Example]:
    def build() -> Example:
        model, inputs = seeded(name, layers=layers, batch=2, **options)
        return model, (), inputs

    return build


MODELS: dict[str, Callable[[], Example]] = {
    "mlp": lambda: (Mlp(), (torch.randn(5, 6), torch.randn(5, 3)), {}),
    "normed": lambda: (Normed(), (torch.randn(3, 4, 6, 6),), {}),
    "gpt2": _of_text("gpt2", dropout=0.1),
    "llama": _of_text("llama"),
    "t5": _t5,
    "unet": lambda: (UNet(), (torch.randn(1, 1, 13, 11, 18),), {}),
}


@functools.cache
def canonical(name: str) -> tuple[JointGraph, list[Tensor]]:
    """(graph, a value for each of its inputs)."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    model = model.double()
    wide = lambda x: x.double() if x.is_floating_point() else x
    args, kwargs = tuple(map(wide, args)), {key: wide(x) for key, x in kwargs.items()}
    joint = canonical_capture(model, args, kwargs).joint
    given = [*args, *kwargs.values()]
    return joint, reference_inputs(joint, model, given, seed=1)


def random_cut(joint: JointGraph, stages: int, seed: int) -> tuple[str, ...]:
    """Any ops of the forward, in order."""
    forward = graph_parts(joint).forward
    places = random.Random(seed).sample(range(1, len(forward)), stages - 1)
    return tuple(forward[i].name for i in sorted(places))
