"""The plan is the program: what runs follows from the plan alone, under any prices, and is what `verify` checks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, Plan, PlanError, Profile, find_plan, verify
from autoshard.planning import canonical_capture
from autoshard.runtime.observe import PhaseRun
from autoshard.runtime.process_groups import axes_by_group
from autoshard.session import Session
from autoshard.task import prices_of
from passes.decide import decide_lowering
from passes.lower_redistribute import collective_nodes
from passes.lowering_plan import LoweringPlan
from passes.simulate import simulate, simulated_group_name
from tests.api.programs import assert_close, parallel
from tests.profiles import slow_compute
from tests.ranks import RankPool

AXES = (("a", 2), ("b", 2))


class Regression(nn.Module):
    """Three products and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.mix(torch.relu(self.up(x))))).square().mean()


def regression() -> Regression:
    torch.manual_seed(0)
    return Regression()


def rows() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def starts_cost_all() -> Profile:
    """Starting a collective costs so much that all that may share a bucket do, and few steps are better than cheap
    ones."""
    cpu = slow_compute()
    links = tuple(replace(link, latency_seconds=1e-3) for link in cpu.links)
    return replace(cpu, name="dear starts", links=links)


def bytes_cost_all() -> Profile:
    """Starting is free, and a byte is dear: nothing shares a bucket."""
    cpu = slow_compute()
    links = tuple(
        replace(link, latency_seconds=1e-12, bytes_per_second=link.bytes_per_second / 1e6)
        for link in cpu.links
    )
    return replace(cpu, name="dear bytes", links=links, collective_launch_seconds=1e-12)


PROFILES: dict[str, Callable[[], Profile | None]] = {
    "none": lambda: None,
    "searched with": starts_cost_all,
    "another": bytes_cost_all,
}


ROWS, COLUMNS = [Shard(0), Shard(0)], [Shard(1), Shard(1)]
PINS: dict[str, dict[str, list[Shard]]] = {
    # Under the prices of bytes, one group over both axes, which the plan has no collective of.
    "other groups": {"up.weight": ROWS, "mix.weight": COLUMNS},
    # Under the prices of bytes, no two gradients share a bucket.
    "other buckets": {"up.weight": COLUMNS, "mix.weight": ROWS, "down.weight": [Shard(0), Shard(1)]},
}


def planned(pins: str) -> Plan:
    ends = {"profile": starts_cost_all(), "constraints": PINS[pins]}
    return find_plan(regression(), MeshSpec(dict(AXES)), (rows(),), **ends)


@pytest.fixture(scope="module", params=PINS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(request.param)


@pytest.fixture(scope="module")
def path(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(file)
    return str(file)


def text(module: fx.GraphModule, groups: Mapping[str, Sequence[str]] | None = None) -> str:
    """groups: name -> axes, by which they are printed; None: they are named so already."""
    lines: list[str] = []
    started = collective_nodes(module.graph)
    for node in module.graph.nodes:
        line = node.format_node() or "output"
        if groups is not None and node in started:
            name = str(node.args[-1])
            line = line.replace(f", {name})", f", {simulated_group_name(groups[name])})")
        lines.append(line)
    return "\n".join(lines)


class Seen:
    """What ran, by phase."""

    def __init__(self, groups: Mapping[str, Sequence[str]]) -> None:
        self.groups = groups
        self.graphs: dict[str, str] = {}

    def begin(self, run: PhaseRun) -> None:
        backward = run.phases.backward
        assert backward is not None
        module = run.phases.forward if run.phase == "forward" else backward.module
        self.graphs[run.phase] = text(module, self.groups)

    def end(self, run: PhaseRun) -> None:
        pass


def run(rank: int, path: str, profile: str) -> tuple[Tensor, dict[str, str]]:
    """The gradient of a step, and the graphs that ran, groups named by their axes."""
    model = regression()
    parallel(model, AXES, (rows(),), plan=path, profile=PROFILES[profile]())
    session = Session.of(model)
    assert session is not None
    seen = Seen(axes_by_group(session.mesh))
    session.observers.append(seen)
    model(rows()).backward()
    gradient = model.up.weight.grad
    return gradient.full_tensor(), seen.graphs  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def ran(ranks: RankPool, path: str) -> dict[str, list[tuple[Tensor, dict[str, str]]]]:
    return {name: ranks.run(run, path, name, world=4) for name in PROFILES}


def test_prices_would_choose_otherwise(plan: Plan) -> None:
    """Otherwise the tests below would show nothing: under other prices the same layouts are lowered in another way."""
    joint = canonical_capture(regression(), (rows(),), {}).joint
    same, _ = decide_lowering(joint, plan.assignment, prices_of(starts_cost_all(), plan.mesh))
    assert same == plan.lowering
    other, _ = decide_lowering(joint, plan.assignment, prices_of(bytes_cost_all(), plan.mesh))
    assert other.steps != plan.lowering.steps
    assert groups_of(other) - groups_of(plan.lowering) or buckets(other) != buckets(plan.lowering)


def groups_of(lowering: LoweringPlan) -> set[frozenset[str]]:
    return {frozenset(step.axes) for steps in lowering.steps.values() for step in steps if step.kind}


def buckets(lowering: LoweringPlan) -> int:
    """Transfers that share one."""
    return len(lowering.turns) - len(set(lowering.turns.values()))


def test_any_profile_runs_the_same_program(ran: dict[str, list[tuple[Tensor, dict[str, str]]]]) -> None:
    model = regression()
    model(rows()).backward()
    for found in ran.values():
        for (gradient, graphs), (_, first) in zip(found, ran["none"], strict=True):
            assert graphs == first and set(graphs) == {"forward", "backward"}
            assert_close(gradient, model.up.weight.grad)


def test_verify_checks_what_runs(ran: dict[str, list[tuple[Tensor, dict[str, str]]]], path: str) -> None:
    checked: list[list[str]] = []

    def watched(graphs: Sequence[fx.GraphModule], *rest: Any) -> Any:
        checked.append([text(graph) for graph in graphs])
        return simulate(graphs, *rest)

    with mock.patch("autoshard.simulated_step.simulate", watched):
        assert verify(regression(), path, (rows(),)).ok
    forward, backward = checked
    for rank, (_, graphs) in enumerate(ran["another"]):
        assert (forward[rank], backward[rank]) == (graphs["forward"], graphs["backward"])


def test_nothing_that_lowers_knows_a_price() -> None:
    code = (
        "import sys, passes.rank_program\n"
        "print([m for m in sys.modules if m.startswith(('passes.search', 'passes.pricing', 'cost_model.profile',"
        " 'cost_model.collectives', 'cost_model.compute'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
