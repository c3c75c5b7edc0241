"""Choices of one search as the timelines of their programs judge them: each once, until time is over."""

from __future__ import annotations

import time
from collections.abc import Iterable

from passes.search.judged_choice import Choice, Judge, JudgedChoice
from passes.search.lighter import lighter
from passes.search.search_space import SearchSpace


class Judging:
    """deadline: by `time.monotonic`. known: what was judged, by choice, in order."""

    def __init__(self, space: SearchSpace, judge: Judge, deadline: float) -> None:
        self._space, self._judge, self._deadline = space, judge, deadline
        self.known: dict[Choice, JudgedChoice] = {}

    def of(self, choice: Choice) -> JudgedChoice:
        """The choice, or one of the same cost that holds less."""
        choice = lighter(self._space.problem, choice)
        if choice not in self.known:
            assignment = self._space.assignment(choice)
            totals = self._space.totals(choice)
            said = self._judge(assignment)
            self.known[choice] = JudgedChoice(
                assignment, choice, totals, tuple(said.phases), said.peak_nbytes
            )
        return self.known[choice]

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
        return max(self._deadline - time.monotonic(), 1.0)

    def late(self) -> bool:
        return time.monotonic() >= self._deadline
