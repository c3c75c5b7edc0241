"""What a measurement ran on: hardware, software versions, date."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "collective_backend",
    "device_name",
    "hardware_text",
    "host_name",
    "machine_id",
    "own_cores",
    "software_versions",
    "today",
]


def host_name() -> str:
    """The host of this rank. torchrun's number of the node distinguishes hosts that are emulated on one."""
    return f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}"


def machine_id() -> str:
    """The same for processes that share cores: hosts that are emulated on one machine, containers, namespaces.

    The kernel's number of this boot, from Linux's random(4); elsewhere the host's name.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def device_name(device_type: str) -> str:
    """The name of this rank's device: "NVIDIA H100 80GB HBM3", "AMD EPYC 9R14, 2 cores, 1 thread"."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    cores = len(own_cores())
    return f"{_cpu_model()}, {cores} core{'s' * (cores > 1)}, {threads} thread{'s' * (threads > 1)} per rank"


def own_cores() -> set[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def hardware_text(hosts: Sequence[str], devices: Sequence[str]) -> str:
    """hosts, devices: of each rank, by rank. "2 hosts of 4 ranks: NVIDIA H100 80GB HBM3"."""
    each = Counter(hosts)
    sizes = sorted(set(each.values()))
    ranks = " to ".join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
    names = "; ".join(sorted(set(devices)))
    return f"{len(each)} host{'s' * (len(each) > 1)} of {ranks} rank{'s' * (sizes[-1] > 1)}: {names}"


def collective_backend(mesh: DeviceMesh) -> str:
    """ "gloo", "nccl" or whatever carries the mesh's collectives.

    A world that was started without naming a backend is "undefined" to torch: each device has its own.
    """
    named = str(dist.get_backend(mesh.get_group(0)))
    if named == "undefined" or ":" in named:
        return "nccl" if mesh.device_type == "cuda" else "gloo"
    return named


def software_versions(device_type: str, backend: str) -> tuple[tuple[str, str], ...]:
    """torch, python, the collectives' backend and, on GPUs, CUDA and NCCL."""
    found = {"torch": torch.__version__, "python": platform.python_version(), "backend": backend}
    if device_type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, nccl.version()))
    return tuple(found.items())


def today() -> str:
    """The date and minute, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
