"""A refined plan runs for a few real steps before the first: what it learns, leaves alone and keeps."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from autoshard import autoshard
from autoshard.plan.derived_plans import rehearsed_plan
from autoshard.plan.plan_content import Rehearsed
from autoshard.plan.task import search_plan
from autoshard.refine.refine import DividedRounds
from autoshard.runtime import starting
from autoshard.runtime.observe import StageRecorder
from autoshard.runtime.trial_run import RaceEntry, Track
from cost_model.measure.clock import Marks
from passes.stages.pipeline_orders import Action
from tests.plans.test_rehearsed_plan import in_stages
from tests.ranks import RankFailure, RankPool
from tests.refine.programs import WithLoss, given, measured, mesh, steadily_timed, trained_alone
from tests.refine.tasks import task
from tests.runtime.test_race import third_step_fails

Said = tuple[float, float | None, float | None, str, int, bool]


def rehearsed(rank: int, folder: str, seconds: float | None, room: bool, **options: Any) -> Said:
    """The plan's step, what was modelled and measured, its fingerprint, how many steps ran, and whether the model was
    left alone. seconds: what rank 0's clock says of each, and rank 1's half of it; None: what it measures."""
    model, x = WithLoss(), given()
    model(x).backward()
    watched = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), x]
    before = [t.detach().clone() for t in (*watched, torch.get_rng_state())]
    ran, alone = [0], [True]
    step, copied = Track.step, RaceEntry.free

    def counted(track: Track, name: str, entry: RaceEntry) -> float:
        ran[0] += 1
        took = step(track, name, entry)
        return took if seconds is None else seconds / (1 + rank)

    def freed(entry: RaceEntry) -> None:
        now = (*watched, torch.get_rng_state())
        alone.append(all(map(torch.equal, before, now)))
        copied(entry)

    with steadily_timed(folder) as (_, _), pytest.MonkeyPatch.context() as own:
        own.setattr("autoshard.refine.refine.DividedRounds", partial(DividedRounds, budget=lambda *_: 1000.0))
        own.setattr(Track, "step", counted)
        own.setattr(RaceEntry, "free", freed)
        if not room:
            own.setattr(Track, "room", lambda track, limit: 1)
        whole = autoshard(model, mesh(), (x,), profile=measured(), tune="first", backend="eager", **options)
    plan = whole.autoshard_plan
    torch.testing.assert_close(whole(x).detach(), trained_alone())
    known = plan.rehearsed
    said = (None, None) if known is None else (known.modelled, known.measured)
    return plan.step_time, *said, plan.fingerprint, ran[0], all(alone)


@pytest.fixture(scope="module")
def refined_once(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a start without a rehearsal leaves on disk."""
    folder = tmp_path_factory.mktemp("refined")
    for _, modelled, _, _, ran, _ in ranks.run(rehearsed, str(folder), 3.0, False, world=2):
        assert modelled is None and ran == 0  # there was no room
    return folder


@pytest.fixture
def refined(refined_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(refined_once, tmp_path / "cache")


def test_not_where_its_steps_take_long() -> None:
    """Five at least, in a tenth of the time limit; nor where they are not worth it."""
    plan = search_plan(task())
    timed = replace(plan, step_time=1.0, origin=structs.replace(plan.origin, timed="some"))
    assert [starting.is_to_rehearse(timed, limit) for limit in (49.0, 51.0)] == [False, True]
    # There was no time for it; 200 steps of 20 ms are not worth it.
    untimed = replace(timed, origin=plan.origin)
    assert starting.is_to_rehearse(untimed, 51.0)
    assert not starting.is_to_rehearse(replace(untimed, step_time=0.02), 51.0)
    assert not starting.is_to_rehearse(rehearsed_plan(timed, 0.5), 51.0)


def test_what_stages_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second before the pieces, 2 and 3 of pieces, half a second after them."""
    clock, now = StageRecorder(Marks()), iter([0.0, 0.0, 1.0, 2.0, 4.0, 5.0, 8.0, 11.0, 11.5])
    monkeypatch.setattr("autoshard.runtime.observe.time.perf_counter", lambda: next(now))
    action = Action("forward", 0, 0)
    clock.begins("begin")
    clock.begins("pieces")
    for _ in range(2):
        with clock.action(action):
            pass
    clock.begins("end")
    clock.begins("done")
    assert [(step.busy, step.trained) for step in clock.steps()] == [(6.5, False)]


def test_ranks_are_as_busy_as_their_median_steps() -> None:
    """The slowest rank takes 2 s and computes 1.5 of them, the other computes 0.9 of 1 s and waits for it: 0.6 of both
    ranks' time."""
    plan = in_stages(1.0)
    slowest = [2.2, 2.0, 1.8], [1.5, 1.6, 1.4]
    found = starting._as_measured(plan, [slowest, ([1.0] * 3, [0.9] * 3)])
    assert found.rehearsed == Rehearsed(plan.step_time, 2.0, pytest.approx((1.5 + 0.9) / 4.0))
    assert found.step_time == pytest.approx(2.0)
    untold = starting._as_measured(plan, [([2.0], []), ([1.0], [])])
    assert untold.rehearsed == Rehearsed(plan.step_time, 2.0) and untold.bubble == pytest.approx(plan.bubble)


def test_the_slowest_rank_decides_and_the_next_start_knows(ranks: RankPool, refined: Path) -> None:
    first = ranks.run(rehearsed, str(refined), 3.0, True, world=2)
    again = ranks.run(rehearsed, str(refined), 9.0, True, world=2)
    for step, modelled, took, _, _, alone in (*first, *again):
        assert step == took == 3.0 and modelled is not None and 0.0 < modelled < 3.0 and alone
    assert len({said[3] for said in (*first, *again)}) == 1
    assert [said[4] for said in first] == [2 + starting._LEAST_STEPS] * 2
    assert [said[4] for said in again] == [0, 0]


def test_by_the_clock_itself(ranks: RankPool, refined: Path) -> None:
    one, other = ranks.run(rehearsed, str(refined), None, True, world=2)
    assert one[:4] == other[:4] and one[0] == one[2] and 0.0 < one[0] < 60.0
    assert one[5] and other[5]


@pytest.mark.parametrize("options", [{"refine": "off"}, {"race": 2}], ids=lambda one: next(iter(one)))
def test_what_was_not_refined_or_raced_is_not_rehearsed(
    ranks: RankPool, refined: Path, options: dict[str, Any]
) -> None:
    for said in ranks.run(rehearsed, str(refined), 3.0, True, world=2, **options):
        assert said[1:3] == (None, None)


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"stages": "x", "micro_batches": 2}], ids=len)
def test_pieces_and_stages_are_rehearsed_once(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    first = ranks.run(rehearsed, str(tmp_path), 3.0, True, world=2, **options)
    again = ranks.run(rehearsed, str(tmp_path), 9.0, True, world=2, **options)
    for step, modelled, took, _, _, alone in (*first, *again):
        assert step == pytest.approx(3.0) and took == 3.0
        assert modelled is not None and 0.0 < modelled < 3.0 and alone
    assert len({said[3] for said in (*first, *again)}) == 1
    assert [said[4] for said in first] == [2 + starting._LEAST_STEPS] * 2
    assert [said[4] for said in again] == [0, 0]


def failed(rank: int, folder: str) -> None:
    with steadily_timed(folder), third_step_fails(rank):
        autoshard(WithLoss(), mesh(), (given(),), profile=measured(), tune="first", backend="eager")


def test_a_rank_that_fails_ends_the_others(ranks: RankPool, refined: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(failed, str(refined), world=2)
    first, second = (failure.value.errors[rank] for rank in range(2))
    assert "ValueError: the third step" in second
    assert "RankError: rank 1 failed in a rehearsal of the plan" in first


def without_memory(rank: int, folder: str) -> tuple[bool, Tensor]:
    """Rank 1 has none for the copies."""

    def copies(entry: RaceEntry) -> None:
        if rank == 1:
            raise MemoryError("no room")

    with steadily_timed(folder), pytest.MonkeyPatch.context() as own:
        own.setattr(RaceEntry, "copies", copies)
        whole = autoshard(WithLoss(), mesh(), (given(),), profile=measured(), tune="first", backend="eager")
    return whole.autoshard_plan.rehearsed is None, whole(given()).detach()  # type: ignore[union-attr]


def test_without_memory_for_copies_training_goes_on(ranks: RankPool, refined: Path) -> None:
    for none, loss in ranks.run(without_memory, str(refined), world=2):
        assert none
        torch.testing.assert_close(loss, trained_alone())
