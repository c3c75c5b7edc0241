"""The profile without `profile=`: measured once, cached, the same on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autoshard.profiling.startup import cache_path, machine_key
from cost_model.cache_files import cache_folder
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from tests.profiling import programs
from tests.ranks import RankPool

MACHINES = [("a/0", "EPYC, 2 cores, 1 thread per rank")] * 2


def key(**changes: Any) -> Path:
    values = {"machines": MACHINES, "spec": MeshSpec({"x": 2}), "backend": "gloo"} | changes
    return cache_path(machine_key(**values))


def test_measured_once_and_read_the_next_time(ranks: RankPool, tmp_path: Path) -> None:
    (first, names), (other, _) = ranks.run(programs.started, str(tmp_path), 0.1, world=2)
    assert first == other and not first.nominal and names == [f"{first.name}.json"]
    assert "Attention: the kernel that plans run, without a mask." in first.sources
    again = ranks.run(programs.started, str(tmp_path), -1.0, world=2)  # would refuse to measure
    assert [profile for profile, _ in again] == [first] * 2
    assert Profile.load(tmp_path / "autoshard" / names[0]) == first


def test_a_broken_cache_is_measured_again(ranks: RankPool, tmp_path: Path) -> None:
    ((first, (name,)), _) = ranks.run(programs.started, str(tmp_path), 0.1, world=2)
    path = tmp_path / "autoshard" / name
    path.write_text("{")
    ((second, _), _) = ranks.run(programs.started, str(tmp_path), 0.1, world=2)
    assert second.name == first.name and Profile.load(path) == second


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_does_no_harm(ranks: RankPool, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    ((profile, names), _) = ranks.run(programs.started, str(tmp_path), 0.1, world=2)
    assert not profile.nominal and names == []


def test_the_key_tells_apart_what_prices_differently(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert key() == key() and key().parent == tmp_path / "autoshard"
    others = [
        key(spec=MeshSpec({"x": 4})),
        key(spec=MeshSpec({"x": 2, "y": 1})),
        key(spec=MeshSpec({"x": 2}, device_type="cuda")),
        key(backend="nccl"),
        key(machines=[("a/0", MACHINES[0][1]), ("b/1", MACHINES[0][1])]),
        key(machines=[("a/0", "EPYC, 2 cores, 2 threads per rank")] * 2),
        key(machines=MACHINES[:1]),
    ]
    assert len({key(), *others}) == len(others) + 1
    assert key(spec=MeshSpec({"renamed": 2})) == key()
    monkeypatch.setattr("torch.__version__", "2.99.0")
    assert key() not in others


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "autoshard"
