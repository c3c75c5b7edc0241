"""The end of a process whose watch is on its way out itself."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from autoshard.watching.watch import Watch


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
