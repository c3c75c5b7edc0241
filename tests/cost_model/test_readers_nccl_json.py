"""JSON output of nccl-tests (-J)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cost_model.errors import ProfileError
from cost_model.readers import read_profile
from tests.cost_model.reader_files import altered, points, sample


@pytest.mark.parametrize(
    ("name", "kind", "group", "nbytes", "micros"),
    [
        ("all_reduce.json", "all_reduce", ((16, 1),), 2**24, 30 + 2**24 * 1.875 / 300e3),
        ("all_reduce.json", "all_reduce", ((16, 1),), 8, 30.0),
        # one process with 8 GPUs lists one device, and has 8 ranks
        ("all_gather_one_process.json", "all_gather", ((8, 1),), 2**26, 14 + 2**26 * 7 / 8 / 350e3),
        # -C 1: the time is size over bandwidth, not what the CPU took
        ("reduce_scatter_cputime.json", "reduce_scatter", ((8, 1),), 2**26, 14 + 2**26 * 7 / 8 / 350e3),
    ],
)
def test_times_are_those_of_the_results(
    name: str, kind: str, group: tuple[tuple[int, int], ...], nbytes: int, micros: float
) -> None:
    assert points(read_profile([sample(name)]))[kind, group, nbytes] == pytest.approx(micros * 1e-6, rel=1e-3)


def test_date_device_and_version_are_kept_and_the_environment_is_not() -> None:
    profile = read_profile([sample("all_reduce.json")])
    assert profile.date == "2026-04-01"
    assert profile.software == (("nccl", "22807"),)
    assert profile.hardware.startswith("NVIDIA H100 80GB HBM3; links and device rates as of: Node of 8")
    assert "do-not-copy" in sample("all_reduce.json").read_text(encoding="utf-8")
    assert "do-not-copy" not in profile.to_json()


def test_text_and_json_of_one_run_agree(tmp_path: Path) -> None:
    """Devices of all ranks listed, as newer versions may: the same group."""
    data = json.loads(sample("all_gather_one_process.json").read_text(encoding="utf-8"))
    (device,) = data["config"]["devices"]
    data["config"]["devices"] = [device | {"rank": rank, "device": rank} for rank in range(8)]
    path = tmp_path / "all_gather.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert points(read_profile([path])) == points(read_profile([sample("all_gather_one_process.json")]))


REFUSALS = {
    "cut": ('"results"', '"results', 1, r"not JSON: "),
    "version": ('"version":3', '"version":7', 1, r"version is not 2, 3 or 4: this version is not known"),
    "size": ('"size":8,', '"size":"8",', 1, r"results\[0\]\.size is not a count"),
    "time lost": (
        '"time":',
        '"tyme":',
        1,
        r"results\[0\]\.out_of_place\.time is not a finite number above zero",
    ),
    "not a number": (
        '"alg_bw":0.0',
        '"alg_bw":NaN,"x":0.0',
        1,
        r"results\[0\]\.out_of_place\.alg_bw is not a",
    ),
    "wrong": ('"nwrong":0.0', '"nwrong":2.0', 1, r"2 elements of the result were wrong \(#wrong\)"),
    "bounds": ('"count":0,"okay"', '"count":3,"okay"', 1, r"out_of_bounds\.count counts wrong results"),
    "root": ('"    -1"', '"    -x"', 1, r"results\[0\]\.root is not a rank, nor -1"),
    "average": ('"bandwidth":', '"bandwidth":1', 1, r"the average bus bandwidth is given as 1[\d.]+ GB/s"),
    "no device": ('"devices"', '"devces"', 1, r"config\.devices is not a list of objects"),
    "threads": (
        '"nthreads":1',
        '"nthreads":1000000001',
        1,
        r"config\.nthreads times ngpus is 1000000001, more ranks",
    ),
    "rank": ('"rank":3,', '"rank":33,', 1, r"the lines of 16 ranks do not name ranks 0 to 15 once each"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_line_and_field(tmp_path: Path, case: str) -> None:
    old, new, line, problem = REFUSALS[case]
    path = altered(tmp_path, "all_reduce.json", old, new)
    with pytest.raises(ProfileError) as caught:
        read_profile([path])
    first, *rest = str(caught.value).split("\n")
    place = f"{path}:{line}: "
    assert first.startswith(place), first
    assert re.match(problem, first.removeprefix(place)), first
    assert rest[0].startswith("  read: ") and rest[1].startswith("  try: ")


def test_line_of_a_result_in_a_file_of_many_lines(tmp_path: Path) -> None:
    path = altered(tmp_path, "all_gather_one_process.json", '"size": 16384', '"size": 16388')
    lines = path.read_text(encoding="utf-8").split("\n")
    start = max(i for i, line in enumerate(lines) if '"size"' in line and "16388" in line)
    with pytest.raises(ProfileError) as caught:
        read_profile([path])
    # the result's line is the one of its opening brace
    assert str(caught.value).startswith(f"{path}:{start}: the row is not one of all_gather_perf over 8 ranks")
