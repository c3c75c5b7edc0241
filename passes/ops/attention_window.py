"""Causal attention of which a query sees the last `window` keys up to its own, in blocks: few products are hidden ones.

    13 queries and keys, window 3, blocks of 4
    head: queries 0 to 4, keys 0 to 4             one call
    body: queries 5 to 8, keys 3 to 8             one call, of which blocks are samples
          queries 9 to 12, keys 7 to 12

A block multiplies with all keys that its queries see, and hides the rest by a mask, one for all blocks of the body. The
head is what blocks leave, and the queries with too few keys before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from passes.ops.attention_choice import AttentionCall

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
    out, lse = (_joined(*parts) for parts in zip(*found, strict=True))
    return out, lse


def windowed_backward(p: AttentionCall, attend: Attend, *of_queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (q, k, v). of_queries: what else the backward reads, `attend` after the call without a window."""
    blocks, keys = _Blocks.of(p), p.k.shape[2]
    queries, summands = [], []
    if blocks.first:
        gq, *of_keys = attend(_masked(blocks.head(p)), *(x.narrow(2, 0, blocks.first) for x in of_queries))
        queries.append(gq)
        summands.append([_placed(x, blocks.head_keys[0], keys) for x in of_keys])
    if blocks.count:
        gq, *of_keys = attend(_masked(blocks.body(p)), *map(blocks.folded, of_queries))
        queries.append(blocks.unfolded(gq))
        summands.append([blocks.keys_unfolded(x, keys) for x in of_keys])
    gk, gv = (parts[0] if len(parts) == 1 else parts[0] + parts[1] for parts in zip(*summands, strict=True))
    return _joined(*queries), gk, gv


def _block(window: int) -> int:
    return max(window // 2, _LEAST_BLOCK)


def _joined(*parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _placed(x: Tensor, start: int, length: int) -> Tensor:
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
            _placed(
                F.pad(part, (0, 0, 0, self.size - part.shape[3])).flatten(2, 3), start + i * self.size, length
            )
            for i, part in enumerate(parts)
        ]
        return sum(found[1:], found[0])
