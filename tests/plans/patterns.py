"""Models in which one named parallelism is the fastest, and how each is asked for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import SwiGLU


class Regression(nn.Module):
    """An MLP and its loss, so that no output has to be gathered."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.body(x), y)


class Attention(nn.Module):
    """Causal multi-head attention with separate projections. [batch, length, width] -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            project(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block with dropout on both branches."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = SwiGLU(width, 4 * width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class LanguageModel(nn.Module):
    """Embedding, head and cross-entropy around `body`; tokens and targets int64 [batch, length]."""

    def __init__(self, vocabulary: int, width: int, body: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = body
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class OneHead(nn.Module):
    """Causal attention of one head. x: [batch, tokens, width] -> the same. masked: by a mask that says so."""

    def __init__(self, masked: bool = False, width: int = 32) -> None:
        super().__init__()
        self.masked = masked
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x)[:, None] for layer in (self.query, self.key, self.value))
        if not self.masked:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        at = torch.arange(x.shape[1], device=x.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=at[None, :] <= at[:, None])[:, 0]
