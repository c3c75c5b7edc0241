"""What is predicted of one rank's step."""

from __future__ import annotations

from dataclasses import dataclass

from passes.predict.memory_record import MemoryStep, MemoryWalk
from passes.predict.step_events import Axes


@dataclass(frozen=True)
class PredictedCollective:
    """node: its name in the phase's graph; serves: the parameter or module it is for. nbytes: as
    `cost_model.collectives` counts. seconds: its price, alone. start, end: seconds into the step. exposed:
    by how much the step is longer for it. times: how often it runs, once for each piece of a batch; all else is of the
    first time."""

    phase: str
    node: str
    serves: str
    kind: str
    axes: Axes
    nbytes: int
    seconds: float
    start: float
    exposed: float
    end: float
    times: int = 1


@dataclass(frozen=True)
class PredictedPhase:
    """seconds: from its begin to its end. compute: its kernels at full speed; communication: its
    collectives, each alone; exposed: what they add to the kernels' time."""

    name: str
    seconds: float
    compute: float
    communication: float
    exposed: float


@dataclass(frozen=True)
class Prediction:
    """One rank's step. phases: forward, backward if there is one, optimizer if something is trained. memory: what is
    alive when (`passes.predict.memory_walk`), of `predicted_step` on the fullest rank."""

    seconds: float
    phases: tuple[PredictedPhase, ...]
    collectives: tuple[PredictedCollective, ...]
    memory: MemoryWalk | None = None

    @property
    def peak(self) -> MemoryStep:
        """Where most bytes are alive."""
        assert self.memory is not None
        return self.memory.peak

    @property
    def compute(self) -> float:
        """Seconds of all kernels at full speed, the optimizer's included."""
        return sum(phase.compute for phase in self.phases)

    @property
    def phase_seconds(self) -> tuple[float, float, float]:
        """Of the forward, the backward and the update, 0 for a phase that there is not."""
        seconds = {phase.name: phase.seconds for phase in self.phases}
        return seconds["forward"], seconds.get("backward", 0.0), seconds.get("optimizer", 0.0)

    @property
    def exposed(self) -> float:
        """Seconds that communication adds to `compute`."""
        return sum(phase.exposed for phase in self.phases)
