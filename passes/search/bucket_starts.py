"""Starts of buckets that nobody is charged for.

Reductions that only the end of a phase needs share buckets, and each is charged as its part of a full one
(`cost_model.collectives`). Where all of them fill none, the step takes the start of a bucket besides: a plan without
any reduction may be faster, and no plan with one is as fast as it is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product

import numpy as np
import torch

from cost_model.collectives import MERGED, copies_seconds
from passes.ir.joint import JointGraph, node_value
from passes.redistribution.redistribute import Redistributor
from passes.search.overlapped import solve_overlapped
from passes.search.search_space import CostKinds, Edge, SearchSpace, distinct
from passes.search.step_kinds import PhaseOverlap, ended_phase, ended_seconds
from passes.solver.problem import Array, Infeasible, Problem, Solution
from passes.solver.solve import ROUNDING
from passes.strategies.prices import Prices


def unpaid_starts(totals: Array, missing: Sequence[float]) -> list[float]:
    """missing: of every phase, the seconds of its timeline that its `totals` by kind do not count. Of those in which
    they are more than all that only the end needs is counted for; 0 of others."""
    return [
        seconds if seconds > ended_seconds(totals, phase) else 0.0 for phase, seconds in enumerate(missing)
    ]


def started(problem: Problem, kinds: CostKinds, choice: Sequence[int], phases: int) -> list[int]:
    """How many such reductions a choice has, of every phase."""
    counts = [0] * phases
    for kind, (i, j), costs in zip(kinds.edges, problem.edges, problem.edge_costs, strict=True):
        phase = ended_phase(kind)
        if phase is not None and phase < phases and costs[choice[i], choice[j]] > 0.0:
            counts[phase] += 1
    return counts


def started_alone(problem: Problem, kinds: CostKinds, seconds: Sequence[float]) -> Problem:
    """seconds: of every phase, of a start; where that is none, as it was."""
    known: dict[tuple[int, float], Array] = {}

    def started(costs: Array, kind: int) -> Array:
        phase = ended_phase(kind)
        start = 0.0 if phase is None else max(0.0, seconds[phase])
        if start == 0.0:
            return costs
        key = id(costs), start  # equal layers go on sharing theirs
        if key not in known:
            known[key] = np.where(costs > 0.0, costs + start, costs)
        return known[key]

    pairs = zip(problem.edge_costs, kinds.edges, strict=True)
    return replace(problem, edge_costs=tuple(started(costs, kind) for costs, kind in pairs))


STAGES = 4
"""Problems solved for one bound: each forbids reductions with smaller starts than the one before."""
WITHOUT_GAPS = 0.3, 0.15
"""Relative gaps of searches without the reductions that have a start. As a rule a step takes far longer then, and the
first, to which messages alone come, says enough: the second took a GPT of two layers on 4 CPUs four times its planning.
"""
LITTLE = 1e-6
"""Of a start, added to the price of a collective: too little to change which way is the cheapest."""
_SIZES = tuple(2**k for k in range(8, 31, 2))


@dataclass(frozen=True)
class BucketStarts:
    """Of an edge that is charged as a part of a full bucket, float64[strategies, strategies]: seconds that a program
    with this redistribution takes besides, at least, for the start that all of its bucket share."""

    edges: Mapping[int, Array]

    def of(self, problem: Problem, choice: Sequence[int]) -> float:
        """That a program of the choice takes besides."""
        ends = ((problem.edges[edge], seconds) for edge, seconds in self.edges.items())
        return max((float(seconds[choice[i], choice[j]]) for (i, j), seconds in ends), default=0.0)

    def without(self, problem: Problem, seconds: float) -> Problem:
        """Without redistributions of so many or more."""
        known: dict[tuple[int, int], Array] = {}
        costs = list(problem.edge_costs)
        for edge, starts in self.edges.items():
            key = id(costs[edge]), id(starts)  # equal layers go on sharing theirs
            if key not in known:
                known[key] = np.where(starts >= seconds, np.inf, costs[edge])
            costs[edge] = known[key]
        return replace(problem, edge_costs=tuple(costs))

    def proven(
        self, problem: Problem, kinds: CostKinds, least: float, own: float, left: Callable[[], float]
    ) -> float:
        """No choice takes less with starts, as the objective counts the rest.

        least: nor does any without. own: starts of the best choice. left: seconds for a search.
        """

        def solved(seconds: float) -> Solution:
            others = self.without(problem, seconds)
            within = lambda gap: solve_overlapped(others, kinds, time_limit=left(), relative_gap=gap)
            rough, close = WITHOUT_GAPS
            found = within(rough)
            return found if found.lower_bound >= least + own else within(close)

        return self.bound(least, least + own, solved)

    def bound(self, least: float, aim: float, solved: Callable[[float], Solution]) -> float:
        """Of seconds with starts, at most `aim`.

        least: that no choice is counted below. solved: the best without redistributions whose starts are so many
        seconds or more. What has one of these takes `aim`, and all else what is solved then; raises Infeasible.
        """
        before = np.inf
        for _ in range(STAGES):
            seconds = (aim - least) * (1.0 - ROUNDING)
            if not 0.0 < seconds < before:
                break
            try:
                least, before = max(least, solved(seconds).lower_bound), seconds
            except Infeasible:
                return aim
        return min(least, aim)


StartsUnder = Callable[[Sequence[PhaseOverlap], float], BucketStarts]
"""Where phases overlap so well; none, if none takes so many seconds."""


@dataclass(frozen=True)
class _Started:
    """What prices a collective: as a part of a bucket, and a little of the least that its bucket takes besides, so that
    the way is the one that is taken.

    nbytes: of all that may share buckets, and of the largest of it. A bucket of several is copied into."""

    prices: Prices
    nbytes: tuple[int, int]
    known: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        return self.prices.merged.collective_seconds(kind, axes, nbytes) + LITTLE * self.besides(kind, axes)

    def besides(self, kind: str, axes: tuple[str, ...]) -> float:
        if kind not in MERGED:
            return 0.0
        if (kind, axes) not in self.known:
            total, largest = self.nbytes
            several = self._missing(kind, axes, total, 2)
            self.known[kind, axes] = max(0.0, min(several, self._missing(kind, axes, largest, 1)))
        return self.known[kind, axes]

    def _missing(self, kind: str, axes: tuple[str, ...], most: int, count: int) -> float:
        """Seconds that `count` collectives in one bucket take more than they are charged, of `most` bytes or fewer: the
        more there are, the more of the start they are charged."""
        prices, ranks = self.prices, self.prices.mesh.size(*axes)
        copies = lambda n: (
            prices.compute.launch_seconds + copies_seconds(prices.compute, kind, ranks, n, count)
        )
        taken = lambda n: (
            prices.redistributor.collective_seconds(kind, axes, n) + (copies(n) if count > 1 else 0.0)
        )
        sizes = [*(n for n in _SIZES if n < most), most]
        return min(taken(n) - prices.merged.collective_seconds(kind, axes, n) for n in sizes)


def bucket_starts(
    space: SearchSpace, joint: JointGraph, prices: Prices, overlaps: Sequence[PhaseOverlap], least: float
) -> BucketStarts:
    """Of the reductions that only the end of a phase needs, as far as they are not hidden: that of a bucket may begin
    before the phase has computed all. None, if none takes as many seconds as `least`."""
    ending, nbytes = _ending(space, joint, len(overlaps)), [0]
    nbytes += [value.numel() * value.element_size() for _, value in ending.values()]
    started = _Started(prices, (sum(nbytes), max(nbytes)))
    exposed = [1.0 - overlap.efficiency for overlap in overlaps]
    names = prices.mesh.names
    groups = [axes for count in range(1, len(names) + 1) for axes in combinations(names, count)]
    if max(exposed) * max(started.besides(kind, axes) for kind, axes in product(MERGED, groups)) < least:
        return BucketStarts({})
    ways = prices.merged.priced_by(started)
    known: dict[Hashable, Array] = {}
    found: dict[int, Array] = {}
    charged: defaultdict[Edge, list[Array]] = defaultdict(list)
    for edge, costs in zip(space.edges, space.problem.edge_costs, strict=True):
        charged[replace(edge, link=0)].append(costs)
    for number, (phase, value) in ending.items():
        edge = space.edges[number]
        over = charged[edge]
        key = tuple(map(id, over)), phase, tuple(value.shape), value.dtype
        if key not in known:
            known[key] = exposed[phase] * _besides(space, edge, np.add.reduce(over), value, ways)
        found[number] = known[key]
    return BucketStarts({number: seconds for number, seconds in found.items() if seconds.any()})


def _ending(space: SearchSpace, joint: JointGraph, phases: int) -> dict[int, tuple[int, torch.Tensor]]:
    """Phase and value, by edge; of the edges of a value over several links by the first."""
    nodes = {node.name: node for node in joint.graph.nodes}
    found: dict[int, tuple[int, torch.Tensor]] = {}
    for number, (kind, edge) in enumerate(zip(space.kinds(()).edges, space.edges, strict=True)):
        phase = ended_phase(kind)
        if phase is not None and phase < phases and not edge.link:
            found[number] = phase, node_value(nodes[space.names[edge.producer]], edge.result)
    return found


def _besides(
    space: SearchSpace, edge: Edge, charged: Array, value: torch.Tensor, ways: Redistributor
) -> Array:
    read = space.strategies[edge.consumer]
    targets = [s.results[0] if edge.operand is None else s.operands[edge.operand] for s in read]
    rows, row_of = distinct([s.results[edge.result] for s in space.strategies[edge.producer]])
    columns, column_of = distinct(targets)
    taken = ways.matrix(rows, columns, tuple(value.shape), value.element_size())[np.ix_(row_of, column_of)]
    possible = np.isfinite(taken) & np.isfinite(charged)
    return np.maximum(np.subtract(taken, charged, where=possible, out=np.zeros_like(charged)), 0.0) / LITTLE
