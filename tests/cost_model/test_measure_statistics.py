"""Sampling and statistics with a scripted clock; links fitted to times that the link model made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from cost_model.errors import ProfileError
from cost_model.groups import group_ranks, model_lines, occupancy, shapes_of
from cost_model.measure.collective_work import whole_size
from cost_model.measure.kernel_work import DTYPES, device_rates, device_series, matmul_flops
from cost_model.measure.links import PEAK_MARGIN, Levels, fit_links, hidden_share, waiting_share
from cost_model.measure.measure import levels_of, nbytes_ladder, overlap_efficiency
from cost_model.measure.peers import Peers, Team
from cost_model.measure.sampling import Bench, Series, sample
from cost_model.measurements import (
    KINDS,
    CollectiveSamples,
    LinkLevel,
    SampledCurve,
    curve,
    median,
    pooled,
    spread,
)
from cost_model.mesh import MeshSpec
from cost_model.profile_record import check_profile


class Scripted:
    """A clock on which work of a size takes `seconds(size)`, and nothing else takes time."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds_of = seconds
        self.time = 0.0
        self.calls: list[tuple[int, int]] = []

    def now(self) -> float:
        return self.time

    def seconds(self, work: Callable[[], object], calls: int, ahead: bool = False) -> float:
        size = work()
        assert isinstance(size, int)
        self.calls.append((size, calls))
        self.time += self.seconds_of(size) * calls
        return self.seconds_of(size)


def sized(name: str, *sizes: int) -> Series:
    return Series(name, sizes, lambda size: lambda: size, least=0.0)


def quiet(what: str, spent: float) -> None:
    assert what and 0.0 <= spent <= 1.0


# ---- statistics


@pytest.mark.parametrize(
    ("repeated", "expected"),
    [
        ([[1.0], [3.0], [2.0], [5.0]], [1.0, 2.5, 2.5, 5.0]),
        ([[1.0], [3.0, 3.0, 9.0], [2.0], [5.0]], [1.0, 3.0, 3.0, 5.0]),
        ([[4.0], [3.0], [2.0]], [3.0, 3.0, 3.0]),
        ([[1.0], [6.0], [4.0], [2.0], [5.0]], [1.0, 4.0, 4.0, 4.0, 5.0]),
        ([[1.0, 1.0, 900.0], [2.0, 2.0]], [1.0, 2.0]),
    ],
)
def test_falling_times_are_pooled(repeated: list[list[float]], expected: list[float]) -> None:
    assert pooled(repeated) == expected


def test_spread_is_interquartile_range_over_median() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((4.0 - 2.0) / 3.0)
    assert spread([7.0]) == 0.0
    assert curve({8: [3.0, 1.0, 2.0], 4: [9.0]}) == SampledCurve((4, 8), (9.0, 2.0), (0.0, 0.5), (2.5, 2.5))


# ---- sampling


def test_the_sweep_stops_at_the_share_and_the_rest_is_repeated() -> None:
    # Each size is called four times in the sweep. Of 100 s, 60 are for it: sizes 1 to 4 take 40,
    # and size 8 would take 32 more.
    clock = Scripted(float)
    (found,) = sample([sized("a", 1, 2, 3, 4, 8, 16)], Peers(None), clock, 100.0, quiet)
    assert found == SampledCurve((1, 2, 3, 4), (1.0, 2.0, 3.0, 4.0), (0.0,) * 4, (1.0, 2.0, 3.0, 4.0))
    sizes = [size for size, _ in clock.calls]
    assert sizes[:16] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert sizes[16:24] == [1, 2, 3, 4] * 2
    assert 100.0 <= clock.time <= 104.0


def test_what_is_always_measured_comes_first() -> None:
    clock = Scripted(float)
    one = Series("a", (1, 2, 4, 8, 16), lambda size: lambda: size, least=0.0, always=(1, 8))
    (found,) = sample([one], Peers(None), clock, 100.0, quiet)
    # 1 and 8 take 36 of the 60 s, and no smaller size can take longer than 8 did: 32 s would be too
    # many for 2, which is not known yet to be quicker.
    assert found.sizes == (1, 8)
    (found,) = sample([one], Peers(None), Scripted(float), 200.0, quiet)
    # 120 s: 36 for those; 2 may take 32, and takes 8; 4 may take 32, takes 16; 16 would take 64 more.
    assert found.sizes == (1, 2, 4, 8)


def test_three_sizes_at_least_whatever_they_take() -> None:
    curves = sample([sized("a", 10, 20, 30, 40), sized("b", 5)], Peers(None), Scripted(float), 1.0, quiet)
    assert [c.sizes for c in curves] == [(10, 20, 30), (5,)]


def test_shares_are_equal() -> None:
    curves = sample([sized(n, 1, 2, 3, 4, 5, 6) for n in "ab"], Peers(None), Scripted(float), 100.0, quiet)
    # 30 s each: 1 + 2 + 3 take 24, 4 would make it 40.
    assert [c.sizes for c in curves] == [(1, 2, 3)] * 2


def test_short_work_is_called_in_a_row() -> None:
    clock = Scripted(lambda size: 1e-3)
    sample([Series("a", (1,), lambda size: lambda: size, least=10e-3)], Peers(None), clock, 0.1, quiet)
    assert clock.calls[:4] == [(1, 1), (1, 1), (1, 10), (1, 10)]


def test_what_ranks_say_is_combined_by_the_series() -> None:
    class Three(Peers):
        def numbers(self, seconds: float, spent: float) -> list[tuple[float, ...]]:
            return [(seconds, spent), (seconds * 3, 9.0), (seconds * 2, 9.0)]

    one, other = sized("max", 1), Series("median", (1,), lambda size: lambda: size, median, 0.0)
    curves = sample([one, other], Three(None), Scripted(float), 10.0, quiet)
    assert [c.seconds for c in curves] == [(3.0,), (2.0,)]


def test_work_that_cannot_be_prepared_says_where() -> None:
    def refuse(size: int) -> Callable[[], object]:
        raise MemoryError(f"{size} bytes")

    with pytest.raises(ProfileError, match=r"measuring a failed on rank 0: MemoryError: 7 bytes\n  try: "):
        sample([Series("a", (7,), refuse)], Peers(None), Scripted(float), 1.0, quiet)


# ---- what is measured


def test_every_group_of_axes_once() -> None:
    assert shapes_of(MeshSpec({"dp": 2, "one": 1, "tp": 4})) == {
        ((2, 4),): ("dp",),
        ((4, 1),): ("tp",),
        ((8, 1),): ("dp", "tp"),
    }
    three = shapes_of(MeshSpec({"a": 2, "b": 2, "c": 2}))
    assert three[((2, 4), (2, 1))] == ("a", "c") and three[((4, 2),)] == ("a", "b") and len(three) == 7


def test_sizes() -> None:
    assert nbytes_ladder(2**16) == (2**12, 2**14, 2**16)
    assert nbytes_ladder(100_000) == (2**12, 2**14, 2**16, 100_000)
    assert whole_size(4096, 4) == 4096 and whole_size(4096, 3) == 4104 == 4 * 9 * 114


def test_device_rates_by_hand() -> None:
    def made(sizes: tuple[int, ...], seconds: tuple[float, ...], spread: tuple[float, ...]) -> SampledCurve:
        return SampledCurve(sizes, seconds, spread, seconds)

    launch, memory = made((50,), (150e-6,), (0.1,)), made((10, 1000), (1e-9, 1e-7), (0.0, 0.0))
    product = made((1000, 8000), (2e-6, 4e-6), (0.1, 0.2))  # two products each
    rates = device_rates([launch, memory, *[product] * len(DTYPES)])
    assert rates.launch_seconds == pytest.approx(3e-6)
    assert rates.memory_bytes_per_second == pytest.approx(1e10)
    assert [r.dtype for r in rates.matmul] == list(DTYPES)
    assert rates.matmul[0].flops == (1000.0, 8000.0) and rates.matmul[0].spread == (0.1, 0.2)
    assert rates.matmul[0].flops_per_second == pytest.approx((1e9, 4e9))


def test_device_series_run_and_leave_the_generator_alone() -> None:
    before = torch.get_rng_state()
    series = device_series(torch.device("cpu"))
    assert [s.name for s in series] == ["launch", "memory", *(f"{d} products" for d in DTYPES)]
    for one in series:
        one.prepare(one.sizes[0])()
    assert series[2].sizes[:2] == (matmul_flops(16), matmul_flops(32)) == (8192, 65536)
    assert torch.equal(torch.get_rng_state(), before)


def test_large_products_of_a_gpu_fit_into_a_start() -> None:
    """Eleven series share four seconds. Kernels of an H100: 600 and 50 TFLOP/s, 3 TB/s, at least 5 us; a call takes
    three times as long to time, for the device is held until the host is ahead."""

    class Ahead(Scripted):
        def seconds(self, work: Callable[[], object], calls: int, ahead: bool = False) -> float:
            taken = super().seconds(work, calls, ahead)
            self.time += 2 * taken * calls
            return taken

    gpu = device_series(torch.device("cuda"))

    def sizes(index: int, rate: float) -> tuple[int, ...]:
        one = replace(gpu[index], prepare=lambda size: lambda: size)
        rest = [sized(str(i), 1) for i in range(10)]
        taken = Ahead(lambda size: max(5e-6, size / rate))
        return sample([one, *rest], Peers(None), taken, 4.0, quiet)[0].sizes

    assert sizes(3, 3e14)[-1] == matmul_flops(8192)  # two products each
    assert sizes(2, 2.5e13)[-1] >= matmul_flops(4096)
    assert sizes(1, 3e12)[-1] == 2**29


@pytest.mark.parametrize(
    ("communication", "compute", "both", "share"),
    [
        (2.0, 3.0, 3.0, 1.0),
        (2.0, 3.0, 5.0, 0.0),
        (2.0, 3.0, 4.0, 0.5),
        (2.0, 3.0, 6.0, 0.0),
        (3.0, 2.0, 1.0, 1.0),
    ],
)
def test_hidden_share(communication: float, compute: float, both: float, share: float) -> None:
    assert hidden_share(communication, compute, both) == share


@pytest.mark.parametrize(
    ("seconds", "processor", "share"), [(4.0, 1.0, 0.75), (4.0, 4.0, 0.0), (4.0, 5.0, 0.0), (4.0, 0.0, 1.0)]
)
def test_waiting_share(seconds: float, processor: float, share: float) -> None:
    assert waiting_share(seconds, processor) == share


class Always:
    """A clock by which all work takes as long."""

    def __init__(self, taken: float) -> None:
        self.taken = taken

    def now(self) -> float:
        return 0.0

    def seconds(self, work: Callable[[], object], calls: int, ahead: bool = False) -> float:
        return self.taken


def test_what_hides_on_shared_cores_is_what_no_core_works_for() -> None:
    """Another clock for kernels says that ranks share cores: of 8 ms by the clock 2 are processor time."""
    teams = {((2, 1),): Team(cast(dist.ProcessGroup, None), (0, 1))}
    clocks, spec, device = (Always(8e-3), Always(2e-3)), MeshSpec({"x": 2}), torch.device("cpu")
    bench = Bench(spec, device, Peers(None), teams, *clocks, lambda name, share: None)
    assert overlap_efficiency(bench, (), None, 1.0) == 0.75  # type: ignore[arg-type]
    assert overlap_efficiency(replace(bench, teams={}), (), None, 1.0) == 0.0  # type: ignore[arg-type]


# ---- links


@pytest.mark.parametrize(
    ("hosts", "levels"),
    [
        ("aaaa", Levels(("inside the host",), (None,))),
        ("aabb", Levels(("inside a host", "between hosts"), (2, None))),
        ("abab", Levels(("between hosts",), (None,))),
        ("ab", Levels(("between hosts",), (None,))),
        ("aab", Levels(("between hosts",), (None,))),
    ],
)
def test_levels_follow_the_hosts(hosts: str, levels: Levels) -> None:
    assert levels_of(hosts) == levels


def modelled(
    links: Sequence[LinkLevel], launch: float, groups: Sequence[tuple[tuple[int, int], ...]]
) -> list[CollectiveSamples]:
    """Times that the link model gives."""
    samples: list[CollectiveSamples] = []
    for group in groups:
        where = occupancy(group_ranks(group), [link.ranks for link in links])
        for kind in KINDS:
            lines = model_lines(kind, where, links, launch)
            sizes = (2**12, 2**18, 2**28)
            times = tuple(min(line(size) for line in lines) for size in sizes)
            samples.append(CollectiveSamples(kind, group, sizes, times))
    return samples


def test_links_that_the_model_made_are_found_again(round_profile: object) -> None:
    links = (LinkLevel("in", 4, 20e-6, 10e9, 20e9), LinkLevel("out", None, 100e-6, 1e9, 2e9))
    samples = modelled(links, 50e-6, [((4, 1),), ((2, 1),), ((2, 4),), ((8, 1),)])
    launch, found = fit_links(Levels(("in", "out"), (4, None)), samples)
    assert launch == pytest.approx(50e-6, rel=0.2)
    assert [link.ranks for link in found] == [4, None]
    for link, true in zip(found, links, strict=True):
        assert link.latency_seconds == pytest.approx(true.latency_seconds, rel=0.2)
        assert link.bytes_per_second == pytest.approx(true.bytes_per_second, rel=0.05)
        # The best that any group got is the true rate: the peak is the margin above it.
        assert link.peak_bytes_per_second <= 1.01 * PEAK_MARGIN * true.bytes_per_second
    check_profile("test", found, samples, round_profile.device)  # type: ignore[attr-defined]


def test_flat_and_odd_times_still_give_links_that_pass(round_profile: object) -> None:
    flat = [CollectiveSamples(kind, ((3, 1),), (36, 3600, 360000), (1e-3, 1e-3, 1e-3)) for kind in KINDS]
    launch, links = fit_links(Levels(("all",), (None,)), flat)
    assert launch > 0.0 and links[0].latency_seconds > 0.0
    check_profile("test", links, flat, round_profile.device)  # type: ignore[attr-defined]
