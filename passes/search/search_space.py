"""What is searched: a problem of arrays, and what its nodes and edges mean on the graph.

What each cost of it is, the seconds of a step by kind, and mixes of two choices: where they differ in separate places,
each place may take either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from passes.layout.layout import Layout, NodeLayouts
from passes.search.step_kinds import EXPOSED, KINDS, PhaseOverlap, StepKinds, on_link, phase_paths
from passes.solver.problem import Array, Problem
from passes.solver.solve import ROUNDING


@dataclass(frozen=True)
class Edge:
    """Value `result` of search node `producer`, read by `consumer`.

    operand is the position among the consumer's operands, or None when the consumer is the end of
    the graph that the value must reach: the parameter whose gradient it is, or an output. link: what the seconds of the
    edge are over; a value read over two links has two edges.
    """

    producer: int
    result: int
    consumer: int
    operand: int | None
    link: int = 0


ALIKE = 0.02
"""Share of a step that splitting may save at most where plans are not told apart."""


@dataclass(frozen=True)
class Alone:
    """choice: every rank does all the work. most_gain: the share of its seconds that splitting saves at most, however
    much communication hides: what all ops take less where each is as fast as it can be."""

    choice: tuple[int, ...]
    most_gain: float


@dataclass(frozen=True)
class SearchSpace:
    """problem: arrays for the solver; names, strategies: per search node; edges: parallel to
    `problem.edges`. Nodes with a space in their name are none of the graph: "output N" stands for a result that no
    input is tied to, "beside X" for what X has for itself while it runs."""

    problem: Problem
    names: tuple[str, ...]
    strategies: tuple[tuple[NodeLayouts, ...], ...]
    edges: tuple[Edge, ...]
    reads: tuple[tuple[str, int], ...]
    output_slots: tuple[int | None, ...]  # per graph result: the search node whose layout it must reach
    step: StepKinds
    trained: tuple[int, ...] = ()  # search nodes of parameters that are

    def kinds(self, overlaps: Sequence[PhaseOverlap]) -> CostKinds:
        """Of the costs of `problem`, where phases overlap so well."""
        nodes = tuple(self.step.nodes.get(name, EXPOSED) for name in self.names)
        reads = zip(self.reads, self.edges, strict=True)
        edges = tuple(on_link(self.step.reads.get(read, EXPOSED), edge.link) for read, edge in reads)
        return CostKinds(nodes, edges, KINDS, phase_paths(overlaps, self.step.links))

    def totals(self, choice: Sequence[int]) -> Array:
        """float64[kinds]: the seconds of `choice` by kind."""
        return self.kinds(()).totals(self.problem, choice)

    @cached_property
    def alone(self) -> Alone | None:
        """None where it is not among the strategies, or not possible."""
        places: list[int] = []
        for strategies in self.strategies:
            whole = (i for i, strategy in enumerate(strategies) if _is_whole(strategy))
            if (place := next(whole, None)) is None:
                return None
            places.append(place)
        seconds = self.problem.cost(places)
        if not isfinite(seconds) or not self.problem.fits(places):
            return None
        least = sum(float(costs.min()) for costs in self.problem.node_costs)
        return Alone(tuple(places), 0.0 if seconds <= 0.0 else max(0.0, 1.0 - least / seconds))

    def assignment(self, choice: Sequence[int]) -> dict[str, NodeLayouts]:
        """The chosen layouts by node name, with the graph's output node under "output"."""
        chosen = [options[c] for options, c in zip(self.strategies, choice, strict=True)]
        layouts = {n: c for n, c in zip(self.names, chosen, strict=True) if " " not in n}
        ends = tuple(chosen[slot].results[0] for slot in self.output_slots if slot is not None)
        return {**layouts, "output": NodeLayouts(operands=ends, results=())}


def _is_whole(strategy: NodeLayouts) -> bool:
    return not any(layout.axes or layout.partial for layout in strategy.tensors)


def distinct(layouts: Sequence[Layout]) -> tuple[list[Layout], list[int]]:
    """Each layout once, and where each of `layouts` is among them."""
    position: dict[Layout, int] = {}
    where = [position.setdefault(layout, len(position)) for layout in layouts]
    return list(position), where


def overlapped_seconds(totals: Array, paths: Sequence[Array]) -> float:
    """Of a step with these seconds by kind: all of them, less what hides by each group of paths.

    paths: groups of float64[paths, kinds], see `passes.search.step_kinds`.
    """
    return float(totals.sum()) + sum(float((rows @ totals).max()) for rows in paths)


@dataclass(frozen=True)
class CostKinds:
    """nodes, edges: the kind of each cost of a problem: one of `count`, a column of `paths`. paths: in groups, see
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

        def all_times(kinds: Sequence[int], arrays: Sequence[Array]) -> tuple[Array, ...]:
            return tuple(times(costs, weights[kind]) for kind, costs in zip(kinds, arrays, strict=True))

        nodes, edges = all_times(self.nodes, problem.node_costs), all_times(self.edges, problem.edge_costs)
        return replace(problem, node_costs=nodes, edge_costs=edges)


def recombined(
    problem: Problem, kinds: CostKinds, first: Sequence[int], second: Sequence[int]
) -> tuple[int, ...]:
    """A mix of two choices with no more seconds than the better of them (within the memory limit if both are); of those
    that are equally fast the one with the least peak.

    Nodes at which they differ fall into connected components of the problem's graph; the costs of components
    add up, so each is one item that changes the totals by kind. Items are turned over one at a time, the
    best first, while the step's seconds fall: locally optimal, not more.
    """
    differing = np.asarray(first) != np.asarray(second)
    if not differing.any():
        return tuple(first)
    labels, count = components(problem, differing)
    changes = changes_by_kind(problem, kinds, labels, count, first, second)
    base = kinds.totals(problem, first)
    found = [tuple(first), tuple(second)]
    for taken in (np.zeros(count, dtype=bool), np.ones(count, dtype=bool)):
        _improve(base, changes, taken, kinds)
        mixed = [second[i] if label >= 0 and taken[label] else first[i] for i, label in enumerate(labels)]
        if problem.fits(mixed):
            found.append(tuple(mixed))
    seconds = [kinds.seconds(problem, choice) for choice in found]
    equal = (1.0 + ROUNDING) * min(seconds)
    fastest = [choice for choice, taken in zip(found, seconds, strict=True) if taken <= equal]
    return min(fastest, key=lambda choice: problem.peak(choice)[0])


def components(problem: Problem, differing: np.ndarray) -> tuple[list[int], int]:
    """Per node its component among those that differ, joined by edges, -1 for all others; and how many there are."""
    ends = np.array(problem.edges, dtype=np.int64).reshape(-1, 2)
    ends = ends[differing[ends[:, 0]] & differing[ends[:, 1]]]
    size = len(problem.node_costs)
    graph = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(size, size))
    _, raw = connected_components(graph, directed=False)
    used, labels = np.unique(raw[differing], return_inverse=True)
    found = np.full(size, -1)
    found[differing] = labels
    return [int(label) for label in found], len(used)


def changes_by_kind(
    problem: Problem,
    kinds: CostKinds,
    labels: Sequence[int],
    count: int,
    first: Sequence[int],
    second: Sequence[int],
) -> Array:
    """float64[count, kinds]: what turning a component over from `first` to `second` adds per kind.

    An edge never joins two components: its ends agree in both choices but for one component's.
    """
    changes = np.zeros((count, kinds.count))
    for node, label in enumerate(labels):
        if label >= 0:
            costs = problem.node_costs[node]
            changes[label, kinds.nodes[node]] += costs[second[node]] - costs[first[node]]
    for kind, (i, j), costs in zip(kinds.edges, problem.edges, problem.edge_costs, strict=True):
        label = max(labels[i], labels[j])
        if label >= 0:
            changes[label, kind] += costs[second[i], second[j]] - costs[first[i], first[j]]
    return changes


def _improve(base: Array, changes: Array, taken: np.ndarray, kinds: CostKinds) -> None:
    """Turn over, in place, the item of `taken` that helps most, until none does."""
    totals = base + changes[taken].sum(axis=0)
    best = overlapped_seconds(totals, kinds.paths)
    for _ in range(4 * len(changes)):
        signs = np.where(taken, -1.0, 1.0)
        turned = totals + signs[:, None] * changes
        seconds = turned.sum(axis=1) + sum((turned @ rows.T).max(axis=1) for rows in kinds.paths)
        item = int(np.argmin(seconds))
        totals = turned[item]
        if not (after := overlapped_seconds(totals, kinds.paths)) < best:
            return
        best = after
        taken[item] = not taken[item]
