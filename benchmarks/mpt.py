"""MPT decoders as mosaicml/llm-foundry trained them: float32 parameters, bfloat16 gathered and computed.

FSDP casts a parameter to `param_dtype` before it is gathered, so the casts are written out: `autocast` would leave
to the planner whether float32 or bfloat16 travels. One call a line: `autoshard/plan/judged.py`
takes a line for a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["MPT", "SIZES", "VOCABULARY"]

SIZES: Mapping[str, tuple[int, int, int]] = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Width, layers, heads. [mosaicml/llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml; heads of 64
in the two smallest]"""

VOCABULARY = 50_432
"""EleutherAI/gpt-neox-20b's 50,277 tokens, padded."""


class MPT(nn.Module):
    """tokens, targets: int64 [batch, length] -> the mean cross entropy, float32.

    Learned positions, tied embeddings, no biases; on `meta` unless a device is in force. checkpointing: of every block.
    """

    def __init__(
        self, size: str, length: int, layers: int | None = None, *, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        width, depth, heads = SIZES[size]
        with torch.device("meta"):
            self.tokens = nn.Parameter(torch.empty(VOCABULARY, width))
            self.positions = nn.Parameter(torch.empty(length, width))
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers or depth))
            self.norm = Norm(width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        table = self.tokens.to(torch.bfloat16)
        positions = self.positions.to(torch.bfloat16)
        embedded = F.embedding(tokens, table)
        x = embedded + positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        x = self.norm(x)
        logits = F.linear(x, table)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = Norm(width), Norm(width)
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norm_1(x))
        x = x + attended
        wide = self.up(self.norm_2(x))
        wide = F.gelu(wide)
        narrow = self.down(wide)
        return x + narrow

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(torch.bfloat16)
        return F.linear(x, weight)


class Norm(nn.Module):
    """LayerNorm without bias, in bfloat16 (`low_precision_layernorm`; torch's kernel computes in float32)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(torch.bfloat16)
        return F.layer_norm(x, weight.shape, weight)
