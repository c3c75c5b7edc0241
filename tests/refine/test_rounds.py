"""What is timed next, and the plan under invented times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard.plan.plan import Plan
from autoshard.plan.task import Task, search_plan
from autoshard.refine.rounds import MOST_ROUNDS, ROUGH_GAP, Rounds
from autoshard.refine.time_work import TimedStore
from autoshard.refine.timed_cases import AGAIN, Case, refining_seconds
from cost_model.timed import TimedKernel, TimedPrices
from passes.predict.step_work import CollectiveCase, KernelCase
from passes.search.search_terms import COLD, Narrowing, SearchStart
from tests.refine.tasks import task, timed

STORE = TimedStore({"machines": "invented"})
Times = Callable[[Task, tuple[Case, ...]], TimedPrices]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def begun(one: Task, store: TimedStore = STORE) -> Rounds:
    return Rounds(one, store, lambda *_: 1000.0)


def refined(one: Task, times: Times, store: TimedStore = STORE) -> tuple[Plan, int]:
    """The plan, and how many rounds it took."""
    rounds, count = begun(one, store), 0
    while cases := rounds.wanted():
        rounds.add(times(one, cases))
        count += 1
    return rounds.plan, count


def halved_features_are_slow(one: Task, cases: tuple[Case, ...]) -> TimedPrices:
    """Products of 32 of the 64 features in the forward: 100 times as long as modelled."""
    slow = lambda case: "m k, n k" in case.key.form and any(32 in shape for shape in case.key.shapes)
    return timed(one, cases, lambda case: 100.0 if slow(case) else 1.0)


def halved_features(plan: Plan) -> bool:
    """Whether a rank multiplies 32 features in the forward."""
    products = [record for record in plan.records if record.op == "contract" and record.phase == "forward"]
    read = [operand for product in products for operand in product.operands]
    shapes = {record.name: record.results[0].shape for record in plan.records if record.results}
    return any(32 in o.layout.max_local_shape(shapes[o.source], plan.mesh) for o in read)


def own_products(plan: Plan) -> set[tuple[tuple[int, ...], ...]]:
    """Local shapes of what its products read."""
    shapes = {record.name: record.results[0].shape for record in plan.records if record.results}
    local = lambda o: o.layout.max_local_shape(shapes[o.source], plan.mesh)
    return {tuple(map(local, record.operands)) for record in plan.records if record.op == "contract"}


def as_modelled(one: Task, cases: tuple[Case, ...]) -> TimedPrices:
    return timed(one, cases)


def test_a_time_that_contradicts_the_model_changes_the_plan() -> None:
    one = task()
    before = search_plan(one)
    after, rounds = refined(one, halved_features_are_slow)
    assert halved_features(before) and not halved_features(after)
    assert 1 < rounds <= MOST_ROUNDS
    assert {record.priced for record in after.records if record.op == "contract"} == {"timed"}


def test_times_that_agree_with_the_model_change_nothing() -> None:
    one = task()
    before, (after, rounds) = search_plan(one), refined(one, as_modelled)
    assert after.planned.layouts == before.planned.layouts and rounds == 1
    assert after.step_time == pytest.approx(before.step_time)


@pytest.mark.parametrize(("limit", "gap"), [(None, ROUGH_GAP), (10**9, 0.0)])
def test_the_first_search_is_rough_and_those_after_it_start_from_its_plan(
    limit: int | None, gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[SearchStart] = []

    def spied(task: Task, deadline: Any, rivals: Any = None, start: SearchStart = COLD) -> Plan:
        if task.narrowing == Narrowing():  # of no family
            starts.append(start)
        return search_plan(task, deadline, rivals or (lambda _: None), start)

    monkeypatch.setattr("autoshard.refine.rounds.search_plan", spied)
    rounds = begun(replace(task(), memory_limit=limit))
    first = rounds.plan
    rounds.add(timed(task(), rounds.wanted()))
    assert starts == [SearchStart(gap=gap), SearchStart(first.planned.layouts)]


def test_the_next_best_of_the_second_search_are_timed_though_the_plan_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first search knows none. Without families, which would be others to time."""
    one = task()
    other, _ = refined(one, halved_features_are_slow, TimedStore({"machines": "others"}))
    monkeypatch.setattr(Rounds, "_best_of_families", lambda _: iter(()))

    def told(task: Task, deadline: Any, rivals: Any = None, start: SearchStart = COLD) -> Plan:
        if rivals is not None and start.near is not None:
            rivals(task.judged(other.planned.layouts))
        return search_plan(task, deadline, start=start)

    monkeypatch.setattr("autoshard.refine.rounds.search_plan", told)
    rounds = begun(one)
    first = rounds.plan
    rounds.add(timed(one, rounds.wanted()))
    assert rounds.plan.planned.layouts == first.planned.layouts
    shapes = {case.key.shapes for case in rounds.wanted() if isinstance(case, KernelCase)}
    assert own_products(other) - own_products(first) <= shapes
    assert own_products(other) != own_products(first)


def test_a_step_that_is_not_worth_it_is_proven_after_all() -> None:
    one = task()
    rounds = Rounds(one, STORE, lambda *_: 0.0)
    assert rounds.wanted() == () and rounds.plan.status == "optimal"
    assert rounds.plan.cost == pytest.approx(search_plan(one).cost)


def test_slow_collectives_are_done_without() -> None:
    one = task()
    assert search_plan(one).collectives

    def slow(one: Task, cases: tuple[Case, ...]) -> TimedPrices:
        return timed(one, cases, collective_factor=lambda _: 1e5)

    after, _ = refined(one, slow)
    assert not after.collectives


def test_explain_and_the_file_say_what_was_timed() -> None:
    one = task()
    assert "unrefined: every price is modelled" in search_plan(one).explain()
    plan, _ = refined(one, as_modelled)
    text = plan.explain()
    assert "refined on these devices: " in text and "% timed" in text and "unrefined" not in text
    (line, *_) = [line for line in text.splitlines() if "[x]" in line]
    assert line.endswith((" timed", "near a timed one"))
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.origin.timed == plan.origin.timed != ""
    assert again.explain() == text
    product = next(record.name for record in plan.records if record.op == "contract")
    assert plan.explain(product).splitlines()[0].endswith(" timed")


def test_the_plan_can_still_be_asked() -> None:
    plan, _ = refined(task(), halved_features_are_slow)
    assert (
        "slower" in plan.why_not("DDP")
        or "the plan is one" in plan.why_not("DDP")
        or "as fast" in plan.why_not("DDP")
    )
    assert isinstance(plan.crossovers(), tuple)


def test_the_second_start_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = task()
    plan, _ = refined(one, halved_features_are_slow)
    monkeypatch.setattr("autoshard.refine.rounds.search_plan", lambda *a, **k: pytest.fail("searched again"))
    rounds = begun(one)
    assert rounds.wanted() == () and rounds.plan == plan


def test_another_model_reads_the_times_of_the_first() -> None:
    """The rows are others, so near shapes alone are there: the next plan starts from their times."""
    refined(task(), halved_features_are_slow)
    other = begun(task(rows=16))
    assert {"near", "timed"} & {record.priced for record in other.plan.records}


def test_a_plan_of_which_all_was_timed_before_has_those_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing left to time, too: the plan is not the one that was searched under modelled prices."""
    one = task()
    expensive = lambda one, cases: timed(one, cases, lambda case: 3.0)
    first, _ = refined(one, expensive)
    pinned = replace(one, pins=first.parameter_layouts)
    modelled = search_plan(pinned).step_time
    refined(pinned, expensive)
    monkeypatch.setattr("autoshard.refine.rounds.kept_plan", lambda *_: None)
    second, rounds = refined(pinned, expensive)
    assert rounds == 0 and second.planned.layouts == first.planned.layouts
    assert second.step_time == pytest.approx(first.step_time) and second.step_time > 1.5 * modelled


def test_equal_times_find_one_plan() -> None:
    one, other = (
        refined(task(), halved_features_are_slow, TimedStore({"machines": name}))[0] for name in "ab"
    )
    assert one == other


def test_times_of_other_software_are_not_used() -> None:
    refined(task(), halved_features_are_slow)
    newer = begun(task(), TimedStore({"machines": "invented", "torch": "99"}))
    assert newer.plan.origin.timed == "" and newer.wanted()


def test_what_was_timed_before_takes_as_much_longer_as_what_is_timed_again() -> None:
    """Between two rounds the machine became half as fast."""
    one = task()
    rounds = begun(one)
    rounds.add(halved_features_are_slow(one, rounds.wanted()))
    before = {kernel.key: kernel.seconds for kernel in rounds.timed.kernels}
    cases = rounds.wanted()
    again, new = cases[:AGAIN], cases[AGAIN:]
    assert {case.key for case in again if isinstance(case, KernelCase)} <= before.keys() and new
    assert not any(case.key in before for case in new if isinstance(case, KernelCase))
    twice = tuple(TimedKernel(c.key, c.work, 2.0 * before[c.key]) for c in again if isinstance(c, KernelCase))
    assert len(twice) == AGAIN
    rounds.add(TimedPrices(twice))
    assert {kernel.key: kernel.seconds for kernel in rounds.timed.kernels} == {
        key: pytest.approx(2.0 * seconds) for key, seconds in before.items()
    }


def test_what_cannot_be_timed_is_not_asked_for_again() -> None:
    one = task()
    rounds = begun(one)
    assert rounds.wanted()
    rounds.add(TimedPrices())
    assert rounds.wanted() == ()


@pytest.mark.parametrize("share", [1.5, 1e3])
def test_what_there_was_no_time_for_counts_twice(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collectives of the first plan take 1.5 of its step, or 1,000. The search then does without any: two ranks
    multiply all, in 2 steps; nobody has timed those products, so 4 are feared."""
    monkeypatch.setattr("autoshard.refine.rounds.MOST_ROUNDS", 1)
    one = task()
    rounds = begun(one)
    first, cases = rounds.plan, rounds.wanted()
    factor = share * first.step_time / sum(c.seconds for c in first.collectives)
    given = timed(one, cases, collective_factor=lambda _: factor)
    mine = own_products(first)
    rounds.add(
        replace(
            given,
            kernels=tuple(k for k in given.kernels if "contract" not in k.key.form or k.key.shapes in mine),
        )
    )
    assert first.collectives and not rounds.plan.collectives
    if rounds.wanted():
        rounds.add(TimedPrices())  # there was no time for it
    assert rounds.wanted() == ()
    assert (rounds.plan.planned.layouts == first.planned.layouts) == (share < 3.0)
    assert begun(one).wanted() or share < 3.0, "the next start goes on"


def test_where_time_is_up_the_first_plan_has_the_prices_that_were_timed() -> None:
    """No search follows: what is unknown of the plan is timed, once."""
    one = task()
    rounds = Rounds(one, STORE, lambda *_: 1e-9)
    first, cases = rounds.plan, rounds.wanted()
    rounds.add(timed(one, cases, lambda _: 2.0))
    assert rounds.wanted() == ()
    assert (
        rounds.plan.planned.layouts == first.planned.layouts and rounds.plan.step_time > 1.1 * first.step_time
    )
    assert "unrefined" not in rounds.plan.explain()


@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_what_is_unknown_of_the_plan_that_was_chosen_is_timed_at_last(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only search under timed prices does without collectives, in products that nobody has timed. If these take
    what was modelled, the plan stays and is kept; if they take 1,000 times as long, the first one is the plan."""
    monkeypatch.setattr("autoshard.refine.rounds.MOST_ROUNDS", 1)
    one = task()
    rounds = begun(one)
    first, cases = rounds.plan, rounds.wanted()
    mine = own_products(first)
    slow = 20.0 * first.step_time / sum(c.seconds for c in first.collectives)
    given = timed(one, cases, collective_factor=lambda _: slow)
    kept = (k for k in given.kernels if "contract" not in k.key.form or k.key.shapes in mine)
    rounds.add(replace(given, kernels=tuple(kept)))
    unknown = rounds.wanted()
    assert {case.key.shapes for case in unknown if isinstance(case, KernelCase)} >= own_products(
        rounds.plan
    ) - mine
    rounds.add(timed(one, unknown, lambda _: factor))
    assert rounds.wanted() == ()
    assert (rounds.plan.planned.layouts == first.planned.layouts) == (factor > 1.0)
    assert {record.priced for record in rounds.plan.records if record.op == "contract"} == {"timed"}
    assert begun(one).plan == rounds.plan and not begun(one).wanted(), "the next start goes on with nothing"


def test_the_plan_comes_first_and_rivals_are_timed_too() -> None:
    one = task()
    plan = search_plan(one)
    rounds = begun(one)
    cases = rounds.wanted()
    kinds = {type(case) for case in cases}
    assert kinds == {KernelCase, CollectiveCase}
    products = {case.key.shapes for case in cases if isinstance(case, KernelCase) and "contract" in case.op}
    assert own_products(plan) < products


def test_a_step_must_be_worth_the_wait() -> None:
    """200 steps, a quarter of the time limit and 8 s with 40 ms a node at most, and not less than 5 seconds."""
    assert refining_seconds(0.1, 600.0, 1000) == pytest.approx(20.0)
    assert refining_seconds(3.0, 600.0, 10_000) == 150.0
    assert refining_seconds(3.0, 600.0, 300) == pytest.approx(20.0)
    assert refining_seconds(3.0, 600.0, 300, "inductor") == pytest.approx(22.0)
    assert refining_seconds(0.02, 600.0, 1000, "inductor") == 0.0
    assert refining_seconds(3.0, 10.0, 1000) == 0.0
    short = Rounds(task(), STORE, lambda *_: 0.0)
    assert short.wanted() == () and short.plan.origin.timed == ""
