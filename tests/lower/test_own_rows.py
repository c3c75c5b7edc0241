"""Rows of own experts: sent there by the ranks of their tokens, and returned, instead of gathered and scattered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, Plan, find_plan
from autoshard.plan.judged import prices_of
from autoshard.planning import canonical_capture
from autoshard.verification.part_errors import shard_of
from cost_model.mesh import simulated_groups
from cost_model.profile import Profile
from passes.ir.graph_pass import tensor_at
from passes.ir.joint import JointGraph, ops_by_phase
from passes.layout.layout import Layout, NodeLayouts
from passes.lower.partition import partition
from passes.lower.phases import Phases, split_phases
from passes.ops.collective_ops import exchange_rows, returned, sent
from passes.ops.routed_ops import routed_mm
from passes.plan.decide import decide
from passes.plan.planned_graph import PlannedGraph
from passes.schedule.schedule import behind_ids, scheduled
from passes.search.find import Sought, find_assignment
from passes.search.search_terms import Narrowing, boundary_of
from passes.states.compute_again import compute_again
from tests.schedule.planned import run_phases, shards

aten, ours, c10d = torch.ops.aten, torch.ops.autoshard, torch.ops._c10d_functional


class Experts(nn.Module):
    """As many experts as are wanted of each token, between a router and a weighted sum."""

    def __init__(self, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(7, experts)
        self.up = nn.Parameter(torch.randn(experts, 7, 13))
        self.down = nn.Parameter(torch.randn(experts, 13, 7))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.chosen, -1)
        rows = x[:, :, None, :].expand(*ids.shape, 7)
        hidden = self._hidden(routed_mm(rows, self.up, ids, 0, len(self.up)))
        y = routed_mm(hidden, self.down, ids, 0, len(self.down)) * weights[..., None]
        return (x + y.sum(2)).square().mean()

    def _hidden(self, rows: Tensor) -> Tensor:
        return rows.relu()


class Gated(Experts):
    """Whose first product is read in two halves."""

    def __init__(self, experts: int, chosen: int) -> None:
        super().__init__(experts, chosen)
        self.up = nn.Parameter(torch.randn(experts, 7, 26))

    def _hidden(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, -1)
        return gate.sigmoid() * up


def wire() -> Profile:
    """Where bytes on the wire alone count."""
    cpu = Profile.named("cpu")
    links = tuple(
        replace(link, latency_seconds=1e-12, bytes_per_second=link.bytes_per_second / 1e6)
        for link in cpu.links
    )
    return replace(cpu, links=links, collective_launch_seconds=1e-12)


def planned(model: nn.Module, x: Tensor, mesh: MeshSpec, dims: Sequence[int]) -> Plan:
    """Experts are split over all axes, each of which has parts of the tokens in one of `dims`. x: of all ranks."""
    experts, tokens = [Shard(0)] * len(mesh.names), list(map(Shard, dims))
    for placement, count in zip(tokens, mesh.sizes, strict=True):
        x = x.tensor_split(count, placement.dim)[0]
    pins = {"up": experts, "down": experts}
    return find_plan(model, mesh, (x,), profile=wire(), constraints=pins, in_placements=(tokens,))


def programs(joint: JointGraph, planned: PlannedGraph, mesh: MeshSpec) -> list[Phases]:
    groups = simulated_groups(mesh)
    modules = [partition(joint, planned, mesh, rank, groups).module for rank in range(mesh.device_count)]
    return [split_phases(module, joint.inputs, joint.outputs) for module in modules]


def check(
    model: nn.Module,
    x: Tensor,
    joint: JointGraph,
    planned: PlannedGraph,
    mesh: MeshSpec,
    ranks: Sequence[Phases],
) -> None:
    """Loss and gradients of every rank's program are those of the model."""
    named = dict(model.named_parameters())
    given = {"param": lambda spec: named[spec.name].detach(), "input": lambda _: x}
    ones = lambda _: torch.ones((), dtype=torch.float64)
    values = [given.get(spec.kind, ones)(spec) for _, spec in joint.given]
    found = run_phases(joint, ranks, shards(joint, planned.layouts, mesh, values), mesh, scheduled)
    loss = model(x)
    wanted = {"output": loss.detach()}
    wanted |= dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    ends = [(i, spec) for i, (spec, node) in enumerate(joint.returned) if node is not None]
    for (i, spec), layout in zip(ends, planned.layouts["output"].operands, strict=True):
        whole = wanted["output" if spec.kind == "output" else spec.name]
        for rank in range(mesh.device_count):
            got = sum(found[r][i] for r in mesh.group(rank, [axis for axis, _ in layout.partial]))
            own = shard_of(whole, layout, mesh, rank)
            torch.testing.assert_close(got, own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mesh", "experts", "chosen", "dims", "steps"),
    [
        ({"ep": 4}, 6, 2, [1], ("return_rows", "send_rows")),  # one rank has no expert
        ({"ep": 3}, 4, 1, [1], ("send_rows",)),
        ({"ep": 2, "tp": 2}, 8, 2, [0, 1], ("return_rows", "send_rows")),
        pytest.param({"ep": 4}, 12, 1, [0], ("send_rows",), marks=pytest.mark.slow),
        pytest.param({"a": 2, "b": 2}, 8, 1, [0, 0], ("send_rows",), marks=pytest.mark.slow),
        pytest.param({"a": 3, "b": 2}, 8, 2, [1, 0], ("return_rows", "send_rows"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_travel_alone(
    mesh: dict[str, int], experts: int, chosen: int, dims: Sequence[int], steps: tuple[str, ...]
) -> None:
    """Loss and gradients of every rank's program are those of the model."""
    torch.manual_seed(0)
    model = Experts(experts, chosen).double()
    size = 6 if 3 in mesh.values() else 8
    x = torch.randn(size, size, 7, dtype=torch.float64)
    joint = canonical_capture(model, (x,), {}).joint
    plan = planned(model, x, MeshSpec(mesh), dims)
    moved = [step.name for step in plan.collectives if "_rows" in step.name]
    assert tuple(sorted(set(moved))) == steps
    if len(set(dims)) == 2:  # at once from the parts of both
        assert all(step.axes == tuple(mesh) for step in plan.collectives if "_rows" in step.name)
    assert Plan.from_json(plan.to_json()).step_time == plan.step_time
    ranks = programs(joint, plan.planned, plan.mesh)
    for phases in ranks:
        assert phases.backward is not None
        nodes = [*phases.forward.graph.nodes, *phases.backward.module.graph.nodes]
        assert sum(node.target is exchange_rows for node in nodes) == len(moved)
        assert not any(node.target in (sent, returned) for node in nodes)
    check(model, x, joint, plan.planned, plan.mesh, ranks)


def test_rows_travel_for_the_backward_alone() -> None:
    """The forward gathers experts. The backward sends rows: what the forward kept, of which it makes the two halves
    again, and the gradient. Ids are gathered for each of its products, and rows stay in order between these."""
    torch.manual_seed(0)
    model, mesh = Gated(6, 2).double(), MeshSpec({"ep": 3})
    x = torch.randn(6, 4, 7, dtype=torch.float64)
    joint = canonical_capture(model, (x,), {}).joint
    joint = compute_again(
        joint, [n.name for n in joint.graph.nodes if "split" in n.name or n.name == "sigmoid"]
    )
    forward, backward = ops_by_phase(joint)
    products = [node for node in joint.graph.nodes if node.target is ours.routed_mm.default]
    allowed = {node.name: of_tokens if node in forward else of_experts for node in products}
    allowed |= {node.name: of_tokens for node in {tensor_at(node, 2) for node in products}}
    allowed |= {node.name: of_experts for node in backward if node.target is ours.routed_outer.default}
    tokens, experts = Layout((("ep",), (), ())), Layout((("ep",), (), ()))
    boundary = boundary_of(joint, {"up": experts, "down": experts}, {0: tokens}, {})
    prices = prices_of(wire(), mesh, "eager")
    found = find_assignment(Sought(joint, prices, boundary, narrowing=Narrowing(allowed=allowed)))
    planned = decide(joint, found.assignment, prices)
    ranks = programs(joint, planned, mesh)
    for phases in ranks:
        assert phases.backward is not None
        nodes = [*phases.backward.module.graph.nodes]
        assert sum(node.target is exchange_rows for node in nodes) == 4
        assert not any(node.target in (sent, returned, aten.index_put.default) for node in nodes)
    check(model, x, joint, planned, mesh, ranks)


def of_tokens(strategies: Sequence[NodeLayouts]) -> list[int]:
    return [i for i, one in enumerate(strategies) if one.results[0].dims[0] == ("ep",)]


def of_experts(strategies: Sequence[NodeLayouts]) -> list[int]:
    """Rows that travelled."""
    return [i for i, one in enumerate(strategies) if one.operands[0].partial == (("ep", "routed"),)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("dims", "sizes", "parts"),
    [
        ([0], [2, 0, 3], [3]),
        ([1], [2, 0, 3], [3]),
        ([0, 1], [2, 3, 1, 4], [2, 2]),
        ([1, 0], [3, 2, 5], [2, 1]),
    ],
    ids=str,
)
def test_who_sends_what(dims: list[int], sizes: list[int], parts: list[int], count: int) -> None:
    """Token by token, of one row or two: of 5 x 5 each rank has its part; ranks have experts 0, 1 and 2, none, 3, and
    none. Of expert 4 there is none."""
    ids = torch.randint(0, 5, (5, 5, count), generator=torch.Generator().manual_seed(dims[0]))
    ids = ids if count > 1 else ids[..., 0]
    ranks = math.prod(parts)
    experts = [3, 0, 1, 0][:ranks]
    owner = lambda expert: 0 if expert < 3 else 2 if expert < 4 and ranks > 2 else None

    def source(token: int) -> int:
        rank, left = 0, list(sizes)
        for dim, n in zip(dims, parts, strict=True):
            ends, left = list(itertools.accumulate(left[:n])), left[n:]
            rank = rank * n + next(i for i, end in enumerate(ends) if divmod(token, 5)[dim] < end)
        return rank

    flat = ids.flatten().tolist()
    asked = [{owner(flat[t * count + i]) for i in range(count)} for t in range(25)]
    for rank in range(ranks):
        places = [p for expert in range(4) for p, e in enumerate(flat) if e == expert and owner(e) == rank]
        sent, leaving, slots, coming = torch.ops.autoshard.routes(
            ids, torch.tensor(places, dtype=torch.int64), dims, sizes, parts, rank, experts, count
        )
        own = [t for t in range(25) if source(t) == rank]
        wanted = [[i for i, t in enumerate(own) if to in asked[t]] for to in range(ranks)]
        assert sent[: leaving[-1]].tolist() == list(itertools.chain(*wanted))
        assert leaving.tolist() == [sum(map(len, wanted[: to + 1])) for to in range(ranks)]
        arrived = [t for by in range(ranks) for t in range(25) if source(t) == by and rank in asked[t]]
        assert [arrived[slot] for slot in slots.tolist()] == [place // count for place in places]
        assert coming.tolist() == [sum(source(t) <= by for t in arrived) for by in range(ranks)]


def test_rows_go_behind_the_ids_that_say_where_to() -> None:
    """Their transfer has its turn as a gather, which needs no ids."""
    graph = fx.Graph()
    rows, ids = graph.placeholder("rows"), graph.placeholder("ids")
    gathered = graph.call_function(c10d.all_gather_into_tensor.default, (ids, 2, "g"))
    known = graph.call_function(c10d.wait_tensor.default, (gathered,))
    moves = []
    for turn in ((0, 3), (0, 5)):
        started = graph.call_function(exchange_rows, (rows, known, known, known, "g"))
        moves.append((started, graph.call_function(c10d.wait_tensor.default, (started,))))
        for node in moves[-1]:
            node.meta = {"turn": turn, "places": (turn[1], 6)}
    for node in (gathered, known):
        node.meta["turn"] = (0, 4)
    behind_ids(graph)
    assert [node.meta for node in moves[0]] == [{"turn": (0, 4, 1)}] * 2
    assert [node.meta for node in moves[1]] == [{"turn": (0, 5), "places": (5, 6)}] * 2
