"""Causal attention of which a query sees the last `window` keys up to its own, in blocks: few products are hidden ones.

    13 queries and keys, window 3, blocks of 4
    head: queries 0 to 4, keys 0 to 4             one call
    body: queries 5 to 8, keys 3 to 8             one call, of which blocks are samples
          queries 9 to 12, keys 7 to 12

A block multiplies with all keys that its queries see, and hides the rest by a mask, one for all blocks of the body. The
head is what blocks leave, and the queries with too few keys before them.

`neighborhood_attention` and its gradient: queries attend to the keys near them, as NATTEN defines it, in 1 to 3 dims.
Per dim, of N positions, query i of dilation group g = i mod d sees `kernel_size` keys of that group, of whose N_g
positions the first is the one k // 2 before the query, moved inside where it would lie outside:
    g + d * clamp(i // d - k // 2, 0, N_g - k) + d * j,  j in [0, k)       N_g = ceil((N - g) / d)
    i - d * j, where that is not negative                                   if causal there

k * d <= N. In several dims it sees all combinations. [NATTEN: reference mask] A rank may hold a block of the queries
and another of the keys, so the op is told where they lie in the whole: lengths are N per dim, `first_query` and
`first_key` where the blocks begin. Every key that a query sees is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from passes.ops.attention_choice import AttentionCall
from passes.ops.registration import differentiable_operator, differentiated_by

_LEAST_BLOCK = 128
"""Queries of a block, at least: with fewer, kernels are less busy."""

Attend = Callable[..., tuple[Tensor, ...]]


def keys_multiplied(keys: int, window: int) -> int:
    """With how many of `keys` a query is multiplied, those included that are hidden from it."""
    return min(keys, _block(window) + window - 1) if window else keys


def windowed_forward(p: AttentionCall, attend: Attend) -> tuple[Tensor, Tensor]:
    """(out, lse). attend: the same of a call without a window."""
    blocks = _Blocks.of(p)
    found = [attend(_masked(blocks.head(p)))] if blocks.first else []
    if blocks.count:
        found.append(tuple(map(blocks.unfolded, attend(_masked(blocks.body(p))))))
    out, lse = (joined(*parts) for parts in zip(*found, strict=True))
    return out, lse


def windowed_backward(p: AttentionCall, attend: Attend, *of_queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (q, k, v). of_queries: what else the backward reads, `attend` after the call without a window."""
    blocks, keys = _Blocks.of(p), p.k.shape[2]
    queries, summands = [], []
    if blocks.first:
        gq, *of_keys = attend(_masked(blocks.head(p)), *(x.narrow(2, 0, blocks.first) for x in of_queries))
        queries.append(gq)
        summands.append([placed(x, blocks.head_keys[0], keys) for x in of_keys])
    if blocks.count:
        gq, *of_keys = attend(_masked(blocks.body(p)), *map(blocks.folded, of_queries))
        queries.append(blocks.unfolded(gq))
        summands.append([blocks.keys_unfolded(x, keys) for x in of_keys])
    gk, gv = (parts[0] if len(parts) == 1 else parts[0] + parts[1] for parts in zip(*summands, strict=True))
    return joined(*queries), gk, gv


def _block(window: int) -> int:
    return max(window // 2, _LEAST_BLOCK)


def joined(*parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def placed(x: Tensor, start: int, length: int) -> Tensor:
    """In zeros of `length` rows, the first at `start`; what would be behind the end is cut off."""
    after = length - start - x.shape[2]
    return F.pad(x, (0, 0, start, after)) if start or after else x


def _masked(p: AttentionCall) -> AttentionCall:
    """Without a window, with all products."""
    queries, keys = p.q.shape[2], p.k.shape[2]
    if queries == keys <= p.window:
        return replace(p, window=0)
    pairs, last = torch.ones((1, 1, queries, keys), dtype=torch.bool, device=p.q.device), keys - queries
    seen = pairs.tril(last).triu(last - p.window + 1)
    return replace(p, mask=seen, is_causal=False, window=0)


@dataclass(frozen=True)
class _Blocks:
    """first: queries of the head. count, size: of the blocks behind it. more: keys before the first query, that a block
    sees. head_keys: [lo, hi)."""

    batch: int
    first: int
    count: int
    size: int
    more: int
    head_keys: tuple[int, int]

    @staticmethod
    def of(p: AttentionCall) -> _Blocks:
        (batch, _, queries, _), keys, more = p.q.shape, p.k.shape[2], p.window - 1
        size, before = _block(p.window), keys - queries
        least = max(0, more - before)
        first = least + (queries - least) % size if queries - least >= size else queries
        return _Blocks(
            batch, first, (queries - first) // size, size, more, (max(0, before - more), first + before)
        )

    def head(self, p: AttentionCall) -> AttentionCall:
        lo, hi = self.head_keys
        return replace(
            p, q=p.q.narrow(2, 0, self.first), k=p.k.narrow(2, lo, hi - lo), v=p.v.narrow(2, lo, hi - lo)
        )

    def body(self, p: AttentionCall) -> AttentionCall:
        return replace(p, q=self.folded(p.q), k=self.keys_folded(p.k), v=self.keys_folded(p.v))

    def folded(self, x: Tensor) -> Tensor:
        """[b, h, s, ...] -> [b blocks, h, size, ...]"""
        rows = x.narrow(2, self.first, self.count * self.size).unflatten(2, (self.count, self.size))
        return rows.transpose(1, 2).flatten(0, 1)

    def unfolded(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.batch, self.count)).transpose(1, 2).flatten(2, 3)

    def keys_folded(self, x: Tensor) -> Tensor:
        """[b, g, t, d] -> [b blocks, g, more + size, d]"""
        start = self.head_keys[1] - self.more
        rows = x.narrow(2, start, x.shape[2] - start).unfold(2, self.more + self.size, self.size)
        return rows.permute(0, 2, 1, 4, 3).flatten(0, 1)

    def keys_unfolded(self, grad: Tensor, length: int) -> Tensor:
        """The gradient of what was folded: that of a key is the sum over the blocks that see it."""
        whole, start = (
            grad.unflatten(0, (self.batch, self.count)).transpose(1, 2),
            self.head_keys[1] - self.more,
        )
        parts = whole.split(self.size, 3)
        found = [
            placed(
                F.pad(part, (0, 0, 0, self.size - part.shape[3])).flatten(2, 3), start + i * self.size, length
            )
            for i, part in enumerate(parts)
        ]
        return sum(found[1:], found[0])


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
