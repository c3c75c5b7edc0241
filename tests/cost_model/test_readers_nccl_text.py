"""Text output of nccl-tests. The samples follow the real formats; each was computed from a latency and a rate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cost_model.collectives import CollectivePrices
from cost_model.errors import ProfileError
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from cost_model.readers import read_profile
from tests.cost_model.reader_files import altered, line_of, points, sample

MESH = MeshSpec({"dp": 2, "tp": 8}, device_type="cuda")


@pytest.mark.parametrize(
    ("name", "kind", "group", "nbytes", "micros"),
    [
        # latency + size * busbw factor / rate, as the generator of the samples had it
        ("all_reduce_perf.txt", "all_reduce", ((8, 1),), 2**27, 17 + 2**27 * 1.75 / 360e3),
        ("all_gather_16.txt", "all_gather", ((16, 1),), 2**28, 40 + 2**28 * 15 / 16 / 300e3),
        ("reduce_scatter_stamped.txt", "reduce_scatter", ((8, 1),), 2**28, 15 + 2**28 * 7 / 8 / 340e3),
        ("alltoall_per_iteration.txt", "all_to_all", ((8, 1),), 2**26, 25 + 2**26 * 7 / 8 / 300e3),
        ("all_reduce_cputime.txt", "all_reduce", ((8, 1),), 2**30, 17 + 2**30 * 1.75 / 360e3),
        ("broadcast.txt", "broadcast", ((8, 1),), 2**26, 20 + 2**26 / 330e3),
        ("sendrecv_split.txt", "point_to_point", ((2, 8),), 2**26, 22 + 2**26 / 44e3),
        ("sweep_prefixed.log", "all_to_all", ((8, 1),), 2**22, 21 + 2**22 * 7 / 8 / 350e3),
        ("sweep_prefixed.log", "all_gather", ((8, 1),), 2**22, 14 + 2**22 * 7 / 8 / 350e3),
    ],
)
def test_times_are_those_of_the_table(
    name: str, kind: str, group: tuple[tuple[int, int], ...], nbytes: int, micros: float
) -> None:
    found = points(read_profile([sample(name)]))
    assert found[kind, group, nbytes] == pytest.approx(micros * 1e-6, rel=1e-3)


def test_measured_group_is_priced_as_measured_and_another_as_modelled() -> None:
    prices = CollectivePrices(Profile.from_nccl_tests(sample("all_reduce_perf.txt")), MESH)
    assert prices.seconds("all_reduce", ("tp",), 2**20) == pytest.approx(22.10e-6)
    assert prices.confidence("all_reduce", ("tp",), 2**20) == "measured"
    assert prices.confidence("all_reduce", ("tp",), 2**32) == "extrapolated"
    assert prices.confidence("all_gather", ("tp",)) == "modelled"


def test_split_communicators_are_strided_groups() -> None:
    """NCCL_TESTS_SPLIT_MASK=0x7 on 16 ranks: 8 groups of 2, 8 apart, all at once: the dp axis of the mesh."""
    profile = read_profile([sample("sendrecv_split.txt")])
    assert CollectivePrices(profile, MESH).confidence("point_to_point", ("dp",), 2**20) == "measured"


def test_rows_too_coarse_to_check_are_left_out_and_said_so() -> None:
    profile = read_profile([sample("all_reduce_perf.txt")])
    (samples,) = profile.collectives
    assert samples.nbytes[0] == 1024  # 17.00 us and 0.06 GB/s; 512 bytes print 0.03, 17% off
    assert any("7 rows of all_reduce are left out" in source for source in profile.sources)


@pytest.mark.parametrize(
    "prefix",
    [
        "[1,0]<stdout>:",
        "0: ",
        "[default0]:",
        "[node-1:0]:",
        "2026-05-01T10:11:12.123456Z ",
        "[2026-05-01 10:11:12] ",
    ],
)
def test_prefixes_of_launchers_are_dropped(tmp_path: Path, prefix: str) -> None:
    lines = sample("broadcast.txt").read_text(encoding="utf-8").splitlines()
    path = tmp_path / "log.txt"
    path.write_text("".join(f"{prefix}{line}\n" for line in lines), encoding="utf-8")
    assert points(read_profile([path])) == points(read_profile([sample("broadcast.txt")]))


def test_lines_of_nccl_itself_may_stand_between_rows(tmp_path: Path) -> None:
    row = "\n      262144"
    path = altered(tmp_path, "broadcast.txt", row, "\nnode1:40:41 [0] NCCL INFO Connected all rings" + row)
    assert points(read_profile([path])) == points(read_profile([sample("broadcast.txt")]))


def test_without_a_name_the_rows_tell_all_reduce(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text(sample("all_reduce_perf.txt").read_text(encoding="utf-8"), encoding="utf-8")
    assert points(read_profile([path])) == points(read_profile([sample("all_reduce_perf.txt")]))


def test_without_a_name_all_gather_and_all_to_all_look_alike(tmp_path: Path) -> None:
    text = sample("all_gather_16.txt").read_text(encoding="utf-8")
    path = tmp_path / "out.txt"
    path.write_text(re.sub(r"# Collective test.*\n", "", text), encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        read_profile([path])
    assert str(caught.value).startswith(
        f"{path}:{line_of(path, '# nThread')}: nothing names the collective, and the rows look like "
        "all_gather or all_to_all over 16 ranks\n  read: '"
    )
    assert "name the file after the program (all_gather_perf.txt)" in str(caught.value)


def test_echoed_command_names_the_collective(tmp_path: Path) -> None:
    text = sample("alltoall_per_iteration.txt").read_text(encoding="utf-8")
    path = tmp_path / "out.txt"
    path.write_text(
        "$ mpirun -np 8 ./build/all_gather_perf -b 64K -e 256M\n"
        + re.sub(r"# Collective test.*\n", "", text),
        encoding="utf-8",
    )
    assert {kind for kind, _, _ in points(read_profile([path]))} == {"all_gather"}


ROW = "     1048576        262144     float     sum      -1"  # of all_reduce_perf.txt

REFUSALS = {
    "time in another unit": (
        f"{ROW}    22.10   47.45   83.04",
        f"{ROW}     0.02   47.45   83.04",
        ROW,
        r"size / time is 5\.243e\+04 GB/s, but algbw says 47\.45",
    ),
    "bandwidth garbled": (
        f"{ROW}    22.10   47.45",
        f"{ROW}    22.10   74.45",
        ROW,
        r"size / time is 47\.45 GB/s, but algbw says 74\.45",
    ),
    "bus bandwidth garbled": (
        f"{ROW}    22.10   47.45   83.04",
        f"{ROW}    22.10   47.45   83.44",
        "# Avg bus",
        r"the average bus bandwidth is given as [\d.]+ GB/s, but that of the 25 rows above is [\d.]+",
    ),
    "field lost": (f"{ROW}    22.10", f"{ROW}         ", ROW, r"the row has 12 words; its columns need 13"),
    "not a number": (f"{ROW}    22.10", f"{ROW}    2x.10", ROW, r"time is '2x\.10', not a number"),
    "decimals lost": (f"{ROW}    22.10", f"{ROW}       22", ROW, r"time is '22', without decimals"),
    "negative": (f"{ROW}    22.10", f"{ROW}   -22.10", ROW, r"time is '-22\.10', not a number"),
    "size garbled": (
        ROW,
        ROW.replace("1048576", "1048575"),
        ROW[12:],
        r"the row is not one of all_reduce_perf",
    ),
    "count garbled": (
        ROW,
        ROW.replace("262144", "262145"),
        " 262145 ",
        r"the row is not one of all_reduce_perf",
    ),
    "type unknown": (ROW, ROW.replace("float", "flaot"), "flaot", r"type is 'flaot'"),
    "wrong results": (
        f"{ROW}    22.10   47.45   83.04       0",
        f"{ROW}    22.10   47.45   83.04       3",
        ROW,
        r"3 elements of the result were wrong \(#wrong\)",
    ),
    "failed": ("values : 0 OK", "values : 2 FAILED", "values : 2", r"2 results were wrong"),
    "units": (
        "(us)  (GB/s)  (GB/s)             (us)",
        "(ms)  (GB/s)  (GB/s)             (ms)",
        "(ms)",
        r"the units are not \(B\), \(elements\), \(us\) and \(GB/s\)",
    ),
    "columns of an old version": ("#wrong", "error", "error", r"the columns are not those of nccl-tests"),
    "header lost": (
        "# nThread",
        "# nTh",
        "Rank  0",
        r"no line '# nThread \.\.\. minBytes \.\.\.' starts this run",
    ),
    "rank garbled": ("#  Rank  3", "#  Rnk  3", "Rnk", r"the line is garbled"),
    "rank lost": (
        "#  Rank  3",
        "NCCL version",
        "# nThread",
        r"7 lines '# Rank' follow; each process has 8 ranks",
    ),
    "rank twice": (
        "#  Rank  3",
        "#  Rank  4",
        "# nThread",
        r"the lines of 8 ranks do not name ranks 0 to 7 once",
    ),
    "header garbled": ("minBytes", "minByte", "# nThread", r"the line is garbled"),
    "no sizes": ("step: 2(", "step: 1(", "# nThread", r"the sizes or ranks of the run cannot be"),
    "more sizes": (
        "minBytes 8 ",
        "minBytes 4 ",
        "# Avg",
        r"the table has 25 rows; 26 sizes from 4 to 134217728 bytes",
    ),
    "other sizes": (
        "maxBytes 134217728 step: 2(f",
        "maxBytes 2251799813685248 step: 4(f",
        "          16 ",
        r"the row should be of 32 bytes, by the header",
    ),
    "not an average": (
        "bandwidth    : ",
        "bandwidth    : x",
        ": x",
        r"the average is 'x[\d.]+', not a number",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_line_the_text_and_a_remedy(tmp_path: Path, case: str) -> None:
    old, new, at, problem = REFUSALS[case]
    path = altered(tmp_path, "all_reduce_perf.txt", old, new)
    with pytest.raises(ProfileError) as caught:
        read_profile([path])
    first, read, remedy = str(caught.value).split("\n")
    place = f"{path}:{line_of(path, at)}: "
    assert first.startswith(place), first
    assert re.match(problem, first.removeprefix(place)), first
    assert read.startswith("  read: '") and remedy.startswith("  try: ")


def test_cut_file_is_refused(tmp_path: Path) -> None:
    text = sample("broadcast.txt").read_text(encoding="utf-8")
    path = tmp_path / "broadcast.txt"
    path.write_text(text[: text.index("# Out of bounds")], encoding="utf-8")
    with pytest.raises(
        ProfileError, match=rf"{path}:\d+: the run of line 3 has no footer '# Avg bus bandwidth'"
    ):
        read_profile([path])


def test_log_that_ends_as_a_run_starts_is_refused(tmp_path: Path) -> None:
    text = sample("sweep_prefixed.log").read_text(encoding="utf-8")
    path = tmp_path / "sweep.log"
    path.write_text(text[: text.rindex("[1,0]<stdout>:# nThread")], encoding="utf-8")
    with pytest.raises(ProfileError, match=r"sweep\.log:60: the run that starts here is cut off"):
        read_profile([path])


def test_lost_row_is_refused(tmp_path: Path) -> None:
    text = sample("broadcast.txt").read_text(encoding="utf-8")
    path = tmp_path / "broadcast.txt"
    path.write_text(re.sub(r"\n +262144 .*", "", text), encoding="utf-8")
    with pytest.raises(
        ProfileError, match="the table has 5 rows; 6 sizes from 65536 to 67108864 bytes were asked for"
    ):
        read_profile([path])


def test_processes_without_mpi_are_refused(tmp_path: Path) -> None:
    """Built without MPI, each process runs alone and prints its own header."""
    path = altered(
        tmp_path,
        "broadcast.txt",
        "#\n# Using",
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 8 step: 2(factor) w\n# Using",
    )
    with pytest.raises(
        ProfileError, match=r"a run starts before the one of line 3 has ended[\s\S]*built with MPI=1"
    ):
        read_profile([path])


def test_single_rank_is_refused(tmp_path: Path) -> None:
    text = sample("broadcast.txt").read_text(encoding="utf-8")
    path = tmp_path / "broadcast.txt"
    path.write_text(re.sub(r"#  Rank  [1-7].*\n", "", text), encoding="utf-8")
    with pytest.raises(ProfileError, match="each group is a single rank: nothing was communicated"):
        read_profile([path])


def test_lost_last_rank_shows_in_the_bus_bandwidth(tmp_path: Path) -> None:
    """busbw is 1.75 algbw over 8 ranks, and would be 1.714 over 7."""
    text = sample("all_reduce_noisy.txt").read_text(encoding="utf-8")
    path = tmp_path / "all_reduce.txt"
    path.write_text(re.sub(r"#  Rank  7.*\n", "", text), encoding="utf-8")
    with pytest.raises(ProfileError, match=r"but algbw times 1\.714 \(all_reduce over 7 ranks\) is"):
        read_profile([path])


def test_uneven_groups_are_refused(tmp_path: Path) -> None:
    path = altered(tmp_path, "broadcast.txt", "Rank  7 Group  0", "Rank  7 Group  1")
    with pytest.raises(ProfileError, match=r"broadcast.txt:3: the groups are not all of one regular shape"):
        read_profile([path])


def test_name_that_the_rows_contradict_is_refused(tmp_path: Path) -> None:
    path = altered(tmp_path, "all_gather_16.txt", "starting: all_gather_perf", "starting: all_reduce_perf")
    with pytest.raises(ProfileError, match=r":28: the row is not one of all_reduce_perf over 16 ranks"):
        read_profile([path])


def test_unknown_program_is_refused(tmp_path: Path) -> None:
    path = altered(tmp_path, "broadcast.txt", "starting: broadcast_perf", "starting: bisection_perf")
    with pytest.raises(ProfileError, match=r":2: 'bisection' is no program of nccl-tests that this reads"):
        read_profile([path])


def test_collective_without_a_price_is_left_out_and_said_so() -> None:
    profile = read_profile([sample("sweep_prefixed.log")])
    assert any(
        ":32: gather, nccl-tests text is left out: no collective of a plan" in s for s in profile.sources
    )
