"""Writing rows by index. With the written dim split, every rank writes the rows it has and drops the
others; with the index split, the additive ops leave a pending sum (and one rank adds what was there)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from passes.ir.op_schema import named_arguments
from passes.rules.core.assemble import assemble, whole_rule
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
    with_ones,
    zero_where,
)
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import Dim, LocalContext, OpRule
from passes.rules.plain.indexing import IndexDims, gather_dims, wrapped
from passes.rules.plain.pointwise import linear_sets

__all__ = ["embedding_backward", "index_add", "index_put", "scatter", "scatter_add", "scatter_reduce"]


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
    extra = filled(ctx, [], high - low, global_tensor(ctx, "indices"))
    rows = ctx.call(aten.where.self, outside, extra, rows)
    table = again(ctx, indices=rows, num_weights=high - low + 1, padding_idx=high - low)
    return ctx.call(aten.slice.Tensor, table, 0, 0, high - low)


def scatter_add(call: OpCall) -> OpRule:
    """v a, k a, k a -> v a; k: sum"""
    source, position = call.tensor("self"), call.tensor("index")
    if source.ndim == 0 or position.shape != call.tensor("src").shape or source.dtype == torch.bool:
        return whole_rule(call.shapes, len(call.operands))
    operand, indices, whole = gather_dims(source.shape, position.shape, call["dim"])
    return assemble(
        call.shapes,
        [operand, indices, indices],
        [operand],
        reductions={"k": "sum"},
        whole=whole,
        linear=linear_sets(call, "self src"),
        localize=_scatter_add,
    )


def _scatter_add(ctx: LocalContext) -> fx.Node:
    base = _added_once(ctx, ["k"])
    if not ctx.is_split("v"):
        return again(ctx, self=base)
    if is_empty(ctx, "v"):
        return base
    rows, outside = local_index(ctx, argument(ctx, "index"), "v")
    src = zero_where(ctx, outside, argument(ctx, "src"), global_tensor(ctx, "src"))
    return again(ctx, self=base, index=rows, src=src)


def _added_once(ctx: LocalContext, summed: Iterable[str]) -> fx.Node:
    """What an additive op adds to: on one of the ranks that share the sum; zeros on the others."""
    return argument(ctx, "self") if first_part(ctx, summed) else constant(ctx, 0)


def scatter(call: OpCall) -> OpRule:
    """v a, k a, k a -> v a, or with one value for all. Where two write one element the last one wins,
    so k is whole, and only with k = 1 is the choice sure to be the same for all summands."""
    source, position = call.tensor("self"), call.tensor("index")
    values = call.arguments.get("src")
    if source.ndim == 0 or (values is not None and values.shape != position.shape):
        return whole_rule(call.shapes, len(call.operands))
    operand, indices, whole = gather_dims(source.shape, position.shape, call["dim"])
    single = position.shape[call["dim"] % source.ndim] == 1
    groups = ["self value"] if values is None else ["self src"] if single else []
    return assemble(
        call.shapes,
        [operand, indices, indices][: len(call.operands)],
        [operand],
        whole=["k", *whole],
        linear=linear_sets(call, *groups),
        localize=_scatter_one if single and not whole else _scatter_many,
    )


def _scatter_one(ctx: LocalContext) -> fx.Node:
    """One index a row: compare it with every position, which fuses (cross-entropy's backward)."""
    if not ctx.is_split("v"):
        return again(ctx)
    source = global_tensor(ctx, "self")
    low, high = ctx.interval("v")
    index = global_tensor(ctx, "index")
    positions = ctx.call(aten.arange.start, low, high, dtype=index.dtype, device=index.device)
    positions = with_ones(ctx, positions, 1, source.ndim - 1 - argument(ctx, "dim") % source.ndim)
    hit = ctx.call(aten.eq.Tensor, argument(ctx, "index"), positions)
    arguments = named_arguments(ctx.node.target, ctx.args, ctx.kwargs)
    written = arguments["src"] if "src" in arguments else arguments["value"]
    if not isinstance(written, fx.Node):
        written = filled(ctx, [], written, source)
    return ctx.call(aten.where.self, hit, written, argument(ctx, "self"))


def _scatter_many(ctx: LocalContext) -> fx.Node:
    """What other ranks write goes to an extra row that is cut off."""
    if not ctx.is_split("v"):
        return again(ctx)
    low, high = ctx.interval("v")
    source = global_tensor(ctx, "self")
    dim = argument(ctx, "dim") % source.ndim
    after = source.ndim - 1 - dim
    padded = ctx.call(aten.constant_pad_nd.default, argument(ctx, "self"), [0, 0] * after + [0, 1], 0)
    rows, outside = local_index(ctx, argument(ctx, "index"), "v")
    extra = filled(ctx, [], high - low, global_tensor(ctx, "index"))
    rows = ctx.call(aten.where.self, outside, extra, rows)
    result = again(ctx, self=padded, index=rows)
    return ctx.call(aten.slice.Tensor, result, dim, 0, high - low)


def scatter_reduce(call: OpCall) -> OpRule:
    """v a, k a, k a -> v a; v: whole, k: whole"""
    source, position = call.tensor("self"), call.tensor("index")
    if source.ndim == 0 or position.shape != call.tensor("src").shape:
        return whole_rule(call.shapes, len(call.operands))
    operand, indices, whole = gather_dims(source.shape, position.shape, call["dim"])
    return assemble(call.shapes, [operand, indices, indices], [operand], whole=["v", "k", *whole])


def index_add(call: OpCall) -> OpRule:
    """a v b, t, a t b -> a v b; t: sum"""
    source, dim = call.tensor("self"), call["dim"]
    if source.ndim == 0 or call.tensor("source").ndim == 0 or source.dtype == torch.bool:
        return whole_rule(call.shapes, len(call.operands))
    operand: list[Dim] = [(f"d{i}",) for i in range(source.ndim)]
    operand[dim % source.ndim] = ("v",)
    added: list[Dim] = [("t0",) if name == ("v",) else name for name in operand]
    return assemble(
        call.shapes,
        [operand, [("t0",)][: call.tensor("index").ndim], added],
        [operand],
        reductions={"t0": "sum"},
        linear=linear_sets(call, "self source"),
        localize=_index_add,
    )


def _index_add(ctx: LocalContext) -> fx.Node:
    base = _added_once(ctx, ["t0"])
    if not ctx.is_split("v"):
        return again(ctx, self=base)
    if is_empty(ctx, "v"):
        return base
    source = global_tensor(ctx, "self")
    rows, outside = local_index(ctx, argument(ctx, "index"), "v")
    mask = with_ones(ctx, outside, 1, source.ndim - 1 - argument(ctx, "dim") % source.ndim)
    added = zero_where(ctx, mask, argument(ctx, "source"), global_tensor(ctx, "source"))
    return again(ctx, self=base, index=rows, source=added)


def index_put(call: OpCall) -> OpRule:
    """a v b, *t, a *t b -> a v b; *t: sum if it accumulates, else v and *t are whole."""
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
        whole=named.whole if adds else ["v", *named.names, *named.whole],
        linear=linear_sets(call, "self values") if adds else (),
        localize=(lambda ctx: _index_put(ctx, named)) if adds else None,
    )


def _index_put(ctx: LocalContext, named: IndexDims) -> fx.Node:
    base = _added_once(ctx, named.names)
    if not ctx.is_split("v"):
        return again(ctx, self=base)
    if is_empty(ctx, "v"):
        return base
    indices = list(argument(ctx, "indices"))
    at = next(i for i, entry in enumerate(indices) if entry is not None)
    indices[at], outside = local_index(ctx, wrapped(ctx, indices[at], at), "v")
    mask = with_ones(ctx, outside, len(named.names), named.after)
    values = zero_where(ctx, mask, argument(ctx, "values"), global_tensor(ctx, "values"))
    return again(ctx, self=base, indices=indices, values=values)
