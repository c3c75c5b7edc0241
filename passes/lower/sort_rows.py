"""Rows sorted by expert once, where products with experts follow each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from passes.canonicalize.mark_rows import regions
from passes.compile.join_linears import drop_unread
from passes.ir.graph_pass import RankPass, duplicate_module, run_rank_passes
from passes.ir.graph_properties import UNMARKED
from passes.lower.own_rows import OwnRows, behind_ids
from passes.lower.row_order import Sorting
from passes.ops.routed_ops import READ_ROWS
from passes.ops.sent_rows import returned, sent


def with_sorted_rows(module: fx.GraphModule) -> fx.GraphModule:
    """`module`, or where it has products with experts a copy after `SortRows`."""
    if not any(node.target in READ_ROWS for node in module.graph.nodes):
        return module
    return run_rank_passes(duplicate_module(module), (SortRows(),))


@dataclass(frozen=True)
class SortRows(RankPass):
    """Sort rows before the first product with their experts, and put them back after the last.

        %y: f32[64, 16] = routed_mm(%x, %up, %ids, 0, 6)
        %h: f32[64, 16] = relu(%y)
        %z: f32[64, 8]  = routed_mm(%h, %down, %ids, 0, 6)
        ->
        %order, %ends   = ...                                    // of %ids; once for all products with them
        %s: f32[64, 8]  = aten.index(%x, [%order])
        %y: f32[64, 16] = grouped_mm(%s, %up, %ends, 0, 6)
        %h: f32[64, 16] = relu(%y)
        %t: f32[64, 8]  = grouped_mm(%h, %down, %ends, 0, 6)
        %z: f32[64, 8]  = aten.index(%t, [%back])

    For a rank's joint graph. Ops between two products are done in the sorted order if they work on every row by itself.

    A rank with some of the experts has rows of these alone: %order is `own_places`, as many as there come, and values
    count as large as where experts have equally many. Put back, rows of others are 0. Tokens that were gathered for
    such rows are sent there instead, and sums that were scattered come back (`passes.ops.sent_rows`).
    """

    keeps = (UNMARKED,)

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = module.graph
        moves = {node: _moves_of(node) for node in graph.nodes if node.target in (sent, returned)}
        for number, region in enumerate(regions(graph)):
            experts = region.readers[0].meta.get("experts", 0)
            kind = OwnRows if region.experts < experts else Sorting
            kind(graph, region, experts, number).run()
        drop_unread(graph)
        _drop_marks(graph, moves)
        behind_ids(graph)
        return module


def _moves_of(mark: fx.Node) -> list[fx.Node]:
    """What makes the first operand of the second, readers first."""
    moved, source = mark.args[:2]
    found, left = dict[fx.Node, None](), [moved]
    while left:
        node = left.pop()
        if node is not source and node not in found:
            found[node] = None  # type: ignore[index]
            left += node.all_input_nodes  # type: ignore[union-attr]
    return sorted(found, reverse=True)


def _drop_marks(graph: fx.Graph, moves: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """And what moved for them alone. Where a value is read as it was marked, it moves so."""
    alive = set(graph.nodes)
    for mark, nodes in moves.items():
        if mark in alive:
            mark.replace_all_uses_with(mark.args[0])  # type: ignore[arg-type]
            graph.erase_node(mark)
        for node in nodes:
            if node in alive and not node.users:
                graph.erase_node(node)
                alive.discard(node)
