"""Attention of which a query sees the keys of its own document, in blocks: only a block's mask is ever there.

    12 queries and keys of documents 0 0 0 0 0 1 1 1 1 2 2 2, causal, blocks of 4
    queries 0 to 3, keys 0 to 3        queries 4 to 7, keys 0 to 7        queries 8 to 11, keys 0 to 11

Numbers of documents are values, so what other documents' keys would be is computed, and hidden by the block's mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from passes.ops.attention_choice import AttentionCall
from passes.ops.attention_window import Attend, joined, placed

_LEAST_BLOCK, _MOST_BLOCKS = 1024, 32
"""Queries of a block, and blocks: each is a call."""


def documents_forward(p: AttentionCall, attend: Attend) -> tuple[Tensor, Tensor]:
    """(out, lse). attend: the same of a call with a mask. lse of a query that sees no key: the least number."""
    found: list[tuple[Tensor, Tensor]] = []
    for block, _ in _blocks(p):
        out, lse = attend(block)
        assert block.mask is not None
        found.append((out, lse.where(block.mask.any(-1), torch.finfo(lse.dtype).min)))
    out, lse = (joined(*parts) for parts in zip(*found, strict=True))
    return out, lse


def documents_backward(
    p: AttentionCall, attend: Attend, *of_queries: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (q, k, v). of_queries: what else the backward reads, `attend` after the call with a mask."""
    queries: list[Tensor] = []
    total: list[Tensor] = []
    for block, begin in _blocks(p):
        gq, *of_keys = attend(block, *(x.narrow(2, begin, block.q.shape[2]) for x in of_queries))
        queries.append(gq)
        wide = [placed(x, 0, p.k.shape[2]).to(of_queries[-1].dtype) for x in of_keys]
        total = [a + b for a, b in zip(total, wide, strict=True)] if total else wide
    gk, gv = (x.to(p.k.dtype) for x in total)
    return joined(*queries), gk, gv


def _blocks(p: AttentionCall) -> Iterator[tuple[AttentionCall, int]]:
    """With masks, and the first query of each."""
    documents, of_keys = p.documents, p.of_keys
    assert documents is not None and of_keys is not None
    size = max(_LEAST_BLOCK, -(-p.q.shape[2] // _MOST_BLOCKS))
    for begin in range(0, p.q.shape[2], size):
        count = min(size, p.q.shape[2] - begin)
        keys = min(begin + count, p.k.shape[2]) if p.is_causal else p.k.shape[2]
        seen = documents.narrow(2, begin, count) == of_keys.narrow(2, 0, keys).transpose(2, 3)
        if p.is_causal:
            seen = seen.tril(begin)
        parts = {"q": p.q.narrow(2, begin, count), "k": p.k.narrow(2, 0, keys), "v": p.v.narrow(2, 0, keys)}
        yield replace(p, **parts, mask=seen, is_causal=False, documents=None, of_keys=None), begin
