"""`verify_parallel`: parallel code written by hand, on several ranks, held against the model in one process. A forward
and a backward are observed module by module.
"""

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
from autoshard.verification.compared_ranks import Parts, RankComparison
from autoshard.verification.joined_pieces import MeanAxes
from autoshard.verification.observed_run import ObservedRun
from autoshard.verification.verify_plan import VerifyReport
from cost_model.errors import RankError, ShardingError, checked_count, reject
from cost_model.mesh import MeshSpec
from passes.capture.trees import flatten, unflatten
from passes.ir.process_state import random_state_kept

MakeParallel = Callable[[nn.Module, DeviceMesh], nn.Module]


@random_state_kept()
def verify_parallel(
    make_model: Callable[[], nn.Module],
    make_parallel: MakeParallel,
    example_inputs: Any,
    *,
    mesh: MeshSpec | DeviceMesh,
    batch_axes: Sequence[str] = (),
    sequence_axes: Sequence[str] = (),
    tolerance: float | None = None,
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
                    has it; gradients are then means over them, and a scalar output a mean or a sum. Others get the
                    whole batch.
    sequence_axes:  mesh axes over which the code itself divides sequences, as context parallelism has it; gradients are
                    means over them too, and outputs the rank's parts or a scalar of them.
    tolerance:      the relative error that is rounding; None: that of the coarsest dtype that is computed with.
    seed:           of the model's values, of what it draws, and of the random gradients of its outputs.

    The report names the first module whose output, or whose output's gradient, is on the ranks no part, copy or
    summand of the model's; else a buffer or a parameter whose gradient differs. Parameters keep their names; a plain
    one may be a part of the model's. float64 tells wrong from rounded best. Both runs draw the same random numbers, so
    dropout of what every rank holds whole is compared, and of parts it differs.

    Raises ShardingError for arguments that do not fit, RankError with what a rank raised.
    """
    checked_count(seed, "seed")
    if tolerance is not None and (not isinstance(tolerance, (int, float)) or not tolerance >= 0.0):
        raise reject("tolerance", tolerance, "tolerance=1e-6, or None")
    spec = mesh_spec(mesh)
    batch_axes, sequence_axes = tuple(batch_axes), tuple(sequence_axes)
    for argument, axes in (("batch_axes", batch_axes), ("sequence_axes", sequence_axes)):
        others = [axis for axis in spec.names if axis not in batch_axes or argument == "batch_axes"]
        for axis in axes:
            if axis not in others:
                said = "batch_axes has too" if axis in spec.names else f"{spec} lacks"
                raise ShardingError(
                    f"{argument} names {axis!r}, which {said}\n  try: {' or '.join(others) or 'none'}"
                )
    if isinstance(mesh, DeviceMesh) and spec.device_count != dist.get_world_size():
        raise ShardingError(
            f"{spec} is of {spec.device_count} of {dist.get_world_size()} processes\n"
            "  try: a mesh of all of them, and mesh[...] of it in make_parallel"
        )
    call = as_call(example_inputs)
    # In the mesh's order, as parts of what is split twice are.
    batch_axes = tuple(axis for axis in spec.names if axis in batch_axes)
    case = ParallelCase(make_model, make_parallel, *call, spec, batch_axes, sequence_axes, tolerance, seed)
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
    sequence_axes: tuple[str, ...]
    tolerance: float | None
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
        whole = self._model().to(device)
        self._vary(whole)
        torch.manual_seed(self.seed)  # buffers that are in no state are drawn
        other = self._model().to(device)
        other.load_state_dict(whole.state_dict())
        parts = Parts(self.mesh, rank, MeanAxes(self.batch_axes, self.sequence_axes))
        # Of complex numbers both parts count.
        turned = lambda output: 0.6 + 0.8j if output.is_complex() else 1.0
        given = lambda place, output: turned(output) * self._drawn(output.shape, place).to(output)
        torch.manual_seed(self.seed)
        wanted = ObservedRun.of(whole, *self._moved((self.args, self.kwargs), device), given)

        def tangent(place: int, output: torch.Tensor) -> torch.Tensor:
            expected = wanted.outputs[place] if place < len(wanted.outputs) else output
            return parts.tangent(given(place, expected), output, expected)

        torch.manual_seed(self.seed)
        parallel = self.make_parallel(other, mesh)
        if not isinstance(parallel, nn.Module):
            raise reject("what make_parallel returns", parallel, "return model, at its end")
        got = ObservedRun.of(parallel, *self._moved(self.rows(rank), device), tangent, wanted)
        return RankComparison(parts, wanted, got, self.tolerance).report()

    def _model(self) -> nn.Module:
        model = self.make_model()
        if not isinstance(model, nn.Module):
            raise reject("what make_model returns", model, "a model")
        if any(one.is_meta for one in model.parameters()):
            raise ShardingError(
                "make_model returns a model on `meta`, which holds no values\n"
                "  try: a model with values; make_parallel shards what it is given"
            )
        return model

    def _vary(self, model: nn.Module) -> None:
        """Other numbers in parameters that hold one alone: a bias of zeros may be added twice, and nothing is seen."""
        with torch.no_grad():
            for place, one in enumerate(model.parameters()):
                if one.requires_grad and one.numel() > 1 and bool((one == one.flatten()[0]).all()):
                    one.add_(self._drawn(one.shape, place).to(one), alpha=0.1)

    def _drawn(self, shape: torch.Size, place: int) -> torch.Tensor:
        """Of the seed and the place alone."""
        generator = torch.Generator().manual_seed(self.seed + place)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def _moved(self, call: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors, tree = flatten(call)
        return unflatten(tree, [one.detach().clone().to(device) for one in tensors])


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
