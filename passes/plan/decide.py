"""Once, after the search: how its layouts are brought about. The last that reads a price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from cost_model.timed import Priced
from passes.ir.joint import (
    GraphInput,
    JointGraph,
    node_value,
    node_values,
    repeats,
    result_index,
    tensor_operands,
)
from passes.ir.op_traits import read_repeats
from passes.ir.process_state import collector_paused
from passes.layout.layout import Assignment, NodeLayouts
from passes.lower.op_on_rank import PossibleInterior, possible_interiors
from passes.plan.describe import end_names, escaped, op_name, op_text, shapes_of
from passes.plan.planned_graph import NodeRecord, OperandRecord, PlannedGraph, Reshard, ResultRecord, Transfer
from passes.plan.transfers import HiddenReads, hidden_reads, transfers
from passes.redistribution.redistribute import Redistributor
from passes.redistribution.steps import Redistribution
from passes.schedule.bucket_plan import bucketed_order
from passes.schedule.issue_order import IssueOrder
from passes.strategies.prices import Prices, local_nbytes
from passes.strategies.traffic import fused_group

Ways = Mapping[Transfer, Redistribution]
"""Every transfer -> its steps, with the prices that they were chosen by."""


@collector_paused()
def decide(joint: JointGraph, assignment: Assignment, prices: Prices) -> PlannedGraph:
    """The cheapest steps, the buckets that make a step shorter, and the interiors worth it, under `prices`.

    Prices come from the assignment itself, not from the search: the sum of all seconds is the plan's cost, counted a
    second way.
    """
    ways = chosen_steps(joint, assignment, prices.redistributor, prices.merged)
    order = bucketed_order(joint, assignment, prices, ways)
    interiors = find_interiors(joint, assignment, prices, ways)
    planned = PlannedGraph(_Writer(joint, assignment, prices, ways, order, interiors).nodes())
    vars(planned)["layouts"] = assignment  # as it reads them: a search knows what it judged by the object
    return planned


def chosen_steps(
    joint: JointGraph, assignment: Assignment, alone: Redistributor, merged: Redistributor | None = None
) -> Ways:
    """The steps of every transfer, chosen by `alone`; by `merged` where only the end of the program reads what they
    bring (`passes.plan.transfers.hidden_reads`): such transfers share buckets, so their prices differ."""
    ending = frozenset[Transfer]()
    if merged is not None:
        ending = _hidden(joint).ending
    found: dict[Transfer, Redistribution] = {}
    for move in transfers(joint, assignment):
        value = node_value(move.operand)
        chooser = merged if merged is not None and move.transfer in ending else alone
        found[move.transfer] = chooser.plan(move.held, move.wanted, tuple(value.shape), value.element_size())
    return found


def _hidden(joint: JointGraph) -> HiddenReads:
    return joint.known("hidden reads", lambda: hidden_reads(joint))


def find_interiors(
    joint: JointGraph, assignment: Assignment, prices: Prices, ways: Ways
) -> Mapping[str, str]:
    """Ops worth computing in parts, by name -> the factor whose parts they are."""
    steps = {transfer: way.steps for transfer, way in ways.items()}
    return {
        found.node.name: found.factor
        for found in possible_interiors(joint, assignment, steps)
        if _gain(found, assignment, prices, sum(ways[t].seconds for t in found.exchanges)) > 0.0
    }


def _gain(one: PossibleInterior, assignment: Assignment, prices: Prices, exchanged: float) -> float:
    """Seconds saved: what is hidden, less what it takes. No more than half of the op is taken to be interior."""
    node, mesh = one.node, prices.mesh
    layouts = assignment[node.name]
    hidden = prices.overlap_efficiency * min(exchanged, 0.5 * prices.op_seconds(node, layouts))
    nbytes = sum(
        local_nbytes(layout, node, i, mesh)
        for i, layout in enumerate(layouts.results)
        if node_values(node)[i] is not None
    )
    copied = prices.compute.kernel_seconds(0.0, 2.0 * nbytes, "float32", None)
    return hidden - copied - 3 * prices.compute.launch_seconds


@dataclass(frozen=True)
class _Writer:
    """The nodes of a planned graph."""

    joint: JointGraph
    assignment: Assignment
    prices: Prices
    ways: Ways
    order: IssueOrder
    interiors: Mapping[str, str]

    def nodes(self) -> tuple[NodeRecord, ...]:
        priced, trained = self._priced(), self.joint.trained
        ends = dict(self.joint.given)
        nodes = [node for node in self.joint.graph.nodes if result_index(node)[0] is node]
        return tuple(
            self._placeholder(node, ends[node], node in trained)
            if node in ends
            else self._op(node, priced[node.name])
            if node.name in priced
            else self._output(node)
            for node in nodes
        )

    def _priced(self) -> dict[str, Priced]:
        """Where the price of each op comes from. What was timed of ops that are computed in one loop is what all of
        them take together."""
        prices = self.prices
        ops = [n for n in self.joint.graph.nodes if n.op == "call_function" and result_index(n)[0] is n]
        alone: dict[str, Priced] = {
            node.name: prices.op_priced(node, self.assignment[node.name]) for node in ops
        }
        found = dict(alone)
        for node in ops:
            if alone[node.name] != "modelled" and prices.flow(node).group:
                group = fused_group(node)
                found |= {} if group is None else {inner.name: alone[node.name] for inner in group.inner}
        return found

    def _placeholder(self, node: fx.Node, spec: GraphInput, trained: bool) -> NodeRecord:
        prices, layouts = self.prices, self.assignment[node.name]
        text = spec.name if spec.kind in ("tangent", "seed") else f"{spec.kind} {spec.name}"
        nbytes = local_nbytes(layouts.results[0], node, 0, prices.mesh)
        return NodeRecord(
            name=node.name,
            op=spec.kind,
            text=escaped(text),
            operands=(),
            results=_results(node, layouts),
            splits=(),
            seconds=prices.optimizer_seconds(nbytes) if trained else 0.0,
            phase="backward" if spec.kind == "tangent" else "forward",
            module="",
            source="",
        )

    def _op(self, node: fx.Node, priced: Priced) -> NodeRecord:
        layouts = self.assignment[node.name]
        return NodeRecord(
            name=node.name,
            op=op_name(node),
            text=op_text(node),
            operands=self._operands(node),
            results=_results(node, layouts),
            splits=layouts.splits,
            seconds=repeats(node) * self.prices.op_seconds(node, layouts),
            phase=node.meta.get("phase", "forward"),
            module=node.meta.get("module", ""),
            source=node.meta.get("source", ""),
            interior=self.interiors.get(node.name),
            priced=priced,
        )

    def _output(self, node: fx.Node) -> NodeRecord:
        operands, ends = self._operands(node), end_names(self.joint)
        return NodeRecord("output", "output", "", operands, (), (), 0.0, "backward", "", "", ends=ends)

    def _operands(self, node: fx.Node) -> tuple[OperandRecord, ...]:
        found: list[OperandRecord] = []
        hides, order = _hidden(self.joint).hides, self.order
        wanted = self.assignment[node.name].operands
        for position, (operand, layout) in enumerate(zip(tensor_operands(node), wanted, strict=True)):
            producer, index = result_index(operand)
            read = node.name, position
            moved = self._moved(read, read_repeats(node, operand))
            when = order.turns.get(read), order.ahead.get(read), order.starts.get(read, ())
            found.append(OperandRecord(producer.name, index, layout, moved, read in hides, *when))
        return tuple(found)

    def _moved(self, read: Transfer, times: int) -> tuple[Reshard, ...]:
        way = self.ways.get(read)
        if way is None:
            return ()
        steps = zip(way.steps, way.step_nbytes, way.step_seconds, strict=True)
        priced = self.prices.collective_priced
        return tuple(
            Reshard.of(step, nbytes, times * seconds, priced(step.kind, step.axes, nbytes))
            for step, nbytes, seconds in steps
        )


def _results(node: fx.Node, layouts: NodeLayouts) -> tuple[ResultRecord, ...]:
    return tuple(
        ResultRecord(shape, dtype, layout)
        for (shape, dtype), layout in zip(shapes_of(node), layouts.results, strict=True)
    )
