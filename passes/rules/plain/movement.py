"""Ops that take one row of a dim, or stack rows; triangles."""

from __future__ import annotations

import torch
from torch import fx

from passes.ir.joint import node_value, tensor_operands
from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again, argument, constant, offset
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import Dim, LocalContext, OpRule
from passes.rules.plain.pointwise import linear_sets

__all__ = ["diagonal_part", "select", "select_backward", "stack", "unbind"]


def select(call: OpCall) -> OpRule:
    """a v b -> a b; v: sum. The rank that has the index gives its row, the others zeros."""
    source = call.operands[0]
    dim = call["dim"] % source.ndim
    names: list[Dim] = [("v",) if i == dim else (f"d{i}",) for i in range(source.ndim)]
    summable = source.dtype != torch.bool
    return assemble(
        call.shapes,
        [names],
        [[name for name in names if name != ("v",)]],
        reductions={"v": "sum"} if summable else {},
        whole=() if summable else ("v",),
        linear=linear_sets(call, "self"),
        localize=_select,
    )


def _select(ctx: LocalContext) -> fx.Node:
    if not ctx.is_split("v"):
        return ctx.call(ctx.node.target, *ctx.args, **ctx.kwargs)  # type: ignore[arg-type]
    shape = node_value(tensor_operands(ctx.node)[0]).shape
    row = _own_row(ctx, argument(ctx, "index"), shape[argument(ctx, "dim") % len(shape)])
    return constant(ctx, 0) if row is None else again(ctx, index=row)


def select_backward(call: OpCall) -> OpRule:
    """a b -> a v b: zeros but for one row. Every rank makes its part of v."""
    dim = call["dim"] % call.result.ndim
    names: list[Dim] = [("v",) if i == dim else (f"d{i}",) for i in range(call.result.ndim)]
    return assemble(
        call.shapes,
        [[name for name in names if name != ("v",)]],
        [names],
        linear=linear_sets(call, "grad_output"),
        localize=_select_backward,
    )


def _select_backward(ctx: LocalContext) -> fx.Node:
    sizes = ctx.result_shape()
    if not ctx.is_split("v"):
        return again(ctx, input_sizes=sizes)
    shape = node_value(ctx.node).shape
    row = _own_row(ctx, argument(ctx, "index"), shape[argument(ctx, "dim") % len(shape)])
    return constant(ctx, 0) if row is None else again(ctx, input_sizes=sizes, index=row)


def _own_row(ctx: LocalContext, index: int, size: int) -> int | None:
    """Global row `index` in this rank's interval of v, or None if another rank has it."""
    low, high = ctx.interval("v")
    row = index % size
    return row - low if low <= row < high else None


def stack(call: OpCall) -> OpRule:
    """a, a -> n a"""
    dim = call["dim"] % call.result.ndim
    result = [("n",) if i == dim else (f"d{i}",) for i in range(call.result.ndim)]
    operand = [name for name in result if name != ("n",)]
    return assemble(
        call.shapes,
        [operand] * len(call.operands),
        [result],
        whole=["n"],
        linear=linear_sets(call, "tensors"),
    )


def unbind(call: OpCall) -> OpRule:
    """a n -> a, a"""
    ndim, dim = call.operands[0].ndim, call["dim"] % call.operands[0].ndim
    operand = [("n",) if i == dim else (f"d{i}",) for i in range(ndim)]
    result = [name for name in operand if name != ("n",)]
    return assemble(
        call.shapes, [operand], [result] * len(call.results), whole=["n"], linear=linear_sets(call, "self")
    )


def diagonal_part(ctx: LocalContext) -> fx.Node:
    """tril, triu on dims "r c": they compare col - row with `diagonal`, in global coordinates."""
    return again(ctx, diagonal=argument(ctx, "diagonal") + offset(ctx, "r") - offset(ctx, "c"))
