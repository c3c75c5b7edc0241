"""The program in marginal form (`marginal_program.py`), relaxed and with integers, by HiGHS."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import highspy
import numpy as np

from .alike import Alike
from .dual import Messages
from .graph import Graph
from .interruptible import run_solver
from .marginal_program import MarginalProgram, build_program, memory_rows, row_scale
from .problem import Array
from .usage_rows import Row

__all__ = ["Relaxation", "Relaxed", "solve_integers"]

INTEGRAL = 1e-6


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


def _highs(program: MarginalProgram, integers: bool, deadline: float) -> highspy.Highs:
    solver = _Silent()
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("time_limit", min(1e9, max(0.01, deadline - time.monotonic())))
    solver.passModel(_model(program, integers))
    return solver


def _model(program: MarginalProgram, integers: bool) -> highspy.HighsLp:
    count = len(program.cost)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = count, len(program.row_lower)
    model.col_cost_ = program.cost
    model.col_lower_, model.col_upper_ = np.zeros(count), program.most
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = program.matrix.indptr.astype(np.int32)
    model.a_matrix_.index_ = program.matrix.indices.astype(np.int32)
    model.a_matrix_.value_ = np.asarray(program.matrix.data, dtype=np.float64)
    if integers:
        whole, free = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        nodes = int(program.start[-1])
        model.integrality_ = [whole] * nodes + [free] * (count - nodes)
    return model


def _chosen(program: MarginalProgram, values: Array) -> tuple[dict[int, int], bool]:
    x = values[: program.start[-1]]
    whole = np.repeat(program.count, np.diff(program.start))
    integral = bool((np.minimum(np.abs(x), np.abs(whole - x)) < INTEGRAL).all())
    bounds = program.start
    return {n: int(np.argmax(x[bounds[p] : bounds[p + 1]])) for p, n in enumerate(program.nodes)}, integral


class Relaxation:
    """The relaxation of a graph's program, to which memory rows are added while it is being solved."""

    def __init__(self, graph: Graph, alike: Alike | None = None) -> None:
        """alike: what of the graph is held as one; no memory rows may be added then."""
        self._graph, self._alike = graph, alike or Alike.none(graph)
        self._program = build_program(graph, alike=self._alike)
        self._at = {node: p for p, node in enumerate(self._program.nodes)}
        self._solver = _highs(self._program, False, float("inf"))
        # Little is left to reduce, and looking for it takes half of the time.
        self._solver.setOptionValue("presolve", "off")
        self.memory: dict[int, Row] = {}

    def add(self, key: int, row: Row) -> None:
        _, columns, values, upper = memory_rows({key: row}, self._at, self._program.start, 0)
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
        like, dual = self._alike.like, np.array(solution.row_dual) / program.factor
        messages: Messages = {}
        for (i, j), side in self._alike.side_like.items():
            first = program.sides[side]
            messages[j, i] = dual[first : first + len(self._graph.cost[i])]
        first = len(program.row_lower)  # of HiGHS's rows, to which those of memory were added
        prices = {
            key: max(0.0, -float(dual[first + p])) * row_scale(row)
            for p, (key, row) in enumerate(self.memory.items())
        }
        of_kinds = np.split(values[: program.start[-1]], program.start[1:-1])
        shares = [of_kinds[self._at[like[node]]] / self._alike.count[like[node]] for node in sorted(like)]
        choice = {node: choice[like[node]] for node in like}
        return Relaxed(choice, np.concatenate(shares), integral, messages, prices)


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
