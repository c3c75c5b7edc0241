"""The step that a report saw last: predicted, run op by op, and run again as it was compiled.

The programs are functional: nothing of the model changes. All ranks must run alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from autoshard.reporting.probe import PiecesProbe, WholeProbe, ones_for
from autoshard.reporting.tracks import PHASES, Tracks, run_tracks
from autoshard.runtime.compiled_pieces import Compiler, StepInPieces, parts_of
from autoshard.runtime.observe import InPieces, Marks, PhaseRun
from passes.compile.compile_graph import Compiled, compile_graph
from passes.lower.phases import Phases
from passes.predict.predict_pieces import predict_pieces
from passes.predict.predict_step import Prediction, predict_phases
from passes.predict.step_events import AxesOf
from passes.strategies.prices import Prices

__all__ = ["SeenInPieces", "SeenWhole"]


class SeenWhole:
    """Of one program. inputs: of the forward, this rank's tensors."""

    def __init__(self, phases: Phases, inputs: Sequence[Tensor], backend: str) -> None:
        self.inputs = inputs
        self._phases, self._backend = phases, backend
        backward = phases.backward
        self._graphs = [phases.forward, *([] if backward is None else [backward.module])]

    def predicted(self, prices: Prices, axes_of: AxesOf) -> Prediction:
        return predict_phases(self._phases, prices, axes_of)

    def probed(self, marks: Marks) -> WholeProbe:
        """What runs it once, op by op."""
        return WholeProbe(self._phases, self.inputs, marks)

    @cached_property
    def _compiled(self) -> list[Compiled]:
        return [compile_graph(graph, self._backend) for graph in self._graphs]

    @torch.no_grad()
    def run_again(self) -> None:
        """Once, in ranges of the profiler named after the phases. As in a step, nothing but the loop's own holds what
        the backward has read."""
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

    def tracks(self, repeats: int, meet: Callable[[], object]) -> Tracks | None:
        """As `run_tracks`."""
        return run_tracks(self.run_again, self._graphs, repeats, meet)


class SeenInPieces:
    """Of a batch in pieces; each has ranges of its own under the profiler."""

    def __init__(self, step: InPieces, inputs: Sequence[Tensor], backend: str) -> None:
        self.inputs = inputs
        self._step, self._compile = step, Compiler(backend)
        self._parts = parts_of(step, joined=self._compile.joins)

    def predicted(self, prices: Prices, axes_of: AxesOf) -> Prediction:
        programs = self._step.programs
        predict = lambda phases: predict_phases(phases, prices, axes_of)
        return predict_pieces(programs[0], self._parts[0], len(programs), prices, predict, axes_of)

    def probed(self, marks: Marks) -> PiecesProbe:
        return PiecesProbe(self._parts, self._known(), marks)

    @cached_property
    def _compiled(self) -> StepInPieces:
        return StepInPieces(self._step, self._parts, self._compile, [_Ranges()])

    @torch.no_grad()
    def run_again(self) -> None:
        self._compiled.results(self._known())

    def tracks(self, repeats: int, meet: Callable[[], object]) -> Tracks | None:
        """None: the prediction has the collectives of one piece."""
        return None

    def _known(self) -> dict[str, Tensor]:
        return dict(zip(self._step.given, self.inputs, strict=True))


class _Ranges:
    """An `Observer` by which the profiler knows the phases."""

    def begin(self, run: PhaseRun) -> None:
        self._range = record_function(run.phase)
        self._range.__enter__()

    def end(self, run: PhaseRun) -> None:
        self._range.__exit__(None, None, None)
