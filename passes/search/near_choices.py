"""Choices near a good one.

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

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from passes.search.cost_kinds import CostKinds, changes_by_kind, components, overlapped_seconds
from passes.solver.problem import Array, Problem


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
