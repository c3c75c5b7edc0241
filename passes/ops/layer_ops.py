"""Layers as operators: `autoshard::circular_pad`, padding with what is at the other end, and `autoshard::ctc_loss`.

Torch takes `F.pad(mode="circular")` apart into copies, of which nothing can tell any more that the dim is a circle.
Where the dim is split in space a rank reads its padding from its neighbours with the rest, across the ends too.

    circular_pad(x, pads)              [n, ...] -> [before + n + after, ...]
    circular_pad_backward(grad, pads)  [before + n + after, ...] -> [n, ...]

pads: (before, after) of the last dim first, as `aten::constant_pad_nd` has them, for as many dims as one likes; none is
negative or above the dim's length.

The loss and its gradient are torch's kernels, with results of one shape whatever the lengths are.
log_probs [t, n, c], targets [n, s], both lengths [n]; of a row of targets, what lies beyond its length is not read.
Torch's own op also gives the forward's table, of which the part beyond the lengths is left unwritten; the gradient
computes it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.ops.registration import differentiable_operator, differentiated_by

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


def _pad(x: Tensor, pads: Sequence[int]) -> Tensor:
    whole = x
    for dim, before, after in _padded(x.ndim, pads):
        length = whole.shape[dim]
        ends = aten.slice.Tensor(whole, dim, length - before), aten.slice.Tensor(whole, dim, 0, after)
        whole = torch.cat([ends[0], whole, ends[1]], dim)
    return whole.clone() if whole is x else whole


def _pad_backward(grad: Tensor, pads: Sequence[int]) -> Tensor:
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


circular_pad = differentiable_operator(
    "circular_pad(Tensor x, SymInt[] pads) -> Tensor", _pad, lambda x, pads: _resized(x, pads, 1)
)
circular_pad_backward = differentiable_operator(
    "circular_pad_backward(Tensor grad, SymInt[] pads) -> Tensor",
    _pad_backward,
    lambda grad, pads: _resized(grad, pads, -1),
)
differentiated_by(circular_pad, circular_pad_backward, slice(1, 1))
differentiated_by(circular_pad_backward, circular_pad, slice(1, 1))


_PROBLEM = """Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank,
    bool zero_infinity"""


def _backward(grad: Tensor, *problem: Any) -> Tensor:
    tensors, options = problem[:4], problem[4:]
    found = aten._ctc_loss.Tensor(*problem)
    return aten._ctc_loss_backward.Tensor(grad, *tensors, *found, *options)


ctc_loss = differentiable_operator(
    f"ctc_loss({_PROBLEM}) -> Tensor",
    lambda *problem: aten._ctc_loss.Tensor(*problem)[0],
    lambda log_probs, *problem: log_probs.new_empty(log_probs.shape[1]),
)
"""[n]: the loss of each sequence, infinite where it is too short for its targets."""
ctc_loss_backward = differentiable_operator(
    f"ctc_loss_backward(Tensor grad, {_PROBLEM}) -> Tensor",
    _backward,
    lambda grad, log_probs, *problem: log_probs.new_empty(log_probs.shape),
)
"""[t, n, c]: the gradient of `ctc_loss` with respect to log_probs."""
differentiated_by(ctc_loss, ctc_loss_backward, slice(0, 4))
ctc_loss.register_autocast("cpu", torch.float32)  # as torch's own is
