"""Timed kernels and collectives on disk: for the machines, the mesh and the software that they were timed with."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.device_mesh import DeviceMesh

from autoshard.cache_files import write_whole
from autoshard.profiling.startup import cache_path, machine_key
from autoshard.version import __version__
from autoshard.watching.agreement import everyones
from cost_model.errors import ProfileError
from cost_model.measure.peers import collective_backend, device_name, host_name, software_versions
from cost_model.mesh import MeshSpec
from cost_model.text_files import read_json
from cost_model.timed import TimedPrices

_SCHEMA_VERSION = 6
"""Another where kernels or collectives are timed in another way, too."""
_log = logging.getLogger("autoshard")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """made_with: the key that the file is named by."""

    made_with: dict[str, Any]
    timed: TimedPrices


@dataclass(frozen=True)
class TimedStore:
    """key: all that decides whether times of one run hold in another."""

    key: Mapping[str, object]

    @property
    def path(self) -> Path:
        return cache_path(self.key, "timed")

    def read(self) -> TimedPrices:
        """What was timed before: nothing, if there is no file, or something else in it."""
        if not os.path.exists(self.path):
            return TimedPrices()
        try:
            found = msgspec.convert(read_json(self.path, "file of timed prices", ProfileError), _File)
        except (ProfileError, msgspec.ValidationError, RecursionError) as error:
            _log.warning("refine: timing again: %s cannot be used: %s", self.path, error)
            return TimedPrices()
        return found.timed if found.made_with == json.loads(json.dumps(self.key)) else TimedPrices()

    def write(self, timed: TimedPrices) -> None:
        """All at once, or not at all; a cache that cannot be written is no reason to fail."""
        data = {"made_with": dict(self.key), "timed": msgspec.to_builtins(timed)}
        try:
            write_whole(self.path, json.dumps(data))
        except OSError as error:
            _log.warning("refine: timed, but not kept: %s", error)


def store_of(mesh: DeviceMesh, backend: str) -> TimedStore:
    """Of these machines. Every rank of the mesh calls it. backend: what compiles the kernels."""
    spec = MeshSpec.of(mesh)
    machines = everyones(mesh, (host_name(), device_name(spec.device_type)), what="hosts and devices")
    return TimedStore(timed_key(machines, spec, collective_backend(mesh), backend))


def timed_key(
    machines: list[tuple[str, str]], spec: MeshSpec, collectives: str, backend: str
) -> dict[str, object]:
    """machines: by rank, host and device. collectives: what carries them."""
    return {
        **machine_key(machines, spec, collectives),
        "timed": _SCHEMA_VERSION,
        "software": dict(software_versions(spec.device_type, collectives)),
        "autoshard": __version__,
        "kernels": "op by op" if backend == "eager" else f"fused by {backend}",
    }
