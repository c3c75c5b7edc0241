"""A profile as JSON data and back. Every mistake is a ProfileError that names file, field and remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from cost_model.checked_arguments import shown
from cost_model.errors import ProfileError
from cost_model.json_text import parse_json
from cost_model.measurements import KINDS
from cost_model.profile_schema import SCHEMA_VERSION, ProfileData

__all__ = ["profile_data", "profile_fields", "profile_json"]

_REMEDY = "correct it, or measure the profile again"

_NUMBERS = re.compile(r"\[[0-9eE+.,\s-]+\]")
"""A JSON list of numbers, to be written on one line."""

_AT = re.compile(r" - at `.*?\$(.*)`$")
"""The end of msgspec's messages: the place, `$.links[0].ranks`."""
_NAMED = re.compile(r"Object (missing required|contains unknown) field `(.*)`")
_TYPE = re.compile(r"Expected `([^`]*)`, got `.*`")
_RANGE = re.compile(r"Expected `([^`]*)` (of length )?(<=|>=|<|>)? ?([^,]*)(, got .*)?")

_TYPES = {"int": "an integer", "float": "a number", "str": "a text", "bool": "true or false"} | {
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {"<=": "at most ", ">=": "at least ", "<": "below ", ">": "above ", None: ""}


def profile_fields(text: str, where: str) -> dict[str, Any]:
    """The fields of the profile that the JSON `text` states; `where` (a file name) starts every ProfileError."""
    if not isinstance(text, str):
        raise ProfileError(f"{where}: is {shown(text)}\n  try: the text that to_json() gives")
    data = parse_json(text, where, ProfileError)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ProfileError(
            f"{where}: field schema_version is {shown(version)}; this autoshard reads {SCHEMA_VERSION}\n"
            "  try: measure the profile again, or install the autoshard that wrote it"
        )
    return profile_data(data, where).fields()


def profile_data(data: Mapping[str, Any], where: str) -> ProfileData:
    """`data` by the schema. ProfileError, starting with `where`, for the first field that does not fit it."""
    try:
        return msgspec.convert(data, ProfileData)
    except msgspec.ValidationError as error:
        raise ProfileError(f"{where}: field {_mistake(str(error), data)}\n  try: {_REMEDY}") from None


def profile_json(content: Mapping[str, Any]) -> str:
    """The JSON text: an indented line for each field, but lists of numbers on one."""
    text = json.dumps(content, indent=2)
    return _NUMBERS.sub(lambda match: "[" + " ".join(match[0][1:-1].split()) + "]", text) + "\n"


def _mistake(message: str, data: Mapping[str, Any]) -> str:
    """msgspec's message in our words: the field, what it is, and what it must be."""
    at = _AT.search(message)
    place = at[1] if at else ""
    problem = message[: at.start()] if at else message
    named = _NAMED.fullmatch(problem)
    if named:
        field = f"{place}.{named[2]}".lstrip(".")
        return (
            f"{field} is missing"
            if named[1].startswith("missing")
            else f"{field} is not a field of a profile"
        )
    return f"{place.lstrip('.')} {_seen(place, data)}{_demand(problem)}"


def _seen(place: str, data: Any) -> str:
    """The value at `place`. msgspec writes `[...]` for whatever name an object of texts has."""
    if "[...]" in place:
        return "is of another type"
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
        data = data[name] if name else data[int(index)]
    return f"is {shown(data)}"


def _demand(problem: str) -> str:
    of_type, in_range = _TYPE.fullmatch(problem), _RANGE.fullmatch(problem)
    if of_type:
        return f", not {_words(of_type[1])}"
    if in_range:
        kind, length, bound, limit, _ = in_range.groups()
        joint = f" {length}" if length else ", "
        return f"; it must be {_words(kind)}{joint}{_BOUNDS[bound]}{limit}"
    if problem.startswith("Invalid enum value"):
        return f"; it must be one of {', '.join(KINDS)}"
    return f": {problem}"


def _words(kind: str) -> str:
    """`int | null` -> "an integer or null"."""
    return " or ".join(_TYPES.get(word, word) for word in kind.split(" | "))
