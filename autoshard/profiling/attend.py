"""The attention that a profile times: the op of plans, so that the kernel that is priced is the one that runs."""

from __future__ import annotations

from torch import Tensor

from passes.ops.attention_op import attention

__all__ = ["attend"]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v by `autoshard::attention`; q [b,h,s,d], k, v [b,h,t,d]. Differentiable."""
    return attention(q, k, v, None, False, q.shape[-1] ** -0.5)[0]
