"""What the reductions leave, as a linear or mixed-integer program in marginal form, solved by HiGHS.

Variables: x[i, a] per strategy and y[e, a, b] per finite entry of an edge.
    sum_a x[i, a] = 1        sum_b y[e, a, b] = x[i, a]        sum_a y[e, a, b] = x[j, b]
    sum of use * x <= slack  for every memory row
With x integral y is too. Far tighter than y >= x_a + x_b - 1: the relaxation is mostly integral.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from .dual import Messages
from .graph import Graph
from .interruptible import run_solver
from .problem import Array
from .usage_rows import Row

__all__ = ["MarginalProgram", "Relaxation", "Relaxed", "build_program", "solve_integers"]

SCALE = 1e5
"""What the typical difference of costs becomes, so that HiGHS's absolute tolerances are small beside it."""
ROW_SCALE = 1e4
"""What the slack of a memory row becomes; the tolerance of 1e-6 is then 1e-10 of it."""
INTEGRAL = 1e-6


@dataclass(frozen=True)
class MarginalProgram:
    """The arrays of the program, in HiGHS's units (costs times `factor`, less `offset`).

    nodes:   order of the node variables; `start[p]` is the first column of node `nodes[p]`.
    edges:   (i, j) with i < j, and the first marginal row of each; `entry` and its columns follow `start[-1]`.
    pairs:   per edge (rows a, columns b) of its finite entries.
    """

    nodes: tuple[int, ...]
    start: NDArray[np.int64]
    edges: tuple[tuple[int, int], ...]
    edge_row: NDArray[np.int64]
    edge_column: NDArray[np.int64]
    pairs: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]
    cost: Array
    row: NDArray[np.int32]
    column: NDArray[np.int32]
    value: Array
    row_lower: Array
    row_upper: Array
    factor: float


@dataclass(frozen=True)
class Relaxed:
    """Optimum of the relaxation.

    shares:   [node columns] of every strategy.
    choice:   if integral: per node its strategy, else the largest x of each node.
    messages: the dual values as messages.
    prices:   memory row -> dual value >= 0, cost per unit of usage.
    """

    choice: dict[int, int]
    shares: Array
    integral: bool
    messages: Messages
    prices: dict[int, float]

    def by_node(self, graph: Graph) -> dict[int, Array]:
        """Node -> the shares of its strategies. graph: the one that was relaxed."""
        nodes = sorted(graph.cost)
        ends = np.cumsum([len(graph.cost[node]) for node in nodes])
        return dict(zip(nodes, np.split(self.shares, ends[:-1]), strict=True))


def build_program(graph: Graph, memory: Mapping[int, Row] | None = None) -> MarginalProgram:
    """The program of `graph`, all of whose node costs are finite, with the memory rows `memory`."""
    memory = memory or {}
    nodes = tuple(sorted(graph.cost))
    at = {node: p for p, node in enumerate(nodes)}
    sizes = np.array([len(graph.cost[node]) for node in nodes], dtype=np.int64)
    start = np.concatenate([[0], np.cumsum(sizes)])
    edges = tuple((i, j) for i in nodes for j in sorted(graph.adjacent[i]) if i < j)
    pairs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    costs = [graph.cost[node] - graph.cost[node].min() for node in nodes]
    row, column, value = (
        [np.repeat(np.arange(len(nodes)), sizes)],
        [np.arange(start[-1])],
        [np.ones(start[-1])],
    )
    edge_row = np.zeros(len(edges) + 1, dtype=np.int64)
    edge_column = np.zeros(len(edges) + 1, dtype=np.int64)
    edge_row[0], edge_column[0] = len(nodes), start[-1]
    for e, (i, j) in enumerate(edges):
        matrix = graph.adjacent[i][j]
        a, b = np.nonzero(np.isfinite(matrix))
        pairs.append((a, b))
        costs.append(matrix[a, b] - matrix[a, b].min())
        first, size_i, size_j = edge_row[e], matrix.shape[0], matrix.shape[1]
        edge_row[e + 1] = first + size_i + size_j
        edge_column[e + 1] = edge_column[e] + len(a)
        columns = np.arange(edge_column[e], edge_column[e + 1])
        row += [first + a, first + size_i + b, np.arange(first, edge_row[e + 1])]
        column += [columns, columns]
        column += [np.arange(start[at[i]], start[at[i] + 1]), np.arange(start[at[j]], start[at[j] + 1])]
        value += [np.ones(2 * len(a)), -np.ones(size_i + size_j)]
    lower, upper = np.zeros(edge_row[-1]), np.zeros(edge_row[-1])
    lower[: len(nodes)] = upper[: len(nodes)] = 1.0
    limits = _memory_rows(memory, at, start, int(edge_row[-1]))
    cost = np.concatenate(costs)
    factor = _factor(cost)
    return MarginalProgram(
        nodes,
        start,
        edges,
        edge_row,
        edge_column,
        tuple(pairs),
        cost * factor,
        np.concatenate(row + limits[0]).astype(np.int32),
        np.concatenate(column + limits[1]).astype(np.int32),
        np.concatenate(value + limits[2]),
        np.concatenate([lower, np.full(len(memory), -np.inf)]),
        np.concatenate([upper, limits[3]]),
        factor,
    )


def _memory_rows(
    memory: Mapping[int, Row], at: Mapping[int, int], start: NDArray[np.int64], first: int
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]], list[Array], Array]:
    rows: list[NDArray[np.int64]] = []
    columns: list[NDArray[np.int64]] = []
    values: list[Array] = []
    upper = np.zeros(len(memory))
    for position, row in enumerate(memory.values()):
        scale = _row_scale(row)
        upper[position] = row.slack * scale
        for node in sorted(row.used):
            used = np.flatnonzero(row.used[node])
            rows.append(np.full(len(used), first + position))
            columns.append(start[at[node]] + used)
            values.append(row.used[node][used] * scale)
    return rows, columns, values, upper


def _row_scale(row: Row) -> float:
    largest = max((float(vector.max()) for vector in row.used.values()), default=0.0)
    return ROW_SCALE / (max(abs(row.slack), largest) or ROW_SCALE)


def _factor(cost: Array) -> float:
    """A power of two (so that scaling is exact) that brings the mean positive cost to `SCALE`."""
    positive = cost[cost > 0]
    if not len(positive):
        return 1.0
    return float(2.0 ** np.round(np.log2(SCALE / np.mean(positive))))


def _highs(program: MarginalProgram, integers: bool, deadline: float) -> highspy.Highs:
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("time_limit", min(1e9, max(0.01, deadline - time.monotonic())))
    solver.passModel(_model(program, integers))
    return solver


def _model(program: MarginalProgram, integers: bool) -> highspy.HighsLp:
    count, rows = len(program.cost), len(program.row_lower)
    order = np.lexsort((program.row, program.column))
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = count, rows
    model.col_cost_ = program.cost
    model.col_lower_, model.col_upper_ = np.zeros(count), np.ones(count)
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    counts = np.bincount(program.column, minlength=count)
    model.a_matrix_.start_ = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    model.a_matrix_.index_ = program.row[order]
    model.a_matrix_.value_ = program.value[order]
    if integers:
        whole, free = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        nodes = int(program.start[-1])
        model.integrality_ = [whole] * nodes + [free] * (count - nodes)
    return model


def _chosen(program: MarginalProgram, values: Array) -> tuple[dict[int, int], bool]:
    x = values[: program.start[-1]]
    integral = bool((np.minimum(np.abs(x), np.abs(1 - x)) < INTEGRAL).all())
    bounds = program.start
    return {n: int(np.argmax(x[bounds[p] : bounds[p + 1]])) for p, n in enumerate(program.nodes)}, integral


class Relaxation:
    """The relaxation of a graph's program, to which memory rows are added while it is being solved."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._program = graph, build_program(graph)
        self._at = {node: p for p, node in enumerate(self._program.nodes)}
        self._solver = _highs(self._program, False, float("inf"))
        # Little is left to reduce, and looking for it takes half of the time.
        self._solver.setOptionValue("presolve", "off")
        self.memory: dict[int, Row] = {}

    def add(self, key: int, row: Row) -> None:
        _, columns, values, upper = _memory_rows({key: row}, self._at, self._program.start, 0)
        index = np.concatenate([*columns, np.zeros(0, dtype=np.int64)]).astype(np.int32)
        value = np.concatenate([*values, np.zeros(0)])
        self._solver.addRow(-np.inf, float(upper[0]), len(index), index, value)
        self.memory[key] = row

    @property
    def impossible(self) -> bool:
        """Whether the last `solve` found that no choice is possible."""
        return self._solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible

    def solve(self, deadline: float) -> Relaxed | None:
        """None if time ran out or it is infeasible."""
        solver, program = self._solver, self._program
        solver.setOptionValue("time_limit", solver.getRunTime() + max(0.01, deadline - time.monotonic()))
        run_solver(solver)
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        solution = solver.getSolution()
        values = np.array(solution.col_value)
        choice, integral = _chosen(program, values)
        dual = np.array(solution.row_dual) / program.factor
        messages: Messages = {}
        for e, (i, j) in enumerate(program.edges):
            first, size_i = program.edge_row[e], len(self._graph.cost[i])
            messages[j, i] = dual[first : first + size_i]
            messages[i, j] = dual[first + size_i : program.edge_row[e + 1]]
        first = int(program.edge_row[-1])
        prices = {
            key: max(0.0, -float(dual[first + p])) * _row_scale(row)
            for p, (key, row) in enumerate(self.memory.items())
        }
        return Relaxed(choice, values[: program.start[-1]], integral, messages, prices)


def solve_integers(
    graph: Graph, program: MarginalProgram, start: Mapping[int, int] | None, gap: float, deadline: float
) -> tuple[dict[int, int] | None, float]:
    """The mixed-integer program from a warm start: the best choice found, and a lower bound on `graph.value`.

    (None, inf) if there is no choice; (None, -inf or better) if time ran out before one was found.
    """
    solver = _highs(program, True, deadline)
    base = graph.constant + _minima(graph)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_feasibility_tolerance", 1e-9)  # the bound is of x within this of integers
    solver.setOptionValue("mip_abs_gap", gap * program.factor)
    if start is not None:
        solver.setSolution(_start_values(program, start))
    run_solver(solver)
    status = solver.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return None, np.inf
    info = solver.getInfo()
    bound = base + info.mip_dual_bound / program.factor
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None, bound
    choice, _ = _chosen(program, np.array(solver.getSolution().col_value))
    return choice, bound


def _minima(graph: Graph) -> float:
    total = sum(float(vector.min()) for vector in graph.cost.values())
    return total + sum(float(m.min()) for i, row in graph.adjacent.items() for j, m in row.items() if i < j)


def _start_values(program: MarginalProgram, choice: Mapping[int, int]) -> highspy.HighsSolution:
    values = np.zeros(len(program.cost))
    for p, node in enumerate(program.nodes):
        values[program.start[p] + choice[node]] = 1.0
    for e, (i, j) in enumerate(program.edges):
        a, b = program.pairs[e]
        chosen = (a == choice[i]) & (b == choice[j])
        values[program.edge_column[e] : program.edge_column[e + 1]] = chosen
    solution = highspy.HighsSolution()
    solution.col_value = list(values)
    return solution
