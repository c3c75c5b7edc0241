"""Where values of the forward are, and where ops of the backward may run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.ir.op_traits import is_cast, is_collect, is_use, is_view
from passes.stages.graph_parts import GraphParts, is_glued, model_line, operands, passes_with_piece


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


_aten = torch.ops.aten
_SCALED = (_aten.neg.default, _aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar)


@dataclass(frozen=True)
class GradientSum:
    """result: the gradient of `param`. ops: the sum, in the graph's order. parts: what is summed."""

    param: fx.Node
    result: fx.Node
    ops: tuple[fx.Node, ...]
    parts: tuple[fx.Node, ...]

    def part_of(self, here: frozenset[fx.Node]) -> tuple[fx.Node | None, dict[fx.Node, fx.Node | None]]:
        """The gradient if all parts but `here` are zero, and what each op of the sum then is: None for zero, another
        value where a sum has one operand left."""
        made: dict[fx.Node, fx.Node | None] = {part: part if part in here else None for part in self.parts}
        for node in self.ops:
            left = [x for x in (made[x] for x in operands(node) if x in made) if x is not None]
            whole = len(left) == sum(x in made for x in operands(node))
            made[node] = node if whole else left[0] if left else None
        return made[self.result], made


def gradient_sums(parts: GraphParts) -> dict[int, GradientSum]:
    """By position among `joint.outputs`; every gradient that is one."""
    returned = Counter(parts.results)
    found: dict[int, GradientSum] = {}
    for position, (spec, result) in enumerate(zip(parts.joint.outputs, parts.results, strict=True)):
        if spec.kind == "grad" and result is not None:
            ops = _ops(parts, result, returned)
            leaves = dict.fromkeys(x for n in ops for x in operands(n) if x in parts.after and x not in ops)
            order = [n for n in parts.backward if n in ops] if len(ops) > 1 else list(ops)
            param = parts.joint.placeholders[spec.index]
            found[position] = GradientSum(param, result, tuple(order), tuple(leaves) or (result,))
    return found


def _ops(parts: GraphParts, result: fx.Node, returned: Mapping[fx.Node | None, int]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [result]
    while stack:
        node = stack.pop()
        wanted = 1 if node is result else 0
        if node in found or returned[node] != wanted or not all(n in found for n in _readers(node)):
            continue
        if node in parts.in_backward and node in parts.after and _is_linear(node, parts):
            found.add(node)
            stack.extend(operands(node))
    return found


def _is_linear(node: fx.Node, parts: GraphParts) -> bool:
    """Whether `node` may be done for every part of the sum by itself."""
    read = operands(node)
    if node.target is _aten.add.Tensor and len(read) == 2:
        value = node_value(node)
        alike = [n for n in read if node_value(n).shape == value.shape and node_value(n).dtype == value.dtype]
        return len(alike) == len(node.args) == 2 and not node.kwargs and set(read) <= parts.after
    if is_collect(node):
        return node.args[1] == "sum"
    if len(read) != 1 or is_glued(node):
        return False
    return is_view(node) or is_cast(node) or node.target in _SCALED


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if is_use(user):
            yield from _readers(user)
        elif user.op != "output":
            yield user


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
    tangents = tangent_places(parts, places)
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


def tangent_places(parts: GraphParts, places: ForwardPlaces) -> dict[fx.Node, int]:
    """Of each tangent the place that its output is returned by."""
    at = output_places(parts, places)
    return {n: at.get(spec.index, places.last) for n, spec in parts.specs.items() if spec.kind == "tangent"}
