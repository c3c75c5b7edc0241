"""A search problem in which every reduction that only the end of a phase needs pays for a start of its own.

Such reductions share buckets, and each is charged as its part of a full one (`cost_model.collectives`). Where all
of them fill none, the step takes the start of a bucket that nobody was charged for, and a plan without any reduction
may be faster. One that is found here has few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from passes.search.cost_kinds import CostKinds
from passes.search.step_kinds import ended_phase, ended_seconds
from passes.solver.problem import Array, Problem


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
