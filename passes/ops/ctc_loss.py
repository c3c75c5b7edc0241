"""`autoshard::ctc_loss` and its gradient: torch's kernels, with results of one shape whatever the lengths are.

log_probs [t, n, c], targets [n, s], both lengths [n]; of a row of targets, what lies beyond its length is not read.
Torch's own op also gives the forward's table, of which the part beyond the lengths is left unwritten; the gradient
computes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.ops.registration import differentiable_operator, differentiated_by

aten = torch.ops.aten

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
