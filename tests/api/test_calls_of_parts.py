"""Layers of a parallel model called by themselves, models that call themselves, models within models: on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard import ShardingError
from tests.api.programs import full, parallel
from tests.ranks import RankPool

LINE = (("x", 2),)


class Layers(nn.Module):
    """Of uneven sizes, each of a kind whose ops DTensors lack or have wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 7, 3, padding=1), nn.GroupNorm(7, 7)
        self.turned = nn.ConvTranspose1d(7, 6, 2, 2)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.turned(self.norm(self.conv(x))).mT
        h = self.lstm(h)[0]
        return self.attention(h, h, h)[0]

    def by_hand(self, x: Tensor) -> list[Tensor]:
        conv = self.conv(x)
        norm = self.norm(conv)
        turned = self.turned(norm).mT
        lstm, (last, _) = self.lstm(turned)
        return [conv, norm, turned, lstm, last, *self.attention(lstm, lstm, lstm)]


def _by_hand(rank: int) -> None:
    torch.manual_seed(0)
    alone = Layers().double()
    both: Any = alone, parallel(copy.deepcopy(alone), LINE)
    x = torch.randn(5, 4, 2, dtype=torch.float64)
    both[1](x)
    assert all(isinstance(p, DTensor) for p in both[1].parameters())
    found: list[Any] = []
    for model in both:
        results = model.by_hand(x)
        sum(result.square().sum() for result in results).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            results += model.by_hand(x)
        found.append((results, [full(p.grad) for p in model.parameters()]))
    torch.testing.assert_close(*found)


def test_layers_are_called_by_themselves(ranks: RankPool) -> None:
    ranks.run(_by_hand, world=2)


class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return x if depth == 0 else self(torch.tanh(self.layer(x)), depth - 1) + self.forward(x, depth - 1)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def _within(rank: int) -> None:
    """The inner model is parallel before the outer one."""
    torch.manual_seed(0)
    alone, x = Outer(Again()), torch.randn(4, 5)
    model = copy.deepcopy(alone)
    parallel(model.inner, LINE, (x,))
    parallel(model, LINE)
    found: list[Any] = []
    for one in (alone, model, alone.inner, model.inner):
        one.zero_grad()
        result = one(x)
        result.square().sum().backward()
        found.append((result, [full(p.grad) for p in one.parameters()]))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[3], found[2])


def test_models_that_call_themselves_and_models_within_models(ranks: RankPool) -> None:
    ranks.run(_within, world=2)


def _refused(rank: int) -> list[str]:
    torch.manual_seed(0)
    model, x = parallel(nn.Linear(5, 6), LINE), torch.randn(4, 5)
    model(x).sum().backward()
    texts: list[str] = []
    for parameter in model.parameters():
        with pytest.raises(ShardingError, match="is of the whole batch") as raised:
            dist.all_reduce(parameter.grad)
        texts.append(str(raised.value))
    y = model(x).sum(0)
    with pytest.raises(ShardingError, match="one backward at a time") as raised:
        torch.autograd.grad(y, list(model.parameters()), torch.eye(6), is_grads_batched=True)
    return [*texts, str(raised.value)]


def test_what_is_refused_names_a_remedy(ranks: RankPool) -> None:
    """Gradients that a script adds up over ranks, and several gradients at once."""
    first, second = ranks.run(_refused, world=2)
    assert first == second and all("\n  try: " in text for text in first)
