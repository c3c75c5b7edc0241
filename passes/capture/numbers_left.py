"""Numbers among what a call returns and leaves, which its program has as tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from passes.capture.awaited import Number, widest
from passes.capture.trees import Instance, Mapped, Registered, Sequenced, Tree

__all__ = ["number_indices", "with_tensors"]


def number_indices(tree: Tree) -> list[int]:
    """Of the tensors that are numbers to the user."""
    if isinstance(tree, Number):
        return [tree.index]
    return [index for child in getattr(tree, "children", ()) for index in number_indices(child)]


def with_tensors(tree: Tree, value: Any) -> Any:
    """`value`, whose structure is `tree`, with a tensor for each number that is one there."""
    return _with_tensors(tree, value, {})


def _with_tensors(tree: Tree, value: Any, found: dict[int, Tensor]) -> Any:
    """found: by index, as a number may be in two places."""
    each = lambda values: [_with_tensors(*pair, found) for pair in zip(tree.children, values, strict=True)]  # type: ignore[union-attr]
    match tree:
        case Number(index):
            known = torch.tensor(value)
            return found.setdefault(index, torch.tensor(value, dtype=widest(known).dtype))
        case _ if not number_indices(tree):
            return value
        case Mapped(keys):
            return dict(zip(keys, each([value[key] for key in keys]), strict=True))
        case Sequenced(kind):
            items = each(value)
            return kind(*items) if hasattr(kind, "_fields") else kind(items)
        case Registered(kind):
            items, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
            return pytree.SUPPORTED_NODES[kind].unflatten_fn(each(items), context)
        case Instance(names=names):
            twin = copy.copy(value)
            vars(twin).update(zip(names, each([vars(value)[name] for name in names]), strict=True))
            return twin
        case _:
            return value
