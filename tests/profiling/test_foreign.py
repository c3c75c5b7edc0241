"""`autoshard profile --read`: other benchmarks' outputs, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.cli import main
from cost_model.profile import Profile
from tests.cost_model.reader_files import altered, line_of, sample


def test_profile_is_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cluster.json"
    assert (
        main(["profile", "--read", str(sample("sweep_prefixed.log")), "--base", "a100", "--out", str(out)])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "all_gather over 8 ranks, stride 1"
    assert lines[-1] == f"saved {out}"
    assert any(
        line.startswith("  links, device rates, launch times and overlap are those of a100") for line in lines
    )
    profile = Profile.load(out)
    assert profile.links == Profile.named("a100").links
    assert [samples.kind for samples in profile.collectives] == ["all_gather", "all_to_all"]


def test_garbled_file_ends_with_status_and_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = altered(tmp_path, "broadcast.txt", "45.24", "54.24")
    assert main(["profile", "--read", str(path)]) != 0
    assert f"{path}:{line_of(path, '54.24')}: size / time is" in capsys.readouterr().err
