"""Plan files that lie about steps, turns or interiors are refused by name: when they are read, or by the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoshard import Plan, PlanError, verify
from tests.plans.two_prices import PINS, planned, regression, rows


@pytest.fixture(scope="module", params=PINS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(request.param)


def tampered(plan: Plan, change: Callable[[dict[str, Any]], None]) -> Plan:
    data = json.loads(json.dumps(plan.to_json()))
    change(data)
    return Plan.from_json(data)


def moving(data: dict[str, Any], kind: str = "") -> dict[str, Any]:
    """The first operand that is read through a collective, of that kind if one is given."""
    found = (o for node in data["nodes"] for o in node["operands"] if o["transfers"])
    local = ("slice", "to_partial")
    return next(
        o
        for o in found
        if any(
            (t["step"]["kind"] == kind) if kind else t["step"]["kind"] not in local for t in o["transfers"]
        )
    )


def another_way(data: dict[str, Any]) -> None:
    """The steps stop short."""
    operands = (o for node in data["nodes"] for o in node["operands"])
    next(o for o in operands if len(o["transfers"]) > 1)["transfers"].pop()


def another_dim(data: dict[str, Any]) -> None:
    step = moving(data, "all_gather")["transfers"][-1]["step"]
    step["dim"] = 1 - step["dim"]


def unknown_axes(data: dict[str, Any]) -> None:
    moving(data)["transfers"][0]["step"]["axes"] = ["nowhere"]


def other_axes(data: dict[str, Any]) -> None:
    step = moving(data, "all_gather")["transfers"][-1]["step"]
    step["axes"] = ["b"] if step["axes"] != ["b"] else ["a"]


def another_kind(data: dict[str, Any]) -> None:
    moving(data, "all_gather")["transfers"][-1]["step"]["kind"] = "slice"


def no_kind(data: dict[str, Any]) -> None:
    moving(data)["transfers"][0]["step"]["kind"] = "broadcast"


def no_argument(data: dict[str, Any]) -> None:
    del moving(data, "all_gather")["transfers"][-1]["step"]["dim"]


def unfit_layout(data: dict[str, Any]) -> None:
    moving(data)["transfers"][0]["after"] = {"dims": [["a"], ["b"], []]}


def no_turn(data: dict[str, Any]) -> None:
    del moving(data)["turn"]


def turn_of_nothing(data: dict[str, Any]) -> None:
    node = next(n for n in data["nodes"] for o in n["operands"] if not o["transfers"])
    next(o for o in node["operands"] if not o["transfers"])["turn"] = [0, 0]


def third_phase(data: dict[str, Any]) -> None:
    moving(data)["turn"] = [2, 0]


def before_what_it_needs(data: dict[str, Any]) -> None:
    """The turns of each phase, the other way round."""
    operands = [o for n in data["nodes"] for o in n["operands"] if "turn" in o]
    for operand in operands:
        operand["turn"][1] = 1000 - operand["turn"][1]


def starts_late(data: dict[str, Any]) -> None:
    operand = moving(data)
    operand["starts"] = [[operand["turn"][1] + 1, 2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_way, "lead"),
        (another_dim, "no step all_gather"),
        (unknown_axes, "no axis 'nowhere'"),
        (other_axes, "no step all_gather"),
        (another_kind, "no step slice"),
        (no_kind, "no step broadcast, but slice, "),
        (no_argument, "a step all_gather has dim, and not none"),
        (unfit_layout, "lead|layout|step"),
        (no_turn, "with turn None"),
        (turn_of_nothing, "through 0 steps"),
        (third_phase, "turn"),
        (starts_late, "with collectives from"),
        (before_what_it_needs, "computed from what comes in turn"),
    ],
)
def test_a_file_that_lies_about_its_transfers_is_refused(
    plan: Plan, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    with pytest.raises(PlanError, match=rf"damaged plan: (.|\n)*({message})(.|\n)*try: "):
        tampered(plan, change)


def test_a_forward_transfer_in_the_backward_is_refused_by_the_model(plan: Plan) -> None:
    """Only the graph shows which transfers are of which phase."""

    def all_late(data: dict[str, Any]) -> None:
        for operand in (o for node in data["nodes"] for o in node["operands"] if "turn" in o):
            if operand["turn"][0] == 0:
                operand["turn"] = [0, operand["turn"][1]]
            else:
                operand["turn"] = [0, 500 + operand["turn"][1]]

    with pytest.raises(PlanError, match=r"damaged: (.|\n)* has a turn in the forward(.|\n)*try: "):
        verify(regression(), tampered(plan, all_late), (rows(),))


def test_an_interior_that_no_op_has_is_refused_by_the_model(plan: Plan) -> None:
    def inside(data: dict[str, Any]) -> None:
        next(node for node in data["nodes"] if node["op"] == "contract")["interior"] = "m"

    with pytest.raises(PlanError, match="cannot be computed in parts along m"):
        verify(regression(), tampered(plan, inside), (rows(),))


def test_a_split_of_a_factor_that_no_op_has_is_refused_by_the_model(plan: Plan) -> None:
    def split(data: dict[str, Any]) -> None:
        node = next(node for node in data["nodes"] if node["op"] == "contract" and node["splits"])
        node["splits"][0][0] = "nothing"

    with pytest.raises(PlanError, match="split along nothing"):
        verify(regression(), tampered(plan, split), (rows(),))


def test_a_file_of_the_schema_before_says_what_to_do(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps({**plan.to_json(), "schema_version": 4}))
    with pytest.raises(PlanError, match=r"plan schema 4; this version reads 5\n  try: find_plan"):
        Plan.load(tmp_path / "old.json")
