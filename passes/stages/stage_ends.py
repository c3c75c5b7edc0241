"""By which names a stage's graph has what it is given and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.stages.stage_graph import StageGraph

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
