"""A small model with attention, and parallel code for it as it is written by hand: collectives with backwards of their
own, plain parameters that are parts, sequences in parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEAD = 32, 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(layer(x)) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(2, (-1, HEAD)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.silu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """Its loss, or its logits."""

    def __init__(self, loss: bool = True) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.head, self.loss = nn.Linear(WIDTH, VOCABULARY), loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        return F.cross_entropy(x.flatten(0, 1), labels.flatten()) if self.loss else x


def decoder() -> nn.Module:
    return Decoder().double()


def coarse_decoder() -> nn.Module:
    return Decoder()


def logits() -> nn.Module:
    return Decoder(loss=False).double()


class Once(torch.autograd.Function):
    """Its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def part(parameter: nn.Parameter, dim: int = 0) -> nn.Parameter:
    return nn.Parameter(parameter.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


class Columns(nn.Module):
    def __init__(self, whole: nn.Linear, once: bool = True) -> None:
        super().__init__()
        self.weight, self.bias, self.once = part(whole.weight), part(whole.bias), once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(Once.apply(x) if self.once else x, self.weight, self.bias)


class Rows(nn.Module):
    """everywhere: the bias is added on every rank, before the sum."""

    def __init__(self, whole: nn.Linear, everywhere: bool = False) -> None:
        super().__init__()
        self.weight, self.everywhere = part(whole.weight, 1), everywhere
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.everywhere:
            return Sum.apply(F.linear(x, self.weight, self.bias))
        return Sum.apply(F.linear(x, self.weight)) + self.bias


def in_columns_and_rows(model: Any, once: bool = True, everywhere: bool = False) -> nn.Module:
    """Faults are of the second layer."""
    for number, layer in enumerate(model.layers):
        for name in "qkv":
            setattr(layer.attention, name, Columns(getattr(layer.attention, name)))
        layer.attention.o = Rows(layer.attention.o)
        layer.up = Columns(layer.up, once or number == 0)
        layer.down = Rows(layer.down, everywhere and number == 1)
    return model


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, summed: bool) -> torch.Tensor:
        ctx.summed = summed
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        if ctx.summed:
            dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous(), None


class SequenceParts(nn.Module):
    """Each rank has some tokens of each sequence, and attends to all. ends: from both ends; shifted: whether they know
    where they are; summed: whether gradients of keys come back from all ranks."""

    def __init__(self, model: Any, ends: bool = False, shifted: bool = True, summed: bool = True) -> None:
        super().__init__()
        self.model, self.ends, self.shifted, self.summed = model, ends, shifted, summed
        for layer in model.layers:
            layer.attention.forward = partial(self.attend, layer.attention)

    def own(self, rank: int, length: int) -> torch.Tensor:
        ranks, places = dist.get_world_size(), torch.arange(length)
        if not self.ends:
            return places.chunk(ranks)[rank]
        pieces = places.chunk(2 * ranks)
        return torch.cat([pieces[rank], pieces[-1 - rank]])

    def attend(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        k, v = (Gathered.apply(one(x), self.summed) for one in (layer.k, layer.v))
        there = torch.cat([self.own(rank, k.shape[1]) for rank in range(dist.get_world_size())])
        here = self.own(dist.get_rank() if self.shifted else 0, k.shape[1])
        mask = there <= here[:, None]
        y = F.scaled_dot_product_attention(heads(layer.q(x)), heads(k), heads(v), attn_mask=mask)
        return layer.o(y.transpose(1, 2).flatten(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        own = self.own(dist.get_rank(), ids.shape[1])
        return self.model(ids[:, own], labels[:, own])


def reduced(model: nn.Module, divisor: float) -> nn.Module:
    """Gradients are summed over all ranks, and divided."""

    def reduce(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(divisor)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return model


class InMicroBatches(nn.Module):
    """One row after the other."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wrapped = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = zip(ids.split(1), labels.split(1), strict=True)
        return sum(self.wrapped(*row) for row in rows) / len(ids)  # type: ignore[return-value]


class OfAllTokens(nn.Module):
    """The sum of a rank's losses over the tokens of all ranks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.model(ids, labels)
        count = dist.get_world_size() * labels.numel()
        return F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="sum") / count


class Packed(nn.Module):
    """Queries, keys and values of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def packed() -> nn.Module:
    return Packed().double()


class Noted(nn.Module):
    """Means of what it has seen, numbers of no state, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("drawn", torch.randn(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x * self.drawn + self.drop(self.down(self.up(x).relu()))


def noted() -> nn.Module:
    return Noted().double()


def noted_without_dropout() -> nn.Module:
    model = Noted().double()
    model.drop.p = 0.0
    return model
