"""The forward and the backward of a step run again, compiled as they were.

The programs are functional: nothing of the model changes. All ranks must run alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from autoshard.reporting.timed_phases import ones_for
from autoshard.runtime.compiled_pieces import Compiler, StepInPieces
from autoshard.runtime.observe import InPieces, PhaseRun
from passes.compile.compile_graph import Compiled, compile_graph
from passes.lower.phases import Phases

__all__ = ["PHASES", "Again", "PiecesAgain", "StepAgain"]

PHASES = ("forward", "backward")
"""Names of ranges under a profiler."""


class Again(Protocol):
    def run(self) -> None:
        """Once, on the inputs that the step had, in ranges of the profiler named after the phases."""
        ...


class StepAgain:
    """Of one program."""

    def __init__(self, phases: Phases, inputs: Sequence[Tensor], backend: str) -> None:
        self.inputs = list(inputs)
        self._phases = phases
        self.graphs = [phases.forward]
        if phases.backward is not None:
            self.graphs.append(phases.backward.module)
        self._compiled: list[Compiled] = [compile_graph(graph, backend) for graph in self.graphs]

    @torch.no_grad()
    def run(self) -> None:
        """As in a step, nothing but the loop's own holds what the backward has read."""
        backward = self._phases.backward
        with record_function(PHASES[0]):
            results = self._compiled[0](list(self.inputs))
        if backward is None:
            return
        given: list[Any] = [self.inputs[i] for i in backward.passed] + [results[i] for i in backward.saved]
        del results
        with record_function(PHASES[1]):
            values = [n.meta["val"] for n in backward.module.graph.nodes if n.op == "placeholder"]
            given += ones_for(values[len(given) :], self.inputs)
            gradients = self._compiled[1](given)
            given.clear()
        del gradients


class PiecesAgain:
    """Of a batch in pieces; each has ranges of its own."""

    def __init__(self, step: InPieces, inputs: Sequence[Tensor], backend: str) -> None:
        self._names, self._inputs = step.leaves, inputs
        self._step = StepInPieces(step, Compiler(backend))

    @torch.no_grad()
    def run(self) -> None:
        self._step.run(dict(zip(self._names, self._inputs, strict=True)), [_Ranges()])


class _Ranges:
    """An `Observer` by which the profiler knows the phases."""

    def begin(self, run: PhaseRun) -> None:
        self._range = record_function(run.phase)
        self._range.__enter__()

    def end(self, run: PhaseRun) -> None:
        self._range.__exit__(None, None, None)
