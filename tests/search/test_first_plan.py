"""After the time limit one remainder is left for a first plan, and nothing begins when that has passed."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from autoshard import MeshSpec, find_plan
from autoshard.plan.micro_batches import fastest_of
from cost_model.deadline import FIRST_PLAN_SECONDS, Deadline, OutOfTime
from cost_model.errors import InfeasibleError
from passes.search.find import Sought
from tests.plans.test_head_pieces import LIMIT, speaker
from tests.profiles import slow_compute

SECONDS = 100.0
LAST = SECONDS + FIRST_PLAN_SECONDS


class Clock:
    """begun: when each search with time left began, and until when it lasts, as seconds of this clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.begun: list[tuple[float, float]] = []

    def find(self, asked: Sought, deadline: Deadline) -> None:
        """A search that takes all of its time, and finds nothing."""
        if deadline.left > 0.0:
            self.begun.append((self.now, deadline.at))
            self.now = deadline.at
        raise OutOfTime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("cost_model.deadline.time.monotonic", lambda: clock.now)
    monkeypatch.setattr("autoshard.plan.task.find_fastest", clock.find)
    return clock


def late(clock: Clock, model: nn.Module, mesh: dict[str, int], *inputs: Any, **options: Any) -> list[float]:
    """When searches end that last longer than the limit."""
    options = {"profile": slow_compute(), "backend": "eager", "time_limit": SECONDS, **options}
    with pytest.raises(InfeasibleError, match="time_limit"):
        find_plan(model, MeshSpec(mesh), inputs, **options)
    assert all(begin < end <= LAST for begin, end in clock.begun)
    assert all(end <= begin for (_, end), (begin, _) in zip(clock.begun, clock.begun[1:], strict=False))
    return [end for _, end in clock.begun if end > SECONDS]


@pytest.mark.parametrize("pieces", [1, 2, "auto"])
def test_one_search_of_a_first_plan_lasts_longer_than_the_limit(clock: Clock, pieces: int | str) -> None:
    """Whole until three fourths of the time, and 20 s more; then with the head in pieces. As many
    micro-batches as "auto" would try next are not looked at."""
    model, ids = speaker()
    assert late(clock, model, {"dp": 2}, ids, memory_limit=LIMIT, micro_batches=pieces) == [LAST]
    whole = 0.75 * SECONDS + FIRST_PLAN_SECONDS
    assert [end for _, end in clock.begun[1::2]] == [whole, LAST] and len(clock.begun) == 4


def test_a_mesh_of_two_axes_has_one_remainder(clock: Clock) -> None:
    """Axes together, which takes all of it; apart, they are not searched."""
    assert late(clock, nn.Linear(8, 8), {"a": 2, "b": 2}, torch.zeros(8, 8)) == [LAST]


@pytest.mark.parametrize("stages", ["pp", "auto"])
def test_stages_have_it_together(clock: Clock, stages: str) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    mesh, x = {"pp": 2, "dp": 2}, torch.zeros(8, 8)
    assert len(late(clock, model, mesh, x, stages=stages, micro_batches=2)) <= 1


def test_what_is_not_needed_has_none(clock: Clock) -> None:
    """More micro-batches, once there is a plan."""
    ends = Deadline.after(SECONDS)
    heard: list[Deadline] = []

    def planned(count: int, until: Deadline) -> Any:
        heard.append(until)
        return Mock(step_time=count)

    assert fastest_of([1, 2], planned, ends).step_time == 1
    clock.now = SECONDS
    assert heard == [ends, ends.firm] and not ends.over and ends.firm.over
    clock.now = LAST
    assert ends.over and ends.share(0.5).over


def test_shares_have_what_is_left_of_the_remainder(clock: Clock) -> None:
    ends = Deadline.after(SECONDS, first_plan=40.0)
    half = ends.share(0.5)
    assert (half.at, half.last) == (50.0, 70.0) and half.earlier(10.0).last == 70.0
    clock.now = 70.0
    assert half.over and ends.share(0.5).last == 105.0
    clock.now = 130.0
    assert ends.share(0.5).last <= ends.last == 140.0


def test_each_of_several_stages_has_a_remainder(clock: Clock) -> None:
    """Once those before it have plans, however late that is; what needs no plan has none."""
    ends = Deadline.after(SECONDS)
    clock.now = LAST - 1.0
    assert ends.of_each_part.last == LAST - 1.0 + FIRST_PLAN_SECONDS
    assert ends.firm.of_each_part.over and ends.firm.of_each_part.last == ends.firm.last
