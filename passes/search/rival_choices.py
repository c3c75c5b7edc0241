"""Choices that the objective passes over and that may be faster on the timeline.

The one that is fastest if nothing hides, and those that store all weights alike: over the same axes, whole or
split over some or all of them, and most of them read whole (data parallelism); those found as if more could hide, or as
if no reduction shared its start (`bucket_starts`). And choices near a good one:

Past transfers: one kind of transfer is done behind its reader, or not at all.
The reader takes its operand as it is held, whatever its own readers have to bring into another layout then: a loss is
divided before it is summed over ranks. Such places cost much the same by the objective, and on the timeline one of them
may hide.

Turns: in one place it is turned over to what another choice has there.
Two choices differ in places, connected components of the nodes at which they do. Places that are alike, as those of
equal layers are, share their cost arrays; they are turned over together, so that there are as many turns for eighty
layers as for two.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from passes.layout.layout import Layout
from passes.search.bucket_starts import started_alone, unpaid_starts
from passes.search.judged_choice import Choice, JudgedChoice, counted_seconds
from passes.search.overlapped import solve_overlapped
from passes.search.search_space import CostKinds, SearchSpace, changes_by_kind, components, overlapped_seconds
from passes.search.step_kinds import PhaseOverlap
from passes.solver.problem import Array, Infeasible, Problem, Solution
from passes.solver.solve import restricted, solve

MORE_AWAITED = 0.25
"""Share of what is awaited in the backward that is taken to hide behind fillers, for a rival."""
FAR, FASTEST, ROUGH_GAP, EXACT_GAP = 0.15, 2, 0.1, 5e-3
"""Share of a step by which those that store weights alike may be slower by the objective and still be judged, how many
are, and the relative gaps of the searches that say which, and of their own."""
RIVAL_GAP = 1e-2
"""Relative gap of searches whose plan is a rival and whose bound nobody reads."""
UNPAID = 1e-2
"""Share of a step that the starts of reductions must take besides for plans with fewer of them to be looked for."""
WORTH = 1e-3
"""Share of a step that may hide besides for plans of which more does to be looked for."""


class RivalChoices:
    """Of one search. left: seconds for what is to be solved next. found: by all searches, in order."""

    def __init__(self, space: SearchSpace, left: Callable[[], float]) -> None:
        self._space, self._left = space, left
        self.found: dict[Choice, None] = {}

    def solve(
        self,
        overlaps: Sequence[PhaseOverlap],
        warm: Choice | None,
        gap: float,
        hear: Callable[[Solution], bool] = lambda _: False,
        enough: float = 0.0,
    ) -> Solution:
        """The fastest by the objective. hear, enough: of `solve_overlapped`."""
        found = solve_overlapped(
            self._space.problem,
            self._space.kinds(overlaps),
            time_limit=self._left(),
            warm=warm,
            relative_gap=gap,
            known=list(self.found),
            hear=hear,
            enough=enough,
        )
        self.found.update(dict.fromkeys((found.choice, *found.others)))
        return found

    def unhidden(self, best: JudgedChoice) -> Iterator[Choice]:
        """The fastest if nothing hides: where the objective is the timeline of one plan, it may be far over another's,
        whose gathers share buckets."""
        yield self._if_nothing_hides(self._space.problem, best)

    def awaited(self, overlaps: Sequence[PhaseOverlap], best: JudgedChoice) -> Iterator[Choice]:
        """As if more of what the backward waits for hid behind fillers, where that may be worth something."""
        forward, *others = overlaps
        more = (forward, *(replace(overlap, awaited=MORE_AWAITED) for overlap in others))
        if best.counted(overlaps) - best.counted(more) > WORTH * best.seconds:
            yield self.solve(more, best.choice, RIVAL_GAP).choice

    def alone(self, overlaps: Sequence[PhaseOverlap], best: JudgedChoice) -> Iterator[Choice]:
        """As if nothing hid, and every reduction that only the end needs took by itself what `best` takes besides;
        where that is more than all of them are counted for: they share the start of a bucket that they do not fill."""
        starts = unpaid_starts(best.totals, best.missing(overlaps))
        if max(starts) > UNPAID * best.seconds:
            problem = started_alone(self._space.problem, self._space.kinds(overlaps), starts)
            yield self._if_nothing_hides(problem, best)

    def stored(
        self, overlaps: Sequence[PhaseOverlap], seconds: float, late: Callable[[], bool]
    ) -> Iterator[Choice]:
        """Of every way to store all weights alike about the plan that is fastest if nothing hides; of these the fastest
        by the objective, if they are not far slower than `seconds`, searched again. late: whether time is over."""
        counted: list[tuple[float, Allowed, Choice]] = []
        for allowed in stored_alike(self._space):
            with suppress(Infeasible):
                choice = self._apart(allowed, ROUGH_GAP, None)
                counted.append((counted_seconds(self._space.totals(choice), overlaps), allowed, choice))
            if late():
                break
        counted.sort(key=lambda one: one[0])
        for taken, allowed, rough in counted[:FASTEST]:
            if taken <= (1.0 + FAR) * seconds:
                yield self._apart(allowed, EXACT_GAP, rough)

    def _if_nothing_hides(self, problem: Problem, warm: JudgedChoice) -> Choice:
        found = solve(problem, time_limit=self._left(), relative_gap=RIVAL_GAP, warm=warm.choice)
        self.found[found.choice] = None
        return found.choice

    def _apart(self, allowed: Allowed, gap: float, warm: Choice | None) -> Choice:
        """The fastest choice of what is allowed if nothing hides. warm: a choice that is."""
        problem = restricted(self._space.problem, allowed)
        known = None if warm is None else places_of(allowed, warm)
        found = solve(problem, time_limit=self._left(), relative_gap=gap, warm=known)
        choice = places_in(allowed, found.choice)
        self.found[choice] = None
        return choice


Allowed = Mapping[int, Sequence[int]]
"""Search node -> the strategies that it may have, by their places; nodes that are not named may have all."""


def stored_alike(space: SearchSpace) -> Iterator[Allowed]:
    """For every set of axes: search node -> its strategies, of weights those that are split over these axes (over as
    many of them, and no others, as a weight can be), of their readers those that read them whole. For none and for all
    axes first without a word of readers."""
    held = {node: [strategy.results[0] for strategy in space.strategies[node]] for node in space.trained}
    axes = sorted({axis for layouts in held.values() for layout in layouts for axis in layout.axes})
    if not axes:
        return
    # Axes of which every set is listed; of more, none and all.
    counts = range(len(axes) + 1) if len(axes) <= 3 else (0, len(axes))
    readers = _reading_whole(space)
    known: list[Allowed] = []
    for chosen in itertools.chain.from_iterable(itertools.combinations(axes, count) for count in counts):
        weights = {node: _nearest(layouts, frozenset(chosen)) for node, layouts in held.items()}
        if weights not in known:
            known.append(weights)
            if len(chosen) in (0, len(axes)):
                yield weights
            yield {**weights, **readers}


def _reading_whole(space: SearchSpace) -> Allowed:
    """Ops of several operands that read a weight, or what ops of one operand make of it -> their strategies that split
    these operands over the fewest axes."""
    operands: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for edge in space.edges:
        if edge.operand is not None:
            operands[edge.consumer][edge.operand] = edge.producer
    passed = set(space.trained)
    found: dict[int, tuple[int, ...]] = {}
    for node, producers in sorted(operands.items()):
        read = [operand for operand, producer in producers.items() if producer in passed]
        if read and len(producers) == 1:
            passed.add(node)
        elif read:
            split = [
                sum(len(one.operands[operand].axes) for operand in read) for one in space.strategies[node]
            ]
            fewest = min(split)
            found[node] = tuple(place for place, count in enumerate(split) if count == fewest)
    return found


def _nearest(layouts: Sequence[Layout], axes: frozenset[str]) -> tuple[int, ...]:
    """Positions of those that use fewest other axes, and of these most of `axes`."""
    marks = [(-len(set(layout.axes) - axes), len(axes.intersection(layout.axes))) for layout in layouts]
    nearest = max(marks)
    return tuple(place for place, mark in enumerate(marks) if mark == nearest)


def places_in(allowed: Allowed, choice: Sequence[int]) -> tuple[int, ...]:
    """A choice of the restricted problem as one of the whole."""
    return tuple(allowed[node][place] if node in allowed else place for node, place in enumerate(choice))


def places_of(allowed: Allowed, choice: Sequence[int]) -> tuple[int, ...]:
    """A choice of the whole, of strategies that are allowed, as one of the restricted problem."""
    return tuple(
        list(allowed[node]).index(place) if node in allowed else place for node, place in enumerate(choice)
    )


@dataclass(frozen=True)
class Turn:
    """seconds: that the objective grows by. chosen: node -> its other strategy."""

    seconds: float
    chosen: Mapping[int, int]

    def of(self, choice: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.chosen.get(node, strategy) for node, strategy in enumerate(choice))


def turns(
    problem: Problem, kinds: CostKinds, base: Sequence[int], others: Iterable[Sequence[int]]
) -> list[Turn]:
    """What turns a kind of place of `base` over to one of `others`, each once, what costs least first."""
    found: dict[tuple[tuple[int, int], ...], Turn] = {}
    for other in others:
        for turn in _towards(problem, kinds, base, other):
            found.setdefault(tuple(turn.chosen.items()), turn)
    return sorted(found.values(), key=lambda turn: turn.seconds)


def _towards(problem: Problem, kinds: CostKinds, base: Sequence[int], other: Sequence[int]) -> Iterable[Turn]:
    differing = np.asarray(base) != np.asarray(other)
    labels, count = components(problem, differing)
    if not count:
        return
    changes = changes_by_kind(problem, kinds, labels, count, base, other)
    totals = kinds.totals(problem, base)
    now = overlapped_seconds(totals, kinds.paths)
    for places in _alike(problem, labels, count, base, other):
        seconds = overlapped_seconds(totals + changes[places].sum(axis=0), kinds.paths)
        members = frozenset(places)
        yield Turn(
            seconds - now, {node: other[node] for node, label in enumerate(labels) if label in members}
        )


def _alike(
    problem: Problem, labels: Sequence[int], count: int, base: Sequence[int], other: Sequence[int]
) -> Iterable[list[int]]:
    """The components in groups of the same arrays and the same strategies."""
    marks: list[list[tuple[int, ...]]] = [[] for _ in range(count)]
    for node, label in enumerate(labels):
        if label >= 0:
            marks[label].append((id(problem.node_costs[node]), base[node], other[node]))
    for (i, j), costs in zip(problem.edges, problem.edge_costs, strict=True):
        label = max(labels[i], labels[j])
        if label >= 0:
            marks[label].append((id(costs),))
    groups: defaultdict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for label, mark in enumerate(marks):
        groups[tuple(sorted(mark))].append(label)
    return groups.values()


def past_transfers(problem: Problem, base: Sequence[int], least: float) -> Iterator[tuple[int, ...]]:
    """One for each kind of transfer of `least` seconds or more, of equal layers together: each reader with the strategy
    that costs least, with all that it then reads and is read for, of those that read for nothing there."""
    between: defaultdict[tuple[int, int], list[Array]] = defaultdict(list)
    for ends, costs in zip(problem.edges, problem.edge_costs, strict=True):
        between[ends].append(costs)
    alike: defaultdict[tuple[tuple[int, ...], int, int], list[tuple[int, Array]]] = defaultdict(list)
    for (i, j), over in between.items():
        way = np.add.reduce([costs[base[i]] for costs in over])
        if way[base[j]] >= least:
            alike[tuple(map(id, over)), base[i], base[j]].append((j, way))
    around = _seconds_around(problem, base, {node for places in alike.values() for node, _ in places})
    for places in alike.values():
        chosen = list(base)
        for node, way in places:
            seconds = np.where(way == 0.0, around[node], np.inf)
            if np.isfinite(seconds).any():
                chosen[node] = int(np.argmin(seconds))
        if chosen != list(base):
            yield tuple(chosen)


def _seconds_around(problem: Problem, base: Sequence[int], nodes: set[int]) -> dict[int, Array]:
    """Of each node and all of its edges, per strategy of the node, the others as in `base`."""
    found = {node: problem.node_costs[node].astype(float) for node in nodes}
    for (i, j), costs in zip(problem.edges, problem.edge_costs, strict=True):
        if j in found:
            found[j] += costs[base[i]]
        if i in found:
            found[i] += costs[:, base[j]]
    return found
