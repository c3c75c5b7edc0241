"""Slices written into and gathered from tensors, and stacks of them, as cat, pad, select, expand and reshape; shuffled
channels, as reshape and permute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.capture.decomposed_places import laid_as

__all__ = ["SHAPES"]

aten = torch.ops.aten


def _bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Python's slice bounds, clipped to [0, size], end at least start."""
    low, high, _ = slice(start, end).indices(size)
    return low, max(low, high)


def _pad(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    return aten.constant_pad_nd.default(x, [0, 0] * (x.ndim - 1 - dim) + [before, after], 0)


def slice_backward(grad: Tensor, shape: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    """The gradient padded back with zeros to `shape`."""
    if step != 1:
        return NotImplemented
    dim %= len(shape)
    low, high = _bounds(shape[dim], start, end)
    return _pad(grad, dim, low, shape[dim] - high)


def select_backward(grad: Tensor, shape: Sequence[int], dim: int, index: int) -> Tensor:
    dim %= len(shape)
    index %= shape[dim]
    return _pad(grad.unsqueeze(dim), dim, index, shape[dim] - 1 - index)


def slice_scatter(
    x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """x[..., start:end, ...] = src, as the three pieces side by side."""
    if step != 1:
        return NotImplemented
    dim %= x.ndim
    size = x.shape[dim]
    low, high = _bounds(size, start, end)
    window = [*x.shape]
    window[dim] = high - low
    pieces = [src.to(x.dtype).expand(window)]
    if low > 0:
        pieces.insert(0, aten.slice.Tensor(x, dim, 0, low))
    if high < size:
        pieces.append(aten.slice.Tensor(x, dim, high, size))
    return laid_as(x, pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces, dim))


def select_scatter(x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    dim %= x.ndim
    index %= x.shape[dim]
    return slice_scatter(x, src.unsqueeze(dim), dim, index, index + 1)


def unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [aten.select.int(x, dim, i) for i in range(x.shape[dim])]


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Every tensor with a new dim. torch's own lays them end to end along a dim that they have, where a rank or a piece
    of a batch that has a part of each has no part of the whole."""
    dim %= tensors[0].ndim + 1
    return torch.cat([x.unsqueeze(dim) for x in tensors], dim)


def unsafe_split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    """Unsafe only in that nobody may write to its parts: `nn.GRUCell` and `nn.LSTMCell` call it."""
    return list(x.split(size, dim))


def unsafe_split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    return list(x.split(list(sizes), dim))


def repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    """Every dim of n repeated r times is [r, n] with r broadcast, flattened. Torch's result lies in rows."""
    x = x.reshape([*([1] * (len(repeats) - x.ndim)), *x.shape])
    paired = [s for n in x.shape for s in (1, n)]
    spread = [s for r, n in zip(repeats, x.shape, strict=True) for s in (r, n)]
    result = [r * n for r, n in zip(repeats, x.shape, strict=True)]
    return x.reshape(paired).expand(spread).reshape(result).clone(memory_format=torch.contiguous_format)


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """torch's own goes by way of four Python functions, for every product of a model."""
    if x.ndim < 2 or dim0 == dim1:
        return aten.alias.default(x)
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return aten.permute.default(x, order)


def t(x: Tensor) -> Tensor:
    return transpose(x, 0, x.ndim - 1)


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Only what rolls as one vector is taken apart: a rolled dim is split in space as it is."""
    if dims:
        return NotImplemented
    return aten.roll.default(x.reshape(-1), shifts, [0]).reshape(x.shape)


def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """[..., c f f, h, w] -> [..., c, h f, w f]"""
    *lead, channels, h, w = x.shape
    n, c = len(lead), channels // factor**2
    fine = x.reshape([*lead, c, factor, factor, h, w])
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return fine.permute(order).reshape([*lead, c, h * factor, w * factor]).clone()


def pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    """[..., c, h f, w f] -> [..., c f f, h, w]"""
    *lead, c, h, w = x.shape
    n = len(lead)
    fine = x.reshape([*lead, c, h // factor, factor, w // factor, factor])
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return fine.permute(order).reshape([*lead, c * factor**2, h // factor, w // factor]).clone()


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """[n, g c, ...] -> [n, c g, ...]"""
    n, channels, *rest = x.shape
    fine = x.reshape([n, groups, channels // groups, *rest])
    return fine.transpose(1, 2).reshape(x.shape).clone()


def copy(x: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """The functional form of `x.copy_(src)`."""
    return laid_as(x, src.to(dtype=x.dtype, device=x.device).expand(x.shape).clone())


SHAPES: dict[Any, Callable[..., Any]] = {
    aten.slice_backward.default: slice_backward,
    aten.select_backward.default: select_backward,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.unbind.int: unbind,
    aten.stack.default: stack,
    aten.unsafe_split.Tensor: unsafe_split,
    aten.unsafe_split_with_sizes.default: unsafe_split_with_sizes,
    aten.repeat.default: repeat,
    aten.transpose.int: transpose,
    aten.t.default: t,
    aten.roll.default: roll,
    aten.pixel_shuffle.default: pixel_shuffle,
    aten.pixel_unshuffle.default: pixel_unshuffle,
    aten.channel_shuffle.default: channel_shuffle,
    aten.native_channel_shuffle.default: channel_shuffle,
    aten.copy.default: copy,
}
