"""From factor names per dim and concrete shapes to an `OpRule`; rules of pointwise ops, whose operands broadcast; and
small pieces that `localize` functions are made of.

These emit ops that every backend lowers. A dim smaller than its mesh axis leaves some ranks without any of it, and many
ops refuse empty tensors: such a rank contributes the neutral value instead of running the op.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from cost_model.errors import ShardingError
from passes.ir.joint import node_value
from passes.ir.op_traits import named_arguments, neutral, schema_arguments
from passes.layout.windows import Window
from passes.rules.core.rule import Builder, Dim, Exchange, LocalContext, Localize, OpCall, OpRule, TensorInfo

Dims = Sequence[Dim]
Groups = str | Sequence[str]
"""Of argument names, each separated by spaces."""


def dims(names: str | Iterable[str]) -> tuple[Dim, ...]:
    """One plain dim per word: "b m k" -> (("b",), ("m",), ("k",))."""
    words = names.split() if isinstance(names, str) else names
    return tuple((word,) for word in words)


def assemble(
    shapes: Sequence[Sequence[int]],
    operands: Sequence[Dims],
    results: Sequence[Dims],
    *,
    sizes: Mapping[str, int] | None = None,
    reductions: Mapping[str, str] | None = None,
    whole: Iterable[str] = (),
    linear: Iterable[frozenset[int]] = (),
    windows: Mapping[tuple[int, int], Window] | None = None,
    localize: Localize | None = None,
    exchange: Exchange | None = None,
) -> OpRule:
    """The rule of one op.

    shapes: of the operands, then of the results. Sizes of factors are solved from them, except
    those given in `sizes`. A factor of size 1 disappears; an operand dim of size 1 whose factor is
    larger elsewhere is a broadcast, and has no factor either. A dim in `windows` says nothing of its factor's size.

    Raises ShardingError if two dims disagree about a factor, or a product cannot be solved.
    """
    given = [*operands, *results]
    windows = windows or {}
    plain = [
        [() if (t, d) in windows else dim for d, dim in enumerate(tensor)] for t, tensor in enumerate(given)
    ]
    solved = _solve(plain, shapes, dict(sizes or {}))
    cleaned = [_clean(d, shape, solved) for d, shape in zip(plain, shapes, strict=True)]
    for t, d in windows:
        seen = tuple(f for f in given[t][d] if solved[f] != 1)
        cleaned[t] = (*cleaned[t][:d], seen, *cleaned[t][d + 1 :])
    present = {factor for tensor in cleaned for dim in tensor for factor in dim}
    return OpRule(
        operands=tuple(cleaned[: len(operands)]),
        results=tuple(cleaned[len(operands) :]),
        sizes={factor: size for factor, size in solved.items() if factor in present},
        reductions={f: op for f, op in (reductions or {}).items() if f in present},
        whole=frozenset(f for f in whole if f in present),
        linear=tuple(dict.fromkeys(linear)),
        windows={place: window for place, window in windows.items() if cleaned[place[0]][place[1]]},
        localize=localize,
        exchange=exchange,
    )


def rule_of(
    call: OpCall, operands: Sequence[Dims], results: Sequence[Dims], *, linear: Groups = (), **how: Any
) -> OpRule:
    """The rule of one call. linear: as of `linear_sets`. how: the rest, as of `assemble`."""
    return assemble(call.shapes, operands, results, linear=linear_sets(call, linear), **how)


def whole_rule(call: OpCall, linear: Groups = ()) -> OpRule:
    """Nothing can be split."""
    nothing = [((),) * len(shape) for shape in call.shapes]
    n = len(call.operands)
    return OpRule(tuple(nothing[:n]), tuple(nothing[n:]), sizes={}, linear=linear_sets(call, linear))


def _solve(tensors: Sequence[Dims], shapes: Sequence[Sequence[int]], sizes: dict[str, int]) -> dict[str, int]:
    """Sizes of all factors: plain dims first, then products with one unknown until none is left."""
    entries = [
        (dim, length)
        for tensor, shape in zip(tensors, shapes, strict=True)
        for dim, length in zip(tensor, shape, strict=True)
        if dim
    ]
    for dim, length in entries:
        if len(dim) == 1:
            _agree(sizes, dim[0], length)
    pending = [entry for entry in entries if len(entry[0]) > 1]
    while pending:
        later = [entry for entry in pending if not _solve_product(*entry, sizes)]
        if len(later) == len(pending):
            unknown = [f for dim, _ in later for f in dim if f not in sizes]
            raise ShardingError(f"the shapes do not determine the size of factor {unknown[0]!r}")
        pending = later
    return sizes


def _agree(sizes: dict[str, int], factor: str, length: int) -> None:
    """Record `length`; 1 beside a larger size is a broadcast."""
    known = sizes.get(factor, 1)
    if known != 1 and length not in (1, known):
        raise ShardingError(f"factor {factor!r} has size {known} in one dim and {length} in another")
    sizes[factor] = max(known, length)


def _solve_product(dim: Dim, length: int, sizes: dict[str, int]) -> bool:
    """Whether all factors of `dim` are known now. A product of length 1 may be a broadcast."""
    unknown = [f for f in dim if f not in sizes]
    if len(unknown) > 1:
        return False
    known = math.prod(sizes[f] for f in dim if f in sizes)
    if unknown and length % known == 0:
        sizes[unknown[0]] = length // known
    elif unknown or length not in (1, known):
        raise ShardingError(f"a dim of size {length} cannot be the product ({' '.join(dim)}), of {known}")
    return True


def _clean(tensor: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[Dim, ...]:
    return tuple(
        () if length == 1 else tuple(f for f in dim if sizes[f] != 1)
        for dim, length in zip(tensor, shape, strict=True)
    )


def pointwise(*linear: str) -> Builder:
    """..., ... -> ...

    linear: groups of argument names, "self other" for linear in both together; see `linear_sets`.
    """

    def build(call: OpCall) -> OpRule:
        ndim = call.result.ndim
        operands = [broadcast_dims(operand.ndim, ndim) for operand in call.operands]
        return rule_of(call, operands, [broadcast_dims(ndim)] * len(call.results), linear=linear)

    return build


def broadcast_dims(ndim: int, result_ndim: int | None = None) -> tuple[Dim, ...]:
    """Dims of a tensor of `ndim`, aligned at the right with a result whose dims are d0, d1, ... (None: its own)."""
    end = ndim if result_ndim is None else result_ndim
    return tuple((f"d{i}",) for i in range(end - ndim, end))


def linear_sets(call: OpCall, groups: Groups) -> tuple[frozenset[int], ...]:
    """Operand positions of each group of argument names, or of one, in which this call is linear.

    A group must be all tensors: x + 1 is not linear, for every rank would add the 1; a number that
    is 0, or an argument left out, does no harm. An argument that is a list counts with all of its
    tensors. No sums of bools, and no linearity where the result cannot hold what is summed (a float
    cast to an integer, or to 8 bits, is rounded in every part).
    """
    found: list[frozenset[int]] = []
    for group in [groups] if isinstance(groups, str) else groups:
        members: list[TensorInfo] = []
        legal = True
        for name in group.split():
            value = call[name]
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, TensorInfo):
                    members.append(item)
                else:
                    legal = legal and (item is None or item == 0)
        if legal and members and _additive(members, call.results):
            found.append(frozenset(m.position for m in members))
    return tuple(found)


def _additive(members: Sequence[TensorInfo], results: Sequence[TensorInfo | None]) -> bool:
    lowest = min(_kind(r.dtype) for r in results if r is not None)
    return all(0 < _kind(m.dtype) <= lowest for m in members)


def _kind(dtype: torch.dtype) -> int:
    """bool 0, integer 1, float 2, complex 3. Floats of 8 bits count as integers."""
    if dtype == torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point and dtype.itemsize > 1 else 1


aten = torch.ops.aten


def argument(ctx: LocalContext, name: str) -> Any:
    """This rank's argument called `name` in the op's schema; its default if it is not given."""
    return named_arguments(ctx.node.target, ctx.args, ctx.kwargs)[name]


def global_tensor(ctx: LocalContext, name: str) -> torch.Tensor:
    """The global value of the tensor argument `name`."""
    return node_value(named_arguments(ctx.node.target, ctx.node.args, ctx.node.kwargs)[name])


def again(ctx: LocalContext, **changes: Any) -> fx.Node:
    """Emit the same op on the local arguments, with some of them changed by name."""
    names = [argument.name for argument in schema_arguments(ctx.node.target)]
    args = [changes.pop(name, arg) for name, arg in zip(names, ctx.args, strict=False)]
    assert changes.keys() <= set(names), f"{ctx.node.target} has no argument {changes}"
    return ctx.call(ctx.node.target, *args, **{**ctx.kwargs, **changes})  # type: ignore[arg-type]


def positions(ctx: LocalContext, *bounds: int, dtype: torch.dtype = torch.int64) -> fx.Node:
    """[start, start + step, ..., end), beside result 0. bounds: start, end, step."""
    device = node_value(ctx.node).device
    bounds = (*bounds, 1)[:3]
    return ctx.call(aten.arange.start_step, *bounds, dtype=dtype, device=device, pin_memory=False)


def offset(ctx: LocalContext, factor: str) -> int:
    """Where this rank's interval of `factor` begins; 0 if it is not split, or of size 1."""
    return ctx.interval(factor)[0] if ctx.is_split(factor) else 0


def is_empty(ctx: LocalContext, factor: str) -> bool:
    """Whether `factor` is split and this rank has none of it."""
    if not ctx.is_split(factor):
        return False
    low, high = ctx.interval(factor)
    return low == high


def first_part(ctx: LocalContext, factors: Iterable[str]) -> bool:
    """Whether this rank is the one, of those that split `factors`, that adds what must be added once.

    The first shard of a factor is never empty, so exactly one rank has offset 0 in all of them.
    """
    return all(offset(ctx, factor) == 0 and not is_empty(ctx, factor) for factor in factors)


def constant(ctx: LocalContext, value: float | bool, index: int = 0) -> fx.Node:
    """Result `index` filled with `value`: its local shape, dtype and device."""
    like = node_value(ctx.node, index)
    return filled(ctx, ctx.result_shape(index), value, like)


def filled(ctx: LocalContext, shape: list[int], value: float | bool, like: torch.Tensor) -> fx.Node:
    """A tensor of `value` with dtype and device of `like`."""
    return ctx.call(aten.full.default, shape, value, dtype=like.dtype, device=like.device, pin_memory=False)


def local_index(ctx: LocalContext, index: fx.Node, factor: str) -> tuple[fx.Node, fx.Node]:
    """Global positions along `factor` as positions in this rank's interval [lo, hi).

    Returns (clamped index, mask that is True where the position is not this rank's).
    """
    low, high = ctx.interval(factor)
    shifted = ctx.call(aten.sub.Tensor, index, low)
    below = ctx.call(aten.lt.Scalar, shifted, 0)
    above = ctx.call(aten.ge.Scalar, shifted, high - low)
    outside = ctx.call(aten.logical_or.default, below, above)
    return ctx.call(aten.clamp.default, shifted, 0, high - low - 1), outside


def zero_where(ctx: LocalContext, mask: fx.Node, value: fx.Node, like: torch.Tensor) -> fx.Node:
    """`value`, of dtype and device of `like`, with zeros where `mask` (broadcast) holds."""
    return ctx.call(aten.where.self, mask, filled(ctx, [], 0, like), value)


def with_ones(ctx: LocalContext, mask: fx.Node, after: int) -> fx.Node:
    """`mask` followed by `after` dims of size 1."""
    for _ in range(after):
        mask = ctx.call(aten.unsqueeze.default, mask, -1)
    return mask


def empty_safe(build: Builder) -> Builder:
    """The same rules, with `neutral_where_empty`."""

    def safe(call: OpCall) -> OpRule:
        return neutral_where_empty(build(call))

    return safe


def neutral_where_empty(rule: OpRule) -> OpRule:
    """`rule`, whose op is not run on a rank that has none of a split factor.

    Every result is there empty, if it has the factor, or holds what its reduction ignores (0 for a
    sum, -inf for a maximum). The op does run if a result neither has the factor nor reduces it: that
    result needs no part of it, and is whole on this rank too.
    """

    def localize(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
        missing = {factor for factor in rule.splittable if is_empty(ctx, factor)}
        wanted = _wanted(ctx)
        ops = {index: _ignored_by(rule, rule.results[index], missing) for index in wanted}
        if not missing or None in ops.values():
            return again(ctx) if rule.localize is None else rule.localize(ctx)
        values = {
            index: constant(ctx, neutral(op or "sum", node_value(ctx.node, index).dtype), index)
            for index, op in ops.items()
        }
        several = isinstance(ctx.node.meta["val"], (tuple, list))
        return tuple(values.get(i) for i in range(len(rule.results))) if several else values[0]

    return replace(rule, localize=localize)


def _wanted(ctx: LocalContext) -> list[int]:
    """The results that the op computes: some can be told to leave one out."""
    value = ctx.node.meta["val"]
    return [i for i, v in enumerate(value) if v is not None] if isinstance(value, (tuple, list)) else [0]


def _ignored_by(rule: OpRule, dims: tuple[Dim, ...], missing: set[str]) -> str | None:
    """The reduction for which a result with these dims must be neutral; None if it must be computed."""
    kept = {factor for dim in dims for factor in dim}
    reduced = [rule.reductions[factor] for factor in missing - kept if factor in rule.reductions]
    if reduced:
        return reduced[0]
    return "sum" if missing & kept else None
