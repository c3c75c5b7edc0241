"""The README's two commands are whole, CI runs them, and the README names every dependency."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from autoshard import Plan
from tests.structure.source_tree import ROOT

README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def command(mark: str) -> str:
    """The code block after `<!-- ci: mark -->`: what .ci/run executes."""
    found = re.search(rf"^<!-- ci: {mark} -->\n```bash\n(.+?)\n```$", README, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no command marked {mark}"
    return found[1]


@pytest.mark.parametrize(
    ("mark", "ends"), [("demo", ".venv/bin/autoshard demo"), ("tests", ".venv/bin/pytest -n 2")]
)
def test_one_command_installs_the_tested_versions_and_runs(mark: str, ends: str) -> None:
    steps = command(mark).split(" && ")
    assert steps[0] == "python3 -m venv .venv"
    assert steps[1].startswith(".venv/bin/pip install -c constraints.txt -e ")
    assert steps[2:] == [ends]
    assert f'"$(readme_command {mark})"' in (ROOT / ".ci" / "run").read_text()


def test_the_plan_that_is_shown_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the README prints is the beginning of what the example prints, its picture is the one that is drawn, and the
    page on memory prints its memory."""
    shown = re.search(r"^<!-- output: (\S+) -->\n```\n(.+?)\n```$", README, re.MULTILINE | re.DOTALL)
    assert shown
    example = runpy.run_path(str(ROOT / shown[1]))
    monkeypatch.chdir(tmp_path)
    example["main"]()
    assert capsys.readouterr().out.startswith(shown[2])
    page = re.search(
        rf"^<!-- memory of: {shown[1]} -->\n```\n(.+?)\n```$",
        (ROOT / "docs" / "memory.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert page and str(Plan.load(tmp_path / "gpt-plan.json").memory) == page[1]
    assert (tmp_path / "gpt-plan.svg").read_text() == (ROOT / "docs" / "gpt-plan.svg").read_text()


def test_the_constraints_hold_torch_at_one_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("torch")] == ["torch==2.13.0"]


def test_every_dependency_is_explained() -> None:
    names = [re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]]
    missing = [name for name in names if f"| {name} | " not in README]
    assert not missing, f"the README does not say what these are for: {missing}"
