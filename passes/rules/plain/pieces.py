"""Where tensors enter and leave what runs piece after piece: the dim cut in time is whole, the others are shared."""

from __future__ import annotations

from passes.rules.core.assemble import assemble
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import Dim, OpRule
from passes.rules.plain.pointwise import linear_sets

__all__ = ["collect", "piece"]


def piece(call: OpCall) -> OpRule:
    """a b -> a' b: of the dim that is cut, every rank has all before and after."""
    return _passing(call, call["dim"])


def collect(call: OpCall) -> OpRule:
    """a b -> a b, summed over the pieces in the layout of its operand; a' b -> a b where they are put side by side."""
    return _passing(call, call["dim"] if call["how"] == "cat" else None)


def _passing(call: OpCall, cut: int | None) -> OpRule:
    dims: list[Dim] = [() if d == cut else (f"d{d}",) for d in range(call.result.ndim)]
    linear = linear_sets(call, "x") if call.arguments.get("how", "sum") in ("sum", "cat") else ()
    shapes = [tuple(1 if d == cut else n for d, n in enumerate(shape)) for shape in call.shapes]
    return assemble(shapes, [dims], [dims], linear=linear)
