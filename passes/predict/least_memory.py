"""Bytes that every program of a graph holds at some step: what proves that nothing fits a memory limit.

Parameters, the optimizer's states and inputs are there throughout (`passes.predict.memory_walk`). Beside them are all
gradients when the backward ends, and, while a product runs, what it reads and makes. All else a program may hold less
of than the search counts, or not at once: what is computed again for nothing, gradients before they are made.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

from torch import fx

from passes.ir.joint import JointGraph, node_value, node_values, result_index, tensor_operands
from passes.ir.op_traits import is_product, is_use, storage_root
from passes.layout.layout import Layout, NodeLayouts
from passes.lower.rank_program import missing_tangents, without_usually_missing
from passes.micro_batches.cut_head import may_have_head
from passes.strategies.prices import Prices

Options = Mapping[str, Sequence[NodeLayouts]]


def least_nbytes(joint: JointGraph, options: Options, prices: Prices) -> int:
    """On rank 0, whatever of `options` each node has, whatever is computed again, and however head and loss are cut.

    options: layouts by node name, all that the search has.
    """
    if missing_tangents(joint):
        joint = without_usually_missing(joint)
    least = _Least(joint, options, prices)
    return least.held() + max((least.gradients(), *least.products()), default=0)


class _Least:
    def __init__(self, joint: JointGraph, options: Options, prices: Prices) -> None:
        self._joint, self._options, self._prices = joint, options, prices
        self._known: dict[Hashable, int] = {}

    def held(self) -> int:
        """Throughout."""
        trained, optimizer = self._joint.trained, self._prices.optimizer
        total = 0
        for node, spec in self._joint.given:
            if spec.kind != "tangent":
                nbytes = self._of_placeholder(node)
                total += nbytes
                if node in trained:
                    total += optimizer.state_nbytes(nbytes, node_value(node).element_size())
        return total

    def gradients(self) -> int:
        """At the end, each in its parameter's layout. Of several that may be one tensor the largest; nothing of what is
        an input, or repeated from a smaller tensor."""
        found: dict[fx.Node, int] = {}
        placeholders, trained = self._joint.placeholders, self._joint.trained
        for end, result in self._joint.returned:
            if end.kind == "grad" and result is not None and placeholders[end.index] in trained:
                root = _root(result)
                if _is_own(root, result):
                    nbytes = self._of_placeholder(placeholders[end.index])
                    found[root] = max(found.get(root, 0), nbytes)
        return sum(found.values())

    def products(self) -> Iterator[int]:
        """What each holds besides. A head in pieces over tokens has products of less."""
        if self._joint.head_pieces > 1 or may_have_head(self._joint):
            return
        for node in self._joint.graph.nodes:
            if node.op == "call_function" and is_product(node) and node.name in self._options:
                yield min(self._of_product(node, option) for option in self._options[node.name])

    def _of_placeholder(self, node: fx.Node) -> int:
        return min(self._nbytes(node, 0, option.results[0]) for option in self._options[node.name])

    def _of_product(self, node: fx.Node, option: NodeLayouts) -> int:
        """0 of what is absent, and of what may run in parts, as windows do."""
        if not option.results or any(layout.has_halo for layout in (*option.operands, *option.results)):
            return 0
        read: dict[fx.Node, int] = {}
        for operand, layout in zip(tensor_operands(node), option.operands, strict=True):
            root = _root(operand)
            if _is_own(root, operand):
                producer, index = result_index(operand)
                read[root] = max(read.get(root, 0), self._nbytes(producer, index, layout))
        made = (i for i, value in enumerate(node_values(node)) if value is not None)
        return sum(self._nbytes(node, i, option.results[i]) for i in made) + sum(read.values())

    def _nbytes(self, node: fx.Node, index: int, layout: Layout) -> int:
        value = node_value(node, index)
        key = layout, value.shape, value.element_size()
        if key not in self._known:
            local = layout.local_shape(value.shape, self._prices.mesh, 0)
            self._known[key] = math.prod(local) * value.element_size()
        return self._known[key]


def _root(value: fx.Node) -> fx.Node:
    """Whose memory it is, if nothing is redistributed."""
    root = storage_root(value)
    while is_use(root):
        root = storage_root(tensor_operands(root)[0])
    return root


def _is_own(root: fx.Node, value: fx.Node) -> bool:
    """Whether `value` is memory of an op: no input of the graph, nor repeated from what is smaller."""
    whole = sum(one.numel() for one in node_values(root) if one is not None)
    return root.op != "placeholder" and whole >= node_value(value).numel()
