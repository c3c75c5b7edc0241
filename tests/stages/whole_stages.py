"""Stages one after the other in one process, forward in order and backward in reverse: what a cut is checked by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.ir.joint import JointGraph
from passes.ir.process_state import autocast_off
from passes.lower.phases import Backward, Phases, split_phases
from passes.stages.stage_graph import StageGraph

Known = Mapping[tuple[str, str], Tensor]
"""Of the whole graph, by kind and name of its inputs."""


@autocast_off()
def staged_results(
    joint: JointGraph, graphs: Sequence[StageGraph], values: Sequence[Tensor]
) -> list[Tensor | None]:
    """The flat results of `joint` on `values`, one for each of its placeholders, as its stages compute them.

    Each stage runs as two programs (`passes.lower.phases`) and is given what it says that it reads and receives.
    """
    known = {(spec.kind, spec.name): value for spec, value in zip(joint.inputs, values, strict=True)}
    run = _Run(known)
    for graph in graphs:
        run.forward(graph)
    for graph in reversed(graphs):
        run.backward(graph)
    return [run.results.get((spec.kind, spec.name)) for spec in joint.outputs]


class _Run:
    """sent, returned: per boundary what passed it in the forward and in the backward, by name of the value sent."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.results: dict[tuple[str, str], Tensor] = {}
        self.sent: dict[int, dict[str, Tensor]] = {}
        self.returned: dict[int, dict[str, Tensor]] = {}
        self._kept: dict[int, tuple[Phases, list[Tensor], list[Any]]] = {}

    def forward(self, graph: StageGraph) -> None:
        phases = split_phases(graph.joint.module, graph.joint.inputs, graph.joint.outputs)
        names = {crossing.name for crossing in graph.received}
        received = self.sent.get(graph.stage - 1, {})
        leaves = [
            received[spec.name]
            if spec.kind == "input" and spec.name in names
            else self.known[spec.kind, spec.name]
            for spec in phases.inputs
        ]
        with torch.no_grad():
            results = list(phases.forward(*leaves))
        own, last = len(graph.outputs), len(graph.outputs) + len(graph.sent)
        for index, value in zip(graph.outputs, results[:own], strict=True):
            self.results["output", f"output {index}"] = value
        self.sent[graph.stage] = {c.name: v for c, v in zip(graph.sent, results[own:last], strict=True)}
        for spec, value in zip(phases.outputs[last:], results[last:], strict=False):
            self.results[spec.kind, spec.name] = value
        self._kept[graph.stage] = phases, leaves, results

    def backward(self, graph: StageGraph) -> None:
        phases, leaves, results = self._kept.pop(graph.stage)
        if phases.backward is None:
            return
        inputs = [leaves[i] for i in phases.backward.passed] + [results[i] for i in phases.backward.saved]
        inputs += [self._tangent(graph, spec.index) for spec in phases.backward.tangents]
        with torch.no_grad():
            found = phases.backward.module(*inputs)
        names = {crossing.name for crossing in graph.received}
        for spec, value in _gradients(phases.backward, found):
            if spec in names:
                self.returned.setdefault(graph.stage - 1, {})[spec] = value
            else:
                before = self.results.get(("grad", spec))
                self.results["grad", spec] = value if before is None else before + value

    def _tangent(self, graph: StageGraph, index: int) -> Tensor:
        own = len(graph.outputs)
        if index < own:
            return self.known["tangent", f"tangent {graph.outputs[index]}"]
        return self.returned[graph.stage][graph.sent[index - own].name]


def _gradients(backward: Backward, found: Sequence[Any]) -> list[tuple[str, Tensor]]:
    pairs = zip(backward.gradients, found, strict=True)
    return [(spec.name, value) for spec, value in pairs if value is not None]
