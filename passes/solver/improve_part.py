"""Improving a choice that fits by solving parts of it exactly, everything else as it is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .binding import solve_rows
from .core import Budget
from .graph import Graph, cost_beside
from .tables import Tables
from .usage_rows import Rows

__all__ = ["grow", "improve_part", "part_of"]


def grow(graph: Graph, seeds: list[int], entries: int, rng: np.random.Generator) -> list[int]:
    """Nodes around `seeds`, taken in random order from the edge of what is there, up to so many edge entries."""
    inside: set[int] = set()
    frontier = list(dict.fromkeys(seeds))
    total = 0
    while frontier and total < entries:
        place = int(rng.integers(len(frontier)))
        frontier[place], frontier[-1] = frontier[-1], frontier[place]
        node = frontier.pop()
        if node in inside:
            continue
        inside.add(node)
        total += len(graph.cost[node])
        for other, matrix in graph.adjacent[node].items():
            if other in inside:
                total += matrix.size
            else:
                frontier.append(other)
    return sorted(inside)


def part_of(graph: Graph, rows: Rows, choice: Mapping[int, int], nodes: list[int]) -> Graph:
    """The problem of choosing for `nodes`, all others as in `choice`; its constant is the cost of those."""
    kept, tables = set(nodes), Tables(graph.tables)
    part = Graph(tables, {}, {node: {} for node in nodes})
    for node in nodes:
        edges = graph.adjacent[node].items()
        outside = [edge for edge in edges if edge[0] not in kept]
        for other, matrix in edges:
            if other in kept and node < other:
                part.set_edge(node, other, tables.intern(matrix))
        part.cost[node] = tables.intern(cost_beside(graph.cost[node], outside, choice))
    own = np.zeros(len(rows.slack) + 1)
    for node in nodes:
        usage = rows.usages.get(node)
        if usage is not None:
            usage.add_to(own, choice[node])
            part.use[node] = [usage]
    part.slack = rows.slack - rows.profile(choice) + np.cumsum(own)[:-1]
    part.constant = graph.value(choice) - part.value(choice)
    return part


def improve_part(
    graph: Graph, rows: Rows, choice: dict[int, int], nodes: list[int], budget: Budget
) -> dict[int, int] | None:
    """A cheaper choice that differs from `choice` only at `nodes`; None if none was found."""
    part = part_of(graph, rows, choice, nodes)
    now = part.value(choice)
    best, cost = None, now

    def offer(left: Graph, left_rows: Rows, found: dict[int, int]) -> float:
        nonlocal best, cost
        full = left.expand(found)
        value = left.value(found)
        if value < cost - budget.tolerance / 2 and left_rows.fits(found):
            best, cost = full, value
        return cost

    solve_rows(part, now, budget, offer)
    return None if best is None else {**choice, **best}
