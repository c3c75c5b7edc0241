"""`StageGraph`: what one stage of a pipeline computes, and what passes between it and its neighbours."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from passes.ir.joint import JointGraph, ancestors, result_index
from passes.lower.phases import Backward, extract


@dataclass(frozen=True)
class Crossing:
    """A tensor that stage `source` sends to stage `source + 1` in the forward of every piece.

    Stages send to their neighbours only. What a later stage reads passes through all between, which hand it on as it
    is; so does its gradient, which takes the way back.

    name:     the op of the whole graph that made it. made: the stage of that op.
    gradient: whether a gradient comes back in the backward, of the same shape and dtype.
    value:    False of a gradient that is like no value sent: the forward sends nothing, the graph's output is zeros and
              stage `target` may be given anything.
    """

    name: str
    source: int
    made: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    value: bool = True

    @property
    def target(self) -> int:
        return self.source + 1

    @property
    def nbytes(self) -> int:
        """Of the value, and of the gradient."""
        return math.prod(self.shape) * self.dtype.itemsize


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

    @property
    def sent_nbytes(self) -> int:
        """Of the forward of one piece."""
        return sum(crossing.nbytes for crossing in self.sent if crossing.value)

    @property
    def returned_nbytes(self) -> int:
        """Of the gradients that the backward of one piece sends to the stage before."""
        return sum(crossing.nbytes for crossing in self.received if crossing.gradient)


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
class BackwardHalves:
    """input:  takes what the backward takes; returns the gradients `first`, and after them what the other half reads.
    weight: takes of the backward's inputs those at `given`, and after them what `input` returned for it; returns the
            gradients `second`.
    first, second: positions among the backward's gradients.
    """

    input: fx.GraphModule
    weight: fx.GraphModule
    first: tuple[int, ...]
    second: tuple[int, ...]
    given: tuple[int, ...]


def split_backward(backward: Backward, received: Collection[str]) -> BackwardHalves:
    """received: names of the gradients that are sent to the stage before. No op runs in both halves.

    The first half of the first stage is empty. What the second half reads of the first is kept between them; results of
    the first may be among that.
    """
    nodes: list[fx.Node] = list(backward.module.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    results = cast(tuple[fx.Node | None, ...], nodes[-1].args[0])
    places = range(len(results))
    first = tuple(i for i in places if backward.gradients[i].name in received)
    second = tuple(i for i in places if i not in first)
    early = ancestors(n for i in first if (n := results[i]) is not None)
    # Of an op with several results these are kept, and not the tuple.
    early |= {n for n in nodes if result_index(n)[0] is not n and result_index(n)[0] in early}
    ops = [n for n in nodes if n.op == "call_function"]
    soon, late = [n for n in ops if n in early], [n for n in ops if n not in early]
    read = {n for op in late for n in op.all_input_nodes} | {results[i] for i in second}
    kept = [n for n in soon if n in read]
    given = [i for i, n in enumerate(inputs) if n in read]
    return BackwardHalves(
        extract(inputs, soon, [*(results[i] for i in first), *kept]),
        extract([*(inputs[i] for i in given), *kept], late, [results[i] for i in second]),
        first,
        second,
        tuple(given),
    )
