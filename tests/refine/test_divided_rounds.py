"""Plans in pieces and in stages under invented times: what is timed, and what changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autoshard.plan.division import Division
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.task import Task
from autoshard.refine.refine import DividedRounds
from autoshard.refine.time_work import TimedStore
from autoshard.refine.timed_cases import Case
from cost_model.mesh import MeshSpec
from cost_model.timed import TimedPrices
from passes.plan.planned_graph import NodeRecord
from passes.predict.step_work import CollectiveCase, KernelCase
from tests.plans.pipelines import PP, stage_task
from tests.ranks import RankPool
from tests.refine import programs
from tests.refine.tasks import task, timed

STORE = TimedStore({"machines": "invented"})
IN_STAGES, IN_PIECES = Division(4, "pp", "1f1b"), Division(2)
Times = Callable[[Task, tuple[Case, ...]], TimedPrices]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def refined(one: Task, division: Division, times: Times = timed) -> tuple[Plan, list[tuple[Case, ...]]]:
    """The plan, and what was timed in each round."""
    rounds, asked = DividedRounds(one, division, STORE, lambda *_: 1000.0), list[tuple[Case, ...]]()
    while cases := rounds.wanted():
        asked.append(cases)
        rounds.add(times(one, cases))
    return rounds.plan, asked


def unrefined(one: Task, division: Division) -> Plan:
    return DividedRounds(one, division, TimedStore({"machines": "none"}), lambda *_: 0.0).plan


def products(plan: Plan) -> list[NodeRecord]:
    stages = plan.stages if isinstance(plan, PipelinePlan) else (plan,)
    return [record for stage in stages for record in stage.records if record.op == "contract"]


def a_slow_layer(one: Task, cases: tuple[Case, ...]) -> TimedPrices:
    """The last, from 4 features to 3: all its products take 50 times as long as modelled."""
    slow = lambda case: {3, 4} <= set(itertools.chain(*case.key.shapes))
    return timed(one, cases, lambda case: 50.0 if slow(case) else 1.0)


def test_times_that_contradict_the_model_move_the_cut() -> None:
    one = stage_task("mlp", PP)
    before, (after, asked) = unrefined(one, IN_STAGES), refined(one, IN_STAGES, a_slow_layer)
    assert isinstance(before, PipelinePlan) and isinstance(after, PipelinePlan)
    assert before.cut != after.cut and len(asked) >= 1
    assert {record.priced for record in products(after)} == {"timed"}
    assert after.origin.timed and "refined on these devices: " in after.explain()
    assert not before.origin.timed and "unrefined: every price is modelled" in before.explain()


def test_what_is_timed_is_of_a_piece() -> None:
    """Of 5 rows in 4 pieces: 2 rows of each layer, in all stages."""
    plan, asked = refined(stage_task("mlp", PP), IN_STAGES)
    assert isinstance(plan, PipelinePlan) and len(plan.stages) == 2
    shapes = {s for cases in asked for c in cases if isinstance(c, KernelCase) for s in c.key.shapes}
    assert {(2, width) for width in (6, 12, 8, 16, 4)} <= shapes
    assert not any(5 in shape for shape in shapes)


@pytest.mark.parametrize("division", [IN_STAGES, IN_PIECES], ids=str)
def test_times_that_agree_with_the_model_change_nothing(division: Division) -> None:
    one = stage_task("mlp", PP) if division.stages else task()
    before, (after, asked) = unrefined(one, division), refined(one, division)
    assert len(asked) == 1 and after.step_time == pytest.approx(before.step_time)


def test_groups_of_a_stage_are_timed_where_they_are_on_the_whole_mesh() -> None:
    """Ranks of "dp" are two apart, with a stage between them: times are found again under that shape."""
    mesh = MeshSpec({"dp": 2, "pp": 2})
    slow = lambda one, cases: timed(one, cases, collective_factor=lambda case: 3.0)
    one = stage_task("mlp", mesh)
    before, (plan, asked) = unrefined(one, IN_STAGES), refined(one, IN_STAGES, slow)
    assert isinstance(plan, PipelinePlan) and isinstance(before, PipelinePlan)
    collectives = [case for cases in asked for case in cases if isinstance(case, CollectiveCase)]
    assert collectives and {case.axes for case in collectives} == {("dp",)}
    assert {each.priced for each in plan.collectives} == {"timed"}
    modelled = {(each.name, each.nbytes): each.seconds for each in before.collectives}
    known = [each for each in plan.collectives if (each.name, each.nbytes) in modelled]
    assert known
    for each in known:
        assert each.seconds == pytest.approx(3.0 * modelled[each.name, each.nbytes])


def test_a_plan_that_takes_all_of_the_budget_is_kept() -> None:
    one = task()
    rounds = DividedRounds(one, IN_PIECES, STORE, lambda *_: 1e-9)
    assert rounds.wanted() == () and isinstance(rounds.plan, Plan) and rounds.plan.micro_batches == 2
    assert not rounds.plan.origin.timed


@pytest.mark.parametrize(
    ("division", "limit", "whole"),
    [
        (Division(), 100, True),
        (Division("auto"), None, True),
        (Division("auto"), 100, False),
        (Division(2), None, False),
        (Division(1, "auto"), None, False),
    ],
    ids=str,
)
def test_what_is_run_as_one_has_rivals(division: Division, limit: int | None, whole: bool) -> None:
    """So that it is refined as without either option."""
    assert division.leaves_whole(limit) == whole


@pytest.mark.parametrize("division", [{"micro_batches": 2}, {"stages": "x", "micro_batches": 2}], ids=str)
def test_timed_once_on_all_ranks_and_not_the_next_time(
    division: dict[str, object], ranks: RankPool, tmp_path: Path
) -> None:
    first = ranks.run(programs.refined_in_parts, str(tmp_path), division, world=2)
    again = ranks.run(programs.refined_in_parts, str(tmp_path), division, world=2)
    assert all(origin.timed for origin, *_ in (*first, *again))
    assert len({fingerprint for _, fingerprint, *_ in (*first, *again)}) == 1
    assert first[0][2] > 0 and [count for _, _, count, _ in again] == [0, 0]
    expected = programs.trained_alone()
    for *_, loss in (*first, *again):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
