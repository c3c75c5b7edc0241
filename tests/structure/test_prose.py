"""Docs are short, and so are their sentences."""

from __future__ import annotations

import re

from tests.structure.pages import PAGES, WRITTEN, cells, paragraphs, sentences
from tests.structure.source_tree import ROOT, relative

LONGEST = 40
"""Words of a sentence."""
PROSE = 200_000
"""Bytes of text, without code and tables."""

OURS = [ROOT / "README.md", *(page for page in PAGES if page not in WRITTEN)]


def count(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def test_sentences_are_told_apart() -> None:
    assert sentences("One. [Two words](x.md) `a b. c`! Three") == ["One.", "Two words code!", "Three"]
    assert count("a - `b` |") == 2


def test_no_sentence_is_long() -> None:
    wrong = [
        f"{relative(page)}: {count(sentence)} words: {sentence}"
        for page in OURS
        for text in (*paragraphs(page), *cells(page))
        for sentence in sentences(text)
        if count(sentence) > LONGEST
    ]
    assert not wrong, "\n".join(wrong)


def test_prose_fits() -> None:
    assert sum(len(text.encode()) + 1 for page in OURS for text in paragraphs(page)) < PROSE
