"""`autoshard profile`: the table by hand, the drawing, and the command on ranks and alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.profiling import command
from autoshard.profiling.command import check_table, profile_table
from cost_model.errors import ProfileError
from cost_model.measure.measure import CheckedPoint
from cost_model.measurements import CollectiveSamples, MatmulRates
from cost_model.profile import Profile
from tests.profiling import programs
from tests.ranks import RankPool


@pytest.fixture
def profile() -> Profile:
    cpu = Profile.named("cpu")
    device = replace(cpu.device, matmul=(MatmulRates("float32", (2e6,), (1e9,), (0.25,)),))
    samples = (
        CollectiveSamples("all_reduce", ((4, 2),), (1000, 2_000_000), (1e-4, 1e-2), (0.5, 0.1)),
        CollectiveSamples("broadcast", ((2, 4), (2, 1)), (1000, 2_000_000), (1e-4, 1e-2)),
    )
    return replace(cpu, nominal=False, name="mine", collectives=samples, device=device)


def test_table_by_hand(profile: Profile) -> None:
    """2 MB in 10 ms are 0.2 GB/s; an all-reduce over 4 moves 2 * 3/4 of it over each link."""
    lines = profile_table(profile, {((4, 2),): ("dp",)}).splitlines()
    assert lines[0].split() == ["size", "time", "algbw", "busbw", "spread"]
    assert lines[1].split() == ["bytes", "us", "GB/s", "GB/s", "%"]
    assert lines[2] == "all_reduce over dp: 4 ranks, stride 2"
    assert lines[4].split() == ["2000000", "10000.0", "0.200", "0.300", "10"]
    assert lines[5] == "broadcast over 2 ranks, stride 4 x 2 ranks, stride 1"
    assert lines[7].split() == ["2000000", "10000.0", "0.200", "0.200", "-"]
    assert lines[9].split() == ["operations", "time", "GFLOP/s", "spread"]
    assert lines[11].split() == ["2000000", "2000.0", "1.00", "25"]
    assert "\n".join(lines[13:]) == profile.summary()


def test_check_table() -> None:
    held, off = CheckedPoint("memory", 64, 1e-3, 1.2e-3, 0.25), CheckedPoint("launch", 64, 2e-3, 1e-3, 0.9)
    assert held.holds and not off.holds
    lines = check_table([held, off]).splitlines()
    assert lines[2].split() == ["memory", "64", "1000.0", "1200.0", "1.20", "+-25%", "ok"]
    assert lines[3].split() == ["launch", "64", "2000.0", "1000.0", "0.50", "+-90%", "OFF"]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_curves_are_drawn(profile: Profile, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = command.draw_curves(profile, tmp_path / f"curves{suffix}", {((4, 2),): ("dp",)})
    assert path.read_bytes().startswith({".png": b"\x89PNG", ".svg": b"<?xml"}[suffix])


def test_why_curves_cannot_be_drawn(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ProfileError, match=r"cannot draw curves to 'a\.pdf'\n  try: a name that ends in \.svg"
    ):
        command.check_drawable("a.pdf")
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(ProfileError, match=r"needs matplotlib, .*\n  try: pip install 'autoshard\[plot\]'"):
        command.draw_curves(profile, tmp_path / "curves.svg", {})


def test_measure_then_check_on_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    out = str(tmp_path / "mine.json")
    (code, text), others = ranks.run(programs.command, ("--mesh", "dp=2", "--out", out), world=2)
    assert code == 0 and others == (0, "")
    profile = Profile.load(out)
    assert profile.name == "mine" and profile.command.endswith("(2 ranks, mesh (dp=2))")
    assert "all_reduce over dp: 2 ranks, stride 1" in text and f"saved {out}" in text
    # Nothing is a thousand times faster than it just was.
    slow = tuple(
        replace(s, seconds=tuple(1e3 * t for t in s.seconds), spread=()) for s in profile.collectives
    )
    replace(profile, collectives=slow).save(out)
    (code, text), others = ranks.run(programs.command, ("--mesh", "dp=2", "--check", out), world=2)
    assert code == 1 and others == (0, "")
    assert "all_reduce over dp" in text and "OFF" in text
    assert "does not hold: " in text and "\n  try: " in text


def test_alone_it_measures_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["profile", "--device", "cpu", "--budget", "0.1", "--out", str(tmp_path / "one.json")]) == 0
    assert "float32 products" in capsys.readouterr().out
    assert Profile.load(tmp_path / "one.json").collectives == ()


def test_a_mesh_of_more_devices_than_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["profile", "--device", "cpu", "--mesh", "dp=4"]) == 1
    error = capsys.readouterr().err
    assert (
        "mesh (dp=4) has 4 devices, and 1 process(es) run\n  try: a mesh of all processes, or torchrun"
        in error
    )
