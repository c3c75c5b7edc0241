"""A choice of the search, and what a step of its program takes on the timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from passes.layout.assignment import Assignment
from passes.search.step_kinds import PhaseOverlap, corrected, phase_seconds
from passes.solver.problem import Array
from passes.solver.solve import ROUNDING


class Judgement(NamedTuple):
    """phases: seconds of the forward, the backward and of what follows, on the timeline of the program. peak_nbytes:
    the most that is alive in it."""

    phases: Sequence[float]
    peak_nbytes: int


Judge = Callable[[Assignment], Judgement]
Choice = tuple[int, ...]
"""Strategy by search node."""


@dataclass(frozen=True)
class JudgedChoice:
    """totals: its seconds by kind. phases, peak_nbytes: of the timeline and its program."""

    assignment: Assignment
    choice: tuple[int, ...]
    totals: Array
    phases: tuple[float, ...]
    peak_nbytes: int

    @property
    def seconds(self) -> float:
        return sum(self.phases)

    def precedes(self, other: JudgedChoice) -> bool:
        """Faster; or as fast, but for rounding, and smaller."""
        if abs(self.seconds - other.seconds) <= ROUNDING * other.seconds:
            return self.peak_nbytes < other.peak_nbytes
        return self.seconds < other.seconds

    def counted(self, overlaps: Sequence[PhaseOverlap]) -> float:
        """The objective."""
        return counted_seconds(self.totals, overlaps)

    def corrected(self, overlaps: Sequence[PhaseOverlap]) -> tuple[PhaseOverlap, ...]:
        """Under which the objective is the timeline."""
        return overlaps_of(self.totals, self.phases, overlaps)

    def difference(self, overlaps: Sequence[PhaseOverlap]) -> float:
        """Of objective and timeline, as a share of the step."""
        return abs(self.counted(overlaps) - self.seconds) / max(self.seconds, 1e-300)

    def missing(self, overlaps: Sequence[PhaseOverlap]) -> list[float]:
        """Of every phase, the seconds of the timeline that the objective does not count; negative: those that it counts
        too many."""
        counted = phase_seconds(self.totals, overlaps)
        return [w - c for w, c in zip(_wanted(self.totals, self.phases, len(overlaps)), counted, strict=True)]

    def shifted(self, overlaps: Sequence[PhaseOverlap]) -> tuple[PhaseOverlap, ...]:
        """The same by constants alone: the plan that is found under them is the one found before."""
        pairs = zip(overlaps, self.missing(overlaps), strict=True)
        return tuple(replace(o, extra=o.extra + missing) for o, missing in pairs)


def overlaps_of(
    totals: Array, phases: Sequence[float], overlaps: Sequence[PhaseOverlap]
) -> tuple[PhaseOverlap, ...]:
    """`overlaps` under which the objective of these seconds by kind is a timeline of so many by phase. What has no kind
    but is not the update is counted besides: of the forward, whose outputs the caller waits for."""
    return corrected(totals, overlaps, _wanted(totals, phases, len(overlaps)))


def _wanted(totals: Array, phases: Sequence[float], count: int) -> list[float]:
    first, *others = phases[:count]
    return [first - (float(totals[-1]) - sum(phases[count:])), *others]


def counted_seconds(totals: Array, overlaps: Sequence[PhaseOverlap]) -> float:
    """The objective, of these seconds by kind."""
    return sum(phase_seconds(totals, overlaps)) + float(totals[-1])
