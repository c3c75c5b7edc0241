"""Where the values of the forward are: the place that makes each, and the last that reads it.

A place is a stage, or one op: with a place of its own for every op this says what any cut would send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from passes.stages.graph_parts import GraphParts, is_glued, operands


@dataclass(frozen=True)
class ForwardPlaces:
    """of:      op of the forward -> its place.
    reach:   value -> the last place whose forward has it handed on; absent: no place but its own.
    at_hand: value -> the last place that can make or has it.
    readers: placeholder -> the ops of the forward that read it, through ops that every place has or not.
    holders: placeholder -> the places whose forward reads it.
    last:    the last place.
    """

    of: Mapping[fx.Node, int]
    reach: Mapping[fx.Node, int]
    at_hand: Mapping[fx.Node, int]
    readers: Mapping[fx.Node, Sequence[fx.Node]]
    holders: Mapping[fx.Node, frozenset[int]]
    last: int


def forward_places(parts: GraphParts, own: Mapping[fx.Node, int], last: int) -> ForwardPlaces:
    """own: op -> place, never falling along the graph; results of one op are where the op is."""
    of: dict[fx.Node, int] = {}
    for node in parts.forward:
        of[node] = of.get(operands(node)[0], own[node]) if is_glued(node) else own[node]
    reach: dict[fx.Node, int] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in parts.forward:
        for leaf in parts.leaves(operands(node), of[node], of):
            if leaf.op == "placeholder":
                readers.setdefault(leaf, []).append(node)
            elif of[leaf] < of[node]:
                reach[leaf] = max(reach.get(leaf, 0), of[node])
    holders = {leaf: {of[node] for node in found} for leaf, found in readers.items()}
    for buffer, new in parts.changed.items():
        holders.setdefault(buffer, set()).add(of.get(new, last))
    at_hand: dict[fx.Node, int] = {}
    for node in parts.forward:
        at_hand[node] = reach.get(node, of[node])
        if parts.is_sent_as_operand(node):
            at_hand[node] = max(at_hand[node], at_hand[operands(node)[0]])
    return ForwardPlaces(of, reach, at_hand, readers, {n: frozenset(p) for n, p in holders.items()}, last)


def output_places(parts: GraphParts, places: ForwardPlaces) -> dict[int, int]:
    """Tensor output of the call -> the place that returns it: where it is made; the last, if that is anywhere."""
    ends = zip(parts.joint.outputs, parts.results, strict=True)
    return {
        spec.index: places.last if node is None else places.of.get(node, places.last)
        for spec, node in ends
        if spec.kind == "output"
    }
