"""Search states and layouts together: what the forward keeps, and what the backward computes again."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Self

from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from passes.ir.joint import JointGraph
from passes.layout.layout import Assignment, NodeLayouts
from passes.lower.rank_program import without_usually_missing
from passes.search.agree import first_overlaps
from passes.search.bucket_starts import started, started_alone, unpaid_starts
from passes.search.find import explained
from passes.search.judged_choice import overlaps_of
from passes.search.offered import ABSENT, build_offered
from passes.search.search_space import SearchSpace
from passes.search.search_terms import ALL, Boundary, Narrowing, same_layouts
from passes.search.state_columns import Columns, Held, corrected, held_besides, kinds_with_parts, with_parts
from passes.search.step_kinds import CLOSE, PhaseOverlap
from passes.solver.problem import Infeasible
from passes.states.compute_again import compute_again
from passes.states.offers import EITHER, Offers, Place, offered, places, without_either
from passes.strategies.prices import Prices

ENOUGH = 2e-2
"""Relative gap at which states are good enough."""
_LONGEST = 3600.0
"""Seconds, where no deadline is set."""


@dataclass(frozen=True)
class States:
    """again: ops of the forward that run once more. layouts: of the graph with these copies, by node name.
    seconds: of the search. lower_bound: no states that were offered, with any layouts, take fewer seconds. nbytes: the
    peak as it was counted. worth: seconds that a byte of room would save. choice: by search node, of that level."""

    again: tuple[str, ...]
    layouts: Assignment
    seconds: float = 0.0
    lower_bound: float = 0.0
    nbytes: int = 0
    worth: float = 0.0
    choice: tuple[int, ...] = ()
    level: int = 0

    def are(self, others: States) -> bool:
        """Whether they are the same, however they are counted: they make the same program."""
        return (self.again, self.layouts) == (others.again, others.layouts)

    def narrowing(self, allowed: Narrowing) -> Narrowing:
        """That allows these layouts only, of those that `allowed` does."""
        return replace(allowed, allowed={name: partial(_alike, held) for name, held in self.layouts.items()})


class NoStates(InfeasibleError):
    """least: bytes that any plan needs, as the search counts them."""

    def __init__(self, text: str, least: float) -> None:
        super().__init__(text)
        self.least = least


@dataclass
class OfferedStates:
    """The states of one graph, offered level by level (`_coarser`). A level is built once, for all rooms.

    overlaps: of forward and backward, under which seconds are counted first. starts: seconds of each phase that a
    reduction takes to start. besides: bytes that rows are given, by name. limit: of `build_offered`."""

    prices: Prices
    boundary: Boundary
    narrowing: Narrowing
    levels: Iterator[Offers]
    overlaps: Sequence[PhaseOverlap]
    limit: float = math.inf
    starts: Sequence[float] = ()
    besides: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    _built: list[_Level] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        joint: JointGraph,
        prices: Prices,
        boundary: Boundary,
        *,
        narrowing: Narrowing = ALL,
        pinned: Collection[str] | None = None,
        overlaps: Sequence[PhaseOverlap] | None = None,
        limit: float = math.inf,
    ) -> Self:
        """overlaps: of a good plan of `joint`, None where no timeline says. pinned: the ops that are computed again,
        and no others; None: any may be.

        Copies live as long as the backward of the part of the forward that they are of (`passes.states.offers`):
        small parts first, then twice as large ones, as then less is kept.
        """
        usual = without_usually_missing(joint)
        if pinned is not None:
            levels = iter([Offers(compute_again(usual, pinned), {}, frozenset(), tuple(pinned))])
        else:
            levels = (offered(usual, kept, prices.flow) for kept in _coarser(places(usual)))
        overlaps = overlaps or first_overlaps(prices.overlap_efficiency)
        return cls(prices, boundary, narrowing, levels, overlaps, limit)

    def correct(self, states: States, phases: Sequence[float], held: Held) -> None:
        """Count from here on as the program of `states` is, whose phases take so long and whose ops hold so much. What
        was proven before is of what was counted before."""
        level = self._built[states.level]
        overlaps, starts = level.overlapped(states, phases, self.overlaps)
        self.starts = [sum(both) for both in zip_longest(self.starts, starts, fillvalue=0.0)]
        self.besides = level.besides(states, held)
        for one in self._built:
            one.correct(overlaps, self.starts, self.besides)

    def forget_held(self) -> None:
        """Count bytes from here on as they were at first."""
        self.besides = {}
        for one in self._built:
            one.correct(one.overlaps, self.starts, {})

    def find(
        self,
        *,
        room: int,
        limit: tuple[int, int],
        deadline: Deadline,
        gap: float = ENOUGH,
        known: float = math.inf,
        further: bool = True,
    ) -> States:
        """The states of the fastest plan within `room` bytes, as the search counts them, at the first level with one.

        limit: what an error says instead: the memory limit of the program, and what of it every plan needs besides.
        gap: to the bound, at which they are good enough. known: seconds of a plan that has to be bettered, so that it
        is enough to prove that there are none. further: levels that no room has asked for yet are looked at. Raises
        NoStates.
        """
        least: tuple[float, _Level, Infeasible] | None = None
        for number, level in enumerate(self._offered(deadline) if further else self._built):
            reason = level.refused(room)
            if reason is None:
                try:
                    return replace(level.find(room, deadline, gap, known), level=number)
                except Infeasible as found:
                    reason = level.reason = found
            if reason.kind != "memory":
                raise level.explained(reason, limit) from None
            if least is None or reason.bound < least[0]:
                least = reason.bound, level, reason
        assert least is not None
        needs, level, reason = least
        raise NoStates(str(level.explained(reason, limit)), needs)

    def _offered(self, deadline: Deadline) -> Iterator[_Level]:
        yield from self._built
        for offers in self.levels:
            space = build_offered(offers, self.prices, self.boundary, self.narrowing, deadline, self.limit)
            level = _Level.of(offers, space, self.prices, self.overlaps)
            if self._built:
                level.correct(self._built[0].overlaps, self.starts, self.besides)
            self._built.append(level)
            yield level


@dataclass
class _Level:
    """overlaps: under which `columns` count. raised: bytes by which the rows' limit is more than the room. reason: why
    there is no plan within the largest room for which there was none. counted: bytes that rows are given."""

    offers: Offers
    space: SearchSpace
    columns: Columns
    prices: Prices
    overlaps: Sequence[PhaseOverlap]
    raised: float = 0.0
    reason: Infeasible | None = None
    counted: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    @staticmethod
    def of(offers: Offers, space: SearchSpace, prices: Prices, overlaps: Sequence[PhaseOverlap]) -> _Level:
        columns = Columns(with_parts(space.problem), kinds_with_parts(space.kinds(overlaps)))
        return _Level(offers, space, columns, prices, overlaps)

    @property
    def extra(self) -> float:
        """Seconds of a step that no choice changes."""
        return sum(overlap.extra for overlap in self.overlaps)

    @cached_property
    def steps(self) -> list[str]:
        """Names of the graph's nodes, in its order: rows count its steps."""
        return [node.name for node in self.offers.joint.graph.nodes]

    def besides(self, states: States, held: Held) -> dict[str, tuple[float, float]]:
        """What the program of `states` holds besides what was counted, by name."""
        called = [without_either(name, states.again) for name in self.steps]
        found = held_besides(self.space.problem, states.choice, called, held)
        return {name: found[own] for name, own in zip(self.steps, called, strict=True) if own in found}

    def overlapped(
        self, states: States, phases: Sequence[float], first: Sequence[PhaseOverlap]
    ) -> tuple[tuple[PhaseOverlap, ...], list[float]]:
        """Under which states are counted as long as their program takes, and seconds that each reduction takes besides,
        where a phase takes so much more than it is counted that only that explains it: counted are parts of full
        buckets, and programs may fill none."""
        problem, kinds = self.columns.problem, self.columns.kinds
        totals = kinds.totals(problem, states.choice)
        overlaps = overlaps_of(totals, phases, first)
        least = CLOSE * sum(phases)
        unpaid = unpaid_starts(totals, [o.extra if o.extra > least else 0.0 for o in overlaps])
        counts = started(problem, kinds, states.choice, len(unpaid))
        starts = [seconds / max(count, 1) for seconds, count in zip(unpaid, counts, strict=True)]
        return tuple(replace(o, extra=o.extra - u) for o, u in zip(overlaps, unpaid, strict=True)), starts

    def correct(
        self,
        overlaps: Sequence[PhaseOverlap],
        starts: Sequence[float],
        besides: Mapping[str, tuple[float, float]],
    ) -> None:
        problem, self.raised = corrected(with_parts(self.space.problem), self.steps, besides)
        kinds = kinds_with_parts(self.space.kinds(overlaps))
        if any(starts):
            problem = started_alone(problem, kinds, starts)
        self.columns = self.columns.corrected(problem, kinds)
        if besides != self.counted:
            self.reason = None
        self.overlaps, self.counted = overlaps, besides

    def refused(self, room: int) -> Infeasible | None:
        """Why there is nothing within `room`, if that is known: more is needed in any case."""
        known = self.reason
        return known if known is not None and known.kind == "memory" and known.bound > room else None

    def find(self, room: int, deadline: Deadline, gap: float, known: float) -> States:
        """Raises Infeasible, of bytes as they are counted."""
        seconds, limit = min(deadline.left, _LONGEST), room + self.raised
        try:
            found = self.columns.find(limit, seconds, gap, known - self.extra)
        except Infeasible as reason:
            own = [node for node in reason.nodes if node < len(self.space.names)]
            raise Infeasible(reason.kind, own, reason.bound - self.raised, reason.step) from None
        nbytes = int(self.columns.problem.peak(found.choice)[0] - self.raised)
        states = _states(self.offers, self.space.assignment(found.choice[: len(self.space.names)]))
        seconds, bound = found.cost + self.extra, found.lower_bound + self.extra
        return replace(
            states,
            seconds=seconds,
            lower_bound=bound,
            nbytes=nbytes,
            worth=self.columns.worth(limit),
            choice=found.choice,
        )

    def explained(self, reason: Infeasible, limit: tuple[int, int]) -> InfeasibleError:
        return explained(reason, self.offers.joint, self.space, self.prices, limit)


def _coarser(kept: tuple[Place, ...]) -> Iterator[tuple[Place, ...]]:
    """All places, then every second, fourth ... from the last on; at the end none."""
    step = 1
    while step <= len(kept):
        yield kept[::-1][::step][::-1]
        step *= 2
    yield ()


def _states(offers: Offers, assignment: Assignment) -> States:
    present = {name: layouts for name, layouts in assignment.items() if layouts != ABSENT}
    again = {offers.copies[name] for name in present if name in offers.copies} | set(offers.pinned)
    layouts = {
        without_either(name, again): held for name, held in present.items() if not name.endswith(EITHER)
    }
    return States(tuple(sorted(again)), layouts)


def _alike(held: NodeLayouts, strategies: Sequence[NodeLayouts]) -> list[int]:
    """Those with the layouts `held`, whatever is stored for them; all, if there are none."""
    return [i for i, s in enumerate(strategies) if same_layouts(s, held)] or list(range(len(strategies)))
