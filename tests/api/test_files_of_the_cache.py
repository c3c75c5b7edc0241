"""Files that are damaged, too large or cannot be written: no run ends because of one in the cache."""

from __future__ import annotations

import errno
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from autoshard import AutoshardError, Plan, PlanError, Profile, ProfileError
from autoshard.plan.plan_cache import cached_candidates, kept_rehearsal, plan_path
from autoshard.progress import stages_of
from autoshard.refine.time_work import TimedStore
from benchmarks.fuzz_readers import small_plan
from cost_model.cache_files import write_whole
from cost_model.errors import MOST_BYTES, parse_json
from cost_model.timed import TimedPrices
from tests.api.test_plan_cache import task

DEEP = "[" * 100_000


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AUTOSHARD_PROGRESS", raising=False)


def damaged(path: Path, text: str = DEEP) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_nested_too_deep(tmp_path: Path) -> None:
    damaged(tmp_path / "autoshard" / "stages.json")
    with stages_of(0, "Net")("searching"):
        pass
    store = TimedStore({"key": 1})
    damaged(store.path, '{"made_with": {"key": ' + DEEP)
    assert store.read() == TimedPrices()
    one = task()
    path = damaged(plan_path(one).with_suffix(".race1.json"))
    assert len(cached_candidates(one, 1)) == 1
    assert kept_rehearsal(damaged(path)) is None


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.TextIOWrapper):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    plain = io.open
    monkeypatch.setattr(io, "open", lambda *given, **named: Full(plain(given[0], "wb", **_opener(named))))
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a.json", "text")
    assert list(tmp_path.iterdir()) == []


def _opener(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name == "opener"}


def test_too_large(tmp_path: Path) -> None:
    with (tmp_path / "plan.json").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(PlanError, match=r"plan\.json' is no plan: it has more than 128 MiB\n  try: "):
        Plan.load(tmp_path / "plan.json")


def test_a_name_that_stands_twice_among_many() -> None:
    names = ", ".join(f'"a{i}": 0' for i in [*range(200_000), 199_999])
    with pytest.raises(PlanError, match="'a199999' stands twice"):
        parse_json(f"{{{names}}}", "plan", PlanError)


def test_names_that_no_file_holds(tmp_path: Path) -> None:
    plan = small_plan()
    first = structs.replace(plan.records[0], module="block\n.up")
    with pytest.raises(
        PlanError, match=r"name 'block\\n\.up' has characters that cannot be printed\n  try: "
    ):
        replace(plan, records=(first, *plan.records[1:])).save(tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


def test_paths_of_5000_characters() -> None:
    for name in ("x" * 5000, "x" * 5000 + ".json"):
        with pytest.raises(ProfileError, match="\n  try: "):
            Profile.load(name)
        with pytest.raises(PlanError, match="\n  try: "):
            Plan.load(name)


def test_arguments_of_a_plan_that_are_none() -> None:
    plan: Any = small_plan()
    with pytest.raises(PlanError, match=r"^joint is None"):
        plan.check_graph(None)
    with pytest.raises(AutoshardError, match=r"^seconds is 3"):
        plan.to_text(seconds=3)
