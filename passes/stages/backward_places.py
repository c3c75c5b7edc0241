"""At which places every op of the backward may run: the latest, and the earliest.

The backward runs from the last place to the first, so an op runs no later than what it reads. It runs where the values
of the forward that it reads are at hand, and the parameters; parts of a parameter's gradient where the parameter is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from passes.stages.forward_places import ForwardPlaces, output_places
from passes.stages.gradient_sums import GradientSum
from passes.stages.graph_parts import GraphParts, is_glued, model_line, operands, passes_with_piece


@dataclass(frozen=True)
class Reach:
    """Where an op of the backward may run, as far as its operands of the forward say: from `first` to `last`, and where
    all of `held` are. An earlier place knows nothing of what a later one makes."""

    first: int
    last: int
    held: tuple[frozenset[int], ...]

    def latest(self, ceiling: int) -> int:
        """No later than `ceiling`. Where nothing will do, values of the forward are handed on to `ceiling`, or a
        parameter is held there too."""
        limit = min(ceiling, self.last)
        if not self.held:
            return limit if limit >= self.first else ceiling
        there = frozenset.intersection(*self.held)
        within = [place for place in there if self.first <= place <= ceiling]
        return max((place for place in within if place <= limit), default=max(within, default=ceiling))

    def earliest(self, latest: int) -> int:
        """The first of the places up to `latest` that will do, without a gap."""
        if latest > self.last:
            return latest
        if not self.held:
            return min(self.first, latest)
        place = latest
        while place > self.first and all(place in at and place - 1 in at for at in self.held):
            place -= 1
        return place


@dataclass(frozen=True)
class BackwardPlaces:
    """latest, earliest: of every op of the backward that is no sum of a parameter's gradients.
    wanted: value -> a place at which a gradient that it is part of is returned."""

    latest: Mapping[fx.Node, int]
    earliest: Mapping[fx.Node, int]
    wanted: Mapping[fx.Node, int]


def backward_places(
    parts: GraphParts, places: ForwardPlaces, sums: Mapping[int, GradientSum]
) -> BackwardPlaces:
    summed = {node for found in sums.values() for node in found.ops}
    anchors, shared = _anchors(parts, places, sums, summed)
    tangents = _tangent_places(parts, places)
    latest: dict[fx.Node, int] = {}
    reaches: dict[fx.Node, Reach] = {}
    for node in parts.backward:
        read = operands(node)
        ceiling = min(
            (latest.get(n, tangents.get(n, places.last)) for n in read if n in latest or n in tangents),
            default=places.last,
        )
        reach = reaches[node] = _reach(parts, places, node, anchors.get(node))
        latest[node] = reach.latest(ceiling)
    wanted = {
        part: max((p for p in at if p <= latest[part]), default=latest[part])
        for part, at in shared.items()
        if part in latest
    }
    earliest = dict(wanted)
    for node in reversed(parts.backward):
        if node in summed:
            continue
        own = latest[node] if _reads_once_made(parts, node) else reaches[node].earliest(latest[node])
        earliest[node] = max(own, earliest.get(node, own))
        for operand in operands(node):
            if operand in parts.in_backward:
                earliest[operand] = max(earliest.get(operand, 0), earliest[node])
    return BackwardPlaces(
        {n: p for n, p in latest.items() if n not in summed},
        {n: p for n, p in earliest.items() if n not in summed},
        wanted,
    )


def _reads_once_made(parts: GraphParts, node: fx.Node) -> bool:
    """Whether it reads what the backward makes once for all pieces of a batch, which does not pass to other places."""
    return any(n in parts.after and not passes_with_piece(parts.joint, n) for n in operands(node))


def _reach(parts: GraphParts, places: ForwardPlaces, node: fx.Node, anchor: frozenset[int] | None) -> Reach:
    first, last = 0, places.last
    held = [] if anchor is None else [anchor]
    for operand in operands(node):
        if operand in places.of:
            first, last = max(first, places.of[operand]), min(last, places.at_hand[operand])
        elif operand.op == "placeholder" or operand in parts.everywhere:
            kept = (root for root in parts.roots(operand) if root in parts.held)
            held.extend(places.holders[root] for root in kept if root in places.holders)
    return Reach(first, last, tuple(held))


def _anchors(
    parts: GraphParts, places: ForwardPlaces, sums: Mapping[int, GradientSum], summed: set[fx.Node]
) -> tuple[dict[fx.Node, frozenset[int]], dict[fx.Node, frozenset[int]]]:
    """(part of a gradient -> where its parameter is, part that others read as well -> where its parameter is).

    Of the places that have the parameter those where the line of the model runs that the part differentiates."""
    readers: dict[fx.Node, set[fx.Node]] = {}
    for node in parts.backward:
        for operand in operands(node):
            readers.setdefault(operand, set()).add(node)
    own: dict[fx.Node, frozenset[int]] = {}
    shared: dict[fx.Node, frozenset[int]] = {}
    for found in sums.values():
        at = places.holders.get(found.param, frozenset())
        for part in found.parts:
            alone = readers.get(part, set()) <= summed
            if at and alone and part in parts.in_backward and not is_glued(part):
                lines = {
                    places.of[n]
                    for n in places.readers.get(found.param, ())
                    if model_line(n) == model_line(part)
                }
                own[part] = frozenset(lines) or at
            elif at:
                shared[part] = at
    return own, shared


def _tangent_places(parts: GraphParts, places: ForwardPlaces) -> dict[fx.Node, int]:
    at = output_places(parts, places)
    return {n: at.get(spec.index, places.last) for n, spec in parts.specs.items() if spec.kind == "tangent"}
