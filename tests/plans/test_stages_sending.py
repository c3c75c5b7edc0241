"""What stages send within a memory limit: layouts that keep stages alike, and searches of no limit that they meet."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autoshard.plan.stage_search as stage_search
from autoshard import MeshSpec, find_plan
from autoshard.plan.plan import PipelinePlan
from autoshard.plan.search_with_states import KnownWholes, WholeTask
from autoshard.plan.stage_tasks import sending, sending_as_received, stage_task
from autoshard.plan.task import CallLayouts, Task
from autoshard.planning import canonical_capture
from cost_model.deadline import NEVER
from passes.layout.layout import Layout
from passes.micro_batches.cut_batch import cut_for_stages
from passes.search.coarse_to_fine import find_fastest
from passes.search.find import Found, Sought
from passes.search.search_terms import Narrowing
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs
from tests.profiles import slow_compute

MESH = MeshSpec({"pp": 4, "tp": 2})
WHOLE, ROWS, COLUMNS = Layout(((), ())), Layout((("tp",), ())), Layout(((), ("tp",)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def blocks(count: int = 4) -> tuple[Task, tuple[StageGraph, ...]]:
    """A block is a stage; between them pass [64, 16] in 4 pieces."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(count)))
    captured = canonical_capture(model, (torch.ones(64, 16),), {})
    task = Task(captured, slow_compute(), MESH, CallLayouts({}, {}), {}, None, "eager", 600.0)
    joint = cut_for_stages(task.joint, 4, sizes_only=True)
    first_of = lambda i: next(
        n.name for n in joint.graph.nodes if n.meta.get("module", "").startswith(f"{i}.")
    )
    return task, stage_graphs(joint, [first_of(i) for i in range(1, count)])


def second(task: Task, graphs: tuple[StageGraph, ...], received: Layout) -> Task:
    """Of the second stage, which receives its input so."""

    before: Any = SimpleNamespace(sent_layouts=(received,), parameter_layouts={})
    return stage_task(task, "pp", graphs[1], [before])


def test_a_stage_sends_in_the_layout_that_it_is_told_or_receives() -> None:
    task, graphs = blocks()
    own = second(task, graphs, ROWS)
    assert own.call.outputs == {0: None} and own.call.free == {0}
    for told, layout in (
        (sending(own, graphs[1], [COLUMNS]), COLUMNS),
        (sending_as_received(own, graphs[1]), ROWS),
    ):
        assert told.call.outputs == {0: layout} and not told.call.free
        # Its gradient comes back so.
        (tangent,) = [i for i, spec in enumerate(graphs[1].joint.inputs) if spec.kind == "tangent"]
        assert told.boundary.inputs[tangent] == (layout,)
    # The first one receives nothing, the last one sends nothing.
    for place in (0, 3):
        alone = stage_task(task, "pp", graphs[place], [])
        assert sending_as_received(alone, graphs[place]) is alone


def test_a_search_is_known_where_its_plan_has_what_is_fixed_besides() -> None:
    task, graphs = blocks()
    own = second(task, graphs, ROWS)
    known, searched = KnownWholes(), list[WholeTask]()

    def found(task: Task) -> Found:
        one = WholeTask(task.joint.graph, (), task.mesh, task.boundary, Narrowing(), 0)

        def search() -> Found:
            searched.append(one)
            return find_fastest(Sought(task.joint, task.prices, task.boundary), NEVER)

        judged: Any = _Anything()
        return known.found(one, judged, search)

    free = found(own)
    sent = free.assignment["output"].operands[0]
    assert found(sending(own, graphs[1], [sent])) is free and len(searched) == 1
    (other,) = {WHOLE, ROWS} - {sent} if sent in (WHOLE, ROWS) else {WHOLE}
    assert found(sending(own, graphs[1], [other])) is not free and len(searched) == 2
    # What receives something else is another search, whatever it sends.
    assert found(second(task, graphs, COLUMNS)) is not free and len(searched) == 3


class _Anything(dict[int, Any]):
    """Of any plan."""

    def __missing__(self, _: int) -> Any:
        return None


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_stages_that_are_alike_are_searched_once_within_a_limit(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Whether what is sent takes little of the limit, or much. The last stage sends nothing, and returns the result."""
    monkeypatch.setattr(stage_search, "_SENT", share)
    model = nn.Sequential(*(Block() for _ in range(4)))

    def within(limit: int | None) -> PipelinePlan:
        found = find_plan(
            model,
            MESH,
            (torch.ones(512, 16),),
            profile=slow_compute(),
            stages="pp",
            schedule="1f1b",
            micro_batches=4,
            memory_limit=limit,
        )
        assert isinstance(found, PipelinePlan)
        return found

    limit = within(None).peak_memory * 7 // 10
    told: list[Task] = []
    real = stage_search.search_plan

    def noted(task: Task, *args: Any, **options: Any) -> Any:
        if task.memory_limit is not None:
            told.append(task)
        return real(task, *args, **options)

    monkeypatch.setattr(stage_search, "search_plan", noted)
    found = within(limit)
    assert found.peak_memory <= limit
    assert any(stage.planned.again for stage in found.stages)
    # The first stage, one in the middle that the other is like, and the last.
    first, middle, _ = (task.call for task in told)
    assert middle.inputs[0] == middle.outputs[0] == found.stages[0].outputs[0]
    free = within(None)
    assert first.outputs.get(0) == (free.stages[0].outputs[0] if share else None)
    # What is proven is of plans without a limit.
    whole = real(replace(told[1], memory_limit=None, beside=None))
    assert [stage.lower_bound for stage in found.stages[1:3]] == 2 * [pytest.approx(whole.lower_bound)]
    assert found.stages[1].cost > whole.cost
