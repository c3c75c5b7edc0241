"""`F.embedding(sparse=True)`, `F.embedding_bag(sparse=True)` and `gather(sparse_grad=True)` with dense gradients.

A sparse gradient cannot be traced. Its values are those of the dense one, so every optimizer that takes both makes
the same step; `torch.optim.SparseAdam`, which takes sparse gradients only, says so itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["DENSE_GRADIENTS"]


def _dense(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs)
        given.arguments.pop("sparse", None)
        return function(**given.arguments)

    return call


def _dense_gather(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, sparse_grad=False, **kwargs: function(*args, **kwargs)


DENSE_GRADIENTS: dict[Any, Callable[..., Any]] = {
    **{function: _dense(function) for function in (F.embedding, F.embedding_bag)},
    **{function: _dense_gather(function) for function in (torch.gather, Tensor.gather)},
}
"""Torch functions to answer otherwise while tracing."""
