"""Llama 3.1 as pytorch/torchtitan trained it by FSDP2: float32 parameters, bfloat16 gathered and computed.

As in `benchmarks.mpt`, the casts are written out, and one call stands in a line. Rotary places are applied in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.float8 import Product
from benchmarks.mpt import Linear
from passes.ir.joint import JointGraph
from passes.ir.op_traits import is_product

__all__ = ["LLAMAS", "Llama3", "selective"]

LLAMAS: Mapping[str, tuple[int, int, int, int, int]] = {
    "Llama 3.1 8B": (4096, 32, 32, 8, 14_336),
    "Llama 3.1 405B": (16_384, 126, 128, 8, 53_248),
}
"""Width, layers, heads, heads of keys and values, hidden. [meta-llama/Llama-3.1-8B and -405B, config.json]"""
VOCABULARY = 128_256


class Llama3(nn.Module):
    """tokens, targets: int64 [batch, length] -> the mean cross entropy, float32; blocks under `checkpoint`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: str, length: int, layers: int | None = None, float8: bool = False) -> None:
        super().__init__()
        width, depth, heads, shared, hidden = LLAMAS[size]
        with torch.device("meta"):
            self.tokens = nn.Parameter(torch.empty(VOCABULARY, width))
            self.blocks = nn.ModuleList(Block(width, heads, shared, hidden) for _ in range(layers or depth))
            self.norm = Norm(width)
            self.head = Linear(width, VOCABULARY)
            self.register_buffer("cos", torch.empty(length, width // heads))
            self.register_buffer("sin", torch.empty(length, width // heads))
        for module in self.blocks.modules():
            if float8 and isinstance(module, Linear):
                module.__class__ = Float8

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        table = self.tokens.to(torch.bfloat16)
        x = F.embedding(tokens, table)
        for block in self.blocks:
            x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
        x = self.norm(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Float8(Linear):
    """One scale for each tensor; the head stays in bfloat16, as in torchtitan."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Product.apply(x, self.weight, False)
        return found


class Block(nn.Module):
    def __init__(self, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.times = heads, heads // shared
        head = width // heads
        self.norm_1, self.norm_2 = Norm(width), Norm(width)
        self.q, self.k, self.v = (
            Linear(width, width),
            Linear(width, shared * head),
            Linear(width, shared * head),
        )
        self.out = Linear(width, width)
        self.gate, self.up, self.down = Linear(width, hidden), Linear(width, hidden), Linear(hidden, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.attention(self.norm_1(x), cos, sin)
        x = x + attended
        normed = self.norm_2(x)
        gate = self.gate(normed)
        gate = F.silu(gate)
        wide = gate * self.up(normed)
        narrow = self.down(wide)
        return x + narrow

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        head = cos.shape[-1]
        q, k, v = (w(x).unflatten(-1, (-1, head)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q = turned(q, cos, sin)
        k = turned(k, cos, sin)
        k = k.repeat_interleave(self.times, dim=1)
        v = v.repeat_interleave(self.times, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    low, high = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(torch.bfloat16)
        return F.rms_norm(x, weight.shape, weight)


def selective(joint: JointGraph, inside: Collection[str]) -> list[str]:
    """Of the ops `inside` checkpointed blocks those that "selective (per op)" computes again: all but attention and
    every second product, counted in each block from the first. [torchtitan, parallelize_llama.py, `_get_custom_policy`]
    """
    chosen, seen = list[str](), dict[object, int]()
    for node in joint.graph.nodes:
        region = node.meta.get("checkpoint")
        if region is None or node.op != "call_function" or node.meta["phase"] != "forward":
            continue
        attends = "attention" in str(node.target)
        if is_product(node) and not attends:
            seen[region] = seen.get(region, 0) + 1
        saved = attends or (is_product(node) and seen[region] % 2 == 1)
        if not saved and node.name in inside:
            chosen.append(node.name)
    return chosen
