"""A profile with measured times written into it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.collectives import CollectivePrices
from cost_model.compute import ComputePrices
from cost_model.measurements import KINDS, CollectiveSamples
from cost_model.mesh import MeshSpec
from cost_model.profile import CollectiveTime, Profile, corrected_profile
from cost_model.timed import KernelWork

MESH = MeshSpec({"dp": 2, "tp": 4})
KB = 1000


def sampled(profile: Profile) -> Profile:
    """All-reduce over 4 adjacent ranks: 10 us for 1 KB, 20 us for 10 KB, 100 us for 100 KB."""
    samples = CollectiveSamples("all_reduce", ((4, 1),), (KB, 10 * KB, 100 * KB), (10e-6, 20e-6, 100e-6))
    return replace(profile, collectives=(samples,))


def corrected(
    profile: Profile, *times: tuple[str, tuple[str, ...], int, float], factor: float = 1.0
) -> Profile:
    return corrected_profile(profile, MESH, [CollectiveTime(*t) for t in times], factor, "a test")


def samples_of(profile: Profile, kind: str) -> dict[int, float]:
    (found,) = (s for s in profile.collectives if s.kind == kind)
    return dict(zip(found.nbytes, found.seconds, strict=True))


def test_a_measured_size_replaces_its_sample(round_profile: Profile) -> None:
    after = corrected(sampled(round_profile), ("all_reduce", ("tp",), 10 * KB, 30e-6))
    assert samples_of(after, "all_reduce") == {KB: 10e-6, 10 * KB: 30e-6, 100 * KB: 100e-6}
    assert after.links == round_profile.links
    assert after.name == "round (corrected)"
    assert after.sources == ("a test",)
    assert after.hash() != sampled(round_profile).hash()


def test_another_size_joins_the_samples(round_profile: Profile) -> None:
    after = corrected(sampled(round_profile), ("all_reduce", ("tp",), 5 * KB, 15e-6))
    assert samples_of(after, "all_reduce")[5 * KB] == 15e-6
    assert len(samples_of(after, "all_reduce")) == 4


def test_the_others_move_as_little_as_keeps_times_growing(round_profile: Profile) -> None:
    slow = corrected(sampled(round_profile), ("all_reduce", ("tp",), 5 * KB, 50e-6))
    assert samples_of(slow, "all_reduce") == {KB: 10e-6, 5 * KB: 50e-6, 10 * KB: 50e-6, 100 * KB: 100e-6}
    fast = corrected(sampled(round_profile), ("all_reduce", ("tp",), 50 * KB, 15e-6))
    assert samples_of(fast, "all_reduce") == {KB: 10e-6, 10 * KB: 15e-6, 50 * KB: 15e-6, 100 * KB: 100e-6}


def test_of_one_size_the_median_counts_and_noise_is_evened_out(round_profile: Profile) -> None:
    times = [("all_reduce", ("tp",), 10 * KB, t * 1e-6) for t in (30, 90, 40)]
    after = corrected(sampled(round_profile), *times, ("all_reduce", ("tp",), 20 * KB, 20e-6))
    # 40 us for 10 KB and 20 us for 20 KB: noise, so their mean for both.
    assert samples_of(after, "all_reduce")[10 * KB] == pytest.approx(30e-6)
    assert samples_of(after, "all_reduce")[20 * KB] == pytest.approx(30e-6)


def test_a_group_without_samples_gets_its_model_scaled(round_profile: Profile) -> None:
    before = CollectivePrices(round_profile, MESH)
    measured = 3 * before.seconds("all_gather", ("tp",), 10**6)
    after = corrected(round_profile, ("all_gather", ("tp",), 10**6, measured))
    prices = CollectivePrices(after, MESH)
    assert prices.seconds("all_gather", ("tp",), 10**6) == pytest.approx(measured)
    for nbytes in (10**5, 10**7):
        assert prices.seconds("all_gather", ("tp",), nbytes) == pytest.approx(
            3 * before.seconds("all_gather", ("tp",), nbytes), rel=0.1
        )
    assert prices.confidence("all_gather", ("tp",), 10**6) == "measured"


def test_what_the_same_links_carry_is_corrected_alike(round_profile: Profile) -> None:
    """All prices came from one model: where it is 3 times too fast for one kind, it is for the others."""
    before = CollectivePrices(round_profile, MESH)
    measured = 3 * before.seconds("all_gather", ("tp",), 10**6)
    prices = CollectivePrices(corrected(round_profile, ("all_gather", ("tp",), 10**6, measured)), MESH)
    same_links = 3 * before.seconds("reduce_scatter", ("tp",), 10**6)
    assert prices.seconds("reduce_scatter", ("tp",), 10**6) == pytest.approx(same_links)
    # Between nodes only the start of a collective is slower.
    assert prices.seconds("all_gather", ("dp",), 10**6) == pytest.approx(
        before.seconds("all_gather", ("dp",), 10**6) + 2 * 5e-6
    )


def test_no_time_beats_the_links_peak(round_profile: Profile) -> None:
    after = corrected(round_profile, ("all_gather", ("tp",), 10**9, 1e-9))
    # 3/4 of a gigabyte at 200 GB/s
    assert CollectivePrices(after, MESH).seconds("all_gather", ("tp",), 10**9) == pytest.approx(3.75e-3)


def test_kernels_take_as_much_longer(round_profile: Profile) -> None:
    before, after = ComputePrices(round_profile), ComputePrices(corrected(round_profile, factor=1.5))
    for flops, nbytes in ((0.0, 1e6), (1e7, 0.0), (1e9, 1e9)):
        assert after.work_seconds(KernelWork(flops, nbytes, "float32")) == pytest.approx(
            1.5 * before.work_seconds(KernelWork(flops, nbytes, "float32"))
        )


def test_correcting_twice_keeps_one_mark_in_the_name(round_profile: Profile) -> None:
    twice = corrected(corrected(round_profile))
    assert twice.name == "round (corrected)"
    assert twice.sources == ("a test", "a test")


TIMES = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from((("dp",), ("tp",), ("dp", "tp"))),
    st.integers(1, 10**8),
    st.floats(1e-9, 10.0),
)


@given(st.lists(TIMES, max_size=8), st.floats(0.01, 100.0), st.booleans())
def test_any_measurements_make_a_profile(
    round_profile: Profile, times: list[tuple[str, tuple[str, ...], int, float]], factor: float, known: bool
) -> None:
    before = sampled(round_profile) if known else round_profile
    after = corrected(before, *times, factor=factor)  # its own checks refuse an impossible one
    assert Profile.from_json(after.to_json(), "again") == after
