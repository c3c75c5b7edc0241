"""`StageGraph`: what one stage of a pipeline computes, and what passes between it and its neighbours. `Assigned`: which
stage runs each op, and which part of a gradient each returns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from cost_model.errors import ShardingError
from passes.ir.graph_properties import described
from passes.ir.joint import JointGraph
from passes.stages.backward_stages import backward_stages, pair_gradients
from passes.stages.graph_parts import GraphParts, operands, passes_with_piece
from passes.stages.stage_places import (
    ForwardPlaces,
    GradientSum,
    backward_places,
    forward_places,
    gradient_sums,
    output_places,
    tangent_places,
)


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


def assign_stages(parts: GraphParts, starts: Sequence[int], stages: int) -> Assigned:
    """starts: position in `parts.forward` at which each stage but the first begins.

    Raises ShardingError if a buffer that changes is in several stages, or the backward would go from an earlier stage
    to a later one.
    """
    own = {node: bisect_right(starts, i) for i, node in enumerate(parts.forward)}
    places = forward_places(parts, own, stages - 1)
    _check_buffers(parts, places)
    sums = gradient_sums(parts)
    bounds = backward_places(parts, places, sums)
    outputs, tangents = output_places(parts, places), tangent_places(parts, places)
    of = {**places.of, **backward_stages(parts, places, bounds, stages), **tangents}
    _check_order(parts, of)
    returned = {position: _returned(found, places, of) for position, found in sums.items()}
    reach, back = _ends(parts, of, returned)
    boundaries = range(stages - 1)
    sent = tuple(tuple(n for n in parts.forward if of[n] <= b < reach.get(n, -1)) for b in boundaries)
    late = [n for n in (*tangents, *parts.backward) if n in of]
    returning = [[n for n in late if back.get(n, stages) <= b < of[n]] for b in boundaries]
    _check_pieces(parts, [*sent, *returning])
    gradients = pair_gradients(parts, sent, returning)
    return Assigned(stages, of, outputs, sums, returned, sent, gradients)


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


def _returned(found: GradientSum, places: ForwardPlaces, of: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Part of the gradient -> the last stage that holds the parameter and may have the part."""
    at = places.holders.get(found.param, frozenset((0,)))
    made = {part: of.get(part, places.last) for part in found.parts}
    return {part: max((p for p in at if p <= stage), default=stage) for part, stage in made.items()}


def _ends(
    parts: GraphParts, of: Mapping[fx.Node, int], returned: Mapping[int, Mapping[fx.Node, int]]
) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """(value of the forward -> the last stage that needs it, value of the backward -> the first that needs it)."""
    reach: dict[fx.Node, int] = {}
    back: dict[fx.Node, int] = {}
    reads = [
        (operand, of[n]) for n in (*parts.forward, *parts.backward) if n in of for operand in operands(n)
    ]
    ends = [(part, stage) for found in returned.values() for part, stage in found.items()]
    for value, stage in (*reads, *ends):
        if value in parts.in_forward:
            for leaf in parts.leaves([value], stage, of):
                reach[leaf] = max(reach.get(leaf, 0), stage)
        else:
            back[value] = min(back.get(value, stage), stage)
    return reach, back


def _check_buffers(parts: GraphParts, places: ForwardPlaces) -> None:
    for buffer in parts.changed:
        at = places.holders.get(buffer, frozenset())
        if len(at) > 1:
            name = parts.specs[buffer].name
            raise _uncuttable(
                f"the buffer {name} is read in the stages {sorted(at)}; only the one that changes it knows its value",
                parts.changed[buffer],
                "a cut before or behind all of them",
            )


def _check_pieces(parts: GraphParts, passing: Sequence[Sequence[fx.Node]]) -> None:
    for node in (node for nodes in passing for node in nodes):
        if not passes_with_piece(parts.joint, node):
            why = "what is made once for all pieces of the batch would pass from one to another"
            raise _uncuttable(why, node, "another cut, or the op's module whole in one stage")


def _check_order(parts: GraphParts, of: Mapping[fx.Node, int]) -> None:
    for node in parts.backward:
        for operand in operands(node):
            apart = of.get(operand, 0) - of.get(node, 0)
            if node in of and operand in of and (apart > 0 if operand in parts.in_forward else apart < 0):
                why = "the backward of an earlier stage would read what a later one makes"
                raise _uncuttable(why, node, "another cut")


def _uncuttable(why: str, node: fx.Node, remedy: str) -> ShardingError:
    return ShardingError(
        f"cannot cut the graph into these stages: {why}\n  {described(node)}\n  try: {remedy}"
    )
