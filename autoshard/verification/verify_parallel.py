"""`verify_parallel`: parallel code written by hand, on several ranks, held against the model in one process. A forward
and a backward are observed module by module.
"""

from __future__ import annotations

import itertools
import math
import pickle
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard.global_call import as_call
from autoshard.planning import mesh_spec
from autoshard.verification.part_errors import CANCELLED, Divergence, largest, relative_error
from autoshard.verification.verify_plan import TOLERANCE, VerifyReport
from cost_model.errors import RankError, ShardingError, checked_count
from cost_model.mesh import MeshSpec
from passes.capture.trees import flatten, unflatten

Tangent = Callable[[int, torch.Tensor, bool], torch.Tensor]
"""Place of an output, the output, and whether it is of the whole batch -> its gradient."""
Call = tuple[str, int]
"""A module's name, and which of its calls."""
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""Parts of names that wrappers add."""


@dataclass
class _ObservedRun:
    """outputs: floating point, of this rank; whole: whether each is of the whole batch. gradients: of parameters.
    forward, backward: what modules return, and the gradients of that, in the order in which they come. kinds: classes
    of modules by name."""

    outputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    whole: list[bool] = field(default_factory=list[bool])
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict[str, torch.Tensor | None])
    forward: dict[Call, torch.Tensor] = field(default_factory=dict[Call, torch.Tensor])
    backward: dict[Call, torch.Tensor] = field(default_factory=dict[Call, torch.Tensor])
    kinds: dict[str, str] = field(default_factory=dict[str, str])

    @staticmethod
    def of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tangent: Tangent) -> _ObservedRun:
        """Of one call, backward from all of its outputs."""
        run = _ObservedRun()
        handles = list(run._observe(model))
        returned = [one for one in flatten(model(*args, **kwargs))[0] if one.is_floating_point()]
        terms: list[torch.Tensor] = []
        for place, output in enumerate(returned):
            value = whole_value(output)
            is_whole = isinstance(output, DTensor) and output.device_mesh.size() == dist.get_world_size()
            run.whole.append(is_whole)
            run.outputs.append(value.detach())
            if value.requires_grad:
                terms.append((value * tangent(place, value, is_whole)).sum())
        if terms:
            torch.stack(terms).sum().backward()
        for handle in handles:
            handle.remove()
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            run.gradients[_bare(name)] = None if grad is None else whole_value(grad).detach()
        return run

    def _observe(self, model: nn.Module) -> Iterator[Any]:
        calls = Counter[str]()

        def note(name: str, module: nn.Module, output: Any) -> None:
            value = next((one for one in flatten(output)[0] if one.is_floating_point()), None)
            if value is None:
                return
            call = name, calls[name]
            calls[name] += 1
            self.forward[call] = value.detach()
            if value.requires_grad:
                value.register_hook(lambda grad: note_gradient(call, grad))

        def note_gradient(call: Call, grad: torch.Tensor) -> None:
            self.backward.setdefault(call, grad.detach())

        for name, module in model.named_modules():
            bare = _bare(name)
            self.kinds[bare] = type(module).__name__
            yield module.register_forward_hook(
                lambda module, args, output, bare=bare: note(bare, module, output)
            )


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def whole_value(value: torch.Tensor) -> torch.Tensor:
    """A DTensor's, gathered by all of its ranks; any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@dataclass(frozen=True)
class _RankComparison:
    """What this rank and the others `got`, beside what one process `wanted`. All ranks ask the same, in one order."""

    mesh: MeshSpec
    batch_axes: tuple[str, ...]
    rank: int
    wanted: _ObservedRun
    got: _ObservedRun

    def report(self) -> VerifyReport:
        """The same on every rank. ShardingError where the parallel model has other outputs or parameters."""
        gradients = self._gradients()
        floats = [one for one in (*self.wanted.outputs, *self.wanted.gradients.values()) if one is not None]
        limit = max((TOLERANCE.get(one.dtype, 0.0) for one in floats), default=1e-4)
        own = dict(self._output_errors())
        floor = CANCELLED * largest(self.wanted.gradients.values())
        for name, expected in self.wanted.gradients.items():
            if expected is not None:
                own[f"grad {name}"] = _error(gradients.get(name), expected, floor)
        errors = {name: max(one[name] for one in self._of_all(own)) for name in own}
        worst = max(errors.values(), default=0.0)
        if worst <= limit:
            return VerifyReport(True, worst, errors, None)
        return VerifyReport(False, worst, errors, self._first(errors, limit))

    def _gradients(self) -> Mapping[str, torch.Tensor | None]:
        """Of the parallel model, by the model's names."""
        got = self.got.gradients
        if not got.keys() & self.wanted.gradients.keys():  # DistributedDataParallel
            got = {name.removeprefix("module."): value for name, value in got.items()}
        missing = sorted(self.wanted.gradients.keys() - got.keys())
        if missing:
            raise ShardingError(
                f"the parallel model has no parameter {missing[0]}, and {len(missing) - 1} others of the model's\n"
                "  try: code that keeps parameters under their names, as fully_shard and parallelize_module do"
            )
        return got

    def _output_errors(self) -> Iterator[tuple[str, float]]:
        if len(self.got.outputs) != len(self.wanted.outputs):
            raise ShardingError(
                f"the parallel model returns {len(self.got.outputs)} tensors, and the model "
                f"{len(self.wanted.outputs)}\n  try: make_parallel that returns the same"
            )
        group = self.mesh.group(self.rank, self.batch_axes)
        for place, (value, expected) in enumerate(zip(self.got.outputs, self.wanted.outputs, strict=True)):
            if len(group) > 1 and not self.got.whole[place]:
                if value.shape == expected.shape:  # one for the batch: a mean
                    all_ranks = self._of_all(value)
                    value = torch.stack([all_ranks[rank] for rank in group]).mean(0)
                else:
                    expected = expected.chunk(len(group))[self.mesh.linear_index(self.rank, self.batch_axes)]
            yield f"output {place}", _error(value, expected, 0.0)

    def _of_all(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self.mesh.device_count
        dist.all_gather_object(found, own)
        return found

    def _first(self, errors: Mapping[str, float], limit: float) -> Divergence | None:
        """A module that returns something else, else one whose output has another gradient, else a parameter. What
        modules return may cancel where results do not: it differs from ten times the tolerance on."""
        parts = len(self.mesh.group(self.rank, self.batch_axes))
        sides = (("its output", "forward", 1.0), ("the gradient of its output", "backward", float(parts)))
        for said, side, factor in sides:
            wanted, got = getattr(self.wanted, side), getattr(self.got, side)
            for call, value in wanted.items():
                own = _called(got, call)
                if all(self._of_all(own is not None)):
                    assert own is not None
                    pieces = self._of_all(whole_value(own))
                    ways = joined_errors(pieces, value * factor, self.mesh, self.batch_axes)
                    error = min(ways, default=float("inf"))
                    if error > 10.0 * limit:
                        name, kind = call[0] or "the model", self.wanted.kinds[call[0]]
                        return Divergence(name, said, error, kind, "")
        found = next(
            (name for name, error in errors.items() if error > limit and name.startswith("grad ")), None
        )
        if found is None:
            return None
        return Divergence(found.removeprefix("grad "), "its gradient", errors[found], "a parameter", "")


def _called(got: Mapping[Call, torch.Tensor], call: Call) -> torch.Tensor | None:
    name, number = call
    under = f"module.{name}" if name else "module"
    return got.get(call, got.get((under, number)))


def _error(value: torch.Tensor | None, expected: torch.Tensor, floor: float) -> float:
    if value is None or value.shape != expected.shape:
        return float("inf")
    return relative_error(value, expected, max(largest([expected]), floor))


def joined_errors(
    pieces: Sequence[torch.Tensor], expected: torch.Tensor, mesh: MeshSpec, batch_axes: Sequence[str] = ()
) -> Iterator[float]:
    """Errors of every way in which the ranks' pieces may be one value: along each axis copies, parts of a dim or
    summands; along those of the batch also what a mean is of, as a loss of each rank's rows."""
    scale = largest([expected])
    ways: list[int | str] = ["copies", "sum", *range(expected.ndim)]
    for chosen in itertools.product(
        *([*ways, "mean"] if axis in batch_axes else ways for axis in mesh.names)
    ):
        joined = _joined(list(pieces), chosen, mesh, expected.shape)
        if joined is not None and all(one.shape == expected.shape for one in joined):
            yield max(relative_error(one, expected, scale) for one in joined)


def _joined(
    pieces: list[torch.Tensor], ways: Sequence[int | str], mesh: MeshSpec, shape: torch.Size
) -> list[torch.Tensor] | None:
    """All copies; None for parts that do not fit. From the last axis on, as it splits the parts of those before."""
    copies = [pieces]
    for size, way in zip(reversed(mesh.sizes), reversed(ways), strict=True):
        merged: list[list[torch.Tensor]] = []
        for row in copies:
            groups = [row[i : i + size] for i in range(0, len(row), size)]
            if way == "copies":
                merged += [list(one) for one in zip(*groups, strict=True)]
                continue
            if isinstance(way, int) and sum(one.shape[way] for one in groups[0]) > shape[way]:
                return None
            try:
                merged.append([_merged(one, way) for one in groups])
            except (RuntimeError, IndexError):  # of other shapes
                return None
        copies = merged
    return [row[0] for row in copies]


def _merged(pieces: list[torch.Tensor], way: int | str) -> torch.Tensor:
    if isinstance(way, int):
        return torch.cat(pieces, way)
    total: torch.Tensor = sum(pieces)  # type: ignore[assignment]
    return total / len(pieces) if way == "mean" else total


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
        wanted = _ObservedRun.of(whole, *self._moved((self.args, self.kwargs), device), self._tangent)
        parallel = self.make_parallel(other, mesh)

        def tangent(place: int, output: torch.Tensor, is_whole: bool) -> torch.Tensor:
            given = self._tangent(place, wanted.outputs[place], True)
            shares = self.parts > 1 and not is_whole and output.shape != given.shape
            return self.parts * self.part(given, rank) if shares else given

        got = _ObservedRun.of(parallel, *self._moved(self.rows(rank), device), tangent)
        return _RankComparison(self.mesh, self.batch_axes, rank, wanted, got).report()

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
