"""A profile as a page of text: what it is and what it promises."""

from __future__ import annotations

from cost_model.measurements import LinkLevel
from cost_model.profile_record import ProfileRecord

__all__ = ["profile_text"]


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
