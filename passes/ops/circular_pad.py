"""`autoshard::circular_pad`: padding with what is at the other end, as one op.

Torch takes `F.pad(mode="circular")` apart into copies, of which nothing can tell any more that the dim is a circle.
Where the dim is split in space a rank reads its padding from its neighbours with the rest, across the ends too.

    circular_pad(x, pads)              [n, ...] -> [before + n + after, ...]
    circular_pad_backward(grad, pads)  [before + n + after, ...] -> [n, ...]

pads: (before, after) of the last dim first, as `aten::constant_pad_nd` has them, for as many dims as one likes; none is
negative or above the dim's length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["circular_pad", "circular_pad_backward"]

aten = torch.ops.aten


def _padded(ndim: int, pads: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(dim, before, after) of each dim that is padded."""
    for i in range(len(pads) // 2):
        if pads[2 * i] or pads[2 * i + 1]:
            yield ndim - 1 - i, pads[2 * i], pads[2 * i + 1]


def _resized(x: Tensor, pads: Sequence[int], sign: int) -> Tensor:
    shape = list(x.shape)
    for dim, before, after in _padded(x.ndim, pads):
        shape[dim] += sign * (before + after)
    return x.new_empty(shape)


@torch.library.custom_op(
    "autoshard::circular_pad", mutates_args=(), schema="(Tensor x, SymInt[] pads) -> Tensor"
)
def circular_pad(x: Tensor, pads: Sequence[int]) -> Tensor:
    """See the module."""
    whole = x
    for dim, before, after in _padded(x.ndim, pads):
        length = whole.shape[dim]
        ends = aten.slice.Tensor(whole, dim, length - before), aten.slice.Tensor(whole, dim, 0, after)
        whole = torch.cat([ends[0], whole, ends[1]], dim)
    return whole.clone() if whole is x else whole


@circular_pad.register_fake
def _(x: Tensor, pads: Sequence[int]) -> Tensor:
    return _resized(x, pads, 1)


@torch.library.custom_op(
    "autoshard::circular_pad_backward", mutates_args=(), schema="(Tensor grad, SymInt[] pads) -> Tensor"
)
def circular_pad_backward(grad: Tensor, pads: Sequence[int]) -> Tensor:
    """See the module."""
    total = grad
    for dim, before, after in _padded(grad.ndim, pads):
        length = total.shape[dim] - before - after
        own = aten.slice.Tensor(total, dim, before, before + length)
        tail = aten.slice.Tensor(total, dim, 0, before)
        head = aten.slice.Tensor(total, dim, before + length)
        outer = [0, 0] * (grad.ndim - 1 - dim)
        tail = aten.constant_pad_nd.default(tail, [*outer, length - before, 0])
        total = own + tail + aten.constant_pad_nd.default(head, [*outer, 0, length - after])
    return total.clone() if total is grad else total


@circular_pad_backward.register_fake
def _(grad: Tensor, pads: Sequence[int]) -> Tensor:
    return _resized(grad, pads, -1)


def _setup(ctx: Any, inputs: tuple[Tensor, Sequence[int]], output: Tensor) -> None:
    ctx.pads = list(inputs[1])


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return circular_pad_backward(grad, ctx.pads), None


def _gradient_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return circular_pad(grad, ctx.pads), None


circular_pad.register_autograd(_gradient, setup_context=_setup)
circular_pad_backward.register_autograd(_gradient_backward, setup_context=_setup)
