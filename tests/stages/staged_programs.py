"""The programs of a stage from its graph, as a runner would have them: run in the order that a schedule says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.ir.joint import GraphInput
from passes.lower.phases import split_backward, split_phases
from passes.stages.stage_graph import StageGraph


class GraphPrograms:
    """values: of one piece, by (kind, name) of the whole graph's inputs, for every piece.

    results: (kind, name) of outputs and gradients -> sum over the pieces."""

    def __init__(self, graph: StageGraph, values: Sequence[Mapping[tuple[str, str], Tensor]]) -> None:
        self.graph, self.values = graph, values
        phases = split_phases(graph.joint.module, graph.joint.inputs, graph.joint.outputs)
        assert phases.backward is not None
        self.phases, self._backward = phases, phases.backward
        self.names = [crossing.name for crossing in graph.received]
        self.returning = [crossing.name for crossing in graph.received if crossing.gradient]
        self.halves = split_backward(self._backward, self.returning)
        self.results: dict[tuple[str, str], Tensor] = {}
        self._kept: dict[int, Any] = {}

    def forward(self, piece: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        given = dict(zip(self.names, received, strict=True))
        leaves = [self._leaf(piece, spec, given) for spec in self.phases.inputs]
        found = list(self.phases.forward(*leaves))
        self._kept[piece] = leaves, found
        own, last = len(self.graph.outputs), len(self.graph.outputs) + len(self.graph.sent)
        for index, value in zip(self.graph.outputs, found[:own], strict=True):
            self._add(("output", f"output {index}"), value)
        return found[own:last]

    def backward(self, piece: int, returned: Sequence[Tensor]) -> Sequence[Tensor]:
        found = self._backward.module(*self._inputs(piece, returned))
        return self._taken(range(len(found)), found)

    def backward_input(self, piece: int, returned: Sequence[Tensor]) -> Sequence[Tensor]:
        inputs = self._inputs(piece, returned)
        found = self.halves.input(*inputs)
        count = len(self.halves.first)
        self._kept[piece] = [inputs[i] for i in self.halves.given] + list(found[count:])
        return self._taken(self.halves.first, found[:count])

    def backward_weight(self, piece: int) -> None:
        self._taken(self.halves.second, self.halves.weight(*self._kept.pop(piece)))

    def _leaf(self, piece: int, spec: GraphInput, given: Mapping[str, Tensor]) -> Tensor:
        return (
            given[spec.name]
            if spec.kind == "input" and spec.name in given
            else self.values[piece][spec.kind, spec.name]
        )

    def _inputs(self, piece: int, returned: Sequence[Tensor]) -> list[Tensor]:
        leaves, found = self._kept.pop(piece)
        own = len(self.graph.outputs)
        back = iter(returned)
        tangents = {own + i: next(back) for i, crossing in enumerate(self.graph.sent) if crossing.gradient}
        known = self.values[piece]
        for index, whole in enumerate(self.graph.outputs):
            tangents[index] = known.get(("tangent", f"tangent {whole}"), torch.zeros(()))
        read = [leaves[i] for i in self._backward.passed] + [found[i] for i in self._backward.saved]
        return [*read, *(tangents[spec.index] for spec in self._backward.tangents)]

    def _taken(self, places: Sequence[int], found: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients of what was received; those of parameters are added up."""
        named = {self._backward.gradients[i].name: value for i, value in zip(places, found, strict=True)}
        for name, value in named.items():
            if name not in self.returning and value is not None:
                self._add(("grad", name), value)
        return [value for name in self.returning if (value := named.get(name)) is not None]

    def _add(self, key: tuple[str, str], value: Tensor) -> None:
        self.results[key] = self.results[key] + value if key in self.results else value.clone()
