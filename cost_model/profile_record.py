"""`ProfileRecord`: everything that prices are computed from, and its file. Measured, or nominal and so marked.

Every mistake in a file is a ProfileError that names file, field and remedy. The range of each value is in
`cost_model.measurements`; here they must fit one another: times never fall with size, nothing is over the links' peak.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, NoReturn, Self, get_type_hints

import msgspec
from msgspec import Meta

from cost_model.errors import ProfileError, checked_path, parse_json, schema_mistake, shown, write_text
from cost_model.groups import GroupShape, floor_slope, group_ranks, occupancy
from cost_model.measurements import (
    KERNEL_KINDS,
    KINDS,
    CollectiveSamples,
    DeviceRates,
    Lateness,
    LinkLevel,
    MatmulRates,
    Positive,
)
from cost_model.mesh import MOST_DEVICES

SCHEMA_VERSION = 2

_CORRECT = "correct it, or measure the profile again"

_NUMBERS = re.compile(r"\[[0-9eE+.,\s-]+\]")
"""A JSON list of numbers, to be written on one line."""


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
        raise ProfileError(
            f"{where}: field {schema_mistake(str(error), data, KINDS)}\n  try: {_CORRECT}"
        ) from None
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


_AGAIN = "measure again with more repetitions"
_NEWEST = "keep the newest"


def check_profile(
    where: str,
    links: Sequence[LinkLevel],
    collectives: Sequence[CollectiveSamples],
    device: DeviceRates,
    lateness: Lateness | None = None,
) -> None:
    """Raise ProfileError for the first impossible value; `where` starts the message.

    Each value must be in the range that the schema gives it.
    """
    check, seen = _Check(where), set[tuple[str, GroupShape]]()
    check.links(links)
    for i, samples in enumerate(collectives):
        check.samples(f"collectives[{i}]", samples, links)
        if (samples.kind, samples.group) in seen:
            check.refuse(f"collectives[{i}]", "repeats a kind and group", _NEWEST)
        seen.add((samples.kind, samples.group))
    for kind in KERNEL_KINDS:
        check.kernels(f"device.{kind}", device.rates(kind))
    mistake = None if lateness is None else lateness.mistake()
    if mistake is not None:
        check.refuse("lateness", mistake)


@dataclass(frozen=True)
class _Check:
    where: str

    def refuse(self, field: str, problem: str, remedy: str = _CORRECT) -> NoReturn:
        raise ProfileError(f"{self.where}: field {field} {problem}\n  try: {remedy}")

    def links(self, links: Sequence[LinkLevel]) -> None:
        inner = 1
        for i, link in enumerate(links):
            field = f"links[{i}]"
            self._under_peak(f"{field}.bytes_per_second", link.bytes_per_second, link)
            if link.reduced_bytes_per_second is not None:
                # An array that is summed on its way crosses each rank's port once in either direction.
                self._under_peak(f"{field}.reduced_bytes_per_second", link.reduced_bytes_per_second, link)
            inner = self._domain(field, link.ranks, inner, outermost=i == len(links) - 1)

    def _under_peak(self, field: str, rate: float, link: LinkLevel) -> None:
        if rate > link.peak_bytes_per_second:
            self.refuse(field, f"is {rate:.4g}, above the peak of {link.peak_bytes_per_second:.4g}")

    def _domain(self, field: str, ranks: int | None, inner: int, outermost: bool) -> int:
        if ranks is None:
            if not outermost:
                self.refuse(f"{field}.ranks", "is null; only the outermost level may join all ranks")
            return inner
        if ranks <= inner or ranks % inner:
            self.refuse(f"{field}.ranks", f"is {ranks}; it must be a multiple of {inner} above it")
        return ranks

    def samples(self, field: str, samples: CollectiveSamples, links: Sequence[LinkLevel]) -> None:
        self._group(f"{field}.group", samples.group)
        sizes, times = samples.nbytes, samples.seconds
        if len(times) != len(sizes):
            self.refuse(
                field, f"has {len(sizes)} sizes and {len(times)} times; it needs a time for each size"
            )
        self._increasing(f"{field}.nbytes", sizes)
        for i, (before, now) in enumerate(itertools.pairwise(times), start=1):
            if now < before:
                self.refuse(
                    f"{field}.seconds[{i}]", f"is {now:.4g}, less than {before:.4g} for fewer bytes", _AGAIN
                )
        self._spread(field, samples.spread, len(sizes))
        self._possible(field, samples, links)

    def _group(self, field: str, group: GroupShape) -> None:
        """The canonical form that `group_shape` gives: no size 1, large strides first, nothing to merge."""
        if math.prod(ranks for ranks, _ in group) > MOST_DEVICES:
            self.refuse(field, f"spans more than {MOST_DEVICES} ranks")
        for (_, outer), (ranks, inner) in itertools.pairwise(group):
            if outer <= ranks * inner:
                self.refuse(
                    field, f"is {group}; list large strides first, with each stride above what the next spans"
                )

    def _possible(self, field: str, samples: CollectiveSamples, links: Sequence[LinkLevel]) -> None:
        ranks = group_ranks(samples.group)
        slope = floor_slope(samples.kind, occupancy(ranks, [link.ranks for link in links]), links)
        for i, (nbytes, seconds) in enumerate(zip(samples.nbytes, samples.seconds, strict=True)):
            if seconds < slope * nbytes:
                self.refuse(
                    f"{field}.seconds[{i}]",
                    f"is {seconds:.4g} for {nbytes} bytes; at the peak rate of the links, "
                    f"{samples.kind} over {len(ranks)} ranks takes at least {slope * nbytes:.4g}",
                    "check the unit of the times (seconds) and of the sizes (bytes), and links[].ranks",
                )

    def _spread(self, field: str, spread: Sequence[float], count: int) -> None:
        if len(spread) not in (0, count):
            self.refuse(
                f"{field}.spread", f"has {len(spread)} values for {count} sizes; give one each, or none"
            )

    def _increasing(self, field: str, values: Sequence[float]) -> None:
        for i, (before, now) in enumerate(itertools.pairwise(values), start=1):
            if now <= before:
                self.refuse(f"{field}[{i}]", f"is {now:.4g}, not above {before:.4g} before it")

    def kernels(self, field: str, kernels: Sequence[MatmulRates]) -> None:
        dtypes = [rates.dtype for rates in kernels]
        for i, rates in enumerate(kernels):
            if rates.dtype in dtypes[:i]:
                self.refuse(f"{field}[{i}].dtype", f"repeats {rates.dtype}", _NEWEST)
            self._rates(f"{field}[{i}]", rates)

    def _rates(self, field: str, rates: MatmulRates) -> None:
        if len(rates.flops) != len(rates.flops_per_second):
            self.refuse(field, "must have a rate for each size")
        self._increasing(f"{field}.flops", rates.flops)
        self._spread(field, rates.spread, len(rates.flops))
        times = [size / rate for size, rate in zip(rates.flops, rates.flops_per_second, strict=True)]
        for i, (before, now) in enumerate(itertools.pairwise(times), start=1):
            # Times that were equal differ in the last digit once they are kept as rates.
            if now < before * (1.0 - 1e-9):
                self.refuse(
                    f"{field}.flops_per_second[{i}]",
                    "makes a larger product faster than a smaller one",
                    _AGAIN,
                )
