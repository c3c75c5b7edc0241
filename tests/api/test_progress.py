"""What takes long says so on rank 0; what is quick, other ranks, and AUTOSHARD_PROGRESS=0 say nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from autoshard import progress
from autoshard.progress import stages_of
from tests.api.programs import data, parallel, two_linear
from tests.ranks import RankPool


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AUTOSHARD_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.05)
    monkeypatch.setattr(progress, "_LINES_SECONDS", 0.05)


def run(rank: int, seconds: float, stage: str = "searching") -> None:
    with stages_of(rank, "Net of 8 parameters")(stage):
        time.sleep(seconds)


def test_stage_elapsed_and_what_it_took_before(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(0, 0.3)
    first = capfd.readouterr().err.splitlines()
    assert first[0].startswith("autoshard: searching: 0 s") and "took" in first[-1]
    assert not any("about" in line for line in first)
    (kept,) = json.loads((tmp_path / "autoshard" / "stages.json").read_text()).items()
    assert kept[0] == "Net of 8 parameters: searching"
    run(0, 0.3)
    assert "about" not in capfd.readouterr().err  # the first may have filled a cache for it
    run(0, 0.3)
    again = capfd.readouterr().err.splitlines()
    assert "of about 0 s" in again[0]


def test_what_is_said_so_far_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with stages_of(0, "Net of 8 parameters")("finding a plan") as say:
        time.sleep(0.15)
        say("best so far 3 ms, within 4.2% of optimal")
        time.sleep(0.15)
    first, *_, last = capfd.readouterr().err.splitlines()
    assert "best" not in first
    assert last.startswith("autoshard: finding a plan: took") and last.endswith(
        "; best so far 3 ms, within 4.2% of optimal"
    )


@pytest.mark.parametrize(
    ("times", "about"), [("[51.0, 5.0]", False), ("[50.0, 60.0]", True), ("[60.0]", False), ("60.0", False)]
)
def test_times_that_differ_tell_nothing_of_the_next(
    times: str, about: bool, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A plan that was searched, and then read from the cache; the file of an older version."""
    kept = tmp_path / "autoshard" / "stages.json"
    kept.parent.mkdir()
    kept.write_text(f'{{"Net of 8 parameters: searching": {times}}}')
    run(0, 0.1)
    assert ("of about" in capfd.readouterr().err) == about


def stages_of_calls(rank: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.delenv("AUTOSHARD_PROGRESS", raising=False)
        patch.setattr(progress, "_SILENT_SECONDS", 0.0)
        model = parallel(two_linear(), (("x", 1),))
        for rows in (8, 4, 8):
            model(data(rows)[0])


def test_other_shapes_are_another_stage(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(stages_of_calls, str(tmp_path), world=1)
    kept = json.loads((tmp_path / "autoshard" / "stages.json").read_text())
    # The second size takes over the plan of the first, and runs a program for all sizes.
    for stage, calls in (("tracing the model", [1, 1]), ("finding a plan", [1]), ("compiling the plan", [1])):
        assert [len(times) for name, times in kept.items() if name.endswith(stage)] == calls, stage


def test_silence(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run(1, 0.2)
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 60.0)
    run(0, 0.0)
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.05)
    monkeypatch.setenv("AUTOSHARD_PROGRESS", "0")
    run(0, 0.2)
    assert capfd.readouterr().err == ""


def test_an_error_ends_the_stage_and_is_not_kept(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no plan"), stages_of(0, "Net")("searching"):
        time.sleep(0.2)
        raise ValueError("no plan")
    assert "took" in capfd.readouterr().err
    assert not (tmp_path / "autoshard" / "stages.json").exists()


def test_what_was_expected_is_not_said_any_more_when_it_is_over(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "autoshard" / "stages.json"
    kept.parent.mkdir()
    kept.write_text('{"Net of 8 parameters: searching": [0.01, 0.01]}')
    run(0, 0.3)
    said = capfd.readouterr().err
    assert "searching" in said and "about" not in said


def test_a_line_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr("sys.stderr.write", written.append)
    progress.tell(0, "race: done")
    assert written == ["autoshard: race: done\n"]
