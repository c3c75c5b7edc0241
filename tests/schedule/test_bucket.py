"""Buckets: every rank merges alike, values stay, and what is merged is what prices say."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from passes.plan.transfers import Move
from passes.redistribution.lower_redistribute import collective_nodes
from passes.redistribution.redistribute import Redistributor
from passes.schedule.bucket import Bucket
from passes.schedule.bucket_plan import Item, Wire, bucketed_order, least_end
from passes.schedule.issue_order import IssueOrder, MergeRule, Side, issue_order
from passes.schedule.overlap import Overlap
from passes.schedule.schedule import scheduled
from passes.search.find import Sought, find_assignment
from passes.search.search_terms import boundary_of
from passes.simulate.lockstep import simulate
from passes.strategies.prices import Prices
from tests.models import SwiGLU
from tests.profiles import slow_compute
from tests.redistribution.layouts import link_prices
from tests.schedule.planned import (
    collectives,
    followed_assignment,
    joint_of,
    random_assignment,
    run_phases,
    shards,
    unmerged,
    values_of,
)

WHOLE = Layout.replicated(0)
MESHES = [{"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 3}]


class Layers(nn.Module):
    """Six parameters of unlike shapes, the first as long as no mesh divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(torch.relu(self.up(x)))).square()


@pytest.fixture(scope="module")
def layers() -> JointGraph:
    return joint_of(Layers(), torch.randn(5, 4))


@dataclass(frozen=True)
class Timed:
    """A start, and seconds a byte."""

    start: float
    per_byte: float

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        return self.start + self.per_byte * nbytes


def priced(mesh: MeshSpec, start: float, per_byte: float) -> Prices:
    """Those of the shipped CPU profile but for the collectives."""
    prices = prices_of(Profile.load("cpu"), mesh, "eager")
    timed = Redistributor(mesh, Timed(start, per_byte))
    return replace(prices, redistributor=timed, merged=timed)


def sliced_joint(mesh: MeshSpec, joint: JointGraph) -> Assignment:
    """Parameters in shards, batch split: gathers for every use, reduce-scatters of gradients."""
    held = {n.name: Layout((("a",),) + ((),) * (n.meta["val"].ndim - 1)) for n in joint.placeholders}
    return followed_assignment(joint, mesh, held, "a")


def at_random(seed: int) -> MergeRule:
    """Any cut of gathers, and of reductions, of one axis and dtype."""
    rng = random.Random(seed)

    def merge(side: Side, moves: Sequence[Move], ops: Sequence[fx.Node]) -> list[Sequence[Move]]:
        alike: dict[object, list[Move]] = {}
        for move in moves:
            alike.setdefault((bool(move.held.partial), any(move.wanted.dims)), []).append(move)
        groups: list[Sequence[Move]] = []
        for same in alike.values():
            while same:
                count = rng.randint(1, 4) if len(same) < 4 else rng.randint(2, 4)
                groups.append(same[:count])
                same = same[count:]
        return groups

    return merge


def bucketed(joint: JointGraph, assignment: Assignment, prices: Prices) -> IssueOrder:
    moved = chosen_steps(joint, assignment, prices.redistributor, prices.merged)
    return bucketed_order(joint, assignment, prices, moved)


def phases_of(
    joint: JointGraph,
    assignment: Assignment,
    mesh: MeshSpec,
    turns: IssueOrder,
    redistributor: Redistributor,
) -> list[Phases]:
    groups = simulated_groups(mesh)
    planned = unmerged(joint, assignment, redistributor, turns)
    modules = [partition(joint, planned, mesh, rank, groups).module for rank in range(mesh.device_count)]
    return [split_phases(module, joint.inputs, joint.outputs) for module in modules]


def check_equal(joint: JointGraph, assignment: Assignment, mesh: MeshSpec, ranks: list[Phases]) -> None:
    """The merged graphs compute what the plain ones do, and groups issue the same list."""
    parts = shards(joint, assignment, mesh, values_of(joint))
    groups = simulated_groups(mesh)
    planned = unmerged(joint, assignment, Redistributor(mesh, link_prices(mesh)))
    plain = [partition(joint, planned, mesh, rank, groups).module for rank in range(mesh.device_count)]
    wanted = simulate(plain, parts, mesh)
    found = run_phases(joint, ranks, parts, mesh, scheduled)
    for got, want in zip(found, wanted, strict=True):
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(got, want, strict=True))
    for one, two in itertools.combinations(range(len(ranks)), 2):
        for phase in ("forward", "backward"):
            first, second = (collectives(_graph(ranks[r], phase)) for r in (one, two))
            for group in {g for _, g, _ in first}:
                if two in mesh.group(one, group.removeprefix("axes:").split(",")):
                    assert [c for c in first if c[1] == group] == [c for c in second if c[1] == group]


def _graph(phases: Phases, phase: str) -> fx.GraphModule:
    assert phases.backward is not None
    return phases.forward if phase == "forward" else phases.backward.module


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_random_layouts_and_prices_that_ask_for_buckets(
    axes: dict[str, int], seed: int, layers: JointGraph
) -> None:
    """Uneven and empty shards."""
    mesh = MeshSpec(axes)
    prices, assignment, turns = merged_at_random(layers, mesh, seed)
    check_equal(layers, assignment, mesh, phases_of(layers, assignment, mesh, turns, prices.redistributor))


def merged_at_random(layers: JointGraph, mesh: MeshSpec, seed: int) -> tuple[Prices, Assignment, IssueOrder]:
    """Starting costs so much that all that may be merged is."""
    prices = priced(mesh, 1.0, 1e-9)
    assignment = random_assignment(layers, mesh, random.Random(seed))
    return prices, assignment, bucketed(layers, assignment, prices)


def test_random_layouts_made_buckets(layers: JointGraph) -> None:
    """Otherwise the test above would show nothing."""
    turns = [merged_at_random(layers, MeshSpec({"a": 3}), seed)[2].turns for seed in range(3)]
    assert sum(len(each) - len(set(each.values())) for each in turns) > 5


@pytest.mark.parametrize("axes", [{"a": 3}, {"a": 4}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_any_cut_of_sharded_layers(axes: dict[str, int], seed: int, layers: JointGraph) -> None:
    """Gathers and reduce-scatters of dims 5, 4 and 3 over 3 and 4 ranks, merged at random."""
    mesh = MeshSpec(axes)
    assignment = sliced_joint(mesh, layers)
    redistributor = Redistributor(mesh, link_prices(mesh))
    turns = issue_order(layers, assignment, merge=at_random(seed))
    ranks = phases_of(layers, assignment, mesh, turns, redistributor)
    before = sum(len(collective_nodes(_graph(p, "backward").graph)) for p in ranks)
    check_equal(layers, assignment, mesh, ranks)
    assert sum(len(collective_nodes(_graph(p, "backward").graph)) for p in ranks) < before


class Branches(nn.Module):
    """Two convolutions, of tensors that are both ready before either is read."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv1d(1, 1, kernel, padding=kernel // 2) for kernel in (3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = x.relu(), x.neg().relu()
        return self.one(up) + self.two(down)


@pytest.mark.parametrize(
    ("rows", "expected"), [((4, 4, 4), [2, 1]), ((5, 0, 7), [4, 3]), ((1, 10, 1), [4, 3])], ids=str
)
def test_halos_that_may_travel_together(rows: tuple[int, ...], expected: list[int]) -> None:
    """What the convolutions read in one all-to-all, where starting costs all. Uneven rows are evened out before and
    after, by an all-to-all each."""
    mesh, joint = MeshSpec({"a": 3}), joint_of(Branches(), torch.randn(1, 1, 12))
    assignment = in_space(joint, mesh, rows)
    counts: list[int] = []
    for start, per_byte in ((0.0, 1.0), (10.0, 1e-9)):
        prices = priced(mesh, start, per_byte)
        turns = bucketed(joint, assignment, prices)
        ranks = phases_of(joint, assignment, mesh, turns, prices.redistributor)
        check_equal(joint, assignment, mesh, ranks)
        exchanges = [n for n in collective_nodes(Bucket()(ranks[1].forward).graph) if n.target is ALL_TO_ALL]
        counts.append(len(exchanges))
    assert counts == expected


ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default


def in_space(joint: JointGraph, mesh: MeshSpec, rows: tuple[int, ...]) -> Assignment:
    """Input and output in those rows: what the search makes of them where computing is expensive."""
    layout = Layout.of((1, 1, 12), mesh, ((), (), ("a",)), sizes=(None, None, rows))
    ends = boundary_of(joint, parameters={}, inputs={0: layout}, outputs={0: layout})
    return find_assignment(Sought(joint, prices_of(slow_compute(), mesh), ends)).assignment


@pytest.fixture(scope="module")
def blocks() -> JointGraph:
    """Six weights of 512 bytes. The backward reads all but the first block's w1 and w3."""
    return joint_of(nn.Sequential(SwiGLU(8, 16), SwiGLU(8, 16)), torch.randn(4, 8))


def counted(joint: JointGraph, start: float, per_byte: float) -> list[int]:
    """Collectives of rank 0 in forward and backward."""
    mesh = MeshSpec({"a": 4})
    prices = priced(mesh, start, per_byte)
    assignment = sliced_joint(mesh, joint)
    turns = bucketed(joint, assignment, prices)
    phases = phases_of(joint, assignment, mesh, turns, prices.redistributor)[0]
    return [len(collective_nodes(Bucket()(_graph(phases, p)).graph)) for p in ("forward", "backward")]


def test_starts_decide_how_many(blocks: JointGraph) -> None:
    """Without a start, 6 gathers, then 4 gathers and 6 reduce-scatters; where it outweighs all, one of each."""
    assert counted(blocks, 0.0, 1.0) == [6, 10]
    assert counted(blocks, 10.0, 1e-9) == [1, 2]


def test_a_bucket_ends_where_starting_is_little_of_its_time(blocks: JointGraph) -> None:
    """A start of 1 s is less than a tenth of what 1024 bytes take, two weights; computing takes nothing."""
    assert counted(blocks, 1.0, 10 / 1024) == [3, 5]


def ends(
    blocks: JointGraph, ready: Sequence[float], start: float, per_byte: float, efficiency: float = 1.0
) -> list[int]:
    """Sizes of the groups into which gradients of 512 bytes are cut, each ready at its time."""
    prices = priced(MeshSpec({"a": 4}), start, per_byte)
    wire = Wire((("all_reduce", ("a",), "sum"),), prices, lambda kind, axes: math.inf)
    items = [
        Item(Move(blocks.output_node, i, blocks.output_node, WHOLE, WHOLE, True), r, (512,))
        for i, r in enumerate(ready)
    ]
    return [len(group) for group in least_end(items, wire, efficiency)]


def test_what_nothing_hides_travels_together(blocks: JointGraph) -> None:
    """Gradients ready far apart: with all of it hidden each goes at once, with nothing hidden one start is paid."""
    assert ends(blocks, [0.0, 10.0, 20.0], 1.0, 1e-9) == [1, 1, 1]
    assert ends(blocks, [0.0, 10.0, 20.0], 1.0, 1e-9, efficiency=0.0) == [3]


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_the_best_of_all(seed: int, blocks: JointGraph) -> None:
    """Against every cut of up to 8 gradients: none has the last arrive earlier."""
    rng = random.Random(seed)
    count = rng.randint(1, 8)
    ready = list(itertools.accumulate(rng.random() for _ in range(count)))
    start, per_byte = rng.choice([0.1, 0.5, 2.0]), rng.choice([0.1, 1.0]) / 512

    def end(cut: Sequence[int]) -> float:
        time, first = 0.0, 0
        for size in cut:
            first += size
            time = max(time, ready[first - 1]) + start + size * 512 * per_byte
        return time

    every = [
        [b - a for a, b in itertools.pairwise([0, *where, count])]
        for k in range(count)
        for where in itertools.combinations(range(1, count), k)
    ]
    found = ends(blocks, ready, start, per_byte)
    assert end(found) == pytest.approx(min(map(end, every)), abs=1e-3)  # the copies are priced, and little


def test_alone_in_its_bucket_a_collective_stays(layers: JointGraph) -> None:
    mesh = MeshSpec({"a": 4})
    assignment = sliced_joint(mesh, layers)
    plain = phases_of(
        layers,
        assignment,
        mesh,
        issue_order(layers, assignment).turns,
        Redistributor(mesh, link_prices(mesh)),
    )[0]
    graph = _graph(plain, "backward")
    nodes = list(graph.graph.nodes)
    assert list(Bucket()(graph).graph.nodes) == nodes
    assert Overlap()(graph) is graph


def test_what_one_step_left_in_a_buffer_the_next_sends_from_there() -> None:
    """Gradients of [2, 3] and [4], reduced over two axes one after the other: joined once, and cut once."""
    graph = fx.Graph()
    results: list[fx.Node] = []
    c10d, gradients = torch.ops._c10d_functional, [graph.placeholder(name) for name in "gh"]
    for transfer, (node, shape) in enumerate(zip(gradients, ([2, 3], [4]), strict=True)):
        node.meta["val"] = torch.empty(shape)
        for step, group in enumerate(("axes:a", "axes:b")):
            node = graph.call_function(c10d.all_reduce.default, (node, "sum", group))
            node.meta = {"val": torch.empty(shape), "turn": 0, "step": step, "transfer": transfer}
            node = graph.call_function(c10d.wait_tensor.default, (node,))
            node.meta = {"val": torch.empty(shape), "turn": 0}
        results.append(node)
    graph.output(tuple(results))
    Bucket()(module := fx.GraphModule({}, graph))
    (joined,) = (node for node in module.graph.nodes if node.target is torch.ops.aten.cat.default)
    first, second = collective_nodes(module.graph)
    assert first.args[0] is joined
    assert second.all_input_nodes[0].all_input_nodes == [first]
    cuts = [node for node in module.graph.nodes if node.target is torch.ops.aten.slice.Tensor]
    assert [cut.all_input_nodes[0].all_input_nodes[0] for cut in cuts] == [second, second]
