"""Kernels of `autoshard::attention`: torch's fused ones where they apply, plain math elsewhere.

Which kernel runs is a function of the operands only, so that forward and backward agree. All
kernels share one convention: `lse` is the natural log of the sum of exp(scale * q k^T + mask).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Problem", "backward", "forward"]

aten = torch.ops.aten
Kernel = Literal["empty", "math", "cpu_flash", "cuda_flash", "cuda_efficient"]

_HALF = (torch.float16, torch.bfloat16)
_LSE_ALIGN = 32  # the efficient kernel's lse rows are padded to this many
_BIAS_ALIGN = 16  # elements: the efficient kernel loads bias rows as aligned vectors
_HEAD_ALIGN = 8  # elements: both CUDA kernels want head sizes in multiples of this


@dataclass(frozen=True)
class Problem:
    """Operands of one attention. q [b,h,s,d], k [b,h,t,d], v [b,h,t,e], mask 4-d or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float

    @property
    def kernel(self) -> Kernel:
        if self.q.numel() == 0 or self.k.numel() == 0 or self.v.numel() == 0:
            return "empty"
        if self.mask is not None and self.is_causal:
            return "math"
        if self.q.device.type == "cpu":
            return "cpu_flash" if self.q.shape[-1] == self.v.shape[-1] else "math"
        if self.q.device.type == "cuda":
            return _cuda_kernel(self)
        return "math"


def _cuda_kernel(p: Problem) -> Kernel:
    ampere = torch.cuda.get_device_capability(p.q.device) >= (8, 0)
    if p.q.dtype not in (*_HALF, torch.float32) or (p.q.dtype == torch.bfloat16 and not ampere):
        return "math"
    square = not p.is_causal or p.q.shape[2] == p.k.shape[2]
    flash = ampere and p.q.dtype in _HALF and p.mask is None and square
    same_head = p.q.shape[-1] == p.v.shape[-1]
    if flash and same_head and p.q.shape[-1] <= 256 and torch.version.hip is None:
        return "cuda_flash"
    return "cuda_efficient" if torch.version.hip is None else "math"


def forward(p: Problem) -> tuple[Tensor, Tensor]:
    """(out [b,h,s,e], lse [b,h,s])."""
    match p.kernel:
        case "empty":
            return _empty(p)
        case "cpu_flash":
            return _cpu_flash(p)
        case "cuda_flash":
            return _cuda_flash(p)
        case "cuda_efficient":
            return _cuda_efficient(p)
        case _:
            return _math(p)


def backward(p: Problem, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (q, k, v)."""
    match p.kernel:
        case "empty":
            return torch.zeros_like(p.q), torch.zeros_like(p.k), torch.zeros_like(p.v)
        case "cpu_flash":
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, p.q, p.k, p.v, out, lse, 0.0, p.is_causal, attn_mask=_bias(p), scale=p.scale
            )
        case "cuda_flash":
            return _cuda_flash_backward(p, grad_out, out, lse)
        case "cuda_efficient":
            return _cuda_efficient_backward(p, grad_out, out, lse)
        case _:
            return _math_backward(p, grad_out, out, lse)


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bias(p: Problem, dtype: torch.dtype | None = None) -> Tensor | None:
    """The mask as an additive bias of `dtype` (q's by default): False becomes -inf."""
    if p.mask is None:
        return None
    dtype = dtype or p.q.dtype
    if p.mask.dtype != torch.bool:
        return p.mask.to(dtype)
    return torch.zeros_like(p.mask, dtype=dtype).masked_fill_(~p.mask, -math.inf)


def _empty(p: Problem) -> tuple[Tensor, Tensor]:
    """A shard without queries or keys: nothing to attend to gives zeros, and log(0) as lse."""
    b, h, s, _ = p.q.shape
    lse = p.q.new_full((b, h, s), -math.inf, dtype=_lse_dtype(p.q.dtype))
    return p.q.new_zeros((b, h, s, p.v.shape[-1])), lse


def _cpu_flash(p: Problem) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        p.q, p.k, p.v, 0.0, p.is_causal, attn_mask=_bias(p), scale=p.scale
    )


def _pad_head(x: Tensor) -> Tensor:
    """Zero columns change neither q k^T nor the columns of out that are kept."""
    return F.pad(x, (0, -x.shape[-1] % _HEAD_ALIGN))


def _cuda_flash(p: Problem) -> tuple[Tensor, Tensor]:
    q, k, v = _pad_head(p.q), _pad_head(p.k), _pad_head(p.v)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, p.is_causal, False, scale=p.scale)
    return out[..., : p.v.shape[-1]], lse


def _cuda_flash_backward(
    p: Problem, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, grad, result = (_pad_head(x) for x in (p.q, p.k, p.v, grad_out, out))
    no_random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # read only with dropout
    gq, gk, gv = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, result, lse, None, None, q.shape[2], k.shape[2], 0.0, p.is_causal,
        no_random, no_random[0], scale=p.scale,
    )  # fmt: skip
    d, e = p.q.shape[-1], p.v.shape[-1]
    return gq[..., :d], gk[..., :d], gv[..., :e]


def _cuda_bias(p: Problem) -> Tensor | None:
    """The bias at full shape [b,h,s,t] with rows that start at aligned addresses."""
    bias = _bias(p)
    if bias is None:
        return None
    b, h, s, t = p.q.shape[0], p.q.shape[1], p.q.shape[2], p.k.shape[2]
    bias = bias.expand(bias.shape[0], bias.shape[1], bias.shape[2], t)
    return F.pad(bias, (0, -t % _BIAS_ALIGN))[..., :t].expand(b, h, s, t)


def _cuda_efficient(p: Problem) -> tuple[Tensor, Tensor]:
    q, k, v = _pad_head(p.q), _pad_head(p.k), _pad_head(p.v)
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
        q, k, v, _cuda_bias(p), True, 0.0, p.is_causal, scale=p.scale
    )
    return out[..., : p.v.shape[-1]], lse[..., : q.shape[2]]


def _cuda_efficient_backward(
    p: Problem, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, grad, result = (_pad_head(x) for x in (p.q, p.k, p.v, grad_out, out))
    # +inf in the padding: exp(score - inf) = 0, as the forward kernel leaves it.
    padded = F.pad(lse, (0, -q.shape[2] % _LSE_ALIGN), value=math.inf)
    no_random = torch.zeros((), dtype=torch.int64, device=q.device)  # read only with dropout
    gq, gk, gv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _cuda_bias(p), result, padded, no_random, no_random, 0.0,
        [True, True, True, False], p.is_causal, scale=p.scale,
    )  # fmt: skip
    d, e = p.q.shape[-1], p.v.shape[-1]
    return gq[..., :d], gk[..., :d], gv[..., :e]


def _scores(p: Problem) -> Tensor:
    """[b,h,s,t] scale * q k^T + mask, accumulated in at least float32."""
    work = _lse_dtype(p.q.dtype)
    scores = (p.q.to(work) * p.scale) @ p.k.to(work).transpose(-1, -2)
    if (bias := _bias(p, work)) is not None:
        scores = scores + bias
    if p.is_causal:
        s, t = scores.shape[-2:]
        future = torch.ones(s, t, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); rows that see no key (lse = -inf) are zero rather than NaN."""
    blind = torch.isneginf(lse).unsqueeze(-1)
    return torch.exp(scores - lse.unsqueeze(-1)).masked_fill(blind, 0.0)


def _math(p: Problem) -> tuple[Tensor, Tensor]:
    scores = _scores(p)
    lse = torch.logsumexp(scores, -1)
    out = _probabilities(scores, lse) @ p.v.to(scores.dtype)
    return out.to(p.q.dtype), lse


def _math_backward(p: Problem, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dP = dO V^T, dS = P * (dP - rowsum(dO * O)); the softmax's Jacobian. [FlashAttention, app. B]"""
    weights = _probabilities(_scores(p), lse)
    work = weights.dtype
    grad, q, k, v = (x.to(work) for x in (grad_out, p.q, p.k, p.v))
    delta = (grad * out.to(work)).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ v.transpose(-1, -2) - delta)
    gq = grad_scores @ k * p.scale
    gk = grad_scores.transpose(-1, -2) @ q * p.scale
    gv = weights.transpose(-1, -2) @ grad
    return gq.to(p.q.dtype), gk.to(p.k.dtype), gv.to(p.v.dtype)
