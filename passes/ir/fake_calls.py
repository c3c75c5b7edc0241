"""The values of emitted nodes: fake tensors, computed once for equal calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from passes.ir.process_state import autocast_off


class FakeCalls:
    """Runs ops on the values (meta "val") of their operands; equal calls share one result.

    Calls are equal if the op is, every tensor operand in shape, strides, offset, dtype and device, and
    every other argument in type and value. A result says how a tensor looks, and not whose storage it
    shares: of a model's layers, equal but for the numbers in them, each op is run once.

    For values of one fake mode (or of none: `meta` tensors).
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def __call__(
        self, target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], mode: Any = None
    ) -> Any:
        """`target(*args, **kwargs)` with nodes standing for their values. mode: entered to run it, if given."""
        key = (target, looks(tuple(args)), looks(kwargs))
        found = self._results.get(key, _MISSING)
        if found is _MISSING:
            values = map_arg((tuple(args), kwargs), lambda node: node.meta["val"])
            with torch.no_grad(), autocast_off(), nullcontext() if mode is None else mode:
                found = self._results[key] = target(*values[0], **values[1])
        return found


_MISSING = object()


_PLAIN = frozenset({int, bool, float, str, type(None), torch.dtype})


def _whole_look(tensor: torch.Tensor) -> Hashable:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)


def looks(argument: Any, of_tensor: Callable[[torch.Tensor], Hashable] = _whole_look) -> Hashable:
    """An op's arguments with every tensor, a node's value too, exchanged for what `of_tensor` says, and every other
    value beside its type."""
    kind = type(argument)
    if kind in _PLAIN:
        return kind, argument
    if kind is fx.Node:
        argument = argument.meta["val"]
    if isinstance(argument, torch.Tensor):
        return of_tensor(argument)
    if isinstance(argument, (tuple, list)):
        return type(argument).__name__, *[looks(item, of_tensor) for item in argument]
    if isinstance(argument, dict):
        return tuple((key, looks(item, of_tensor)) for key, item in argument.items())
    return type(argument), argument
