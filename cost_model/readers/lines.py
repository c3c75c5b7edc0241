"""Lines of a log, without what launchers and log collectors put in front of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from cost_model.readers.points import Place, refuse

__all__ = ["Line", "lines_of", "parse_time", "whole_number"]

_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_STAMPED = re.compile(rf"\s*[\[(]?({_STAMP})[\])]?:?(?:\s|$)")
_PREFIXES = (
    re.compile(r"\[\d+,\d+\]<std(?:out|err)>:\s?"),  # mpirun --tag-output
    re.compile(r"\s*\d+: (?=\s*[#|\d])"),  # srun --label
    re.compile(r"\[[\w.-]+\]:"),  # torchrun --tee: [default0]:
    re.compile(r"\[[\w.-]+:\d+\]:"),  # torchrun --role --tee: [host:0]:
    re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?=\s*[#|\d])"),  # ts
)


@dataclass(frozen=True)
class Line:
    """text: without prefix and line end; when: the time in the prefix, if it has one."""

    place: Place
    text: str
    when: datetime | None


def lines_of(file: str, text: str) -> Iterator[Line]:
    """The lines of `text`, numbered from 1. A line that was redrawn with carriage returns has its last state."""
    for number, raw in enumerate(text.split("\n"), start=1):
        shown, when = _strip(raw.rstrip().rsplit("\r", 1)[-1])
        yield Line(Place(file, number), shown, when)


def _strip(text: str) -> tuple[str, datetime | None]:
    when: datetime | None = None
    stripped = True
    while stripped:
        stripped = False
        match = _STAMPED.match(text)
        if match:
            text, when, stripped = text[match.end() :], parse_time(match[1]), True
        for prefix in _PREFIXES:
            match = prefix.match(text)
            if match:
                text, stripped = text[match.end() :], True
    return text, when


def parse_time(text: str) -> datetime | None:
    """A time such as 2026-11-21 08:00:00, in local time without zone; None if it is not one."""
    try:
        when = datetime.fromisoformat(text.replace(",", "."))
    except ValueError:
        return None
    return when.astimezone().replace(tzinfo=None) if when.tzinfo else when


def whole_number(line: Line, digits: str) -> int:
    """An integer of `line`. ProfileError for more than 18 digits, which no benchmark prints and Python may refuse."""
    if len(digits) > 18:
        refuse(line.place, f"a number has {len(digits)} digits", line.text, "the output as it was printed")
    return int(digits)
