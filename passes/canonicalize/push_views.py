"""How each op computes on the finer dims of its operands: the table that `PushViews` reads.

A rule gets a node some operand of which is a `Flat`. It emits the op on finer operands and returns
the result as a `Flat` (a list of them for an op with several results), or None if it cannot.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from passes.canonicalize.normalize_arguments import NO_DUPLICATES, ONE_SPELLING, REDUCTIONS
from passes.canonicalize.permutes import (
    ONE_RESHAPE,
    PERMUTES_ABSORBED,
    PERMUTES_FUSED,
    PRODUCTS_ARE_CONTRACTS,
)
from passes.canonicalize.push_sweep import Flat, Group, PushRule, Sweep, flatten, resolve, trivial
from passes.ir.graph_pass import GraphPass, call_like, emit, erase_dead, int_at, ints_at, shape_of, tensor_at
from passes.ir.graph_properties import NO_USES
from passes.ir.joint import JointGraph, tensor_operands
from passes.ir.op_traits import is_pointwise
from passes.ops.layer_ops import format_equation, parse_equation
from passes.ops.routed_ops import ROUTED

aten = torch.ops.aten


def push_rule(node: fx.Node) -> PushRule | None:
    rule = _TABLE.get(node.target)
    return rule or (_pointwise if is_pointwise(node) else None)


def _pointwise(sweep: Sweep, node: fx.Node) -> Flat:
    shape, operands = shape_of(node), node.all_input_nodes
    partners: list[list[Group]] = [[] for _ in shape]
    for operand in operands:
        groups = sweep.flat(operand).groups
        for dim, group in enumerate(groups, len(shape) - len(groups)):
            if group.size == shape[dim]:
                partners[dim].append(group)
    result = tuple(resolve(groups) for groups in partners)
    fitted: dict[fx.Node, fx.Node] = {}
    for operand in operands:
        own = shape_of(operand)
        wanted = [
            group if size == group.size else group.ones
            for size, group in zip(own, result[len(result) - len(own) :], strict=True)
        ]
        fitted[operand] = sweep.fitted(operand, wanted, node)
    args, kwargs = map_arg((node.args, dict(node.kwargs)), fitted.__getitem__)
    return Flat(call_like(node, *args, **kwargs), result)


def _reduction(sweep: Sweep, node: fx.Node) -> Flat:
    flat, dims, keep = sweep.flat(tensor_at(node)), ints_at(node, 1), bool(node.args[2])
    fine = [d for dim in dims for d in flat.span(dim)]
    new = call_like(node, flat.node, fine, keep, **node.kwargs)
    groups = [
        group if d not in dims else group.ones for d, group in enumerate(flat.groups) if keep or d not in dims
    ]
    return Flat(new, tuple(groups))


def _full_reduction(sweep: Sweep, node: fx.Node) -> Flat:
    return Flat(call_like(node, sweep.flat(tensor_at(node)).node, **node.kwargs), ())


def _permute(sweep: Sweep, node: fx.Node) -> Flat:
    flat, order = sweep.flat(tensor_at(node)), ints_at(node, 1)
    fine = [d for dim in order for d in flat.span(dim)]
    return Flat(emit(node, aten.permute.default, flat.node, fine), tuple(flat.groups[d] for d in order))


def _expand(sweep: Sweep, node: fx.Node) -> Flat:
    operand, shape = tensor_at(node), shape_of(node)
    own = sweep.flat(operand).groups
    lead = len(shape) - len(own)
    grown = [d for d, group in enumerate(own) if group.size != shape[lead + d]]
    flat = sweep.whole(operand, grown, node)
    groups = tuple(
        flat.groups[d - lead] if d >= lead and d - lead not in grown else Group((size,))
        for d, size in enumerate(shape)
    )
    return Flat(emit(node, aten.expand.default, flat.node, list(flatten(groups))), groups)


def _with_size(groups: Sequence[Group], dim: int, size: int) -> tuple[Group, ...]:
    return (*groups[:dim], Group((size,)), *groups[dim + 1 :])


def _slice(sweep: Sweep, node: fx.Node) -> Flat:
    dim = int_at(node, 1)
    flat = sweep.whole(tensor_at(node), [dim], node)
    groups = _with_size(flat.groups, dim, shape_of(node)[dim])
    return Flat(emit(node, aten.slice.Tensor, flat.node, flat.span(dim).start, *node.args[2:]), groups)


def _select(sweep: Sweep, node: fx.Node) -> Flat:
    dim = int_at(node, 1)
    flat = sweep.whole(tensor_at(node), [dim], node)
    new = emit(node, aten.select.int, flat.node, flat.span(dim).start, node.args[2])
    return Flat(new, (*flat.groups[:dim], *flat.groups[dim + 1 :]))


def _along(position: int) -> PushRule:
    """An op that keeps the shape and works along the dim or the dims at argument `position`."""

    def rule(sweep: Sweep, node: fx.Node) -> Flat:
        given = node.args[position]
        dims = [given] if isinstance(given, int) else ints_at(node, position)
        flat = sweep.whole(tensor_at(node), dims, node)
        fine = [flat.span(dim).start for dim in dims]
        args = [flat.node, *node.args[1:]]
        args[position] = fine[0] if isinstance(given, int) else fine
        return Flat(call_like(node, *args, **node.kwargs), flat.groups)

    return rule


def _agreed(sweep: Sweep, operands: Sequence[fx.Node], apart: int | None) -> list[Group]:
    """Per dim, the group that all operands (of one rank, equal in size) agree on; `apart` is whole."""
    columns = zip(*(sweep.flat(operand).groups for operand in operands), strict=True)
    return [groups[0].whole if d == apart else resolve(groups) for d, groups in enumerate(columns)]


def _cat(sweep: Sweep, node: fx.Node) -> Flat | None:
    pieces, dim = tensor_operands(node), int_at(node, 1)
    if len({len(shape_of(piece)) for piece in pieces}) > 1:
        return None
    groups = _agreed(sweep, pieces, dim)
    fitted = [sweep.fitted(piece, _with_size(groups, dim, shape_of(piece)[dim]), node) for piece in pieces]
    at = len(flatten(groups[:dim]))
    return Flat(emit(node, aten.cat.default, fitted, at), _with_size(groups, dim, shape_of(node)[dim]))


def _pad(sweep: Sweep, node: fx.Node) -> Flat:
    operand, pads = tensor_at(node), ints_at(node, 1)
    ndim = len(shape_of(operand))
    pairs = [(0, 0)] * (ndim - len(pads) // 2) + list(zip(pads[::2], pads[1::2], strict=True))[::-1]
    padded = [d for d, pair in enumerate(pairs) if any(pair)]
    flat = sweep.whole(operand, padded, node)
    groups = tuple(Group((size,)) if d in padded else flat.groups[d] for d, size in enumerate(shape_of(node)))
    fine = [(0, 0)] * len(flatten(groups))
    for d in padded:
        fine[flat.span(d).start] = pairs[d]
    first = next((d for d, pair in enumerate(fine) if any(pair)), len(fine))
    new_pads = [p for pair in reversed(fine[first:]) for p in pair]
    return Flat(call_like(node, flat.node, new_pads, *node.args[2:]), groups)


def _picked(sweep: Sweep, node: fx.Node) -> Flat | None:
    """Gathers and scatters along one dim of operands that are equal in all others."""
    x, dim, picked = tensor_at(node), int_at(node, 1), tensor_operands(node)[1:]
    shapes = {_with_size(trivial(shape_of(operand)), dim, 1) for operand in (x, *picked)}
    if len(shapes) > 1 or len({shape_of(operand) for operand in picked}) > 1:
        return None
    groups = _agreed(sweep, (x, *picked), dim)
    of_size = lambda operand: _with_size(groups, dim, shape_of(operand)[dim])
    own, *fitted = (sweep.fitted(operand, of_size(operand), node) for operand in (x, *picked))
    new = call_like(node, own, len(flatten(groups[:dim])), *fitted, *node.args[2 + len(picked) :])
    return Flat(new, of_size(node))


def _split(sweep: Sweep, node: fx.Node) -> list[Flat]:
    """Ops with several results, each of some length along one dim."""
    dim = (int_at(node, 2) if len(node.args) > 2 else -1) % len(shape_of(tensor_at(node)))
    flat = sweep.whole(tensor_at(node), [dim], node)
    new = call_like(node, flat.node, node.args[1], flat.span(dim).start, *node.args[3:])  # type: ignore[misc]
    lengths = [value.shape[dim] for value in node.meta["val"]]
    items = [emit(node, operator.getitem, new, i) for i in range(len(lengths))]
    return [Flat(item, _with_size(flat.groups, dim, size)) for item, size in zip(items, lengths, strict=True)]


def _embedding(sweep: Sweep, node: fx.Node) -> Flat:
    weight = sweep.whole(tensor_at(node), (0, 1), node)
    index = sweep.flat(tensor_at(node, 1))
    new = call_like(node, weight.node, index.node, *node.args[2:], **node.kwargs)
    return Flat(new, (*index.groups, weight.groups[1]))


def _embedding_backward(sweep: Sweep, node: fx.Node) -> Flat:
    grad, index = tensor_at(node), tensor_at(node, 1)
    *tokens, channels = sweep.flat(grad).groups
    groups = [resolve(pair) for pair in zip(tokens, sweep.flat(index).groups, strict=True)]
    fitted = sweep.fitted(grad, (*groups, channels.whole), node), sweep.fitted(index, groups, node)
    new = call_like(node, *fitted, *node.args[2:], **node.kwargs)
    return sweep.flat(new)


def _contract(sweep: Sweep, node: fx.Node) -> Flat:
    """Every word of the equation becomes one word per finer dim: "m k" -> "m0 m1 k".

    A word that only one operand has, flattened but not from tokens, stays flat unless the product is
    reshaped next: the gradient of a weight then has the weight's own dims.
    """
    operands = (tensor_at(node), tensor_at(node, 1))
    terms = parse_equation(str(node.args[2]))
    partners: dict[str, list[Group]] = {}
    for operand, term in zip(operands, terms[:2], strict=True):
        for word, group in zip(term, sweep.flat(operand).groups, strict=True):
            partners.setdefault(word, []).append(group)
    split_next = _reshaped_next(node)
    groups = {word: resolve(found) for word, found in partners.items()}
    for word, found in partners.items():
        if len(found) == 1 and not found[0].firm and not split_next:
            groups[word] = found[0].whole
    finer = {
        word: [f"{word}{i}" for i in range(len(g.sizes))] if len(g.sizes) > 1 else [word]
        for word, g in groups.items()
    }
    equation = format_equation(*([f for word in term for f in finer[word]] for term in terms))
    fitted = [
        sweep.fitted(operand, [groups[word] for word in term], node)
        for operand, term in zip(operands, terms[:2], strict=True)
    ]
    return Flat(call_like(node, *fitted, equation), tuple(groups[word] for word in terms[2]))


def _routed(sweep: Sweep, node: fx.Node) -> Flat:
    """Rows and ids agree on finer dims of tokens; matrices are whole."""
    *operands, ids = tensor_operands(node)
    counted = operands[: ROUTED[node.target]]
    groups = tuple(map(resolve, zip(*(sweep.flat(x).groups for x in (ids, *counted)), strict=False)))
    fine = lambda x: (*groups, sweep.flat(x).groups[-1].whole) if x in counted else trivial(shape_of(x))
    fitted = [sweep.fitted(x, fine(x), node) for x in operands]
    new = call_like(node, *fitted, sweep.fitted(ids, groups, node), *node.args[3:], **node.kwargs)
    return sweep.flat(new) if len(counted) > 1 else Flat(new, (*groups, Group(shape_of(node)[-1:])))


def _reshaped_next(node: fx.Node) -> bool:
    """Whether a reader of `node`, looking through permutes, is a reshape."""
    return any(
        user.target is aten.reshape.default or (user.target is aten.permute.default and _reshaped_next(user))
        for user in node.users
    )


_TABLE: dict[Any, PushRule] = {
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys((aten.sum.default, aten.any.default, aten.all.default), _full_reduction),
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.cumsum.default: _along(1),
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    torch.ops.autoshard.circular_pad.default: _pad,
    torch.ops.autoshard.circular_pad_backward.default: _pad,
    aten.flip.default: _along(1),
    aten.roll.default: _along(2),
    **dict.fromkeys((aten.gather.default, aten.scatter.src, aten.scatter_add.default), _picked),
    **dict.fromkeys((aten.split_with_sizes.default, aten.topk.default), _split),
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    torch.ops.autoshard.contract.default: _contract,
    **dict.fromkeys(ROUTED, _routed),
}


class PushViews(GraphPass):
    """Compute on the finer dims: move flattening reshapes down past every op that need not see them.

        %f: f32[64, 96]    = aten.reshape(%x, [64, 96])              // %x: f32[4, 16, 96]
        %m: f32[64, 1]     = aten.amax(%f, [1], True)
        %d: f32[64, 96]    = aten.sub(%f, %m)
        %y: f32[64, 32]    = contract(%d, %w, "m k, k n -> m n")
        %z: f32[4, 16, 32] = aten.reshape(%y, [4, 16, 32])
        ->
        %m: f32[4, 16, 1]  = aten.amax(%x, [2], True)
        %d: f32[4, 16, 96] = aten.sub(%x, %m)
        %z: f32[4, 16, 32] = contract(%d, %w, "m0 m1 k, k n -> m0 m1 n")

    A dim flattened from (batch, sequence) can be split only by whole batches; once the two are dims
    of their own, the sequence can be split alone. One forward sweep: a reshape emits nothing where it
    only merges dims, but is remembered as a `Flat`; ops in push_rules.py compute on the finer dims and
    hand the flattening on; any other reader, and the output, gets the reshape. Where partners
    disagree about the finer dims of a dim, `resolve` says which win.
    """

    requires = (ONE_SPELLING, NO_USES, PRODUCTS_ARE_CONTRACTS)
    ensures = (ONE_RESHAPE,)
    breaks = (NO_DUPLICATES, PERMUTES_FUSED, PERMUTES_ABSORBED)

    def __call__(self, joint: JointGraph) -> JointGraph:
        sweep = Sweep(push_rule)
        for node in list(joint.graph.nodes):
            sweep.visit(node)
        erase_dead(joint.graph)
        return joint
