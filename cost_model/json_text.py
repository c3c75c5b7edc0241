"""JSON from files that may be damaged. Python's reader accepts things that our writers never make; they are refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from cost_model.errors import AutoshardError

__all__ = ["parse_json"]

_MOST_DIGITS = 18


def parse_json(text: str, where: str, error: type[AutoshardError]) -> Any:
    """What `text` says. `error`, starting with `where`, for what is no JSON, repeats a name in an object, or is nested
    deeper than Python can follow. An integer of more than 18 digits becomes a float: no count is so large."""
    try:
        data = json.loads(text, object_pairs_hook=_unrepeated, parse_int=_integer)
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


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits.lstrip("-")) <= _MOST_DIGITS else float(digits)
