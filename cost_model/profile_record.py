"""`ProfileRecord`: everything that prices are computed from, and its file. Measured, or nominal and so marked.

Every mistake in a file is a ProfileError that names file, field and remedy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Self, get_type_hints

import msgspec
from msgspec import Meta

from cost_model.errors import ProfileError, checked_path, parse_json, shown, write_text
from cost_model.measurements import KINDS, CollectiveSamples, DeviceRates, Lateness, LinkLevel, Positive
from cost_model.profile_check import check_profile

SCHEMA_VERSION = 2

_CORRECT = "correct it, or measure the profile again"

_NUMBERS = re.compile(r"\[[0-9eE+.,\s-]+\]")
"""A JSON list of numbers, to be written on one line."""

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
    return profile_data(data, where)


def profile_data(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields that `data` states, by the types of `ProfileRecord`'s. ProfileError, starting with `where`, for the
    first that does not fit."""
    try:
        found = msgspec.convert(data, _schema())
    except msgspec.ValidationError as error:
        raise ProfileError(f"{where}: field {_mistake(str(error), data)}\n  try: {_CORRECT}") from None
    fields = msgspec.structs.asdict(found)
    for name in _unknown(data, fields):
        raise ProfileError(f"{where}: field {name} is not a field of a profile\n  try: {_CORRECT}")
    for name in ("convolution", "attention", "update"):  # other kinds are not in older files
        if name not in data["device"]:
            raise ProfileError(f"{where}: field device.{name} is missing\n  try: {_CORRECT}")
    del fields["schema_version"]
    return fields | {"software": tuple(fields["software"].items())}


@cache
def _schema() -> type[msgspec.Struct]:
    """The schema of a file: the fields of a `ProfileRecord`, software by name."""
    types = get_type_hints(ProfileRecord, include_extras=True) | {"software": dict[str, str]}
    named = [(f.name, types[f.name]) for f in fields(ProfileRecord) if f.default is MISSING]
    others = [(f.name, types[f.name], f.default) for f in fields(ProfileRecord) if f.default is not MISSING]
    return msgspec.defstruct("ProfileData", [("schema_version", int), *named, *others])


def _unknown(given: Any, known: Any, place: str = "") -> Iterator[str]:
    """Names that are given and no field, by their place."""
    if isinstance(given, Mapping):
        stated = known if isinstance(known, Mapping) else vars(known)
        for name, value in given.items():
            if name in stated:
                yield from _unknown(value, stated[name], f"{place}{name}.")
            else:
                yield f"{place}{name}"
    elif isinstance(given, (list, tuple)):
        for i, (value, other) in enumerate(zip(given, known, strict=False)):
            yield from _unknown(value, other, f"{place.removesuffix('.')}[{i}].")


def profile_json(content: Mapping[str, Any]) -> str:
    """The JSON text: an indented line for each field, but lists of numbers on one."""
    text = json.dumps(content, indent=2)
    return _NUMBERS.sub(lambda match: "[" + " ".join(match[0][1:-1].split()) + "]", text) + "\n"


def _mistake(message: str, data: Mapping[str, Any]) -> str:
    """msgspec's message in our words: the field, what it is, and what it must be."""
    at = _AT.search(message)
    place = at[1] if at else ""
    problem = message[: at.start()] if at else message
    missing = _MISSING.fullmatch(problem)
    if missing:
        return f"{place}.{missing[1]} is missing".lstrip(".")
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
    if "matching regex" in problem:
        return f"; it must be one of {', '.join(KINDS)}"
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


_UNPRICED = ("name", "hardware", "software", "date", "command", "sources")
"""Fields that say where the numbers come from: no price depends on them."""


@dataclass(frozen=True)
class ProfileRecord:
    """Bandwidths and rates of one kind of machine.

    name:        what plans and tables call it.
    nominal:     True if the numbers come from data sheets or another machine than the user's.
    device_type: of the devices measured ("cuda", "cpu").
    hardware, software, date, command, sources: where the numbers come from; no price depends on them.
    collective_launch_seconds: constant part of every modelled collective.
    overlap_efficiency: of a collective and a computation that run at the same time, the share of the
                 shorter that is hidden, in [0, 1]: together they take a + b - overlap_efficiency * min(a, b).
    links:       levels of the network, inner first. They price groups that were not measured.
    collectives: measured times per (kind, group shape).
    device:      launch time, memory bandwidth and matrix-product rates of one device.
    lateness:    by how much longer collectives take behind more computing than they were measured behind, as
                 ranks come at different times; None: nobody comes late.

    Raises ProfileError, naming the field and a remedy, for values that are NaN, negative, zero, falling
    with size, or faster than the links' stated peak.
    """

    name: str
    nominal: bool
    device_type: str
    hardware: str
    software: tuple[tuple[str, str], ...]
    date: str
    command: str
    sources: tuple[str, ...]
    collective_launch_seconds: Positive
    overlap_efficiency: Annotated[float, Meta(ge=0.0, le=1.0)]
    links: Annotated[tuple[LinkLevel, ...], Meta(min_length=1)]
    collectives: tuple[CollectiveSamples, ...]
    device: DeviceRates
    lateness: Lateness | None = None

    def __post_init__(self) -> None:
        where = f"profile {self.name!r}"
        profile_data(self._content(), where)
        check_profile(where, self.links, self.collectives, self.device, self.lateness)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Names of the shipped profiles, all of them nominal."""
        folder = files("cost_model").joinpath("profiles")
        found = (entry.name for entry in folder.iterdir() if entry.name.endswith(".json"))
        return tuple(sorted(name.removesuffix(".json") for name in found))

    @classmethod
    def named(cls, name: str) -> Self:
        """A shipped profile. ProfileError, listing them, if there is none of this name."""
        if not isinstance(name, str) or name not in cls.names():
            raise ProfileError(
                f"no shipped profile is named {shown(name)}\n"
                f"  the shipped ones are {', '.join(cls.names())}\n"
                "  try: one of these, or the path of a profile file"
            )
        text = files("cost_model").joinpath("profiles", f"{name}.json").read_text(encoding="utf-8")
        return cls.from_json(text, f"shipped profile {name!r}")

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> Self:
        """Read a profile file, or a shipped profile by its name (a string without suffix or folder).

        Raises ProfileError, starting with the file, if it cannot be read or says something impossible.
        """
        path = checked_path(path_or_name, "profile", ProfileError)
        bare = isinstance(path_or_name, str) and path.name == path_or_name and not path.suffix
        if bare and (path.name in cls.names() or not os.path.exists(path)):
            return cls.named(path.name)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(
                f"cannot read profile {path}: {error}\n"
                f"  try: a profile file, or a shipped one: {', '.join(cls.names())}"
            ) from None
        return cls.from_json(text, str(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON that `load` reads. ProfileError where no file can be written."""
        target = checked_path(path, "path", ProfileError)
        write_text(target, self.to_json(), "profile", ProfileError)

    def to_json(self) -> str:
        """The JSON text of this profile: schema version first, then the fields in order."""
        return profile_json(self._content())

    @classmethod
    def from_json(cls, text: str, where: str) -> Self:
        """Inverse of `to_json`; `where` (a file name) starts the message of every ProfileError."""
        fields = profile_fields(text, where)
        try:
            return cls(**fields)
        except ProfileError as error:
            raise ProfileError(f"{where}: {error}") from error

    def _content(self) -> dict[str, Any]:
        fields = {"schema_version": SCHEMA_VERSION} | _said(self)
        return fields | {"software": dict(self.software)}

    def hash(self) -> str:
        """16 hex digits of everything a price depends on (and `nominal`), the same in every process."""
        priced = _said(self)
        for field in _UNPRICED:
            del priced[field]
        for samples in (*priced["collectives"], *priced["device"]["matmul"]):
            del samples["spread"]
        text = json.dumps(priced, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def link_domains(self) -> tuple[int | None, ...]:
        """Ranks joined by each link level, inner first."""
        return tuple(link.ranks for link in self.links)

    def __str__(self) -> str:
        return f"{self.name} ({'nominal' if self.nominal else 'measured ' + self.date}, {self.hash()})"


def _said(profile: ProfileRecord) -> dict[str, Any]:
    """Its fields; without lateness, or memory that ranks share, a profile is what it was before there was any."""
    fields = asdict(profile)
    for link in fields["links"]:
        if not link["shares_memory"]:
            del link["shares_memory"]
    if profile.lateness is None:
        del fields["lateness"]
    return fields
