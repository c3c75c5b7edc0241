"""The head and the loss of a model in pieces over tokens, so that what is large there is never whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import getitem
from typing import Any, Literal

import torch
from torch import fx

from passes.ir.joint import (
    JointGraph,
    dependents,
    node_value,
    node_values,
    result_index,
    results_nbytes,
    tensor_operands,
)
from passes.ir.op_traits import is_product, is_view
from passes.ir.process_state import collector_paused
from passes.layout.layout import Layout
from passes.micro_batches.cut_batch import Uncut
from passes.micro_batches.in_pieces import PieceWriter, without_uses
from passes.micro_batches.run_times import READ_PART, RunTime, RunTimes, Weights, find_run_times
from passes.micro_batches.time_axis import TIME

_ADD = {
    "sum": torch.ops.aten.add.Tensor,
    "max": torch.ops.aten.maximum.default,
    "min": torch.ops.aten.minimum.default,
}
_Phase = Literal["forward", "backward"]


@collector_paused()
def cut_head(joint: JointGraph, count: int) -> JointGraph:
    """A new canonical graph that computes the same, head and loss in `count` pieces, one after the other:

        %z: f32[2, 64, 9000]   = contract(%h, %w)                 // head
        %l: f32[]              = sum(nll(%z, %t))
        %dz: f32[2, 64, 9000]  = nll_backward(%z, %t)             // backward
        %dh: f32[2, 64, 8]     = contract(%dz, %w)
        ->                                                        2 pieces
        %z_0: f32[2, 32, 9000] = contract(%h[:, :32], %w)
        %l_0: f32[]            = sum(nll(%z_0, %t[:, :32]))
        %z_1: f32[2, 32, 9000] = contract(%h[:, 32:], %w)
        %l_1: f32[]            = sum(nll(%z_1, %t[:, 32:]))
        %l: f32[]              = %l_0 + %l_1
        %dz_0, %dh_0, %dz_1, %dh_1 ...                            // backward
        %dh: f32[2, 64, 8]     = cat([%dh_0, %dh_1], 1)

    The pieces are ops of the graph as any others: states, layouts and prices are found for each, and what a piece's
    backward reads of its forward is kept, or computed again there, as is best. Inputs and outputs stay those of
    `joint`.
    Raises Uncut where the largest values cannot be made in pieces, or are returned.
    """
    plain = without_uses(joint)
    times = head_times(plain, count)
    if times is None:
        raise Uncut(
            f"head in {count} pieces: what is largest in the model is needed whole\n"
            "  try: micro_batches, or a model that returns its loss and no logits"
        )
    return _Writer(plain, times).write()


@dataclass
class _Writer(PieceWriter):
    """pieces: of what is not whole, by node, one for every piece. sums: of parts that were made so far."""

    phase: _Phase = "forward"
    pieces: dict[fx.Node, list[Any]] = field(default_factory=dict)
    parts: dict[tuple[fx.Node, Layout, int], fx.Node] = field(default_factory=dict)
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)
    wholes: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def write(self) -> JointGraph:
        for node in self.joint.placeholders:
            self.place(node)
        for phase in ("forward", "backward"):
            self._phase(phase)
        self.graph.output(tuple(None if n is None else self._whole(n) for n in self.joint.results))
        return self.written(head_pieces=self.times.count)

    def _phase(self, phase: _Phase) -> None:
        """What runs before the pieces, all of the first piece, of the second ..., what runs after."""
        self.phase = phase
        nodes = [n for n in self.joint.graph.nodes if n.op == "call_function" and n.meta["phase"] == phase]
        runs = lambda time: [node for node in nodes if self.time(node) == time]
        for node in runs("before"):
            self.once(node, [self._whole(operand) for operand in tensor_operands(node)])
        for index in range(self.times.count):
            for node in runs("piece"):
                self._of_piece(node, index)
        for node in runs("after"):
            self.once(node, [self._whole(operand) for operand in tensor_operands(node)])
        for result in self.joint.results:
            if result is not None and result in nodes:
                self._whole(result)

    def _of_piece(self, node: fx.Node, index: int) -> None:
        producer, result = result_index(node)
        if producer is not node:
            made = self.pieces[producer][index]
            value = made[result] if isinstance(made, tuple) else self.emit(node, getitem, (made, result))
        else:
            pairs = zip(tensor_operands(node), self.times.layouts[node.name].operands, strict=True)
            value = self.in_piece(node, [self._part(*pair, index) for pair in pairs], index)
        self.pieces.setdefault(node, []).append(value)
        if isinstance(value, fx.Node) and self.layout(node).partial and self._is_read_whole(node):
            self._add(node, value)

    def _add(self, node: fx.Node, value: fx.Node) -> None:
        """As soon as it is there, so that parts do not pile up."""
        ((_, how),) = self.layout(node).partial
        earlier = self.sums.get(node)
        self.sums[node] = value if earlier is None else self.emit(node, _ADD[how], (earlier, value))

    def _is_read_whole(self, node: fx.Node) -> bool:
        return any(user.op == "output" or self.time(user) == "after" for user in node.users)

    def _whole(self, node: fx.Node) -> fx.Node:
        if self.time(node) != "piece":
            return self.made[node]
        if node in self.sums:
            return self.sums[node]
        if node not in self.wholes:
            dim = self.layout(node).dim_of(TIME)
            self.wholes[node] = self.emit(node, torch.ops.aten.cat.default, (self.pieces[node], dim))
        return self.wholes[node]

    def _part(self, node: fx.Node, wanted: Layout, index: int) -> fx.Node:
        if self.time(node) == "piece":
            return self.pieces[node][index]
        dim = wanted.dim_of(TIME)
        if dim is None:
            return self.made[node]
        key = node, wanted, index
        if key not in self.parts:
            low, high = wanted.interval(node_value(node).shape, self.mesh, dim, index)
            arguments = (self.made[node], dim, low, high, 1)
            self.parts[key] = self.emit(node, torch.ops.aten.slice.Tensor, arguments)
        return self.parts[key]

    def said(self, node: fx.Node, runs: RunTime) -> dict[str, Any]:
        return {"phase": self.phase}


_LARGE = 0.5
"""Share of the largest value's elements above which a value is large."""


def may_have_head(joint: JointGraph) -> bool:
    """Whether what is large is made by few of the forward's products, which is known without a search."""
    large = _large(joint)
    products = [n.name for n in joint.graph.nodes if is_product(n) and n.meta["phase"] == "forward"]
    return bool(large) and 2 * len(large.intersection(products)) <= len(products)


def head_times(joint: JointGraph, count: int) -> RunTimes | None:
    """When every op runs where all that is large does so in `count` pieces; None if that cannot be: if it is in the
    midst of the model, or returned. `joint` has no `use`."""
    large = _large(joint)
    stored = lambda node: 0.0 if is_view(node) else float(results_nbytes(node))
    # Weight of a byte of a small value that is put together.
    weights = Weights(
        lambda node: stored(node) if node.name in large else 0.0,
        lambda node: 0.0 if node.name in large else stored(node),
        # Of two dims that can be cut the later is, as the first is that of samples, which ranks share.
        lambda dim, ndim: (ndim - dim) * READ_PART,
        lambda value: results_nbytes(value) * (1.0 if result_index(value)[0].name in large else 1e-3),
    )
    times = find_run_times(joint, count, weights, alike=False)
    return times if large and _is_head(joint, large, times) else None


def _large(joint: JointGraph) -> set[str]:
    """Ops with a result that is more than half as large as the largest of the forward, both made of the call's tensors.
    What is like a parameter, as its gradient is, does not count."""
    shapes = {tuple(node.meta["val"].shape) for node in joint.trained}
    of_call = dependents(joint.graph.nodes, joint.given_as("input"))
    elements = {
        node: max((value.numel() for value in _values(node) if tuple(value.shape) not in shapes), default=0)
        for node in joint.graph.nodes
        if node in of_call and node.op == "call_function" and result_index(node)[0] is node
    }
    limit = _LARGE * max((n for node, n in elements.items() if node.meta["phase"] == "forward"), default=0)
    return {node.name for node, n in elements.items() if n > limit}


def _values(node: fx.Node) -> list[torch.Tensor]:
    return [value for value in node_values(node) if value is not None]


def _is_head(joint: JointGraph, large: set[str], times: RunTimes) -> bool:
    """Whether all of `large` is in pieces, most products are not, and little is put together of the pieces."""
    nodes = [n for n in joint.graph.nodes if n.op == "call_function"]
    if any(times.of[name] != "piece" for name in large):
        return False
    products = [n.name for n in nodes if is_product(n)]
    if 2 * sum(times.of[name] == "piece" for name in products) > len(products):
        return False
    largest = max(
        n.meta["val"].numel() for n in nodes if n.name in large and isinstance(n.meta["val"], torch.Tensor)
    )
    # Share of the largest value's elements up to which the forward may put values together: losses of tokens,
    # not what the next layer reads.
    limit = {"forward": largest / 32, "backward": _LARGE * largest}
    together = [n for n in nodes if _is_put_together(n, times)]
    return all(n.meta["val"].numel() <= limit[n.meta["phase"]] for n in together)


def _is_put_together(node: fx.Node, times: RunTimes) -> bool:
    """Whether its parts are read side by side by what is not in pieces."""
    producer, index = result_index(node)
    if times.of[producer.name] != "piece" or times.layouts[producer.name].results[index].partial:
        return False
    readers = (user for user in node.users if user.op == "output" or result_index(user)[0] is user)
    return any(user.op == "output" or times.of[user.name] != "piece" for user in readers)
