"""The step that a report saw last: predicted, run op by op, and run again as it was compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

from torch import Tensor

from autoshard.reporting.pieces_probe import PiecesProbe
from autoshard.reporting.probe import Probed
from autoshard.reporting.step_again import Again, PiecesAgain, StepAgain
from autoshard.reporting.tracks import Tracks, run_tracks
from autoshard.reporting.whole_probe import WholeProbe
from autoshard.runtime.compiled_pieces import Compiler, parts_of
from autoshard.runtime.observe import InPieces, Marks, PhaseRun
from passes.lower.phases import Phases
from passes.predict.predict_pieces import predict_pieces
from passes.predict.predict_step import Prediction, predict_phases
from passes.predict.step_events import AxesOf
from passes.strategies.prices import Prices

__all__ = ["SeenStep", "seen_step"]


class SeenStep(Protocol):
    """inputs: of the forward, this rank's tensors."""

    inputs: Sequence[Tensor]

    def predicted(self, prices: Prices, axes_of: AxesOf) -> Prediction: ...

    def probed(self, marks: Marks) -> Callable[[], Probed]:
        """What runs it once, op by op."""
        ...

    @property
    def again(self) -> Again: ...

    def tracks(self, repeats: int, meet: Callable[[], object]) -> Tracks | None:
        """As `run_tracks`."""
        ...


def seen_step(program: Phases | InPieces, forward: PhaseRun, backend: str) -> SeenStep:
    kind = _Whole if isinstance(program, Phases) else _InPieces
    return kind(program, forward.inputs, backend)  # type: ignore[arg-type]


class _Whole:
    def __init__(self, phases: Phases, inputs: Sequence[Tensor], backend: str) -> None:
        self.inputs = inputs
        self._phases, self._backend = phases, backend

    def predicted(self, prices: Prices, axes_of: AxesOf) -> Prediction:
        return predict_phases(self._phases, prices, axes_of)

    def probed(self, marks: Marks) -> Callable[[], Probed]:
        return WholeProbe(self._phases, self.inputs, marks)

    @cached_property
    def again(self) -> StepAgain:
        return StepAgain(self._phases, self.inputs, self._backend)

    def tracks(self, repeats: int, meet: Callable[[], object]) -> Tracks | None:
        return run_tracks(self.again, repeats, meet)


class _InPieces:
    def __init__(self, step: InPieces, inputs: Sequence[Tensor], backend: str) -> None:
        self.inputs = inputs
        self._step, self._backend = step, backend
        self._parts = parts_of(step, joined=Compiler(backend).joins)

    def predicted(self, prices: Prices, axes_of: AxesOf) -> Prediction:
        programs = self._step.programs
        predict = lambda phases: predict_phases(phases, prices, axes_of)
        return predict_pieces(programs[0], self._parts[0], len(programs), prices, predict, axes_of)

    def probed(self, marks: Marks) -> Callable[[], Probed]:
        known = dict(zip(self._step.leaves, self.inputs, strict=True))
        return PiecesProbe(self._parts, known, marks)

    @cached_property
    def again(self) -> PiecesAgain:
        return PiecesAgain(self._step, self.inputs, self._backend)

    def tracks(self, repeats: int, meet: Callable[[], object]) -> Tracks | None:
        """None: the prediction has the collectives of one piece."""
        return None
