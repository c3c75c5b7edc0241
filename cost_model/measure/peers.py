"""The ranks of a mesh: what they run on, their groups, and how they agree on what they measure."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed.device_mesh import DeviceMesh

from cost_model.errors import ProfileError
from cost_model.groups import GroupShape, shapes_of
from cost_model.mesh import MeshSpec


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


def local_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank's shards: the CPU, or the process's current device of the mesh's type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


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


T = TypeVar("T")


class Peers:
    """This rank among `size`. Without a group it is alone, and every exchange is with itself.

    Exchanges go over gloo on the CPU, whatever the mesh computes on: an error on one rank, say out of
    device memory, still reaches the others.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def everyones(self, value: T) -> list[T]:
        """Every rank's `value`, by rank. It must pickle."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def numbers(self, *mine: float) -> list[tuple[float, ...]]:
        """Every rank's numbers, by rank: `everyones` at half its price."""
        if self._group is None:
            return [mine]
        found = [torch.empty(len(mine), dtype=torch.float64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor(mine, dtype=torch.float64), group=self._group)
        return [tuple(numbers.tolist()) for numbers in found]

    def first(self, value: T) -> T:
        """Rank 0's `value`."""
        if self._group is None:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, group_src=0, group=self._group)
        return box[0]

    def barrier(self) -> None:
        """Returns when every rank is here."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def collectively(self, what: str, fn: Callable[[], T]) -> T:
        """fn() on every rank; where it raises on any, this raises ProfileError on all.

        `fn` must not wait for other ranks: one that raised would leave them waiting.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = fn()
        except Exception as raised:
            error = raised
        said = self.everyones(None if error is None else f"{type(error).__name__}: {error}")
        failed = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if failed:
            rank, text = failed[0]
            raise ProfileError(
                f"measuring {what} failed on rank {rank}: {text}\n"
                "  try: look at that rank; with too little memory, measure with a smaller largest size"
            ) from error
        return result


@dataclass(frozen=True)
class Team:
    """This rank's group of one shape. ranks: of the world, in the group's order."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def name(self) -> str:
        return self.group.group_name


Axes = tuple[str, ...]


@contextmanager
def teams_of(mesh: DeviceMesh, spec: MeshSpec) -> Generator[Mapping[GroupShape, Team]]:
    """This rank's group of every shape. The mesh holds all ranks of the world, which enter together.

    Groups of several axes exist only inside the context. The world's own group serves for the whole world.
    """
    made: list[dist.ProcessGroup] = []
    teams: dict[GroupShape, Team] = {}
    try:
        for shape, axes in shapes_of(spec).items():
            group = existing_group(mesh, spec, axes)
            if group is None:
                group = new_group(groups_over(spec, axes))
                assert group is not None
                made.append(group)
            teams[shape] = Team(group, spec.group(dist.get_rank(), axes))
        yield teams
    finally:
        for group in made:
            dist.destroy_process_group(group)


def existing_group(mesh: DeviceMesh, spec: MeshSpec, axes: Axes) -> dist.ProcessGroup | None:
    """The mesh's or the world's group of this rank along `axes`; None where there is none."""
    real = [axis for axis in axes if spec.size(axis) > 1]
    if len(real) < 2:  # axes of one rank change nothing: no second communicator for the same ranks
        return mesh.get_group(spec.index((real or axes)[0]))
    return dist.group.WORLD if spec.size(*axes) == dist.get_world_size() else None


def groups_over(spec: MeshSpec, axes: Axes) -> list[tuple[int, ...]]:
    """The ranks of every group along `axes`, in the same order on every rank: the other axes, in mesh order, number
    them."""
    return list(dict.fromkeys(spec.group(rank, axes) for rank in range(spec.device_count)))


def new_group(members: Iterable[Sequence[int]], name: str | None = None) -> dist.ProcessGroup | None:
    """The one of the new groups of `members` that this rank is in, if any. Every rank of the world passes the same."""
    mine = None
    for ranks in members:
        group = dist.new_group(list(ranks), group_desc=name)
        if isinstance(group, dist.ProcessGroup) and dist.get_rank() in ranks:
            mine = group
    return mine
