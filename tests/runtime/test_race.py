"""The last word by the clock, on real processes: what it keeps, what it leaves alone, what a failing rank does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from autoshard.plan.plan import Plan
from autoshard.runtime import starting
from autoshard.runtime.trial_run import RaceEntry, Track, update_like
from autoshard.watching.agreement import in_company
from cost_model.errors import ShardingError
from tests.api.programs import Axes, Normed, assert_close, data, device_mesh, full, normed, parallel, trained
from tests.ranks import RankFailure, RankPool

LINE: Axes = (("x", 2),)


class Dropped(Normed):
    """Buffers that training changes, and random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.nn.functional.dropout(x, 0.1, self.training))


def written(model: nn.Module, x: Tensor) -> list[Tensor]:
    """All that a race must leave alone."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [
        t.detach().clone()
        for t in (*model.parameters(), *model.buffers(), *gradients, x, torch.get_rng_state())
    ]


def left_alone(rank: int, at_once: bool) -> tuple[bool, int, str]:
    torch.manual_seed(0)
    model, x = Dropped(), data()[0]
    model(x).sum().backward()
    before = written(model, x)
    seen: list[bool] = []

    def compare(*args: Any) -> None:
        seen.append(all(map(torch.equal, before, written(model, x))))

    raced = starting._won  # the race itself: what follows lays the parameters out

    def watched(*args: Any) -> Any:
        won = raced(*args)
        compare()
        return won

    starting._won = watched
    try:
        parallel(model, LINE, (x,) if at_once else None, race=3)
        if not at_once:
            assert not hasattr(model, "autoshard_plan")
            model(x)
    finally:
        starting._won = raced
    plan = model.autoshard_plan
    assert [one.measured for one in plan.race] == sorted(one.measured for one in plan.race)
    gradients = all(p.grad is not None for p in model.parameters())
    return seen == [True] and gradients, len(plan.race), plan.explain()


@pytest.mark.parametrize(
    "at_once",
    [pytest.param(True, marks=pytest.mark.slow, id="example"), pytest.param(False, id="first call")],
)
def test_a_race_leaves_the_model_alone(ranks: RankPool, at_once: bool) -> None:
    replies = ranks.run(left_alone, at_once, world=2)
    assert [reply[:2] for reply in replies] == [(True, 3)] * 2
    assert replies[0][2] == replies[1][2]
    assert "raced, 3 plans: " in replies[0][2]


def raced_training(rank: int, count: int | None) -> tuple[list[float], dict[str, Tensor], int]:
    model = normed()
    if count is not None:
        parallel(model, LINE, race=count)
    losses = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 4)
    model.eval()
    model(data(6)[0])  # another kind of call does not race
    return losses, full(model.state_dict()), len(model.autoshard_plan.race) if count is not None else 0


@pytest.mark.parametrize(
    ("count", "raced"), [pytest.param(3, 3, marks=pytest.mark.slow), (2, 2), (1, 0), (0, 0)]
)
def test_training_is_as_without_a_race(ranks: RankPool, count: int, raced: int) -> None:
    wanted = raced_training(0, None)
    for losses, state, ran in ranks.run(raced_training, count, world=2):
        assert_close((losses, state), wanted[:2])
        assert ran == raced


def invented(rank: int, seconds: dict[str, float], beside: bool) -> tuple[list[str], list[str], str, str]:
    """A race whose clock says what it is told: of each plan, by its name."""
    ran: list[str] = []
    kept: dict[str, Plan] = {}

    def step(track: Track, name: str, entry: RaceEntry) -> float:
        ran.append(name)
        return seconds[name] * (1.0 + rank)

    def won(mesh: Any, starters: Any, limit: Any) -> Any:
        kept.update({starter.candidate.name: starter.candidate.plan for starter in starters})
        return old[2](mesh, starters, limit)

    old = Track.step, starting.beside_each_other, starting._won
    Track.step, starting.beside_each_other, starting._won = step, lambda needs, room: beside, won
    try:
        model = normed()
        parallel(model, LINE, (data()[0],), race=3)
    finally:
        Track.step, starting.beside_each_other, starting._won = old
    plan = model.autoshard_plan
    placed = str({name: p.placements for name, p in model.named_parameters()})
    assert placed == str(dict(kept[plan.race[0].name].parameters))
    return [one.name for one in plan.race], ran, plan.fingerprint, str([one.measured for one in plan.race])


def test_the_clock_decides(ranks: RankPool) -> None:
    """Also against the prediction; and by the slowest rank."""
    names = list(ranks.run(names_of_candidates, world=2)[0])
    seconds = dict(zip(names, (3.0, 2.0, 1.0), strict=True))
    for beside in (True, False):
        first, second = ranks.run(invented, seconds, beside, world=2)
        assert first == second
        order, ran, _, measured = first
        assert order == names[::-1] and measured == "[2.0, 4.0, 6.0]"
        assert {name: ran.count(name) for name in names} == dict.fromkeys(names, 2 + 5)
        met = list(dict.fromkeys(ran))
        together = ran[6:12] == [*met, *met[::-1]]
        assert together is beside


def names_of_candidates(rank: int) -> list[str]:
    model = normed()
    parallel(model, LINE, (data()[0],), race=3)
    return sorted(
        (one.name for one in model.autoshard_plan.race), key=lambda name: (name != "the search's", name)
    )


def out_of_memory(rank: int, failing: str) -> int:
    """Rank 1 has no memory for copies of one plan."""
    made, failures = RaceEntry.copies, [0]

    def copies(entry: RaceEntry) -> None:
        failures[0] += 1
        if rank == 1 and failures[0] == (1 if failing == "first" else 2):
            raise MemoryError("no room")
        made(entry)

    RaceEntry.copies = copies
    try:
        model = normed()
        parallel(model, LINE, (data()[0],), race=3)
    finally:
        RaceEntry.copies = made
    trained(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    return len(model.autoshard_plan.race)


@pytest.mark.parametrize(("failing", "raced"), [("first", 0), ("second", 2)])
def test_a_plan_without_memory_for_its_copies_is_left_out(ranks: RankPool, failing: str, raced: int) -> None:
    assert ranks.run(out_of_memory, failing, world=2) == [raced, raced]


@contextmanager
def third_step_fails(rank: int) -> Iterator[None]:
    """On rank 1, while the other waits for it in a collective."""
    stepped, count = RaceEntry.step, [0]

    def step(entry: RaceEntry) -> None:
        count[0] += 1
        if rank == 1 and count[0] == 3:
            raise ValueError("the third step")
        stepped(entry)

    RaceEntry.step = step
    try:
        yield
    finally:
        RaceEntry.step = stepped


def failed_step(rank: int) -> None:
    with third_step_fails(rank):
        parallel(normed(), LINE, (data()[0],), race=3)


def company(rank: int) -> None:
    with in_company(device_mesh(LINE), "a walk"):
        if rank == 1:
            raise ValueError("the third step")
        dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize(("fault", "where"), [(failed_step, "a race of "), (company, "a walk")])
def test_a_rank_that_fails_ends_the_others(ranks: RankPool, fault: Callable[[int], None], where: str) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(fault, world=2)
    first, second = (failure.value.errors[rank] for rank in range(2))
    assert "ValueError: the third step" in second
    assert f"RankError: rank 1 failed in {where}" in first and "the third step" in first


def refused(rank: int, bad: Any) -> str:
    model = normed()
    plan = None
    if bad == "with a plan":
        parallel(found := normed(), LINE, (data()[0],))
        plan, bad = found.autoshard_plan, 3
    try:
        parallel(model, LINE, (data()[0],), race=bad, plan=plan)
    except ShardingError as error:
        assert "forward" not in vars(model) and not hasattr(model, "autoshard_plan")
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    "bad",
    [-1, True, 1.5, "3", 10**5000, "with a plan"],
    ids=lambda bad: str(bad)[:12] if not isinstance(bad, int) or bad < 10 else "huge",
)
def test_what_is_no_number_of_plans_is_refused(ranks: RankPool, bad: Any) -> None:
    for said in ranks.run(refused, bad, world=2):
        assert said.startswith("race is ") and "\n  try: " in said


def test_the_update_is_that_of_the_users_optimizer() -> None:
    model, copies = nn.Linear(3, 3), [nn.Parameter(torch.ones(2))]
    assert type(first := update_like(model, copies)) is torch.optim.AdamW and first.defaults["fused"]
    whole = [nn.Parameter(torch.ones(2, dtype=torch.complex64))]
    assert not update_like(model, whole).defaults["fused"]
    own = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    found = update_like(model, copies)
    assert type(found) is torch.optim.SGD
    assert found.defaults["lr"] == 0.0 and found.defaults["momentum"] == 0.9
    assert found.param_groups[0]["params"] == copies
    copies[0].grad = torch.ones(2)
    found.step()
    assert torch.equal(copies[0], torch.ones(2))
    del own, found
    newton = torch.optim.LBFGS(model.parameters())
    assert type(update_like(model, copies)) is torch.optim.AdamW
    del newton


def unusual(rank: int) -> list[int]:
    """How many plans raced: on meta, of shards, of a DTensor, without gradients."""
    x = data()[0]
    with torch.device("meta"):
        empty = Normed()
    parallel(empty, LINE, (x,), race=2)
    assert all(p.is_meta for p in empty.parameters())
    shards = parallel(normed(), LINE, (x.chunk(2)[rank],), in_placements=[Shard(0)], race=2)
    given = distribute_tensor(x, device_mesh(LINE), [Shard(0)])
    placed = parallel(normed(), LINE, (given,), race=2)
    later = parallel(normed().eval(), LINE, race=2)
    with torch.no_grad():
        later(x)
    return [len(model.autoshard_plan.race) for model in (empty, shards, placed, later)]


@pytest.mark.slow
def test_a_race_needs_no_ordinary_call(ranks: RankPool) -> None:
    assert ranks.run(unusual, world=2) == [[2] * 4] * 2
