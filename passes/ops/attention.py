"""`autoshard::attention` and its gradient: scaled dot-product attention, the same op on every device.

A plan names ops; torch's own attention kernels have other names on CPU and CUDA, so a plan made
on a laptop would not be valid on a GPU. This op picks the kernel when it runs.

    attention(q [b,h,s,d], k [b,h,t,d], v [b,h,t,e], mask?, is_causal, scale)
        -> (out [b,h,s,e], lse [b,h,s])

mask: 4-d, broadcastable to [b,h,s,t]; bool (True attends) or additive float; it gets no gradient.
is_causal: query i sees keys 0..i (aligned at the top left, also when s != t).
lse: float32 (float64 for float64 operands). `out` and the gradients lie in memory as [b,s,h,d]:
that is how the fused kernels write them, and what the projection after them reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.ops import attention_kernels as kernels

__all__ = ["attention", "attention_backward"]


def _heads_inside(x: Tensor) -> Tensor:
    """[b,h,s,d] with memory order b, s, h, d; a copy only where a kernel left another order."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _whole_rows(x: Tensor) -> Tensor:
    """The CPU kernel takes the last dim to have stride 1 and reads garbage where it has not (torch 2.13);
    a shard that came out of a collective may lie in memory in any order."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_heads_inside(x: Tensor, width: int) -> Tensor:
    b, h, s, _ = x.shape
    return x.new_empty((b, s, h, width)).transpose(1, 2)


@torch.library.custom_op(
    "autoshard::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale) -> (Tensor, Tensor)",
)
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v and the softmax's log-sum-exp; see the module."""
    q, k, v = (_whole_rows(x) for x in (q, k, v))
    out, lse = kernels.forward(kernels.Problem(q, k, v, mask, is_causal, scale))
    return _heads_inside(out), lse.contiguous()


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _empty_heads_inside(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.custom_op(
    "autoshard::attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, "
    "bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
)
def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention`'s `out` with respect to (q, k, v)."""
    grad_out, q, k, v, out = (_whole_rows(x) for x in (grad_out, q, k, v, out))
    problem = kernels.Problem(q, k, v, mask, is_causal, scale)
    gq, gk, gv = kernels.backward(problem, grad_out, out, lse)
    return _heads_inside(gq), _heads_inside(gk), _heads_inside(gv)


@attention_backward.register_fake
def _(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    gq, gk = (_empty_heads_inside(x, q.shape[-1]) for x in (q, k))
    return gq, gk, _empty_heads_inside(v, v.shape[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, is_causal, scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, mask, out, lse)
    ctx.is_causal, ctx.scale = is_causal, scale


def _gradient(ctx: Any, grad_out: Tensor | None, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 6
    q, k, v, mask, out, lse = ctx.saved_tensors
    gq, gk, gv = attention_backward(grad_out, q, k, v, mask, out, lse, ctx.is_causal, ctx.scale)
    return gq, gk, gv, None, None, None


attention.register_autograd(_gradient, setup_context=_setup_context)
