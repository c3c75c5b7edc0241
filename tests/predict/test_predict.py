"""A plan's step on the timeline: by hand, and against the search's own prices."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, fx, nn

from autoshard import MeshSpec, Plan, Profile, find_plan
from autoshard.plan.judged import prices_of
from cost_model.compute import ComputePrices
from cost_model.measurements import DeviceRates, Lateness, MatmulRates
from cost_model.mesh import simulated_group_axes, simulated_groups
from passes.ir.joint import GraphInput, GraphOutput
from passes.layout.layout import Layout, NodeLayouts
from passes.lower.phases import Backward, Phases
from passes.lower.rank_program import Schedule, rank_program
from passes.plan.decide import decide
from passes.predict.predict_program import predict_phases
from passes.predict.predict_step import predicted_step, slowest_ranks
from passes.predict.prediction import Prediction
from passes.redistribution.redistribute import Redistributor
from passes.schedule.overlap import Overlap
from passes.strategies.prices import Prices
from passes.strategies.traffic import eager_traffic
from tests.profiles import slow_compute
from tests.runtime.graphs import Local
from tests.schedule.planned import joint_of, random_assignment, unmerged

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
US = 1e-6


@dataclass(frozen=True)
class PerByte:
    """10 us for a megabyte of any collective."""

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        return nbytes * 1e-11


def round_prices(mesh: MeshSpec, efficiency: float, launch: float = 2 * US) -> Prices:
    """Eager kernels at 1 TB/s and 2 us to launch; an update of 100 us a megabyte."""
    device = DeviceRates(launch, 1e12, (MatmulRates("float32", (1e6,), (1e12,)),))
    return Prices(
        mesh=mesh,
        compute=ComputePrices(replace(Profile.named("cpu"), device=device)),
        redistributor=Redistributor(mesh, PerByte()),
        merged=Redistributor(mesh, PerByte()),
        optimizer_seconds=lambda nbytes: nbytes * 1e-10,
        traffic=eager_traffic,
        overlap_efficiency=efficiency,
    )


def overlapping() -> fx.GraphModule:
    """x of 1 MB: relu, its sum over the ranks, meanwhile another relu, then a relu of the sum."""
    local = Local()
    x = local.input(250, 1000)
    a = local.call(aten.relu.default, x)
    r = local.call(c10d.all_reduce.default, a, "sum", "axes:tp", serves="layer")
    b = local.call(aten.relu.default, x)
    c = local.call(aten.relu.default, local.call(c10d.wait_tensor.default, r))
    return local.module(b, c)


def forward_only(module: fx.GraphModule) -> Phases:
    outputs = (GraphOutput("output", "output 0"), GraphOutput("output", "output 1", 1))
    return Phases(module, (GraphInput("input", "x"),), outputs, None)


# A relu reads and writes 1 MB each: 2 us, and 2 us to launch. The all-reduce takes 10 us.
@pytest.mark.parametrize(
    ("efficiency", "micros", "exposed"),
    [
        (1.0, 4 + 10 + 4, 10 - 4),
        (0.0, 4 + 4 + 10 + 4, 10),
        (0.5, 4 + (6 + 6) + 4, 10 - 4 + 2),  # side by side both at 2/3: 6 us for the relu, 6 us are left
    ],
)
def test_by_hand(efficiency: float, micros: float, exposed: float) -> None:
    mesh = MeshSpec({"dp": 2, "tp": 4})
    found = predict_phases(forward_only(overlapping()), round_prices(mesh, efficiency), simulated_group_axes)
    assert found.seconds == pytest.approx(micros * US)
    (forward,) = found.phases
    assert (forward.name, forward.seconds) == ("forward", found.seconds)
    assert forward.compute == found.compute == pytest.approx(12 * US)
    assert forward.communication == pytest.approx(10 * US)
    assert forward.exposed == found.exposed == pytest.approx(exposed * US)
    (moved,) = found.collectives
    assert (moved.kind, moved.axes, moved.nbytes, moved.serves) == ("all_reduce", ("tp",), 10**6, "layer")
    assert moved.seconds == pytest.approx(10 * US)
    assert moved.start == pytest.approx(4 * US)
    assert moved.exposed == pytest.approx(exposed * US)


def test_who_waits_stands_for_ranks_that_come_late() -> None:
    """Behind 4 us of computing they come 6 us late, of which the relu beside the sum hides 4."""
    late = replace(
        round_prices(MeshSpec({"dp": 2, "tp": 4}), 1.0), lateness=Lateness((1 * US, 7 * US), (0.0, 12 * US))
    )
    found = predict_phases(forward_only(overlapping()), late, simulated_group_axes)
    assert found.seconds == pytest.approx((4 + 10 + 2 + 4) * US)
    assert found.compute == pytest.approx(12 * US)
    (moved,) = found.collectives
    assert moved.seconds == pytest.approx(10 * US)
    assert moved.exposed == found.exposed == pytest.approx((10 - 4 + 2) * US)


def test_where_ranks_met_they_are_late_for_what_they_computed_since() -> None:
    """A relu and a sum, three times: 6 us late behind each relu of 4 us, not 12 or 18 behind the others."""
    local = Local()
    x = local.input(250, 1000)
    for _ in range(3):
        reduced = local.call(c10d.all_reduce.default, local.call(aten.relu.default, x), "sum", "axes:tp")
        x = local.call(c10d.wait_tensor.default, reduced)
    late = replace(
        round_prices(MeshSpec({"dp": 2, "tp": 4}), 1.0), lateness=Lateness((1 * US, 7 * US), (0.0, 12 * US))
    )
    found = predict_phases(forward_only(local.module(x)), late, simulated_group_axes)
    assert found.seconds == pytest.approx(3 * (4 + 10 + 6) * US)


def test_two_of_eight_ranks_are_less_late_than_four() -> None:
    """6 us over four ranks, and 6 * (1/3) / (3/5) over two."""
    local = Local()
    x = local.input(250, 1000)
    reduced = local.call(c10d.all_reduce.default, local.call(aten.relu.default, x), "sum", "axes:dp")
    late = replace(
        round_prices(MeshSpec({"dp": 2, "tp": 4}), 1.0),
        lateness=Lateness((1 * US, 7 * US), (0.0, 12 * US), 4),
    )
    module = local.module(local.call(c10d.wait_tensor.default, reduced))
    found = predict_phases(forward_only(module), late, simulated_group_axes)
    assert found.exposed - found.collectives[0].seconds == pytest.approx(6 * (1 / 3) / (3 / 5) * US)


def test_bytes_that_price_a_collective() -> None:
    local = Local()
    x = local.input(8, 4)  # 128 bytes
    gathered = local.call(c10d.all_gather_into_tensor.default, x, 4, "axes:tp")
    scattered = local.call(c10d.reduce_scatter_tensor.default, x, "sum", 4, "axes:tp")
    exchanged = local.call(c10d.all_to_all_single.default, x, [1, 1, 1, 1], [2, 2, 2, 2], "axes:tp")
    reduced = local.call(c10d.all_reduce.default, x, "sum", "axes:dp")
    module = local.module(
        *(local.call(c10d.wait_tensor.default, n) for n in (gathered, scattered, exchanged, reduced))
    )
    found = predict_phases(
        forward_only(module), round_prices(MeshSpec({"dp": 2, "tp": 4}), 0.0), simulated_group_axes
    )
    assert [(c.kind, c.axes, c.nbytes) for c in found.collectives] == [
        ("all_gather", ("tp",), 512),
        ("reduce_scatter", ("tp",), 128),
        ("all_to_all", ("tp",), 128),
        ("all_reduce", ("dp",), 128),
    ]


def test_phases_come_one_after_the_other_and_the_optimizer_last() -> None:
    """x of 1 MB is a parameter: its gradient is reduced in the backward, then it is updated."""
    forward = Local()
    x = forward.input(250, 1000)
    program = forward.module(forward.call(aten.relu.default, x))
    backward = Local()
    tangent = backward.input(250, 1000)
    gradient = backward.call(aten.relu.default, tangent)
    reduced = backward.call(c10d.all_reduce.default, gradient, "sum", "axes:dp")
    module = backward.module(backward.call(c10d.wait_tensor.default, reduced))
    phases = Phases(
        program,
        (GraphInput("param", "w"),),
        (GraphOutput("output", "output 0"),),
        Backward(module, (), (), (GraphInput("tangent", "tangent 0"),), (GraphOutput("grad", "w"),)),
    )
    found = predict_phases(phases, round_prices(MeshSpec({"dp": 2}), 1.0), simulated_group_axes)
    assert [(p.name, p.seconds) for p in found.phases] == [
        ("forward", pytest.approx(4 * US)),
        ("backward", pytest.approx(14 * US)),
        ("optimizer", pytest.approx(100 * US)),
    ]
    assert found.seconds == pytest.approx(118 * US)
    assert found.collectives[0].start == pytest.approx(8 * US)


class Net(nn.Module):
    """Widths that 2 and 4 divide, and a scalar loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


AXES = {"dp": 2, "tp": 2}


def at_once(module: fx.GraphModule) -> fx.GraphModule:
    """Every collective waited for where it starts."""
    for node in Overlap()(module).graph.nodes:
        if node.target is c10d.wait_tensor.default:
            node.args[0].append(node)
    return module


def of_plan(
    mesh: MeshSpec, profile: Profile, backend: str, schedule: Schedule = at_once
) -> tuple[Prediction, Plan]:
    model, x = Net(), torch.randn(8, 16)
    plan = find_plan(model, mesh, (x,), profile=profile, backend=backend)
    found = predicted_step(
        joint_of(model, x),
        plan.planned,
        prices_of(profile, mesh, backend),
        schedule=schedule,
    )
    return found, plan


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_collectives_are_those_of_the_plan(backend: str) -> None:
    found, plan = of_plan(MeshSpec(AXES), slow_compute(), backend)
    assert len(plan.collectives) > 0
    mine = Counter((c.phase, c.kind, c.axes, c.nbytes) for c in found.collectives)
    theirs = Counter(
        (c.phase, c.kind, tuple(sorted(c.axes, key=plan.mesh.index)), c.nbytes) for c in plan.collectives
    )
    assert mine == theirs
    priced = {(c.kind, c.nbytes): c.seconds for c in plan.collectives}
    for c in found.collectives:
        assert c.seconds == pytest.approx(priced[c.kind, c.nbytes])


def test_eager_kernels_are_priced_as_the_search_prices_them() -> None:
    """Where every shard is as large as every other, and the backward runs nothing again."""
    found, plan = of_plan(MeshSpec(AXES), slow_compute(), "eager")
    seconds = sum(r.seconds for r in plan.records if r.op != "param")
    alone = found.compute - found.phases[-1].compute
    assert alone == pytest.approx(seconds, rel=0.02)  # slices and copies of the loss
    assert found.phases[-1].seconds == pytest.approx(sum(r.seconds for r in plan.records if r.op == "param"))


def test_one_device_has_no_communication() -> None:
    found, plan = of_plan(MeshSpec({"dp": 1}), slow_compute(), "eager")
    assert found.collectives == () and found.exposed == 0.0
    assert found.seconds == pytest.approx(found.compute)
    assert found.seconds == pytest.approx(plan.cost, rel=0.02)


def test_overlap_shortens_what_waiting_at_once_exposes() -> None:
    profile = replace(slow_compute(), overlap_efficiency=1.0)
    waited, _ = of_plan(MeshSpec(AXES), profile, "eager")
    assert waited.exposed == pytest.approx(sum(c.seconds for c in waited.collectives))
    hidden, _ = of_plan(MeshSpec(AXES), profile, "eager", Overlap())
    assert hidden.seconds < waited.seconds
    assert hidden.compute == pytest.approx(waited.compute)


def test_the_plan_holds_the_step() -> None:
    found, plan = of_plan(MeshSpec(AXES), slow_compute(), "eager")
    assert plan.step_time == pytest.approx(found.seconds, rel=0.05)


class WithLogits(Net):
    """Returns its logits beside the loss: in a usual step nobody differentiates them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.down(torch.relu(self.up(x)))
        return logits, logits.square().mean()


def test_the_backward_is_the_loss_s_alone() -> None:
    mesh, x = MeshSpec({"dp": 1}), torch.randn(8, 16)
    joint = joint_of(WithLogits(), x)
    plan = find_plan(WithLogits(), mesh, (x,), profile=slow_compute(), backend="eager")
    program = rank_program(joint, plan.planned, mesh, 0, simulated_groups(mesh))
    whole = program.phases.backward
    assert whole is not None and [t.index for t in whole.tangents] == [0, 1]
    backward = program.usual().backward
    assert backward is not None and [t.index for t in backward.tangents] == [1]


@pytest.mark.parametrize("seed", [4, 5])
def test_the_slowest_rank_of_uneven_shards(seed: int) -> None:
    """Random layouts with sizes of their own: none moves much more than those that are looked at. (Launches
    do not count: another rank may have a few more small kernels, such as the padding of its shards.)"""
    mesh, rng = MeshSpec({"a": 3, "b": 2}), random.Random(seed)
    joint = joint_of(Net(), torch.randn(8, 16))
    assignment = random_assignment(joint, mesh, rng)
    prices = round_prices(mesh, 0.5, launch=1e-12)
    planned = decide(joint, assignment, prices)
    found = predicted_step(joint, planned, prices, schedule=Overlap())
    groups, alone = simulated_groups(mesh), unmerged(joint, assignment, prices.redistributor)
    ranks: list[float] = []
    for rank in range(mesh.device_count):
        program = rank_program(joint, alone, mesh, rank, groups, schedule=Overlap())
        ranks.append(predict_phases(program.usual(), prices, simulated_group_axes).seconds)
    assert len(slowest_ranks(assignment, mesh)) > 1
    assert found.seconds >= 0.99 * max(ranks)


def test_ranks_with_the_largest_explicit_shard() -> None:
    mesh = MeshSpec({"a": 3, "b": 2})
    even = NodeLayouts((), (Layout((("a",), ())),))
    uneven = NodeLayouts((), (Layout((("a", "b"), ()), sizes=((1, 1, 1, 4, 1, 1), None)),))
    assert slowest_ranks({"x": even}, mesh) == (0,)
    assert slowest_ranks({"x": even, "y": uneven}, mesh) == (0, 3)
