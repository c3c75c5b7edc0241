"""Attention reads keys and values of grouped heads as they are, and not written out for each head of queries."""

from __future__ import annotations

import torch
from torch import fx

import passes.ops.attention_op  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::attention)
from passes.canonicalize.normalize_arguments import NO_DUPLICATES, ONE_SPELLING
from passes.ir.graph_pass import (
    OpPass,
    call_like,
    emit_at,
    ints_at,
    replace,
    shape_of,
    tensor_at,
)

aten = torch.ops.aten

_KEYS = {
    torch.ops.autoshard.attention.default: 1,
    torch.ops.autoshard.attention_backward.default: 2,
}
"""Attention -> the position of its keys. Values come next."""


class GroupHeads(OpPass):
    """Take an expansion of keys and values over the heads of a group, and the sum of their gradients, into attention.

        %e: f32[2, 4, 7, 64, 16] = aten.expand(%k, [2, 4, 7, 64, 16])       // of [2, 4, 1, 64, 16]
        %w: f32[2, 28, 64, 16] = aten.reshape(%e, [2, 28, 64, 16])          // %x of values likewise
        %o = autoshard.attention(%q, %w, %x, ...)
        ->
        %k1: f32[2, 4, 64, 16] = aten.reshape(%k, [2, 4, 64, 16])
        %o = autoshard.attention(%q, %k1, %v1, ...)

    So what moves, and what is kept for the backward, are the heads that there are.
    """

    requires = (ONE_SPELLING,)
    breaks = (NO_DUPLICATES,)

    def rewrite(self, node: fx.Node) -> None:
        if node.target in _KEYS:
            _group(node)


def _group(node: fx.Node) -> None:
    position = _KEYS[node.target]  # type: ignore[index]
    keys, values = (tensor_at(node, position + i) for i in (0, 1))
    sources = _expanded(keys), _expanded(values)
    if sources[0] is None or sources[1] is None or shape_of(sources[0])[:3] != shape_of(sources[1])[:3]:
        return
    results = {int(user.args[1]): user for user in node.users}  # type: ignore[arg-type]
    grads = [results[i] for i in (1, 2) if position == 2 and i in results and results[i].users]
    sums = [_sum_of(grad, shape_of(sources[0])) for grad in grads]
    if None in sums:
        return
    args = list(node.args)
    args[position : position + 2] = [_flat(node, source) for source in sources if source is not None]
    new = call_like(node, *args)
    node.replace_all_uses_with(new)
    for index, result in results.items():
        result.meta["val"] = new.meta["val"][index]
    for total, grad in zip(sums, grads, strict=True):
        assert total is not None
        _replace_sum(total, grad)


def _expanded(operand: fx.Node) -> fx.Node | None:
    """[b, g, 1, t, d], if `operand` is that, expanded and with groups flattened: [b, g * r, t, d]."""
    expand = operand.args[0] if operand.target is aten.reshape.default else None
    if not isinstance(expand, fx.Node) or expand.target is not aten.expand.default:
        return None
    source = tensor_at(expand)
    before, wide, after = shape_of(source), shape_of(expand), shape_of(operand)
    if len(before) != 5 or len(after) != 4 or before != (*wide[:2], 1, *wide[3:]):
        return None
    return source if after == (wide[0], wide[1] * wide[2], *wide[3:]) else None


def _sum_of(grad: fx.Node, before: tuple[int, ...]) -> fx.Node | None:
    """The sum over the heads of a group, if that is all that reads `grad`. before: [b, g, 1, ...]."""
    reader, *others = grad.users
    if others or reader.target is not aten.reshape.default or len(reader.users) != 1:
        return None
    (total,) = reader.users
    split = shape_of(reader)
    if len(split) != 5 or split[:2] != before[:2] or total.target is not aten.sum.dim_IntList:
        return None
    same = total.meta["val"].dtype == reader.meta["val"].dtype
    return total if same and ints_at(total, 1) == [2] else None


def _flat(node: fx.Node, source: fx.Node) -> fx.Node:
    """[b, g, t, d] of [b, g, 1, t, d]; what is only reshaped into that is read before."""
    b, g, _, t, d = shape_of(source)
    origin = tensor_at(source) if source.target is aten.reshape.default else source
    return _reshaped(node, origin, (b, g, t, d))


def _replace_sum(total: fx.Node, grad: fx.Node) -> None:
    for reader in list(total.users):
        if reader.target is aten.reshape.default:
            reader.replace_input_with(total, grad)
    if total.users:
        replace(total, _reshaped(total, grad, shape_of(total)))


def _reshaped(point: fx.Node, x: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    if shape_of(x) == shape:
        return x
    return emit_at(point, x, aten.reshape.default, (x, list(shape)), {})
