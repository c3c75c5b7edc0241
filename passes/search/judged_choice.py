"""A choice of the search, and what a step of its program takes on the timeline: judged once, until time is over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cost_model.deadline import Deadline
from passes.layout.layout import Assignment
from passes.search.search_space import SearchSpace
from passes.search.step_kinds import PhaseOverlap, corrected, phase_seconds
from passes.solver.problem import Array, Problem
from passes.solver.solve import ROUNDING


class Judgement(NamedTuple):
    """phases: seconds of the forward, the backward and of what follows, on the timeline of the program. peak_nbytes:
    the most that is alive in it. ends: whether that is enough to know, and no faster plan is to be looked for."""

    phases: Sequence[float]
    peak_nbytes: int
    ends: bool = False


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


_Edge = tuple[Array, int, bool]
"""Costs, the node at the other end, and whether that one chooses the column."""


def lighter(problem: Problem, choice: Sequence[int]) -> tuple[int, ...]:
    """`choice` with strategies that use fewer bytes, one node after the other, wherever no cost grows by it: neither
    the node's nor that of any of its edges. So no kind of seconds grows, and the step does not either."""
    found = list(choice)
    edges = _edges(problem)
    waiting = [node for node in range(len(found)) if problem.usages and problem.usages[node].any()]
    while waiting:
        turned = [node for node in waiting if _turn(problem, edges[node], found, node)]
        waiting = sorted({other for node in turned for _, other, _ in edges[node]})
    return tuple(found)


def _edges(problem: Problem) -> list[list[_Edge]]:
    found: list[list[_Edge]] = [[] for _ in problem.node_costs]
    for (i, j), costs in zip(problem.edges, problem.edge_costs, strict=True):
        found[i].append((costs, j, True))
        found[j].append((costs, i, False))
    return found


def _turn(problem: Problem, edges: Sequence[_Edge], choice: list[int], node: int) -> bool:
    """Give the node, in place, the strategy of the fewest bytes that costs no more anywhere; whether it is another."""
    now, usages, costs = choice[node], problem.usages[node], problem.node_costs[node]
    better = (usages < usages[now]) & (costs <= costs[now])
    for matrix, other, is_row in edges:
        if not better.any():
            return False
        line = matrix[:, choice[other]] if is_row else matrix[choice[other]]
        better &= line <= line[now]
    if not better.any():
        return False
    choice[node] = int(np.argmin(np.where(better, usages, np.inf)))
    return True


class Judging:
    """known: what was judged and compared, by choice, in order. hear: told of all that is judged. ended: by what was
    judged."""

    def __init__(
        self, space: SearchSpace, judge: Judge, deadline: Deadline, hear: Callable[[JudgedChoice], object]
    ) -> None:
        self._space, self._judge, self.deadline, self._hear = space, judge, deadline, hear
        self.known: dict[Choice, JudgedChoice] = {}
        self._programs: dict[Choice, JudgedChoice] = {}
        self.ended = False

    def of(self, choice: Choice) -> JudgedChoice:
        """The choice, or one of the same cost that holds less."""
        judged = self.program(choice)
        return self.known.setdefault(judged.choice, judged)

    def program(self, choice: Choice) -> JudgedChoice:
        """`of`, without being compared: for who hears of it alone."""
        choice = lighter(self._space.problem, choice)
        if choice not in self._programs:
            assignment = self._space.assignment(choice)
            totals = self._space.totals(choice)
            said = self._judge(assignment)
            self.ended = self.ended or said.ends
            self._programs[choice] = JudgedChoice(
                assignment, choice, totals, tuple(said.phases), said.peak_nbytes
            )
            self._hear(self._programs[choice])
        return self._programs[choice]

    @property
    def programs(self) -> Collection[JudgedChoice]:
        """All that was judged, compared or not."""
        return self._programs.values()

    def better(self, choice: Choice, best: JudgedChoice) -> JudgedChoice:
        """`best`, or the choice, if it was not judged before and is better."""
        known = len(self.known)
        found = self.of(choice)
        # What was judged before was compared then: nothing is returned to, so that searching again ends.
        return found if len(self.known) > known and found.precedes(best) else best

    def best_of(self, choices: Iterable[Choice], best: JudgedChoice) -> JudgedChoice:
        """The best of all, until time is over."""
        for choice in choices:
            best = self.better(choice, best)
            if self.late():
                break
        return best

    def left(self) -> float:
        """Seconds for what is to be solved next: never none."""
        return seconds_left(self.deadline)

    def late(self) -> bool:
        return self.deadline.left <= 0.0


def seconds_left(deadline: Deadline) -> float:
    """For what is to be solved next."""
    # Seconds for one search, where no deadline is set, and where it has passed.
    return min(max(deadline.left, 1.0), 3600.0)
