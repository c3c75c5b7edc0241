"""JSON output of nccl-tests (`-J file.json`), versions 2 to 4 of the file: one run.

Numbers are printed with six decimals, so nearly every row proves itself. The environment that the file
records is not read: it may hold secrets. [nccl-tests src/util.cu]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import Any, NoReturn, cast

from cost_model.errors import is_whole, parse_integer
from cost_model.mesh import MOST_DEVICES
from cost_model.readers.points import Group, Line, Place, Printed, Run, group_of, parse_time, refuse
from cost_model.readers.result_rows import ITEM_BYTES, PROGRAMS, Row, Side, check_average, kind_of, row_points

_RESULTS = re.compile(r'(?<!\\)"results"\s*:\s*\[')
_UNCHANGED = "the file as nccl-tests wrote it, version 3 (-J)"


@dataclass(frozen=True)
class _Entry:
    """A JSON object, and where it stands: `results[2].in_place.` of a line of a file."""

    place: Place
    path: str
    data: Mapping[str, Any]

    def refuse(self, field: str, problem: str, remedy: str = _UNCHANGED) -> NoReturn:
        value = json.dumps(self.data.get(field), default=str)
        refuse(self.place, f"{self.path}{field} {problem}", value, remedy)

    def entry(self, field: str) -> _Entry:
        return _Entry(self.place, f"{self.path}{field}.", self._checked(field, _is_object, "an object"))

    def entries(self, field: str) -> list[_Entry]:
        of_objects = lambda value: isinstance(value, list) and bool(value) and all(map(_is_object, value))
        items = self._checked(field, of_objects, "a list of objects")
        return [_Entry(self.place, f"{self.path}{field}[{i}].", item) for i, item in enumerate(items)]

    def integer(self, field: str) -> int:
        return self._checked(field, lambda value: is_whole(value) and int(value) >= 0, "a count")

    def text(self, field: str) -> str:
        return self._checked(field, lambda value: isinstance(value, str), "a text")

    def number(self, field: str) -> Printed:
        finite = lambda value: (
            (is_whole(value) or isinstance(value, float)) and 0 <= float(value) < float("inf")
        )
        # The C format %lf prints six digits: half a unit of the last.
        return Printed(float(self._checked(field, finite, "a finite number above zero")), 0.5e-6)

    def _checked(self, field: str, fits: Callable[[Any], bool], what: str) -> Any:
        value = self.data.get(field)
        if not fits(value):
            self.refuse(field, f"is not {what}")
        return value


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def read_nccl_json(file: str, text: str, when: datetime) -> tuple[Run, ...]:
    """The run in `text`; `when` is its time if it does not say.

    Raises ProfileError, with file and line and the field, for what is cut, changed, wrong or of another
    version.
    """
    try:
        data = json.loads(text, parse_int=parse_integer)
    except json.JSONDecodeError as error:
        place = Place(file, error.lineno)
        refuse(place, f"not JSON: {error.msg}, column {error.colno}", _around(text, error.pos), _UNCHANGED)
    except RecursionError:
        refuse(Place(file, 1), "nested too deep", text[:80], _UNCHANGED)
    if not isinstance(data, dict):
        refuse(Place(file, 1), "not a JSON object", text[:80], _UNCHANGED)
    root = _Entry(Place(file, 1), "", cast("dict[str, Any]", data))
    if root.data.get("version") not in (2, 3, 4) or isinstance(root.data.get("version"), bool):
        root.refuse("version", "is not 2, 3 or 4: this version is not known")
    rows = _rows(file, text, root)
    _check_bounds(root.entry("out_of_bounds"))
    average = root.entry("average_bus_bandwidth")
    bandwidth = average.number("bandwidth").times(1e9)
    check_average(Line(root.place, str(average.data.get("bandwidth")), None), rows, bandwidth)
    config = root.entry("config")
    group, device = _group(config)
    program = _program(root)
    kind = kind_of(root.place, rows, group.size, program, file)
    started = parse_time(root.text("start_time")) or when
    points, unproved = row_points(kind, group.size, rows, started)
    software = (("nccl", str(root.data["nccl_version"])),) if "nccl_version" in root.data else ()
    title = f"{kind or program or 'a collective'}, nccl-tests JSON version {root.data['version']}"
    return (Run(kind, title, group, points, root.place, unproved, device, software),)


def _around(text: str, position: int) -> str:
    return text[max(0, position - 40) : position + 40]


def _program(root: _Entry) -> str | None:
    """The program of the command line; None if it is not known (a renamed one)."""
    args = root.data.get("args")
    if not isinstance(args, list) or not args or not isinstance(args[0], str):
        root.refuse("args", "is not a command line")
    name = PurePath(args[0]).name.removesuffix("_mpi").removesuffix("_perf")
    return name if name in PROGRAMS else None


def _group(config: _Entry) -> tuple[Group, str]:
    """The device of each rank, or of the first of the nthreads * ngpus ranks of each process."""
    own = config.integer("nthreads") * config.integer("ngpus")
    if own > MOST_DEVICES:
        config.refuse("nthreads", f"times ngpus is {own}, more ranks than any process has")
    devices = config.entries("devices")
    members: dict[int, list[int]] = {}
    hosts: dict[int, str] = {}
    listed = sorted(device.integer("rank") for device in devices)
    each = 1 if len(listed) > 1 and listed == list(range(len(listed))) else own
    for device in devices:
        first = device.integer("rank")
        for rank in range(first, first + each):
            members.setdefault(device.integer("group"), []).append(rank)
            hosts[rank] = device.text("hostname")
    return group_of(config.place, members, hosts), devices[0].text("device_info")


def _check_bounds(bounds: _Entry) -> None:
    if bounds.integer("count"):
        bounds.refuse("count", "counts wrong results", "repair the network or NCCL's settings first")


def _rows(file: str, text: str, root: _Entry) -> tuple[Row, ...]:
    entries = root.entries("results")
    lines = _element_lines(text, len(entries))
    return tuple(
        _row(_Entry(Place(file, line), entry.path, entry.data))
        for line, entry in zip(lines, entries, strict=True)
    )


def _element_lines(text: str, count: int) -> list[int]:
    """Line of each element of the list "results"; all 1 in the file as written, which is one line."""
    match = _RESULTS.search(text)
    if match is None:
        return [1] * count
    decoder = json.JSONDecoder()
    at = match.end()
    lines: list[int] = []
    try:
        for _ in range(count):
            at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,"))
            lines.append(text.count("\n", 0, at) + 1)
            _, at = decoder.raw_decode(text, at)
    except json.JSONDecodeError:
        return [1] * count
    return lines


def _row(entry: _Entry) -> Row:
    kind_of_item = entry.text("type")
    if kind_of_item not in ITEM_BYTES:
        entry.refuse("type", f"is not one of {', '.join(ITEM_BYTES)}")
    root = entry.text("root").strip()
    if not root.lstrip("-").isdigit():
        entry.refuse("root", "is not a rank, nor -1")
    sides = [name for name in ("out_of_place", "in_place") if entry.data.get(name) is not None]
    if not sides:
        entry.refuse("out_of_place", "is missing, and in_place too")
    return Row(
        place=entry.place,
        text=json.dumps({"path": entry.path.rstrip(".")} | dict(entry.data)),
        nbytes=entry.integer("size"),
        count=entry.integer("count"),
        item_bytes=ITEM_BYTES[kind_of_item],
        redop=entry.text("redop"),
        root=int(root),
        sides=tuple(_side(entry.entry(name)) for name in sides),
        when=None,
    )


def _side(entry: _Entry) -> Side:
    """`cpu_time` stands for `time` with -C 1."""
    if "cpu_time" in entry.data:
        entry.number("cpu_time")
        seconds = None
    else:
        seconds = entry.number("time").times(1e-6)
    wrong = entry.data.get("nwrong")
    return Side(
        seconds=seconds,
        algbw=entry.number("alg_bw").times(1e9),
        busbw=entry.number("bus_bw").times(1e9),
        wrong=None if wrong is None else entry.number("nwrong").value,
    )
