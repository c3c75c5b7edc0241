"""Which copies a collective's price covers, and which kernels a phase pays for."""

from __future__ import annotations

import torch
from torch import fx

from autoshard import MeshSpec
from cost_model.compute import ComputePrices
from cost_model.mesh import simulated_group_axes, simulated_groups
from cost_model.profile import Profile
from passes.layout.layout import Layout
from passes.predict.step_events import COLLECTIVE_KINDS, StepEvents, copies_of_collectives
from passes.redistribution.lower_redistribute import emit
from passes.redistribution.redistribute import Redistributor
from passes.strategies.prices import Prices
from passes.strategies.traffic import fused_traffic
from tests.predict.test_predict import PerByte, round_prices
from tests.runtime.graphs import Local

aten = torch.ops.aten
MESH = MeshSpec({"x": 2})


def moved(before: Layout, after: Layout, shape: tuple[int, ...]) -> fx.GraphModule:
    """Rank 0's redistribution of one tensor."""
    redistributor = Redistributor(MESH, PerByte())
    local = Local()
    x = local.input(*before.local_shape(shape, MESH, 0))
    steps = redistributor.plan(before, after, shape, 4).steps
    with local.mode:
        result = emit(local.graph, x, steps, shape, MESH, 0, simulated_groups(MESH), {"turn": (0, 1)})
    return local.module(result)


def names(module: fx.GraphModule) -> list[str]:
    return [str(n.target).split(".")[1] for n in module.graph.nodes if n.op == "call_function"]


ROWS, COLUMNS, WHOLE = Layout((("x",), ())), Layout(((), ("x",))), Layout(((), ()))
PENDING = Layout(((), ()), (("x", "sum"),))


def test_the_copy_that_puts_gathered_parts_side_by_side_is_in_the_gather() -> None:
    module = moved(COLUMNS, WHOLE, (4, 6))
    assert names(module) == ["all_gather_into_tensor", "wait_tensor", "view", "permute", "clone", "view"]
    ((copy, gather),) = copies_of_collectives(module.graph).items()
    assert (copy.target, COLLECTIVE_KINDS[gather.target]) == (aten.clone.default, "all_gather")


def test_the_copy_that_stacks_the_parts_to_scatter_is_in_the_scatter() -> None:
    ((copy, scatter),) = copies_of_collectives(moved(PENDING, COLUMNS, (4, 6)).graph).items()
    assert (copy.target, COLLECTIVE_KINDS[scatter.target]) == (aten.clone.default, "reduce_scatter")


def test_an_exchange_copies_before_or_after() -> None:
    found = copies_of_collectives(moved(ROWS, COLUMNS, (4, 6)).graph)
    assert {COLLECTIVE_KINDS[n.target] for n in found.values()} == {"all_to_all"}


def test_a_copy_in_a_price_is_paid_once() -> None:
    step = StepEvents(round_prices(MESH, 0.0), simulated_group_axes)
    step.add_graph(moved(COLUMNS, WHOLE, (4, 6)), "forward")
    assert [event.stream for event in step.events if event.seconds > 0.0] == ["comm"]


def test_along_rows_nothing_is_copied() -> None:
    assert copies_of_collectives(moved(ROWS, WHOLE, (4, 6)).graph) == {}


def test_padding_and_the_cut_of_uneven_parts_are_kernels_of_their_own() -> None:
    module = moved(COLUMNS, WHOLE, (4, 5))  # 3 and 2 columns
    paid = copies_of_collectives(module.graph)
    copies = [n for n in module.graph.nodes if n.target is aten.clone.default]
    assert len(copies) == 2 and list(paid) == copies[:1]


def test_what_the_backward_computes_again_fuses_with_its_readers() -> None:
    """Its meta says forward; no other program reads it, so it is never stored."""
    local = Local()
    x = local.input(64, 64)
    again = local.call(aten.relu.default, x)
    again.meta["phase"] = "forward"
    out = local.call(aten.neg.default, again)
    out.meta["phase"] = "backward"
    prices = Prices(
        mesh=MESH,
        compute=ComputePrices(Profile.named("cpu")),
        redistributor=Redistributor(MESH, PerByte()),
        merged=Redistributor(MESH, PerByte()),
        optimizer_seconds=lambda nbytes: 0.0,
        traffic=fused_traffic,
    )
    step = StepEvents(prices, simulated_group_axes)
    step.add_graph(local.module(out), "backward")
    launch, per_byte = 3e-6, 1 / 8e9
    nbytes = 64 * 64 * 4
    relu, neg = step.events
    assert relu.seconds == nbytes * per_byte  # read; no launch, no store
    assert neg.seconds == launch + nbytes * per_byte  # stored
