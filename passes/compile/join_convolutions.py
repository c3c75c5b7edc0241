"""Gradients of a convolution that were split, in one op again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from passes.compile.matching import OpWriter, drop_unread
from passes.ir.graph_pass import RankPass
from passes.ir.rank_properties import COLLECTIVES

__all__ = ["JoinConvolutions"]

_BACKWARD = torch.ops.aten.convolution_backward.default


@dataclass(frozen=True)
class JoinConvolutions(RankPass):
    """Gradients of one convolution that are made from the same operands are made by one call.

        %a = convolution_backward(%g, %x, %w, ..., [True, False, False])
        %b = convolution_backward(%g, %x, %w, ..., [False, True, True])
        ->
        %a = convolution_backward(%g, %x, %w, ..., [True, True, True])

    They are apart for the search, which may split each in its own way: then their operands differ, and they stay.
    """

    keeps = (COLLECTIVES,)

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = module.graph
        emit = OpWriter(graph)
        firsts: list[fx.Node] = []
        for node in list(graph.nodes):
            if node.target is not _BACKWARD or node.kwargs:
                continue
            first = next((n for n in firsts if n.args[:-1] == node.args[:-1]), None)
            if first is not None and not any(
                a and b for a, b in zip(_wanted(first), _wanted(node), strict=True)
            ):
                firsts.remove(first)
                node = _joined(first, node, graph, emit)
            firsts.append(node)
        drop_unread(graph)
        return module


def _wanted(node: fx.Node) -> list[bool]:
    return [bool(wanted) for wanted in node.args[-1]]  # type: ignore[union-attr]


def _joined(first: fx.Node, second: fx.Node, graph: fx.Graph, emit: OpWriter) -> fx.Node:
    wanted = [a or b for a, b in zip(_wanted(first), _wanted(second), strict=True)]
    with graph.inserting_before(first):
        made = emit(first, _BACKWARD, *first.args[:-1], wanted)
    first.replace_all_uses_with(made)
    second.replace_all_uses_with(made)
    return made
