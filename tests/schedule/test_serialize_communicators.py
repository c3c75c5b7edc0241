"""Several communicators on one GPU: all ranks issue in one order over all of them, and one is in flight at a time."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import networkx as nx
import pytest
import torch
from torch import fx, nn

from cost_model.mesh import MeshSpec, simulated_group_axes
from passes.ir.joint import JointGraph
from passes.redistribution.lower_redistribute import collective_nodes
from passes.schedule.overlap import Overlap
from passes.schedule.schedule import SerializeCommunicators
from tests.models import SwiGLU
from tests.schedule.planned import joint_of, lowered, random_assignment, run_phases, shards, values_of

CASES = [
    (MeshSpec({"a": 2, "b": 3}), 0),
    (MeshSpec({"a": 2, "b": 3}), 1),
    (MeshSpec({"a": 2, "b": 2, "c": 2}), 0),
]
c10d = torch.ops._c10d_functional


@pytest.fixture(scope="module")
def layers() -> JointGraph:
    """Five rows, so that shards are uneven and some ranks have none."""
    return joint_of(SwiGLU(4, 6), torch.randn(5, 4))


def separated(module: fx.GraphModule) -> fx.GraphModule:
    return SerializeCommunicators()(Overlap()(module))


def most_in_flight(module: fx.GraphModule) -> tuple[int, int]:
    """The most communicators, and the most collectives, that are in flight at any place of the graph."""
    flying: dict[fx.Node, str] = {}
    groups = collectives = 0
    starts = set(collective_nodes(module.graph))
    for node in module.graph.nodes:
        if node in starts:
            flying[node] = str(node.args[-1])
        elif node.target is c10d.wait_tensor.default:
            del flying[node.all_input_nodes[0]]
        groups, collectives = max(groups, len(set(flying.values()))), max(collectives, len(flying))
    assert not flying, "a program ends with nothing in flight: the next one may use any communicator"
    return groups, collectives


def order_of_all(modules: Sequence[fx.GraphModule], mesh: MeshSpec) -> nx.DiGraph:
    """Collectives of all ranks, each once (its ranks, which one of theirs), with an edge from every one to the
    next that one of its ranks issues."""
    order = nx.DiGraph()
    for rank, module in enumerate(modules):
        counts: Counter[tuple[int, ...]] = Counter()
        issued: list[tuple[tuple[int, ...], int]] = []
        for node in collective_nodes(module.graph):
            members = mesh.group(rank, simulated_group_axes(str(node.args[-1])))
            issued.append((members, counts[members]))
            counts[members] += 1
        order.add_nodes_from(issued)
        order.add_edges_from(itertools.pairwise(issued))
    return order


@pytest.mark.parametrize(("mesh", "seed"), CASES, ids=str)
def test_one_order_over_all_communicators_and_one_at_a_time(
    mesh: MeshSpec, seed: int, layers: JointGraph
) -> None:
    """A circle among collectives is a deadlock as soon as each GPU runs one at a time, in the order of issue."""
    assignment = random_assignment(layers, mesh, random.Random(seed))
    parts = shards(layers, assignment, mesh, values_of(layers))
    modules: list[fx.GraphModule] = []

    def watched(module: fx.GraphModule) -> fx.GraphModule:
        modules.append(separated(module))
        return modules[-1]

    ranks = lowered(layers, assignment, mesh)
    found = run_phases(layers, ranks, parts, mesh, watched)
    assert max(most_in_flight(module)[0] for module in modules) == 1
    for phase in (modules[: len(ranks)], modules[len(ranks) :]):
        order = order_of_all(phase, mesh)
        assert len({members for members, _ in order}) > 2
        assert nx.is_directed_acyclic_graph(order)
    wanted = run_phases(layers, lowered(layers, assignment, mesh), parts, mesh, Overlap())
    for got, want in zip(found, wanted, strict=True):
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_otherwise_several_are_in_flight(layers: JointGraph) -> None:
    """The tests above would show nothing if communicators never met, or if nothing were left in flight."""
    mesh = MeshSpec({"a": 2, "b": 2})
    both: list[tuple[int, int]] = []
    alone: list[tuple[int, int]] = []
    for seed in range(2):
        for phases in lowered(layers, random_assignment(layers, mesh, random.Random(seed)), mesh):
            reordered = Overlap()(phases.forward)
            both.append(most_in_flight(reordered))
            alone.append(most_in_flight(SerializeCommunicators()(reordered)))
    assert max(groups for groups, _ in both) > 1
    assert max(collectives for _, collectives in alone) > 1


def test_what_moves() -> None:
    """A gather over dp is waited for before a reduction over tp starts; two over tp stay in flight together."""
    graph = fx.Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    g = graph.call_function(c10d.all_gather_into_tensor.default, (w, 2, "dp"))
    r = graph.call_function(c10d.all_reduce.default, (x, "sum", "tp"))
    s = graph.call_function(c10d.all_reduce.default, (x, "max", "tp"))
    waits = [graph.call_function(c10d.wait_tensor.default, (n,)) for n in (r, s, g)]
    graph.output(tuple(waits))
    module = SerializeCommunicators()(fx.GraphModule(nn.Module(), graph))
    assert [n.name for n in module.graph.nodes if n.op == "call_function"] == [
        g.name,
        waits[2].name,
        r.name,
        s.name,
        waits[0].name,
        waits[1].name,
    ]
