"""What each cost of a search problem is, and the seconds of a step by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.solver.problem import Array, Problem


def overlapped_seconds(totals: Array, paths: Sequence[Array]) -> float:
    """Of a step with these seconds by kind: all of them, less what hides in each phase.

    paths: per phase float64[paths, kinds], see `passes.search.step_kinds.phase_paths`.
    """
    return float(totals.sum()) + sum(float((rows @ totals).max()) for rows in paths)


@dataclass(frozen=True)
class CostKinds:
    """nodes, edges: the kind of each cost of a problem: one of `count`, a column of `paths`. paths: per phase, see
    `overlapped_seconds`."""

    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    count: int
    paths: tuple[Array, ...]

    def totals(self, problem: Problem, choice: Sequence[int]) -> Array:
        """float64[kinds]: the seconds of `choice` per kind."""
        totals = np.zeros(self.count)
        for kind, costs, a in zip(self.nodes, problem.node_costs, choice, strict=True):
            totals[kind] += costs[a]
        for kind, (i, j), costs in zip(self.edges, problem.edges, problem.edge_costs, strict=True):
            totals[kind] += costs[choice[i], choice[j]]
        return totals

    def seconds(self, problem: Problem, choice: Sequence[int]) -> float:
        return overlapped_seconds(self.totals(problem, choice), self.paths)

    def hides(self) -> bool:
        """Whether some cost of the problem can hide another."""
        used = {*self.nodes, *self.edges}
        return any(any(rows[:, kind].any() for kind in used) for rows in self.paths)

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

        return replace(
            problem,
            node_costs=tuple(
                times(c, weights[k]) for k, c in zip(self.nodes, problem.node_costs, strict=True)
            ),
            edge_costs=tuple(
                times(c, weights[k]) for k, c in zip(self.edges, problem.edge_costs, strict=True)
            ),
        )
