"""Transfers of several collectives are on their way while a phase computes, and not one of their collectives alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from autoshard.plan.judged import prices_of
from cost_model.mesh import MeshSpec, simulated_groups
from cost_model.profile import Profile
from passes.ir.joint import JointGraph
from passes.layout.layout import Assignment, Layout
from passes.lower.partition import partition
from passes.lower.phases import Phases, split_phases
from passes.plan.decide import chosen_steps
from passes.redistribution.lower_redistribute import collective_nodes
from passes.redistribution.redistribute import Redistributor
from passes.schedule.bucket_plan import bucketed_order
from passes.schedule.overlap import IN_TURN, Overlap
from passes.simulate.lockstep import simulate
from tests.schedule.planned import (
    followed_assignment,
    joint_of,
    random_assignment,
    run_phases,
    shards,
    unmerged,
    values_of,
)

MESH = MeshSpec({"hosts": 2, "ranks": 2})


class InHosts:
    """Next to nothing inside a host, and all ranks at once more than one after the other."""

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        return nbytes * {("ranks",): 1e-3, ("hosts",): 1.0}.get(axes, 10.0)

    def link(self, axes: tuple[str, ...]) -> int:
        return int("hosts" in axes)


class Layers(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square()


@pytest.fixture(scope="module")
def layers() -> JointGraph:
    return joint_of(Layers(), torch.randn(8, 4))


def data_parallel(joint: JointGraph) -> Assignment:
    rows = Layout((("hosts", "ranks"), ()))
    held = {
        node.name: Layout.replicated(2) if spec.kind == "param" else rows
        for node, spec in zip(joint.placeholders, joint.inputs, strict=True)
    }
    return followed_assignment(joint, MESH, held, "none")


def modules_of(joint: JointGraph, assignment: Assignment) -> list[fx.GraphModule]:
    planned = unmerged(joint, assignment, Redistributor(MESH, InHosts()))
    groups = simulated_groups(MESH)
    return [partition(joint, planned, MESH, rank, groups).module for rank in range(4)]


def issued(module: fx.GraphModule) -> list[str]:
    """Of every collective the parameter that it serves and its kind, in the order in which they start."""
    return [
        f"{node.meta['serves'].split('.')[1]} {str(node.target).split('.')[-2]}"
        for node in collective_nodes(module.graph)
    ]


def test_a_further_step_starts_with_the_next_reduction(layers: JointGraph) -> None:
    """By hand: the last layer's gradient is there first, and so on its way the longest."""
    module = modules_of(layers, data_parallel(layers))[0]
    backward = split_phases(module, layers.inputs, layers.outputs).backward
    assert backward is not None
    scatter, reduce, gather = "reduce_scatter_tensor", "all_reduce", "all_gather_into_tensor"
    assert issued(Overlap()(backward.module)) == [
        f"2 {scatter}",
        f"2 {reduce}",
        f"1 {scatter}",
        f"2 {gather}",
        f"1 {reduce}",
        f"0 {scatter}",
        f"1 {gather}",
        f"0 {reduce}",
        f"0 {gather}",
    ]


def test_what_is_issued_in_between_computes(layers: JointGraph) -> None:
    """Between a collective of the last layer's gradient and the wait for it there is a product each time."""
    module = modules_of(layers, data_parallel(layers))[0]
    backward = split_phases(module, layers.inputs, layers.outputs).backward
    assert backward is not None
    nodes = list(Overlap()(backward.module).graph.nodes)
    last = [n for n in collective_nodes(backward.module.graph) if n.meta["serves"].startswith("layers.2")]
    assert len(last) == 3
    for collective in last[:2]:
        (wait,) = collective.users
        between = nodes[nodes.index(collective) : nodes.index(wait)]
        assert any("contract" in str(node.target) for node in between), collective


@pytest.mark.parametrize("seed", range(12))
def test_random_layouts_compute_the_same_and_ranks_agree(seed: int, layers: JointGraph) -> None:
    assignment = random_assignment(layers, MESH, random.Random(seed))
    parts = shards(layers, assignment, MESH, values_of(layers))
    wanted = simulate(modules_of(layers, assignment), parts, MESH)
    ranks = [split_phases(m, layers.inputs, layers.outputs) for m in modules_of(layers, assignment)]
    found = run_phases(layers, ranks, parts, MESH, Overlap())
    for got, want in zip(found, wanted, strict=True):
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert all(IN_TURN.violation(p.backward.module) is None for p in ranks if p.backward is not None)


def gathered(joint: JointGraph, assignment: Assignment, per_byte: float = 1e-7) -> list[Phases]:
    """Lowered in the order that prices give, `per_byte` times those of `InHosts`; computing as on the nominal CPU."""

    class Scaled(InHosts):
        def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
            return per_byte * super().seconds(kind, axes, nbytes)

    ways = Redistributor(MESH, Scaled(), link_of=Scaled().link)
    prices = replace(prices_of(Profile.load("cpu"), MESH, "eager"), redistributor=ways, merged=ways)
    order = bucketed_order(joint, assignment, prices, chosen_steps(joint, assignment, ways))
    planned, groups = unmerged(joint, assignment, ways, order), simulated_groups(MESH)
    modules = [partition(joint, planned, MESH, rank, groups).module for rank in range(4)]
    return [split_phases(module, joint.inputs, joint.outputs) for module in modules]


def split_over_all(joint: JointGraph) -> Assignment:
    """FSDP over both axes: each weight is gathered between hosts, then within them."""
    rows = Layout((("hosts", "ranks"), ()))
    held = {node.name: rows for node in joint.placeholders}
    return followed_assignment(joint, MESH, held, "none")


def test_a_gather_begins_before_the_one_ahead_of_it_has_ended(layers: JointGraph) -> None:
    """What a gather takes between hosts is longer than a layer computes: the next layer's begins before."""
    phases = gathered(layers, split_over_all(layers))[0]
    graph = Overlap()(phases.forward).graph
    steps = [(n.meta["serves"].split(".")[1], n.meta["step"]) for n in collective_nodes(graph)]
    last = max(step for _, step in steps)
    assert last >= 1 and sorted(steps) == [(layer, step) for layer in "012" for step in range(last + 1)]
    assert steps.index(("2", 0)) < steps.index(("1", last))
    assert all(
        steps.index((layer, step)) < steps.index((layer, step + 1)) for layer, step in steps if step < last
    )


@pytest.mark.parametrize("per_byte", [1e-9, 1e-7])
@pytest.mark.parametrize("seed", range(6))
def test_gathers_that_start_apart_compute_the_same(seed: int, per_byte: float, layers: JointGraph) -> None:
    assignment = split_over_all(layers) if seed == 0 else random_assignment(layers, MESH, random.Random(seed))
    parts = shards(layers, assignment, MESH, values_of(layers))
    wanted = simulate(modules_of(layers, assignment), parts, MESH)
    ranks = gathered(layers, assignment, per_byte)
    found = run_phases(layers, ranks, parts, MESH, Overlap())
    for got, want in zip(found, wanted, strict=True):
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(got, want, strict=True))
    for phases in ranks:
        assert IN_TURN.violation(phases.forward) is None
