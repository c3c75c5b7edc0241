"""Calls of torch's attention kernels, operands laid out as the table says. The kernel is `AttentionCall.kernel`.

All kernels share one convention: `lse` is the natural log of the sum of exp(scale * q k^T + mask).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from passes.ops.attention_choice import AttentionCall, check_problem
from passes.ops.attention_layout import head_padded, padded_bias, padded_lse, prepared
from passes.ops.attention_math import additive_mask, empty, math_backward, math_forward
from passes.ops.attention_table import Contract, Kernel, contract_of

__all__ = ["AttentionCall", "backward", "forward"]

aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor]


def forward(p: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out [b,h,s,e], lse [b,h,s]). Raises UnsupportedOpError for operands that no kernel takes."""
    check_problem(p)
    return _KERNELS[p.kernel][0](p)


def backward(p: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Gradients of (q, k, v). Raises UnsupportedOpError for operands that no kernel takes."""
    check_problem(p, grad_out=grad_out, out=out, lse=lse)
    return _KERNELS[p.kernel][1](p, grad_out, out, lse)


def _nothing_backward(p: AttentionCall, *_: Tensor) -> Gradients:
    return torch.zeros_like(p.q), torch.zeros_like(p.k), torch.zeros_like(p.v)


def _taken(row: Contract, **operands: Tensor) -> tuple[Tensor, ...]:
    """Operands with a head dim, padded and laid out for the kernel of `row`."""
    return tuple(prepared(row, name, head_padded(row, x)) for name, x in operands.items())


def _kept(p: AttentionCall, gq: Tensor, gk: Tensor, gv: Tensor) -> Gradients:
    """The columns that are no padding."""
    d, e = p.q.shape[-1], p.v.shape[-1]
    return _columns(gq, d), _columns(gk, d), _columns(gv, e)


def _columns(x: Tensor, count: int) -> Tensor:
    # `narrow`: an index would ask for the device, which fakes on CUDA have not in a build without it.
    return x if x.shape[-1] == count else x.narrow(-1, 0, count)


def _cpu_bias(p: AttentionCall, row: Contract) -> Tensor | None:
    return None if p.mask is None else prepared(row, "bias", additive_mask(p.mask, p.q.dtype))


def _cpu_flash(p: AttentionCall) -> tuple[Tensor, Tensor]:
    row = contract_of("cpu_flash")
    q, k, v = _taken(row, q=p.q, k=p.k, v=p.v)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, p.is_causal, attn_mask=_cpu_bias(p, row), scale=p.scale
    )


def _cpu_flash_backward(p: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    row = contract_of("cpu_flash")
    grad, q, k, v, result = _taken(row, grad_out=grad_out, q=p.q, k=p.k, v=p.v, out=out)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, result, lse, 0.0, p.is_causal, attn_mask=_cpu_bias(p, row), scale=p.scale
    )


def _cudnn(p: AttentionCall) -> tuple[Tensor, Tensor]:
    q, k, v = _taken(contract_of("cudnn"), q=p.q, k=p.k, v=p.v)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, p.is_causal, scale=p.scale
    )
    return _columns(out, p.v.shape[-1]), lse.squeeze(-1)


def _cudnn_backward(p: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    row = contract_of("cudnn")
    grad, q, k, v, result = _taken(row, grad_out=grad_out, q=p.q, k=p.k, v=p.v, out=out)
    stats = prepared(row, "lse", lse).unsqueeze(-1)
    seed, offset = _unread_seeds(q, torch.int64)
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, result, stats, seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0, p.is_causal,
        scale=p.scale,
    )  # fmt: skip
    return _kept(p, *gradients)


def _unread_seeds(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What kernels read with dropout only. Of one dim: for a scalar Inductor launches a kernel that writes it."""
    return like.new_empty((2,), dtype=dtype), like.new_empty((1,), dtype=dtype)


def _flash(p: AttentionCall) -> tuple[Tensor, Tensor]:
    q, k, v = _taken(contract_of("flash"), q=p.q, k=p.k, v=p.v)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, p.is_causal, False, scale=p.scale)
    return _columns(out, p.v.shape[-1]), lse


def _flash_backward(p: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    row = contract_of("flash")
    grad, q, k, v, result = _taken(row, grad_out=grad_out, q=p.q, k=p.k, v=p.v, out=out)
    seed, offset = _unread_seeds(q, torch.uint64)
    gradients = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, result, padded_lse(row, lse), None, None, q.shape[2], k.shape[2], 0.0, p.is_causal,
        seed, offset, scale=p.scale,
    )  # fmt: skip
    return _kept(p, *gradients)


def _bias(p: AttentionCall, row: Contract) -> Tensor | None:
    """At full shape [b,h,s,t], as the backward demands; what is broadcast has stride 0."""
    if p.mask is None:
        return None
    b, h, s, t = p.q.shape[0], p.q.shape[1], p.q.shape[2], p.k.shape[2]
    return padded_bias(row, additive_mask(p.mask, p.q.dtype), t).expand(b, h, s, t)


def _efficient(p: AttentionCall) -> tuple[Tensor, Tensor]:
    row = contract_of("efficient")
    q, k, v = _taken(row, q=p.q, k=p.k, v=p.v)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _bias(p, row), True, 0.0, p.is_causal, scale=p.scale
    )
    return _columns(out, p.v.shape[-1]), _columns(lse, q.shape[2])


def _efficient_backward(p: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    row = contract_of("efficient")
    grad, q, k, v, result = _taken(row, grad_out=grad_out, q=p.q, k=p.k, v=p.v, out=out)
    seed, offset = _unread_seeds(q, torch.int64)
    gq, gk, gv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _bias(p, row), result, padded_lse(row, lse), seed, offset, 0.0,
        [True, True, True, False], p.is_causal, scale=p.scale,
    )  # fmt: skip
    return _kept(p, gq, gk, gv)


_KERNELS: Mapping[
    Kernel, tuple[Callable[[AttentionCall], tuple[Tensor, Tensor]], Callable[..., Gradients]]
] = {
    "empty": (empty, _nothing_backward),
    "cpu_flash": (_cpu_flash, _cpu_flash_backward),
    "cudnn": (_cudnn, _cudnn_backward),
    "flash": (_flash, _flash_backward),
    "efficient": (_efficient, _efficient_backward),
    "math": (math_forward, math_backward),
}
"""Forward and backward."""
