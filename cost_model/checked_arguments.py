"""Checks of arguments that several public functions share: before anything is traced, measured or communicated."""

from __future__ import annotations

import math
import os
import reprlib
from numbers import Integral
from pathlib import Path
from typing import TypeGuard

from cost_model.errors import AutoshardError, ShardingError

_SHORT = reprlib.Repr()


def reject(argument: str, value: object, remedy: str) -> ShardingError:
    """The error for a value of the wrong kind. A long value is cut, because it may be a whole tensor."""
    return ShardingError(f"{argument} is {shown(value)}\n  try: {remedy}")


def shown(value: object) -> str:
    """A value in a message. Numbers, text and short lists are shown as written, all else by its type."""
    if isinstance(value, (list, tuple, dict)):
        try:
            return _SHORT.repr(value)  # it does not recurse into what is nested deep
        except ValueError:  # an integer that Python refuses to write
            return f"a {type(value).__name__}"
    text = repr(value) if isinstance(value, (str, bytes, float, bool, type(None))) else ""
    if isinstance(value, int) and abs(value) < 10**40:  # Python refuses to write the longest
        text = repr(value)
    return text if 0 < len(text) <= 60 else f"a {type(value).__name__}"


def checked_seconds(value: object, argument: str) -> float:
    """A time above zero, which may be infinite."""
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not (0 < value < 2**63 or value == math.inf)
    ):
        raise reject(argument, value, "a number of seconds above zero")
    return float(value)


def checked_share(value: object, argument: str) -> float:
    """A share, from 0 to 1."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise reject(argument, value, "a share from 0 to 1, such as 0.01")
    return float(value)


def is_whole(value: object) -> TypeGuard[Integral]:
    """Whether it is an integer, Python's or numpy's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def checked_count(value: object, argument: str, least: int = 0) -> int:
    """An integer of at least `least`."""
    if is_whole(value) and least <= (count := int(value)) < 2**63:
        return count
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
