"""Which module of a package imports which: every import counts, in functions and for type checkers too."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["circles", "import_graph", "sources"]

Graph = Mapping[str, set[str]]


def sources(root: Path, package: str) -> dict[str, str]:
    """Dotted name -> text of every module of `package`; a package's own name stands for its `__init__.py`."""
    paths = sorted((root / package).rglob("*.py"))
    return {".".join(path.relative_to(root).with_suffix("").parts): path.read_text() for path in paths}


def import_graph(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> modules of `texts` that it imports. `from a import b` imports a.b where that is a module, else a."""
    known = {_bare(name): text for name, text in texts.items()}
    return {name: set(_imports(text, known)) for name, text in known.items()}


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Each set of modules that all reach one another, sorted; a module alone is one if it imports itself."""
    reached = {name: _reached(graph, name) for name in graph}
    found = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph if a in reached[a]}
    return sorted(found)


def _bare(name: str) -> str:
    return name.removesuffix(".__init__")


def _imports(text: str, known: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def _reached(graph: Graph, start: str) -> set[str]:
    """Everything that one or more imports lead to from `start`."""
    found: set[str] = set()
    pending = [start]
    while pending:
        for name in graph[pending.pop()] - found:
            found.add(name)
            pending.append(name)
    return found
