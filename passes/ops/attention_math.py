"""Attention in plain ops: what the fused kernels approximate, and what runs where none of them may."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from passes.ops.attention_choice import AttentionCall

__all__ = ["additive_mask", "empty", "lse_dtype", "math_backward", "math_forward"]


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive bias of `dtype`: False becomes -inf."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    seen, hidden = (torch.full((), value, dtype=dtype, device=mask.device) for value in (0.0, -math.inf))
    return torch.where(mask, seen, hidden)


def empty(p: AttentionCall) -> tuple[Tensor, Tensor]:
    """A shard without queries or keys: nothing to attend to gives zeros, and log(0) as lse."""
    b, h, s, _ = p.q.shape
    lse = p.q.new_full((b, h, s), -math.inf, dtype=lse_dtype(p.q.dtype))
    return p.q.new_zeros((b, h, s, p.v.shape[-1])), lse


def _scores(p: AttentionCall) -> Tensor:
    """[b,h,s,t] scale * q k^T + mask, accumulated in at least float32."""
    work = lse_dtype(p.q.dtype)
    scores = (p.q.to(work) * p.scale) @ p.k.to(work).transpose(-1, -2)
    if p.mask is not None:
        scores = scores + additive_mask(p.mask, work)
    if p.is_causal:
        s, t = scores.shape[-2:]
        future = torch.ones(s, t, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse); rows that see no key (lse = -inf) are zero rather than NaN."""
    blind = torch.isneginf(lse).unsqueeze(-1)
    return torch.exp(scores - lse.unsqueeze(-1)).masked_fill(blind, 0.0)


def math_forward(p: AttentionCall) -> tuple[Tensor, Tensor]:
    """(out [b,h,s,e], lse [b,h,s])."""
    scores = _scores(p)
    lse = torch.logsumexp(scores, -1)
    out = _probabilities(scores, lse) @ p.v.to(scores.dtype)
    return out.to(p.q.dtype), lse


def math_backward(
    p: AttentionCall, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
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
