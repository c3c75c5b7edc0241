"""Tables of the torch.distributed benchmarks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cost_model.errors import ProfileError
from cost_model.readers import read_profile
from tests.cost_model.reader_files import altered, line_of, points, sample


@pytest.mark.parametrize(
    ("name", "kind", "group", "nbytes", "micros"),
    [
        ("all_reduce_bench.txt", "all_reduce", ((32, 1),), 2**30, 50 + 2**30 * 2 * 31 / 32 / 330e3),
        # no title: 8 ranks follow from busbw / algbw = 1.75; 32KB are 32 * 1024 bytes
        ("all_reduce_bench_table.md", "all_reduce", ((8, 1),), 2**25, 20 + 2**25 * 1.75 / 350e3),
        ("torch_dist_bench.txt", "all_gather", ((8, 1),), 2**24, 16 + 2**24 * 7 / 8 / 340e3),
        ("torch_dist_bench.txt", "point_to_point", ((8, 1),), 2**24, 16 + 2**24 / 340e3),
    ],
)
def test_times_are_payload_over_algbw(
    name: str, kind: str, group: tuple[tuple[int, int], ...], nbytes: int, micros: float
) -> None:
    assert points(read_profile([sample(name)]))[kind, group, nbytes] == pytest.approx(micros * 1e-6, rel=1e-3)


def test_environment_and_date_are_kept() -> None:
    profile = read_profile([sample("all_reduce_bench.txt")])
    assert profile.software == (("torch", "2.9.1+cu130"), ("cuda", "13.0"), ("nccl", "(2, 27, 7)"))
    assert "NVIDIA H100 80GB HBM3" in profile.hardware
    assert read_profile([sample("all_reduce_bench_table.md")]).date == "2026-02-01"


def test_bits_and_bytes_per_second(tmp_path: Path) -> None:
    """Gbps are an eighth of GBps."""
    text = sample("all_reduce_bench_table.md").read_text(encoding="utf-8")
    path = tmp_path / "bits.md"
    bits = re.sub(r"([\d.]+)GBps", lambda match: f"{float(match[1]) * 8:.1f}Gbps", text)
    path.write_text(bits, encoding="utf-8")
    wanted = points(read_profile([sample("all_reduce_bench_table.md")]))
    assert points(read_profile([path])) == {
        key: pytest.approx(value, rel=0.01) for key, value in wanted.items()
    }


def test_two_lines_of_the_first_script(tmp_path: Path) -> None:
    """4.0GB there are 4e9 bytes: the script divides by 1e9. Two runs make a curve."""
    other = tmp_path / "half.txt"
    other.write_text(
        "The average bandwidth of all_reduce with a 2.0GB payload (5 trials, 16 ranks):\n"
        " algbw: 170.000 GBps (1360.0 Gbps)\n busbw: 318.750 GBps (2550.0 Gbps)\n",
        encoding="utf-8",
    )
    found = points(read_profile([sample("all_reduce_bench_first.txt"), other]))
    assert found == {
        ("all_reduce", ((16, 1),), 2_000_000_000): pytest.approx(2 / 170),
        ("all_reduce", ((16, 1),), 4_000_000_000): pytest.approx(4 / 176.59),
    }


BENCH, TABLE, FIRST = "all_reduce_bench.txt", "all_reduce_bench_table.md", "all_reduce_bench_first.txt"
REFUSALS = {
    "unit unknown": (TABLE, "GBps", "GBph", "GBph", r"the bandwidth is '[\d.]+GBph'"),
    "unit lost": (TABLE, "GBps", "", "32KB |", r"the bandwidth is '2\.84'"),
    "bandwidth garbled": (
        BENCH,
        "|    1MiB |  36.18GBps",
        "|    1MiB |  63.18GBps",
        "63.18",
        r"busbw is 63\.18 GB/s, but algbw times 1\.938 \(all_reduce over 32 ranks\) is 36\.17",
    ),
    "ranks garbled": (
        BENCH,
        "over 32 ranks",
        "over 23 ranks",
        "32KiB |",
        r"busbw is [\d.]+ GB/s, but algbw times",
    ),
    "collective unknown": (
        BENCH,
        "of all_reduce over",
        "of all_redcue over",
        "all_redcue",
        r"'all_redcue' is no known",
    ),
    "payload garbled": (
        BENCH,
        " 512KiB",
        "  12KiB",
        "12KiB",
        r"the payload is 12288 bytes after 262144; payloads are powers of two",
    ),
    "row garbled": (
        BENCH,
        "|    1MiB",
        "     1MiB",
        "     1MiB",
        r"a row of a table does not start with '\|'",
    ),
    "names lost": (
        BENCH,
        "| payload",
        "| paylod",
        "32KiB |",
        r"no line with the names of the columns precedes the row",
    ),
    "row cut": (TABLE, "41.54GBps |\n", "41.54GB\n", "41.54GB", r"the row of the table is cut"),
    "cell lost": (TABLE, "|  41.54GBps |\n", "|\n", "1MB |", r"the row has 2 cells of 3"),
    "end lost": (BENCH, "Elapsed time", "Elapsed", "xx", r"the output ends without its line 'Elapsed time:'"),
    "columns lost": (
        BENCH,
        "|    algbw   |",
        "|    albgw   |",
        "albgw",
        r"the table has no columns busbw and algbw",
    ),
    "bits differ": (
        FIRST,
        "(1412.7 Gbps)",
        "(1412.7 GBps)",
        "algbw",
        r"176\.590 GBps and 1412\.7 GBps are not the same",
    ),
    "line lost": (FIRST, " busbw:", " busbw", "average", r"the lines algbw: and busbw: do not follow"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_line_the_text_and_a_remedy(tmp_path: Path, case: str) -> None:
    name, old, new, at, problem = REFUSALS[case]
    path = altered(tmp_path, name, old, new)
    with pytest.raises(ProfileError) as caught:
        read_profile([path])
    first, read, remedy = str(caught.value).split("\n")
    last = path.read_text(encoding="utf-8").count("\n") + 1
    place = f"{path}:{last if at == 'xx' else line_of(path, at)}: "
    assert first.startswith(place), first
    assert re.match(problem, first.removeprefix(place)), first
    assert read.startswith("  read: ") and remedy.startswith("  try: ")


def test_table_of_several_collectives_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "combined.txt"
    path.write_text(
        "The average bandwidth and the per-call latency of 2 collectives over 8 ranks (at least 5 warmups):\n\n"
        "| payload | all_reduce busbw | all_reduce median |\n| ------: | ----: | ----: |\n| 64KiB | 3.00 | 17.0 |\n",
        encoding="utf-8",
    )
    with pytest.raises(
        ProfileError, match=r":1: in a table of several collectives no number confirms another"
    ):
        read_profile([path])


def test_table_that_could_be_of_any_ranks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_text(
        "| payload | busbw | algbw |\n| --: | --: | --: |\n| 1MB | 2.0GBps | 1.0GBps |\n", encoding="utf-8"
    )
    with pytest.raises(ProfileError, match=r":1: no line says which collective over how many ranks this is"):
        read_profile([path])
