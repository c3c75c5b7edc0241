"""The schema of a profile's JSON, which msgspec checks: names, types, and the range of each value.

How values must relate to one another is in `cost_model.profile_check`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from cost_model.lateness import Lateness
from cost_model.measurements import (
    KERNEL_KINDS,
    CollectiveKind,
    CollectiveSamples,
    DeviceRates,
    LinkLevel,
    MatmulRates,
    UpdateRates,
)

__all__ = ["MOST_RANKS", "SCHEMA_VERSION", "ProfileData"]

SCHEMA_VERSION = 2

MOST_RANKS = 2**20
"""Of a group: more than any machine has, and few enough to list."""

_Positive = Annotated[float, Meta(gt=1e-30, lt=1e30)]
"""No time, rate or size in a computer is outside these bounds. NaN is not inside."""
_Size = Annotated[int, Meta(ge=1, le=2**62)]
_Spread = Annotated[float, Meta(ge=0.0, lt=1e30)]
_Share = Annotated[float, Meta(ge=0.0, le=1.0)]
_Ranks = Annotated[int, Meta(ge=2, le=MOST_RANKS)]
_Stride = Annotated[int, Meta(ge=1, le=MOST_RANKS)]


class LinkData(Struct, frozen=True, forbid_unknown_fields=True):
    """`LinkLevel`. Older files say nothing of switches that sum, and of memory that is shared."""

    name: str
    ranks: int | None
    latency_seconds: _Positive
    bytes_per_second: _Positive
    peak_bytes_per_second: _Positive
    reduced_bytes_per_second: _Positive | None = None
    shares_memory: bool = False


class SamplesData(Struct, frozen=True, forbid_unknown_fields=True):
    """`CollectiveSamples`."""

    kind: CollectiveKind
    group: Annotated[tuple[tuple[_Ranks, _Stride], ...], Meta(min_length=1)]
    nbytes: Annotated[tuple[_Size, ...], Meta(min_length=2)]
    seconds: tuple[_Positive, ...]
    spread: tuple[_Spread, ...] = ()


class RatesData(Struct, frozen=True, forbid_unknown_fields=True):
    """`MatmulRates`."""

    dtype: str
    flops: Annotated[tuple[_Positive, ...], Meta(min_length=1)]
    flops_per_second: tuple[_Positive, ...]
    spread: tuple[_Spread, ...] = ()


class UpdateData(Struct, frozen=True, forbid_unknown_fields=True):
    """`UpdateRates`."""

    launch_seconds: _Positive
    bytes_per_second: _Positive


class DeviceData(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`DeviceRates`. Older files have no kernels of the kinds that were not measured then."""

    launch_seconds: _Positive
    memory_bytes_per_second: _Positive
    matmul: Annotated[tuple[RatesData, ...], Meta(min_length=1)]
    convolution: tuple[RatesData, ...]
    attention: tuple[RatesData, ...]
    pooling: tuple[RatesData, ...] = ()
    narrow_convolution: tuple[RatesData, ...] = ()
    update: UpdateData | None

    def rates(self) -> DeviceRates:
        kernels: dict[str, tuple[MatmulRates, ...]] = {
            kind: tuple(MatmulRates(**_fields(rates)) for rates in getattr(self, kind))
            for kind in KERNEL_KINDS
        }
        update = None if self.update is None else UpdateRates(**_fields(self.update))
        return DeviceRates(self.launch_seconds, self.memory_bytes_per_second, **kernels, update=update)


class LatenessData(Struct, frozen=True, forbid_unknown_fields=True):
    """`Lateness`."""

    computing_seconds: Annotated[tuple[_Positive, ...], Meta(min_length=2)]
    seconds: tuple[_Spread, ...]
    ranks: int | None = None


class ProfileData(Struct, frozen=True, forbid_unknown_fields=True):
    """`ProfileRecord`: all that a file holds. Older files, and nominal ones, say nothing of ranks that come late."""

    schema_version: int
    name: str
    nominal: bool
    device_type: str
    hardware: str
    software: dict[str, str]
    date: str
    command: str
    sources: tuple[str, ...]
    collective_launch_seconds: _Positive
    overlap_efficiency: _Share
    links: Annotated[tuple[LinkData, ...], Meta(min_length=1)]
    collectives: tuple[SamplesData, ...]
    device: DeviceData
    lateness: LatenessData | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of a `ProfileRecord`, by name."""
        fields = _fields(self)
        del fields["schema_version"]
        return fields | {
            "software": tuple(self.software.items()),
            "links": tuple(LinkLevel(**_fields(link)) for link in self.links),
            "collectives": tuple(CollectiveSamples(**_fields(samples)) for samples in self.collectives),
            "device": self.device.rates(),
            "lateness": None if self.lateness is None else Lateness(**_fields(self.lateness)),
        }


def _fields(data: Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(data)
