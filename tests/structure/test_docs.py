"""What the documentation names exists. Decisions may name what has gone since."""

from __future__ import annotations

import re

from tests.structure.source_tree import PACKAGES, ROOT, relative

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join(PACKAGES)})/[\w./*-]*")


def paths(text: str) -> list[str]:
    """`passes/lower/partition.py`, `passes/rules/`: a file or folder of a package, with the end of a sentence cut
    off."""
    return [found.rstrip(".-") for found in _PATH.findall(text)]


def test_paths_are_found() -> None:
    assert paths("`passes/rules/`, a/passes/x, in cost_model/mesh.py.") == [
        "passes/rules/",
        "cost_model/mesh.py",
    ]


def test_every_path_exists() -> None:
    wrong = [
        f"{relative(page)} names {path}"
        for page in PAGES
        for path in paths(page.read_text())
        if not (ROOT / path).exists()
    ]
    assert not wrong, "\n".join(wrong)
