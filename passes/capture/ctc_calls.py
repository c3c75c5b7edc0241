"""`F.ctc_loss` as `autoshard::ctc_loss`, whose targets are padded: [n, s].

Targets in a row, those of one sequence behind those of another, are put there by the lengths. What a mask of [n, s]
has chosen of padded targets, `F.ctc_loss(p, labels[keep], input_lengths, keep.sum(-1))`, moves to the front of its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.capture.row_apply import unknown
from passes.capture.row_index import mask_key
from passes.capture.rows import Rows, rows_in
from passes.ops.ctc_loss import ctc_loss as op

__all__ = ["LOSSES"]

_REDUCTIONS = ("none", "mean", "sum")


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The same arguments and result as `torch.nn.functional.ctc_loss`, and as `torch.ctc_loss`."""
    if isinstance(reduction, int):
        reduction = _REDUCTIONS[reduction]
    for rows in rows_in((log_probs, input_lengths, target_lengths)):
        raise unknown("ctc_loss", rows.choice)
    if reduction not in _REDUCTIONS or log_probs.dim() not in (2, 3) or not 0 <= blank < log_probs.shape[-1]:
        shape = list(log_probs.shape)
        raise ValueError(f"ctc_loss: log_probs of shape {shape}, reduction={reduction!r}, blank={blank}")
    probs = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    inputs, lengths = (_lengths(given, probs.shape[1]) for given in (input_lengths, target_lengths))
    padded, read = _padded(targets, lengths, probs)
    each = op(probs, padded, inputs, read, blank, zero_infinity)
    if zero_infinity:
        each = torch.where(each == float("inf"), 0.0, each)
    if reduction == "mean":
        return (each / lengths.clamp(min=1)).mean()
    if reduction == "sum":
        return each.sum()
    return each if log_probs.dim() == 3 else each.squeeze(0)


def _lengths(given: Any, count: int) -> Tensor:
    lengths = given if isinstance(given, Tensor) else torch.tensor(given)
    if lengths.is_floating_point() or lengths.numel() != count:
        raise ValueError(f"ctc_loss: lengths must be {count} integers, one for each sequence")
    return lengths if lengths.shape == (count,) else lengths.reshape(count)


def _padded(targets: Tensor, lengths: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Targets [n, s], and how many of each row are read."""
    steps, count = probs.shape[:2]
    if not isinstance(targets, Rows):
        if targets.dim() == 2 or count == 1:
            return targets.reshape(count, -1), lengths
        _check(lengths, targets.numel())
        return _cut(targets, lengths, steps)
    choice = targets.choice
    flat, valid = targets.padded, choice.valid
    if flat.dim() != 1:
        raise unknown("ctc_loss", choice)
    if len(choice.shape) == 2 and choice.shape[0] == count and _counts(lengths, choice.key):
        return _in_front(flat.reshape(choice.shape), valid.reshape(choice.shape)), lengths
    _check(lengths, valid.sum())
    return _cut(_in_front(flat, valid), lengths, steps)


def _counts(lengths: Tensor, chosen: Any) -> bool:
    """Whether they are known to be how many of each row the mask of [n, s] has chosen."""
    return mask_key(lengths) in (("sum", 0, chosen, "-1"), ("sum", 0, chosen, "1"))


def _in_front(x: Tensor, chosen: Tensor) -> Tensor:
    """Those that are chosen, in their order, before the others, along the last dim."""
    return x.gather(-1, chosen.logical_not().to(torch.uint8).argsort(dim=-1, stable=True))


def _check(lengths: Tensor, given: Any) -> None:
    if lengths.sum() != given:
        raise RuntimeError(
            "ctc_loss: target_lengths do not add up to the number of targets, which are in a row"
        )


def _cut(targets: Tensor, lengths: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """A row of targets as one for each sequence. With more of them than steps the loss is infinite, of however many."""
    most = min(targets.shape[0], steps + 1)
    places = (lengths.cumsum(0) - lengths).unsqueeze(1) + torch.arange(most)
    padded = F.pad(targets, (0, 1))[places.clamp(0, targets.shape[0])]
    return padded, lengths.clamp(max=most)


LOSSES: dict[Any, Callable[..., Any]] = {F.ctc_loss: ctc_loss, torch.ctc_loss: ctc_loss}
"""Torch functions to answer otherwise while tracing."""
