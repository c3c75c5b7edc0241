"""All ranks issue what they share in one order, whatever their shards; and the order is a good one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import fx, nn

from cost_model.mesh import MeshSpec, simulated_groups
from passes.ir.joint import JointGraph, tensor_operands
from passes.layout.layout import Assignment, Layout
from passes.lower.partition import partition
from passes.plan.planned_graph import Transfer, Turn
from passes.redistribution.lower_redistribute import collective_nodes
from passes.redistribution.redistribute import Redistributor
from passes.schedule.issue_order import issue_order, place_behind
from passes.schedule.overlap import Overlap
from passes.simulate.lockstep import simulate
from tests.golden import Golden
from tests.models import SwiGLU
from tests.redistribution.layouts import link_prices
from tests.schedule.planned import (
    collectives,
    followed_assignment,
    joint_of,
    lowered,
    random_assignment,
    run_phases,
    shards,
    unmerged,
    values_of,
)

MESHES = [{"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 3}]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(torch.relu(self.up(x)))).square()


class Convolutions(nn.Module):
    """A rank without a part of the batch or channels runs no convolution: it reads none of its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x)))


@pytest.fixture(scope="module")
def residual() -> JointGraph:
    return joint_of(Residual(), torch.randn(5, 4))


@pytest.fixture(scope="module")
def convolutions() -> JointGraph:
    return joint_of(Convolutions(), torch.randn(2, 2, 4, 4))


def rank_graphs(joint: JointGraph, assignment: Assignment, mesh: MeshSpec) -> list[fx.GraphModule]:
    planned = unmerged(joint, assignment, Redistributor(mesh, link_prices(mesh)))
    groups = simulated_groups(mesh)
    return [partition(joint, planned, mesh, rank, groups).module for rank in range(mesh.device_count)]


def check_shared_order(graphs: Sequence[fx.GraphModule], mesh: MeshSpec) -> int:
    """The collectives of a group are the same list on all its ranks; returns how many lists differ in
    what else they hold."""
    issued = [collectives(graph) for graph in graphs]
    for one, two in itertools.combinations(range(len(graphs)), 2):
        for axes in {group for _, group, _ in issued[one]}:
            names = axes.removeprefix("axes:").split(",")
            if two in mesh.group(one, names):
                assert [c for c in issued[one] if c[1] == axes] == [c for c in issued[two] if c[1] == axes]
    return len({tuple(turn for turn, _, _ in calls) for calls in issued})


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_ranks_agree_on_uneven_and_empty_shards(
    axes: dict[str, int], seed: int, convolutions: JointGraph
) -> None:
    """Forward and backward in one graph, which no rank's split into phases has touched."""
    mesh, joint, options = MeshSpec(axes), convolutions, Overlap(seed % 3, seed % 4, 4 * (seed % 3))
    assignment = random_assignment(joint, mesh, random.Random(seed))
    parts = shards(joint, assignment, mesh, values_of(joint))
    wanted = simulate(rank_graphs(joint, assignment, mesh), parts, mesh)
    graphs = [options(graph) for graph in rank_graphs(joint, assignment, mesh)]
    check_shared_order(graphs, mesh)
    for got, want in zip(simulate(graphs, parts, mesh), wanted, strict=True):
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_ranks_may_have_different_collectives(convolutions: JointGraph) -> None:
    """Otherwise the test above would show nothing."""
    mesh = MeshSpec({"a": 2, "b": 3})
    found = [
        check_shared_order(
            rank_graphs(convolutions, random_assignment(convolutions, mesh, random.Random(seed)), mesh), mesh
        )
        for seed in range(3)
    ]
    assert max(found) > 1


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_phases_agree(axes: dict[str, int], seed: int, residual: JointGraph) -> None:
    mesh, joint = MeshSpec(axes), residual
    assignment = random_assignment(joint, mesh, random.Random(seed))
    parts = shards(joint, assignment, mesh, values_of(joint))
    wanted = simulate(rank_graphs(joint, assignment, mesh), parts, mesh)
    found = run_phases(joint, lowered(joint, assignment, mesh), parts, mesh, Overlap())
    for got, want in zip(found, wanted, strict=True):
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_phases_agree_where_a_rank_reads_nothing(
    axes: dict[str, int], seed: int, convolutions: JointGraph
) -> None:
    """Splitting must keep the collectives whose results only other ranks read."""
    mesh, joint = MeshSpec(axes), convolutions
    assignment = random_assignment(joint, mesh, random.Random(seed))
    parts = shards(joint, assignment, mesh, values_of(joint))
    wanted = simulate(rank_graphs(joint, assignment, mesh), parts, mesh)
    found = run_phases(joint, lowered(joint, assignment, mesh), parts, mesh, Overlap())
    for got, want in zip(found, wanted, strict=True):
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_no_transfer_is_before_what_its_operand_is_computed_from(seed: int, convolutions: JointGraph) -> None:
    """Along every path of the graph turns grow, phase by phase, for any prefetch and reach."""
    rng = random.Random(seed)
    mesh = MeshSpec({"a": 2, "b": 2})
    assignment = random_assignment(convolutions, mesh, rng)
    depth = rng.randint(1, 4)
    ahead = lambda groups, *_: [
        [(depth, place_behind([group[0].end for group in groups], i, depth))] for i in range(len(groups))
    ]
    turns = issue_order(convolutions, assignment, ahead=ahead, reach=rng.randint(0, 9)).turns
    assert len(set(turns.values())) == len(turns)
    latest: dict[fx.Node, Turn] = {}
    for node in convolutions.graph.nodes:
        latest[node] = max((latest[n] for n in node.all_input_nodes), default=(-1, -1))
        mine = {i: turn for (reader, i), turn in turns.items() if reader == node.name}
        operands = tensor_operands(node)
        for i, turn in mine.items():
            assert turn > latest[operands[i]], (node, turn)
        if node.op != "output":
            latest[node] = max([latest[node], *mine.values()])


def sharded_layers() -> tuple[JointGraph, Assignment, MeshSpec]:
    """Two SwiGLU blocks on (dp, tp): weights in shards over dp, columns then rows over tp."""
    mesh = MeshSpec({"dp": 2, "tp": 2})
    joint = joint_of(nn.Sequential(SwiGLU(8, 16), SwiGLU(8, 16)), torch.randn(4, 8))
    held: dict[str, Layout] = {}
    for node in joint.placeholders:
        down, weight = "w2" in node.name, "weight" in node.name
        dims = ((("dp",), ("tp",)) if down else (("tp",), ("dp",))) if weight else (("dp",), ())
        held[node.name] = Layout(dims)
    return joint, followed_assignment(joint, mesh, held, "dp"), mesh


def listed(joint: JointGraph, turns: Mapping[Transfer, Turn]) -> list[str]:
    """One line a transfer: phase, what is moved, for whom."""
    nodes = {n.name: n for n in joint.graph.nodes}
    return [
        f"{'backward' if turns[reader, i][0] else 'forward'}: {tensor_operands(nodes[reader])[i].name} -> {reader}"
        for reader, i in sorted(turns, key=lambda t: turns[t])
    ]


def test_the_order_of_sharded_tensor_parallel_layers(golden: Golden) -> None:
    """Gathers two ahead; an input gradient's all-reduce (use_7) before the reductions of the weight
    gradients that were ready earlier; each gradient as soon as it is computed."""
    joint, assignment, _ = sharded_layers()
    golden.check("\n".join(listed(joint, issue_order(joint, assignment).turns)) + "\n", "sharded_layers.txt")


def test_a_rank_of_sharded_tensor_parallel_layers(golden: Golden) -> None:
    joint, assignment, mesh = sharded_layers()
    phases = lowered(joint, assignment, mesh)[0]
    assert phases.backward is not None
    lines: list[str] = []
    for title, module in (("forward", phases.forward), ("backward", phases.backward.module)):
        lines += [title, *_timeline(Overlap()(module)), ""]
    golden.check("\n".join(lines), "sharded_rank.txt")


def _timeline(module: fx.GraphModule) -> list[str]:
    """Products, collectives and waits, a line each; waits indented, with what they wait for."""
    started = set(collective_nodes(module.graph))
    lines: list[str] = []
    for node in module.graph.nodes:
        kind = str(node.target).split(".")[1] if node.op == "call_function" else ""
        if node in started:
            lines.append(f"  start {kind} of {node.meta['serves']}  %{node.name}")
        elif kind == "wait_tensor":
            lines.append(f"  wait for %{node.all_input_nodes[0].name}")
        elif kind == "contract":
            lines.append(f"%{node.name} = contract")
    return lines
