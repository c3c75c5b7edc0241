"""What the reductions leave, as a linear or mixed-integer program in marginal form.

Variables: x[i, a] per strategy and y[e, a, b] per finite entry of an edge.
    sum_a x[i, a] = 1        sum_b y[e, a, b] = x[i, a]        sum_a y[e, a, b] = x[j, b]
    sum of use * x <= slack  for every memory row
With x integral y is too. Far tighter than y >= x_a + x_b - 1: the relaxation is mostly integral.

Nodes and edges that are alike (`alike.py`) may be one, which stands for their sum: 1 becomes how many they are. Every
answer of the whole has such a sum, so the optimum is a bound, and its dual values are messages for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

from .alike import Alike, Side
from .graph import Graph
from .problem import Array
from .usage_rows import Row

__all__ = ["MarginalProgram", "build_program", "memory_rows", "row_scale"]

SCALE = 1e5
"""What the typical difference of costs becomes, so that HiGHS's absolute tolerances are small beside it."""
ROW_SCALE = 1e4
"""What the slack of a memory row becomes; the tolerance of 1e-6 is then 1e-10 of it."""


@dataclass(frozen=True)
class MarginalProgram:
    """The program, in HiGHS's units (costs times `factor`).

    nodes:   order of the node variables; `start[p]` is the first column of node `nodes[p]`, whose variables sum to
             `count[p]`.
    sides:   first row of the marginals of each side of an edge.
    edges:   (i, j) with i < j; `edge_column[e]` is the first column of edge `edges[e]`.
    pairs:   per edge (rows a, columns b) of its finite entries.
    most:    of each column; as many as it stands for.
    """

    nodes: tuple[int, ...]
    count: NDArray[np.int64]
    start: NDArray[np.int64]
    sides: Mapping[Side, int]
    edges: tuple[Side, ...]
    edge_column: NDArray[np.int64]
    pairs: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]
    cost: Array
    most: Array
    matrix: csc_array
    row_lower: Array
    row_upper: Array
    factor: float


def build_program(
    graph: Graph, memory: Mapping[int, Row] | None = None, alike: Alike | None = None
) -> MarginalProgram:
    """The program of `graph`, all of whose node costs are finite, with the memory rows `memory`; or its sum over what
    is `alike`, where there are none."""
    memory, alike = memory or {}, alike or Alike.none(graph)
    nodes = tuple(sorted(alike.count))
    at = {node: p for p, node in enumerate(nodes)}
    sizes = np.array([len(graph.cost[node]) for node in nodes], dtype=np.int64)
    count = np.array([alike.count[node] for node in nodes], dtype=np.int64)
    start = np.concatenate([[0], np.cumsum(sizes)])
    pairs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    costs = [graph.cost[node] - graph.cost[node].min() for node in nodes]
    row, column, value = (
        [np.repeat(np.arange(len(nodes)), sizes)],
        [np.arange(start[-1])],
        [np.ones(start[-1])],
    )
    most = [np.repeat(count, sizes)]
    sides: dict[Side, int] = {}
    edge_column = np.zeros(len(alike.edges) + 1, dtype=np.int64)
    edge_column[0], rows = start[-1], len(nodes)
    for e, (i, j) in enumerate(alike.edges):
        matrix = graph.adjacent[i][j]
        a, b = np.nonzero(np.isfinite(matrix))
        pairs.append((a, b))
        costs.append(matrix[a, b] - matrix[a, b].min())
        edge_column[e + 1] = edge_column[e] + len(a)
        columns = np.arange(edge_column[e], edge_column[e + 1])
        most.append(np.full(len(a), min(alike.count[alike.like[i]], alike.count[alike.like[j]])))
        for side, used in (((i, j), a), ((j, i), b)):
            first = alike.side_like[side]
            if first not in sides:
                sides[first], size = rows, len(graph.cost[side[0]])
                place = at[alike.like[side[0]]]
                row.append(np.arange(rows, rows + size))
                column.append(np.arange(start[place], start[place + 1]))
                value.append(np.full(size, -float(alike.times[first])))
                rows += size
            row.append(sides[first] + used)
            column.append(columns)
            value.append(np.ones(len(used)))
    fixed = np.zeros(rows)
    fixed[: len(nodes)] = count
    limits = memory_rows(memory, at, start, rows)
    cost = np.concatenate(costs)
    factor = _factor(cost)
    entries = np.concatenate(value + limits[2])
    places = np.concatenate(row + limits[0]), np.concatenate(column + limits[1])
    return MarginalProgram(
        nodes,
        count,
        start,
        sides,
        alike.edges,
        edge_column,
        tuple(pairs),
        cost * factor,
        np.concatenate(most).astype(np.float64),
        csc_array((entries, places), shape=(rows + len(memory), len(cost))),
        np.concatenate([fixed, np.full(len(memory), -np.inf)]),
        np.concatenate([fixed, limits[3]]),
        factor,
    )


def memory_rows(
    memory: Mapping[int, Row], at: Mapping[int, int], start: NDArray[np.int64], first: int
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]], list[Array], Array]:
    rows: list[NDArray[np.int64]] = []
    columns: list[NDArray[np.int64]] = []
    values: list[Array] = []
    upper = np.zeros(len(memory))
    for position, row in enumerate(memory.values()):
        scale = row_scale(row)
        upper[position] = row.slack * scale
        for node in sorted(row.used):
            used = np.flatnonzero(row.used[node])
            rows.append(np.full(len(used), first + position))
            columns.append(start[at[node]] + used)
            values.append(row.used[node][used] * scale)
    return rows, columns, values, upper


def row_scale(row: Row) -> float:
    largest = max((float(vector.max()) for vector in row.used.values()), default=0.0)
    return ROW_SCALE / (max(abs(row.slack), largest) or ROW_SCALE)


def _factor(cost: Array) -> float:
    """A power of two (so that scaling is exact) that brings the mean positive cost to `SCALE`."""
    positive = cost[cost > 0]
    if not len(positive):
        return 1.0
    return float(2.0 ** np.round(np.log2(SCALE / np.mean(positive))))
