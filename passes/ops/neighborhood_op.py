"""`autoshard::neighborhood_attention` and its gradient: queries attend to the keys near them, as NATTEN defines it.

Space has 1 to 3 dims. Per dim, of N positions, query i of dilation group g = i mod d sees `kernel_size` keys of that
group, of whose N_g positions the first is the one k // 2 before the query, moved inside where it would lie outside:

    g + d * clamp(i // d - k // 2, 0, N_g - k) + d * j,  j in [0, k)       N_g = ceil((N - g) / d)
    i - d * j, where that is not negative                                   if causal there

k * d <= N. In several dims it sees all combinations.   [NATTEN: reference mask]

A rank may hold a block of the queries and another of the keys, so the op is told where they lie in the whole:
lengths are N per dim, `first_query` and `first_key` where the blocks begin. Every key that a query sees is there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from passes.ops.registration import differentiable_operator, differentiated_by

_GEOMETRY = (
    "int[] kernel_size, int[] dilation, bool[] is_causal, float scale, "
    "int[] lengths, int[] first_query, int[] first_key"
)


@dataclass(frozen=True)
class _Axis:
    """One dim of space. queries, keys: how many there are here, the first at `first_query`, `first_key` of `length`."""

    queries: int
    keys: int
    kernel: int
    dilation: int
    is_causal: bool
    length: int
    first_query: int
    first_key: int

    def seen(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """int64 and bool [queries, kernel]: which of the keys here a query sees, and whether there is such a key;
        0 where there is none."""
        last = self.first_query + self.queries
        query = torch.arange(self.first_query, last, dtype=torch.int64, device=device).unsqueeze(1)
        step = self.dilation * torch.arange(self.kernel, dtype=torch.int64, device=device)
        if self.is_causal:
            place = query - step
            return (place - self.first_key).masked_fill(place < 0, 0), place >= 0
        group = query % self.dilation
        most = (self.length - 1 - group) // self.dilation + 1 - self.kernel
        # no clamp: in a place read through views Inductor (torch 2.13) cannot simplify a minimum or maximum
        start = query // self.dilation - self.kernel // 2
        start = start.masked_fill(start < 0, 0)
        start = torch.where(start > most, most, start)
        place = group + self.dilation * start + step - self.first_key
        return place, torch.ones_like(place, dtype=torch.bool)


@dataclass(frozen=True)
class _Problem:
    """q [b,s,h,d], k [b,t,h,d], v [b,t,h,e] in the dtype to compute in; seen [s,p]: see `_Axis`; there [s,p,1] or None
    if every key is there. s, t: all positions of the block; p: the product of the kernel's sizes."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    seen: Tensor
    there: Tensor | None

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel_size: Any,
        dilation: Any,
        is_causal: Any,
        scale: float,
        *places: Any,
    ) -> _Problem:
        """The arguments of the op, in its order."""
        numbers = (q.shape[1:-2], k.shape[1:-2], kernel_size, dilation, is_causal, *places)
        axes = [_Axis(*each) for each in zip(*numbers, strict=True)]
        seen, there = _all_dims(axes, q.device)
        work = torch.float64 if q.dtype == torch.float64 else torch.float32
        q, k, v = (x.to(work).flatten(1, len(axes)) for x in (q, k, v))
        return _Problem(q, k, v, scale, seen, there if any(is_causal) else None)

    def near(self, x: Tensor) -> Tensor:
        """[b,s,p,h,c]: of x [b,t,h,c] what each query sees."""
        return x.index_select(1, self.seen.flatten()).unflatten(1, self.seen.shape)

    def spread(self, x: Tensor) -> Tensor:
        """The transpose of `near`: [b,t,h,c]."""
        total = x.new_zeros((x.shape[0], self.k.shape[1], *x.shape[3:]))
        return total.index_add(1, self.seen.flatten(), x.flatten(1, 2))

    def weights(self, keys: Tensor) -> Tensor:
        """[b,s,p,h]: the softmax over the keys seen; keys: `near(k)`."""
        scores = (self.q.unsqueeze(2) * keys).sum(-1) * self.scale
        if self.there is not None:
            scores = scores.masked_fill(~self.there, -math.inf)
        return scores.softmax(2)


def _all_dims(axes: Sequence[_Axis], device: torch.device) -> tuple[Tensor, Tensor]:
    """[s,p] linear place among the keys, and [s,p,1] whether it is there: all dims' `seen` combined."""
    place, there = axes[0].seen(device)
    for axis in axes[1:]:
        one, ok = axis.seen(device)
        both = (place.shape[0] * one.shape[0], place.shape[1] * one.shape[1])
        place = (place[:, None, :, None] * axis.keys + one[None, :, None, :]).reshape(both)
        there = (there[:, None, :, None] & ok[None, :, None, :]).reshape(both)
    return place, there.unsqueeze(-1)


def _forward(q: Tensor, k: Tensor, v: Tensor, *geometry: Any) -> Tensor:
    """[b, *s, h, e]: softmax(scale * q k^T) v over the keys each query sees; see the module.

    q [b, *s, h, d], k [b, *t, h, d], v [b, *t, h, e], of one dtype. Computed in at least float32.
    """
    problem = _Problem.of(q, k, v, *geometry)
    weights = problem.weights(problem.near(problem.k))
    out = (weights.unsqueeze(-1) * problem.near(problem.v)).sum(2)
    return out.reshape((*q.shape[:-1], v.shape[-1])).to(q.dtype)


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *geometry: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `neighborhood_attention` with respect to (q, k, v), what queries here give to the keys here.

    dS = P * (dP - rowsum(P * dP)) with dP = dO V^T: the softmax's Jacobian.
    """
    problem = _Problem.of(q, k, v, *geometry)
    keys = problem.near(problem.k)
    weights = problem.weights(keys)
    grad = grad_out.to(weights.dtype).flatten(1, q.ndim - 3).unsqueeze(2)
    grad_weights = (grad * problem.near(problem.v)).sum(-1)
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(2, keepdim=True)) * problem.scale
    grad_q = (grad_scores.unsqueeze(-1) * keys).sum(2)
    grad_k = problem.spread(grad_scores.unsqueeze(-1) * problem.q.unsqueeze(2))
    grad_v = problem.spread(weights.unsqueeze(-1) * grad)
    return (
        grad_q.reshape(q.shape).to(q.dtype),
        grad_k.reshape(k.shape).to(k.dtype),
        grad_v.reshape(v.shape).to(v.dtype),
    )


neighborhood_attention = differentiable_operator(
    f"neighborhood_attention(Tensor q, Tensor k, Tensor v, {_GEOMETRY}) -> Tensor",
    _forward,
    lambda q, k, v, *geometry: q.new_empty((*q.shape[:-1], v.shape[-1])),
)
neighborhood_attention_backward = differentiable_operator(
    f"neighborhood_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, {_GEOMETRY}) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    lambda grad_out, q, k, v, *geometry: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)
differentiated_by(neighborhood_attention, neighborhood_attention_backward, slice(0, 3))
