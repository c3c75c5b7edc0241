"""Several files to one profile: the newest counts, noise is averaged, and nothing is faster than its links."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.errors import ProfileError
from cost_model.measurements import CollectiveSamples, LinkLevel, pooled
from cost_model.profile import Profile
from cost_model.readers import read_profile
from cost_model.readers.points import Place, group_of
from cost_model.readers.read import NOISE, worst_fall
from tests.cost_model.reader_files import altered, line_of, points, sample

H100 = Profile.named("h100")
KEY = "all_reduce", ((8, 1),), 2**20
ROW = "     1048576        262144     float     sum      -1"


def written(path: Path, year: int) -> Path:
    """`path`, last modified in `year`."""
    seconds = datetime(year, 1, 2).timestamp()
    os.utime(path, (seconds, seconds))
    return path


@pytest.fixture
def slower(tmp_path: Path) -> Path:
    """all_reduce_perf.txt as it would print with 1.1 times the time of 1 MiB (24.31 us, 43.13 and 75.48 GB/s)."""
    path = altered(
        tmp_path, "all_reduce_perf.txt", f"{ROW}    22.10   47.45   83.04", f"{ROW}    24.31   43.13   75.48"
    )
    average = next(line for line in path.read_text(encoding="utf-8").split("\n") if "Avg bus" in line)
    value = float(average.split(":")[1])
    text = path.read_text(encoding="utf-8").replace(
        average, f"# Avg bus bandwidth    : {value - 7.56 / 50:.4f} "
    )
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("order", [1, -1])
def test_newest_of_two_sources_wins_and_is_named(
    tmp_path: Path, slower: Path, order: int, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    usual = altered(tmp_path / "other", "all_reduce_perf.txt", "#", "#")
    for new, old, micros in ((slower, usual, 24.31), (usual, slower, 22.10)):
        files = [written(new, 2026), written(old, 2025)][::order]
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            profile = read_profile(files)
        assert points(profile)[KEY] == pytest.approx(micros * 1e-6)
        note = f"all_reduce over 8 ranks, stride 1: 18 sizes of {old} replaced by the newer of {new}"
        assert note in profile.sources
        assert note in caplog.text
        assert profile.date == "2026-01-02"


def test_equally_old_sources_count_in_the_order_given(tmp_path: Path, slower: Path) -> None:
    usual = sample("all_reduce_perf.txt")
    same = written(slower, 2026)
    (tmp_path / "other").mkdir()
    other = written(altered(tmp_path / "other", usual.name, "#", "#"), 2026)
    assert points(read_profile([other, same]))[KEY] == pytest.approx(24.31e-6)
    assert points(read_profile([same, other]))[KEY] == pytest.approx(22.10e-6)


def test_time_in_the_file_counts_more_than_the_date_of_the_file(tmp_path: Path) -> None:
    """The stamped file says March 2026, whenever it was copied; the other was written in 2027."""
    stamped = written(altered(tmp_path, "all_reduce_noisy.txt", "#", "#"), 2030)
    (tmp_path / "other").mkdir()
    later = written(altered(tmp_path / "other", "all_reduce_perf.txt", "#", "#"), 2027)
    assert points(read_profile([stamped, later]))[KEY] == pytest.approx(22.10e-6)


def test_files_of_several_collectives_and_sizes_join() -> None:
    names = ["all_reduce_perf.txt", "broadcast.txt", "all_reduce.json", "torch_dist_bench.txt"]
    profile = Profile.from_nccl_tests(*map(sample, names))
    assert [(s.kind, s.group) for s in profile.collectives] == [
        ("all_gather", ((8, 1),)),
        ("all_reduce", ((8, 1),)),
        ("all_reduce", ((16, 1),)),
        ("broadcast", ((8, 1),)),
        ("point_to_point", ((8, 1),)),
    ]
    assert Profile.from_json(profile.to_json(), "again") == profile


def test_small_falls_are_averaged_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    """4 KiB took 15% longer, 8 KiB 7% less than by the line 18 us + size * 1.75 / 350 GB/s."""
    with caplog.at_level(logging.WARNING):
        profile = read_profile([sample("all_reduce_noisy.txt")])
    found = points(profile)
    times = [found["all_reduce", ((8, 1),), 1024 * 2**i] * 1e6 for i in range(15)]
    assert times == sorted(times)
    note = (
        "all_reduce over 8 ranks, stride 1: 5 of 15 times averaged with neighbours: they fell by up to 19.0%"
    )
    assert note in profile.sources and note in caplog.text


def test_large_fall_is_refused(tmp_path: Path) -> None:
    """64 MiB in 250 us after 32 MiB in 400 us, 37.5% less, passes; in 238 us, 40.5% less, not."""
    path = tmp_path / "table.md"
    text = (
        "The average bandwidth of all_reduce over 8 ranks (5 warmups / 20 trials):\n"
        "| payload | busbw | algbw |\n| --: | --: | --: |\n"
        "| 32MiB | 146.800GBps | 83.886GBps |\n| 64MiB | {busbw}GBps | {algbw}GBps |\n"
    )
    path.write_text(text.format(busbw="469.762", algbw="268.435"), encoding="utf-8")
    fallen = points(read_profile([path]))
    assert fallen["all_reduce", ((8, 1),), 2**25] == pytest.approx(325e-6, rel=1e-4)  # the mean of both
    path.write_text(text.format(busbw="493.447", algbw="281.970"), encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        read_profile([path])
    assert str(caught.value) == (
        f"{path}:5: 67108864 bytes took 238 us, 40.5% less than the 400 us of 33554432 bytes at {path}:4; "
        "noise explains 40%\n"
        "  read: '| 64MiB | 493.447GBps | 281.970GBps |'\n"
        "  try: measure again with more iterations (-n 100 -w 20), or leave out the older of two runs"
    )


def test_single_size_is_refused() -> None:
    path = sample("all_reduce_bench_first.txt")
    with pytest.raises(
        ProfileError, match=rf"^{path}:1: a curve needs two sizes or more, and this is the only one"
    ):
        read_profile([path])


def test_faster_than_the_links_is_refused() -> None:
    """Over ports of 20 GB/s, 1 MiB takes 52.43 us at least; 256 KiB in 27.96 us is possible."""
    slow = replace(H100, links=(H100.links[0], LinkLevel("Ethernet", None, 1e-5, 10e9, 20e9)))
    path = sample("sendrecv_split.txt")
    with pytest.raises(ProfileError) as caught:
        read_profile([path], slow)
    first, read, remedy = str(caught.value).split("\n")
    assert first == (
        f"{path}:{line_of(path, '     1048576 ')}: 1048576 bytes in 45.83 us; at the links' peak, point_to_point "
        "over 2 ranks takes at least 52.43 us"
    )
    assert read.startswith("  read: '1048576        262144     float     sum      -1    45.83")
    assert remedy.endswith("if the machine is faster than its base profile, take a base with its links")


def test_stated_limit_of_bus_bandwidth() -> None:
    path = sample("all_reduce_perf.txt")
    read_profile([path], busbw_limit=351e9)
    with pytest.raises(
        ProfileError, match=r":38: a bus bandwidth of 326 GB/s is over the stated limit of 300 GB/s"
    ):
        read_profile([path], busbw_limit=300e9)


def test_reduction_in_switches_may_report_more_than_the_links_have(tmp_path: Path) -> None:
    """482 GB/s over 450 GB/s NVLink: real, with NVLink SHARP; an all-reduce needs S bytes a port."""
    path = tmp_path / "nvls.md"
    path.write_text(
        "The average bandwidth of all_reduce over 8 ranks (5 warmups / 20 trials):\n"
        "| payload | busbw | algbw |\n| --: | --: | --: |\n"
        "| 8GiB | 477.45GBps | 272.83GBps |\n| 16GiB | 482.26GBps | 275.58GBps |\n",
        encoding="utf-8",
    )
    assert len(points(read_profile([path]))) == 2


def one_rank_each(folder: Path) -> Path:
    """broadcast.txt as if its 8 ranks had run on 8 hosts."""
    text = sample("broadcast.txt").read_text(encoding="utf-8")
    for rank in range(8):
        text = text.replace(
            f"Rank  {rank} Group  0 Pid   {4000 + rank} on      node1",
            f"Rank  {rank} Group  0 Pid 1 on n{rank}",
        )
    path = folder / "broadcast.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_ranks_of_several_hosts_are_not_a_node(tmp_path: Path) -> None:
    path = one_rank_each(tmp_path)
    with pytest.raises(ProfileError) as caught:
        read_profile([path])
    first, read, remedy = str(caught.value).split("\n")
    assert first == (
        f"{path}:3: ranks 0 to 7 ran on 8 hosts; in the base profile one NVLink domain joins 8 ranks"
    )
    assert read == "  read: 'n0, n1, n2, n3, n4, n5, n6, n7'"
    assert "rank_stride=8" in remedy and "rank_stride=1" in remedy


def test_rank_stride_says_where_the_ranks_are(tmp_path: Path) -> None:
    path = one_rank_each(tmp_path)
    fast = replace(H100, links=(replace(H100.links[0], ranks=None),))
    assert {group for _, group, _ in points(read_profile([path], fast, rank_stride=8))} == {((8, 8),)}
    assert {group for _, group, _ in points(read_profile([path], rank_stride=1))} == {((8, 1),)}
    with pytest.raises(ProfileError, match="rank_stride is 0"):
        read_profile([path], rank_stride=0)


def test_base_gives_all_but_the_collectives_and_the_profile_says_so() -> None:
    profile = read_profile([sample("broadcast.txt")])
    assert (profile.links, profile.device) == (H100.links, H100.device)
    assert profile.overlap_efficiency == H100.overlap_efficiency
    assert not profile.nominal
    assert profile.name == "h100 (nominal) with measured collectives"
    assert (
        f"links, device rates, launch times and overlap are those of h100 (NOMINAL, not measured), hash {H100.hash()}"
        in profile.sources
    )


def test_measured_base_keeps_its_other_collectives() -> None:
    """A nominal base's curves would pass for measured ones; they are dropped."""
    curves = tuple(
        CollectiveSamples(kind, ((8, 1),), (1024, 2**20), (1e-3, 2e-3))
        for kind in ("all_gather", "broadcast")
    )
    base = replace(H100, nominal=False, collectives=curves)
    found = points(read_profile([sample("broadcast.txt")], base))
    assert found["all_gather", ((8, 1),), 1024] == 1e-3
    assert ("broadcast", ((8, 1),), 1024) not in found
    assert all(
        kind == "broadcast"
        for kind, _, _ in points(read_profile([sample("broadcast.txt")], replace(base, nominal=True)))
    )


def test_refused_arguments(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no benchmark output is given"):
        read_profile([])
    with pytest.raises(ProfileError, match="base profile 'cpu' is of device type 'cpu'"):
        read_profile([sample("broadcast.txt")], "cpu")
    with pytest.raises(ProfileError, match=r"cannot read .*nowhere"):
        read_profile([tmp_path / "nowhere"])
    other = tmp_path / "notes.txt"
    other.write_text("hello\n", encoding="utf-8")
    with pytest.raises(
        ProfileError, match=rf"^{other}:1: the file is neither output of nccl-tests nor a table"
    ):
        read_profile([other])


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=12))
def test_pooled_is_the_nearest_rising_sequence(times: list[float]) -> None:
    """By the min-max formula: at i, the largest over j <= i of the smallest over k >= i of mean(times[j..k])."""

    def mean(j: int, k: int) -> float:
        return sum(times[j : k + 1]) / (k + 1 - j)

    n = len(times)
    wanted = [max(min(mean(j, k) for k in range(i, n)) for j in range(i + 1)) for i in range(n)]
    assert pooled([[time] for time in times], fmean) == pytest.approx(wanted, rel=1e-9)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=12))
def test_worst_fall_is_that_of_all_pairs(times: list[float]) -> None:
    pairs = [1 - times[j] / times[i] for i in range(len(times)) for j in range(i, len(times))]
    i, j, fall = worst_fall(times)
    assert fall == max(pairs) and fall == pytest.approx(1 - times[j] / times[i])
    assert 0 < NOISE < 1


@pytest.mark.parametrize(
    ("members", "shape"),
    [
        ({0: range(8)}, ((8, 1),)),
        ({g: range(g, 16, 8) for g in range(8)}, ((2, 8),)),
        ({g: range(8 * g, 8 * g + 8) for g in range(2)}, ((8, 1),)),
        ({g: [g, g + 2, g + 8, g + 10] for g in (0, 1, 4, 5)}, ((2, 8), (2, 2))),
    ],
)
def test_shape_of_groups(members: dict[int, list[int]], shape: tuple[tuple[int, int], ...]) -> None:
    assert group_of(Place("f", 1), members, {}).shape == shape
