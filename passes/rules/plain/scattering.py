"""Writing rows by index. With the written dim split, every rank writes the rows it has and drops the
others; with the index split, the additive ops leave a pending sum (and one rank adds what was there)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes.ir.joint import node_value, tensor_operands
from passes.ir.op_traits import is_zeros
from passes.rules.core.assemble import assemble, linear_sets, whole_rule
from passes.rules.core.emit_op import (
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
    with_ones,
    zero_where,
)
from passes.rules.core.rule import Dim, LocalContext, Localize, OpCall, OpRule
from passes.rules.plain.indexing import IndexDims, gather_dims, own_rows, rows_along


def embedding_backward(call: OpCall) -> OpRule:
    """*t d, *t -> v d; *t: sum. Counting how often a row is used needs all of *t."""
    index = call.tensor("indices")
    names = [f"t{i}" for i in range(index.ndim)]
    tokens: list[Dim] = [(name,) for name in names]
    return assemble(
        call.shapes,
        [[*tokens, ("d",)], tokens],
        [[("v",), ("d",)]],
        reductions=dict.fromkeys(names, "sum"),
        whole=names if call["scale_grad_by_freq"] else (),
        linear=linear_sets(call, "grad_output"),
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
        return whole_rule(call.shapes, len(call.operands))
    operand, indices, partial = gather_dims(source.shape, position.shape, call["dim"])
    return assemble(
        call.shapes,
        [operand, indices, indices][: len(call.operands)],
        [operand],
        reductions=reductions,
        whole=[*whole, *partial],
        linear=linear_sets(call, *linear),
        localize=localize,
    )


def scatter_add(call: OpCall) -> OpRule:
    """k: sum"""
    if call.tensor("self").dtype == torch.bool:
        return whole_rule(call.shapes, len(call.operands))
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
        return whole_rule(call.shapes, len(call.operands))
    operand, index = rows_along(ndim, dim), [("t0",)][: call.tensor("index").ndim]
    return assemble(
        call.shapes,
        [operand, index, rows_along(ndim, dim, "t0")],
        [operand],
        reductions={"t0": "sum"},
        linear=linear_sets(call, "self source"),
        localize=_adding("index", "source", ["t0"], ndim - 1 - dim % ndim),
    )


def index_put(call: OpCall) -> OpRule:
    """a v b, *t, a *t b -> a v b; *t: sum if it accumulates, else whole."""
    source, values = call.tensor("self"), call.tensor("values")
    named = IndexDims.of(source, call["indices"])
    if named is None:
        return whole_rule(call.shapes, len(call.operands))
    adds = bool(call["accumulate"]) and source.dtype != torch.bool
    return assemble(
        call.shapes,
        [named.source, *named.indices, named.result[len(named.result) - values.ndim :]],
        [named.source],
        reductions=dict.fromkeys(named.names, "sum") if adds else {},
        whole=named.whole if adds else [*named.names, *named.whole],
        linear=linear_sets(call, "self values") if adds else (),
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
