"""A step of one program, run op by op."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autoshard.reporting.probe import Probed
from autoshard.reporting.timed_phases import TimedPhases
from autoshard.runtime.observe import Marks
from passes.lower.phases import Phases

__all__ = ["WholeProbe"]


class WholeProbe:
    """inputs: of the forward."""

    def __init__(self, phases: Phases, inputs: Sequence[Tensor], marks: Marks) -> None:
        self._inputs = inputs
        self._phases = TimedPhases(phases, marks)

    def __call__(self) -> Probed:
        forward, results = self._phases.forward.run(self._inputs)
        ran = self._phases.backward(self._inputs, results)
        if ran is None:
            return Probed(forward.collectives(), {"forward": forward.compute()})
        backward, _ = ran
        return Probed(
            (*forward.collectives(), *backward.collectives()),
            {"forward": forward.compute(), "backward": backward.compute()},
        )
