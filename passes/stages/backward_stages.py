"""Which stage runs each op of the backward: a minimum cut of bytes over each boundary between two stages.

Most ops can run in one stage only. What is left lies around a boundary: sums of gradients, casts, expands. Of those as
few bytes as possible are sent, in shapes that were sent the other way, so that every gradient is one of a value that
was sent; and ties go by the line of the model that an op came from: that of what was sent, or of who reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import torch
from torch import fx

from passes.ir.joint import results_nbytes
from passes.ir.op_traits import is_use
from passes.stages.graph_parts import GraphParts, Line, TensorKind, is_glued, model_line, operands
from passes.stages.stage_places import BackwardPlaces, ForwardPlaces


def sent_kinds(parts: GraphParts, places: ForwardPlaces, boundary: int) -> list[fx.Node]:
    """The values that pass between stages `boundary` and `boundary + 1` and may have a gradient."""
    return [
        n
        for n in parts.forward
        if places.of[n] <= boundary < places.reach.get(n, -1) and n in parts.differentiable
    ]


def backward_stages(
    parts: GraphParts, places: ForwardPlaces, bounds: BackwardPlaces, stages: int
) -> dict[fx.Node, int]:
    """Every op of the backward that is no sum of a parameter's gradients -> its stage."""
    lines = _lines(parts, places)
    found = dict.fromkeys(bounds.latest, 0)
    for boundary in range(stages - 1):
        sent = sent_kinds(parts, places, boundary)
        makers, readers = _lines_around(parts, places, sent, boundary)
        for node in _Boundary(parts, bounds, lines, makers, readers, boundary).late(sent):
            found[node] = boundary + 1
    for node in parts.backward:  # in order: never later than what is read
        if node in found:
            read = [found[n] for n in operands(node) if n in found]
            ceiling = min(read, default=found[node])
            found[node] = ceiling if is_glued(node) else min(found[node], ceiling)
    return found


def _lines(parts: GraphParts, places: ForwardPlaces) -> dict[Line, tuple[int, int]]:
    """Line of the model -> the first and the last stage that runs it."""
    found: dict[Line, tuple[int, int]] = {}
    for node in parts.forward:
        stage = places.of[node]
        first, last = found.get(model_line(node), (stage, stage))
        found[model_line(node)] = min(first, stage), max(last, stage)
    return found


def _lines_around(
    parts: GraphParts, places: ForwardPlaces, sent: Sequence[fx.Node], boundary: int
) -> tuple[frozenset[Line], frozenset[Line]]:
    """(lines that make what is sent, lines that read it behind the boundary)."""
    passing = set(sent)
    late = [n for n in parts.forward if places.of[n] > boundary]
    readers = {model_line(n) for n in late if not passing.isdisjoint(operands(n))}
    makers = {model_line(n) for n in sent}
    return frozenset(makers - readers), frozenset(readers - makers)


@dataclass(frozen=True)
class _Boundary:
    """Which ops run behind the boundary, in a later stage. An op is late if a late op reads it."""

    parts: GraphParts
    bounds: BackwardPlaces
    lines: Mapping[Line, tuple[int, int]]
    makers: frozenset[Line]
    readers: frozenset[Line]
    boundary: int

    def late(self, sent: list[fx.Node]) -> list[fx.Node]:
        at = self.boundary
        low, high = self.bounds.earliest, self.bounds.latest
        fixed = [n for n in low if low[n] > at]
        free = {n for n in low if low[n] <= at < high[n]}
        if not free:
            return fixed
        network = nx.DiGraph()
        network.add_nodes_from(("late", "early"))
        kinds = set(map(self.parts.kinds, sent))
        for node in self.parts.backward:
            if node in low:
                self._add(network, node, free, kinds)
        _, (late, _) = nx.minimum_cut(network, "late", "early")
        return [*fixed, *(n for n in self.parts.backward if n in free and n.name in late)]

    def _add(
        self, network: nx.DiGraph, node: fx.Node, free: set[fx.Node], kinds: set[tuple[TensorKind, ...]]
    ) -> None:
        if node in free:
            self._add_line(network, node)
        end = self._end(node, free)
        for operand in operands(node):
            if operand in self.bounds.latest and (operand in free or node in free):
                self._add_read(network, operand, self._end(operand, free), end, kinds, is_glued(node))
        wanted = self.bounds.wanted.get(node)
        if wanted is not None and wanted <= self.boundary and end != "early":
            self._add_read(network, node, end, "early", kinds, False)

    def _end(self, node: fx.Node, free: set[fx.Node]) -> str:
        if node in free:
            return node.name
        return "late" if self.bounds.earliest[node] > self.boundary else "early"

    def _add_read(
        self,
        network: nx.DiGraph,
        value: fx.Node,
        maker: str,
        reader: str,
        kinds: set[tuple[TensorKind, ...]],
        glued: bool,
    ) -> None:
        if maker != "late" and reader != "early":
            network.add_edge(reader, maker)  # no capacity: a late op reads nothing early
        if maker == "early" or reader == "late":
            return
        if glued:
            network.add_edge(maker, reader)
            return
        sent = f"{value.name} sent"
        if not network.has_edge(maker, sent):
            alike = isinstance(value.meta["val"], torch.Tensor) and self.parts.kinds(value) in kinds
            # How often the bytes of a gradient count that is like nothing sent.
            weight = 1 if alike else 1 << 24
            # A byte weighs more than all ties together: one each.
            network.add_edge(maker, sent, capacity=results_nbytes(value) * weight * (1 << 16))
        network.add_edge(sent, reader)

    def _add_line(self, network: nx.DiGraph, node: fx.Node) -> None:
        line = model_line(node)
        run = self.lines.get(line, (0, self.boundary + 1))
        if line in self.readers or run[0] > self.boundary:
            network.add_edge("late", node.name, capacity=1)
        elif line in self.makers or run[1] <= self.boundary:
            network.add_edge(node.name, "early", capacity=1)


_SUM = torch.ops.aten.add.Tensor


def pair_gradients(
    parts: GraphParts,
    sent: Sequence[Sequence[fx.Node]],
    returning: Sequence[Sequence[fx.Node]],
) -> tuple[Mapping[fx.Node, fx.Node], ...]:
    """Per boundary: value sent -> gradient returned. A pair that passes several boundaries is one at all of them.

    Among values alike, the one that comes from the line of the model that the gradient goes back to. A gradient that is
    like nothing that was sent (of a view that an output of the call is, too) is paired with itself.
    """
    known: dict[fx.Node, fx.Node] = {}
    found: list[Mapping[fx.Node, fx.Node]] = []
    for values, gradients in zip(sent, returning, strict=True):
        free = [value for value in values if value in parts.differentiable]
        pairs: dict[fx.Node, fx.Node] = {}
        for gradient in sorted(gradients, key=lambda n: known.get(n) not in free):
            value = known[gradient] if known.get(gradient) in free else _match(parts, gradient, free)
            known[gradient] = value
            pairs[value] = gradient
            if value is not gradient:
                free.remove(value)
        alone = [gradient for gradient in gradients if pairs.get(gradient) is gradient]
        found.append({value: pairs[value] for value in (*values, *alone) if value in pairs})
    return tuple(found)


def _match(parts: GraphParts, gradient: fx.Node, values: Sequence[fx.Node]) -> fx.Node:
    kinds = parts.kinds(gradient)
    alike = [value for value in values if parts.kinds(value) == kinds]
    if not alike:
        return gradient
    lines = _read_by(gradient)
    return max(
        alike, key=lambda value: (model_line(value) in lines, model_line(value)[0] in {m for m, _ in lines})
    )


def _read_by(gradient: fx.Node) -> set[tuple[str, str]]:
    """The lines of the ops that differentiate by the value of which `gradient` is one, behind sums."""
    stack, found, seen = list(gradient.users), set[tuple[str, str]](), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in seen or node.op == "output":
            continue
        seen.add(node)
        if is_use(node) or node.target is _SUM:
            stack.extend(node.users)
        else:
            found.add(model_line(node))
    return found
