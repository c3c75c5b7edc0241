"""Memory rows that say what a program holds: at every step what it holds besides what the search counts.

A judged program of one choice says what there is between the two: transfers in flight, gradients that are there late,
what is written in place. That is given to the search as nodes of one strategy, alive from step to step: so other
choices are counted as if they held as much besides. Where rows count more than the program holds, the limit is raised
by the most that they do, and all other steps are given the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from passes.search.search_space import CostKinds
from passes.search.step_kinds import EXPOSED
from passes.solver.problem import Array, Problem

PARTS = 48
"""Nodes that hold what is given, at most: between steps at which it changes."""
CLOSE, SLACK = 2e-3, 0.3
"""By how much more may be given than a program holds, to change it less often: as shares of its peak, and of what a
step is below that."""

Held = Sequence[tuple[str, int]]
"""(op, bytes alive while it runs), in the order of a program."""


def with_parts(problem: Problem) -> Problem:
    """`problem`, and nodes that will say what is given. Nothing yet."""
    return replace(
        problem,
        node_costs=(*problem.node_costs, *[np.zeros(1)] * PARTS),
        intervals=(*problem.intervals, *[(0, 0)] * PARTS),
        usages=(*problem.usages, *[np.zeros(1)] * PARTS),
    )


def kinds_with_parts(kinds: CostKinds) -> CostKinds:
    return replace(kinds, nodes=(*kinds.nodes, *[EXPOSED] * PARTS))


def held_besides(
    problem: Problem, choice: Sequence[int], names: Sequence[str], held: Held
) -> dict[str, tuple[float, float]]:
    """By name, where a program holds other than its choice is counted: how much more, and by how much more than that
    may be given. names: of the steps of `problem`, as the program calls them."""
    by_name = dict(_by_name(held, set(names)))
    counted, peak = _counted(problem, choice, len(names)), max(nbytes for _, nbytes in held)
    return {
        name: (by_name[name] - counted[step], max(CLOSE * peak, SLACK * (peak - by_name[name])))
        for step, name in enumerate(names)
        if name in by_name
    }


def _by_name(held: Held, names: set[str]) -> Iterator[tuple[str, int]]:
    """With each op what runs right before it and is no op of the graph: its transfers."""
    most = 0
    for name, nbytes in held:
        most = max(most, nbytes)
        if name in names:
            yield name, most
            most = 0


def _counted(problem: Problem, choice: Sequence[int], steps: int) -> Array:
    changes = np.zeros(steps + 1)
    for (first, last), usage, taken in zip(problem.intervals, problem.usages, choice, strict=False):
        changes[first] += usage[taken]
        changes[min(last, steps)] -= usage[taken]
    return np.cumsum(changes)[:-1]


def corrected(
    problem: Problem, names: Sequence[str], besides: Mapping[str, tuple[float, float]]
) -> tuple[Problem, float]:
    """`problem`, which is one `with_parts`, with what `besides` says; and by how much its limit is to be raised."""
    pieces = _pieces([besides.get(name) for name in names])
    raised = max(0.0, -min((more for _, _, more in pieces), default=0.0))
    own = len(problem.node_costs) - PARTS
    starts = np.array(sorted({first for first, last in problem.intervals[:own] if first < last}))
    row = lambda step: int(starts[max(0, starts.searchsorted(step, "right") - 1)])  # rows stay the same
    lives = [(row(first), row(last) if last < len(names) else last) for first, last, _ in pieces]
    free = PARTS - len(pieces)
    return replace(
        problem,
        intervals=(*problem.intervals[:own], *lives, *[(0, 0)] * free),
        usages=(*problem.usages[:own], *(np.array([p[2] + raised]) for p in pieces), *[np.zeros(1)] * free),
    ), raised


def _pieces(besides: Sequence[tuple[float, float] | None]) -> list[tuple[int, int, float]]:
    """(first step, the step behind the last, bytes more). Steps of which nothing is known are as the one before."""
    known = [(step, *one) for step, one in enumerate(besides) if one is not None]
    times = 1.0
    while known:
        found: list[tuple[int, int, float]] = []
        first, most, allowed = 0, -np.inf, np.inf
        for step, more, may in known:
            if max(most, more) > min(allowed, more + times * may):
                found.append((first, step, most))
                first, most, allowed = step, -np.inf, np.inf
            most, allowed = max(most, more), min(allowed, more + times * may)
        found.append((first, len(besides), most))
        if len(found) <= PARTS:
            return found
        times *= 2.0
    return []
