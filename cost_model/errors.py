"""Every error that autoshard raises on purpose, and what users give: arguments of public functions, texts, JSON files.
Each mistake is an error of ours that names it. All derive from `AutoshardError`.

Python's reader of JSON accepts things that our writers never make; they are refused.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import reprlib
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, TypeGuard

from msgspec import Meta

log = logging.getLogger("autoshard")
"""What users are told that is no error."""


class AutoshardError(Exception):
    """Base of all errors raised by autoshard, passes and cost_model."""


class CaptureError(AutoshardError):
    """The model could not be traced to one graph."""


class ShardingError(AutoshardError, ValueError):
    """A pin, placement, mesh or input asks for a sharding that cannot be."""


class InfeasibleError(AutoshardError):
    """No plan satisfies the pins and the memory limit."""


class UnsupportedOpError(AutoshardError):
    """An op, collective or dtype that autoshard cannot handle."""


class ProfileError(AutoshardError, ValueError):
    """A bandwidth profile is malformed, impossible, or lacks a needed measurement."""


class PlanError(AutoshardError, ValueError):
    """A plan is malformed, stale, or belongs to another model or mesh."""


class RankError(AutoshardError):
    """The ranks do different things, or one of them is gone. Every rank raises it, and nothing parallel goes on.

    No ValueError, as errors of arguments and files are: an `except ValueError` that skips a batch must not take it.
    """


_SHORT = reprlib.Repr()


def reject(argument: str, value: object, remedy: str) -> ShardingError:
    """The error for a value of the wrong kind. A long value is cut, because it may be a whole tensor."""
    return ShardingError(f"{argument} is {shown(value)}\n  try: {remedy}")


def error_line(error: BaseException) -> str:
    """Its type, and the first line of what it says, cut where that is long."""
    said = (str(error) or "no message").splitlines()[0]
    return f"{type(error).__name__}: {said[:200]}"


def few(names: Sequence[str], most: int, more: str = " and {} more") -> str:
    """The first `most` of the names, and how many there are besides."""
    return ", ".join(names[:most]) + (more.format(len(names) - most) if len(names) > most else "")


def titled(subject: str, words: str) -> str:
    """A line of a printed page, folded below its words."""
    return folded(f"{subject:11} {words}", 12)


def folded(line: str, under: int = 4) -> str:
    """A line of a printed page in lines of 100 columns at most, those below further in by `under`."""
    start = len(line) - len(line.lstrip()) + under
    return textwrap.fill(
        line, 100, subsequent_indent=" " * start, break_long_words=False, break_on_hyphens=False
    )


def type_of(value: object) -> str:
    """Its type, with an article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def shown(value: object) -> str:
    """A value in a message. Numbers, text and short lists are shown as written, all else by its type."""
    if isinstance(value, (list, tuple, dict)):
        try:
            return _SHORT.repr(value)  # it does not recurse into what is nested deep
        except ValueError:  # an integer that Python refuses to write
            return type_of(value)
    text = repr(value) if isinstance(value, (str, bytes, float, bool, type(None))) else ""
    if isinstance(value, int) and abs(value) < 10**40:  # Python refuses to write the longest
        text = repr(value)
    return text if 0 < len(text) <= 60 else type_of(value)


def checked_seconds(value: object, argument: str) -> float:
    """A time above zero, which may be infinite."""
    if not is_number(value) or not (0 < value < 2**63 or value == math.inf):
        raise reject(argument, value, "a number of seconds above zero")
    return float(value)


def checked_share(value: object, argument: str) -> float:
    """A share, from 0 to 1."""
    if not is_number(value) or not 0.0 <= value <= 1.0:
        raise reject(argument, value, "a share from 0 to 1, such as 0.01")
    return float(value)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an integer, Python's or numpy's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is an integer or a real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def checked_count(value: object, argument: str, least: int = 0) -> int:
    """An integer of at least `least`."""
    if is_whole(value) and least <= value < 2**63:
        return int(value)
    raise reject(argument, value, f"an integer, at least {least}")


def checked_path(value: object, argument: str, error: type[AutoshardError] = ShardingError) -> Path:
    """A path that can name a file; `error` for anything else."""
    try:
        path = Path(os.fspath(value))  # type: ignore[arg-type]
        str(path).encode("utf-8")
    except (TypeError, UnicodeEncodeError):
        raise error(f"{argument} is {shown(value)}\n  try: a file's path") from None
    if "\0" in str(path):
        raise error(f"{argument} is {shown(value)}, which holds a zero character\n  try: a file's path")
    return path


def checked_flag(value: object, argument: str) -> bool:
    if not isinstance(value, bool):
        raise reject(argument, value, "True or False")
    return value


Count = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e30)]
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]*$"
Text = Annotated[str, Meta(pattern=PRINTABLE, max_length=20_000)]
"""What may be printed, and written to any format that a plan is drawn in."""
Word = Annotated[str, Meta(pattern=r"^\w+$", max_length=200)]

MOST_DIGITS = 18


def parse_json(text: str, where: str, error: type[AutoshardError]) -> Any:
    """The data of a JSON text. `error`, starting with `where`, for what is no JSON, repeats a name in an object, or is
    nested deeper than Python can follow. An integer of more than 18 digits becomes a float: no count is so large."""
    try:
        data = json.loads(text, object_pairs_hook=_unrepeated, parse_int=parse_integer)
        if "\\ud" in text.lower():  # half of a character: no file can hold it
            json.dumps(data, ensure_ascii=False).encode()
        return data
    except json.JSONDecodeError as cause:
        problem = f"not JSON: {cause.msg}, line {cause.lineno} column {cause.colno}"
    except UnicodeEncodeError:
        problem = "damaged: a text in it is no UTF-8"
    except RecursionError:
        problem = "not JSON of ours: nested too deep"
    except _RepeatedError as cause:
        problem = f"damaged: the name {str(cause)[:60]!r} stands twice in one object"
    raise error(f"{where}: {problem}\n  try: the file as it was written, or make it again")


class _RepeatedError(Exception):
    pass


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _RepeatedError(next(name for name, count in counts.items() if count > 1))
    return found


def parse_integer(digits: str) -> int | float:
    return int(digits) if len(digits.lstrip("-")) <= MOST_DIGITS else float(digits)


MOST_BYTES = 2**27
"""The most of a file that is read. No plan or profile is so large; what is wrong with one was said after minutes."""


def read_text(path: Path, what: str, error: type[AutoshardError]) -> str:
    """The file's text. `error`, naming it, if it cannot be read, is not UTF-8 or is larger than `MOST_BYTES`."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise error(
                f"{str(path)!r} is no {what}: it has more than {MOST_BYTES >> 20} MiB\n"
                "  try: the file as it was written"
            )
        return data.decode("utf-8")
    except OSError as cause:
        raise error(
            f"cannot read {what} {str(path)!r}: {cause.strerror}\n  try: a path that exists"
        ) from None
    except UnicodeDecodeError as cause:
        raise error(
            f"{str(path)!r} is no {what}: not UTF-8 ({cause.reason})\n  try: the file as it was written"
        ) from None


def read_json(path: Path, what: str, error: type[AutoshardError]) -> Any:
    """The data of a JSON file. `error`, naming the file, for whatever is wrong with it."""
    return parse_json(read_text(path, what, error), repr(str(path)), error)


def write_text(path: Path, text: str, what: str, error: type[AutoshardError]) -> None:
    """`error`, naming the file, if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as cause:
        raise error(f"cannot write {what} {str(path)!r}: {cause.strerror}\n  try: another path") from None


_AT = re.compile(r" - at `.*?\$(.*)`$")
"""The end of msgspec's messages: the place, `$.links[0].ranks`."""


_MISSING = re.compile(r"Object missing required field `(.*)`")


_TYPE = re.compile(r"Expected `([^`]*)`, got `.*`")


_RANGE = re.compile(r"Expected `([^`]*)` (of length )?(<=|>=|<|>)? ?([^,]*)(, got .*)?")


_TYPES = {"int": "an integer", "float": "a number", "str": "a text", "bool": "true or false"} | {
    "array": "a list",
    "object": "an object",
    "null": "null",
}


_BOUNDS = {"<=": "at most ", ">=": "at least ", "<": "below ", ">": "above ", None: ""}


def schema_mistake(message: str, data: Mapping[str, Any], named: Sequence[str]) -> str:
    """msgspec's message in our words: the field, what it is, and what it must be. named: what a text may be that the
    schema has a pattern for."""
    at = _AT.search(message)
    place = at[1] if at else ""
    problem = message[: at.start()] if at else message
    missing = _MISSING.fullmatch(problem)
    if missing:
        return f"{place}.{missing[1]} is missing".lstrip(".")
    return f"{place.lstrip('.')} {_seen(place, data)}{_demand(problem, named)}"


def _seen(place: str, data: Any) -> str:
    """The value at `place`. msgspec writes `[...]` for whatever name an object of texts has."""
    if "[...]" in place:
        return "is of another type"
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
        data = data[name] if name else data[int(index)]
    return f"is {shown(data)}"


def _demand(problem: str, named: Sequence[str]) -> str:
    of_type, in_range = _TYPE.fullmatch(problem), _RANGE.fullmatch(problem)
    if "matching regex" in problem:
        return f"; it must be one of {', '.join(named)}"
    if of_type:
        return f", not {_words(of_type[1])}"
    if in_range:
        kind, length, bound, limit, _ = in_range.groups()
        joint = f" {length}" if length else ", "
        return f"; it must be {_words(kind)}{joint}{_BOUNDS[bound]}{limit}"
    return f": {problem}"


def _words(kind: str) -> str:
    """`int | null` -> "an integer or null"."""
    return " or ".join(_TYPES.get(word, word) for word in kind.split(" | "))
