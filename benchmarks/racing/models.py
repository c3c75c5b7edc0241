"""The models of the race: plain PyTorch, forward(x, y) -> loss, with no thought of how they will be split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "MLP", "Attention", "Block", "ConvNet", "FeedForward", "WordModel"]


class FeedForward(nn.Module):
    """Two linears and a GELU, [..., width] -> [..., width]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class MLP(nn.Module):
    """Feed-forward blocks in a row; mean square error. x, y: float [batch, width]."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(width, hidden) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


class Attention(nn.Module):
    """As many heads as the projections' width holds, so it also runs on a share of them."""

    def __init__(self, width: int, head: int, causal: bool = True) -> None:
        super().__init__()
        self.head, self.causal = head, causal
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then `mlp`: [batch, tokens, width] -> the same; a feed-forward of 4 times the width if None."""

    def __init__(self, width: int, head: int, causal: bool = True, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, head, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width, 4 * width) if mlp is None else mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A pre-norm decoder with learned places. x, y: int64 [batch, context]."""

    def __init__(self, vocabulary: int, context: int, width: int, head: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, head) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        h = self.tokens(x) + self.places(places)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class WordModel(nn.Module):
    """Next word from one word: nearly all weights are in the vocabulary. x, y: int64 [batch, words]."""

    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.mlp = FeedForward(width, hidden)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(self.mlp(self.tokens(x)))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class ConvNet(nn.Module):
    """A light convolutional trunk on large maps, then a heavy fully connected head.

    x: float [batch, 3, side, side]; y: int64 [batch].
    """

    def __init__(self, channels: int, side: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
        )
        self.up = nn.Linear(channels * (side // 4) ** 2, hidden)
        self.down = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.trunk(x).flatten(1)
        return F.cross_entropy(self.down(F.relu(self.up(features))), y)
