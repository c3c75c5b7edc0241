"""The end of a process whose watch is on its way out itself."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from autoshard.watching.crew import Member
from autoshard.watching.telling import Board
from autoshard.watching.watch import Watch
from autoshard.watching.watch_state import State, Turns


class Group:
    """A process group that is not the world's, so that a watch over it leaves."""


def test_the_end_of_the_process_waits_for_a_watch_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would abort a process whose thread comes back from the store after its end."""
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", ends.append)
    group = Group()
    watch = Watch(HashStore(), 0, 1, group, "cpu")
    inside, done = threading.Event(), threading.Event()

    def slow(name: str, value: Any) -> None:
        if value.ended:
            inside.set()
            time.sleep(0.3)
            done.set()

    watch.start()
    monkeypatch.setattr(watch.board, "write", slow)
    assert inside.wait(30.0)
    ends[0]()
    assert done.is_set()


def leaving_of_rank_0(turns: int, other: State) -> tuple[threading.Thread, Board]:
    """Rank 0 has had so many turns and leaves, in a thread; rank 1, whose board it is, has told `other`."""
    store, group = HashStore(), Group()
    watch = Watch(store, 0, 2, group, "cpu")
    board = Board(store, 1, 2)
    board.write("member", Member("elsewhere", 1))
    board.write("state", other)
    for _ in range(turns):
        watch.turns.begin("a")
        watch.turns.end()
    # As its own thread does when the group is gone.
    thread = watch._thread = threading.Thread(target=watch._leave)
    thread.start()
    return thread, board


def state_after(turns: int, **told: Any) -> State:
    had = Turns()
    for _ in range(turns):
        had.begin("a")
    return State(1, turns=had.last(), **told)


@pytest.mark.parametrize("behind", [state_after(2, inside=True), state_after(1)])
def test_the_store_stays_until_all_have_ended_the_turns_of_all(behind: State) -> None:
    leaving, board = leaving_of_rank_0(2, behind)
    leaving.join(0.5)
    assert leaving.is_alive()
    board.write("state", state_after(2))
    leaving.join(30.0)
    assert not leaving.is_alive()


@pytest.mark.parametrize(
    "other", [state_after(2), state_after(3, inside=True), state_after(1, waits="barrier")]
)
def test_nobody_waits_for_a_rank_that_may_wait_for_it(other: State) -> None:
    leaving, _ = leaving_of_rank_0(2, other)
    leaving.join(30.0)
    assert not leaving.is_alive()
