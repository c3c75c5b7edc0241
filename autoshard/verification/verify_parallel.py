"""`verify_parallel`: parallel code written by hand, on several ranks, held against the model in one process."""

from __future__ import annotations

import math
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.global_call import as_call
from autoshard.planning import mesh_spec
from autoshard.verification.observed_run import ObservedRun, RankComparison
from autoshard.verification.verify_plan import VerifyReport
from cost_model.errors import RankError, ShardingError, checked_count
from cost_model.mesh import MeshSpec
from passes.capture.trees import flatten, unflatten

MakeParallel = Callable[[nn.Module, DeviceMesh], nn.Module]


def verify_parallel(
    make_model: Callable[[], nn.Module],
    make_parallel: MakeParallel,
    example_inputs: Any,
    *,
    mesh: MeshSpec | DeviceMesh,
    batch_axes: Sequence[str] = (),
    seed: int = 0,
) -> VerifyReport:
    """Outputs and gradients of parallel code against those of the model in one process.

    make_model:     returns the model; called in every process, and given the same values in each.
    make_parallel:  (model, device_mesh) -> the model in parallel: `parallelize_module`, `fully_shard`, DDP or code of
                    your own. Both functions are at the top of a module, as new processes import them.
    example_inputs: a tuple of arguments, or (tuple, dict), of the whole batch.
    mesh:           a MeshSpec: as many processes are started on this machine, with gloo. A DeviceMesh: the processes
                    there are, each of which calls this.
    batch_axes:     mesh axes along which each rank gets its own rows of every tensor of the batch, as data parallelism
                    has it; gradients are then means over them, and a scalar output too. Others get the whole batch.
    seed:           of the model's values, and of the random gradients of its outputs.

    The report names the first module whose output, or whose output's gradient, is on the ranks no part, copy or
    summand of the model's; else a parameter whose gradient differs. float64 tells wrong from rounded best. A model
    that draws random numbers (dropout) differs by that.

    Raises ShardingError for arguments that do not fit, RankError with what a rank raised.
    """
    checked_count(seed, "seed")
    spec = mesh_spec(mesh)
    unknown = [axis for axis in batch_axes if axis not in spec.names]
    if unknown:
        raise ShardingError(
            f"batch_axes names {unknown[0]!r}, which {spec} lacks\n  try: one of {', '.join(spec.names)}"
        )
    case = ParallelCase(make_model, make_parallel, *as_call(example_inputs), spec, tuple(batch_axes), seed)
    case.rows(0)
    return case.report(mesh) if isinstance(mesh, DeviceMesh) else _in_processes(case)


@dataclass(frozen=True)
class ParallelCase:
    """What `verify_parallel` was given, checked."""

    make_model: Callable[[], nn.Module]
    make_parallel: MakeParallel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mesh: MeshSpec
    batch_axes: tuple[str, ...]
    seed: int

    @property
    def parts(self) -> int:
        """Of the batch."""
        return math.prod(self.mesh.size(axis) for axis in self.batch_axes)

    def part(self, value: torch.Tensor, rank: int) -> torch.Tensor:
        """The rows of a rank."""
        return value.chunk(self.parts)[self.mesh.linear_index(rank, self.batch_axes)]

    def rows(self, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a rank. ShardingError where rows do not divide."""
        tensors, tree = flatten((self.args, self.kwargs))
        batch = next((one.shape[0] for one in tensors if one.ndim), 0)
        if batch % self.parts or (self.parts > 1 and not batch):
            raise ShardingError(
                f"a batch of {batch} rows does not divide over batch_axes={self.batch_axes}, {self.parts} ranks\n"
                f"  try: {self.parts * (batch // self.parts + 1)} rows"
            )
        own = [self.part(one, rank) if one.ndim and one.shape[0] == batch else one for one in tensors]
        return unflatten(tree, own) if self.parts > 1 else (self.args, self.kwargs)

    def report(self, mesh: DeviceMesh) -> VerifyReport:
        """On this rank; the same on all."""
        device, rank = torch.device(mesh.device_type), dist.get_rank()
        torch.manual_seed(self.seed)
        whole = self.make_model().to(device)
        other = self.make_model().to(device)
        other.load_state_dict(whole.state_dict())
        wanted = ObservedRun.of(whole, *self._moved((self.args, self.kwargs), device), self._tangent)
        parallel = self.make_parallel(other, mesh)

        def tangent(place: int, output: torch.Tensor, is_whole: bool) -> torch.Tensor:
            given = self._tangent(place, wanted.outputs[place], True)
            shares = self.parts > 1 and not is_whole and output.shape != given.shape
            return self.parts * self.part(given, rank) if shares else given

        got = ObservedRun.of(parallel, *self._moved(self.rows(rank), device), tangent)
        return RankComparison(self.mesh, self.batch_axes, rank, wanted, got).report()

    def _tangent(self, place: int, output: torch.Tensor, is_whole: bool) -> torch.Tensor:
        """The gradient of an output of the model."""
        generator = torch.Generator().manual_seed(self.seed + place)
        drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        return drawn.to(output.device, output.dtype)

    def _moved(self, call: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors, tree = flatten(call)
        return unflatten(tree, [one.detach().to(device) for one in tensors])


def _in_processes(case: ParallelCase) -> VerifyReport:
    if case.mesh.device_type != "cpu":
        raise ShardingError(
            f"verify_parallel starts processes on CPUs, and {case.mesh} is of {case.mesh.device_type}\n"
            "  try: a MeshSpec of 'cpu', or under torchrun the DeviceMesh"
        )
    try:
        pickle.dumps(case)
    except Exception as error:  # whatever its parts raise
        raise ShardingError(
            f"make_model, make_parallel and example_inputs go to new processes, and cannot: {error}\n"
            "  try: functions at the top of a module"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(
                _rank_main, args=(case, folder), nprocs=case.mesh.device_count, start_method="spawn"
            )
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            said = {path.suffix[1:]: path.read_text() for path in sorted(Path(folder).glob("error.*"))}
            first = next((f"rank {rank}: {text}" for rank, text in said.items()), str(error))
            raise RankError(
                f"verify_parallel: {first}\n  try: make_parallel as it runs under torchrun, on {case.mesh}"
            ) from None
        return pickle.loads((Path(folder) / "report").read_bytes())


def _rank_main(rank: int, case: ParallelCase, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", case.mesh.device_count)
    # For which started ranks wait for each other, at most.
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=case.mesh.device_count, timeout=timedelta(seconds=300.0)
    )
    try:
        report = case.report(init_device_mesh("cpu", case.mesh.sizes, mesh_dim_names=case.mesh.names))
        if rank == 0:
            (Path(folder) / "report").write_bytes(pickle.dumps(report))
    except Exception:
        (Path(folder) / f"error.{rank}").write_text(traceback.format_exc())
        raise
    dist.destroy_process_group()
