"""Modules are short, importable after an install, and import one way."""

from __future__ import annotations

import statistics
import sys
import tomllib
from collections import Counter

import pytest

from tests.structure.source_tree import PACKAGES, ROOT, imported_modules, modules, relative

LONGEST, LONGEST_TEST = 400, 400
"""Lines of a module."""
# What a package may import of the others: autoshard -> passes -> cost_model.
MAY_IMPORT = {
    "autoshard": {"autoshard", "passes", "cost_model"},
    "passes": {"passes", "cost_model"},
    "cost_model": {"cost_model"},
}


@pytest.mark.parametrize(("folders", "longest"), [(PACKAGES, LONGEST), (("tests",), LONGEST_TEST)])
def test_modules_are_short(folders: tuple[str, ...], longest: int) -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in modules(*folders)}
    too_long = {name: lines for name, lines in lengths.items() if lines > longest}
    assert not too_long, f"over {longest} lines; one idea a module: {too_long}"


def test_half_of_the_modules_are_within_250_lines() -> None:
    lengths = [
        len(path.read_text().splitlines()) for path in modules(*PACKAGES) if path.name != "__init__.py"
    ]
    assert statistics.median(lengths) <= 250


def test_no_module_is_named_as_another() -> None:
    names = Counter(
        path.stem for path in modules(*PACKAGES) if path.name not in ("__init__.py", "__main__.py")
    )
    assert not [name for name, count in names.items() if count > 1]


def test_every_folder_of_a_package_is_a_package() -> None:
    folders = {path.parent for path in modules(*PACKAGES)}
    bare = sorted(relative(folder) for folder in folders if not (folder / "__init__.py").exists())
    assert not bare, f"no __init__.py, so an install would leave these out: {bare}"


def test_imports_point_one_way() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for package, allowed in MAY_IMPORT.items()
        for path in modules(package)
        for line, name in imported_modules(path.read_text())
        if name.split(".")[0] in {*PACKAGES, "tests"} - allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_the_cost_model_knows_no_graph() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for path in modules("cost_model")
        for line, name in imported_modules(path.read_text())
        if name.split(".")[:2] == ["torch", "fx"] or name.split(".")[0] == "networkx"
    ]
    assert not wrong, "\n".join(wrong)


def test_what_the_packages_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # Imported when asked to draw curves, to read configurations, or to train with another library.
    asked = extras["plot"] + extras["planner"] + extras["trainer"] + extras["lightning"]
    declared = {requirement.split(">")[0] for requirement in (*project["dependencies"], *asked)}
    declared |= {"yaml"} & {name.lower().removeprefix("py") for name in declared}
    if "lightning" in declared:  # which brings both
        declared |= {"pytorch_lightning", "lightning_fabric"}
    known = declared | set(PACKAGES) | sys.stdlib_module_names
    undeclared = {
        f"{relative(path)}:{line} imports {name}"
        for path in modules(*PACKAGES)
        for line, name in imported_modules(path.read_text())
        if name.split(".")[0] not in known
    }
    assert not undeclared, "\n".join(sorted(undeclared))
