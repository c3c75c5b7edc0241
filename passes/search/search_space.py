"""What is searched: a problem of arrays, and what its nodes and edges mean on the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

from passes.layout.layout import Layout, NodeLayouts
from passes.search.cost_kinds import CostKinds
from passes.search.step_kinds import EXPOSED, KINDS, PhaseOverlap, StepKinds, phase_paths
from passes.solver.problem import Array, Problem


@dataclass(frozen=True)
class Edge:
    """Value `result` of search node `producer`, read by `consumer`.

    operand is the position among the consumer's operands, or None when the consumer is the end of
    the graph that the value must reach: the parameter whose gradient it is, or an output.
    """

    producer: int
    result: int
    consumer: int
    operand: int | None


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
        edges = tuple(self.step.reads.get(read, EXPOSED) for read in self.reads)
        return CostKinds(nodes, edges, KINDS, phase_paths(overlaps))

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
    return not any(layout.axes or layout.partial for layout in (*strategy.operands, *strategy.results))


def distinct(layouts: Sequence[Layout]) -> tuple[list[Layout], list[int]]:
    """Each layout once, and where each of `layouts` is among them."""
    position: dict[Layout, int] = {}
    where = [position.setdefault(layout, len(position)) for layout in layouts]
    return list(position), where
