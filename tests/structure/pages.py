"""The pages of the site, their sentences, and the links between them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.structure.source_tree import ROOT

DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "decisions"]
WRITTEN = (DOCS / "board.md", DOCS / "models.md", DOCS / "trace.md", DOCS / "versions.md")
"""By code."""

LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) (.*)")
_END = re.compile(r"(?<=[.!?])[\")*]*\s+")


def text_of(page: Path) -> str:
    """Without blocks of code in fences and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCED.sub("", page.read_text()), flags=re.DOTALL)


@cache
def headings(page: Path) -> list[str]:
    return [re.sub(LINK, r"\1", line.lstrip("# ")) for line in text_of(page).splitlines() if line[:1] == "#"]


def anchors(page: Path) -> set[str]:
    """As GitHub and mkdocs name headings."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings(page))
    return {heading.strip().replace(" ", "-") for heading in plain}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Files that a page links to, and the heading or ""."""
    for _, link in LINK.findall(re.sub(r"`[^`\n]*`", "", text_of(page))):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            yield ((page.parent / path).resolve() if path else page), anchor


def paragraphs(page: Path) -> Iterator[str]:
    """Paragraphs and items of lists; no headings, code or tables."""
    lines: list[str] = []
    in_item = False
    for line in [*text_of(page).splitlines(), ""]:
        item = _ITEM.match(line)
        if item or not line.strip() or line[0] in "#|":
            if lines:
                yield " ".join(lines)
            lines = [item[1]] if item else []
            in_item = bool(item) or (in_item and not line.strip())
        elif lines or in_item or line[:4] != "    ":
            lines.append(line.strip())


def cells(page: Path) -> Iterator[str]:
    for line in text_of(page).splitlines():
        if line.startswith("|"):
            yield from (cell.strip() for cell in line.strip("|").split(" | "))


def sentences(text: str) -> list[str]:
    """Code and links count as one word each."""
    return _END.split(re.sub(r"`[^`]*`", "code", LINK.sub(r"\1", text)))


def words(text: str) -> list[str]:
    return re.findall(r"[\w.]*\w", text.lower())
