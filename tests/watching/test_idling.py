"""Who waits: a thread that sleeps, not one that the machine keeps from running."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from autoshard.watching.telling import Idling, wanted_seconds


def test_time_in_the_queue_counts_as_wanted() -> None:
    assert wanted_seconds("1500000000 2500000000 7\n") == 4.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux tells what threads want")
def test_a_thread_that_sleeps_is_idle_and_one_that_computes_is_not() -> None:
    over = threading.Event()
    asleep, awake = threading.Thread(target=over.wait), threading.Thread(target=spin, args=(over,))
    for thread in (asleep, awake):
        thread.start()
    sleeping, computing = (Idling(thread.native_id or 0) for thread in (asleep, awake))
    try:
        time.sleep(0.3)
        assert sleeping.is_idle()
        assert not computing.is_idle()
    finally:
        over.set()


def spin(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(100))
