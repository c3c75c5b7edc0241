"""What the ranks of the measuring tests run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cost_model.errors import ProfileError, ShardingError
from cost_model.measure.collective_work import Buffers, Pause, collective_work, whole_size
from cost_model.measure.measure import CheckedPoint, recheck
from cost_model.measure.peers import groups_over, new_group, teams_of
from cost_model.measure.sampling import Series, sample, world_peers
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile


class Steady:
    """Does the work, and says that it took `seconds` on rank 0 and half on the others; a pause 0.4 of that."""

    def __init__(self, seconds: float) -> None:
        self.each = seconds
        self.time = 0.0

    def now(self) -> float:
        self.time += 0.1
        return self.time

    def seconds(self, work: Callable[[], object], calls: int, ahead: bool = False) -> float:
        work()
        each = self.each * (0.4 if isinstance(work, Pause) else 1.0)
        return each if dist.get_rank() == 0 else each / 2


def measure(rank: int, sizes: dict[str, int], seconds: float | None) -> tuple[Profile, list[str]]:
    """The profile and what the progress told; None: with the device's own clock."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    told: list[str] = []
    clock = None if seconds is None else Steady(seconds)
    profile = Profile.measure(
        mesh,
        time_budget=0.5,
        largest_nbytes=2**14,
        name="here",
        command="a test",
        progress=lambda what, spent: told.append(what),
        clock=clock,
    )
    return profile, told


def check(rank: int, seconds: float, factor: float, spread: float) -> tuple[CheckedPoint, ...]:
    """A profile in which everything takes `seconds`, checked where all takes `factor` times that."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    profile = Profile.measure(mesh, time_budget=0.5, largest_nbytes=2**14, clock=Steady(seconds))
    noisy = tuple(replace(s, spread=(spread,) * len(s.nbytes)) for s in profile.collectives)
    return recheck(replace(profile, collectives=noisy), mesh, time_budget=0.5, clock=Steady(seconds * factor))


def results(rank: int, kind: str, nbytes: int) -> tuple[tuple[int, ...], float]:
    """Shape of what the work computes, and its only value."""
    spec = MeshSpec({"x": dist.get_world_size()})
    mesh = init_device_mesh("cpu", spec.sizes, mesh_dim_names=spec.names)
    buffers = Buffers(torch.device("cpu"))
    with teams_of(mesh, spec) as teams:
        (team,) = teams.values()
        buffers.take("sent", nbytes).fill_(1.0)
        work = collective_work(kind, team, buffers, whole_size(nbytes, team.size))
        result = work()
        if kind == "point_to_point":
            result = buffers.take("arrived", nbytes)
    assert isinstance(result, Tensor)
    (value,) = result.unique().tolist()
    return tuple(result.shape), value


def heard_by(rank: int) -> list[list[float]]:
    """What reaches this rank in a `point_to_point` whose ranks send their number: each half."""
    spec = MeshSpec({"x": dist.get_world_size()})
    mesh = init_device_mesh("cpu", spec.sizes, mesh_dim_names=spec.names)
    buffers = Buffers(torch.device("cpu"))
    with teams_of(mesh, spec) as teams:
        (team,) = teams.values()
        nbytes = whole_size(1024, team.size)
        buffers.take("sent", nbytes).fill_(float(rank))
        collective_work("point_to_point", team, buffers, nbytes)()
        return [half.unique().tolist() for half in buffers.take("arrived", nbytes).chunk(2)]


def one_cannot(rank: int) -> str:
    """Rank 1 has no memory for the second size."""

    def prepare(size: int) -> Callable[[], object]:
        if size == 2 and rank == 1:
            raise MemoryError("none left")
        return lambda: None

    with world_peers("cpu") as peers:
        try:
            sample([Series("work", (1, 2, 3), prepare)], peers, Steady(1.0), 1.0, lambda what, spent: None)
        except ProfileError as error:
            return str(error)
    return "no error"


def sums_along(rank: int, axes: tuple[str, ...]) -> list[float]:
    """Sums of rank numbers over the groups along `axes` of a 2 x 2 mesh, made twice."""
    found: list[float] = []
    for _ in range(2):
        group = new_group(groups_over(MeshSpec({"a": 2, "b": 2}), axes))
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=group)
        found.append(value.item())
        dist.destroy_process_group(group)
    return found


def too_small(rank: int) -> str:
    """A mesh that leaves out rank 1."""
    mesh = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("x",), _init_backend=False)
    try:
        Profile.measure(mesh)
    except ShardingError as error:
        return str(error)
    return "no error"


def bad_arguments(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (1,))
    texts: list[str] = []
    for options in ({"time_budget": 0}, {"largest_nbytes": 4096}):
        try:
            Profile.measure(mesh, **options)
        except ProfileError as error:
            texts.append(str(error))
    assert len(texts) == 2
    return texts
