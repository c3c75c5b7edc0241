"""`autoshard::ctc_loss` and its gradient: torch's kernels, with results of one shape whatever the lengths are.

log_probs [t, n, c], targets [n, s], both lengths [n]; of a row of targets, what lies beyond its length is not read.
Torch's own op also gives the forward's table, of which the part beyond the lengths is left unwritten; the gradient
computes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["ctc_loss", "ctc_loss_backward"]

aten = torch.ops.aten

_PROBLEM = """Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank,
    bool zero_infinity"""


@torch.library.custom_op("autoshard::ctc_loss", mutates_args=(), schema=f"({_PROBLEM}) -> Tensor")
def ctc_loss(*problem: Any) -> Tensor:
    """[n]: the loss of each sequence, infinite where it is too short for its targets."""
    return aten._ctc_loss.Tensor(*problem)[0]


@ctc_loss.register_fake
def _(log_probs: Tensor, *problem: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.custom_op(
    "autoshard::ctc_loss_backward", mutates_args=(), schema=f"(Tensor grad, {_PROBLEM}) -> Tensor"
)
def ctc_loss_backward(grad: Tensor, *problem: Any) -> Tensor:
    """[t, n, c]: the gradient of `ctc_loss` with respect to log_probs."""
    tensors, options = problem[:4], problem[4:]
    found = aten._ctc_loss.Tensor(*problem)
    return aten._ctc_loss_backward.Tensor(grad, *tensors, *found, *options)


@ctc_loss_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *problem: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 5


ctc_loss.register_autograd(_gradient, setup_context=_setup)
ctc_loss.register_autocast("cpu", torch.float32)  # as torch's own is
