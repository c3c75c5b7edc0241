"""All prices of a profile, and of what was timed, times one number."""

from __future__ import annotations

import pytest

from cost_model.collectives import CollectivePrices
from cost_model.compute import ComputePrices
from cost_model.measurements import KINDS, Lateness, UpdateRates
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile, paced
from cost_model.timed import KernelKey, KernelWork, TimedCollective, TimedKernel, TimedPrices

PACE = 1.37
MESH = MeshSpec({"dp": 4, "tp": 8})
WORKS = [
    KernelWork(0.0, 1e6, "float32", None),
    KernelWork(1e9, 1e6, "float32"),
    KernelWork(1e7, 1e9, "bfloat16", "attention", 1e8),
    KernelWork(1e8, 1e6, "float32", "convolution", 1e5, launched=False),
]
KEY = KernelKey("aten.mm.default", ((8, 16), (16, 4)))


@pytest.mark.parametrize("name", Profile.names())
def test_every_price_is_as_many_times_as_long(name: str) -> None:
    profile = Profile.named(name)
    longer = paced(profile, PACE)
    before, after = CollectivePrices(profile, MESH), CollectivePrices(longer, MESH)
    for kind in KINDS:
        for axes in (("dp",), ("tp",), ("dp", "tp")):
            for nbytes in (1, 4096, 3_000_000, 2**34):
                wanted = PACE * before.seconds(kind, axes, nbytes)
                assert after.seconds(kind, axes, nbytes) == pytest.approx(wanted, rel=1e-7)
    one, other = ComputePrices(profile), ComputePrices(longer)
    for work in WORKS:
        assert other.work_seconds(work) == pytest.approx(PACE * one.work_seconds(work))
    assert other.update_seconds(1e6, 7) == pytest.approx(PACE * one.update_seconds(1e6, 7))
    assert longer.overlap_efficiency == profile.overlap_efficiency


def test_a_measured_update_and_lateness_too() -> None:
    late = Lateness((0.01, 0.03), (0.0, 0.002), 4)
    profile = Profile.named("cpu")
    device = profile.device.__class__(**{**vars(profile.device), "update": UpdateRates(1e-5, 1e9)})
    own = Profile(**{**vars(profile), "device": device, "lateness": late})
    longer = paced(own, PACE)
    assert longer.device.update is not None and longer.lateness is not None
    wanted = PACE * ComputePrices(own).update_seconds(1e6, 7)
    assert ComputePrices(longer).update_seconds(1e6, 7) == pytest.approx(wanted)
    for computed in (0.0, 0.02, 0.5):
        assert longer.lateness.after(PACE * computed, 2) == pytest.approx(PACE * late.after(computed, 2))


def test_what_was_timed_too() -> None:
    collective = TimedCollective("all_reduce", ((2, 1),), 4096, 5e-3)
    timed = TimedPrices((TimedKernel(KEY, WORKS[1], 7.0),), (collective,))
    longer = paced(timed, PACE)
    assert [kernel.seconds for kernel in longer.kernels] == [PACE * 7.0]
    assert [one.seconds for one in longer.collectives] == [PACE * 5e-3]
    near = KernelKey(KEY.form, ((12, 16), (16, 4)))
    for key in (KEY, near, None):
        before = ComputePrices(Profile.named("cpu"), timed=timed).work_seconds(WORKS[1], key)
        after = ComputePrices(paced(Profile.named("cpu"), PACE), timed=longer).work_seconds(WORKS[1], key)
        assert after == pytest.approx(PACE * before)


def test_without_a_pace_nothing_changes() -> None:
    profile = Profile.named("h100")
    assert paced(profile, 1.0) is profile
