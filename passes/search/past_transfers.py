"""Choices near a good one in which one kind of transfer is done behind its reader, or not at all.

The reader takes its operand as it is held, whatever its own readers have to bring into another layout then: a loss is
divided before it is summed over ranks. Such places cost much the same by the objective, and on the timeline one of them
may hide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from passes.solver.problem import Array, Problem


def past_transfers(problem: Problem, base: Sequence[int], least: float) -> Iterator[tuple[int, ...]]:
    """One for each kind of transfer of `least` seconds or more, of equal layers together: each reader with the strategy
    that costs least, with all that it then reads and is read for, of those that read for nothing there."""
    alike: defaultdict[tuple[int, int, int], list[tuple[int, Array]]] = defaultdict(list)
    for (i, j), costs in zip(problem.edges, problem.edge_costs, strict=True):
        if costs[base[i], base[j]] >= least:
            alike[id(costs), base[i], base[j]].append((j, costs[base[i]]))
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
