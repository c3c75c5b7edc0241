"""`autoshard::uniform`: random numbers that depend on the place in the global tensor, not on a rank.

Every element is a hash of (seed, stream, linear index in the global tensor). A rank that holds a
shard computes exactly its part of the one global tensor: replicas agree, shards differ, there is
no generator state, and a seed makes a run repeatable on any mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from passes.ops.registration import differentiable_operator

_WORD = 0xFFFFFFFF
UNIFORM_WORDS = 3
"""int64 of an element that are alive at once while `uniform_reference` runs op by op: in `_mix` what is mixed, it
shifted, and both together."""


def _mix(h: Tensor) -> Tensor:
    """A bijection of 32-bit words held in int64; no product exceeds 2**63.

    Two rounds of xor-shift and multiply ("lowbias32", C. Wellons, hash-prospector).
    """
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & _WORD
    h = ((h ^ (h >> 15)) * 0x735A2D97) & _WORD
    return h ^ (h >> 15)


def _keys(seed: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """Two 32-bit words, 0-d, that every element of one stream shares."""
    low, high = seed & _WORD, (seed >> 32) & _WORD
    first = _mix(_mix(_mix(low) ^ high) ^ (stream & _WORD))
    # 2**32 / golden ratio separates the two keys made from one seed.
    second = _mix(first ^ 0x9E3779B9 ^ ((stream >> 32) & _WORD))
    return first, second


def _global_index(
    shape: Sequence[int], offset: Sequence[int], global_shape: Sequence[int], device: torch.device
) -> Tensor:
    """int64 `shape`: the row-major linear index, in the global tensor, of every local element."""
    index = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        place = torch.arange(offset[dim], offset[dim] + shape[dim], dtype=torch.int64, device=device)
        index = index + (place * stride).reshape((-1,) + (1,) * (len(shape) - 1 - dim))
        stride *= global_shape[dim]
    return index.expand(list(shape)).reshape(list(shape))


def uniform_reference(
    shape: Sequence[int], offset: Sequence[int], global_shape: Sequence[int], seed: Tensor, stream: int
) -> Tensor:
    """What `autoshard::uniform` computes, in plain ATen ops, so that a compiler can fuse it.

    shape, offset: this rank's block [offset, offset + shape) of a tensor of `global_shape`.
    seed: int64, 0-d. stream: which of the graph's random ops this is.
    Returns float32 `shape` in [0, 1): multiples of 2**-24, so 1.0 never occurs.
    """
    first, second = _keys(seed, stream)
    index = lambda: _global_index(shape, offset, global_shape, seed.device)
    # Each element meets two keys: with one, two streams would be the same numbers in another order. Nothing has a name
    # here: run op by op, no more than three words of an element are alive at once (`UNIFORM_WORDS`).
    if math.prod(global_shape) > _WORD:
        return _unit(_mix(_mix(_mix((index() & _WORD) ^ first) ^ second) ^ (index() >> 32)))
    return _unit(_mix(_mix((index() & _WORD) ^ first) ^ second))


def _unit(h: Tensor) -> Tensor:
    return (h >> 8).to(torch.float32) * 2.0**-24


uniform = differentiable_operator(
    "uniform(SymInt[] shape, SymInt[] offset, SymInt[] global_shape, Tensor seed, int stream) -> Tensor",
    uniform_reference,
    lambda shape, offset, global_shape, seed, stream: torch.empty(
        list(shape), dtype=torch.float32, device=seed.device
    ),
)
"""The block [offset, offset + shape) of stream `stream`; see `uniform_reference`."""
