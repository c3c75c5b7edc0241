"""What of an op decides its rule and its seconds: layers repeat, and what is known of one need not be found again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from passes.ir.joint import node_values

__all__ = ["op_signature"]


def op_signature(node: fx.Node) -> Hashable:
    """Equal for two ops if all that a rule's builder and the prices read is: the op, every tensor operand and result in
    shape and dtype, and every other argument in type, value and place. Names, strides and readers do not count.
    """
    results = tuple(_look(value) for value in node_values(node))
    return node.target, _look(node.args), _look(node.kwargs), results


def _look(argument: Any) -> Hashable:
    if isinstance(argument, fx.Node):
        argument = argument.meta["val"]
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.dtype
    if isinstance(argument, (tuple, list)):
        return type(argument).__name__, *map(_look, argument)
    if isinstance(argument, dict):
        return tuple((key, _look(item)) for key, item in argument.items())
    return type(argument), argument
