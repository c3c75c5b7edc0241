"""Ops that cut, join or pad dims: those dims are whole, the others pass through."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import torch
from torch import fx

from passes.joint import node_value, tensor_operands
from passes.rules.assemble import assemble
from passes.rules.emit import again, argument, constant, offset, sized
from passes.rules.opcall import Builder, OpCall, TensorInfo
from passes.rules.pointwise import linear_sets
from passes.rules.rule import Dim, LocalContext, Localize, OpRule

__all__ = [
    "cat",
    "cut_backward",
    "diagonal_part",
    "pad",
    "roll",
    "select",
    "select_backward",
    "slice_",
    "split",
    "stack",
    "unbind",
]


def _through(
    call: OpCall,
    changed: Collection[int],
    linear: tuple[frozenset[int], ...],
    localize: Localize | None = None,
) -> OpRule:
    """Dims in `changed` are whole, in operands and results apart; all others are shared."""

    def named(info: TensorInfo | None, letter: str) -> tuple[Dim, ...]:
        assert info is not None
        return tuple((f"{letter}{info.position}_{i}" if i in changed else f"d{i}",) for i in range(info.ndim))

    operands = [named(operand, "o") for operand in call.operands]
    results = [named(result, "r") for result in call.results]
    whole = {f for tensor in (*operands, *results) for dim in tensor for f in dim if not f.startswith("d")}
    return assemble(call.shapes, operands, results, whole=whole, linear=linear, localize=localize)


def slice_(call: OpCall) -> OpRule:
    """a n -> a m: a dim of which a part is taken is whole; one taken in full is not."""
    ndim, dim = call.result.ndim, call["dim"] % call.result.ndim
    full = call.operands[0].shape == call.result.shape and (call["step"] or 1) == 1
    linear = linear_sets(call, "self")
    if full:
        return _through(call, (), linear, _take_all)
    return _through(call, (dim,), linear) if ndim else _through(call, (), linear)


def _take_all(ctx: LocalContext) -> fx.Node:
    return again(ctx, start=0, end=sys.maxsize)


def cut_backward(size: str = "input_sizes") -> Builder:
    """slice_backward: a m -> a n, zeros around the slice; the sliced dim is whole."""

    def build(call: OpCall) -> OpRule:
        dim = call["dim"] % call.result.ndim
        return _through(call, (dim,), linear_sets(call, "grad_output"), sized(size))

    return build


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


def cat(call: OpCall) -> OpRule:
    """a n1, a n2 -> a m"""
    dim = call["dim"] % call.result.ndim
    if any(operand.ndim != call.result.ndim for operand in call.operands):  # torch lets shape (0,) join in
        return _through(call, range(call.result.ndim), ())
    return _through(call, (dim,), linear_sets(call, "tensors"))


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


def split(call: OpCall) -> OpRule:
    """a n -> a n1, a n2"""
    return _through(call, (call["dim"] % call.operands[0].ndim,), linear_sets(call, "self"))


def unbind(call: OpCall) -> OpRule:
    """a n -> a, a"""
    ndim, dim = call.operands[0].ndim, call["dim"] % call.operands[0].ndim
    operand = [("n",) if i == dim else (f"d{i}",) for i in range(ndim)]
    result = [name for name in operand if name != ("n",)]
    return assemble(
        call.shapes, [operand], [result] * len(call.results), whole=["n"], linear=linear_sets(call, "self")
    )


def pad(call: OpCall) -> OpRule:
    """constant_pad_nd: padded dims are whole; linear if the padding is 0."""
    padded = _padded(call.operands[0].ndim, call["pad"])
    return _through(call, padded, linear_sets(call, "self value"))


def _padded(ndim: int, amounts: Sequence[int]) -> list[int]:
    """Dims that `pad` touches: its pairs count from the last dim, and the two of a pair may cancel."""
    return [ndim - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0]


def roll(call: OpCall) -> OpRule:
    """Rolled dims are whole; without "dims" the tensor rolls as one, so all are."""
    ndim = call.operands[0].ndim
    rolled = [d % ndim for d in call["dims"]] or range(ndim)
    return _through(call, rolled, linear_sets(call, "self"))


def diagonal_part(ctx: LocalContext) -> fx.Node:
    """tril, triu on dims "r c": they compare col - row with `diagonal`, in global coordinates."""
    return again(ctx, diagonal=argument(ctx, "diagonal") + offset(ctx, "r") - offset(ctx, "c"))
