"""Forward and backward of a program, each run op by op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.reporting.timed_run import TimedRun
from autoshard.runtime.leaves import conform
from autoshard.runtime.observe import Marks
from passes.compile.expand_ops import expand_ops
from passes.lower.phases import Phases

__all__ = ["TimedGraph", "TimedPhases", "ones_for"]

Ran = tuple[TimedRun, Sequence[Any]]
"""What was timed, and the results."""


class TimedGraph:
    """A graph to be run op by op, any number of times. It is functional: nothing of the model changes."""

    def __init__(self, module: fx.GraphModule, marks: Marks) -> None:
        self._marks = marks
        self._module = expand_ops(module)
        self.takes = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]

    @torch.no_grad()
    def run(self, inputs: Sequence[Tensor]) -> Ran:
        timed = TimedRun(self._module, self._marks)
        given = [conform(value, like) for value, like in zip(inputs, self.takes, strict=True)]
        return timed, timed.run(*given)


class TimedPhases:
    """Of one program, or of a piece's."""

    def __init__(self, phases: Phases, marks: Marks) -> None:
        self._phases = phases
        self.forward = TimedGraph(phases.forward, marks)
        self._backward = None if phases.backward is None else TimedGraph(phases.backward.module, marks)

    def backward(
        self, inputs: Sequence[Tensor], results: Sequence[Any], tangents: Sequence[Tensor] | None = None
    ) -> Ran | None:
        """inputs, results: of the forward. tangents: ones where there are none. None: there is no backward."""
        graph = self._phases.backward
        if graph is None or self._backward is None:
            return None
        given = [inputs[i] for i in graph.passed] + [results[i] for i in graph.saved]
        if tangents is None:
            tangents = ones_for(self._backward.takes[len(given) :], inputs)
        return self._backward.run([*given, *tangents])


def ones_for(values: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that look like `values`, on the device of `inputs`."""
    device = inputs[0].device if inputs else torch.device("cpu")
    return [conform(torch.ones(v.shape, dtype=v.dtype, device=device), v) for v in values]
