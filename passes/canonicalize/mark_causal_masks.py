from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

import passes.ops.attention_op  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::attention)
from passes.canonicalize.normalize_arguments import ONE_SPELLING
from passes.ir.graph_pass import GraphPass
from passes.ir.joint import JointGraph, ancestors
from passes.ir.op_traits import draws, is_pointwise, is_use, numel

__all__ = ["MarkCausalMasks"]

_MASKS = {
    torch.ops.autoshard.attention.default: 3,
    torch.ops.autoshard.attention_backward.default: 4,
}
"""Attention -> the position of its mask. Behind it come, at the end, is_causal and scale."""

_LARGEST = 2**22
"""Elements of a tensor that is computed here at once. Of a larger one a block of queries after the other is."""


@dataclass(frozen=True)
class MarkCausalMasks(GraphPass):
    """Say of an attention's mask that it is the causal one, where it is computed from constants and is.

        %m: b8[1, 1, 64, 64] = aten.le(%key_positions, %query_positions)    // of two aranges
        %o = autoshard.attention(%q, %k, %v, %m, False, 0.125)
        ->
        %o = autoshard.attention(%q, %k, %v, %m, False, 0.125, True)

    A rank with all queries then runs a kernel that knows causality, at half of the products, and one with a part of
    them the mask.
    """

    requires = (ONE_SPELLING,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        found: dict[fx.Node, bool] = {}
        for node in joint.graph.nodes:
            mask = _mask_of(node)
            if mask is not None:
                if mask not in found:
                    found[mask] = _is_causal(joint.graph, mask)
                if found[mask]:
                    node.args = (*node.args, True)
        return joint


def _mask_of(node: fx.Node) -> fx.Node | None:
    """Of an attention of which only the mask says which keys are seen."""
    position = _MASKS.get(node.target)  # type: ignore[arg-type]
    if position is None or node.kwargs or node.args[-1] is True or node.args[-2] is True:
        return None
    mask = node.args[position]
    return mask if isinstance(mask, fx.Node) else None


def _is_causal(graph: fx.Graph, mask: fx.Node) -> bool:
    """Whether `mask` is computed from constants, and lets query i see keys 0 to i."""
    queries, keys = mask.meta["val"].shape[-2:]
    made = ancestors([mask])
    if min(queries, keys) < 2 or not all(map(_is_constant, made)):
        return False
    ordered = [node for node in graph.nodes if node in made]
    large = [node for node in ordered if _is_large(node)]
    if not all(is_pointwise(node) or is_use(node) for node in large):
        return False
    with torch.no_grad():
        small = _computed([node for node in ordered if not _is_large(node)], {})
        if not large:
            return _hides_later_keys(small[mask], 0)
        read = {operand for node in large for operand in node.all_input_nodes if not _is_large(operand)}
        alike = {node: _of_one_sample(small[node]) for node in read}
        if any(value is None for value in alike.values()):
            return False
        step = max(1, _LARGEST // keys)
        blocks = ((begin, min(step, queries - begin)) for begin in range(0, queries, step))
        return all(
            _hides_later_keys(_block(large, alike, queries, *block)[mask], block[0]) for block in blocks
        )


def _is_constant(node: fx.Node) -> bool:
    return node.op == "call_function" and not draws(node)


def _is_large(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) and numel(node) > _LARGEST


def _computed(nodes: Iterable[fx.Node], values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """The values of `nodes`, which are in order, and `values`, which they are computed from."""
    found = dict(values)
    for node in nodes:
        args, kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
        found[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return found


def _of_one_sample(value: Tensor) -> Tensor | None:
    """[..., s, t] -> [s, t] or fewer dims, if it is the same for all samples and heads."""
    while value.ndim > 2:
        if not value.equal(value[:1].expand_as(value)):
            return None
        value = value[0]
    return value


def _block(
    nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any], queries: int, begin: int, count: int
) -> dict[fx.Node, Any]:
    """The values of pointwise `nodes` for `count` queries from `begin` on. values: of what they read."""
    cut = lambda x: x.narrow(-2, begin, count) if x.ndim == 2 and x.shape[0] == queries else x
    return _computed(nodes, {node: cut(value) for node, value in values.items()})


def _hides_later_keys(mask: Tensor, first: int) -> bool:
    """Whether `mask` [..., queries, keys] of queries from `first` on hides what comes after each, and nothing else."""
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min
        if bool(((mask != 0) & ~hidden).any()):
            return False
        mask = ~hidden
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril(first)
    return mask.equal(causal.expand_as(mask))
