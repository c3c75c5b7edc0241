"""Ops that regroup, make and reduce dims, and those that need dims whole (sort, cumsum, Fourier transforms).

Of what is made every dim may be split: each rank makes its part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.rules.core.assemble import (
    again,
    argument,
    assemble,
    aten,
    broadcast_dims,
    empty_safe,
    linear_sets,
    offset,
    rule_of,
)
from passes.rules.core.rule import Builder, Dim, LocalContext, Localize, OpCall, OpRule

Grouping = list[Dim]


def view(call: OpCall) -> OpRule:
    """(a b) c -> a (b c): the factors that both shapes have in common, major first.

    Locally a reshape, for a shard that came out of a collective may lie in memory in another order.
    """
    source, target, sizes, whole = common_factors(call.operands[0].shape, call.result.shape)
    return rule_of(
        call,
        [source],
        [target],
        sizes=sizes,
        whole=whole,
        linear="self",
        localize=lambda ctx: ctx.call(aten.reshape.default, argument(ctx, "self"), ctx.result_shape()),
    )


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
            common = _gcd(rest[0][0][1], rest[1][0][1])
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


def _gcd(a: int, b: int) -> int:
    """A multiple first: of symbolic sizes nothing else is known without their values."""
    return b if a % b == 0 else a if b % a == 0 else math.gcd(a, b)


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
    operand = broadcast_dims(call.result.ndim)
    reordered = [operand[d] for d in call["dims"]]
    return rule_of(call, [operand], [reordered], linear="self")


def other_dtype(call: OpCall) -> OpRule:
    """a b -> a b, the same bytes. Of elements of another size the last dim is whole."""
    operand = broadcast_dims(call.result.ndim)
    if call.operands[0].shape == call.result.shape:
        return rule_of(call, [operand], [operand], localize=in_rows)
    ends = [*operand[:-1], ("p",)], [*operand[:-1], ("q",)]
    return rule_of(call, ends[:1], ends[1:], whole=("p", "q"), localize=in_rows)


def in_rows(ctx: LocalContext) -> fx.Node:
    """Localize: what torch reads by a view must lie as in a tensor of its own, which a shard out of a collective may
    not."""
    rows = ctx.call(aten.clone.default, argument(ctx, "self"), memory_format=torch.contiguous_format)
    return again(ctx, self=rows)


def expand(call: OpCall) -> OpRule:
    """1 b -> a b: the new factor may be split, each rank makes its part."""
    ndim = call.result.ndim
    return rule_of(
        call,
        [broadcast_dims(call.operands[0].ndim, ndim)],
        [broadcast_dims(ndim)],
        linear="self",
        localize=lambda ctx: again(ctx, size=ctx.result_shape()),
    )


def full(call: OpCall) -> OpRule:
    """-> a b"""
    return _made(call, lambda ctx: again(ctx, size=ctx.result_shape()))


def _made(call: OpCall, localize: Localize) -> OpRule:
    operands = [((),) * operand.ndim for operand in call.operands]
    return rule_of(call, operands, [broadcast_dims(call.result.ndim)], localize=localize)


def arange(call: OpCall) -> OpRule:
    """Splits if start and step are whole numbers: only then is a part's start exact."""
    exact = all(v == int(v) for v in (call["start"], call["step"]))
    return rule_of(call, [], [[("d0",)]], whole=() if exact else ["d0"], localize=_arange)


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
    return _made(call, _iota)


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
    linear = linear_sets(call, "x" if call.arguments.get("how", "sum") in ("sum", "cat") else ())
    shapes = [tuple(1 if d == cut else n for d, n in enumerate(shape)) for shape in call.shapes]
    return assemble(shapes, [dims], [dims], linear=linear)


def reduce(op: str, *linear: str) -> Builder:
    """a k -> a; k: sum, max or min. Reduced dims: argument "dim", all if there is none or it is empty."""

    def build(call: OpCall) -> OpRule:
        operand, result, gone = _reduced(call)
        return rule_of(call, [operand], [result], reductions=dict.fromkeys(gone, op), linear=linear)

    return build


def reduce_whole(call: OpCall) -> OpRule:
    """a k -> a; k: whole. For reductions that parts do not add up to: argmax, prod."""
    operand, result, gone = _reduced(call)
    return rule_of(call, [operand], [result] * len(call.results), whole=gone)


def extremum(op: str) -> Builder:
    """amax, amin: "max", "min". They refuse to reduce nothing."""
    return empty_safe(reduce(op))


def histogram(call: OpCall) -> OpRule:
    """*x -> n; *x: sum. With min = max torch takes the range from the values, so all are needed."""
    operand = broadcast_dims(call.operands[0].ndim)
    factors = [f for dim in operand for f in dim]
    given = call["min"] != call["max"]
    return rule_of(
        call,
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
        return rule_of(
            call,
            [operand] * len(call.operands),
            [result] * len(call.results),
            whole=[f"{letter}{i}" for i in whole for letter in "wr"],
            linear=linear,
        )

    return build


def _reduced(call: OpCall) -> tuple[tuple[Dim, ...], tuple[Dim, ...], list[str]]:
    """(dims of the operand, dims of a result, the factors that are reduced)."""
    ndim = call.operands[0].ndim
    given = call.arguments.get("dim")
    gone = range(ndim) if given in (None, [], ()) or ndim == 0 else [d % ndim for d in _as_list(given)]
    keepdim = call.result.ndim == ndim
    operand = broadcast_dims(ndim)
    result = tuple(() if i in gone else (f"d{i}",) for i in range(ndim) if keepdim or i not in gone)
    return operand, result, [f"d{i}" for i in gone]


def _as_list(value: Any) -> list[int]:
    return [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]


@empty_safe
def transform(call: OpCall) -> OpRule:
    """... -> ...; those in `dim` whole, with another length in the result where half a spectrum stands for all.

    Linear: also from complex to real numbers, where other ops would lose a part of every summand.
    """
    return replace(along("dim")(call), linear=(frozenset({0}),))
