"""Ops that regroup dims, and those that make tensors: every dim of the result may be split, each rank with its part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.rules.core.assemble import assemble, broadcast_dims, linear_sets
from passes.rules.core.emit_op import again, argument, aten, offset
from passes.rules.core.rule import Dim, LocalContext, Localize, OpCall, OpRule

__all__ = [
    "arange",
    "collect",
    "common_factors",
    "expand",
    "full",
    "in_rows",
    "iota",
    "permute",
    "piece",
    "uniform",
    "view",
]

Grouping = list[Dim]


def view(call: OpCall) -> OpRule:
    """(a b) c -> a (b c): the factors that both shapes have in common, major first.

    Locally a reshape, for a shard that came out of a collective may lie in memory in another order.
    """
    source, target, sizes, whole = common_factors(call.operands[0].shape, call.result.shape)
    return assemble(
        call.shapes,
        [source],
        [target],
        sizes=sizes,
        whole=whole,
        linear=linear_sets(call, "self"),
        localize=_reshape,
    )


def _reshape(ctx: LocalContext) -> fx.Node:
    return ctx.call(aten.reshape.default, argument(ctx, "self"), ctx.result_shape())


def common_factors(
    source: Sequence[int], target: Sequence[int]
) -> tuple[Grouping, Grouping, dict[str, int], list[str]]:
    """Factor two shapes of one size: (dims of source, dims of target, sizes, whole factors).

    Dims are cut into groups where the products of both shapes agree; in a group, the greatest
    common divisor of the leading parts is a factor of both, as long as there is one above 1. What
    then remains (3 4 against 2 6) is whole.

        (6, 4) -> (24,)    a b -> (a b)
        (6, 4) -> (4, 6)   (a w) x -> (a y) z     a = 2, the others whole
    """
    dims_of: tuple[Grouping, Grouping] = ([() for _ in source], [() for _ in target])
    sizes: dict[str, int] = {}
    whole: list[str] = []

    def new(size: int) -> str:
        sizes[name := f"f{len(sizes)}"] = size
        return name

    for left, right in _groups(source, target):
        rest = [[(i, source[i]) for i in left], [(j, target[j]) for j in right]]
        while rest[0] and rest[1]:
            common = math.gcd(rest[0][0][1], rest[1][0][1])
            if common == 1:
                break
            factor = new(common)
            for side in (0, 1):
                at, length = rest[side][0]
                dims_of[side][at] += (factor,)
                rest[side][0] = (at, length // common)
                if length == common:
                    rest[side].pop(0)
        for side in (0, 1):
            for at, length in rest[side]:
                dims_of[side][at] += (factor := new(length),)
                whole.append(factor)
    return *dims_of, sizes, whole


def _groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of dims with equal products, dims of size 1 left out."""
    left = [i for i, n in enumerate(source) if n != 1]
    right = [j for j, n in enumerate(target) if n != 1]
    groups: list[tuple[list[int], list[int]]] = []
    while left:
        a, b = [left.pop(0)], [right.pop(0)]
        size_a, size_b = source[a[0]], target[b[0]]
        while size_a != size_b:
            if size_a < size_b:
                a.append(left.pop(0))
                size_a *= source[a[-1]]
            else:
                b.append(right.pop(0))
                size_b *= target[b[-1]]
        groups.append((a, b))
    return groups


def permute(call: OpCall) -> OpRule:
    """a b c -> c a b"""
    operand = broadcast_dims(call.result.ndim, call.result.ndim)
    reordered = [operand[d] for d in call["dims"]]
    return assemble(call.shapes, [operand], [reordered], linear=linear_sets(call, "self"))


def in_rows(ctx: LocalContext) -> fx.Node:
    """Localize: what torch reads by a view must lie as in a tensor of its own, which a shard out of a collective may
    not."""
    rows = ctx.call(aten.clone.default, argument(ctx, "self"), memory_format=torch.contiguous_format)
    return again(ctx, self=rows)


def expand(call: OpCall) -> OpRule:
    """1 b -> a b: the new factor may be split, each rank makes its part."""
    ndim = call.result.ndim
    return assemble(
        call.shapes,
        [broadcast_dims(call.operands[0].ndim, ndim)],
        [broadcast_dims(ndim, ndim)],
        linear=linear_sets(call, "self"),
        localize=lambda ctx: again(ctx, size=ctx.result_shape()),
    )


def full(call: OpCall) -> OpRule:
    """-> a b"""
    return _made(call, lambda ctx: again(ctx, size=ctx.result_shape()))


def _made(call: OpCall, localize: Localize) -> OpRule:
    operands = [((),) * operand.ndim for operand in call.operands]
    result = broadcast_dims(call.result.ndim, call.result.ndim)
    return assemble(call.shapes, operands, [result], localize=localize)


def arange(call: OpCall) -> OpRule:
    """Splits if start and step are whole numbers: only then is a part's start exact."""
    exact = all(v == int(v) for v in (call["start"], call["step"]))
    return assemble(call.shapes, [], [[("d0",)]], whole=() if exact else ["d0"], localize=_arange)


def _arange(ctx: LocalContext) -> fx.Node:
    """[start + lo * step, start + hi * step): int(...) keeps an integer range an integer range."""
    if not ctx.is_split("d0"):
        return again(ctx)
    start, step = (int(argument(ctx, name)) for name in ("start", "step"))
    low, high = ctx.interval("d0")
    dtype = node_value(ctx.node).dtype
    return again(ctx, start=start + low * step, end=start + high * step, step=step, dtype=dtype)


def iota(call: OpCall) -> OpRule:
    """prims.iota(length, start=, step=, ...)"""
    return assemble(call.shapes, [], [[("d0",)]], localize=_iota)


def _iota(ctx: LocalContext) -> fx.Node:
    low = offset(ctx, "d0")
    start = argument(ctx, "start") + low * argument(ctx, "step")
    return again(ctx, length=ctx.result_shape()[0], start=start)


def uniform(call: OpCall) -> OpRule:
    """Elements are numbered in global coordinates, so a part is the same numbers wherever it is made."""
    return _made(call, _uniform)


def _uniform(ctx: LocalContext) -> fx.Node:
    start = [begin + offset(ctx, f"d{i}") for i, begin in enumerate(argument(ctx, "offset"))]
    return again(ctx, shape=ctx.result_shape(), offset=start)


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
