"""The data of a page against the plan, and against counts by hand."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest

from autoshard import MeshSpec, Plan, PlanError
from autoshard.drawing.page_data import layout_data, page_data
from passes.layout.layout import Layout
from passes.plan.planned_graph import ResultRecord
from passes.predict.prediction import KINDS
from tests.drawing.pages import planned
from tests.plans import pipelines
from tests.plans.pipelines import SQUARE


def data_of(plan: Plan) -> dict[str, Any]:
    (data,) = page_data(("plan", plan))["plans"]
    return json.loads(json.dumps(data))


def test_equal_layers_are_told_once_and_stand_for_all() -> None:
    plan = planned()
    (stage,) = data_of(plan)["stages"]
    repeats = Counter(node.get("repeat", 1) for node in stage["nodes"] if node["kind"] == "param")
    # Five layers of six parameters, of which those between the first and the last are equal, and two of two.
    assert repeats == {1: 16, 3: 6}
    assert sum(n * count for n, count in repeats.items()) == 34 == len(plan.parameter_layouts)
    ops = sum(node.get("repeat", 1) for node in stage["nodes"] if node["kind"] == "op")
    assert (
        len(stage["nodes"])
        < ops
        == sum(r.op not in ("param", "input", "tangent", "use", "output") for r in plan.records)
    )


def test_spans_are_those_of_the_prediction() -> None:
    plan = planned()
    (chart,) = data_of(plan)["charts"]
    (part,) = chart["parts"]
    assert chart["seconds"] == pytest.approx(plan.step_time)
    ends = [span[4] for span in (*part["kernels"], *part["moved"])]
    assert max(ends) == pytest.approx(1e6 * plan.step_time, abs=1e-2)
    for spans in ([k[3:5] for k in part["kernels"]], [m[3:5] for m in part["moved"]]):
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    kernels, exposed = (
        sum(end - start for *_, start, end in part["kernels"]),
        sum(m[8] for m in part["moved"]),
    )
    # Where no kernel runs a step waits for communication, which slows kernels down besides.
    assert 0.0 < 1e6 * plan.step_time - kernels <= exposed < 1e6 * plan.step_time
    assert len(part["moved"]) == len({c.turn for c in plan.ran[0].moved}) > 0
    assert all(place >= 0 for place, *_ in part["moved"])
    named = [place for place, _, phase, *_ in part["kernels"] if phase != "o"]
    assert sum(place >= 0 for place in named) > 0.9 * len(named)


def test_memory_is_the_plans_and_its_values_make_it_up() -> None:
    plan = planned()
    (chart,) = data_of(plan)["charts"]
    memory = chart["memory"]
    assert sum(memory["bytes"][memory["peak"]]) == plan.peak_memory
    assert memory["seconds"] == sorted(memory["seconds"]) and memory["seconds"][-1] <= chart["seconds"]
    assert plan.memory is not None
    for step in plan.memory.steps:
        alive = Counter[str]()
        for value in plan.memory.values:
            if value.first <= step.place <= value.last:
                alive[value.kind] += value.nbytes
        assert [alive[kind] for kind in KINDS] == list(step.by_kind)


def test_pieces_run_as_often_as_there_are() -> None:
    plan = planned(1, pieces=4)
    (chart,) = data_of(plan)["charts"]
    assert [part["times"] for part in chart["parts"]] == [1, 4, 1, 1]
    assert sum(part["times"] * part["seconds"] for part in chart["parts"]) == pytest.approx(plan.step_time)
    assert [kernel[2] for kernel in chart["parts"][-1]["kernels"]] == ["o"]
    assert all(kernel[2] == "b" for kernel in chart["parts"][2]["kernels"])


def test_stages_have_charts_of_their_own_below_that_of_all() -> None:
    plan = pipelines.planned("mlp", SQUARE, 4, "1f1b")
    data = data_of(plan)
    whole, *each = data["charts"]
    assert (len(data["stages"]), len(each)) == (2, 2)
    assert [row["name"] for row in whole["rows"]] == ["pp=0", "sends", "pp=1", "sends"]
    # Four pieces forward and back on each rank; each passes one value on, and one gradient back.
    kinds = [Counter(span[0] for span in row["spans"]) for row in whole["rows"]]
    assert all(kinds[rank]["forward"] == kinds[rank]["backward"] == 4 for rank in (0, 2))
    assert kinds[1] == {"sent": 4} and kinds[3] == {"returned": 4}
    assert whole["seconds"] == plan.step_time and whole["memory"] is not None
    for chart, part in zip(each, plan.parts, strict=True):
        assert chart["parts"][1]["seconds"] == pytest.approx(part.figures.forward + part.figures.backward)


def test_a_file_holds_all_but_alternatives() -> None:
    plan = planned()
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    mine, theirs = data_of(plan), data_of(read)
    (fresh,), (stage,) = mine["stages"], theirs["stages"]
    ops = {node["name"] for node in fresh["nodes"] if node["kind"] == "op"}
    assert set(fresh.pop("alternatives")) == ops
    assert stage.pop("alternatives") is None and "read from a file" in stage.pop("why")
    assert fresh == stage and mine["charts"][0]["parts"] == theirs["charts"][0]["parts"]
    # A file has fewer steps of the curve, between which times are taken.
    values = [[value[:6] for value in one["charts"][0]["memory"]["values"]] for one in (mine, theirs)]
    assert values[0][: len(values[1])] == values[1] and len(values[1]) == 80


@pytest.mark.parametrize(
    ("axes", "spans"),
    [
        ((), []),
        (("b",), [[0, 4], [4, 8], [8, 10]]),
        (("a", "b"), [[0, 2], [2, 4], [4, 5], [5, 7], [7, 9], [9, 10]]),
    ],
)
def test_parts_of_a_layout_by_hand(axes: tuple[str, ...], spans: list[list[int]]) -> None:
    """10 over 3 is 4, 4, 2; over 2 and then 3 it is 5 and 5, each 2, 2, 1."""
    result = ResultRecord((10, 3), "f32", Layout((axes, ()), (("c", "sum"),)))
    data = json.loads(json.dumps(layout_data(result, MeshSpec({"a": 2, "b": 3, "c": 2}))))
    assert data["dims"] == [
        {"length": 10, "axes": list(axes), "spans": spans},
        {"length": 3, "axes": [], "spans": []},
    ]
    assert data["partial"] == [["c", "sum"]]


@pytest.mark.parametrize(("name", "value"), [("start", 1e6), ("times", 3), ("phase", "sideways")])
def test_a_timeline_that_cannot_be_is_refused(name: str, value: Any) -> None:
    data = json.loads(json.dumps(planned().to_json()))
    (part,) = data["timeline"]
    if name == "times":
        part["times"] = value
    else:
        part["kernels"][0][{"phase": 0, "start": 3}[name]] = value
    with pytest.raises(PlanError, match=r"damaged plan: (.|\n)*try: "):
        Plan.from_json(data)


def test_where_prices_take_too_long_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.drawing.page_data._PATIENCE", -1.0)
    (stage,) = data_of(planned())["stages"]
    assert stage["alternatives"] is None and "not known within" in stage["why"]


def test_two_plans_differ_where_their_parameters_do() -> None:
    plan, other = planned(), planned(1)
    data = page_data(("a", plan), ("b", other))
    assert [one["name"] for one in data["plans"]] == ["a", "b"]
    rows = {name: (mine, theirs) for name, mine, theirs in data["differences"]}
    gone = [name for name, (_, theirs) in rows.items() if theirs == "absent"]
    weights, biases = ["0.weight", "1.weight", "3.weight"], ["0-1.bias", "3.bias"]
    assert sorted(gone) == sorted(f"blocks.1-4.{name}" for name in (*weights, *biases))
