"""Ops that reduce dims, and ops that need dims whole (sort, cumsum)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from passes.rules.core.assemble import assemble, linear_sets
from passes.rules.core.emit_op import empty_safe
from passes.rules.core.rule import Builder, Dim, OpCall, OpRule

__all__ = ["along", "extremum", "histogram", "reduce", "reduce_whole", "transform"]


def reduce(op: str, *linear: str) -> Builder:
    """a k -> a; k: sum, max or min. Reduced dims: argument "dim", all if there is none or it is empty."""

    def build(call: OpCall) -> OpRule:
        operand, result, gone = _reduced(call)
        return assemble(
            call.shapes,
            [operand],
            [result],
            reductions=dict.fromkeys(gone, op),
            linear=linear_sets(call, *linear),
        )

    return build


def reduce_whole(call: OpCall) -> OpRule:
    """a k -> a; k: whole. For reductions that parts do not add up to: argmax, prod."""
    operand, result, gone = _reduced(call)
    return assemble(call.shapes, [operand], [result] * len(call.results), whole=gone)


def extremum(op: str) -> Builder:
    """amax, amin: "max", "min". They refuse to reduce nothing."""
    return empty_safe(reduce(op))


def histogram(call: OpCall) -> OpRule:
    """*x -> n; *x: sum. With min = max torch takes the range from the values, so all are needed."""
    operand = tuple((f"d{i}",) for i in range(call.operands[0].ndim))
    factors = [f for dim in operand for f in dim]
    given = call["min"] != call["max"]
    return assemble(
        call.shapes,
        [operand],
        [[("n",)]],
        reductions=dict.fromkeys(factors, "sum") if given else {},
        whole=["n"] if given else ["n", *factors],
    )


def along(argument: str = "dim", *linear: str) -> Builder:
    """... -> ..., with the dims named by `argument` whole: cumsum, sort, topk.

    A result may have another length in those dims (topk).
    """

    def build(call: OpCall) -> OpRule:
        ndim = call.operands[0].ndim
        whole = {d % ndim for d in _as_list(call[argument])} if ndim else set()
        operand = tuple((f"w{i}" if i in whole else f"d{i}",) for i in range(ndim))
        result = tuple((f"r{i}" if i in whole else f"d{i}",) for i in range(ndim))
        return assemble(
            call.shapes,
            [operand] * len(call.operands),
            [result] * len(call.results),
            whole=[f"{letter}{i}" for i in whole for letter in "wr"],
            linear=linear_sets(call, *linear),
        )

    return build


def _reduced(call: OpCall) -> tuple[tuple[Dim, ...], tuple[Dim, ...], list[str]]:
    """(dims of the operand, dims of a result, the factors that are reduced)."""
    ndim = call.operands[0].ndim
    given = call.arguments.get("dim")
    gone = range(ndim) if given in (None, [], ()) or ndim == 0 else [d % ndim for d in _as_list(given)]
    keepdim = call.result.ndim == ndim
    operand = tuple((f"d{i}",) for i in range(ndim))
    result = tuple(() if i in gone else (f"d{i}",) for i in range(ndim) if keepdim or i not in gone)
    return operand, result, [f"d{i}" for i in gone]


def _as_list(value: Any) -> list[int]:
    return [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]


_SHARED = along("dim")


@empty_safe
def transform(call: OpCall) -> OpRule:
    """... -> ...; those in `dim` whole, with another length in the result where half a spectrum stands for all.

    Linear: also from complex to real numbers, where other ops would lose a part of every summand.
    """
    return replace(_SHARED(call), linear=(frozenset({0}),))
