"""Timing on a device that runs behind its host; both are scripted."""

from __future__ import annotations

import pytest

from cost_model.measure.clock import CudaClock, ahead_seconds
from cost_model.measure.peers import Peers
from cost_model.measure.sampling import Series, sample


class Apart:
    """A host and a device: a call takes the host `issue` seconds, and then, in turn, the device `run`."""

    def __init__(self, issue: float, run: float) -> None:
        self.issue, self.run = issue, run
        self.host = self.free = 0.0
        self.calls = 0

    def work(self) -> None:
        self.calls += 1
        self.host += self.issue
        self.free = max(self.host, self.free) + self.run

    def now(self) -> float:
        return self.host

    def hold(self, seconds: float) -> None:
        self.free = max(self.host, self.free) + seconds

    def mark(self) -> float:
        return max(self.host, self.free)

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def finish(self) -> None:
        self.host = max(self.host, self.free)


@pytest.mark.parametrize(("issue", "run"), [(50e-6, 15e-6), (50e-6, 2e-3), (1e-6, 15e-6)])
@pytest.mark.parametrize("calls", [1, 16, 40])
def test_the_device_counts_and_not_its_host(issue: float, run: float, calls: int) -> None:
    device = Apart(issue, run)
    assert ahead_seconds(device, device.work, calls) == pytest.approx(run)


def test_ranks_of_different_speed_call_equally_often() -> None:
    fast, slow = Apart(1e-6, 1e-6), Apart(1e-3, 5e-3)
    for device in (fast, slow):
        ahead_seconds(device, device.work, 40)
    # 2 that time the host, and one that is not timed before each of 3 runs.
    assert fast.calls == slow.calls == 40 + 2 + 3


def test_setting_up_holds_nothing_up() -> None:
    """The first call of all connects, for 2 s; a hold of that length for each of 17 calls would take a minute."""
    device = Apart(50e-6, 15e-6)
    first = True

    def work() -> None:
        nonlocal first
        device.host += 2.0 if first else 0.0
        first = False
        device.work()

    assert ahead_seconds(device, work, 16) == pytest.approx(15e-6)
    assert device.host < 2.1


def test_series_say_whose_time_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Apart(50e-6, 15e-6)
    clock = CudaClock()
    monkeypatch.setitem(vars(clock), "_device", device)
    monkeypatch.setattr(clock, "now", device.now)
    series = Series("small", (1,), lambda _: device.work, ahead=True, least=0.0)
    (curve,) = sample([series], Peers(None), clock, 1e-2, lambda what, spent: None)
    assert curve.medians == pytest.approx((15e-6,))
