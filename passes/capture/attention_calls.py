"""`F.scaled_dot_product_attention` as `autoshard::attention`, or as plain math where that cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from passes.capture.autocast import cast_to
from passes.ops.attention_op import attention

__all__ = ["attention_captured", "expand_heads", "scaled_dot_product"]


@contextmanager
def attention_captured(device_type: str) -> Generator[dict[Any, Callable[..., Any]]]:
    """Torch functions to answer otherwise while tracing, for a TorchFunctionMode.

    Under autocast of `device_type` the operands are cast to its dtype, as torch's own function does.
    A mode does not see calls made inside torch's own composite functions (nn.MultiheadAttention), so
    the name that they look up is exchanged too, and put back at the end.
    """
    original = F.scaled_dot_product_attention

    def answer(*args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled(device_type):
            args, kwargs = cast_to(torch.get_autocast_dtype(device_type), args, kwargs)
        return scaled_dot_product(*args, **kwargs)

    F.scaled_dot_product_attention = answer  # type: ignore[assignment]
    try:
        yield {original: answer}
    finally:
        F.scaled_dot_product_attention = original


def scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The same arguments and result as `torch.nn.functional.scaled_dot_product_attention`."""
    if attn_mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: attn_mask and is_causal=True exclude each other")
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        key, value = (expand_heads(x, query.shape[-3]) for x in (key, value))
    mask_is_learned = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    same_batch = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if dropout_p > 0.0 or mask_is_learned or not same_batch:
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return _fused(query, key, value, attn_mask, is_causal, scale)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """[..., g, t, d] -> [..., heads, t, d]: each head `heads // g` times, next to each other."""
    groups = x.shape[-3]
    if groups == heads:
        return x
    wide = x.unsqueeze(-3).expand(*x.shape[:-2], heads // groups, *x.shape[-2:])
    return wide.reshape(*x.shape[:-3], heads, *x.shape[-2:])


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """By the op, with what precedes the last three dims made one batch dim."""
    lead = q.shape[:-2]

    def four(x: Tensor) -> Tensor:
        if x.dim() == 4:
            return x
        if x.dim() < 4:
            return x.reshape(*(1,) * (4 - x.dim()), *x.shape)
        return x.flatten(0, x.dim() - 4)

    if mask is not None and q.dim() > 4 and mask.dim() > 3:
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    mask = None if mask is None else four(mask)
    out, _ = attention(four(q), four(k), four(v), mask, is_causal, scale)
    return out if q.dim() == 4 else out.reshape(*lead, *out.shape[-2:])


def _math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    """softmax(scale q k^T + mask), dropout, v: for dropout, learned masks and broadcast batches."""
    scores = torch.matmul(q * scale, k.transpose(-2, -1))
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1)
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p, training=True)
    return torch.matmul(weights, v)
