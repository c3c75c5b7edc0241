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

__all__ = ["past_transfers"]


def past_transfers(problem: Problem, base: Sequence[int], least: float) -> Iterator[tuple[int, ...]]:
    """One for each kind of transfer of `least` seconds or more, of equal layers together: each reader with the strategy
    that costs least, with all that it then reads and is read for, of those that read for nothing there."""
    alike: defaultdict[tuple[int, int, int], list[tuple[int, Array]]] = defaultdict(list)
    for (i, j), costs in zip(problem.edges, problem.edge_costs, strict=True):
        if costs[base[i], base[j]] >= least:
            alike[id(costs), base[i], base[j]].append((j, costs[base[i]]))
    edges = _around(problem, {node for places in alike.values() for node, _ in places})
    for places in alike.values():
        chosen = list(base)
        for node, way in places:
            seconds = problem.node_costs[node] + edges[node].seconds(base)
            seconds = np.where(way == 0.0, seconds, np.inf)
            if np.isfinite(seconds).any():
                chosen[node] = int(np.argmin(seconds))
        if chosen != list(base):
            yield tuple(chosen)


class _Ways:
    """The edges of one node."""

    def __init__(self) -> None:
        self.read: list[tuple[int, Array]] = []
        self.written: list[tuple[int, Array]] = []

    def seconds(self, base: Sequence[int]) -> Array:
        """Of all of them, per strategy of the node, the others as in `base`."""
        read = sum((costs[base[other]] for other, costs in self.read), np.zeros(()))
        return read + sum((costs[:, base[other]] for other, costs in self.written), np.zeros(()))


def _around(problem: Problem, nodes: set[int]) -> dict[int, _Ways]:
    found = {node: _Ways() for node in nodes}
    for (i, j), costs in zip(problem.edges, problem.edge_costs, strict=True):
        if j in found:
            found[j].read.append((i, costs))
        if i in found:
            found[i].written.append((j, costs))
    return found
