"""Tensors made of tensors' values, and arrays of NumPy's: `torch.tensor([a.max(), 2])`, `np.asarray(x)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.ir.torch_tracing import tracing_suspended

__all__ = ["LISTS"]


def tensor(
    data: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False, **options: Any
) -> Tensor:
    """The same arguments and result as `torch.tensor`, which reads values that traced tensors do not have."""
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


def array(x: Tensor, *args: Any, dtype: Any = None, force: bool = False) -> Any:
    """The values are asked for. Nothing can be written to them, since no tensor would have it."""
    if type(x) is Tensor or (x.requires_grad and not force):
        return Tensor.numpy(x, force=force)
    values = x.tolist()
    with tracing_suspended():
        found = torch.tensor(values, dtype=x.dtype).reshape(x.shape).numpy()
    found.flags.writeable = False
    wanted = args[0] if args else dtype
    return found if wanted is None else found.astype(wanted, copy=False)


LISTS: dict[Any, Callable[..., Any]] = {torch.tensor: tensor, Tensor.numpy: array, Tensor.__array__: array}
"""Torch functions to answer otherwise while tracing."""
