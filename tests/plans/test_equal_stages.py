"""Stages that are alike are planned once, and the second's plan is as if it were searched."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoshard.plan.stage_search import StageSearch, _suits
from autoshard.plan.stage_tasks import PlannedStage, StageCutter, names_alike, stage_task
from autoshard.plan.task import search_plan
from autoshard.planning import canonical_capture
from cost_model.deadline import Deadline
from passes.ir.joint import JointGraph
from passes.predict.predict_step import StageFigures
from passes.stages.stage_graphs import stage_graphs
from tests.models import seeded
from tests.plans.pipelines import SQUARE
from tests.plans.pipelines import stage_task as whole_task


@pytest.mark.slow
def test_the_layers_of_a_transformer_are_planned_once() -> None:
    model, inputs = seeded("llama", layers=4, batch=2)
    task = replace(whole_task("mlp", SQUARE), captured=canonical_capture(model, (), inputs))
    layer = lambda i: next(
        n.name for n in task.joint.graph.nodes if n.meta.get("module", "").startswith(f"model.layers.{i}")
    )
    graphs = stage_graphs(task.joint, [layer(i) for i in (1, 2, 3)])
    assert names_alike(graphs[0].joint, graphs[1].joint) is None
    names = names_alike(graphs[1].joint, graphs[2].joint)
    assert (
        names is not None
        and names["model_layers_1_mlp_up_proj_weight"] == "model_layers_2_mlp_up_proj_weight"
    )
    done: list[PlannedStage] = []
    for graph in graphs[:2]:
        own = stage_task(task, "pp", graph, done)
        done.append(PlannedStage.of(graph, own, search_plan(own)))
    own = stage_task(task, "pp", graphs[2], done)
    searched, alike = search_plan(own), done[1].alike(graphs[2], own)
    assert alike is not None
    copied = alike.plan
    assert (alike.outputs, alike.parameter_layouts) == (copied.outputs, copied.parameter_layouts)
    copied.check_graph(graphs[2].joint)
    assert abs(copied.cost / searched.cost - 1.0) < 1e-6 and copied.peak_memory == done[1].plan.peak_memory
    assert copied.parameter_layouts.keys() == searched.parameter_layouts.keys()


def test_a_plan_suits_a_stage_that_it_fits_and_leaves_little_unused() -> None:
    """It holds 30 with one piece in flight, 5 more for each of the others, and 5 of the limit have communicators."""
    for flight, limit, of_flight, of_limit, suits in (
        (1, None, 1, None, True),
        (4, 100, 4, 100, True),
        (2, 300, 4, 100, True),  # no more room in any respect, however much is left unused
        (4, 60, 8, 100, True),  # needs 30 + 3 * 5 + 5 = 50
        (4, 50, 8, 100, True),
        (4, 49, 8, 100, False),
        (4, 63, 8, 100, False),  # leaves 13 of 63
        (5, 60, 4, 50, True),  # needs 55
        (5, 54, 4, 50, False),
    ):
        task, other = (_in_flight(*one) for one in ((flight, limit), (of_flight, of_limit)))
        unknown: Any = None
        figures = StageFigures(*(1.0,) * 7, held=10, kept=5, peak=30)
        plan: Any = SimpleNamespace(reserve=5)
        first = PlannedStage(unknown, other, figures, {}, {}, unknown, lambda plan=plan: plan)
        assert _suits(first, task) == suits, (flight, limit, of_flight, of_limit)


def _in_flight(pieces: int, limit: int | None) -> Any:
    return SimpleNamespace(joint=SimpleNamespace(in_flight=pieces), memory_limit=limit)


def test_searches_leave_time_for_the_plans_of_stages_that_are_alike() -> None:
    """Of five stages the second and the last are still to be searched; the plans of the others take a day each."""
    unknown: Any = None
    day = 86_400.0
    search = StageSearch(unknown, "pp", unknown, (), Deadline.after(10 * day), took=day)
    search.__dict__["alone"] = [1, 1, 0, 0, 1]
    assert search._until(1).left == pytest.approx(8 * day / 2.25, rel=1e-2)
    assert search._until(4).left == pytest.approx(8 * day / 1.25, rel=1e-2)


class Checkpointed(nn.Module):
    """Blocks of which the first `many` run under checkpoint."""

    def __init__(self, blocks: int, many: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(blocks))
        self.many = many

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number < self.many else block(x)
        return x.square().mean()


def test_calls_under_checkpoint_are_alike_and_not_like_others() -> None:
    """Every call has a number of its own, which is not what makes a stage another."""
    first, second = _middle_stages(4)
    assert names_alike(first, second) is not None
    first, second = _middle_stages(2)
    assert names_alike(first, second) is None


def _middle_stages(many: int) -> tuple[JointGraph, JointGraph]:
    captured = canonical_capture(Checkpointed(4, many), (torch.randn(8, 8),), {})
    module_of = lambda node: node.meta.get("module", "")
    starts = [
        next(n.name for n in captured.joint.graph.nodes if module_of(n).startswith(f"blocks.{i}"))
        for i in (1, 2, 3)
    ]
    graphs = stage_graphs(captured.joint, starts)
    return graphs[1].joint, graphs[2].joint


class Residual(nn.Module):
    """Blocks of a product and of two half as large ones, between which a residual passes; a head as long as a block."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        linear = lambda a, b: nn.Linear(a, b, bias=False)
        self.blocks = nn.ModuleList(
            nn.ModuleList([linear(64, 64), linear(64, 32), linear(32, 64)]) for _ in range(blocks)
        )
        self.head = linear(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        for first, up, down in self.blocks:  # type: ignore[misc]
            x = x + first(x)
            x = x + down(up(x))
        return self.head(x).square().mean()


@pytest.mark.parametrize(("blocks", "part"), [(61, "1"), (7, "0")])
def test_cuts_stand_at_places_that_are_alike_where_that_costs_little(blocks: int, part: str) -> None:
    """There are most places within blocks, as the first block has none before it. With the head two stages are most
    even with whole blocks: of sixty-one cutting within one makes the longer 1.6 % longer, of seven 12 %."""
    captured = canonical_capture(Residual(blocks), (torch.randn(32, 64),), {})
    task = replace(whole_task("mlp", SQUARE), captured=captured)
    (cut,) = StageCutter(task, task.joint, "pp").cut(2).cut
    (node,) = (node for node in task.joint.graph.nodes if node.name == cut)
    assert str(node.meta["module"]).split(".")[-1] == part
