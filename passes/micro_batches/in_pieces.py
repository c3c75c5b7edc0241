"""The graph of a step in which a batch is run in pieces: what runs before them, one piece, what runs after."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

import passes.ops.registration  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::piece)
from cost_model.mesh import MeshSpec
from passes.canonicalize.mark_rows import LAST
from passes.ir.graph_pass import INHERITED, copy_joint, erase_dead
from passes.ir.joint import FakeCalls, JointGraph, map_operands, node_value, result_index, tensor_operands
from passes.ir.op_traits import is_use
from passes.ir.process_state import collector_paused
from passes.ir.torch_compat import fake_mode_of, lazy_module
from passes.ir.torch_dispatch import copied_input
from passes.layout.layout import Layout
from passes.micro_batches.run_times import RunTime, RunTimes
from passes.micro_batches.time_axis import TIME, on_piece
from passes.rules.core.rule_registry import rule_for


def without_uses(joint: JointGraph) -> JointGraph:
    """A new joint graph in which every reader reads the value itself."""
    copied = copy_joint(joint)
    for node in list(copied.graph.nodes):
        if node.op == "call_function" and is_use(node):
            node.replace_all_uses_with(tensor_operands(node)[0])
            copied.graph.erase_node(node)
    return copied


@collector_paused()
def in_pieces(joint: JointGraph, times: RunTimes, index: int) -> JointGraph:
    """The step of `joint`, which has no `use`, with piece `index` of `times.count`: a new graph.

        %h: f32[64, 8]  = contract(%x, %w)
        %l: f32[]       = sum(%h)
        ->                                                            4 pieces
        %w_held         = use(%w)                                     // before: gathered once, if that is best
        %x_piece        = piece(%x, 0, 0, 16)                         // piece
        %h: f32[16, 8]  = contract(%x_piece, %w_held)
        %l_piece: f32[] = sum(%h)
        %l: f32[]       = collect(%l_piece, "sum")                    // after: its operand is added up over the pieces

    Inputs and outputs stay those of `joint`. Graphs of pieces of one size differ in numbers at most: where a part
    starts.
    """
    writer = _Writer(joint, times, index=index)
    for node in joint.graph.nodes:
        writer.write(node)
    return writer.written(pieces=times.count)


@dataclass
class PieceWriter:
    """Writes a graph in which ops of `joint`, which has no `use`, run in pieces. made: of what is whole, by node."""

    joint: JointGraph
    times: RunTimes
    graph: fx.Graph = field(default_factory=fx.Graph)
    calls: FakeCalls = field(default_factory=FakeCalls)
    made: dict[fx.Node, Any] = field(default_factory=dict)

    @property
    def mesh(self) -> MeshSpec:
        return self.times.mesh

    def written(self, **changed: Any) -> JointGraph:
        erase_dead(self.graph)
        module = lazy_module(self.graph, "JointGraph")
        joint = replace(self.joint, module=module, **changed)
        for graph_pass in LAST:  # uses that there are stay
            joint = graph_pass(joint)
        return copy_joint(joint)

    def place(self, node: fx.Node) -> None:
        """An input of the call, as it is."""
        self.made[node] = copied_input(self.graph, node)

    def once(self, node: fx.Node, operands: Sequence[fx.Node], **meta: Any) -> None:
        """An op that runs whole."""
        args, kwargs = map_operands(node, operands)
        self.made[node] = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        self.made[node].meta = {**node.meta, **meta}

    def in_piece(self, node: fx.Node, operands: Sequence[fx.Node], index: int) -> Any:
        """What piece `index` makes of its operands."""
        layouts = self.times.layouts[node.name]
        return on_piece(self.emit, node, operands, rule_for(node), layouts, self.mesh, index)

    def time(self, node: fx.Node) -> RunTime:
        producer = result_index(node)[0]
        return "before" if producer.op == "placeholder" else self.times.of[producer.name]

    def layout(self, node: fx.Node) -> Layout:
        producer, index = result_index(node)
        return self.times.layouts[producer.name].results[index]

    def emit(
        self,
        node: fx.Node,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        runs: RunTime = "piece",
    ) -> fx.Node:
        """An op on behalf of `node`."""
        kwargs = kwargs or {}
        made = self.graph.call_function(target, tuple(args), kwargs)
        inherited = {key: node.meta[key] for key in INHERITED if key in node.meta}
        value = self.calls(target, args, kwargs, fake_mode_of(node.meta["val"]))
        made.meta = {"module": "", "source": "", **inherited, **self.said(node, runs), "val": value}
        return made

    def said(self, node: fx.Node, runs: RunTime) -> dict[str, Any]:
        """Meta of what is emitted on behalf of `node`."""
        raise NotImplementedError


@dataclass
class _Writer(PieceWriter):
    """index: of the piece."""

    index: int = 0
    held: dict[fx.Node, fx.Node] = field(default_factory=dict)
    parts: dict[tuple[fx.Node, Layout], fx.Node] = field(default_factory=dict)
    collected: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def write(self, node: fx.Node) -> None:
        producer, index = result_index(node)
        if node.op == "placeholder":
            self.place(node)
        elif node.op == "output":
            self.graph.output(tuple(None if n is None else self._read_whole(n) for n in self.joint.results))
        elif producer is not node:
            self.made[node] = self._result(node, self.made[producer], index)
        elif self.times.of[node.name] == "piece":
            pairs = zip(tensor_operands(node), self.times.layouts[node.name].operands, strict=True)
            self.made[node] = self.in_piece(node, [self._read_part(*pair) for pair in pairs], self.index)
        else:
            operands = [self._read_whole(n) for n in tensor_operands(node)]
            self.once(node, operands, runs=self.times.of[node.name], repeats=1)

    def _result(self, node: fx.Node, made: Any, index: int) -> fx.Node:
        if isinstance(made, tuple):
            return made[index]
        return self.emit(node, operator.getitem, (made, index), runs=self.time(node))

    def _read_whole(self, node: fx.Node) -> fx.Node:
        if self.time(node) != "piece":
            return self.made[node]
        if node not in self.collected:
            self.collected[node] = self._collect(node)
        return self.collected[node]

    def _collect(self, node: fx.Node) -> fx.Node:
        layout, shape = self.layout(node), node_value(node).shape
        dim = layout.dim_of(TIME) if not layout.partial else None
        if dim is None:
            ((_, how),) = layout.partial
            arguments = (self.made[node], how, 0, 0, 0)
        else:
            start, _ = layout.interval(shape, self.mesh, dim, self.index)
            arguments = (self.made[node], "cat", dim, start, shape[dim])
        return self.emit(node, torch.ops.autoshard.collect.default, arguments)

    def _read_part(self, node: fx.Node, wanted: Layout) -> fx.Node:
        if self.time(node) == "piece":
            return self.made[node]
        dim = wanted.dim_of(TIME)
        if dim is None:
            return self._hold(node)
        if (node, wanted) not in self.parts:
            low, high = wanted.interval(node_value(node).shape, self.mesh, dim, self.index)
            arguments = (self.made[node], dim, low, high - low)
            self.parts[node, wanted] = self.emit(node, torch.ops.autoshard.piece.default, arguments)
        return self.parts[node, wanted]

    def _hold(self, node: fx.Node) -> fx.Node:
        """The value as all pieces read it. A constant can be had in any layout for nothing."""
        if node.target is torch.ops.aten.full.default:
            return self.made[node]
        if node not in self.held:
            operation = torch.ops.autoshard.use.default
            self.held[node] = self.emit(node, operation, (self.made[node],), runs="before")
        return self.held[node]

    def said(self, node: fx.Node, runs: RunTime) -> dict[str, Any]:
        read = {user.meta.get("phase") for user in node.users}
        phase = node.meta.get("phase", "forward" if "forward" in read else "backward")
        return {"phase": phase, "runs": runs, "repeats": self.times.count if runs == "piece" else 1}
