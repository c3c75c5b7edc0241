"""Time several series of work in one budget, all ranks at once.

A *series* is one kind of work at growing sizes: an all-reduce over one group from 4 KB to 64 MB, a matrix
product in bfloat16. Two phases:

sweep    each series in turn: a small, a middle and a big size always; then those between and beyond,
         ascending, as far as they fit in the series' share of the budget.
repeat   one repetition of every point in turn, again and again, until the budget is spent. So other
         work of the machine disturbs all points alike.

Each repetition starts with a barrier. Rank 0 alone decides by its clock what comes next, so that all
ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cost_model.errors import ShardingError
from cost_model.groups import GroupShape
from cost_model.measure.clock import Clock, clocks
from cost_model.measure.peers import Peers, Team, local_device, teams_of
from cost_model.measurements import SampledCurve, curve, median
from cost_model.mesh import MeshSpec

_T = TypeVar("_T")

_SWEEP_REPETITIONS = 2

Progress = Callable[[str, float], None]
"""Told what is being measured, and the share of the budget spent, in [0, 1]."""


@dataclass(frozen=True)
class Series:
    """name:    for progress and errors.
    sizes:   increasing, and about proportional to the time of large ones: bytes, operations.
    prepare: size -> the work to time. May raise, and must not wait for other ranks.
    across:  the ranks' seconds of one repetition -> its seconds: `max` where they wait for each other.
    least:   seconds of a repetition: shorter work is called in a row. Ranks leave a barrier a fraction
             of a millisecond apart, and ranks that share a core take turns of a few.
    always:  the sizes that are measured whatever they take; (): the first three.
    calls:   the least calls of a repetition, whatever they take.
    ahead:   whether to time the device with the host ahead of it, and not the host.
    clock:   of its own; None: that of all.
    """

    name: str
    sizes: tuple[int, ...]
    prepare: Callable[[int], Callable[[], object]]
    across: Callable[[list[float]], float] = max
    least: float = 2e-3
    always: tuple[int, ...] = ()
    calls: int = 1
    ahead: bool = False
    clock: Clock | None = None

    @property
    def anchors(self) -> tuple[int, ...]:
        return self.always or self.sizes[:3]


@dataclass
class _Point:
    series: Series
    size: int
    work: Callable[[], object]
    calls: int = 1
    samples: list[float] = field(default_factory=list[float])


@dataclass
class _Sampler:
    peers: Peers
    clock: Clock
    start: float
    seconds: float
    progress: Progress
    spent: float = 0.0  # share of the budget, by rank 0's clock

    def sweep(self, series: Series, share: float) -> list[_Point]:
        """The points of one series, in about this share of the budget, each with its first repetitions."""
        end = self.spent + share
        points = [self.point(series, size) for size in series.anchors]
        for size in series.sizes:
            fits = self.spent + _expected(points, size) / self.seconds <= end
            if size not in series.anchors and fits:
                points.append(self.point(series, size))
        return points

    def point(self, series: Series, size: int) -> _Point:
        point = _Point(series, size, self.peers.collectively(series.name, partial(series.prepare, size)))
        once = self.warmed_up(point)
        # Once the budget is spent, sizes that are always measured need not be measured as well. Kernels that do nothing
        # take no time by the clock, and would be called most.
        most = 200 if self.spent < 1.0 else 16
        point.calls = max(series.calls, min(most, int(series.least / max(once, 1e-9))))
        point.samples = [self.time(point) for _ in range(_SWEEP_REPETITIONS)]
        return point

    def warmed_up(self, point: _Point) -> float:
        """Seconds of a call, once calls become no faster: the first set up connections, and take memory that the
        machine has to find. They say nothing of the time."""
        taken = [self.time(point), self.time(point)]
        # The most calls before a point is timed, and the share of the one before below which another
        # follows.
        while len(taken) < 6 and taken[-1] < 0.8 * taken[-2]:
            taken.append(self.time(point))
        return min(taken)

    def repeat(self, points: Sequence[_Point]) -> None:
        """More repetitions of all, in turn, until the budget is spent."""
        for _ in range(_SWEEP_REPETITIONS, 40):
            for point in points:
                if self.spent >= 1.0:
                    return
                point.samples.append(self.time(point))

    def time(self, point: _Point) -> float:
        """One repetition: the same seconds on all ranks."""
        self.peers.barrier()
        clock = point.series.clock or self.clock
        mine = clock.seconds(point.work, point.calls, point.series.ahead)
        said = self.peers.numbers(mine, (self.clock.now() - self.start) / self.seconds)
        self.spent = said[0][1]
        self.progress(point.series.name, min(1.0, self.spent))
        return point.series.across([seconds for seconds, _ in said])


def _expected(points: Sequence[_Point], size: int) -> float:
    """Seconds that the sweep of one more size may take: no more than a larger size took. If none was larger, time is
    taken to be proportional to size."""
    calls = 2 + _SWEEP_REPETITIONS
    larger = [median(point.samples) for point in points if point.size > size]
    if larger:
        return calls * min(larger)
    last = max(points, key=lambda point: point.size)
    return calls * median(last.samples) * size / last.size


def sample(
    series: Sequence[Series], peers: Peers, clock: Clock, seconds: float, progress: Progress
) -> list[SampledCurve]:
    """The curve of each series, within about `seconds` (more if the sizes that are always measured take more).

    The same on all ranks. Raises ProfileError, on all ranks, if work cannot be prepared on one.
    """
    sampler = _Sampler(peers, clock, clock.now(), seconds, progress)
    # The rest of the budget is for repetitions.
    share = 0.6 / max(1, len(series))
    swept = [sampler.sweep(one, share) for one in series]
    sampler.repeat([point for points in swept for point in points])
    return peers.first([curve({point.size: point.samples for point in points}) for points in swept])


@dataclass(frozen=True)
class Bench:
    """The bench of a profile: this rank's device, all ranks, their groups by shape, and the clocks.

    of_kernels: `clock`, but where ranks share cores (`cost_model.measure.clock`).
    """

    spec: MeshSpec
    device: torch.device
    peers: Peers
    teams: Mapping[GroupShape, Team]
    clock: Clock
    of_kernels: Clock
    progress: Progress

    @property
    def largest(self) -> Team | None:
        """The largest group; None of one rank."""
        return max(self.teams.values(), key=lambda team: team.size, default=None)

    def curves(self, series: Sequence[Series], seconds: float) -> list[SampledCurve]:
        return sample(series, self.peers, self.clock, seconds, self.progress)


@contextmanager
def bench_of(mesh: DeviceMesh, clock: Clock | None, progress: Progress) -> Generator[Bench]:
    """That of all ranks of the world, which enter together. clock: of all; None: the device's own.

    Raises ShardingError for a mesh that does not hold every process.
    """
    spec = MeshSpec.of(mesh)
    check_world(spec, dist.get_world_size() if dist.is_initialized() else 1)
    device = local_device(mesh)
    with ExitStack() as stack:
        peers = stack.enter_context(world_peers(device.type))
        teams = stack.enter_context(teams_of(mesh, spec)) if peers.size > 1 else {}
        yield Bench(spec, device, peers, teams, *clocks(device.type, peers, clock), progress)


def check_world(spec: MeshSpec, world: int) -> None:
    """Raise ShardingError for a mesh that does not hold every process: they share links and cores."""
    if spec.device_count != world:
        raise ShardingError(
            f"{spec} has {spec.device_count} devices, and {world} process(es) run\n"
            f"  try: a mesh of all processes, or torchrun --nproc-per-node {spec.device_count}"
        )


def by_device(by_type: Mapping[str, _T], device_type: str) -> _T:
    """The value for "cuda" or "cpu". Any other device is measured as the CPU is."""
    return by_type["cuda" if device_type == "cuda" else "cpu"]


@contextmanager
def world_peers(device_type: str) -> Generator[Peers]:
    """All ranks of the world, which enter together. device_type: of the world's collectives.

    The world's own group serves where it computes on CPUs.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield Peers(None)
    elif device_type == "cpu":
        yield Peers(dist.group.WORLD)
    else:
        # A counter of the world names the group: a group of a subset of ranks that is made again would
        # find the addresses of the one before in the store.
        group = dist.new_group(timeout=timedelta(minutes=5), backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        try:
            yield Peers(group)
        finally:
            dist.destroy_process_group(group)
