"""When collectives ran: from what a profiler saw, by hand; and the picture of it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from autoshard.reporting.measured import Exposed, StepFigures, Track
from autoshard.reporting.report_steps import report_text, track_svg
from autoshard.reporting.tracks import Range, Tracks, read_step
from cost_model.measure.own_collectives import SHARED
from passes.predict.prediction import PredictedCollective

SEEN = [
    Range("forward", 1.0, 5.0),
    Range("all_gather_into_tensor: up", 1.5, 1.75),
    Range("_c10d_functional::all_gather_into_tensor_out", 1.55, 1.7),  # inside the former
    Range("gloo:all_gather", 6.75, 8.0),  # gloo's thread of this group comes to it after that of another
    Range("all_to_all_single: x", 2.0, 2.25),
    Range("gloo:send", 2.125, 2.5),
    Range("gloo:recv", 2.25, 2.75),
    Range("_c10d_functional::wait_tensor", 2.5, 3.0),
    Range("aten::mm", 3.0, 4.0),
    Range("backward", 5.0, 9.0),
    Range("_c10d_functional::all_reduce_", 5.0, 5.25),
    Range("gloo:all_reduce", 6.5, 7.0),  # gloo's thread comes to it late
    Range("_c10d_functional::wait_tensor", 6.0, 7.0),
]
KINDS = ["all_gather_into_tensor", "all_to_all_single", "all_reduce"]


def test_a_collective_ends_with_its_messages() -> None:
    found = read_step(SEEN, KINDS)
    assert found is not None
    assert found.spans == ((0.5, 7.0), (1.0, 1.75), (4.0, 6.0))


def test_a_collective_through_shared_memory_ends_with_it() -> None:
    seen = [
        Range("forward", 1.0, 5.0),
        Range("all_reduce: x", 2.0, 3.0),
        Range(SHARED, 2.25, 2.75),
        Range("_c10d_functional::wait_tensor", 4.0, 4.125),
    ]
    assert read_step(seen, ["all_reduce"]) == Tracks(((1.0, 2.0),), {"forward": 1.125})


def test_what_issues_and_what_waits_is_exposed() -> None:
    found = read_step(SEEN, KINDS)
    assert found == Tracks(
        found.spans if found else (), {"forward": 0.25 + 0.25 + 0.5, "backward": 0.25 + 1.0}
    )


@pytest.mark.parametrize("kinds", [KINDS[:2], [*KINDS, "all_reduce"], KINDS[::-1]])
def test_other_collectives_are_not_told_apart(kinds: list[str]) -> None:
    assert read_step(SEEN, kinds) is None


def test_work_that_is_nobodys_is_not_told_apart() -> None:
    assert read_step([*SEEN, Range("gloo:all_reduce", 8.0, 8.5)], KINDS) is None


def predicted(start: float, end: float, kind: str = "all_gather") -> PredictedCollective:
    return PredictedCollective("forward", "n", "up", kind, ("x",), 8, end - start, start, 0.0, end)


FIGURES = StepFigures(
    2,
    1,
    (0.5,),
    0.25,
    (),
    (),
    (
        Track(predicted(0.0, 0.1), 0.05, 0.2),
        Track(predicted(0.1, 0.2, "all_reduce"), 0.1, 0.4),
    ),
    Exposed(0.1, 0.2),
)


def test_the_page_has_starts_and_ends() -> None:
    lines = report_text(FIGURES, "mine").splitlines()
    assert "exposed communication                              100 ms     200 ms    0.50" in lines
    assert (
        lines[-2] == "  1 forward all_gather[x] up                         0 ns - 100 ms      50 ms - 200 ms"
    )
    assert (
        lines[-1] == "  2 forward all_reduce[x] up                       100 ms - 200 ms     100 ms - 400 ms"
    )


def test_the_picture_has_both_on_one_axis() -> None:
    svg = ElementTree.fromstring(track_svg(FIGURES))
    bars = [e for e in svg if e.tag.endswith("rect") and len(e)]
    assert [bar[0].text for bar in bars] == [
        "1 all_gather 0 ns to 100 ms",
        "2 all_reduce 100 ms to 200 ms",
        "1 all_gather 50 ms to 200 ms",
        "2 all_reduce 100 ms to 400 ms",
    ]
    # 1080 wide for 0.4 s, from 90 on.
    assert [(float(bar.get("x", 0)), float(bar.get("width", 0))) for bar in bars] == [
        (90.0, 270.0),
        (360.0, 270.0),
        (225.0, 405.0),
        (360.0, 810.0),
    ]
    heights = [float(bar.get("y", 0)) for bar in bars]
    assert heights[0] == heights[1] < heights[2] < heights[3]  # the measured two are in flight together


def test_figures_without_tracks_say_nothing_of_them(tmp_path: Path) -> None:
    bare = StepFigures(2, 1, (0.5,), 0.25, (), ())
    assert "start to end" not in report_text(bare, "mine") and "exposed" not in report_text(bare, "mine")
