"""One op on one rank: what its rule sees while it is emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import node_value
from passes.layout.assignment import FactorSplit, NodeLayouts
from passes.rules.core.rule import OpRule

Emit = Callable[[fx.Node, Callable[..., Any], Sequence[Any], dict[str, Any]], fx.Node]
"""Emits an op on behalf of a node of the global graph."""


@dataclass
class OpOnRank:
    """`LocalContext` of passes/rules/core/rule.py."""

    emit: Emit
    mesh: MeshSpec
    rank: int
    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rule: OpRule
    layouts: NodeLayouts

    def _split(self, factor: str) -> FactorSplit | None:
        return next((s for s in self.layouts.splits if s.factor == factor), None)

    def is_split(self, factor: str) -> bool:
        return self._split(factor) is not None

    def interval(self, factor: str) -> tuple[int, int]:
        split, length = self._split(factor), self.rule.sizes[factor]
        if split is None:
            return 0, length
        return split.parts(length, self.mesh)[self.mesh.linear_index(self.rank, split.axes)]

    def result_shape(self, index: int = 0) -> list[int]:
        shape = node_value(self.node, index).shape
        return list(self.layouts.results[index].local_shape(shape, self.mesh, self.rank))

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.emit(self.node, target, args, kwargs)
