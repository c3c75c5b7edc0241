"""Outputs that a script may change in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["own_outputs"]


def own_outputs(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`outputs`, the call's one large tensor among them as no view.

    Autograd lets nobody change in place a view that a custom function made, and whether a program ends in one is its
    own affair: a cut of what was gathered is one. It still counts as changed with what was saved for the backward.
    Where there are several large outputs, or an input lies in the same memory, views stay: in the model they may be of
    each other, and what is changed in one would be missing in the other.
    """
    large = [output for output in outputs if output.numel() > 1]
    if len(large) != 1 or not large[0]._is_view():
        return tuple(outputs)
    memory = large[0].untyped_storage()._cdata
    if any(tensor.untyped_storage()._cdata == memory for tensor in inputs):
        return tuple(outputs)
    return tuple(output.detach() if output is large[0] else output for output in outputs)
