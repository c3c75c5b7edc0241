"""Ops that reduce dims, and ops that need dims whole (sort, cumsum, softmax)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from passes.ir.joint import node_value, tensor_operands
from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again, aten, constant
from passes.rules.core.opcall import Builder, OpCall
from passes.rules.core.rule import Dim, LocalContext, Localize, OpRule
from passes.rules.plain.empty_results import empty_safe
from passes.rules.plain.pointwise import linear_sets

__all__ = ["along", "extremum", "histogram", "mean", "reduce", "reduce_whole"]


def reduce(op: str, *linear: str, localize: Localize | None = None) -> Builder:
    """a k -> a; k: sum, max or min. Reduced dims: argument "dim", all if there is none or it is empty."""

    def build(call: OpCall) -> OpRule:
        operand, result, gone = _reduced(call)
        return assemble(
            call.shapes,
            [operand],
            [result],
            reductions=dict.fromkeys(gone, op),
            linear=linear_sets(call, *linear),
            localize=localize,
        )

    return build


def reduce_whole(*linear: str) -> Builder:
    """a k -> a; k: whole. For reductions that parts do not add up to: argmax, var, prod, norms."""

    def build(call: OpCall) -> OpRule:
        operand, result, gone = _reduced(call)
        return assemble(
            call.shapes,
            [operand],
            [result] * len(call.results),
            whole=gone,
            linear=linear_sets(call, *linear),
        )

    return build


def extremum(op: str) -> Builder:
    """amax, amin: "max", "min". They refuse to reduce nothing."""
    return empty_safe(reduce(op))


def mean(*linear: str) -> Builder:
    """Each rank's mean, weighted with its share of the reduced elements."""

    def localize(ctx: LocalContext) -> fx.Node:
        operand = node_value(tensor_operands(ctx.node)[0])
        share = _share(ctx, _dims_argument(ctx.args[1:2], operand.ndim))
        if share == 0:
            return constant(ctx, 0)
        local = again(ctx)
        return local if share == 1 else ctx.call(aten.mul.Tensor, local, share)

    return reduce("sum", *linear, localize=localize)


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
    """... -> ..., with the dims named by `argument` whole: cumsum, sort, topk, softmax.

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
    gone = _dims_argument([call.arguments.get("dim")], ndim)
    keepdim = call.result.ndim == ndim
    operand = tuple((f"d{i}",) for i in range(ndim))
    result = tuple(() if i in gone else (f"d{i}",) for i in range(ndim) if keepdim or i not in gone)
    return operand, result, [f"d{i}" for i in gone]


def _dims_argument(value: Sequence[Any], ndim: int) -> list[int]:
    given = value[0] if value else None
    if given is None or (isinstance(given, (list, tuple)) and not given) or ndim == 0:
        return list(range(ndim))
    return [d % ndim for d in _as_list(given)]


def _as_list(value: Any) -> list[int]:
    return [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]


def _share(ctx: LocalContext, gone: Sequence[int]) -> float:
    """The part of the reduced elements that this rank has."""
    share = 1.0
    shape = node_value(tensor_operands(ctx.node)[0]).shape
    for i in gone:
        if ctx.is_split(f"d{i}"):
            low, high = ctx.interval(f"d{i}")
            share *= (high - low) / shape[i]
    return share
