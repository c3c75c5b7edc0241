"""A plan as a value: file, text, graph, questions; all without any rank."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from autoshard import MeshSpec, Plan, PlanError, find_plan, verify
from cost_model.measurements import PLAN_KINDS
from tests.api.programs import assert_close, data, parallel, two_linear
from tests.profiles import slow_compute
from tests.ranks import RankPool


def planned(axes: dict[str, int] | None = None, **options: Any) -> Plan:
    mesh = MeshSpec(axes or {"x": 3})
    return find_plan(two_linear(), mesh, (data()[0],), **{"profile": slow_compute(), **options})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def test_a_file_holds_all_of_the_plan(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.fingerprint == plan.fingerprint
    assert loaded.to_text() == plan.to_text()
    assert loaded.explain() == plan.explain()
    assert loaded.parameters == plan.parameters
    assert loaded.parameters["up.weight"] == (Shard(0),)
    assert json.loads((tmp_path / "plan.json").read_text())["schema_version"] == 5


def test_a_plan_with_several_axes_survives_the_file(tmp_path: Path) -> None:
    plan = planned({"a": 2, "b": 2}, out_placements="keep", memory_limit="1GB")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_search_is_deterministic(plan: Plan) -> None:
    assert json.dumps(planned().to_json()) == json.dumps(plan.to_json())


def test_the_cost_is_the_step_and_about_the_sum_of_its_parts(plan: Plan) -> None:
    parts = [record.seconds for record in plan.records]
    parts += [t.seconds for r in plan.records for operand in r.operands for t in operand.transfers]
    assert plan.cost == pytest.approx(plan.step_time, rel=0.02)
    assert plan.lower_bound <= plan.cost * (1 + 1e-9)
    assert plan.gap < 0.05  # seconds that transfers take besides are in no bound
    # Copies around collectives, and what the backward computes again, are in the step alone.
    assert sum(parts) * 0.99 <= plan.step_time <= sum(parts) * 1.1


def change(data: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    if value is None:
        del data[path[-1]]
    else:
        data[path[-1]] = value


DAMAGE: list[tuple[tuple[Any, ...], Any, str]] = [
    (("schema_version",), 99, "has plan schema 99; this version reads 5"),
    (("schema_version",), None, "no autoshard plan: it has no schema_version"),
    (("nodes",), None, "damaged plan: .*missing required field `nodes`"),
    (("nodes", 0), "oops", "damaged plan"),
    (("mesh",), [2, 2], "damaged plan"),
    (("mesh", "axes", "x"), 0, "damaged plan|mesh"),
    (("parameters", "up.weight"), 3, "damaged plan"),
    (("origin", "graph_hash"), None, "damaged plan"),
    (("cost_seconds",), float("nan"), "price of cost is nan"),
    (("cost_seconds",), -1.0, "price of cost is -1.0"),
    (("lower_bound_seconds",), float("inf"), "price of lower_bound is inf"),
    (("nodes", 0, "seconds"), float("nan"), "price of up_weight is nan"),
    (("nodes", 0, "seconds"), -2.0, "price of up_weight is -2.0"),
]


@pytest.mark.parametrize(("path", "value", "message"), DAMAGE, ids=lambda v: str(v)[:30])
def test_a_damaged_file_is_refused(
    plan: Plan, tmp_path: Path, path: tuple[Any, ...], value: Any, message: str
) -> None:
    damaged = plan.to_json()
    damaged = json.loads(json.dumps(damaged))
    change(damaged, path, value)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(damaged))
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(file)
    assert str(file) in str(caught.value)


def test_a_negative_transfer_is_refused(plan: Plan) -> None:
    damaged = json.loads(json.dumps(plan.to_json()))
    operand = next(o for node in damaged["nodes"] for o in node["operands"] if o["transfers"])
    operand["transfers"][0]["seconds"] = -1.0
    with pytest.raises(PlanError, match=r"-1\.0 seconds; a price is finite and not negative"):
        Plan.from_json(damaged)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"plan"', "\x00\x01"])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read plan .*nothing\.json"):
        Plan.load(tmp_path / "nothing.json")


class Wider(nn.Module):
    """`up` has other sizes, `down` is renamed, and a buffer is new."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 24)
        self.last = nn.Linear(24, 5)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.up(x))) * self.scale


def test_a_plan_for_another_model_says_what_changed(plan: Plan) -> None:
    with pytest.raises(PlanError) as caught:
        verify(Wider(), plan, (data()[0],))
    text = str(caught.value)
    assert "param up.weight: (32, 10) in the plan, (24, 10) in the model" in text
    assert "param last.weight: in the model, not in the plan" in text
    assert "param down.weight: in the plan, not in the model" in text
    assert "buffer scale: in the model, not in the plan" in text


def test_a_plan_for_other_inputs_says_so(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"input args\[0\]: \(8, 10\) in the plan, \(6, 10\) in the model"):
        verify(two_linear(), plan, (data(6)[0],))


def test_a_plan_for_other_code_says_so(plan: Plan) -> None:
    model = two_linear()
    model.forward = lambda x: model.down(torch.tanh(model.up(x)))  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="another model, inputs or code"):
        verify(model, plan, (data()[0],))


def test_difference(plan: Plan) -> None:
    other = planned(constraints={"*": [Replicate()]})
    text = plan.diff(other)
    assert "up.weight: [@x, -] -> [-, -]" in text
    assert other.cost > plan.cost
    assert f"({other.cost / plan.cost - 1:+.1%})" in text
    assert "up.weight" not in plan.diff(plan)


def test_why_not(plan: Plan) -> None:
    text = plan.why_not("up.weight", [Replicate()])
    assert "up.weight: [@x, -] -> [-, -]" in text
    pinned = planned(constraints={"up.weight": [Replicate()]})
    assert text == plan.diff(pinned)


def test_why_not_needs_the_search(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="loaded from a file"):
        Plan.load(tmp_path / "plan.json").why_not("up.weight", [Replicate()])


@pytest.mark.parametrize(
    "options",
    [{}, {"micro_batches": 3}, {"stages": "x", "micro_batches": 6}],
    ids=["whole", "pieces", "stages"],
)
def test_a_pickled_plan_is_all_that_its_file_holds(options: dict[str, Any]) -> None:
    """As `broadcast_object_list` and worker processes pickle it."""
    plan: Plan = planned(**options)
    plan.explain()
    found = pickle.loads(pickle.dumps(plan))
    assert found == plan
    assert found.to_json() == plan.to_json()
    assert found.explain() == plan.explain()


def test_a_pickled_plan_cannot_search(plan: Plan) -> None:
    found: Plan = pickle.loads(pickle.dumps(plan))
    with pytest.raises(PlanError, match="loaded from a file or unpickled"):
        found.why_not("FSDP")
    assert copy.deepcopy(plan).why_not("FSDP") == plan.why_not("FSDP")


def test_explain(plan: Plan) -> None:
    text = plan.explain()
    assert "mesh (x=3)" in text and plan.status in text and "nominal" in text
    assert "reduce_scatter" in text and "[@x, -]" in text
    assert "f32[32@x, 10]" in plan.explain("up.weight")
    assert "contract" in plan.explain("down")
    with pytest.raises(PlanError, match="no node, parameter or module"):
        plan.explain("sideways")


def test_collectives_are_listed_with_price_and_phase(plan: Plan) -> None:
    assert {c.kind for c in plan.collectives} <= set(PLAN_KINDS)
    for c in plan.collectives:
        assert c.axes == ("x",) and c.nbytes > 0 and c.seconds > 0 and c.phase in ("forward", "backward")
    graph = plan.to_networkx()
    assert set(graph) >= {c.value for c in plan.collectives}


def test_graph_and_drawings(plan: Plan, tmp_path: Path) -> None:
    graph = plan.to_networkx()
    assert {"up_weight", "relu"} <= set(graph)
    assert plan.draw(tmp_path / "plan.svg").read_text().startswith("<svg")
    assert "digraph" in plan.draw(tmp_path / "plan.dot").read_text()


def run_saved(rank: int, path: str) -> tuple[Tensor, str, bool]:
    model, x = two_linear(), data()[0]
    parallel(model, (("x", 3),), (x,), plan=path)
    return model(x).detach(), model.autoshard_plan.fingerprint, model.autoshard_plan == Plan.load(path)


def test_a_saved_plan_runs(ranks: RankPool, tmp_path: Path) -> None:
    # Not what the search would choose, so that running it shows that no search was made.
    plan = planned(constraints={"up.weight": [Shard(1)]})
    plan.save(tmp_path / "plan.json")
    wanted = two_linear()(data()[0]).detach()
    for output, fingerprint, same in ranks.run(run_saved, str(tmp_path / "plan.json"), world=3):
        assert_close(output, wanted)
        assert fingerprint == plan.fingerprint and same
