"""`F.embedding(sparse=True)` and `F.embedding_bag(sparse=True)` with gradients that are dense.

A sparse gradient cannot be traced. Its values are those of the dense one, so every optimizer that takes both makes
the same step; `torch.optim.SparseAdam`, which takes sparse gradients only, says so itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

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


DENSE_GRADIENTS: dict[Any, Callable[..., Any]] = {f: _dense(f) for f in (F.embedding, F.embedding_bag)}
"""Torch functions to answer otherwise while tracing."""
