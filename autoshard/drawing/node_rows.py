"""Which row each group of a drawing is in: forward runs down, backward up, a module's two side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from autoshard.drawing.module_groups import Group

PAIR_WEIGHT = 4.0  # a module's forward and backward in one row, against the length of one edge
SAVED_WEIGHT = 0.2  # a forward value in the row of the backward op that reads it


@dataclass
class _Program:
    """minimise cost @ x subject to: for each constraint, the sum of its terms is at most its bound."""

    cost: list[float]
    entries: list[tuple[int, int, float]] = field(default_factory=list)  # (constraint, variable, factor)
    bounds: list[float] = field(default_factory=list)

    def at_most(self, bound: float, *terms: tuple[int, float]) -> None:
        self.entries += [(len(self.bounds), variable, factor) for variable, factor in terms]
        self.bounds.append(bound)

    def solve(self) -> list[float]:
        if not self.bounds:
            return [0.0] * len(self.cost)
        rows, columns, factors = zip(*self.entries, strict=True)
        matrix = coo_array((factors, (rows, columns)), shape=(len(self.bounds), len(self.cost)))
        answer = linprog(
            np.array(self.cost), A_ub=matrix.tocsr(), b_ub=np.array(self.bounds), method="highs-ds"
        )
        assert answer.status == 0, answer.message
        return answer.x.tolist()


def assign_rows(groups: Sequence[Group], edges: Sequence[tuple[int, int]]) -> list[int]:
    """Row of every group, 0 at the top.

    A forward group is below all it reads, a backward group above all it reads. Among the rows that
    keep this the sum of edge lengths is least, and modules have forward and backward side by side
    (a difference costs like four rows of an edge). The program is the dual of a network flow, so its
    vertices, and with them the rows, are whole numbers.
    """
    program = _Program([0.0] * len(groups))
    for source, target in edges:
        if groups[source].phase == groups[target].phase:
            upper, lower = (source, target) if groups[source].phase == "forward" else (target, source)
            program.at_most(-1.0, (upper, 1.0), (lower, -1.0))
            program.cost[upper] -= 1.0
            program.cost[lower] += 1.0
        else:
            _pull_together(program, source, target, SAVED_WEIGHT)
    for forward, backward in _pairs(groups):
        _pull_together(program, forward, backward, PAIR_WEIGHT)
    rows = [round(value) for value in program.solve()[: len(groups)]]
    top = min(rows, default=0)
    return [row - top for row in rows]


def _pull_together(program: _Program, first: int, second: int, weight: float) -> None:
    """Add weight * |row of first - row of second| to the cost."""
    distance = len(program.cost)
    program.cost.append(weight)
    program.at_most(0.0, (first, 1.0), (second, -1.0), (distance, -1.0))
    program.at_most(0.0, (second, 1.0), (first, -1.0), (distance, -1.0))


def _pairs(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """(forward, backward) groups of the same key. If a module is in several groups, the first
    forward one goes with the last backward one: backward runs in reverse."""
    found: dict[tuple[str, str], list[int]] = {}
    for group in groups:
        found.setdefault((group.key, group.phase), []).append(group.index)
    return [
        pair
        for (key, phase), forward in found.items()
        if phase == "forward"
        for pair in zip(forward, reversed(found.get((key, "backward"), [])), strict=False)
    ]
