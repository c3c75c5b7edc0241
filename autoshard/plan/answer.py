"""The best plan so far of a search that goes on, and who hears of it.

search_plans      every program that is judged and fits -> BestSoFar     of one call, whole or in pieces
                                                          | Deadline.tell
Listener          the best of all divisions                               -> on_better(Answer)
Deadline.left     none once `on_better` returned False
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.plan.correcting import Program
from autoshard.plan.judged import Judged, judged, judged_within
from autoshard.plan.plan import Plan
from autoshard.plan.plan_content import Nearly
from autoshard.plan.plan_summary import patterns, without_shares
from autoshard.plan.search_with_states import bounded, is_far
from cost_model.deadline import Deadline
from cost_model.errors import reject
from cost_model.memory import format_seconds
from passes.ir.joint import JointGraph
from passes.layout.layout import Assignment, JoinedAxes
from passes.search.find import Found
from passes.solver.solve import ROUNDING
from passes.strategies.prices import Prices


@dataclass(frozen=True)
class Answer:
    """The best plan that a search knows at some moment.

    step_time, peak_memory, lower_bound, gap: of the plan, as it has them; but nothing is proven (0, and 1) of all plans
    where axes are joined (`Plan.joined_axes`). seconds: since the search began.
    """

    step_time: float
    lower_bound: float
    gap: float
    peak_memory: int
    make: Callable[[], Plan] = field(repr=False)
    seconds: float = 0.0

    @staticmethod
    def of(plan: Plan) -> Answer:
        return Answer(plan.step_time, *_proven(plan, plan.joined_axes), plan.peak_memory, lambda: plan)

    @property
    def words(self) -> str:
        within = f", within {self.gap:.1%} of optimal" if self.lower_bound > 0.0 else ""
        return f"best so far {format_seconds(self.step_time)}{within}"

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


def _proven(one: Plan | Found, joined: JoinedAxes) -> tuple[float, float]:
    """Bound and gap, of all plans."""
    return (0.0, 1.0) if joined else (one.lower_bound, one.gap)


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
        self._pass_on(Answer.of(plan))

    def _pass_on(self, answer: Answer) -> None:
        self.best = replace(answer, seconds=time.monotonic() - self._begun)
        if not self.ended:
            self.ended = self._on_better(self.best) is False


@dataclass
class BestSoFar:
    """Of the search of one graph. memory_limit: within which a plan fits; None: any does. beside: bytes that a program
    needs besides its own. make: the plan of what was found. deadline: of the search. judged: programs on the timeline,
    by `id` of their assignments. bound: no plan takes less, as far as is known.

    A `cost_model.deadline.Watch` of a search that has only to find a plan."""

    memory_limit: int | None
    beside: Callable[[Judged], int]
    make: Callable[[Found, Judged], Plan]
    deadline: Deadline
    judged: dict[int, Judged] = field(default_factory=dict[int, Judged])
    found: Found | None = None
    bound: float = 0.0

    @property
    def ended(self) -> bool:
        return self.found is not None

    def tell(self, answer: Answer) -> None:
        """`hear` tells the deadline of the search."""

    def judge(self, program: tuple[JointGraph, Assignment, Prices], *, within: bool) -> Judged:
        """On the timeline. within: with fewer bytes in transfers at once, as many as fit."""
        one = judged_within(*program, self.over) if within else judged(*program)
        self.judged[id(one.planned.layouts)] = one
        return one

    def of(self, found: Found) -> Judged:
        return self.judged[id(found.assignment)]

    def with_peak(self, found: Found) -> Found:
        """Of its program."""
        peak = self.of(found).peak
        return replace(found, peak_nbytes=peak.nbytes, peak_node=peak.node)

    def over(self, judged: Judged) -> int:
        """Bytes by which it is over the limit."""
        return judged.peak.nbytes + self.beside(judged) - (self.memory_limit or 0)

    def programs(self, found: Found) -> list[Program]:
        """The ways in which it was lowered within the limit."""
        return [Program(one.phase_seconds, self.over(one), one.held) for one in self.of(found).tried]

    def far_over(self, judged: Judged) -> bool:
        return self.memory_limit is not None and is_far(self.over(judged), self.memory_limit)

    def fits(self, found: Found) -> bool:
        return self.memory_limit is None or self.over(self.of(found)) <= 0

    def plan(self, found: Found) -> Plan:
        plan = self.make(found, self.of(found))
        return replace(plan, nearly=self._nearly(plan, self.of(found)))

    def _nearly(self, plan: Plan, own: Judged) -> Nearly | None:
        """None also where a program of another pattern is faster than the plan, which did not win then."""
        mine, whole = patterns(plan, own.planned.nodes), own.seconds
        for one in sorted(self.judged.values(), key=lambda one: one.seconds):
            if self.memory_limit is not None and self.over(one) > 0:
                continue
            theirs = patterns(plan, one.planned.nodes).items()
            differ = {at: words for at, words in theirs if without_shares(words) != without_shares(mine[at])}
            if differ:
                if whole <= 0.0 or one.seconds < whole * (1.0 - ROUNDING):
                    return None
                before, after = (sum(node.seconds for node in it.planned.nodes) for it in (own, one))
                return Nearly(differ, max(0.0, one.seconds / whole - 1.0), (after - before) / whole)
        return None

    def hear(self, found: Found, of_all: bool) -> None:
        """of_all: what is proven of it is proven of all plans."""
        if not self.fits(found):
            return
        found = self.with_peak(found if of_all else bounded(found, self.bound))
        seconds = self.of(found).seconds
        if self.found is None or seconds <= self.of(self.found).seconds:
            self.found = found
            proven = _proven(found, found.joined)
            self.deadline.tell(Answer(seconds, *proven, found.peak_nbytes, lambda: self.plan(found)))

    def or_better(self, found: Found) -> Found:
        """What the search returned, or what was faster on its way."""
        best = self.found
        if best is None or self.of(best).seconds >= self.of(found).seconds * (1.0 - ROUNDING):
            return found
        return bounded(best, found.lower_bound)
