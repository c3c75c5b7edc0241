"""The repository as the structure tests see it: its packages and what their modules import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PACKAGES", "ROOT", "imported_modules", "modules", "relative"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("autoshard", "passes", "cost_model")


def modules(*folders: str) -> list[Path]:
    """Every Python file under `folders` of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, anywhere in the file; relative imports are left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
