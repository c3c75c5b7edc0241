"""The site: its navigation has every page, links lead somewhere, and what users look for is found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import autoshard
from tests.structure.pages import DOCS, PAGES, RESULTS, anchors, headings, links, text_of, words
from tests.structure.source_tree import ROOT, relative

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
LINKING = [
    *DOCS.rglob("*.md"),
    *RESULTS.glob("*.md"),
    *(ROOT / f"{n}.md" for n in ("README", "CONTRIBUTING")),
]


def pages_of(entries: Any) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    if isinstance(entries, dict):
        entries = entries.values()
    return [page for entry in entries for page in pages_of(entry)]


def file_of(page: str) -> Path:
    """docs/site.py puts the results of benchmarks beside the pages of docs/."""
    return RESULTS / page.removeprefix("results/") if page.startswith("results/") else DOCS / page


def test_the_navigation_has_every_page() -> None:
    named = [file_of(page) for page in pages_of(SITE["nav"])]
    assert sorted(named) == sorted([*PAGES, *RESULTS.glob("*.md"), DOCS / "decisions" / "README.md"])


def test_links_lead_to_files_and_headings() -> None:
    wrong = [
        f"{relative(page)} links to {path} #{anchor}"
        for page in LINKING
        for path, anchor in links(page)
        if not path.exists() or (anchor and anchor not in anchors(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_start_page_leads_to_every_page_in_two_steps() -> None:
    reached = {path for path, _ in links(DOCS / "index.md")}
    reached |= {path for page in list(reached) if page.suffix == ".md" for path, _ in links(page)}
    assert not [relative(page) for page in PAGES if page not in reached and page.name != "index.md"]


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: autoshard\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(set(autoshard.__all__) - {"__version__"})


def search(query: str) -> list[str]:
    """Pages that have every word of it, those first that have most of them in their headings."""
    wanted = set(words(query))
    found = [page for page in PAGES if wanted <= set(words(text_of(page)))]
    in_headings = {page: max(len(wanted & set(words(line))) for line in headings(page)) for page in found}
    return [page.relative_to(DOCS).as_posix() for page in sorted(found, key=lambda page: -in_headings[page])]


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("DistributedSampler", "how-to/data.md"),
        ("optimizer state", "faq.md"),
        ("resume on fewer GPUs", "how-to/resume.md"),
        ("planning time of a 70B", "faq.md"),
        ("pin a layer", "how-to/pin.md"),
        ("why slow", "how-to/why-slow.md"),
        ("a rule for a Triton kernel", "how-to/own-ops.md"),
        ("torch.compile", "faq.md"),
        ("FP8", "faq.md"),
        ("MoE", "how-to/experts.md"),
        ("gradient accumulation", "faq.md"),
        ("gradient clipping", "faq.md"),
        ("learning rate scheduler", "faq.md"),
        ("mixed precision", "faq.md"),
        ("context parallel", "faq.md"),
        ("activation checkpointing", "faq.md"),
        ("expert parallel", "how-to/experts.md"),
        ("memory limit", "how-to/memory.md"),
        ("profiling", "faq.md"),
        ("on a CPU", "faq.md"),
        ("LoRA", "how-to/low-precision.md"),
    ],
)
def test_what_users_look_for_is_found(query: str, page: str) -> None:
    assert page in search(query)[:3]
    assert set(words(query)) <= set(words(text_of(DOCS / "index.md")))
