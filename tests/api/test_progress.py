"""What takes long says so on rank 0; what is quick, other ranks, and AUTOSHARD_PROGRESS=0 say nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from autoshard import progress
from autoshard.progress import stages_of


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
    again = capfd.readouterr().err.splitlines()
    assert "of about 0 s" in again[0]


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
    kept.write_text('{"Net of 8 parameters: searching": 0.01}')
    run(0, 0.3)
    said = capfd.readouterr().err
    assert "searching" in said and "about" not in said


def test_a_line_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr("sys.stderr.write", written.append)
    progress.tell(0, "race: done")
    assert written == ["autoshard: race: done\n"]
