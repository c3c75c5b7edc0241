"""Pages in headless Chromium: they open, fold, search and select together, and run nothing of a name.

`make browser` installs what is needed; without it these tests are skipped, and say so.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autoshard import Plan
from autoshard.cli import main
from autoshard.plan.plan_summary import summary_lines
from tests.drawing.pages import HOSTILE, planned
from tests.plans import pipelines
from tests.structure.source_tree import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PLAYWRIGHT = ROOT / "build" / "browser" / "node_modules" / "playwright-core"


def test_a_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    text = planned().draw(tmp_path / "plan.html").read_text()
    assert text.lower().startswith("<!doctype html>") and len(text) < 1_500_000
    assert (
        not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
        and "{{" not in text.partition("<script")[0]
    )
    # Of names none but those of XML, and what the library's licence and comments say.
    assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "Permission is hereby granted" in text and HOSTILE not in text


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or shutil.which("node") is None or not PLAYWRIGHT.exists():
        pytest.skip(f"no browser: wants node, {' or '.join(BROWSERS)}, and {PLAYWRIGHT} (make browser)")
    folder = tmp_path_factory.mktemp("pages")
    plans = planned(), pipelines.planned("mlp", pipelines.SQUARE, 4, "1f1b")
    for name, plan in zip(("plan", "stages"), plans, strict=True):
        plan.draw(folder / f"{name}.html")
        plan.save(folder / f"{name}.json")
    assert (
        main(
            [
                "diff",
                str(folder / "plan.json"),
                str(folder / "stages.json"),
                "--html",
                str(folder / "diff.html"),
            ]
        )
        == 0
    )
    old = {name: value for name, value in plans[0].to_json().items() if name not in ("timeline", "memory")}
    Plan.from_json(json.loads(json.dumps(old))).draw(folder / "old.html")
    command = ["node", str(Path(__file__).with_name("browse.js")), str(PLAYWRIGHT), browser, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_nothing_complains_and_nothing_is_asked_for(seen: dict[str, Any]) -> None:
    assert seen["complaints"] == [] and seen["requests"] == []
    assert "predicted" in seen["old"]  # of a file without timeline and memory


def test_the_bar_says_all_that_the_plan_prints(seen: dict[str, Any]) -> None:
    for subject, words in summary_lines(planned()):
        assert subject in seen["plan"]["bar"] and words in seen["plan"]["bar"]


def test_names_are_never_read_as_html(seen: dict[str, Any]) -> None:
    assert f"m:{HOSTILE}" in seen["plan"]["first"] and seen["plan"]["hacked"] == "undefined"


def test_modules_unfold_and_fold(seen: dict[str, Any]) -> None:
    plan = seen["plan"]
    assert "m:blocks.1-3" in plan["first"] and plan["title"] == "blocks.1-3"
    inner = {f"m:blocks.1-3.{i}" for i in range(4)}
    assert inner <= set(plan["unfolded"]) and not inner & set(plan["folded"])
    assert plan["overlaps"] == {"outside": 0, "crossed": False}


def test_search_counts_and_goes_on(seen: dict[str, Any]) -> None:
    plan = seen["plan"]
    # Each linear layer is a product in the forward and two in the backward, but for the first, whose input has no
    # gradient; of five equal layers the inner three are one.
    count = 3 * (3 * 2 + 2) - 1
    assert plan["count"] == f"1 of {count}" and plan["second"] == f"2 of {count}"
    assert plan["back"] == [f"1 of {count}", plan["hit"]]
    assert plan["none"] == "none" and plan["layer"].startswith("1 of ") and plan["cleared"] is None


def test_views_select_together(seen: dict[str, Any]) -> None:
    plan = seen["plan"]
    assert plan["lit"] == [plan["place"]] and plan["marked"] == 1
    for words in ("Layout", "Rank 0 (dp=0) holds", "Reads", "Alternatives"):
        assert words in plan["details"]
    assert plan["clicked"][0] == plan["clicked"][1]
    assert "parameters" in plan["moment"] and "The largest that live then" in plan["moment"]


def test_keys_walk_and_unfold(seen: dict[str, Any]) -> None:
    plan = seen["plan"]
    assert None not in plan["walked"] and plan["walked"][0] != plan["walked"][1]
    assert "m:blocks.1-3" in plan["entered"]


def test_schemes_and_sizes(seen: dict[str, Any]) -> None:
    plan, narrow = seen["plan"], seen["narrow"]
    assert plan["background"] == "rgb(255, 255, 255)"
    assert plan["dark"] == narrow["background"] != plan["background"]
    assert narrow["widths"] == [390] * 4 and narrow["bar"] == 0
    assert narrow["visible"] == [[".graph"], [".charts"], ["#panel"]]


def test_stages_are_seen_one_by_one(seen: dict[str, Any]) -> None:
    stages = seen["stages"]
    assert stages["options"] == ["All stages", "Stage 0, one piece", "Stage 1, one piece"]
    assert stages["name"] == ["Stage 0"] and stages["then"] == ["Stage 1"] and stages["stage"] == ["Stage 0"]
    assert "Stage 0, piece 2" in stages["details"]


def test_two_plans_stand_beside_each_other(seen: dict[str, Any]) -> None:
    diff = seen["diff"]
    assert diff["heads"] == ["", "plan", "stages"] and diff["panes"] == 2
    assert "What differs" in diff["panel"]
    longest = max(planned().step_time, pipelines.planned("mlp", pipelines.SQUARE, 4, "1f1b").step_time)
    assert diff["ranges"] == [[0, longest]] * 2
