"""docs/scripts.md and the scripts are in step: a row a script, and a row says what the test of it asks for."""

from __future__ import annotations

import re

import pytest

from tests.scripts.catalog import MODULES
from tests.scripts.script import refusal_of, scripts_in
from tests.structure.source_tree import ROOT

ROW = re.compile(r"^\| (.+) \| (.+) \| `(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "scripts.md").read_text())
SCRIPTS = {name: script for module in MODULES.values() for name, script in scripts_in(module).items()}


def test_every_script_has_one_row_and_every_row_a_script() -> None:
    assert sorted(name for _, _, name in ROWS) == sorted(SCRIPTS)
    assert len(SCRIPTS) == sum(len(scripts_in(module)) for module in MODULES.values())


def test_there_are_at_least_60_situations() -> None:
    assert len(ROWS) >= 60


@pytest.mark.parametrize(("happens", "name"), [row[1:] for row in ROWS], ids=[row[2] for row in ROWS])
def test_the_page_says_what_is_tested(happens: str, name: str) -> None:
    refusal = refusal_of(SCRIPTS[name])
    said = re.match(r'error: "(.+?)"(;|$)', happens)
    assert (said[1] if said else "") == refusal
    assert happens.startswith('error: "' if refusal else "as one process")
