"""A vision transformer, a Llama and a dense mixture of experts: plain PyTorch, as in `models`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.racing.models import Block

__all__ = ["Llama", "Mixture", "MixtureModel", "ViT"]


class Patches(nn.Module):
    """Patches of an image with their places, [batch, 3, side, side] -> [batch, tokens, width]."""

    def __init__(self, width: int, patch: int, side: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, stride=patch)
        self.places = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x).flatten(2).transpose(1, 2) + self.places


class PooledHead(nn.Module):
    """The mean of the tokens, and a class of it."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.classes = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(x.mean(1))


class ViT(nn.Module):
    """Pre-norm blocks over patches. x: float [batch, 3, side, side]; y: int64 [batch]."""

    def __init__(self, side: int, patch: int, width: int, head: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = Patches(width, patch, side)
        self.layers = nn.ModuleList(Block(width, head, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = PooledHead(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.patches(x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(self.norm(h)), y)


class GatedFeedForward(nn.Module):
    """SwiGLU, without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class RotaryAttention(nn.Module):
    """Causal, with rotary places, and keys and values of which `shared` query heads each read one."""

    def __init__(self, width: int, head: int, shared: int) -> None:
        super().__init__()
        self.head, self.shared = head, shared
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width // shared, bias=False)
        self.v = nn.Linear(width, width // shared, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.q, self.k, self.v))
        cos, sin = rotary(x.shape[1], self.head, x)
        q, k = (t * cos + _turned(t) * sin for t in (q, k))
        k, v = (t.repeat_interleave(self.shared, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def rotary(length: int, head: int, like: Tensor, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head] of the angles of all places."""
    steps = torch.arange(0, head, 2, dtype=like.dtype, device=like.device) / head
    places = torch.arange(length, dtype=like.dtype, device=like.device)
    angles = places.unsqueeze(1) * (base**-steps).unsqueeze(0)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, head: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = RotaryAttention(width, head, shared)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = GatedFeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """x, y: int64 [batch, context]."""

    def __init__(self, vocabulary: int, width: int, head: int, shared: int, layers: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaBlock(width, head, shared, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class Experts(nn.Module):
    """All experts of a mixture, each a feed-forward; as many as `up` holds, so it also runs on a share of them.

    x: [batch, tokens, width], gates: [batch, tokens, experts] -> the sum of what they give, by their gates.
    """

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        flat = x.flatten(0, 1).unsqueeze(0).expand(self.up.shape[0], -1, -1)
        each = torch.bmm(F.gelu(torch.bmm(flat, self.up)), self.down)
        weighted = each * gates.flatten(0, 1).t().unsqueeze(-1)
        return weighted.sum(0).view_as(x)


class Mixture(nn.Module):
    """Every token by every expert, weighted by a softmax: a dense mixture."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, hidden, experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x).softmax(-1))


class MixtureModel(nn.Module):
    """A decoder whose feed-forwards are mixtures. x, y: int64 [batch, context]."""

    def __init__(
        self, vocabulary: int, context: int, width: int, head: int, layers: int, hidden: int, experts: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.ModuleList(
            Block(width, head, mlp=Mixture(width, hidden, experts)) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device).unsqueeze(0))
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())
