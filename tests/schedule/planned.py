"""Joint graphs with random legal layouts, lowered for every rank of a mesh, and run in lockstep."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoshard.planning import canonical_capture
from cost_model.mesh import MeshSpec, simulated_groups
from passes.ir.joint import JointGraph, node_value, result_index, tensor_operands
from passes.layout.layout import Assignment, Layout, NodeLayouts
from passes.lower.partition import partition
from passes.lower.phases import Phases, split_phases
from passes.plan.decide import chosen_steps
from passes.plan.describe import shapes_of
from passes.plan.planned_graph import (
    NodeRecord,
    OperandRecord,
    PlannedGraph,
    Reshard,
    ResultRecord,
    Transfer,
    Turn,
)
from passes.redistribution.lower_redistribute import collective_nodes
from passes.redistribution.redistribute import Redistributor
from passes.rules.core.rule_registry import rule_for
from passes.schedule.issue_order import IssueOrder, issue_order
from passes.simulate.lockstep import simulate
from passes.strategies.strategies import enumerate_strategies
from tests.redistribution.layouts import cut, link_prices, random_layout

Reorder = Callable[[fx.GraphModule], fx.GraphModule]


def joint_of(model: nn.Module, *inputs: Tensor) -> JointGraph:
    return canonical_capture(model, inputs, {}).joint


def random_assignment(joint: JointGraph, mesh: MeshSpec, rng: random.Random) -> Assignment:
    """Any layout that the rules allow at every node, inputs in uneven shards some of which are empty."""
    chosen: dict[str, NodeLayouts] = {}
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            layout = random_layout(rng, node.meta["val"].shape, mesh, ["sum"], 0.5)
            chosen[node.name] = NodeLayouts((), (Layout(layout.dims, (), layout.sizes),))
        elif node.op == "output":
            held = [_held(n, chosen) for n in tensor_operands(node)]
            chosen[node.name] = NodeLayouts(tuple(_whole(rng, x) for x in held), ())
        elif result_index(node)[0] is node:
            chosen[node.name] = _random_strategy(node, chosen, mesh, rng)
    return chosen


def _held(node: fx.Node, chosen: Mapping[str, NodeLayouts]) -> Layout:
    producer, index = result_index(node)
    return chosen[producer.name].results[index]


def _whole(rng: random.Random, held: Layout) -> Layout:
    """Nothing pending, and either split as it is or not at all."""
    return rng.choice([Layout(held.dims, (), held.sizes), Layout.replicated(held.ndim)])


def _random_strategy(
    node: fx.Node, chosen: Mapping[str, NodeLayouts], mesh: MeshSpec, rng: random.Random
) -> NodeLayouts:
    operands = tensor_operands(node)
    value = node.meta["val"]
    several = isinstance(value, (tuple, list))
    results = [() if v is None else tuple(v.shape) for v in (value if several else [value])]
    shapes = [tuple(node_value(*result_index(n)).shape) for n in operands]
    found = enumerate_strategies(rule_for(node), shapes, results, mesh)
    held = [_held(n, chosen) for n in operands]
    return rng.choice(
        [s for s in found if all(w.partial in ((), h.partial) for w, h in zip(s.operands, held, strict=True))]
    )


def unmerged(
    joint: JointGraph,
    assignment: Assignment,
    redistributor: Redistributor | None,
    turns: Mapping[Transfer, Turn] | IssueOrder | None = None,
) -> PlannedGraph:
    """The steps that `redistributor` chooses (None: there are none), every collective alone, every op in one part;
    without prices. turns: of the transfers, if they are not those of `issue_order`."""
    ways = {} if redistributor is None else chosen_steps(joint, assignment, redistributor)
    turns = issue_order(joint, assignment).turns if turns is None else turns
    order = turns if isinstance(turns, IssueOrder) else IssueOrder(turns, {}, {})

    def operand(reader: fx.Node, position: int, source: fx.Node) -> OperandRecord:
        producer, index = result_index(source)
        transfer, layout = (reader.name, position), assignment[reader.name].operands[position]
        steps = ways[transfer].steps if transfer in ways else ()
        moved = tuple(Reshard.of(step, 0, 0.0) for step in steps)
        when = order.turns.get(transfer), order.ahead.get(transfer), order.starts.get(transfer, ())
        return OperandRecord(producer.name, index, layout, moved, False, *(when if moved else ()))

    def node(one: fx.Node) -> NodeRecord:
        layouts = assignment[one.name]
        read = tuple(operand(one, i, source) for i, source in enumerate(tensor_operands(one)))
        shapes = [] if one.op == "output" else shapes_of(one)
        left = tuple(ResultRecord(s, d, at) for (s, d), at in zip(shapes, layouts.results, strict=True))
        return NodeRecord(one.name, one.op, "", read, left, layouts.splits, 0.0, "forward", "", "")

    return PlannedGraph(tuple(node(one) for one in joint.graph.nodes if result_index(one)[0] is one))


def lowered(joint: JointGraph, assignment: Assignment, mesh: MeshSpec) -> list[Phases]:
    """Each rank's phases."""
    planned = unmerged(joint, assignment, Redistributor(mesh, link_prices(mesh)))
    groups = simulated_groups(mesh)
    modules = [partition(joint, planned, mesh, rank, groups).module for rank in range(mesh.device_count)]
    return [split_phases(module, joint.inputs, joint.outputs) for module in modules]


def shards(
    joint: JointGraph, assignment: Assignment, mesh: MeshSpec, values: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Per rank its parts of the joint graph's inputs."""
    layouts = [assignment[node.name].results[0] for node in joint.placeholders]
    return [
        [
            cut(v, [x.interval(v.shape, mesh, d, rank) for d in range(v.ndim)])
            for v, x in zip(values, layouts, strict=True)
        ]
        for rank in range(mesh.device_count)
    ]


def run_phases(
    joint: JointGraph,
    ranks: Sequence[Phases],
    parts: Sequence[Sequence[Tensor]],
    mesh: MeshSpec,
    reorder: Reorder,
) -> list[list[Any]]:
    """Per rank the forward's results and the gradients, all graphs reordered first."""
    tangents = [i for i, spec in enumerate(joint.inputs) if spec.kind == "tangent"]
    inputs = [[t for i, t in enumerate(part) if i not in tangents] for part in parts]
    forward = simulate([reorder(p.forward) for p in ranks], inputs, mesh)
    late: list[list[Tensor]] = []
    for phases, given, results, part in zip(ranks, inputs, forward, parts, strict=True):
        assert phases.backward is not None
        saved = [results[i] for i in phases.backward.saved]
        late.append([*(given[i] for i in phases.backward.passed), *saved, *(part[i] for i in tangents)])
    modules = [reorder(p.backward.module) for p in ranks if p.backward is not None]
    backward = simulate(modules, late, mesh)
    counts = [len(p.outputs) for p in ranks]
    return [[*f[:n], *b] for f, b, n in zip(forward, backward, counts, strict=True)]


def collectives(module: fx.GraphModule) -> list[tuple[Any, str, Any]]:
    """(turn, group, kind) in the order in which they are issued."""
    return [(n.meta["turn"], str(n.args[-1]), n.target) for n in collective_nodes(module.graph)]


def values_of(joint: JointGraph) -> list[Tensor]:
    """Small integers as floats: any order of summing gives the same."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(-2, 3, n.meta["val"].shape, generator=generator).to(n.meta["val"].dtype)
        for n in joint.placeholders
    ]


def followed_assignment(
    joint: JointGraph, mesh: MeshSpec, held: Mapping[str, Layout], gathered: str
) -> Assignment:
    """What follows from the layouts of the inputs: parameters are gathered over `gathered` for every use,
    everything else moves as little as possible, and only sums of products stay pending.

    held: placeholder name -> layout; the output has that of the input, gradients their parameters'.
    """
    chosen = {name: NodeLayouts((), (layout,)) for name, layout in held.items()}
    places = joint.placeholders
    for node in joint.graph.nodes:
        if node.op == "call_function":
            chosen[node.name] = _following(node, chosen, mesh, gathered)
    wanted = [
        chosen[places[spec.index].name if spec.kind == "grad" else "args_0"].results[0]
        for spec, result in zip(joint.outputs, joint.results, strict=True)
        if result is not None
    ]
    chosen[joint.output_node.name] = NodeLayouts(tuple(wanted), ())
    return chosen


def _following(
    node: fx.Node, chosen: Mapping[str, NodeLayouts], mesh: MeshSpec, gathered: str
) -> NodeLayouts:
    operands = tensor_operands(node)
    shapes = [tuple(n.meta["val"].shape) for n in operands]
    aims = [_aim(n, node, chosen, gathered) for n in operands]
    found = enumerate_strategies(rule_for(node), shapes, [tuple(node.meta["val"].shape)], mesh)
    return min(found, key=lambda s: sum(w != aim for w, aim in zip(s.operands, aims, strict=True)))


def _aim(operand: fx.Node, reader: fx.Node, chosen: Mapping[str, NodeLayouts], gathered: str) -> Layout:
    held = chosen[operand.name].results[0]
    if operand.op == "placeholder" and "weight" in operand.name:
        return Layout(tuple(tuple(a for a in axes if a != gathered) for axes in held.dims))
    return held if reader.target is torch.ops.aten.add.Tensor else Layout(held.dims, (), held.sizes)
