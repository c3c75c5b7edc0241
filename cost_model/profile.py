"""`Profile`: a record of prices, and the ways to get one: a file, a measurement, outputs of other benchmarks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from cost_model.measurements import LinkLevel
from cost_model.profile_record import ProfileRecord
from cost_model.readers import read_profile

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cost_model.measure.clock import Clock
    from cost_model.measure.kernel_work import Attend
    from cost_model.measure.sampling import Progress


def profile_text(profile: ProfileRecord) -> str:
    """Name, origin, device rates (TFLOP/s, GB/s) and links (GB/s per device, microseconds)."""
    origin = "nominal: not measured on any machine" if profile.nominal else f"measured {profile.date}"
    device = profile.device
    lines = [
        f"{profile.name}: {profile.hardware} ({origin})",
        f"  device      {profile.device_type}, memory {device.memory_bytes_per_second / 1e9:.4g} GB/s, "
        f"launch {device.launch_seconds * 1e6:.3g} us",
    ]
    for rate in device.matmul:
        peak = max(rate.flops_per_second) / 1e12
        lines.append(f"  products    {rate.dtype}, up to {peak:.4g} TFLOP/s")
    for link in profile.links:
        lines.append(f"  link        {_link(link)}")
    launch = profile.collective_launch_seconds * 1e6
    lines.append(
        f"  collectives {len(profile.collectives)} measured, launch {launch:.3g} us, "
        f"{profile.overlap_efficiency:.0%} of the overlap with computing hidden"
    )
    if profile.lateness is not None:
        behind, late = profile.lateness.computing_seconds[-1], profile.lateness.seconds[-1]
        lines.append(f"  ranks       late by {late * 1e3:.3g} ms behind {behind * 1e3:.3g} ms of computing")
    return "\n".join(lines)


def _link(link: LinkLevel) -> str:
    reach = "all ranks" if link.ranks is None else f"{link.ranks} ranks"
    rate = f"{link.bytes_per_second / 1e9:.4g} of {link.peak_bytes_per_second / 1e9:.4g} GB/s"
    return f"{link.name} ({reach}), {rate}, hop {link.latency_seconds * 1e6:.3g} us"


class Profile(ProfileRecord):
    """A `ProfileRecord` that can be measured and read from benchmarks."""

    @classmethod
    def measure(
        cls,
        mesh: DeviceMesh,
        *,
        time_budget: float = 60.0,
        largest_nbytes: int | None = None,
        name: str = "measured",
        command: str = "Profile.measure",
        progress: Progress = lambda what, spent: None,
        clock: Clock | None = None,
        attend: Attend | None = None,
    ) -> Self:
        """Measure the machines that `mesh` runs on, under torch.distributed (NCCL or gloo).

        Call it on every rank of the mesh at once, on otherwise idle machines; all get the same profile.
        It measures collectives of every kind that plans emit, over every group of mesh axes; matrix products by
        dtype and size; memory bandwidth, launch time and overlap.

        time_budget:    seconds in all, shared fairly: sizes are left out from the largest down, then
                        repetitions. At least three sizes of everything are measured, which may take longer.
        largest_nbytes: of a collective; None: 64 MiB on CPUs, 1 GiB on GPUs.
        name, command:  recorded in the profile.
        progress:       told what is being measured and the share of the budget spent.
        clock:          what times the work; None: the device's own.
        attend:         (q, k, v) -> out, the attention that is timed; None: torch's own. Plans run other kernels,
                        `autoshard.profiling.startup`; `autoshard profile` gives it.

        Raises ProfileError, on all ranks, if one of them fails between two measurements, and ShardingError
        for a mesh over ranks other than 0, 1, 2, ...
        """
        from cost_model.measure.measure import measure_profile  # imports torch, which prices do not need

        given = time_budget, largest_nbytes, name, command, progress, clock, attend
        return cls._of(measure_profile(mesh, *given))

    @classmethod
    def from_nccl_tests(
        cls,
        *paths: str | os.PathLike[str],
        base: ProfileRecord | str | os.PathLike[str] = "h100",
        rank_stride: int | None = None,
        busbw_limit: float | None = None,
    ) -> Self:
        """Collectives from benchmark outputs, all else from `base`: see `cost_model.readers.read_profile`."""
        return cls._of(read_profile(paths, base, rank_stride=rank_stride, busbw_limit=busbw_limit))

    @classmethod
    def _of(cls, record: ProfileRecord) -> Self:
        return cls(**vars(record))

    def summary(self) -> str:
        """The profile for people: a line per rate and link."""
        return profile_text(self)
