"""The table of nccl-tests' text output: the line of column names, and rows under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cost_model.readers.points import Line, Printed, parse_time, whole_number
from cost_model.readers.result_rows import ITEM_BYTES, Row, Side

_FIRST = ("size", "count", "type", "redop", "root")
_EXTRA = ("#bitdiff", "i_min", "i_max", "i_p99", "i_cv%")
"""May follow the four columns of a side: bitwise repeatability and per-iteration statistics (-I 1)."""

_MICRO, _GIGA = 1e-6, 1e9
_VERSION = "the output of a newer nccl-tests (with the columns root and #wrong), unchanged"


@dataclass(frozen=True)
class Columns:
    """side: names of the columns of one side, the same for both; stamped: a time ends each row (-S 1)."""

    side: tuple[str, ...]
    stamped: bool

    @property
    def cpu_time(self) -> bool:
        """The time column is what the CPU took to start the collectives (-C 1), not what they took."""
        return self.side[0] == "cputime"

    @property
    def count(self) -> int:
        """Words in a row; a time stamp is two."""
        return len(_FIRST) + 2 * len(self.side) + 2 * self.stamped


def read_columns(line: Line) -> Columns:
    """The columns that a line `# size count type redop root time algbw busbw #wrong ... [timestamp]` names."""
    words = tuple(line.text.lstrip("#").split())
    stamped = words[-1] == "timestamp"
    words = words[:-1] if stamped else words
    sides = words[len(_FIRST) :]
    half = len(sides) // 2
    side = sides[:half]
    known = (
        words[: len(_FIRST)] == _FIRST
        and sides == side + side
        and side[:1] in (("time",), ("cputime",))
        and side[1:4] == ("algbw", "busbw", "#wrong")
        and all(name in _EXTRA for name in side[4:])
    )
    if not known:
        line.refuse("the columns are not those of nccl-tests", _VERSION)
    return Columns(side, stamped)


def check_units(line: Line) -> None:
    """The line under the column names must say bytes, microseconds and GB/s."""
    words = line.text.lstrip("#").split()
    wanted = ["(us)", "(GB/s)", "(GB/s)"]
    units = [word for word in words[2:] if word.startswith("(") and word not in ("(us)", "(%)")]
    fine = words[:2] == ["(B)", "(elements)"] and words[2:5] == wanted and set(units) == {"(GB/s)"}
    if not fine:
        line.refuse("the units are not (B), (elements), (us) and (GB/s)", _VERSION)


def read_row(line: Line, columns: Columns) -> Row:
    """A row of the table. ProfileError if it has other than the columns' words or one is not a number."""
    words = line.text.split()
    if len(words) != columns.count:
        line.refuse(
            f"the row has {len(words)} words; its columns need {columns.count}",
            "the output as it was printed; a line is garbled when others print into it",
        )
    width = len(columns.side)
    first = len(_FIRST)
    return Row(
        place=line.place,
        text=line.text,
        nbytes=_integer(line, "size", words[0]),
        count=_integer(line, "count", words[1]),
        item_bytes=_item_bytes(line, words[2]),
        redop=words[3],
        root=-1 if words[4] == "-1" else _integer(line, "root", words[4]),
        sides=tuple(_side(line, columns, words[at : at + width]) for at in (first, first + width)),
        when=_when(line, words) if columns.stamped else line.when,
    )


def _side(line: Line, columns: Columns, words: list[str]) -> Side:
    numbers = dict(zip(columns.side, words, strict=True))
    extra = [numbers[name] for name in columns.side[4:]]
    for name, word in zip(columns.side[4:], extra, strict=True):
        if word != "N/A":
            _number(line, name, word)
    time = _decimal(line, columns.side[0], words[0])
    wrong = numbers["#wrong"]
    return Side(
        seconds=None if columns.cpu_time else time.times(_MICRO),
        algbw=_decimal(line, "algbw", numbers["algbw"]).times(_GIGA),
        busbw=_decimal(line, "busbw", numbers["busbw"]).times(_GIGA),
        wrong=None if wrong == "N/A" else _number(line, "#wrong", wrong).value,
    )


def _number(line: Line, name: str, word: str) -> Printed:
    number = Printed.parse(word)
    if number is None:
        line.refuse(f"{name} is {word!r}, not a number")
    return number


def _decimal(line: Line, name: str, word: str) -> Printed:
    """A time or bandwidth. The program drops decimals only of large numbers: a short one has lost them."""
    number = _number(line, name, word)
    if "." not in word and number.value < 1000.0:
        line.refuse(f"{name} is {word!r}, without decimals")
    return number


def _integer(line: Line, name: str, word: str) -> int:
    if not (word.isascii() and word.isdigit()):
        line.refuse(f"{name} is {word!r}, not an integer")
    return whole_number(line, word)


def _item_bytes(line: Line, word: str) -> int:
    if word not in ITEM_BYTES:
        line.refuse(f"type is {word!r}", f"one of {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[word]


def _when(line: Line, words: list[str]) -> datetime:
    when = parse_time(" ".join(words[-2:]))
    if when is None:
        line.refuse("the timestamp is not one")
    return when


def sizes_asked(least: int, most: int, step: int, factor: bool) -> Sequence[int]:
    """The sizes that a run goes through, in bytes, before rounding down to whole elements."""
    if not factor:
        return range(least, most + 1, step)
    sizes = [least]
    while sizes[-1] * step <= most:
        sizes.append(sizes[-1] * step)
    return sizes if least <= most else ()
