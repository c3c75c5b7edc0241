"""What `mkdocs build` needs beside mkdocs.yml: links out of docs/ that work on the site, and docstrings as lists.

Pages link to files of the repository as one reads them there. On the site the results of benchmarks are pages, and
other files that a page links to are copied as they are. Hooks of mkdocs, and an extension of griffe, which reads
docstrings.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
_ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): +(.+(?:\n {8,}.+)*)", re.MULTILINE)
"""A row of a docstring's table of arguments, with the lines that go on."""


def uri(path: Path) -> str:
    """Where a file of the repository is on the site."""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    if path.is_relative_to(RESULTS):
        return (Path("results") / path.relative_to(RESULTS)).as_posix()
    if path.parent == ROOT and path.suffix == ".md":
        return f"repository/{path.stem.lower()}.md"
    return f"repository/{path.relative_to(ROOT).as_posix()}"


def on_files(files: Files, config: Any) -> Files:
    """Add results, and every file that a page links to."""
    paths = {*RESULTS.iterdir()}
    for page in [*(ROOT / "docs").rglob("*.md"), *RESULTS.glob("*.md"), *ROOT.glob("*.md")]:
        paths |= {
            path for link in _LINK.findall(page.read_text()) if (path := _target(page, link[1])).is_file()
        }
    for path in sorted(paths):
        if path.is_relative_to(ROOT) and files.get_file_from_path(uri(path)) is None:
            files.append(File.generated(config, uri(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files of the repository are links to where these are on the site."""
    here = Path(page.file.abs_src_path)

    def moved(link: re.Match[str]) -> str:
        path = _target(here, link[2])
        if not path.is_file() or not path.is_relative_to(ROOT):
            return link[0]
        return (
            f"{link[1]}{os.path.relpath(uri(path), Path(page.file.src_uri).parent)}{link[3] or ''}{link[4]}"
        )

    return _LINK.sub(moved, markdown)


def _target(page: Path, link: str) -> Path:
    return Path(os.path.normpath(page.parent / link))


class Arguments(griffe.Extension):
    """A docstring's table of arguments as a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ARGUMENT.sub(_item, obj.docstring.value)


def _item(row: re.Match[str]) -> str:
    return f"\n- `{row[1]}`: {' '.join(row[2].split())}"
