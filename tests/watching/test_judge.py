"""What ranks tell about themselves, and whether something is wrong."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed import HashStore

from autoshard.watching.telling import Board, Telling
from autoshard.watching.watch_state import State, Turns, first_difference, judge


def state(rank: int, *keys: str, inside: bool = True, seconds: float = 60.0) -> State:
    turns = Turns()
    for key in keys:
        turns.begin(key)
    return State(rank, turns=turns.last(), inside=inside, seconds=seconds, place="train.py:7")


def by_rank(*states: State) -> dict[int, State]:
    return {s.rank: s for s in states}


def test_ranks_that_only_come_late_are_right() -> None:
    ahead, behind = state(0, "a", "b", "c"), state(1, "a", "b", inside=False)
    assert judge(by_rank(ahead, behind)) is None
    assert judge(by_rank(ahead, replace(behind, waits="barrier", seconds=1.0))) is None
    assert judge(by_rank(ahead, state(1, "a", "b", "c"))) is None


def test_the_first_turn_that_differs_is_named() -> None:
    assert judge(by_rank(state(0, "a", "b", "c"), state(1, "a", "x"), state(2, "a", "b"))) == (
        "the ranks do different things in turn 2\n"
        "  ranks 0, 2: turn 2, b, at train.py:7\n"
        "  rank 1: turn 2, x, at train.py:7\n"
        "  try: the same calls in the same order on every rank: shapes, train() and eval(), frozen parameters, "
        "backward and skipped steps alike"
    )


def test_a_difference_is_seen_after_any_number_of_turns() -> None:
    ours, theirs = Turns(), Turns()
    for number in range(100):
        ours.begin("step")
        theirs.begin("other" if number == 3 else "step")
    assert first_difference(ours.last(), theirs.last()) == 69  # 100 turns, of which the last 32 are kept
    assert first_difference(ours.last(), ours.last()) is None


def test_a_rank_that_left_is_missed_only_in_a_turn() -> None:
    left = replace(state(1, "a", inside=False), ended="has ended")
    assert judge(by_rank(state(0, "a", inside=False), left)) is None
    found = judge(by_rank(state(0, "a", "b"), left))
    assert found is not None
    assert found.startswith(
        "rank 1 has ended before turn 2, in which others wait\n  rank 0: turn 2, b, at train.py:7\n"
    )


def test_ranks_that_wait_for_each_other_do_not_wait_for_ever() -> None:
    waiting = [replace(state(rank, "a", inside=False), waits="barrier") for rank in (1, 2)]
    found = judge(by_rank(state(0, "a", "b"), *waiting))
    assert found is not None
    assert found.startswith(
        "the ranks wait for each other: turn 2 is of all ranks, and ranks 1, 2 wait elsewhere\n"
    )
    assert "ranks 1, 2: turn 1, a, waits in barrier, at train.py:7" in found
    # One that computes may still come, and let the others go.
    assert judge(by_rank(state(0, "a", "b"), waiting[0], replace(waiting[1], waits=""))) is None


def test_who_waits_must_have_said_so_since_the_other_was_in_its_turn() -> None:
    """What was told may be old: rank 1 waited for rank 0, which came, and both are on their way."""
    ahead, late = state(0, "a", "b"), state(0, "a", inside=False)
    waiting = replace(state(1, "a", inside=False), waits="barrier", beat=5)
    now = by_rank(ahead, waiting)
    assert judge(now) is not None
    assert judge(now, {}) is None
    assert judge(now, by_rank(late, replace(waiting, beat=4))) is None, "rank 0 had not come then"
    assert judge(now, by_rank(ahead, waiting)) is None, "rank 1 has told nothing since"
    assert judge(now, by_rank(replace(ahead, seconds=1.0), replace(waiting, beat=4))) is None
    assert judge(now, by_rank(ahead, replace(waiting, beat=4))) is not None


def test_a_new_state_is_told_as_new() -> None:
    """However long the one before it was."""
    turns = Turns()
    telling = Telling(Board(HashStore(), 0, 2), turns)
    telling._since -= 60.0
    turns.begin("a")
    telling.tell()
    assert telling.told.inside and telling.told.seconds == 0.0
    telling._since -= 60.0
    telling._told_at -= 60.0
    telling.tell()
    assert telling.told.beat > 1 and telling.told.seconds >= 60.0
