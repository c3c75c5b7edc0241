"""What computing takes where ranks share cores, by hand."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from cost_model.measure import clock as processor_clock
from cost_model.measure.clock import ProcessorClock, compute_clock, ranks_per_core
from cost_model.measure.peers import Peers, machine_id
from cost_model.measure.sampling import Series, sample

HERE = machine_id()


class Said(Peers):
    """This rank among others that say (machine, cores, threads)."""

    def __init__(self, *others: tuple[str, set[int], int]) -> None:
        super().__init__(None)
        self._others = [(machine, frozenset(cores), threads) for machine, cores, threads in others]

    def everyones(self, value):  # type: ignore[no-untyped-def]
        return [value, *self._others]


@pytest.fixture(autouse=True)
def _two_cores_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_clock, "own_cores", lambda: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def test_ranks_that_share_cores() -> None:
    assert ranks_per_core(Said(*[(HERE, {0, 1}, 1)] * 3)) == 2.0
    assert ranks_per_core(Said(*[(HERE, {0, 1}, 1)] * 2)) == 1.5
    # Two of two threads each: every core has one rank's work, in two halves.
    assert ranks_per_core(Said((HERE, {0, 1}, 2))) == 1.0
    # Each its own core, cores of others, other hosts.
    assert ranks_per_core(Said()) is None
    assert ranks_per_core(Said((HERE, {0, 1}, 1))) is None
    assert ranks_per_core(Said(*[(HERE, {2, 3}, 1)] * 3)) is None
    assert ranks_per_core(Said(*[("elsewhere", {0, 1}, 1)] * 3)) is None
    # A rank that may use more cores than this one.
    assert ranks_per_core(Said(*[(HERE, {1, 2}, 1)] * 3)) == pytest.approx(4 / 3)


def test_hosts_emulated_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two network namespaces do, each with a host name of its own."""
    monkeypatch.setattr(socket, "gethostname", lambda: "host1")
    assert ranks_per_core(Said(*[(HERE, {0, 1}, 1)] * 3)) == 2.0


def test_only_computing_on_shared_cores_has_a_clock_of_its_own() -> None:
    crowd = Said(*[(HERE, {0, 1}, 1)] * 3)
    assert compute_clock("cpu", crowd) == ProcessorClock(2.0)
    assert compute_clock("cuda", crowd) is None and compute_clock("cpu", Said()) is None


def test_processor_time_counts_for_each_rank_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([10.0, 10.6])
    monkeypatch.setattr(time, "process_time", lambda: next(used))
    called: list[int] = []
    assert ProcessorClock(2.0).seconds(lambda: called.append(1), 3) == pytest.approx(2.0 * 0.6 / 3)
    assert len(called) == 3


class Scripted:
    """Takes the given seconds, one repetition after the other, then the last for ever."""

    def __init__(self, *seconds: float) -> None:
        self._left, self.asked, self._now = list(seconds), 0, 0.0

    def now(self) -> float:
        """Every budget is spent at once: nothing is repeated that need not be."""
        self._now += 100.0
        return self._now

    def seconds(self, work: object, calls: int, ahead: bool = False) -> float:
        self.asked += 1
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]


def test_a_series_may_have_its_own_clock() -> None:
    ours, theirs = Scripted(2.0), Scripted(5.0)
    series = Series("a", (1,), lambda _: lambda: None, clock=ours), Series("b", (1,), lambda _: lambda: None)
    own, other = sample(series, Peers(None), theirs, 1.0, lambda *_: None)  # type: ignore[arg-type]
    assert own.seconds == (2.0,) and other.seconds == (5.0,) and ours.asked == theirs.asked


@pytest.mark.parametrize("first", [(9.0,), (90.0, 60.0, 40.0, 9.0), (90.0, 60.0, 40.0, 20.0, 9.0)], ids=len)
def test_calls_that_still_become_faster_are_not_counted(first: tuple[float, ...]) -> None:
    series, clock = Series("a", (1,), lambda _: lambda: None), Scripted(*first, 8.5)
    (curve,) = sample([series], Peers(None), clock, 1.0, lambda *_: None)
    assert 8.5 <= min(curve.medians) <= max(curve.medians) <= 9.0
