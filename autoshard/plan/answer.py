"""The best plan so far of a search that goes on, and who hears of it.

    search_plans      every program that is judged and fits -> BestSoFar     of one call, whole or in pieces
                                                              | Deadline.tell
    Listener          the best of all divisions                               -> on_better(Answer)
    Deadline.left     none once `on_better` returned False
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.plan.judged import Judged
from autoshard.plan.plan import Plan
from autoshard.plan.search_with_states import bounded
from cost_model.checked_arguments import reject
from cost_model.deadline import Deadline
from passes.search.find import Found
from passes.solver.solve import ROUNDING


@dataclass(frozen=True)
class Answer:
    """The best plan that a search knows at some moment.

    step_time, lower_bound, peak_memory: of the plan, as it has them. seconds: since the search began.
    """

    step_time: float
    lower_bound: float
    gap: float
    peak_memory: int
    make: Callable[[], Plan] = field(repr=False)
    seconds: float = 0.0

    @staticmethod
    def of(plan: Plan) -> Answer:
        return Answer(plan.step_time, plan.lower_bound, plan.gap, plan.peak_memory, lambda: plan)

    @cached_property
    def _made(self) -> Plan:
        return self.make()

    def plan(self) -> Plan:
        """Made when it is asked for first; in the thread of the search, while that goes on."""
        return self._made

    def precedes(self, other: Answer | None) -> bool:
        """Faster; as fast, and smaller; or the same, of which more is proven."""
        if other is None or abs(self.step_time - other.step_time) > ROUNDING * other.step_time:
            return other is None or self.step_time < other.step_time
        if self.peak_memory != other.peak_memory:
            return self.peak_memory < other.peak_memory
        return self.lower_bound > other.lower_bound


OnBetter = Callable[[Answer], object]
"""Told of each better answer; the search ends where it returns False."""


class Listener:
    """A `cost_model.deadline.Watch`: hears of what all searches of a call find, and passes on what is better."""

    def __init__(self, on_better: OnBetter) -> None:
        if not callable(on_better):
            raise reject("on_better", on_better, "a function of an answer, such as print")
        self._on_better, self._begun = on_better, time.monotonic()
        self.ended = False
        self.best: Answer | None = None

    def tell(self, answer: Answer) -> None:
        if answer.precedes(self.best):
            self._pass_on(answer)

    def returned(self, plan: Plan) -> None:
        """What the search ends with: the last answer, unless `on_better` ended it."""
        last = Answer.of(plan)
        if self.best is None or replace(self.best, seconds=0.0, make=last.make) != last:
            self._pass_on(last)

    def _pass_on(self, answer: Answer) -> None:
        self.best = replace(answer, seconds=time.monotonic() - self._begun)
        self.ended = self.ended or self._on_better(self.best) is False


@dataclass
class BestSoFar:
    """Of the search of one graph. judged: programs on the timeline, by `id` of their assignments. fits: whether one
    does. make: the plan of one. deadline: of the search. bound: no plan takes less, as far as is known."""

    judged: Mapping[int, Judged]
    fits: Callable[[Found], bool]
    make: Callable[[Found], Plan]
    deadline: Deadline
    found: Found | None = None
    bound: float = 0.0

    def hear(self, found: Found, of_all: bool) -> None:
        """of_all: what is proven of it is proven of all plans."""
        if of_all:
            self.bound = found.lower_bound
        if not self.fits(found):
            return
        found = found if of_all else bounded(found, self.bound)
        if self.found is None or self._seconds(found) <= self._seconds(self.found):
            self.found = found
            proven, nbytes = (found.lower_bound, found.gap), found.peak_nbytes
            self.deadline.tell(Answer(self._seconds(found), *proven, nbytes, lambda: self.make(found)))

    def or_better(self, found: Found) -> Found:
        """What the search returned, or what was faster on its way."""
        best = self.found
        if best is None or self._seconds(best) >= self._seconds(found) * (1.0 - ROUNDING):
            return found
        return bounded(best, found.lower_bound)

    def _seconds(self, found: Found) -> float:
        return self.judged[id(found.assignment)].seconds
