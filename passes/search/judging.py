"""Choices of one search as the timelines of their programs judge them: each once, until time is over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from cost_model.deadline import Deadline
from passes.search.judged_choice import Choice, Judge, JudgedChoice
from passes.search.lighter import lighter
from passes.search.search_space import SearchSpace


class Judging:
    """known: what was judged and compared, by choice, in order. hear: told of all that is judged."""

    def __init__(
        self, space: SearchSpace, judge: Judge, deadline: Deadline, hear: Callable[[JudgedChoice], object]
    ) -> None:
        self._space, self._judge, self.deadline, self._hear = space, judge, deadline, hear
        self.known: dict[Choice, JudgedChoice] = {}
        self._programs: dict[Choice, JudgedChoice] = {}

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


_LONGEST, _SHORTEST = 3600.0, 1.0
"""Seconds for one search, where no deadline is set, and where it has passed."""


def seconds_left(deadline: Deadline) -> float:
    """For what is to be solved next."""
    return min(max(deadline.left, _SHORTEST), _LONGEST)
