"""Plans with stages as files, texts and pictures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from autoshard import PipelinePlan, Plan, PlanError
from autoshard.plan.plan_content import Raced
from autoshard.plan.plan_fits import plain_plan
from autoshard.planning import canonical_capture
from tests.golden import Golden
from tests.plans.pipelines import PP, SQUARE, planned, stage_task
from tests.stages.stage_models import MODELS


@pytest.mark.parametrize(("name", "mesh", "pieces"), [("mlp", SQUARE, 4), ("gpt2", PP, 2)])
def test_the_same_from_a_file(name: str, mesh: Any, pieces: int, tmp_path: Path) -> None:
    plan = planned(name, mesh, pieces)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert isinstance(read, PipelinePlan) and read == plan and read.fingerprint == plan.fingerprint
    assert (read.step_time, read.peak_memory, read.holders, read.memory) == (
        plan.step_time,
        plan.peak_memory,
        plan.holders,
        plan.memory,
    )
    read.check_graph(stage_task(name, mesh).joint)
    assert read.explain() == plan.explain() and read.to_text() == plan.to_text()


@pytest.mark.parametrize("name", ["ranks", "stages_per_rank", "timeline", "bubble", "holders"])
def test_a_plan_without_stages_says_that_it_has_none(name: str) -> None:
    (plan, *_) = planned("mlp", SQUARE, 4).stages
    with pytest.raises(
        PlanError, match=r"no stages, and so no schedule .*\n  try: plan.explain\(\), or find_plan"
    ):
        getattr(plan, name)


def test_who_raced_is_in_the_file(tmp_path: Path) -> None:
    race = tuple(Raced(name, f"{name} of 4 pieces", 0.5, 0.25) for name in ("1f1b", "gpipe"))
    plan = replace(planned("mlp", SQUARE, 4), race=race)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.race == race and read.fingerprint == plan.fingerprint
    assert "raced, 2 plans: 1f1b is kept, 250 ms a step, 0.0% faster than gpipe" in read.explain()
    assert "raced: the fastest of 2 by the clock" in read.to_text()
    assert "raced" not in read.to_text(seconds=False)


def test_another_model_is_noticed() -> None:
    with pytest.raises(PlanError, match="another model"):
        planned("mlp").check_graph(stage_task("gpt2").joint)


def edited(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = json.loads(json.dumps(planned("mlp", SQUARE, 4, "1f1b").to_json()))
    change(data)
    return data


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no such axis": lambda d: d.update(axis="dp"),
    "1 stages for 2 ranks": lambda d: d["stages"].pop(),
    "cut at 0 places": lambda d: d.update(cut=[]),
    "planned for mesh": lambda d: d["mesh"]["axes"].update(tp=4),
    "micro-batches, and not 5": lambda d: d.update(micro_batches=5),
    "at least as many micro-batches": lambda d: d.update(micro_batches=1, schedule="1f1b"),
    "return one output": lambda d: d["stages"][0].update(returns=[0], reads=[0]),
    "figures": lambda d: d["stages"][1]["figures"].pop("kept"),
    "does not have the outputs": lambda d: d["stages"][1].update(returns=[0, 1, 2, 3, 4]),
    "stage 1": lambda d: d["stages"][1]["plan"].pop("nodes"),
    "two layouts": lambda d: d["stages"][0]["plan"]["parameters"].update(
        d["stages"][1]["plan"]["parameters"] | {"layers.5.weight": {"dims": [["tp"], []]}}
    ),
    "plan schema": lambda d: d.update(schema_version=1),
}


@pytest.mark.parametrize("said", list(DAMAGES))
def test_a_damaged_file_says_where(said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(edited(DAMAGES[said])))
    with pytest.raises(PlanError, match=said) as error:
        Plan.load(tmp_path / "plan.json")
    assert "plan.json" in str(error.value) and "try:" in str(error.value)


def test_text(golden: Golden) -> None:
    golden.check(planned("mlp", SQUARE, 4, "1f1b").to_text(seconds=False), "mlp_in_two_stages.txt")


def test_explained(golden: Golden) -> None:
    golden.check(planned("mlp", SQUARE, 4, "1f1b").explain(), "mlp_in_two_stages_explained.txt")


def test_a_parameter_is_explained_in_the_stages_that_hold_it() -> None:
    plan = planned("gpt2", PP, 2, "1f1b")
    text = plan.explain("transformer.wte.weight")
    assert [line for line in text.splitlines() if line.startswith("stage")] == ["stage 0", "stage 1"]
    with pytest.raises(PlanError, match="wte"):
        plan.explain("transformer.wte.weigth")


def test_differences() -> None:
    one, two = planned("mlp", SQUARE, 4, "1f1b"), planned("mlp", PP, 4, "gpipe")
    assert "1f1b of 4 pieces -> 2 stages along pp, gpipe" in one.diff(two)
    assert "layers.3-5.weight" in one.diff(two)
    with pytest.raises(PlanError, match="stages"):
        one.diff(one.stages[0])
    with pytest.raises(PlanError, match="stages"):
        one.stages[0].diff(one)


def test_what_is_not_there_for_stages() -> None:
    plan = planned("mlp", SQUARE, 4)
    explained = lambda: plan.explain(crossovers=True)
    for ask in (lambda: plan.why_not("layers.0.weight"), plan.crossovers, explained):
        with pytest.raises(PlanError, match="not there for plans with stages"):
            ask()
    with pytest.raises(PlanError, match="report takes no plan with stages, and this one has 2"):
        plain_plan(plan, "report")
    assert plain_plan(plan.stages[0], "report") is plan.stages[0]


def test_the_graph_of_a_file_is_found_again() -> None:
    """As a session has it: captured anew, cut as the plan says."""
    plan = planned("gpt2", PP, 2)
    model, args, kwargs = MODELS["gpt2"]()
    graphs = plan.stage_graphs(canonical_capture(model.train(), args, kwargs).joint)
    assert len(graphs[0].joint.others) == plan.micro_batches - 1
    for stage, graph in zip(plan.stages, graphs, strict=True):
        stage.check_graph(graph.joint)


def test_a_picture_of_the_timeline_and_all_stages(tmp_path: Path) -> None:
    plan = planned("mlp", SQUARE, 4, "1f1b")
    picture = plan.draw(tmp_path / "plan.svg").read_text()
    root = ElementTree.fromstring(picture)
    spans = [
        e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("class", "").startswith("span")
    ]
    kinds = [str(span.get("class")).split()[1] for span in spans]
    assert (kinds.count("forward"), kinds.count("backward")) == (8, 8) and "bubble" in kinds
    assert [e.text for e in root.iter() if str(e.text).startswith("stage ")] == ["stage 0", "stage 1"]
    assert "stages along pp" in plan.draw(tmp_path / "plan.html").read_text()
    with pytest.raises(PlanError, match=r"\.svg, \.html or \.json"):
        plan.draw(tmp_path / "plan.dot")


def test_a_trace_for_perfetto(tmp_path: Path) -> None:
    plan = planned("mlp", SQUARE, 4, "1f1b")
    events = json.loads(plan.draw(tmp_path / "plan.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {"pid", "tid", "ts", "dur", "name"} <= slices[0].keys()
    for rank in range(2):
        own = sorted((e["ts"], e["ts"] + e["dur"], e["cat"]) for e in slices if e["tid"] == rank)
        assert own[0][0] == 0.0 and own[-1][1] == pytest.approx(1e6 * plan.step_time)
        assert all(end == pytest.approx(start) for (_, end, _), (start, _, _) in itertools.pairwise(own))
        waits = sum(end - start for start, end, kind in own if kind == "bubble")
        assert waits == pytest.approx(1e6 * (plan.step_time - plan.timeline.busy[rank]))
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"rank 0", "rank 1", "sent over boundary 0", "returned over boundary 0"} <= names
