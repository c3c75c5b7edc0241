"""From the global graph and the layouts to one rank's graph of plain local tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from cost_model.mesh import MeshSpec
from passes.ir.joint import FakeCalls, JointGraph, map_operands, node_value, result_index, tensor_operands
from passes.ir.op_traits import is_of_piece, is_piece, is_use
from passes.ir.process_state import collector_paused
from passes.ir.torch_compat import fake_mode_of, last_node, lazy_module
from passes.ir.torch_dispatch import copied_input, copied_node
from passes.layout.layout import Layout, NodeLayouts, Span
from passes.lower.op_on_rank import (
    Arrival,
    OpOnRank,
    RankRing,
    Served,
    exchange_before,
    in_parts,
    in_ring,
    interior_of,
)
from passes.plan.planned_graph import PlannedGraph, Transfer
from passes.plan.transfers import ring_turns
from passes.redistribution.emit_steps import Emitter
from passes.redistribution.lower_redistribute import emit
from passes.rules.core.rule import OpRule
from passes.rules.core.rule_registry import rules_of
from passes.schedule.issue_order import step_places


@dataclass(frozen=True)
class RankGraph:
    """One rank's joint graph.

    module: placeholders and flat outputs in the order of the JointGraph's `inputs` and `outputs`,
            local shapes, functional collectives where layouts change.
    values: global node name -> the local node that holds this rank's part of it (of the result
            selected, for `getitem`). Nodes with several results are absent; their getitems are here.
    transfers: meta "transfer" of a node counts these.
    """

    module: fx.GraphModule
    values: Mapping[str, str]
    transfers: Sequence[Transfer] = ()


@collector_paused()
def partition(
    joint: JointGraph, planned: PlannedGraph, mesh: MeshSpec, rank: int, groups: Mapping[tuple[str, ...], str]
) -> RankGraph:
    """The graph that `rank` runs.

    Every op is emitted by its rule on this rank's shards; where an operand's layout differs from
    the one the op reads, the steps of `planned` are emitted before it, and their nodes get its turn, and
    those of other steps that of another one (`passes.schedule.issue_order`).
    `groups` names the process group of every tuple of axes. Ops of `planned.interiors` are computed in parts, so that
    a halo travels meanwhile (`passes.lower.op_on_rank`).

        %h: f32[8@dp, 64@tp]  = contract(%x, %up)                 global, (dp=2, tp=4)
        %y: f32[8@dp, 16]     = all_reduce[tp](contract(%h, %down))
        ->
        %h: f32[4, 16] = contract(%x, %up)                        on one rank
        %y_partial: f32[4, 16] = contract(%h, %down)
        %y: f32[4, 16] = wait_tensor(all_reduce(%y_partial, "sum", "tp"))
    """
    places = step_places(joint, planned)
    rules, rings = rules_of(joint), ring_turns(joint, planned)
    writer = _Writer(planned, mesh, rank, groups, Served.of(joint), places, joint.calls, rules, rings)
    for node in joint.graph.nodes:
        writer.write(node)
    return writer.finish()


@dataclass(frozen=True)
class _Written:
    """same: what decided it, whose ids stay their own. nodes: with what they say beside their writer's meta."""

    same: tuple[Any, ...]
    operands: Sequence[fx.Node]
    nodes: Sequence[tuple[fx.Node, Mapping[str, Any]]]
    result: Any

    def again(self, graph: fx.Graph, operands: Sequence[fx.Node], meta: Mapping[str, Any]) -> Any:
        new = dict(zip(self.operands, operands, strict=True))
        for node, said in self.nodes:
            copy = new[node] = copied_node(graph, node, new.__getitem__, named=False)
            copy.meta.update(meta)
            copy.meta.update(said)
        return map_arg(self.result, new.__getitem__)


@dataclass
class _Writer:
    planned: PlannedGraph
    mesh: MeshSpec
    rank: int
    groups: Mapping[tuple[str, ...], str]
    served: Served
    places: Mapping[Transfer, tuple[int, ...]]
    calls: FakeCalls
    rules: Mapping[fx.Node, OpRule]
    rings: Mapping[str, tuple[int, ...]]
    graph: fx.Graph = field(default_factory=fx.Graph)
    # An op of several results has one node of a tuple, or, if its rule made them one by one, a tuple of nodes.
    local: dict[fx.Node, Any] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    arrivals: dict[Transfer, Arrival] = field(default_factory=dict)
    written: dict[Hashable, _Written] = field(default_factory=dict)
    kept: dict[str, dict[fx.Node, fx.Node]] = field(default_factory=dict)  # by group

    def write(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.local[node] = self._placeholder(node)
        elif node.op == "output":
            self._output(node)
        elif result_index(node)[0] is not node:
            self.local[node] = self._getitem(node)
        elif is_use(node):
            (self.local[node],) = self._operands(node)
        else:
            self.local[node] = self._op(node)

    def finish(self) -> RankGraph:
        self.graph.lint()
        values = {
            node.name: local.name
            for node, local in self.local.items()
            if isinstance(local, fx.Node) and "val" in local.meta
        }
        return RankGraph(lazy_module(self.graph), values, self.transfers)

    def _placeholder(self, node: fx.Node) -> fx.Node:
        local = copied_input(self.graph, node)
        value = node_value(node)
        layout = self.planned.layouts[node.name].results[0]
        shape = layout.local_shape(value.shape, self.mesh, self.rank)
        local.meta = _meta(node)
        kind = {"dtype": value.dtype, "device": value.device}
        local.meta["val"] = self.calls(torch.empty, (shape,), kind, fake_mode_of(value))
        return local

    def _output(self, node: fx.Node) -> None:
        operands = iter(self._operands(node))
        results = [next(operands) if isinstance(result, fx.Node) else None for result in node.args[0]]  # type: ignore[union-attr]
        self.graph.output(tuple(results))

    def _getitem(self, node: fx.Node) -> fx.Node:
        producer, index = result_index(node)
        local = self.local[producer]
        if isinstance(local, tuple):
            return local[index]
        if node_is_tuple(local):
            return self._emit(node, node.target, (local, index), {})  # type: ignore[arg-type]
        return local

    def _op(self, node: fx.Node) -> Any:
        operands = self._operands(node)
        args, kwargs = map_operands(node, operands)
        layouts = self.planned.layouts[node.name]
        every = self.rules[node]
        rule = every.splitting(split.factor for split in layouts.splits)
        context = OpOnRank(self._emit, self.mesh, self.rank, node, args, kwargs, rule, layouts)
        if rule.exchange is not None:
            context.ring = self._ring(node, rule, rule.exchange.factor, layouts)
            reads = zip(tensor_operands(node), operands, layouts.operands, strict=True)
            held = {local for operand, local, wanted in reads if self._held(operand) == wanted}
            return in_ring(context, held, self.kept)
        interiors = self.planned.interiors
        if node.name in interiors:
            parts = self._in_parts(context, rule, interiors[node.name], operands)
            if parts is not None:
                return parts
        call = lambda: context.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
        write = call if rule.localize is None else lambda: rule.localize(context)  # type: ignore[misc]
        return self._alike((every, layouts), (), operands, _meta(node), write)

    def _ring(self, node: fx.Node, rule: OpRule, factor: str, layouts: NodeLayouts) -> RankRing:
        (split,) = (split for split in layouts.splits if split.factor == factor)
        order = {"turn": self.rings[node.name], "ring": node.name}
        meta = _meta(node) | order | {"serves": node.meta.get("module", "") or node.name}
        index = self.mesh.linear_index(self.rank, split.axes)
        emitter = Emitter(self.graph, meta, self.calls)
        return RankRing(emitter, self.groups[split.axes], index, split.parts(rule.sizes[factor], self.mesh))

    def _alike(
        self,
        same: tuple[Any, ...],
        shape: Sequence[int],
        operands: Sequence[fx.Node],
        meta: dict[str, Any],
        write: Callable[[], Any],
    ) -> Any:
        """What `write` emits, but as it was emitted before for the same objects and operands that look alike: layers
        are. meta: of all that is emitted, beside what the op or the transfer says of its nodes."""
        places = tuple(operands.index(operand) for operand in operands)
        key = (*map(id, same), *(id(operand.meta["val"]) for operand in operands), places, tuple(shape))
        if key in self.written:
            return self.written[key].again(self.graph, operands, meta)
        last = last_node(self.graph) if self.local else None
        result = write()
        if last is not None:
            nodes: list[fx.Node] = []
            while (last := last.next).op == "call_function":
                nodes.append(last)
            if {n for node in nodes for n in node.all_input_nodes} <= {*operands, *nodes}:
                said = [{name: value for name, value in n.meta.items() if name not in meta} for n in nodes]
                self.written[key] = _Written(same, operands, list(zip(nodes, said, strict=True)), result)
        return result

    def _in_parts(self, context: OpOnRank, rule: OpRule, factor: str, operands: list[fx.Node]) -> Any:
        """The interior first, and what arrives after it; None if this rank has no interior, or the halo is read
        already."""
        own: dict[int, tuple[fx.Node, Span]] = {}
        arrivals: list[Arrival] = []
        for t, d in rule.windows:
            if t < len(operands) and rule.operands[t][d] == (factor,):
                found = exchange_before(context.node, t, self.planned.layouts)
                arrival = self.arrivals.get((found[0].name, found[1])) if found else None
                if arrival is None or not arrival.unread:
                    return None
                own[t] = arrival.own, arrival.spans[d]
                arrivals.append(arrival)
        spans = {t: span for t, (_, span) in own.items()}
        inner = interior_of(rule, factor, context.interval(factor), spans)
        if inner is None:
            return None
        arrive = lambda: [arrival.put_off(self.graph) for arrival in arrivals]
        return in_parts(context, rule, factor, operands, own, inner, arrive)  # type: ignore[arg-type]

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        wanted = self.planned.layouts[node.name].operands
        return [
            self._redistributed(operand, layout, node, position)
            for position, (operand, layout) in enumerate(zip(tensor_operands(node), wanted, strict=True))
        ]

    def _held(self, operand: fx.Node) -> Layout:
        producer, index = result_index(operand)
        return self.planned.layouts[producer.name].results[index]

    def _redistributed(self, operand: fx.Node, wanted: Layout, reader: fx.Node, position: int) -> fx.Node:
        held, local = self._held(operand), self.local[operand]
        if held == wanted:
            return local
        value = node_value(operand)
        transfer = reader.name, position
        steps = self.planned.steps[transfer]
        meta = _meta(reader if reader.op != "output" else operand)
        meta["serves"] = self.served.name(operand, reader, position)
        if reader.op == "output" and "runs" in meta:
            meta["runs"] = "piece" if is_of_piece(operand) else "after"
        elif is_piece(reader):
            meta["runs"] = "before"
        meta |= order_of(transfer, self.planned, self.places)
        # The order of a bucket's members: a rank's own graph may not show it, as ranks read different members.
        meta["transfer"] = len(self.transfers)
        self.transfers.append(transfer)
        shape, mesh, groups = value.shape, self.mesh, self.groups
        last = last_node(self.graph)
        write = lambda: emit(self.graph, local, steps, shape, mesh, self.rank, groups, meta, self.calls)
        moved = self._alike((steps,), shape, [local], meta, write)
        spans = [held.interval(shape, mesh, d, self.rank) for d in range(len(shape))]
        self.arrivals[transfer] = Arrival(local, spans, last.next, meta["transfer"])
        return moved

    def _emit(
        self, node: fx.Node, target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> fx.Node:
        local = self.graph.call_function(target, tuple(args), kwargs)
        local.meta = _meta(node)
        local.meta["val"] = self.calls(target, args, kwargs, fake_mode_of(node.meta["val"]))
        return local


def order_of(
    transfer: Transfer, planned: PlannedGraph, places: Mapping[Transfer, tuple[int, ...]]
) -> dict[str, Any]:
    """What the nodes of a transfer say of when it runs. places: of `passes.schedule.issue_order`."""
    kinds = {"places": places, "ahead": planned.ahead, "starts": planned.starts}
    found = {name: of[transfer] for name, of in kinds.items() if transfer in of}
    return {"turn": planned.turns[transfer], **found}


def node_is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], (tuple, list))


def _meta(node: fx.Node) -> dict[str, Any]:
    keys = ("phase", "module", "source", "again", "runs")
    found = {key: node.meta[key] for key in keys if key in node.meta} | {"of": node.name}
    rows = node.meta.get("rows")
    return found if rows is None else found | {"experts": rows.experts, "routing": rows.routing}
