"""A linear layer that multiplies in float8 with dynamic scales, as it is written without torchao."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Float8Linear", "Product", "quantized"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantized(x: Tensor, dtype: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """In float8, and what to multiply it with; dim: along which one scale counts, None: for all."""
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    top = torch.finfo(dtype).max
    scale = (top / largest.double().clamp(min=1e-12)).float()
    return (x.float() * scale).clamp(-top, top).to(dtype), scale.reciprocal()


class Product(torch.autograd.Function):
    """x @ w.T, and its gradients, of operands in float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.dims = (1, 0) if by_row else (None, None)
        along = ctx.dims[0]
        left, right = quantized(x.flatten(0, -2), E4M3, along), quantized(w, E4M3, along)
        return product(left, (right[0].t(), right[1].t()), x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,), (x, w) = grad_outputs, ctx.saved_tensors
        along, across = ctx.dims
        grad, flat = grad.flatten(0, -2), x.flatten(0, -2)
        of_x = product(quantized(grad, E5M2, along), quantized(w, E4M3, across), x.dtype)
        (left, scale), right = quantized(grad, E5M2, across), quantized(flat, E4M3, across)
        return of_x.view(x.shape), product((left.t(), scale.t()), right, w.dtype), None


def product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    a, b = left[0].contiguous(), right[0].t().contiguous().t()
    by_row = left[1].numel() > 1
    scales = (left[1].flatten()[:, None], right[1].flatten()[None]) if by_row else (left[1], right[1])
    found: Tensor = torch.ops.aten._scaled_mm.default(a, b, *scales, out_dtype=dtype)
    return found


class Float8Linear(nn.Linear):
    by_row = False

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = Product.apply(input, self.weight, self.by_row)
        return found
