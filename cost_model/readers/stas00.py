"""Payloads and bandwidths with their units, as the torch.distributed benchmarks print them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime

from cost_model.readers.points import (
    WHOLE,
    Group,
    Line,
    Place,
    Printed,
    Run,
    agree,
    lines_of,
    parse_time,
    refuse,
    whole_number,
)
from cost_model.readers.result_rows import Measured, Side, row_points, scales

_PAYLOAD = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B")
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(Bps|B/s|bps|b/s|bit/s)")
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def payload(line: Line, text: str, base: int) -> int:
    """Bytes of "32KB" or "32KiB"; K without i means `base`. The tables mean 1024 by both, the first script
    1000. ProfileError for anything else."""
    match = _PAYLOAD.fullmatch(text)
    nbytes = round(float(match[1]) * (1024 if match[3] else base) ** _POWER[match[2]]) if match else 0
    if nbytes < 1:
        line.refuse(f"the payload is {text!r}", "a size with its unit, such as 32KiB")
    return nbytes


def bandwidth(line: Line, text: str) -> Printed:
    """Bytes per second of "0.92GBps", or of "7.36Gbps" (bits). ProfileError for anything else."""
    match = _BANDWIDTH.fullmatch(text)
    value = Printed.parse(match[1]) if match else None
    if match is None or value is None:
        line.refuse(
            f"the bandwidth is {text!r}", "a number with its unit: GBps for bytes, Gbps for bits per second"
        )
    bits = match[3].startswith("b")
    return value.times(1000.0 ** _POWER[match[2]] / (8 if bits else 1))


_KINDS: dict[str, str | None] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "batch_isend_irecv": "point_to_point",
    # No redistribution uses these; they have no price.
    "reduce": None,
    "gather": None,
    "scatter": None,
}
_TITLE = re.compile(r"The average bandwidth(?: and the per-call latency)? of (\w+) over (\d+) ranks?\b")
_SINGLE = re.compile(r"The average bandwidth of (\w+) with a (\S+) payload \(\d+ trials, (\d+) ranks?\)")
_COMBINED = re.compile(r"The average bandwidth and the per-call latency of \d+ collectives over")
_LINE = re.compile(r"\s*(algbw|busbw): (\S+ ?[A-Za-z/]+)(?: \((\S+ ?[A-Za-z/]+)\))?\s*$")
_SOFTWARE = re.compile(
    r"- software: `?torch=([^\s,`]+)`?, `?cuda=([^\s,`]+)`?, `?nccl=(\([^)]*\)|[^\s,`]+)`?"
)
_HARDWARE = re.compile(r"- hardware: (.+)|Device info: (.+)")
_MEASURED = re.compile(r"- measured: (\d{4}-\d\d-\d\d)")
_RAW = re.compile(r"Environment:|Device info:")
_END = re.compile(r"Elapsed time:")
_RULE = re.compile(r"\|[\s:|-]+\|?$")


@dataclass
class _Open:
    """The table being read. `kind` and `ranks` are None if no title line precedes it."""

    place: Place
    name: str | None
    ranks: int | None
    columns: tuple[str, ...] = ()
    rows: list[Measured] = field(default_factory=list[Measured])


class _Reader:
    def __init__(self, when: datetime) -> None:
        self.runs: list[Run] = []
        self.raw: Line | None = None
        self.ended = False
        self._when = when
        self._open: _Open | None = None
        self._single: tuple[Line, str, int, int] | None = None
        self._lines: dict[str, Printed] = {}
        self._software: tuple[tuple[str, str], ...] = ()
        self._device = ""

    def read(self, line: Line) -> None:
        text = line.text.strip()
        if match := _TITLE.search(text):
            self.finish()
            self._open = _Open(line.place, self._known(line, match[1]), whole_number(line, match[2]))
        elif match := _SINGLE.search(text):
            self.finish()
            self._known(line, match[1])
            self._single = (line, match[1], payload(line, match[2], 1000), whole_number(line, match[3]))
        elif self._single is not None and (match := _LINE.match(line.text)):
            self._bandwidth_line(line, match)
        elif text.startswith("|"):
            self._table_line(line, text)
        else:
            self._other(line, text)

    def _known(self, line: Line, name: str) -> str:
        if name not in _KINDS:
            line.refuse(f"{name!r} is no known collective", f"one of {', '.join(_KINDS)}")
        return name

    def _bandwidth_line(self, line: Line, match: re.Match[str]) -> None:
        value = bandwidth(line, match[2])
        if match[3] and not agree(value, bandwidth(line, match[3])):
            line.refuse(f"{match[2]} and {match[3]} are not the same")
        self._lines[match[1]] = value

    def _table_line(self, line: Line, text: str) -> None:
        if not text.endswith("|") or len(text) < 2:
            line.refuse("the row of the table is cut")
        cells = tuple(cell.strip() for cell in text[1:-1].split("|"))
        if cells[0] == "payload":
            self._columns(line, cells)
        elif self._open is None or not self._open.columns:
            if _PAYLOAD.fullmatch(cells[0]):
                line.refuse("no line with the names of the columns precedes the row")
        elif not _RULE.match(text):
            self._open.rows.append(_cells(line, self._open.columns, cells))

    def _columns(self, line: Line, cells: tuple[str, ...]) -> None:
        if self._open is None or self._open.columns:
            self.finish()
            self._open = _Open(line.place, None, None)
        if "busbw" not in cells or "algbw" not in cells or len(set(cells)) != len(cells):
            line.refuse("the table has no columns busbw and algbw")
        self._open.columns = cells

    def _other(self, line: Line, text: str) -> None:
        if "|" in text and "Bps" in text:
            line.refuse("a row of a table does not start with '|'")
        if _COMBINED.search(text):
            line.refuse(
                "in a table of several collectives no number confirms another",
                "run torch-dist-bench.py with --separate-tables",
            )
        if match := _SOFTWARE.search(text):
            self._software = tuple(zip(("torch", "cuda", "nccl"), match.groups(), strict=True))
        elif match := _HARDWARE.search(text):
            self._device = match[1] or match[2]
        elif match := _MEASURED.search(text):
            self._when = parse_time(match[1]) or self._when
        if _RAW.match(text):
            self.raw = line
        self.ended = self.ended or bool(_END.match(text))
        if text and self._open is not None and self._open.rows:
            self.finish()

    def finish(self) -> None:
        """Close the table or the pair of lines that is open."""
        table, single = self._open, self._single
        self._open, self._single = None, None
        if table is not None and table.columns:
            self._add(table.place, table.name, table.ranks, tuple(table.rows))
        elif table is not None:
            refuse(table.place, "no table follows", table.name or "", WHOLE)
        if single is not None:
            line, name, nbytes, ranks = single
            if set(self._lines) != {"algbw", "busbw"}:
                line.refuse("the lines algbw: and busbw: do not follow")
            cells = _measured(line, nbytes, self._lines["busbw"], self._lines["algbw"])
            self._lines = {}
            self._add(line.place, name, ranks, (cells,))

    def _add(self, place: Place, name: str | None, ranks: int | None, rows: tuple[Measured, ...]) -> None:
        if not rows:
            refuse(place, "the table has no rows", name or "", WHOLE)
        kind = _KINDS[name] if name is not None else "all_reduce"
        n = ranks if ranks is not None else _ranks(place, rows)
        if n < 2:
            refuse(place, f"over {n} ranks nothing is communicated", rows[0].text, "two or more GPUs")
        _check_steps(rows, n)
        points, unproved = row_points(kind, n, rows, self._when)
        title = f"{kind or name}, torch.distributed benchmark table"
        group = Group(((n, 1),))
        self.runs.append(Run(kind, title, group, points, place, unproved, self._device, self._software))


def read_stas00(file: str, text: str, when: datetime) -> tuple[Run, ...]:
    """All tables in `text`, each over consecutive ranks; `when` is their time if the file has none.

    Raises ProfileError, with file and line, for what is garbled, cut or in unknown units.
    """
    reader = _Reader(when)
    line = Line(Place(file, 1), "", None)
    for line in lines_of(file, text):
        reader.read(line)
    reader.finish()
    if reader.raw is not None and not reader.ended:
        line.refuse("the output ends without its line 'Elapsed time:': the file is cut")
    if not reader.runs:
        line.refuse("there is no table of payload, busbw and algbw in the file")
    return tuple(reader.runs)


def _cells(line: Line, columns: tuple[str, ...], cells: tuple[str, ...]) -> Measured:
    if len(cells) != len(columns):
        line.refuse(f"the row has {len(cells)} cells of {len(columns)}")
    named = dict(zip(columns, cells, strict=True))
    both = [named["busbw"], named["algbw"]]
    nbytes = payload(line, named["payload"], 1024)
    if both == ["", ""]:  # below --min-busbw-payload, only latencies
        return _measured(line, nbytes)
    return _measured(line, nbytes, *(bandwidth(line, cell) for cell in both))


def _measured(
    line: Line, nbytes: int, busbw: Printed | None = None, algbw: Printed | None = None
) -> Measured:
    sides = () if busbw is None or algbw is None else (Side(None, algbw, busbw, None),)
    return Measured(line.place, line.text, None, nbytes, sides)


def _ranks(place: Place, rows: tuple[Measured, ...]) -> int:
    """Ranks of an all-reduce table without a title: the one n for which busbw = algbw * 2 (n-1) / n."""
    known = [row for row in rows if row.sides]
    fitting = [n for n in range(3, 4097) if known and all(scales("all_reduce", row, n) for row in known)]
    if len(fitting) != 1:
        refuse(
            place,
            "no line says which collective over how many ranks this is, and the table does not show it",
            rows[0].text,
            "keep the line 'The average bandwidth of all_reduce over 8 ranks' above the table",
        )
    return fitting[0]


def _check_steps(rows: tuple[Measured, ...], n: int) -> None:
    """The benchmarks go through the powers of two; newer ones round down to 16 bytes on each rank."""
    powers = [1 << (row.nbytes - 1).bit_length() for row in rows]
    for i in range(len(rows) if len(rows) > 1 else 0):
        row = rows[i]
        if powers[i] - row.nbytes > 16 * n + 1e-5 * powers[i] or (i and powers[i] != 2 * powers[i - 1]):
            before = f" after {rows[i - 1].nbytes}" if i else ""
            row.refuse(
                f"the payload is {row.nbytes} bytes{before}; payloads are powers of two, each twice the one before"
            )
