"""What each cost of a search problem is: computing, communication that may hide behind it, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.schedule.hiding import StepParts
from passes.solver.problem import Array, Problem

__all__ = ["CostKinds", "parts_of"]


@dataclass(frozen=True)
class CostKinds:
    """Which costs of a problem are what: per node and per edge one of

    EXPOSED    counts in full
    2 p        computing of phase p
    2 p + 1    hideable communication of phase p
    """

    EXPOSED = -1

    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    phases: int

    def totals(self, problem: Problem, choice: Sequence[int]) -> Array:
        """float64[2 P + 1]: the seconds of `choice` per kind, EXPOSED last."""
        totals = np.zeros(2 * self.phases + 1)
        for kind, costs, a in zip(self.nodes, problem.node_costs, choice, strict=True):
            totals[kind] += costs[a]
        for kind, (i, j), costs in zip(self.edges, problem.edges, problem.edge_costs, strict=True):
            totals[kind] += costs[choice[i], choice[j]]
        return totals

    def parts(self, problem: Problem, choice: Sequence[int]) -> StepParts:
        """The seconds of `choice` by kind."""
        return parts_of(self.totals(problem, choice))

    def weighted(self, problem: Problem, weights: Sequence[float]) -> Problem:
        """`problem` with every cost times the weight of its kind; one array per (array, weight)."""
        scaled: dict[tuple[int, float], Array] = {}

        def times(costs: Array, weight: float) -> Array:
            if weight == 1.0:
                return costs
            key = id(costs), weight
            if key not in scaled:
                # What is impossible stays so at weight 0.
                scaled[key] = np.where(np.isfinite(costs), costs * weight if weight else 0.0, costs)
            return scaled[key]

        factors = (*weights, 1.0)
        return replace(
            problem,
            node_costs=tuple(
                times(c, factors[k]) for k, c in zip(self.nodes, problem.node_costs, strict=True)
            ),
            edge_costs=tuple(
                times(c, factors[k]) for k, c in zip(self.edges, problem.edge_costs, strict=True)
            ),
        )


def parts_of(totals: Array) -> StepParts:
    """`CostKinds.totals` as seconds by name."""
    values = [float(v) for v in totals]
    return StepParts(tuple(values[0:-1:2]), tuple(values[1:-1:2]), values[-1])
