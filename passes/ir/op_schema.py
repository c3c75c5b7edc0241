"""The arguments that ops take, by name, and what of a call decides its rule and its seconds."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from passes.ir.fake_calls import looks
from passes.ir.joint import node_values


@dataclass(frozen=True)
class SchemaArgument:
    """One argument of an op's schema."""

    name: str
    default: Any


@cache
def schema_arguments(op: Any) -> tuple[SchemaArgument, ...]:
    """Arguments of an OpOverload in order; () for a target without a schema. `_schema` since torch 1.9."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return ()
    return tuple(
        SchemaArgument(a.name, a.default_value if a.has_default_value() else None) for a in schema.arguments
    )


def named_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the op's schema; defaults where they are not given."""
    given = zip((argument.name for argument in schema_arguments(op)), args, strict=False)
    return {**{a.name: a.default for a in schema_arguments(op)}, **kwargs, **dict(given)}


def slice_ends(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Where `x[start:end]` begins and ends in a dim of `size`, which may be a symbol as they may."""

    def within(at: int) -> int:
        return min(at, size) if at >= 0 else max(at + size, 0)

    low = 0 if start is None else within(start)
    return low, size if end is None or end == sys.maxsize else max(within(end), low)


def written_arguments(key: str) -> tuple[str, ...]:
    """Arguments that "namespace::op.overload" writes to; of "namespace::op" those that every overload writes to.

    () for an op that does not exist yet. `is_write` since torch 1.9.
    """
    namespace, _, rest = key.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    names = [] if packet is None else packet.overloads()
    ops = [getattr(packet, n) for n in names if overload in ("", n)]
    written = [[a.name for a in op._schema.arguments if a.is_write] for op in ops]
    return tuple(written[0]) if written and all(written) else ()


def op_signature(node: fx.Node) -> Hashable:
    """Equal for two ops if all that a rule's builder and the prices read is: the op, every tensor operand and result in
    shape and dtype, and every other argument in type, value and place. Names, strides and readers do not count.
    """
    return node.target, looks((node.args, node.kwargs, node_values(node)), _shape)


def _shape(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.dtype
