"""Time the kernels and collectives of programs, one by one, on all ranks of a mesh at once."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard.profiling.startup import cache_path, machine_key
from autoshard.version import __version__
from autoshard.watching.agreement import everyones
from cost_model.cache_files import keep_file
from cost_model.errors import ProfileError, log, read_json
from cost_model.groups import group_shape
from cost_model.measure.clock import Clock
from cost_model.measure.collective_work import (
    Buffers,
    Pause,
    beyond_pause,
    collective_series,
    pause_series,
    whole_size,
)
from cost_model.measure.peers import Team, collective_backend, device_name, host_name, software_versions
from cost_model.measure.sampling import Bench, Series, bench_of, by_device
from cost_model.measurements import SampledCurve, median
from cost_model.mesh import MeshSpec
from cost_model.timed import TimedCollective, TimedKernel, TimedPrices
from passes.compile.single_kernel import (
    COLD_NBYTES,
    compile_group,
    keep_freed_memory,
    repeated_kernel,
    start_compiler,
)
from passes.predict.step_work import CollectiveCase, KernelCase

_LEAST_SECONDS = {"cpu": 20e-3, "cuda": 2e-3}
"""Seconds of a repetition. On CPUs ranks that share a core take turns of a few milliseconds."""
_CASE_SECONDS = {"cpu": 0.06, "cuda": 0.02}
"""Seconds of all repetitions of a case; two are made at least."""


def time_work(
    mesh: DeviceMesh,
    cases: Sequence[KernelCase | CollectiveCase],
    seconds: float,
    clock: Clock | None = None,
    backend: str = "inductor",
) -> TimedPrices:
    """Times each of `cases`, in their order, until about `seconds` are over. All ranks of the world enter with
    equal arguments, and get the same. backend: what compiles fused groups.

    What a device refuses to run, or has no memory for, is left out, and so is what takes another time each time.
    """
    with timing(mesh, clock, backend) as timed:
        timed.all(cases, seconds)
        return timed.prices


@contextmanager
def timing(mesh: DeviceMesh, clock: Clock | None = None, backend: str = "inductor") -> Generator[Timing]:
    """What times cases now and then, as `time_work` does. All ranks of the world enter and leave together."""
    with bench_of(mesh, clock, lambda what, share: None) as bench:
        pool = torch.rand(
            COLD_NBYTES // 4, device=bench.device, generator=torch.Generator(bench.device).manual_seed(0)
        )
        yield Timing(bench, pool, backend)


class _Noisy(Exception):
    """Other work decided how long a case took."""


@dataclass
class Timing:
    bench: Bench
    pool: torch.Tensor
    backend: str
    kernels: list[TimedKernel] = field(default_factory=list[TimedKernel])
    collectives: list[TimedCollective] = field(default_factory=list[TimedCollective])

    @property
    def prices(self) -> TimedPrices:
        """Of all that was timed so far."""
        return TimedPrices(tuple(self.kernels), tuple(self.collectives))

    def all(self, cases: Sequence[KernelCase | CollectiveCase], seconds: float) -> None:
        keep_freed_memory(self.bench.device)
        groups = [case for case in cases if isinstance(case, KernelCase) and case.fused]
        hosts: list[str] = []
        if groups:
            hosts = self.bench.peers.everyones(host_name())
            start_compiler(self.bench.device, self.backend)
        start = self.bench.clock.now()
        for case in cases:
            if self.bench.peers.first(self.bench.clock.now() - start >= seconds):
                break
            if groups and case is groups[0]:
                groups = self._compiled_ahead(groups, hosts)
            self.one(case)

    def one(self, case: KernelCase | CollectiveCase) -> None:
        """One case, whatever time it takes."""
        try:
            self._add(case)
        except (ProfileError, _Noisy) as error:  # on all ranks alike
            log.debug("not timed: %s", error)

    def _compiled_ahead(self, groups: list[KernelCase], hosts: Sequence[str]) -> list[KernelCase]:
        """Those that are left when the first few are compiled, each by one rank of a host. hosts: of the ranks."""
        mine = hosts[self.bench.peers.rank]
        # Then ranks look at the clock again, and at what others of their hosts compiled.
        count = 2 * min(map(hosts.count, hosts))
        first = hosts[: self.bench.peers.rank].count(mine)
        for group in groups[:count][first :: hosts.count(mine)]:
            try:
                compile_group(group, self.bench.device, self.backend)
            except Exception as error:  # it will be said of all ranks together
                log.debug("refine: %s: %s", group.op, error)
        self.bench.peers.barrier()
        return groups[count:]

    def _add(self, case: KernelCase | CollectiveCase) -> None:
        if isinstance(case, KernelCase):
            self.kernels.append(TimedKernel(case.key, case.work, self._kernel(case), case.inner))
        elif (shape := group_shape(self.bench.spec, case.axes)) in self.bench.teams:
            seconds = self._collective(case, self.bench.teams[shape])
            self.collectives.append(TimedCollective(case.kind, shape, case.nbytes, seconds))

    def _kernel(self, case: KernelCase) -> float:
        calls = _calls(case)

        def prepare(_: int) -> object:
            run = repeated_kernel(case, calls, self.bench.device, self.backend, self.pool)
            run()  # what it refuses, it refuses here: on one rank alone it must not be while others wait
            return run

        name = f"kernel {case.op}"
        least = by_device(_LEAST_SECONDS, self.bench.device.type)
        series = Series(name, (1,), prepare, median, least, ahead=True, clock=self.bench.of_kernels)  # type: ignore[arg-type]
        (curve,) = self._sampled(series)
        return curve.seconds[0] / calls

    def _collective(self, case: CollectiveCase, team: Team) -> float:
        """As in a profile: what more computing before it would add is `Lateness`."""
        nbytes = whole_size(case.nbytes, team.size)
        pause = Pause(self.bench.device)
        name = f"{case.kind} of {case.nbytes} bytes"
        both = collective_series(name, case.kind, team, (nbytes,), Buffers(self.bench.device), pause)
        alone, behind = self._sampled(pause_series(pause, self.bench.of_kernels), both)
        return beyond_pause(behind, alone).seconds[0]

    def _sampled(self, *series: Series) -> list[SampledCurve]:
        seconds = len(series) * by_device(_CASE_SECONDS, self.bench.device.type)
        curves = self.bench.curves(series, seconds)
        for one, curve in zip(series, curves, strict=True):
            # Of two repetitions one took three times as long as the other: that says more of other work.
            if max(curve.spread) > 0.5:
                raise _Noisy(f"{one.name}: its repetitions differ by {max(curve.spread):.0%}")
        return curves


def _calls(case: KernelCase) -> int:
    """A guess from the bytes and operations: no rank may decide by its own clock."""
    guess = max(case.work.flops / 1e11, case.work.nbytes / 1e10, 1e-9)
    # A kernel is called in a row until it takes as long, but no more often: the call of the program around it
    # counts.
    return max(1, min(8, int(1e-3 / guess)))


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
        """Earlier times; none, if there is no file, or something else in it."""
        if not os.path.exists(self.path):
            return TimedPrices()
        try:
            found = msgspec.convert(read_json(self.path, "file of timed prices", ProfileError), _File)
        except (ProfileError, msgspec.ValidationError, RecursionError) as error:
            log.warning("refine: timing again: %s cannot be used: %s", self.path, error)
            return TimedPrices()
        return found.timed if found.made_with == json.loads(json.dumps(self.key)) else TimedPrices()

    def write(self, timed: TimedPrices) -> None:
        data = {"made_with": dict(self.key), "timed": msgspec.to_builtins(timed)}
        keep_file(self.path, json.dumps(data), "refine: timed, but not kept")


def store_of(mesh: DeviceMesh, backend: str) -> TimedStore:
    """The store of these machines. Every rank of the mesh calls it. backend: what compiles the kernels."""
    spec = MeshSpec.of(mesh)
    machines = everyones(mesh, (host_name(), device_name(spec.device_type)), what="hosts and devices")
    return TimedStore(timed_key(machines, spec, collective_backend(mesh), backend))


def timed_key(
    machines: list[tuple[str, str]], spec: MeshSpec, collectives: str, backend: str
) -> dict[str, object]:
    """machines: by rank, host and device. collectives: what carries them."""
    return {
        **machine_key(machines, spec, collectives),
        "timed": 6,  # another number wherever kernels or collectives are timed in another way
        "software": dict(software_versions(spec.device_type, collectives)),
        "autoshard": __version__,
        "kernels": "op by op" if backend == "eager" else f"fused by {backend}",
    }
