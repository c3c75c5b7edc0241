"""`OpCall`: one op of the graph as a rule builder reads it, arguments by name and global shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.ir.joint import map_operands, node_values, tensor_operands
from passes.ir.op_schema import named_arguments
from passes.rules.core.rule import OpRule

__all__ = ["Builder", "OpCall", "TensorInfo", "describe"]


@dataclass(frozen=True)
class TensorInfo:
    """Global shape and dtype of an operand or a result; `position` counts operands, or results."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class OpCall:
    """arguments: by schema name, defaults filled in, tensors replaced by their `TensorInfo`.
    operands:  the tensors in the order of `tensor_operands(node)`.
    results:   one entry per result; None for a result the op was told not to compute.
    """

    target: Callable[..., Any]
    arguments: Mapping[str, Any]
    operands: tuple[TensorInfo, ...]
    results: tuple[TensorInfo | None, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def tensor(self, name: str) -> TensorInfo:
        """The operand passed as argument `name`."""
        value = self.arguments[name]
        assert isinstance(value, TensorInfo), f"{self.target}: argument {name!r} is {value!r}, not a tensor"
        return value

    @property
    def result(self) -> TensorInfo:
        """Result 0."""
        first = self.results[0]
        assert first is not None
        return first

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the operands, then of the results (() for one not computed)."""
        return [t.shape if t is not None else () for t in (*self.operands, *self.results)]


Builder = Callable[[OpCall], OpRule]
"""Makes the rule of one op from its shapes and arguments."""


def describe(node: fx.Node) -> OpCall:
    """Read `node` (its operands and itself carry meta "val", global shapes)."""
    operands = tuple(_info(i, operand.meta["val"]) for i, operand in enumerate(tensor_operands(node)))
    args, kwargs = map_operands(node, operands)
    results = tuple(None if v is None else _info(i, v) for i, v in enumerate(node_values(node)))
    target: Any = node.target
    return OpCall(target, named_arguments(target, args, kwargs), operands, results)


def _info(position: int, value: Any) -> TensorInfo:
    if not isinstance(value, torch.Tensor):  # a number computed in the graph: nothing to split
        return TensorInfo(position, (), torch.float64 if isinstance(value, float) else torch.int64)
    return TensorInfo(position, tuple(int(n) for n in value.shape), value.dtype)
