"""What the reductions leave, as a linear or mixed-integer program in marginal form, by HiGHS.

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
from scipy.sparse import csc_array

from .graph import Graph
from .passing import Messages, Side
from .problem import Array
from .usage import Row

ROW_SCALE = 1e4
"""What the slack of a memory row becomes; the tolerance of 1e-6 is then 1e-10 of it."""


@dataclass(frozen=True)
class _Program:
    """The program without memory rows, in HiGHS's units (costs times `factor`).

    start: of each node, its first column; and the first that is of an edge. cost: of each column.
    sides: first row of the marginals of each side of an edge.
    fixed: [rows] what each row is.
    least: what was subtracted from costs, each node's and edge's least, in the graph's units.
    """

    start: NDArray[np.int64]
    sides: Mapping[Side, int]
    cost: Array
    matrix: csc_array
    fixed: Array
    least: float
    factor: float


def build_program(graph: Graph) -> _Program:
    """The program of `graph`, all of whose node costs are finite."""
    nodes = sorted(graph.cost)
    sizes = np.array([len(graph.cost[node]) for node in nodes], dtype=np.int64)
    start = np.concatenate([[0], np.cumsum(sizes)])
    at = dict(zip(nodes, start.tolist(), strict=False))
    minima = [float(graph.cost[node].min()) for node in nodes]
    costs = [graph.cost[node] - least for node, least in zip(nodes, minima, strict=True)]
    row, column = [np.repeat(np.arange(len(nodes)), sizes)], [np.arange(start[-1])]
    value = [np.ones(start[-1])]
    sides: dict[Side, int] = {}
    columns, rows = int(start[-1]), len(nodes)
    for i, j in graph.edges():
        matrix = graph.adjacent[i][j]
        a, b = np.nonzero(np.isfinite(matrix))
        minima.append(float(matrix.min()))
        costs.append(matrix[a, b] - minima[-1])
        for side, used in (((i, j), a), ((j, i), b)):
            sides[side], size = rows, len(graph.cost[side[0]])
            row += [np.arange(rows, rows + size), rows + used]
            column += [at[side[0]] + np.arange(size), np.arange(columns, columns + len(a))]
            value += [np.full(size, -1.0), np.ones(len(used))]
            rows += size
        columns += len(a)
    fixed = np.zeros(rows)
    fixed[: len(nodes)] = 1.0
    cost = np.concatenate(costs)
    factor = _factor(cost)
    places = np.concatenate(row), np.concatenate(column)
    matrix = csc_array((np.concatenate(value), places), shape=(rows, columns))
    return _Program(start, sides, cost * factor, matrix, fixed, sum(minima), factor)


def _factor(cost: Array) -> float:
    """A power of two (so that scaling is exact) that brings the mean positive cost to `SCALE`."""
    positive = cost[cost > 0]
    # What the typical difference of costs becomes, so that HiGHS's absolute tolerances are small beside it.
    return float(2.0 ** np.round(np.log2(1e5 / np.mean(positive)))) if len(positive) else 1.0


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


class _Silent(highspy.Highs):
    """HiGHS 1.16 prints its banner while it is made, where it enables callbacks."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


class Relaxation:
    """A graph's program, to which memory rows may be added between solutions."""

    def __init__(self, graph: Graph, integers: bool = False) -> None:
        self._graph, self._program = graph, build_program(graph)
        self._nodes = sorted(graph.cost)
        self._at = {node: p for p, node in enumerate(self._nodes)}
        self.memory: dict[int, tuple[float, Row]] = {}
        """With what each row is multiplied."""
        solver = self._solver = _Silent()
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("random_seed", 0)
        solver.passModel(_model(self._program, integers))
        if not integers:  # Little is left to reduce, and looking for it takes half of the time.
            solver.setOptionValue("presolve", "off")

    def add(self, key: int, row: Row) -> None:
        used = {node: np.flatnonzero(row.used[node]) for node in sorted(row.used)}
        largest = max((float(vector.max()) for vector in row.used.values()), default=0.0)
        scale = ROW_SCALE / (max(abs(row.slack), largest) or ROW_SCALE)
        start = self._program.start
        empty = np.zeros(0, dtype=np.int64)
        index = np.concatenate([empty, *(start[self._at[node]] + a for node, a in used.items())])
        value = np.concatenate([np.zeros(0), *(row.used[node][a] * scale for node, a in used.items())])
        self._solver.addRow(-np.inf, row.slack * scale, len(index), index.astype(np.int32), value)
        self.memory[key] = scale, row

    @property
    def impossible(self) -> bool:
        """Whether the last solution found that no choice is possible."""
        status, none = self._solver.getModelStatus(), highspy.HighsModelStatus
        return status in (none.kInfeasible, none.kUnboundedOrInfeasible)

    def solve(self, deadline: float) -> Relaxed | None:
        """None if time ran out or it is infeasible."""
        program = self._program
        self._run(deadline)
        if self._solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        solution = self._solver.getSolution()
        x = np.array(solution.col_value)[: program.start[-1]]
        dual = np.array(solution.row_dual) / program.factor
        sizes = {node: len(vector) for node, vector in self._graph.cost.items()}
        messages = {(j, i): dual[first : first + sizes[i]] for (i, j), first in program.sides.items()}
        first = len(program.fixed)  # of HiGHS's rows, to which those of memory were added
        prices = {
            key: max(0.0, -float(dual[first + p])) * scale
            for p, (key, (scale, _)) in enumerate(self.memory.items())
        }
        integral = bool((np.minimum(np.abs(x), np.abs(1.0 - x)) < 1e-6).all())
        return Relaxed(self._choice(x), x, integral, messages, prices)

    def _choice(self, x: Array) -> dict[int, int]:
        parts = np.split(x, self._program.start[1:-1])
        return {node: int(np.argmax(part)) for node, part in zip(self._nodes, parts, strict=True)}

    def solve_integers(self, gap: float, deadline: float) -> tuple[dict[int, int] | None, float]:
        """The mixed-integer program: the best choice found, and a lower bound on `graph.value`.

        (None, inf) if there is no choice; (None, -inf or better) if time ran out before one was found.
        """
        solver, factor = self._solver, self._program.factor
        solver.setOptionValue(
            "mip_allow_restart", False
        )  # few nodes are visited: the root again is the most of it
        solver.setOptionValue("mip_rel_gap", 0.0)
        solver.setOptionValue("mip_feasibility_tolerance", 1e-9)  # the bound is of x within this of integers
        solver.setOptionValue("mip_abs_gap", gap * factor)
        self._run(deadline)
        if self.impossible:
            return None, np.inf
        info = solver.getInfo()
        bound = self._graph.constant + self._program.least + info.mip_dual_bound / factor
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None, bound
        return self._choice(np.array(solver.getSolution().col_value)[: self._program.start[-1]]), bound

    def _run(self, deadline: float) -> None:
        """In a thread of its own: inside HiGHS no signal's handler would run. What is raised here meanwhile, by Ctrl-C
        or by the failure of another rank, stops it."""
        solver = self._solver
        seconds = min(1e9, solver.getRunTime() + max(0.01, deadline - time.monotonic()))
        solver.setOptionValue("time_limit", seconds)
        solver.HandleUserInterrupt = True
        thread = solver.startSolve()
        try:
            while thread.is_alive():
                thread.join(0.1)
        except BaseException:
            solver.cancelSolve()
            # For HiGHS to end when it is interrupted.
            thread.join(5.0)
            raise


def _model(program: _Program, integers: bool) -> highspy.HighsLp:
    count = len(program.cost)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = count, len(program.fixed)
    model.col_cost_ = program.cost
    model.col_lower_, model.col_upper_ = np.zeros(count), np.ones(count)
    model.row_lower_ = model.row_upper_ = program.fixed
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = program.matrix.indptr.astype(np.int32)
    model.a_matrix_.index_ = program.matrix.indices.astype(np.int32)
    model.a_matrix_.value_ = np.asarray(program.matrix.data, dtype=np.float64)
    if integers:
        whole, free = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        nodes = int(program.start[-1])
        model.integrality_ = [whole] * nodes + [free] * (count - nodes)
    return model
