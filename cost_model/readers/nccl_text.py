"""Text output of nccl-tests: all_reduce_perf, all_gather_perf, ..., one or more runs in a file, each with a table of a
line of column names and rows under it.

A run is a header (`# nThread ...`), a line for each rank, the table and a footer with the average bus
bandwidth. The footer and the sizes in the header must fit the rows, so that no row can be lost unnoticed.
[nccl-tests src/common.cu, src/util.cu]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from cost_model.readers.points import (
    WHOLE,
    Group,
    Line,
    Place,
    Printed,
    Run,
    group_of,
    lines_of,
    parse_time,
    refuse,
    whole_number,
)
from cost_model.readers.result_rows import ITEM_BYTES, PROGRAMS, Row, Side, check_average, kind_of, row_points

_FIRST = ("size", "count", "type", "redop", "root")
_EXTRA = ("#bitdiff", "i_min", "i_max", "i_p99", "i_cv%")
"""May follow the four columns of a side: bitwise repeatability and per-iteration statistics (-I 1)."""

_MICRO, _GIGA = 1e-6, 1e9
_WANTED = "the output of a newer nccl-tests (with the columns root and #wrong), unchanged"


@dataclass(frozen=True)
class _Columns:
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


def _read_columns(line: Line) -> _Columns:
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
        line.refuse("the columns are not those of nccl-tests", _WANTED)
    return _Columns(side, stamped)


def _check_units(line: Line) -> None:
    """The line under the column names must say bytes, microseconds and GB/s."""
    words = line.text.lstrip("#").split()
    wanted = ["(us)", "(GB/s)", "(GB/s)"]
    units = [word for word in words[2:] if word.startswith("(") and word not in ("(us)", "(%)")]
    fine = words[:2] == ["(B)", "(elements)"] and words[2:5] == wanted and set(units) == {"(GB/s)"}
    if not fine:
        line.refuse("the units are not (B), (elements), (us) and (GB/s)", _WANTED)


def _read_row(line: Line, columns: _Columns) -> Row:
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


def _side(line: Line, columns: _Columns, words: list[str]) -> Side:
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


def _sizes_asked(least: int, most: int, step: int, factor: bool) -> Sequence[int]:
    """The sizes that a run goes through, in bytes, before rounding down to whole elements."""
    if not factor:
        return range(least, most + 1, step)
    sizes = [least]
    while sizes[-1] * step <= most:
        sizes.append(sizes[-1] * step)
    return sizes if least <= most else ()


_HEADER = re.compile(
    r"# nThreads? (\d+) nGpus (\d+) minBytes (\d+) maxBytes (\d+) step: (\d+)\((factor|bytes)\) "
)
_RANK = re.compile(
    r"#\s+Rank\s+(\d+)\s+Group\s+(\d+)\s+Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)"
)
_REDUCED = re.compile(r"# Reducing maxBytes to (\d+) ")
_NAMED = re.compile(r"# Collective test (?:starting|concluded): (?:\S*/)?(\S+)")
_COMMAND = re.compile(r"(?<![\w-])(?:\S*/)?(\w+)_perf(?:_mpi)?(?=\s|$)")
_VERSION = re.compile(r"(?:nccl|rccl)-library=(\d+)|NCCL version ([\d.]+)")
_ERRORS = re.compile(r"# Out of bounds values\s*: (\d+) ")
_AVERAGE = re.compile(r"# Avg bus bandwidth\s*: (\S+)")
_LOG = re.compile(r"\S+:\d+:\d+ \[-?\d*\] |NCCL version |.*\bNCCL (?:INFO|WARN)\b")
"""Lines of NCCL itself (NCCL_DEBUG), which may stand between rows."""


@dataclass
class _Open:
    """The run being read."""

    place: Place
    header: str
    processes_ranks: int
    sizes: tuple[int, int, int, bool]
    program: str | None
    version: str
    members: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    hosts: dict[int, str] = field(default_factory=dict[int, str])
    device: str = ""
    columns: _Columns | None = None
    units: bool = False
    rows: list[Row] = field(default_factory=list[Row])


class _Reader:
    def __init__(self, file: str, when: datetime) -> None:
        self.runs: list[Run] = []
        self.run: _Open | None = None
        self.promised: Line | None = None
        """The line that says a run is starting, until its header follows."""
        self._file = file
        self._when = when
        self._program: str | None = None
        self._ended: str | None = None
        self._version = ""

    def read(self, line: Line) -> None:
        text = line.text
        if match := _HEADER.match(text):
            self._start(line, match)
        elif match := _RANK.match(text):
            self._rank(line, match)
        elif text.startswith("#") and "algbw" in text:
            self._open(line).columns = _read_columns(line)
        elif text.startswith("#") and "(GB/s)" in text:
            _check_units(line)
            self._open(line).units = True
        elif match := _AVERAGE.match(text):
            self._finish(line, match[1])
        elif text.startswith("#"):
            self._remark(line)
        elif self.run is not None and self.run.columns is not None and text and not _LOG.match(text):
            self._row(line, self.run, self.run.columns)
        elif self.run is not None and "Rank " in text and " device " in text:
            line.refuse("the line is garbled")
        else:
            self._other(text)

    def _open(self, line: Line) -> _Open:
        if self.run is None:
            line.refuse("no line '# nThread ... minBytes ...' starts this run")
        return self.run

    def _start(self, line: Line, match: re.Match[str]) -> None:
        if self.run is not None:
            line.refuse(
                f"a run starts before the one of line {self.run.place.line} has ended",
                f"{WHOLE} to a file; several processes are one run only if nccl-tests is built with MPI=1",
            )
        threads, gpus, least, most, step = (whole_number(line, match[i]) for i in range(1, 6))
        if threads * gpus < 1 or least < 1 or step < (2 if match[6] == "factor" else 1):
            line.refuse("the sizes or ranks of the run cannot be")
        sizes = (least, most, step, match[6] == "factor")
        self.run = _Open(line.place, line.text, threads * gpus, sizes, self._program, self._version)
        self._program = None
        self.promised = None

    def _rank(self, line: Line, match: re.Match[str]) -> None:
        run = self._open(line)
        rank, group = whole_number(line, match[1]), whole_number(line, match[2])
        run.members.setdefault(group, []).append(rank)
        run.hosts[rank] = match[3]
        run.device = run.device or match[4].strip()

    def _row(self, line: Line, run: _Open, columns: _Columns) -> None:
        if not run.units:
            line.refuse("no line with the units (B), (us), (GB/s) precedes the row")
        run.rows.append(_read_row(line, columns))

    def _remark(self, line: Line) -> None:
        if match := _NAMED.match(line.text):
            self._name(line, match[1].removesuffix("_mpi").removesuffix("_perf"))
        elif (match := _REDUCED.match(line.text)) and self.run is not None:
            least, _, step, factor = self.run.sizes
            self.run.sizes = (least, whole_number(line, match[1]), step, factor)
        elif (match := _ERRORS.match(line.text)) and match[1].strip("0"):
            line.refuse(
                f"{match[1]} results were wrong",
                "repair the network or NCCL's settings first: what computes wrongly has no price",
            )
        elif line.text.startswith("# nThread") or self._may_be_rank(line.text):
            line.refuse("the line is garbled")
        else:
            self._other(line.text)

    def _may_be_rank(self, text: str) -> bool:
        """Only lines of ranks and the words over columns are indented between the header and the table."""
        before_table = self.run is not None and self.run.columns is None
        return before_table and text.startswith("#  ") and "out-of-place" not in text

    def _name(self, line: Line, program: str) -> None:
        if program not in PROGRAMS:
            line.refuse(f"{program!r} is no program of nccl-tests that this reads")
        if "starting" in line.text:
            self._program = program
            self.promised = line
            self._ended = None
        elif self._ended is not None and program != self._ended:
            line.refuse(f"the run above is one of {self._ended}_perf")

    def _other(self, text: str) -> None:
        """A command line or NCCL's version, if it is one."""
        if match := _VERSION.search(text):
            self._version = match[1] or match[2]
        if self.run is None and (match := _COMMAND.search(text)) and match[1] in PROGRAMS:
            self._program = match[1]

    def _finish(self, line: Line, average: str) -> None:
        run = self._open(line)
        value = Printed.parse(average)
        if value is None:
            line.refuse(f"the average is {average!r}, not a number", "run it again")
        _check_sizes(line, run)
        check_average(line, run.rows, value.times(1e9))
        group = _group(run)
        kind = kind_of(run.place, run.rows, group.size, run.program, self._file)
        points, unproved = row_points(kind, group.size, run.rows, self._when)
        version = run.version or self._version
        title = f"{kind or run.program or 'a collective'}, nccl-tests text"
        software = (("nccl", version),) if version else ()
        self.runs.append(Run(kind, title, group, points, run.place, unproved, run.device, software))
        self._ended = run.program
        self.run = None


def read_nccl_text(file: str, text: str, when: datetime) -> tuple[Run, ...]:
    """All runs in `text`; `when` is the time of rows that carry none.

    Raises ProfileError, with file and line, for what is garbled, cut, wrong or not nccl-tests.
    """
    reader = _Reader(file, when)
    line = Line(Place(file, 1), "", None)
    for line in lines_of(file, text):
        reader.read(line)
    if reader.run is not None:
        line.refuse(
            f"the run of line {reader.run.place.line} has no footer '# Avg bus bandwidth': the file is cut"
        )
    if reader.promised is not None:
        reader.promised.refuse("the run that starts here is cut off")
    if not reader.runs:
        line.refuse("there is no run of nccl-tests in the file")
    return tuple(reader.runs)


def _group(run: _Open) -> Group:
    listed = sum(map(len, run.members.values()))
    if not listed or listed % run.processes_ranks:
        refuse(
            run.place,
            f"{listed} lines '# Rank' follow; each process has {run.processes_ranks} ranks (nThread * nGpus)",
            run.header,
            WHOLE,
        )
    return group_of(run.place, run.members, run.hosts)


def _check_sizes(line: Line, run: _Open) -> None:
    """The rows go through the sizes of the header, once or more times (-N, -d all, -o all)."""
    wanted = _sizes_asked(*run.sizes)
    ranks = sum(map(len, run.members.values()))
    if not wanted or len(run.rows) % len(wanted):
        least, most = run.sizes[:2]
        line.refuse(
            f"the table has {len(run.rows)} rows; {len(wanted)} sizes from {least} to {most} bytes were asked for"
        )
    for row, size in zip(run.rows, (wanted[i % len(wanted)] for i in range(len(run.rows))), strict=True):
        # Sizes are rounded down to a whole element; if each rank has a share, to 16 bytes or one element on each.
        whole = row.nbytes > 0 and row.count * row.item_bytes == row.nbytes
        if not size - (row.item_bytes if whole else 32 * ranks) < row.nbytes <= size:
            row.refuse(f"the row should be of {size} bytes, by the header")
