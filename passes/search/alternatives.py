"""What else the search had for an op: each of its strategies, priced where all others stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from cost_model.deadline import NEVER, Deadline
from passes.ir.joint import JointGraph, node_value, repeats, result_index, tensor_operands
from passes.ir.op_traits import read_repeats
from passes.layout.layout import Assignment, Layout, NodeLayouts
from passes.search.search_terms import Boundary
from passes.search.strategy_space import SpaceBuilder
from passes.strategies.prices import Prices

MOST = 6
"""That are told of an op."""


@dataclass(frozen=True)
class Alternative:
    """seconds: of the op itself; moved: of the transfers in front of it and behind it, where its neighbours stay as
    they are. more: of both, beyond what the plan's own layouts take."""

    layouts: NodeLayouts
    seconds: float
    moved: float
    more: float


def alternatives(
    joint: JointGraph,
    assignment: Assignment,
    prices: Prices,
    boundary: Boundary,
    names: Iterable[str],
    deadline: Deadline = NEVER,
) -> dict[str, list[Alternative]]:
    """By name the cheapest others of each op, those that would take least first. OutOfTime."""
    builder = SpaceBuilder.of(joint, prices, boundary, None, deadline)
    builder.add_nodes()
    wanted, finder = set(names), _Finder(builder, assignment)
    nodes = [node for node in builder.index if node.name in wanted and node.op == "call_function"]
    return {node.name: finder.of(node) for node in nodes}


@dataclass
class _Finder:
    builder: SpaceBuilder
    assignment: Assignment
    readers: dict[fx.Node, list[tuple[fx.Node, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Readers by what they read: a result of several is read through its `getitem`."""
        for reader in (*self.builder.index, self.builder.joint.output_node):
            for position, operand in enumerate(tensor_operands(reader)):
                self.readers.setdefault(result_index(operand)[0], []).append((reader, position))

    def of(self, node: fx.Node) -> list[Alternative]:
        own = self.assignment[node.name]
        option = self.builder.options[self.builder.index[node]]
        strategies = [own, *(one for one in option.strategies if one != own)]
        alone = dict(zip(map(id, option.strategies), option.seconds, strict=True))
        mine = repeats(node) * self.builder.prices.op_seconds(node, own)
        seconds = [mine, *(float(alone[id(one)]) for one in strategies[1:])]
        moved = self._moved(node, strategies)
        every = [
            Alternative(layouts, s, float(m), (s - seconds[0]) + float(m - moved[0]))
            for layouts, s, m in zip(strategies, seconds, moved, strict=True)
        ]
        others = sorted((one for one in every[1:] if np.isfinite(one.moved)), key=lambda one: one.more)
        return [every[0], *others[: MOST - 1]]

    def _moved(self, node: fx.Node, strategies: Sequence[NodeLayouts]) -> np.ndarray:
        found = np.zeros(len(strategies))
        for i, operand in enumerate(tensor_operands(node)):
            source, result = result_index(operand)
            held = self.assignment[source.name].results[result]
            ways = self._seconds(operand, node, i, [held], [one.operands[i] for one in strategies])
            found += ways[0]
        for reader, i in self.readers.get(node, ()):
            operand = tensor_operands(reader)[i]
            wanted = self.assignment[reader.name].operands[i]
            held = [one.results[result_index(operand)[1]] for one in strategies]
            found += self._seconds(operand, reader, i, held, [wanted])[:, 0]
        return found

    def _seconds(
        self, operand: fx.Node, reader: fx.Node, i: int, held: list[Layout], wanted: list[Layout]
    ) -> np.ndarray:
        merges = (reader.name, i) in self.builder.reads.ending
        times = read_repeats(reader, operand)
        return times * np.add.reduce(
            self.builder.priced(held, wanted, node_value(operand), merges, frozenset())
        )
