"""The pages that `make versions` and `make gpu` write, from runs whose outcomes are written here by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_page import Figure, Machine
from benchmarks.gpu_page import page as gpu_page
from tests.versions.outcomes import Outcome, count, read_outcomes
from tests.versions.page import Failure, VersionRun, page

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" tests="5">
<testcase classname="tests.a.test_x" name="test_one[1]"/>
<testcase classname="tests.a.test_x" name="test_one[2]"><properties><property name="error" value="1e-3"/></properties>
<failure message="AssertionError: 1 is not 2&#10;assert 1 == 2">trace</failure></testcase>
<testcase classname="tests.a.test_x" name="test_two"><skipped type="pytest.skip" message="needs 4 GPUs"/></testcase>
<testcase classname="tests.b.test_y" name="test_three"/>
<testcase classname="tests.b.test_y" name="test_three"><error message="failed on teardown">trace</error></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def outcomes(tmp_path: Path) -> list[Outcome]:
    (tmp_path / "report.xml").write_text(REPORT)
    return read_outcomes(tmp_path / "report.xml")


def test_outcomes_of_a_run(outcomes: list[Outcome]) -> None:
    assert outcomes == [
        Outcome("tests/a/test_x.py::test_one[1]", "passed"),
        Outcome("tests/a/test_x.py::test_one[2]", "failed", "AssertionError: 1 is not 2", {"error": "1e-3"}),
        Outcome("tests/a/test_x.py::test_two", "skipped", "needs 4 GPUs"),
        Outcome("tests/b/test_y.py::test_three", "error", "failed on teardown"),
    ]
    assert count(outcomes) == {"passed": 1, "failed": 1, "error": 1, "skipped": 1}


def test_gpu_page_counts_failures_and_says_why_tests_were_skipped(outcomes: list[Outcome]) -> None:
    machine = Machine("2026-01-01 00:00 UTC", ["H100", "H100"], {"torch": "2.13.0"})
    text = gpu_page(machine, outcomes, [Figure("Step", "python -m x", "ratio 1.01")])
    assert "2026-01-01 00:00 UTC; 2 x H100; torch 2.13.0." in text
    assert "| `tests/a/test_x.py::test_one` | 1 | 1 | 0 |  |" in text
    assert "| `tests/a/test_x.py::test_two` | 0 | 0 | 1 | needs 4 GPUs |" in text
    assert "| all | 1 | 2 | 1 | |" in text
    assert "- `tests/a/test_x.py::test_one[2]`: AssertionError: 1 is not 2" in text
    assert "| `test_one[2]` | failed | error: 1e-3 |" in text
    assert "### Step\n\n`python -m x`\n\n```\nratio 1.01\n```" in text
    assert "Not run" not in text


def test_gpu_page_of_a_machine_without_gpus(outcomes: list[Outcome]) -> None:
    text = gpu_page(Machine("2026-01-01", [], {"torch": "2.13.0"}), outcomes[2:3], [])
    assert "**Not run: this machine has no GPU.**" in text
    assert text.endswith("## Figures\n\nNone: not run.\n")


def version(
    torch: str, hashes: dict[str, str], failures: tuple[Failure, ...] = (), ran: str = "all"
) -> VersionRun:
    counts = {"passed": 10, "skipped": 2}
    return VersionRun(torch, "3.12.1", "2026-01-01", "2 cores", ran, counts, failures, hashes)


def test_versions_page_lays_versions_side_by_side() -> None:
    base = version("2.13.0", {"llama": "a", "vit": "b"})
    newer = version("2.15.0+cu130", {"llama": "a", "vit": "c"}, (Failure("tests/x.py::test_y", "E: gone"),))
    missing = VersionRun("2.9.0", "3.11", "2026-01-01", "2 cores", "", {}, (), {}, "no such release")
    text = page([newer, base, missing])
    rows = [line for line in text.splitlines() if line.startswith("| 2.")]
    assert rows == [
        "| 2.9.0 | 3.11 | not run: no such release | | | | | 2026-01-01, 2 cores |",
        "| 2.13.0 | 3.12.1 | all | 10 | 0 | 2 | 2 of 2 | 2026-01-01, 2 cores |",
        "| 2.15.0+cu130 | 3.12.1 | all | 10 | 1 | 2 | 1 of 2 | 2026-01-01, 2 cores |",
    ]
    assert "## Failed with torch 2.15.0+cu130 on Python 3.12.1\n\n- `tests/x.py::test_y`: `E: gone`" in text
    assert "- torch 2.15.0+cu130, Python 3.12.1: differ: vit." in text
    assert base.held and not newer.held and not missing.held


def test_a_run_is_kept_as_it_was() -> None:
    run = version("2.15.0", {"llama": "a"}, (Failure("tests/x.py::test_y", "E: gone"),))
    assert VersionRun.from_json(run.to_json()) == run
