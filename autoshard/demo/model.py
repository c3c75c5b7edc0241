"""The demo's model and data: a byte-level GPT and real English text that Python ships."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTConfig:
    """vocabulary: bytes. context: tokens of a sample. width: of the residual stream."""

    vocabulary: int = 256
    context: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 2


class Block(nn.Module):
    """Pre-norm attention and MLP. [batch, context, width] -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.projection = nn.Linear(config.width, config.width, bias=False)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        # Heads major: a split of the projection's rows by head keeps q, k and v of a head together.
        parts = self.query_key_value(self.norm1(x)).view(batch, length, self.heads, 3, width // self.heads)
        q, k, v = parts.permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the mean cross-entropy of the next byte. tokens, targets: int64 [batch, context]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def demo_text() -> bytes:
    """The Python language reference, about 700 kB of English, from the standard library."""
    from pydoc_data import topics

    return "\n".join(topics.topics.values()).encode()


def batches(
    config: GPTConfig, batch: int, steps: int, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` random (tokens, targets) of int64 [batch, context]; the same on every rank."""
    data = torch.frombuffer(bytearray(demo_text()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - config.context - 1, (steps, batch), generator=generator)
    span = torch.arange(config.context)
    return [(data[s[:, None] + span], data[s[:, None] + span + 1]) for s in starts]
