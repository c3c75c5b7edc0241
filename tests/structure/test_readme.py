"""The README's two commands are whole, CI runs them, and the README names every dependency."""

from __future__ import annotations

import re
import tomllib

import pytest

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


def test_the_constraints_hold_torch_at_one_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("torch")] == ["torch==2.13.0"]


def test_every_dependency_is_explained() -> None:
    names = [re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]]
    missing = [name for name in names if f"| {name} | " not in README]
    assert not missing, f"the README does not say what these are for: {missing}"
