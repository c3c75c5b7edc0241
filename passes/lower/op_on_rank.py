"""What is emitted on one rank: an op as its rule sees it, what a redistribution brings, and what that is for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph, node_value, tensor_operands
from passes.ir.torch_compat import last_node
from passes.layout.layout import FactorSplit, NodeLayouts, Span
from passes.redistribution.emit_steps import Emitter
from passes.rules.core.rule import OpRule

Emit = Callable[[fx.Node, Callable[..., Any], Sequence[Any], dict[str, Any]], fx.Node]
"""Emits an op on behalf of a node of the global graph."""


@dataclass
class RankRing:
    """`Ring` of passes/rules/core/rule.py. steps: exchanges so far."""

    emitter: Emitter
    group: str
    index: int
    parts: tuple[Span, ...]
    kept: dict[fx.Node, fx.Node] = field(default_factory=dict)
    steps: int = 0

    def exchange(self, flat: fx.Node, sent: Sequence[int], received: Sequence[int]) -> fx.Node:
        emit = replace(self.emitter, meta={**self.emitter.meta, "step": self.steps})
        self.steps += 1
        target = torch.ops._c10d_functional.all_to_all_single.default
        return emit.collective(target, flat, [sum(received)], list(received), list(sent), self.group)

    def gathered(self, x: fx.Node) -> fx.Node:
        target = torch.ops._c10d_functional.all_gather_into_tensor.default
        rows = self.emitter.call(torch.ops.aten.unsqueeze.default, x, 0)
        shape = [len(self.parts), *node_value(x).shape]
        return self.emitter.collective(target, rows, shape, len(self.parts), self.group)


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
    ring: RankRing | None = None

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


def in_ring(context: OpOnRank, held: Collection[fx.Node], kept: dict[str, dict[fx.Node, fx.Node]]) -> Any:
    """What the op's rule emits. held: operands that it reads as they are held, which all ranks know; kept: by group,
    what rings before made of such, which this one adds to."""
    ring, localize = context.ring, context.rule.localize
    assert ring is not None and localize is not None
    known = kept.setdefault(ring.group, {})
    ring.kept.update({node: known[node] for node in held if node in known})
    result = localize(context)
    known.update({node: made for node, made in ring.kept.items() if node in held})
    return result


@dataclass(frozen=True)
class Arrival:
    """A redistribution as emitted. own: what was moved, of these spans; first: the first node of the move; number: of
    the transfer."""

    own: fx.Node
    spans: Sequence[Span]
    first: fx.Node
    number: int

    @property
    def _received(self) -> list[fx.Node]:
        """The wait and all that is made of what has arrived."""
        found: dict[fx.Node, None] = {}
        node = self.first
        while node.op == "call_function" and node.meta.get("transfer") == self.number:
            after_wait = node.target is torch.ops._c10d_functional.wait_tensor.default
            if after_wait or any(n in found for n in node.all_input_nodes):
                found[node] = None
            node = node.next
        return list(found)

    @property
    def unread(self) -> bool:
        """Whether nothing emitted so far reads what arrives."""
        received = self._received
        return all(user in received for node in received for user in node.users)

    def put_off(self, graph: fx.Graph) -> None:
        """Let what arrives come after all that is emitted so far."""
        for node in self._received:
            last_node(graph).append(node)


@dataclass(frozen=True)
class Served:
    """What a collective is for, as a profiler shows it.

    parameters: placeholder -> the parameter's name in the model. ends: per operand of the output node
    the parameter of which it is the gradient, else None.
    """

    parameters: Mapping[fx.Node, str]
    ends: Sequence[str | None]

    @staticmethod
    def of(joint: JointGraph) -> Served:
        parameters = {node: spec.name for node, spec in joint.given if spec.kind == "param"}
        graded = set(parameters.values())
        return Served(
            parameters,
            [
                end.name if end.kind == "grad" and end.name in graded else None
                for end, result in joint.returned
                if result is not None
            ],
        )

    def name(self, operand: fx.Node, reader: fx.Node, position: int) -> str:
        """The parameter moved, or whose gradient is moved, or else the module that needs the value."""
        parameter = self.ends[position] if reader.op == "output" else self._behind(operand)
        module = reader.meta.get("module") or operand.meta.get("module")
        return str(parameter or module or operand.name)

    def _behind(self, node: fx.Node) -> str | None:
        while node.op == "call_function" and len(tensor_operands(node)) == 1:
            node = tensor_operands(node)[0]
        return self.parameters.get(node)
