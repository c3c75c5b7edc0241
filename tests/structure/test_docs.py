"""What the documentation, docstrings, comments and messages name exists. Decisions may name what has gone since."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

from tests.structure.source_tree import PACKAGES, ROOT, modules, relative

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "decisions"),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
SOURCES = modules(*PACKAGES)
OPERATORS = {name for path in SOURCES for name in re.findall(r"autoshard::(\w+)", path.read_text())}
_PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join((*PACKAGES, 'docs'))})/[\w./*-]*")
_DOTTED = re.compile(rf"(?<![\w/.@\x22-])(?:{'|'.join(PACKAGES)})(?:\.[A-Za-z]\w*)+(?![\w/])")
"""Not what begins a text of its own: names of our operators and keys."""


def paths(text: str) -> list[str]:
    """`passes/lower/partition.py`, `passes/rules/`: a file or folder of a package or of the docs, with the end of a
    sentence cut off."""
    return [found.rstrip(".-") for found in _PATH.findall(text)]


@cache
def names_in(file: Path) -> frozenset[str]:
    """What a module defines or imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def resolves(dotted: str) -> bool:
    """Whether the first part of it that is no folder is a module, and what follows is defined there."""
    place, parts = ROOT, dotted.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if not parts:
        return True
    if (place / f"{parts[0]}.py").exists():
        module, rest = place / f"{parts[0]}.py", parts[1:2]
        if set(rest) <= names_in(module):
            return True
    return parts[0] in names_in(place / "__init__.py") or (len(parts) == 1 and parts[0] in OPERATORS)


def test_what_is_found_and_what_resolves() -> None:
    assert paths("`passes/rules/`, a/passes/x, in cost_model/mesh.py.") == [
        "passes/rules/",
        "cost_model/mesh.py",
    ]
    assert _DOTTED.findall("`cost_model.mesh.MeshSpec`, x.passes.y, autoshard.find_plan(") == [
        "cost_model.mesh.MeshSpec",
        "autoshard.find_plan",
    ]
    assert all(map(resolves, ("autoshard.find_plan", "cost_model.mesh.MeshSpec", "passes.rules.check")))
    assert not any(
        map(resolves, ("autoshard.plan.task.nothing", "passes.stages.nothing", "autoshard.nothing"))
    )


def test_every_path_exists() -> None:
    wrong = [
        f"{relative(page)} names {path}"
        for page in (*PAGES, *SOURCES)
        for path in paths(page.read_text())
        if not list(ROOT.glob(f"{path}*"))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_dotted_name_resolves() -> None:
    wrong = [
        f"{relative(page)} names {name}"
        for page in (*PAGES, *SOURCES)
        for name in _DOTTED.findall(page.read_text())
        if not resolves(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_versions_are_those_that_ran() -> None:
    rows = re.findall(
        r"^\| (\d+\.\d+)\.\d+ \| (\d+\.\d+)[\d.]* \| (?!not run)",
        (ROOT / "docs/versions.md").read_text(),
        re.M,
    )
    torch, python = (
        sorted({row[i] for row in rows}, key=lambda v: [*map(int, v.split("."))]) for i in (0, 1)
    )
    said = f"torch {torch[0]} to {torch[-1]} ran, on Python {python[0]} and {python[-1]}"
    assert said in " ".join((ROOT / "README.md").read_text().split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={python[0]}"
    assert f"torch>={torch[0]}," in project["dependencies"][0]
