"""Where a plan's values begin to differ from the unsharded model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.plan.plan import Plan
from autoshard.verification.part_errors import CANCELLED, largest, piece_error
from passes.ir.joint import JointGraph, result_index, tensor_operands
from passes.layout.layout import Layout
from passes.lower.partition import RankGraph


@dataclass(frozen=True)
class Divergence:
    """The first node whose sharded value differs. error: largest |difference| / largest |value|."""

    node: str
    op: str
    error: float
    module: str
    source: str

    def __str__(self) -> str:
        where = " ".join(part for part in (self.module, self.source) if part)
        return f"{self.node} = {self.op} ({where or 'unknown source'}): relative error {self.error:.3g}"


class Watcher:
    """Collects every rank's value of every global node and notes where they differ."""

    def __init__(
        self, joint: JointGraph, plan: Plan, expected: Mapping[str, torch.Tensor], least: Mapping[str, float]
    ) -> None:
        self._plan = plan
        self._least = least
        self._expected = expected
        self._order = [node for node in joint.graph.nodes if node.op == "call_function"]
        self._globals: list[dict[str, list[str]]] = []
        self._pieces: dict[str, dict[int, torch.Tensor]] = {}
        self._errors: dict[str, float] = {}
        self._operands = {node.name: [o.name for o in tensor_operands(node)] for node in self._order}
        self._layouts = {node.name: _layout(plan, node) for node in self._order if _is_single(node)}

    def attach(self, graphs: Sequence[RankGraph]) -> None:
        for graph in graphs:
            names: dict[str, list[str]] = {}
            for global_name, local_name in graph.values.items():
                if global_name in self._layouts:
                    names.setdefault(local_name, []).append(global_name)
            self._globals.append(names)

    def __call__(self, rank: int, node: fx.Node, value: Any) -> None:
        for name in self._globals[rank].get(node.name, ()):
            pieces = self._pieces.setdefault(name, {})
            pieces[rank] = value
            if len(pieces) == len(self._globals):
                self._finish(name, self._pieces.pop(name))

    def _finish(self, name: str, pieces: Mapping[int, torch.Tensor]) -> None:
        expected = self._expected.get(name)
        if expected is None:
            return
        ordered = [pieces[rank] for rank in range(len(pieces))]
        mesh, layout = self._plan.mesh, self._layouts[name]
        cancelled = CANCELLED * largest(self._expected.get(operand) for operand in self._operands[name])
        floor = max(cancelled, self._least.get(name, 0.0))
        ranks = range(len(ordered))
        self._errors[name] = max(piece_error(ordered, expected, layout, mesh, r, floor) for r in ranks)

    def first(self, limit: float) -> Divergence | None:
        for node in self._order:
            error = self._errors.get(node.name, 0.0)
            if error > limit:
                meta = node.meta
                return Divergence(
                    node.name, str(node.target), error, meta.get("module", ""), meta.get("source", "")
                )
        return None


def _is_single(node: fx.Node) -> bool:
    return not isinstance(node.meta["val"], (tuple, list))


def _layout(plan: Plan, node: fx.Node) -> Layout:
    producer, index = result_index(node)
    return plan.assignment[producer.name].results[index]
