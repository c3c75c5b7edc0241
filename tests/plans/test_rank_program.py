"""The plan is the program: what runs follows from the plan alone, under any prices, and is what `verify` checks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, fx

from autoshard import Plan, verify
from autoshard.plan.judged import prices_of
from autoshard.planning import canonical_capture
from autoshard.reporting.report_steps import axes_by_group
from autoshard.runtime.observe import PhaseRun
from autoshard.runtime.session import Session
from cost_model.mesh import simulated_group_name
from passes.lower.phases import Phases
from passes.plan.decide import decide
from passes.plan.planned_graph import PlannedGraph
from passes.redistribution.lower_redistribute import collective_nodes
from passes.simulate.lockstep import simulate
from tests.api.programs import assert_close, parallel
from tests.plans.two_prices import (
    AXES,
    PINS,
    PROFILES,
    bytes_cost_all,
    planned,
    regression,
    rows,
    starts_cost_all,
)
from tests.ranks import RankPool


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
        assert isinstance(run.phases, Phases)
        backward = run.phases.backward
        assert backward is not None
        module = run.phases.forward if run.phase == "forward" else backward.module
        self.graphs[run.phase] = text(module, self.groups)

    def end(self, run: PhaseRun) -> None:
        pass


def run(rank: int, path: str, profile: str) -> tuple[Tensor, dict[str, str]]:
    """The gradient of a step, and the graphs that ran, groups named by their axes."""
    model = regression()
    parallel(model, AXES, (rows(),), plan=path, profile=PROFILES[profile](), backend="aot_eager")
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
    same = decide(joint, plan.planned.layouts, prices_of(starts_cost_all(), plan.mesh))
    assert (same.steps, same.turns, same.ahead) == (
        plan.planned.steps,
        plan.planned.turns,
        plan.planned.ahead,
    )
    other = decide(joint, plan.planned.layouts, prices_of(bytes_cost_all(), plan.mesh))
    assert other.steps != plan.planned.steps
    assert (groups_of(other), buckets(other)) != (groups_of(plan.planned), buckets(plan.planned))


def groups_of(planned: PlannedGraph) -> set[frozenset[str]]:
    return {frozenset(step.axes) for steps in planned.steps.values() for step in steps if step.kind}


def buckets(planned: PlannedGraph) -> int:
    """Transfers that share one."""
    return len(planned.turns) - len(set(planned.turns.values()))


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

    with mock.patch("autoshard.verification.simulated_step.simulate", watched):
        assert verify(regression(), path, (rows(),)).ok
    _, forward, backward, _ = checked
    for rank, (_, graphs) in enumerate(ran["another"]):
        assert (forward[rank], backward[rank]) == (graphs["forward"], graphs["backward"])


def test_nothing_that_lowers_knows_a_price() -> None:
    code = (
        "import sys, passes.lower.rank_program\n"
        "print([m for m in sys.modules if m.startswith(('passes.search', 'passes.strategies.prices', "
        "'cost_model.profile', 'cost_model.collectives', 'cost_model.compute'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
