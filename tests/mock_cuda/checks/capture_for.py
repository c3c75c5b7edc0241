"""The canonical graph of a model for a mesh of GPUs: the one place that knows how to ask for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoshard.planning import canonical_capture
from passes.capture import Captured

__all__ = ["captured_for_cuda"]


def captured_for_cuda(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Captured:
    """For ranks on cuda:0; wherever the tensors are."""
    return canonical_capture(model, args, kwargs or {}, device=torch.device("cuda", 0))
