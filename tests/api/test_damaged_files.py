"""Damaged plans, profiles and benchmark outputs: refused by name, or usable. Many more: benchmarks.fuzz_readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autoshard import Plan, PlanError, Profile, ProfileError
from benchmarks.fuzz_readers import SOURCES, fuzz, small_plan
from tests.profiles import slow_compute


@pytest.mark.parametrize("kind", SOURCES)
def test_fuzzed(kind: str, tmp_path: Path) -> None:
    found = fuzz(kind, 200, 1, tmp_path)
    assert sum(found.values()) == 200
    assert [case for case in found if case[0] in ("raw", "crashed")] == []
    assert found["refused", ""] > 100 and found["accepted", ""] > 0


TEXTS: dict[str, Callable[[str], str]] = {
    "deep": lambda text: '{"schema_version": ' + "[" * 100_000,
    "deep in its place": lambda text: text.replace('"name": ', '"name": ' + "[" * 100_000, 1),
    "twice": lambda text: text.replace('"schema_version"', '"schema_version": 1, "schema_version"', 1),
    "huge": lambda text: text.replace('"schema_version": ', '"schema_version": ' + "9" * 10_000, 1),
    "cut": lambda text: text[: len(text) // 2],
    "half a character": lambda text: text.replace('"name": "', '"name": "\\udcff', 1),
}


@pytest.mark.parametrize("damage", TEXTS)
def test_what_json_allows(damage: str, tmp_path: Path) -> None:
    plan, profile = tmp_path / "plan.json", tmp_path / "profile.json"
    plan.write_text(TEXTS[damage](json.dumps(small_plan().to_json())))
    profile.write_text(TEXTS[damage](slow_compute().to_json()))
    with pytest.raises(PlanError, match=r"plan\.json(.|\n)*try: "):
        Plan.load(plan)
    with pytest.raises(ProfileError, match=r"profile\.json(.|\n)*try: "):
        Profile.load(profile)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(PlanError, match="not UTF-8"):
        Plan.load(tmp_path / "bad.json")
    with pytest.raises(ProfileError, match="cannot read profile"):
        Profile.load(tmp_path / "bad.json")
