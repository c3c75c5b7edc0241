"""`autoshard::attention` and its gradient: scaled dot-product attention, the same op on every device.

A plan names ops; torch's own attention kernels have other names on CPU and CUDA, so a plan made
on a laptop would not be valid on a GPU. This op picks the kernel when it runs.

    attention(q [b,h,s,d], k [b,h,t,d], v [b,h,t,e], mask?, is_causal, scale, mask_is_causal=False)
        -> (out [b,h,s,e], lse [b,h,s])

mask: 4-d, broadcastable to [b,h,s,t]; bool (True attends) or additive float; it gets no gradient.
is_causal: query i sees keys 0..i (aligned at the top left, also when s != t).
mask_is_causal: the mask says just that, so that it need not be read.
lse: float32 (float64 for float64 operands). `out` and the gradients lie in memory as [b,s,h,d]:
that is how the fused kernels write them, and what the projection after them reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.ops import attention_kernels as kernels
from passes.ops.attention_layout import contiguous, heads_inside
from passes.ops.attention_math import lse_dtype
from passes.ops.attention_table import Chip

__all__ = ["attention", "attention_backward", "attention_backward_reference", "attention_reference"]


def _empty_heads_inside(x: Tensor, width: int) -> Tensor:
    b, h, s, _ = x.shape
    return x.new_empty((b, s, h, width)).transpose(1, 2)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    mask_is_causal: bool = False,
    *,
    chip: Chip | None = None,
) -> tuple[Tensor, Tensor]:
    """What `autoshard::attention` computes, in ATen ops: one of torch's kernels, or plain math.

    chip: of the CUDA device that it will run on; None: q's device is asked.
    Raises UnsupportedOpError for operands that break the kernel's contract.
    """
    call = _call(q, k, v, mask, is_causal, scale, mask_is_causal, chip)
    out, lse = kernels.forward(call)
    return heads_inside(out), contiguous(lse)


def attention_backward_reference(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    mask_is_causal: bool = False,
    *,
    chip: Chip | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `autoshard::attention_backward` computes, in ATen ops; as `attention_reference`."""
    call = _call(q, k, v, mask, is_causal, scale, mask_is_causal, chip)
    gq, gk, gv = kernels.backward(call, grad_out, out, lse)
    return heads_inside(gq), heads_inside(gk), heads_inside(gv)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    mask_is_causal: bool,
    chip: Chip | None,
) -> kernels.AttentionCall:
    if mask_is_causal:
        mask, is_causal = None, True
    return kernels.AttentionCall(q, k, v, mask, is_causal, scale, chip)


@torch.library.custom_op(
    "autoshard::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale, bool mask_is_causal=False) "
    "-> (Tensor, Tensor)",
)
def attention(*operands: Any) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v and the softmax's log-sum-exp; see the module."""
    return attention_reference(*operands)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty_heads_inside(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


@torch.library.custom_op(
    "autoshard::attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, "
    "bool is_causal, float scale, bool mask_is_causal=False) -> (Tensor, Tensor, Tensor)",
)
def attention_backward(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention`'s `out` with respect to (q, k, v)."""
    return attention_backward_reference(*operands)


@attention_backward.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    gq, gk = (_empty_heads_inside(x, q.shape[-1]) for x in (q, k))
    return gq, gk, _empty_heads_inside(v, v.shape[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, is_causal, scale, mask_is_causal = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, mask, out, lse)
    ctx.flags = is_causal, scale, mask_is_causal


def _gradient(ctx: Any, grad_out: Tensor | None, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 7
    q, k, v, mask, out, lse = ctx.saved_tensors
    gq, gk, gv = attention_backward(grad_out, q, k, v, mask, out, lse, *ctx.flags)
    return gq, gk, gv, None, None, None, None


attention.register_autograd(_gradient, setup_context=_setup_context)
