"""How large the search space of a graph is, before it is made."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from passes.ir.joint import JointGraph, result_index, result_shapes, tensor_operands
from passes.rules.core.rule import OpRule
from passes.strategies.cuts import ops_of
from passes.strategies.strategies import contiguous_factors

Choices = tuple[int, ...]
"""Of one node: per way of its rule, what one mesh axis can do there."""


@dataclass(frozen=True)
class SpaceSize:
    """edges: one (choices of the producer, choices of the reader) per edge, of edges alike one."""

    edges: tuple[tuple[Choices, Choices], ...]

    @staticmethod
    def of(joint: JointGraph) -> SpaceSize:
        choices: dict[fx.Node, Choices] = {
            node: (1 + len(node.meta["val"].shape),) for node in joint.placeholders
        }
        edges: dict[Hashable, tuple[Choices, Choices]] = {}
        for node, rule in ops_of(joint):
            choices[node] = tuple(_choices(way) for way in rule.ways)
            for place, operand in enumerate(tensor_operands(node)):
                producer, result = result_index(operand)
                ends = choices[producer], choices[node]
                alike = (place, str(node.target), str(result_shapes(producer)[result]), ends)
                edges.setdefault(alike, ends)
        return SpaceSize(tuple(edges.values()))

    def entries(self, units: int) -> int:
        """Of its cost matrices, about, where so many axes, or runs of joined ones, are used apart. Places to cut dims
        and orders of axes are not counted."""
        return sum(_strategies(held, units) * _strategies(read, units) for held, read in self.edges)


def _choices(rule: OpRule) -> int:
    return 1 + len(contiguous_factors(rule)) + len(rule.linear)


def _strategies(choices: Choices, units: int) -> int:
    return sum(count**units for count in choices)
