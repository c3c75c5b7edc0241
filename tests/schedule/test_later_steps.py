"""A reduction of several collectives is on its way while the backward computes, and not its first collective alone."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx, nn

from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.layout.layout import Assignment, Layout
from passes.lower.partition import partition
from passes.lower.phases import split_phases
from passes.redistribution.lower_redistribute import collective_nodes
from passes.redistribution.redistribute import Redistributor
from passes.schedule.overlap import IN_TURN, Overlap
from passes.simulate.lockstep import simulate, simulated_groups
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
