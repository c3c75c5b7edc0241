"""A module from its parts and its forward, as short as a script's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_models.row import Row


class Written(nn.Module):
    """parts: modules, parameters and, if they are tensors, buffers; body: the forward, given the module."""

    def __init__(self, body: Callable[..., Any], /, **parts: Any) -> None:
        super().__init__()
        self._body = body
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._body(self, *args, **kwargs)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


def written(
    name: str,
    kind: str,
    body: Callable[..., Any],
    parts: Callable[[], dict[str, Any]],
    inputs: Callable[[], Any],
) -> Row:
    return Row(name, kind, lambda: (Written(body, **parts()), inputs()))
