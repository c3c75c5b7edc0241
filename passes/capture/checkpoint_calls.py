"""`torch.utils.checkpoint` with `use_reentrant=True`, its default, as the call it stands for.

Its own autograd function runs the backward of what it holds by `.backward()` from within a backward, which no trace can
hold. What is computed again is the plan's to say, so nothing is lost by running the function once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.ir.torch_tracing import replaced_attribute

__all__ = ["reentrant_checkpoints_called"]


class _Called:
    """In place of `torch.utils.checkpoint.CheckpointFunction`: the same arguments, results and gradients."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        torch.utils.checkpoint.check_backward_validity(args)  # warns where there will be no gradients
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():
                return function(*args)
        result = function(*args)
        if isinstance(result, tuple):
            return tuple(map(_differentiable, result))
        return _differentiable(result)


def _differentiable(result: Any) -> Any:
    """Tensors in lists, dicts and the like get no gradient: an autograd function does not see them."""
    return result if isinstance(result, Tensor) else pytree.tree_map_only(Tensor, Tensor.detach, result)


def reentrant_checkpoints_called() -> AbstractContextManager[None]:
    """Inside, reentrant checkpoints are calls of what they hold."""
    return replaced_attribute(torch.utils.checkpoint, "CheckpointFunction", _Called)
