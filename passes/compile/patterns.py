"""Ops that follow one another, written as they are called: `mul(CENTER, rsqrt(VARIANCE))`, and found in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.ir.op_traits import is_cast, op_kind

aten = torch.ops.aten
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)


@dataclass(frozen=True, eq=False)
class Pattern:
    """An op with its arguments: patterns, lists of them, or what must stand there. The same pattern, met twice, is the
    same node, or an equal number. A creation or a cast may say more by name.

    target: None: anything. other: what may be there instead; the one here is tried first.
    """

    target: Any = None
    args: tuple[Any, ...] = ()
    other: Pattern | None = None

    def __or__(self, other: Pattern) -> Pattern:
        return Pattern(self.target, self.args, other)


Bound = Mapping[Pattern, Any]
"""What was found for each pattern."""


def op(target: Any) -> Callable[..., Pattern]:
    """`target`, to be written as a call."""
    return lambda *args: Pattern(target, args)


def matches(pattern: Any, value: Any, bound: Bound) -> Iterator[Bound]:
    """Every way in which `value` is the pattern, beside what is `bound` already."""
    if isinstance(pattern, (list, tuple)):
        if isinstance(value, (list, tuple)):
            yield from _all(pattern, value, bound)
    elif not isinstance(pattern, Pattern) or pattern in bound:
        same = bound[pattern] if isinstance(pattern, Pattern) else pattern
        if value == same:  # nodes equal themselves alone
            yield bound
    else:
        for found in _called(pattern, value, bound):
            yield {**found, pattern: value}
        if pattern.other is not None:
            for found in matches(pattern.other, value, bound):
                yield {**found, pattern: value}


def _called(pattern: Pattern, value: Any, bound: Bound) -> Iterator[Bound]:
    if pattern.target is None:
        yield bound
    elif isinstance(value, fx.Node) and value.target is pattern.target and _says_no_more(value):
        yield from _all(pattern.args, value.args, bound)
        if pattern.target in _COMMUTATIVE:
            yield from _all(pattern.args, value.args[::-1], bound)


def _says_no_more(node: fx.Node) -> bool:
    return not node.kwargs or is_cast(node) or op_kind(node) == "creation"


def _all(patterns: Sequence[Any], values: Sequence[Any], bound: Bound) -> Iterator[Bound]:
    if len(patterns) != len(values):
        return
    if not patterns:
        yield bound
        return
    for found in matches(patterns[0], values[0], bound):
        yield from _all(patterns[1:], values[1:], found)


def is_read_elsewhere(patterns: Sequence[Pattern], *bounds: Bound) -> bool:
    """Whether an op that is none of those found reads what was found for one of `patterns`."""
    inside = {node for bound in bounds for node in bound.values() if isinstance(node, fx.Node)}
    inner = {bound[pattern] for bound in bounds for pattern in patterns if pattern in bound}
    return any(user not in inside for node in inner for user in node.users)
