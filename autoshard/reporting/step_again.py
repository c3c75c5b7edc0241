"""The forward and the backward of a step run again, compiled as they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from autoshard.runtime.input_side import conform
from passes.compile.compile_graph import Compiled, compile_graph
from passes.lower.phases import Phases

__all__ = ["PHASES", "StepAgain"]

PHASES = ("forward", "backward")
"""Names of ranges under a profiler."""


class StepAgain:
    """The programs of a step, on the inputs that it had. They are functional: nothing of the model changes.

    All ranks must run alike.
    """

    def __init__(self, phases: Phases, inputs: Sequence[Tensor], backend: str) -> None:
        self.inputs = list(inputs)
        self._phases = phases
        self.graphs = [phases.forward]
        if phases.backward is not None:
            self.graphs.append(phases.backward.module)
        self._compiled: list[Compiled] = [compile_graph(graph, backend) for graph in self.graphs]

    @torch.no_grad()
    def run(self) -> None:
        """Once. As in a step, nothing but the loop's own holds what the backward has read."""
        backward = self._phases.backward
        with record_function(PHASES[0]):
            results = self._compiled[0](list(self.inputs))
        if backward is None:
            return
        given: list[Any] = [self.inputs[i] for i in backward.passed] + [results[i] for i in backward.saved]
        del results
        with record_function(PHASES[1]):
            values = [n.meta["val"] for n in backward.module.graph.nodes if n.op == "placeholder"]
            given += [conform(_ones(v, self.inputs), v) for v in values[len(given) :]]
            gradients = self._compiled[1](given)
            given.clear()
        del gradients


def _ones(value: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    device = inputs[0].device if inputs else torch.device("cpu")
    return torch.ones(value.shape, dtype=value.dtype, device=device)
