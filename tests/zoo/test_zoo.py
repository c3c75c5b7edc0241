"""Models of the zoo hold, and their page is of all of them."""

from __future__ import annotations

import re

import pytest

from benchmarks.zoo import examined
from benchmarks.zoo_models import ROWS
from benchmarks.zoo_models.page import models_page, read
from benchmarks.zoo_models.row import ALONE, HOLDS, NAMED, Row
from tests.structure.source_tree import ROOT

QUICK = ("matrix factors", "GAT", "DeepONet", "score network")
CASES = [pytest.param(row, marks=() if row.name in QUICK else pytest.mark.slow, id=row.name) for row in ROWS]


@pytest.mark.parametrize("row", CASES)
def test_it_holds(row: Row) -> None:
    found = examined(row)
    assert found.state in (HOLDS, *(() if row.name in QUICK else (ALONE, NAMED))), found.note
    assert found.state != HOLDS or found.moved


def test_the_page_has_all_of_them() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert page == models_page(read(ROOT / "benchmarks" / "zoo_models" / "kept.jsonl").values())
    found = re.findall(r"^\| (?!model \|)(.+?) \| .+ \| .+ \|$", page, re.MULTILINE)
    assert sorted(found) == sorted(row.name for row in ROWS)
