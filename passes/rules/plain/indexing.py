"""Reading and writing rows by index. With the indexed dim split, every rank looks up the rows it has and gives zeros
for the others, so the result is a pending sum; or writes the rows it has and drops the others. With the index of what
is written split, the additive ops leave a pending sum (and one rank adds what was there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.ir.joint import node_value, tensor_operands
from passes.ir.op_traits import is_zeros
from passes.rules.core.assemble import (
    Dims,
    again,
    argument,
    aten,
    constant,
    filled,
    first_part,
    global_tensor,
    is_empty,
    local_index,
    positions,
    rule_of,
    whole_rule,
    with_ones,
    zero_where,
)
from passes.rules.core.rule import Builder, Dim, LocalContext, Localize, OpCall, OpRule, TensorInfo


def own_rows(ctx: LocalContext, name: str, after: int) -> tuple[dict[str, Any], fx.Node]:
    """(the argument `name`, an index or a list with one, as places in this rank's rows of v; a mask of what is not in
    them, with `after` dims of size 1 behind). Negative places in a list count from the end."""
    given = argument(ctx, name)
    if isinstance(given, fx.Node):
        rows, outside = local_index(ctx, given, "v")
        return {name: rows}, with_ones(ctx, outside, after)
    at = next(i for i, entry in enumerate(given) if entry is not None)
    size = global_tensor(ctx, "self").shape[at]
    rows, outside = local_index(ctx, ctx.call(aten.remainder.Scalar, given[at], size), "v")
    return {name: [*given[:at], rows, *given[at + 1 :]]}, with_ones(ctx, outside, after)


def _reading(name: str, after: int, **changes: Any) -> Localize:
    """Reads its rows by the index `name`, the dims of which `after` others of the result follow."""

    def localize(ctx: LocalContext) -> fx.Node:
        if not ctx.is_split("v"):
            return again(ctx)
        if is_empty(ctx, "v"):
            return constant(ctx, 0)
        rows, outside = own_rows(ctx, name, after)
        return zero_where(ctx, outside, again(ctx, **rows, **changes), node_value(ctx.node))

    return localize


def _read(
    call: OpCall, operands: Sequence[Dims], result: Dims, localize: Localize, whole: Sequence[str] = ()
) -> OpRule:
    """A sum over v, but of bools, which have none."""
    summable = call.operands[0].dtype != torch.bool
    return rule_of(
        call,
        operands,
        [result],
        reductions={"v": "sum"} if summable else {},
        whole=whole if summable else ["v", *whole],
        linear="self",
        localize=localize,
    )


def rows_along(ndim: int, dim: int, name: str = "v") -> list[Dim]:
    """Dims of a tensor whose `dim` is the one with the rows."""
    return [(name,) if i == dim % ndim else (f"d{i}",) for i in range(ndim)]


# Localize of "v d, *t -> *t d; v: sum".
embedding = _reading("indices", 1, padding_idx=-1)


def gather(call: OpCall) -> OpRule:
    """v a, k a -> k a; v: sum. Dims of which only a part is indexed are whole."""
    source, position = call.operands
    if source.ndim == 0 or position.ndim == 0:
        return whole_rule(call)
    operand, indices, whole = gather_dims(source.shape, position.shape, call["dim"])
    return _read(call, [operand, indices], indices, _reading("index", 0), whole)


def gather_dims(source: Sequence[int], index: Sequence[int], dim: int) -> tuple[Dims, Dims, list[str]]:
    """(dims of the source, dims of the index, whole factors) for gather and scatter along `dim`.

    The source is indexed along "v" by an index of length "k"; other dims are equal, or only the
    first index.shape[i] entries take part, and then both sides are whole.
    """
    along, operand, indices = dim % len(source), list[Dim](), list[Dim]()
    for i, (n, m) in enumerate(zip(source, index, strict=True)):
        same = n == m
        operand.append(("v",) if i == along else (f"d{i}",) if same else (f"x{i}",))
        indices.append(("k",) if i == along else (f"d{i}",) if same else (f"y{i}",))
    whole = [f for dim_ in (*operand, *indices) for f in dim_ if f[0] in "xy"]
    return operand, indices, whole


def select(call: OpCall) -> OpRule:
    """a v b -> a b; v: sum. The rank that has the index gives its row, the others zeros."""
    names = rows_along(call.operands[0].ndim, call["dim"])
    return _read(call, [names], [name for name in names if name != ("v",)], _select)


def _select(ctx: LocalContext) -> fx.Node:
    if not ctx.is_split("v"):
        return again(ctx)
    shape = global_tensor(ctx, "self").shape
    row = argument(ctx, "index") % shape[argument(ctx, "dim")]
    low, high = ctx.interval("v")
    return again(ctx, index=row - low) if low <= row < high else constant(ctx, 0)


def index_select(call: OpCall) -> OpRule:
    """a v b, t -> a t b; v: sum"""
    ndim, dim = call.operands[0].ndim, call["dim"]
    if ndim == 0 or call.operands[1].ndim == 0:
        return whole_rule(call)
    localize = _reading("index", ndim - 1 - dim % ndim)
    return _read(call, [rows_along(ndim, dim), [("t0",)]], rows_along(ndim, dim, "t0"), localize)


@dataclass(frozen=True)
class IndexDims:
    """Dims of x[..., i, j, ...] for `index.Tensor` and `index_put`.

    source:  of x; "v" where one index alone indexes, "v0", "v1" ... where several do (those whole).
    indices: of each index tensor, broadcast to "t0", "t1", ...
    result:  of x[...]: the index dims stand where the indices do, or in front if those are apart.
    names:   the index's factors. after: how many dims of the result follow them. whole: factors.
    """

    source: tuple[Dim, ...]
    indices: tuple[tuple[Dim, ...], ...]
    result: tuple[Dim, ...]
    names: tuple[str, ...]
    after: int
    whole: tuple[str, ...]

    @staticmethod
    def of(source: TensorInfo, indices: Sequence[TensorInfo | None]) -> IndexDims | None:
        """None for an index that is a mask: how many rows it takes depends on its values."""
        given = {i: index for i, index in enumerate(indices) if index is not None}
        if not given or any(t.dtype in (torch.bool, torch.uint8) for t in given.values()):
            return None
        ndim = max(t.ndim for t in given.values())
        names = tuple(f"t{i}" for i in range(ndim))
        alone = len(given) == 1
        dims: tuple[Dim, ...] = tuple(
            (f"d{i}",) if i not in given else ("v",) if alone else (f"v{i}",) for i in range(source.ndim)
        )
        positions = sorted(given)
        together = positions == list(range(positions[0], positions[-1] + 1))
        before = dims[: positions[0]] if together else ()
        after = dims[positions[-1] + 1 :] if together else tuple(d for d in dims if d[0][0] == "d")
        return IndexDims(
            source=dims,
            indices=tuple(tuple((name,) for name in names[ndim - t.ndim :]) for t in given.values()),
            result=(*before, *((name,) for name in names), *after),
            names=names,
            after=len(after),
            whole=() if alone else tuple(f"v{i}" for i in positions),
        )


def index(call: OpCall) -> OpRule:
    """a v b, *t -> a *t b; v: sum. With several indices, the dims they index are whole."""
    named = IndexDims.of(call.operands[0], call["indices"])
    if named is None:
        return whole_rule(call)
    localize = _reading("indices", named.after)
    return _read(call, [named.source, *named.indices], named.result, localize, named.whole)


def looked_up(name: str) -> Builder:
    """... -> ...: each value of the argument `name` is looked up in all of the others. Sorted rows for rows of values
    share what is in front of them."""

    def build(call: OpCall) -> OpRule:
        values = call.tensor(name)
        dims: list[Dim] = [(f"d{i}",) for i in range(values.ndim)]
        rows = [*dims[:-1], ()] if "sorted_sequence" in call.arguments else [()] * values.ndim
        others = lambda ndim: rows if ndim == values.ndim > 1 else [()] * ndim
        operands = [dims if t is values else others(t.ndim) for t in call.operands]
        return rule_of(call, operands, [dims])

    return build


def embedding_backward(call: OpCall) -> OpRule:
    """*t d, *t -> v d; *t: sum. Counting how often a row is used needs all of *t."""
    index = call.tensor("indices")
    names = [f"t{i}" for i in range(index.ndim)]
    tokens: list[Dim] = [(name,) for name in names]
    return rule_of(
        call,
        [[*tokens, ("d",)], tokens],
        [[("v",), ("d",)]],
        reductions=dict.fromkeys(names, "sum"),
        whole=names if call["scale_grad_by_freq"] else (),
        linear="grad_output",
        localize=_embedding_backward,
    )


def _embedding_backward(ctx: LocalContext) -> fx.Node:
    """Rows of other ranks, and the padding's, go to an extra row that is cut off."""
    if not ctx.is_split("v"):
        return again(ctx)
    if is_empty(ctx, "v"):
        return constant(ctx, 0)
    low, high = ctx.interval("v")
    index = argument(ctx, "indices")
    rows, outside = local_index(ctx, index, "v")
    padding = argument(ctx, "padding_idx")
    if low <= padding < high:
        outside = ctx.call(aten.logical_or.default, outside, ctx.call(aten.eq.Scalar, index, padding))
    rows = _or_behind(ctx, rows, outside)
    table = again(ctx, indices=rows, num_weights=high - low + 1, padding_idx=high - low)
    return ctx.call(aten.slice.Tensor, table, 0, 0, high - low)


def _or_behind(ctx: LocalContext, rows: fx.Node, outside: fx.Node) -> fx.Node:
    """`rows`, and where `outside` holds the one behind this rank's last."""
    low, high = ctx.interval("v")
    behind = filled(ctx, [], high - low, node_value(rows))
    return ctx.call(aten.where.self, outside, behind, rows)


def _adding(name: str, values: str, summed: Sequence[str], after: int = 0) -> Localize:
    """Adds `values` to the rows at the index `name`. summed: the index's factors; `after` others of `values` follow.
    One of the ranks that share the sum adds to what was there; the others add to zeros, all where there was no more."""

    def localize(ctx: LocalContext) -> fx.Node:
        alike = is_zeros(tensor_operands(ctx.node)[0])
        base = argument(ctx, "self") if alike or first_part(ctx, summed) else constant(ctx, 0)
        if not ctx.is_split("v"):
            return again(ctx, self=base)
        if is_empty(ctx, "v"):
            return base
        rows, outside = own_rows(ctx, name, after)
        added = zero_where(ctx, outside, argument(ctx, values), global_tensor(ctx, values))
        return again(ctx, self=base, **rows, **{values: added})

    return localize


def _along_index(
    call: OpCall,
    *linear: str,
    whole: Sequence[str] = ("k",),
    reductions: Mapping[str, str] | None = None,
    localize: Localize | None = None,
) -> OpRule:
    """v a, k a, k a -> v a, or with one value for all."""
    source, position, values = call.tensor("self"), call.tensor("index"), call.arguments.get("src")
    if source.ndim == 0 or (values is not None and values.shape != position.shape):
        return whole_rule(call)
    operand, indices, partial = gather_dims(source.shape, position.shape, call["dim"])
    return rule_of(
        call,
        [operand, indices, indices][: len(call.operands)],
        [operand],
        reductions=reductions,
        whole=[*whole, *partial],
        linear=linear,
        localize=localize,
    )


def scatter_add(call: OpCall) -> OpRule:
    """k: sum"""
    if call.tensor("self").dtype == torch.bool:
        return whole_rule(call)
    adding = _adding("index", "src", ["k"])
    return _along_index(call, "self src", whole=(), reductions={"k": "sum"}, localize=adding)


def scatter(call: OpCall) -> OpRule:
    """Where two write one element the last one wins, so k is whole, and only with k = 1 is the choice sure to be the
    same for all summands."""
    position = call.tensor("index")
    single = position.ndim > 0 and position.shape[call["dim"] % position.ndim] == 1
    groups = ["self value"] if call.arguments.get("src") is None else ["self src"] if single else []
    return _along_index(call, *groups, localize=_scatter)


def _scatter(ctx: LocalContext) -> fx.Node:
    """What other ranks write goes to an extra row that is cut off."""
    if not ctx.is_split("v"):
        return again(ctx)
    dim = argument(ctx, "dim") % global_tensor(ctx, "self").ndim
    rows = _or_behind(ctx, *local_index(ctx, argument(ctx, "index"), "v"))
    return _with_one_more(ctx, dim, index=rows)


def _with_one_more(ctx: LocalContext, dim: int, **changes: Any) -> fx.Node:
    """The op on rows of `dim` of which there is one more, that is cut off."""
    low, high = ctx.interval("v")
    pads = [0, 0] * (global_tensor(ctx, "self").ndim - 1 - dim) + [0, 1]
    padded = ctx.call(aten.constant_pad_nd.default, argument(ctx, "self"), pads, 0)
    return ctx.call(aten.slice.Tensor, again(ctx, self=padded, **changes), dim, 0, high - low)


def scatter_reduce(call: OpCall) -> OpRule:
    """v: whole, k: whole"""
    return _along_index(call, whole=("v", "k"))


def index_add(call: OpCall) -> OpRule:
    """a v b, t, a t b -> a v b; t: sum"""
    source, dim, ndim = call.tensor("self"), call["dim"], call.tensor("self").ndim
    if ndim == 0 or call.tensor("source").ndim == 0 or source.dtype == torch.bool:
        return whole_rule(call)
    operand, index = rows_along(ndim, dim), [("t0",)][: call.tensor("index").ndim]
    return rule_of(
        call,
        [operand, index, rows_along(ndim, dim, "t0")],
        [operand],
        reductions={"t0": "sum"},
        linear="self source",
        localize=_adding("index", "source", ["t0"], ndim - 1 - dim % ndim),
    )


def index_put(call: OpCall) -> OpRule:
    """a v b, *t, a *t b -> a v b; *t: sum if it accumulates, else whole."""
    source, values = call.tensor("self"), call.tensor("values")
    named = IndexDims.of(source, call["indices"])
    if named is None:
        return whole_rule(call)
    adds = bool(call["accumulate"]) and source.dtype != torch.bool
    return rule_of(
        call,
        [named.source, *named.indices, named.result[len(named.result) - values.ndim :]],
        [named.source],
        reductions=dict.fromkeys(named.names, "sum") if adds else {},
        whole=named.whole if adds else [*named.names, *named.whole],
        linear="self values" if adds else (),
        localize=_adding("indices", "values", named.names, named.after) if adds else _writing(named.after),
    )


def _writing(after: int) -> Localize:
    """`after`: dims of the values that follow the index's."""

    def localize(ctx: LocalContext) -> fx.Node:
        if not ctx.is_split("v"):
            return again(ctx)
        if is_empty(ctx, "v"):
            return argument(ctx, "self")
        changes, outside = own_rows(ctx, "indices", 0)
        rows: list[Any] = changes["indices"]
        at = next(i for i, index in enumerate(rows) if index is not None)
        rows[at] = _or_behind(ctx, rows[at], outside)
        if node_value(rows[at]).shape != (1,):
            return _with_one_more(ctx, at, indices=rows)
        # A row is written as the rest is copied.
        low, high = ctx.interval("v")
        here = ctx.call(aten.eq.Tensor, positions(ctx, 0, high - low), rows[at])
        values = argument(ctx, "values")
        return ctx.call(aten.where.self, with_ones(ctx, here, after), values, argument(ctx, "self"))

    return localize
