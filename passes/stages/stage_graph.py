"""`StageGraph`: what one stage of a pipeline computes, and what passes between it and its neighbours. `Assigned`: which
stage runs each op, and which part of a gradient each returns.

Which stage runs each op of the backward: a minimum cut of bytes over each boundary between two stages.

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

from passes.ir.joint import JointGraph, results_nbytes
from passes.ir.op_traits import is_use
from passes.stages.graph_parts import GraphParts, Line, TensorKind, is_glued, model_line, operands
from passes.stages.stage_places import BackwardPlaces, ForwardPlaces, GradientSum, gradient_sums


@dataclass(frozen=True)
class Crossing:
    """A tensor that stage `source` sends to stage `source + 1` in the forward of every piece.

    Stages send to their neighbours only. What a later stage reads passes through all between, which hand it on as it
    is; so does its gradient, which takes the way back.

    name:     the op of the whole graph that made it. made: the stage of that op.
    gradient: whether a gradient comes back in the backward, of the same shape and dtype.
    value:    False of a gradient that is like no value sent: the forward sends nothing, the graph's output is zeros and
              stage `source + 1` may be given anything.
    """

    name: str
    source: int
    made: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    value: bool = True


@dataclass(frozen=True)
class StageGraph:
    """Stage `stage` of `stages`, as a joint graph like any other.

    joint:    inputs: the parameters, buffers and constants that the stage holds; as kind "input" what it reads of the
              call, then `received`; tangents of its outputs; the seed. outputs: its share of the call's, then
              `sent`; new buffers; gradients of its parameters, and of what it received.
    inputs:   tensors of the call that it reads, by position there; in the graph they have index 0, 1, ...
    outputs:  tensor outputs of the call that it returns, by position there; in the graph index 0, 1, ...
    received: from stage `stage - 1`, in the graph the inputs after `inputs`. The gradients of those with one are
              outputs of kind "grad" with their names, and are sent to stage `stage - 1`.
    sent:     to stage `stage + 1`, in the graph the outputs after `outputs`. Those with a gradient have a tangent.
    summed:   parameters that the stage shares with others, each with the stages whose gradients are parts of its
              gradient: to be added up before the update.
    """

    stage: int
    stages: int
    joint: JointGraph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]
    summed: Mapping[str, tuple[int, ...]]

    @staticmethod
    def only(joint: JointGraph) -> StageGraph:
        """The one stage that is all of a call."""
        ends = [*joint.inputs, *joint.outputs]
        inputs, outputs = (
            range(1 + max((end.index for end in ends if end.kind == kind), default=-1))
            for kind in ("input", "output")
        )
        return StageGraph(0, 1, joint, tuple(inputs), tuple(outputs), (), (), {})


Leaf = tuple[str, str]
"""Kind and name of an input of a call's graph, or of a result."""


@dataclass(frozen=True)
class StageEnds:
    """Placeholders by their names in the graph, which a rank's program shares; results by their places.

    leaves:   what every step has once: parameters, buffers, constants, seed, and of the call what the stage reads.
    received: of what comes from the stage before, in order. returned: of the gradients of what is sent, in order.
    tangents: output of the call, by index -> its gradient, where one is read.
    sent:     places among the results. given_back: of the gradients of what is received that have one, in order.
    results:  place -> what the whole graph calls it, of all others.
    """

    leaves: Mapping[Leaf, str]
    received: tuple[str, ...]
    returned: tuple[str, ...]
    tangents: Mapping[int, str]
    sent: tuple[int, ...]
    given_back: tuple[int, ...]
    results: Mapping[int, Leaf]

    @staticmethod
    def of(graph: StageGraph) -> StageEnds:
        joint, own = graph.joint, len(graph.outputs)
        names = dict(zip(joint.inputs, (node.name for node in joint.placeholders), strict=True))
        passing = {crossing.name for crossing in graph.received}
        late = {spec.index: name for spec, name in names.items() if spec.kind == "tangent"}
        given = {
            spec.index: name
            for spec, name in names.items()
            if spec.kind == "input" and spec.index >= len(graph.inputs)
        }
        ends = list(enumerate(joint.outputs))
        sent = tuple(i for i, end in ends if end.kind == "output" and end.index >= own)
        gradients = {end.name: i for i, end in ends if end.kind == "grad" and end.name in passing}
        back = tuple(gradients[c.name] for c in graph.received if c.gradient)
        return StageEnds(
            leaves={
                (spec.kind, spec.name): name
                for spec, name in names.items()
                if spec.kind != "tangent" and name not in given.values()
            },
            received=tuple(given[index] for index in sorted(given)),
            returned=tuple(late[own + i] for i, c in enumerate(graph.sent) if c.gradient),
            tangents={whole: late[i] for i, whole in enumerate(graph.outputs) if i in late},
            sent=sent,
            given_back=back,
            results={
                i: ("output", f"output {graph.outputs[end.index]}")
                if end.kind == "output"
                else (end.kind, end.name)
                for i, end in ends
                if i not in (*sent, *back)
            },
        )


@dataclass(frozen=True)
class Assigned:
    """of:        op of forward or backward, but for sums of gradients, and tangents -> its stage.
    outputs:   tensor output of the call -> the stage that returns it.
    sums:      by position among the joint graph's outputs: the gradients, and what they are summed from.
    returned:  likewise, for each part of the sum the stage that returns it: one that holds the parameter.
    sent:      per boundary, the values that pass it in the forward.
    gradients: per boundary, what passes it in the backward, by the value sent of which it is said to be the gradient;
               one that is like no value, by itself.
    """

    stages: int
    of: Mapping[fx.Node, int]
    outputs: Mapping[int, int]
    sums: Mapping[int, GradientSum]
    returned: Mapping[int, Mapping[fx.Node, int]]
    sent: tuple[tuple[fx.Node, ...], ...]
    gradients: tuple[Mapping[fx.Node, fx.Node], ...]

    def passing(self, boundary: int) -> tuple[tuple[fx.Node, ...], Mapping[fx.Node, fx.Node]]:
        """(all that passes between stages `boundary` and `boundary + 1`, the gradients of it)."""
        if not 0 <= boundary < self.stages - 1:
            return (), {}
        back = self.gradients[boundary]
        return tuple(dict.fromkeys((*self.sent[boundary], *back))), back

    def gradient_stages(self, position: int) -> tuple[int, ...]:
        """The stages that return a part of the gradient at that position."""
        return tuple(sorted(set(self.returned.get(position, {}).values())))


def assigned_like(first: Assigned, parts: GraphParts) -> Assigned:
    """`first` for the graph of another piece of the batch, which has the same ops: what sizes decide is as there."""
    here = {node.name: node for node in parts.joint.graph.nodes}
    moved = lambda stages: {here[node.name]: stage for node, stage in stages.items()}
    return Assigned(
        first.stages,
        moved(first.of),
        first.outputs,
        gradient_sums(parts),
        {position: moved(stages) for position, stages in first.returned.items()},
        tuple(tuple(here[node.name] for node in nodes) for nodes in first.sent),
        tuple({here[v.name]: here[g.name] for v, g in back.items()} for back in first.gradients),
    )


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
    parts: GraphParts, sent: Sequence[Sequence[fx.Node]], returning: Sequence[Sequence[fx.Node]]
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
