"""`torch.tensor` of a list of tensors: torch reads their values, which those that are traced do not have."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["LISTS"]


def tensor(data: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False, **options: Any) -> Tensor:
    """The same arguments and result as `torch.tensor`."""
    leaves = pytree.tree_leaves(data) if isinstance(data, (list, tuple)) else []
    if requires_grad or not any(isinstance(leaf, Tensor) for leaf in leaves):
        return torch.tensor(data, dtype=dtype, requires_grad=requires_grad, **options)
    parts = [leaf.detach() if isinstance(leaf, Tensor) else torch.tensor(leaf) for leaf in leaves]
    kind = dtype or reduce(torch.promote_types, [part.dtype for part in parts])
    return _stacked(data, iter([part.to(kind) for part in parts]))


def _stacked(data: Any, parts: Any) -> Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(part, parts) for part in data])
    return next(parts)


LISTS: dict[Any, Callable[..., Any]] = {torch.tensor: tensor}
"""Torch functions to answer otherwise while tracing."""
