"""Models that multiply in float8, or keep weights in 8 bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.float8 import Float8Linear, quantized


class Layer(nn.Module):
    """Norm, attention with rotary places, norm, SwiGLU; x: [batch, length, width] -> a loss."""

    def __init__(self, width: int = 64, hidden: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.attended(self.norm_1(x)))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return x.float().square().mean()

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, -1)).transpose(1, 2).unbind(3)
        q, k = turned(q), turned(k)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    places = torch.arange(x.shape[-2]) / 10.0
    cos, sin = places.cos()[:, None], places.sin()[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


class Narrow(nn.Module):
    def __init__(self, width: int = 16, hidden: int = 512) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x))).square().mean()


class Scaled(nn.Module):
    """The function of torch.nn.functional, with a weight that is kept in float8."""

    weight: Tensor
    scale: Tensor

    def __init__(self, by_row: bool) -> None:
        super().__init__()
        self.by_row = by_row
        weight, scale = quantized(torch.randn(32, 16), torch.float8_e4m3fn, 1 if by_row else None)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.flatten()[None] if by_row else scale)
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        recipe = F.ScalingType.RowWise if self.by_row else F.ScalingType.TensorWise
        a, scale = quantized(x, torch.float8_e4m3fn, 1 if self.by_row else None)
        given = a.detach(), self.weight.t(), scale.detach(), recipe, self.scale, recipe
        return F.scaled_mm(*given, output_dtype=torch.float32) + self.bias


class Int8Adapted(nn.Module):
    """A weight in int8 with a scale of each row, and a trained product of small rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 128, (64, 32), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(64, 1) / 127, requires_grad=False)
        self.down_A, self.up_B = nn.Parameter(torch.randn(4, 32)), nn.Parameter(torch.randn(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale) + F.linear(
            F.linear(x, self.down_A), self.up_B
        )


class Standing(Tensor):
    """A tensor that stands for another."""

    held: Tensor

    @staticmethod
    def __new__(cls: Any, held: Tensor) -> Standing:
        found = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        found.held = held
        return found

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*pytree.tree_map_only(cls, lambda x: x.held, args), **(kwargs or {}))
        return cls(found) if op is torch.ops.aten.detach.default else found


def in_float8(model: nn.Module, by_row: bool = False) -> nn.Module:
    """`model`, whose linear layers are those written by hand; random weights."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = Float8Linear
            vars(module)["by_row"] = by_row
    return model
