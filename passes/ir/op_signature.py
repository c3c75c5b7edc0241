"""What of an op decides its rule and its seconds: layers repeat, and what is known of one need not be found again."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import fx

from passes.ir.fake_calls import looks
from passes.ir.joint import node_values


def op_signature(node: fx.Node) -> Hashable:
    """Equal for two ops if all that a rule's builder and the prices read is: the op, every tensor operand and result in
    shape and dtype, every other argument in type, value and place, and what `MarkRows` says. Names, strides and readers
    do not count.
    """
    return node.target, node.meta.get("rows"), looks((node.args, node.kwargs, node_values(node)), _shape)


def _shape(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.dtype
