"""`Profile`: everything that prices are computed from, as a JSON file. Measured, or nominal and so marked."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from cost_model.arguments import checked_path, shown
from cost_model.errors import ProfileError
from cost_model.json_text import parse_json
from cost_model.measurements import CollectiveSamples, DeviceRates, LinkLevel
from cost_model.profile_check import check_profile
from cost_model.profile_json import Fields, read_collective, read_device, read_link
from cost_model.profile_text import profile_text

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cost_model.measure.clock import Clock
    from cost_model.measure.kernel_work import Attend
    from cost_model.measure.sampling import Progress

__all__ = ["SCHEMA_VERSION", "Profile"]

SCHEMA_VERSION = 2

_NUMBERS = re.compile(r"\[[0-9eE+.,\s-]+\]")
"""A JSON list of numbers, to be written on one line."""


@dataclass(frozen=True)
class Profile:
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
    collective_launch_seconds: float
    overlap_efficiency: float
    links: tuple[LinkLevel, ...]
    collectives: tuple[CollectiveSamples, ...]
    device: DeviceRates

    def __post_init__(self) -> None:
        check_profile(
            f"profile {self.name!r}",
            self.collective_launch_seconds,
            self.overlap_efficiency,
            self.links,
            self.collectives,
            self.device,
        )

    @staticmethod
    def names() -> tuple[str, ...]:
        """Names of the shipped profiles, all of them nominal."""
        folder = files("cost_model").joinpath("profiles")
        found = (entry.name for entry in folder.iterdir() if entry.name.endswith(".json"))
        return tuple(sorted(name.removesuffix(".json") for name in found))

    @staticmethod
    def named(name: str) -> Profile:
        """A shipped profile. ProfileError, listing them, if there is none of this name."""
        if not isinstance(name, str) or name not in Profile.names():
            raise ProfileError(
                f"no shipped profile is named {shown(name)}\n"
                f"  the shipped ones are {', '.join(Profile.names())}\n"
                "  try: one of these, or the path of a profile file"
            )
        text = files("cost_model").joinpath("profiles", f"{name}.json").read_text(encoding="utf-8")
        return Profile.from_json(text, f"shipped profile {name!r}")

    @staticmethod
    def load(path_or_name: str | os.PathLike[str]) -> Profile:
        """Read a profile file, or a shipped profile by its name (a string without suffix or folder).

        Raises ProfileError, starting with the file, if it cannot be read or says something impossible.
        """
        path = checked_path(path_or_name, "profile", ProfileError)
        bare = isinstance(path_or_name, str) and path.name == path_or_name and not path.suffix
        if bare and (path.name in Profile.names() or not path.exists()):
            return Profile.named(path.name)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(
                f"cannot read profile {path}: {error}\n"
                f"  try: a profile file, or a shipped one: {', '.join(Profile.names())}"
            ) from None
        return Profile.from_json(text, str(path))

    @staticmethod
    def measure(
        mesh: DeviceMesh,
        *,
        time_budget: float = 60.0,
        largest_nbytes: int | None = None,
        name: str = "measured",
        command: str = "Profile.measure",
        progress: Progress = lambda what, spent: None,
        clock: Clock | None = None,
        attend: Attend | None = None,
    ) -> Profile:
        """Measure the machines that `mesh` runs on, under torch.distributed (NCCL or gloo).

        Call it on every rank of the mesh at once, on otherwise idle machines; all get the same profile.
        Collectives of every kind over every group of mesh axes, matrix products by dtype and size, memory
        bandwidth, launch time and overlap.

        time_budget:    seconds in all, shared fairly: sizes are left out from the largest down, then
                        repetitions. At least three sizes of everything are measured, which may take longer.
        largest_nbytes: of a collective; None: 64 MiB on CPUs, 1 GiB on GPUs.
        name, command:  recorded in the profile.
        progress:       told what is being measured and the share of the budget spent.
        clock:          what times the work; None: the device's own.
        attend:         (q, k, v) -> out, the attention that is timed; None: torch's own. Plans run other kernels:
                        `autoshard.profiling.attend` is theirs, which `autoshard profile` and the start-up pass.

        Raises ProfileError, on all ranks, if one of them fails between two measurements, and ShardingError
        for a mesh over ranks other than 0, 1, 2, ...
        """
        from cost_model.measure.measure import measure_profile

        return measure_profile(
            mesh,
            time_budget=time_budget,
            largest_nbytes=largest_nbytes,
            name=name,
            command=command,
            progress=progress,
            clock=clock,
            attend=attend,
        )

    @staticmethod
    def from_nccl_tests(
        *paths: str | os.PathLike[str],
        base: Profile | str | os.PathLike[str] = "h100",
        rank_stride: int | None = None,
        busbw_limit: float | None = None,
    ) -> Profile:
        """Collectives from benchmark outputs, all else from `base`: see `cost_model.readers.read_profile`."""
        from cost_model.readers import read_profile  # which itself needs Profile

        return read_profile(paths, base, rank_stride=rank_stride, busbw_limit=busbw_limit)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON that `load` reads. ProfileError where no file can be written."""
        target = checked_path(path, "path", ProfileError)
        try:
            target.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise ProfileError(
                f"cannot write profile {str(target)!r}: {error.strerror}\n  try: another path"
            ) from None

    def to_json(self) -> str:
        """The JSON text of this profile: schema version first, then the fields in order."""
        content = asdict(self) | {"software": dict(self.software)}
        text = json.dumps({"schema_version": SCHEMA_VERSION} | content, indent=2)
        return _NUMBERS.sub(lambda match: "[" + " ".join(match[0][1:-1].split()) + "]", text) + "\n"

    @staticmethod
    def from_json(text: str, where: str) -> Profile:
        """Inverse of `to_json`; `where` (a file name) starts the message of every ProfileError."""
        if not isinstance(text, str):
            raise ProfileError(f"{where}: is {shown(text)}\n  try: the text that to_json() gives")
        data = parse_json(text, where, ProfileError)
        _check_schema(where, data)
        fields = Fields(where, "", data)
        values: dict[str, Any] = {
            "name": fields.text("name"),
            "nominal": fields.flag("nominal"),
            "device_type": fields.text("device_type"),
            "hardware": fields.text("hardware"),
            "software": fields.texts_by_name("software"),
            "date": fields.text("date"),
            "command": fields.text("command"),
            "sources": fields.texts("sources"),
            "collective_launch_seconds": fields.number("collective_launch_seconds"),
            "overlap_efficiency": fields.number("overlap_efficiency"),
            "links": tuple(read_link(entry) for entry in fields.entries("links")),
            "collectives": tuple(read_collective(entry) for entry in fields.entries("collectives")),
            "device": read_device(fields.entry("device")),
        }
        fields.close("schema_version")
        try:
            return Profile(**values)
        except ProfileError as error:
            raise ProfileError(f"{where}: {error}") from error

    def summary(self) -> str:
        """The profile for people: a line per rate and link."""
        return profile_text(self)

    def hash(self) -> str:
        """16 hex digits of everything a price depends on (and `nominal`), the same in every process."""
        priced = asdict(self)
        for field in ("name", "hardware", "software", "date", "command", "sources"):
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


def _check_schema(where: str, data: object) -> None:
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ProfileError(
            f"{where}: field schema_version is {shown(version)}; this autoshard reads {SCHEMA_VERSION}\n"
            "  try: measure the profile again, or install the autoshard that wrote it"
        )
