"""`report` of a model in stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard import PipelinePlan, PlanError, report
from autoshard.reporting.measured import measured_timeline
from autoshard.runtime.observe import RankStep
from passes.stages.pipeline_orders import Action, pipeline_order
from tests.api.programs import parallel
from tests.ranks import RankPool
from tests.stages.stage_models import Mlp

PIECES = 4


def reported(rank: int, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = parallel(Mlp(), (("pp", 2),), stages="pp", micro_batches=PIECES, schedule="1f1b")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x, y = torch.ones(8, 6), torch.zeros(8, 3)
    with report(model, warmup=1) as measured:
        for _ in range(4):
            model(x, y).backward()
            optimizer.step()
        with torch.no_grad():
            model(x, y)
    figures = measured.figures
    plan = model.autoshard_plan
    assert isinstance(plan, PipelinePlan)
    measured.draw(Path(folder) / f"{rank}.svg")
    measured.draw(Path(folder) / f"{rank}.json")
    with pytest.raises(PlanError, match=r"ends in \.svg or \.json"):
        measured.draw("timeline.png")
    return {
        "text": measured.text(),
        "steps": figures.steps,
        "actions": [str(event.action) for event in figures.measured.events if event.rank == rank],
        "wanted": [str(action) for action in plan.scheduled.order.ranks[rank]],
        "seconds": (figures.predicted.seconds, figures.measured.seconds, plan.step_time),
        "bubble": figures.measured.bubble,
    }


def test_every_action_of_a_step_is_measured_beside_its_prediction(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(reported, str(tmp_path), world=2)
    for rank, one in enumerate(found):
        assert one["steps"] == 3  # evaluation is no step
        assert one["actions"] == one["wanted"]
        predicted, measured, whole = one["seconds"]
        assert 0.0 < predicted < whole and measured > 0.0  # without the update
        assert 0.0 < one["bubble"] < 1.0
        assert "stage 1 backward" in one["text"] and "bubble" in one["text"]
        names = {
            event["name"] for event in json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        }
        assert f"backward of piece {PIECES - 1} on stage 1" in names
    assert found[0]["text"] == found[1]["text"]


def test_of_ranks_at_one_place_the_busiest_is_shown() -> None:
    """By hand: two ranks at place 0, of which one begins later and computes longer; one at place 1."""
    order = pipeline_order("gpipe", 2, 1)
    forward, backward = Action("forward", 0, 0), Action("backward", 0, 0)
    step = lambda begins, seconds: RankStep(
        begins, 0.5, 4.0, 4.25, ((forward, 0.5, 0.5 + seconds), (backward, 3.0, 3.5))
    )
    other = RankStep(
        10.0, 0.0, 3.0, 3.0, ((Action("forward", 1, 0), 1.0, 2.0), (Action("backward", 1, 0), 2.0, 3.0))
    )
    found = measured_timeline([step(10.0, 0.5), step(10.25, 1.0), other], [0, 0, 1], order)
    assert [(str(e.action), e.rank, e.start, e.end) for e in found.events] == [
        ("0F0", 0, 0.75, 1.75),
        ("1F0", 1, 1.0, 2.0),
        ("1B0", 1, 2.0, 3.0),
        ("0B0", 0, 3.25, 3.75),
    ]
    assert (found.before, found.after, found.seconds) == ((0.5, 0.0), (0.25, 0.0), 4.0)
