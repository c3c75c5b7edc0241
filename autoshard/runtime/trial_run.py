"""A trial: a program runs for a few real steps on copies of all that a step uses, by the clock of this rank."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard.runtime.call_program import CallProgram
from autoshard.runtime.leaves import InputSide, plain_input
from autoshard.runtime.optimizers import torch_optimizers_of
from autoshard.runtime.parameters import Place, complete_dtensor_ops
from autoshard.runtime.process_groups import local_device, spec_of, whole_group
from autoshard.runtime.sharding import arrived, distributed
from autoshard.watching.agreement import collectively, everyones, in_company
from cost_model.errors import RankError, log
from cost_model.mesh import MeshSpec
from passes.ir.joint import GraphInput, JointGraph
from passes.ir.torch_dtensor import local_of
from passes.layout.placements import placements_to_layout


@dataclass(eq=False)
class RaceEntry:
    """Runs training steps of a program; nothing of the model, its gradients or its buffers is written.

    copies() before the first step: this rank's part of the parameters, laid out as `places` has them, and the buffers.
    The call's tensors are read as they are. _joint: as the program runs it. _tensors: of the call, flat. _sides: of the
    program's inputs, tangents excepted. _places: by parameter; whole on all ranks where there is none. free() when it
    has run. updates: seconds of each step's update, as the host has it.
    """

    _model: nn.Module
    _joint: JointGraph
    _mesh: DeviceMesh
    _tensors: Sequence[Tensor]
    program: CallProgram
    _sides: Sequence[InputSide]
    _places: Mapping[str, Place]

    def __post_init__(self) -> None:
        self._differentiated = self.program.differentiated
        given = [spec for spec in self._joint.inputs if spec.kind != "tangent"]
        self._given = list(zip(given, self._sides, strict=True))
        self._everywhere = Place(self._mesh, (Replicate(),) * self._mesh.ndim)
        self._held: dict[int, Tensor] = {}
        self._leaves: list[Tensor] = []
        self._update: torch.optim.Optimizer | None = None
        self.updates: list[float] = []

    def copies(self) -> None:
        """Make the copies, without other ranks."""
        device = local_device(self._mesh)
        complete_dtensor_ops(device)
        with torch.no_grad():
            self._held = dict(self._made(device))
        trained = [t for t in self._held.values() if t.requires_grad]
        if self._differentiated and trained:
            self._update = update_like(self._model, trained)

    def begin(self) -> None:
        """The call's tensors as the plan reads them; all ranks together, since it may move shards of them."""
        device = local_device(self._mesh)
        self._leaves = [
            self._held[i] if i in self._held else self._input(spec, side, device)
            for i, (spec, side) in enumerate(self._given)
        ]

    def step(self) -> None:
        """Forward, backward, update."""
        with torch.enable_grad():
            outputs = self.program(self._leaves)
            wanted = [outputs[i] for i in self._differentiated if outputs[i].requires_grad]
            if wanted:
                torch.autograd.backward(wanted, [torch.ones_like(output) for output in wanted])
        begin = time.perf_counter()
        if self._update is not None:
            self._update.step()
        self.updates.append(time.perf_counter() - begin)
        for leaf in self._leaves:
            leaf.grad = None

    def free(self) -> None:
        """Drop the copies."""
        self._held, self._leaves, self._update = {}, [], None

    def _made(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        for i, (spec, _) in enumerate(self._given):
            if spec.kind == "param":
                place = self._places.get(spec.name, self._everywhere)
                yield i, _parameter(parameters[spec.name], place, spec.name, device)
            elif spec.kind == "buffer":
                yield i, _whole(buffers[spec.name], spec.name, device)
            elif spec.kind == "constant":
                yield i, self._joint.constants[spec.name].to(device)
            elif spec.kind == "seed":
                yield i, torch.zeros((), dtype=torch.int64, device=device)

    def _input(self, spec: GraphInput, side: InputSide, device: torch.device) -> Tensor:
        given = self._tensors[spec.index]
        value = given.detach()
        if value.is_meta:
            value = torch.zeros(value.shape, dtype=value.dtype, device=device)
        with torch.no_grad():
            local = plain_input(arrived(value, spec.name, device), side, self._mesh, MeshSpec.of(self._mesh))
        return local.detach().requires_grad_(given.requires_grad)


def _parameter(old: Tensor, place: Place, name: str, device: torch.device) -> Tensor:
    """This rank's part, a DTensor as the real one will be. Values that the rank lacks are random."""
    layout = placements_to_layout(place.placements, tuple(old.shape), spec_of(place.mesh), what=name)
    lacks = old.is_meta or isinstance(old, DTensor)
    whole = torch.zeros((), dtype=old.dtype, device=device).expand(old.shape) if lacks else old.detach()
    value = distributed(whole, place.mesh, place.placements, layout, from_first=False)
    if lacks:
        filled(local_of(value))
    return nn.Parameter(value, requires_grad=old.requires_grad)


def _whole(buffer: Tensor, name: str, device: torch.device) -> Tensor:
    if buffer.is_meta:
        return filled(torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    return arrived(buffer.detach(), name, device).clone()


def filled(tensor: Tensor) -> Tensor:
    """Small, as parameters are: it stands for values that this rank does not have."""
    return tensor.normal_(0.0, 0.02) if tensor.is_floating_point() else tensor.zero_()


def update_like(model: nn.Module, copies: Sequence[Tensor]) -> torch.optim.Optimizer:
    """The optimizer that has the model's parameters, if there is one of torch's, for `copies`; else the fused AdamW,
    by which profiles measure updates. It moves nothing: its learning rate is 0."""
    for optimizer in torch_optimizers_of(model):
        kind = type(optimizer)
        if kind is not torch.optim.LBFGS:
            return kind(list(copies), **_options(kind, optimizer.defaults))
    # Of floating point numbers there is a fused kernel, on CPUs and on GPUs.
    return torch.optim.AdamW(list(copies), lr=0.0, fused=all(copy.is_floating_point() for copy in copies))


def _options(kind: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(kind).parameters
    return {name: value for name, value in defaults.items() if name in known} | {"lr": 0.0}


WARM_STEPS = 2


def steps_within(seconds: float, least: int) -> int:
    """The number of steps of so many seconds that are timed, `least` at least."""
    # The most steps of a plan that are timed, and how long they may take: short steps run more often.
    return max(least, min(25, int(1.5 / max(seconds, 1e-9))))


class Track:
    """All ranks come to each method together. occasion: what the plans run for, in what is said of a failure."""

    def __init__(self, mesh: DeviceMesh, occasion: str) -> None:
        self._mesh, self._occasion, self.device_type = mesh, occasion, mesh.device_type
        self._token = torch.zeros(1, device=local_device(mesh))
        self._group = whole_group(mesh) if mesh.size() > 1 else None

    def room(self, memory_limit: int | None) -> int:
        """Bytes there are for plans on the fullest rank."""
        free = _free_bytes(self._mesh)
        mine = free if memory_limit is None else min(free, memory_limit)
        return min(everyones(self._mesh, mine, what=f"memory for {self._occasion}"))

    def copied(self, name: str, entry: RaceEntry) -> bool:
        """Whether there is memory for its copies, on all ranks."""
        try:
            collectively(self._mesh, entry.copies, what=f"copies for {self._occasion} of {name}")
        except RankError:
            raise
        except Exception as error:  # on all ranks
            log.warning("%s without %s, for lack of its copies: %s", self._occasion, name, error)
            entry.free()
            return False
        return True

    def alone(self, name: str, entry: RaceEntry, least: int) -> list[float]:
        """Seconds of its steps, `least` at least, its copies made before and freed after; []: there is no memory."""
        times: list[float] = []
        if self.copied(name, entry):
            steps = steps_within(self.warm(name, entry), least)
            times = [self.step(name, entry) for _ in range(steps)]
        entry.free()
        return times

    def warm(self, name: str, entry: RaceEntry) -> float:
        """Seconds of the last of the first steps, on the slowest rank."""
        with self._in_company(name):
            entry.begin()
        mine = [self.step(name, entry) for _ in range(WARM_STEPS)][-1]
        return max(everyones(self._mesh, mine, what=f"a step of {self._occasion}"))

    def step(self, name: str, entry: RaceEntry) -> float:
        """Seconds from when all ranks are there."""
        with self._in_company(name):
            self._meet()
            begin = time.perf_counter()
            entry.step()
            self._synchronize()
            return time.perf_counter() - begin

    def _in_company(self, name: str) -> AbstractContextManager[None]:
        return in_company(self._mesh, f"{self._occasion} of {name}")

    def _meet(self) -> None:
        if self._group is not None:
            dist.all_reduce(self._token, group=self._group)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._mesh.device_type != "cpu":
            torch.get_device_module(self._mesh.device_type).synchronize()


def _free_bytes(mesh: DeviceMesh) -> int:
    """Free bytes of this rank's device, or its share of the host's memory, as far as that is known."""
    if mesh.device_type == "cuda":
        return torch.cuda.mem_get_info(local_device(mesh))[0]
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size()))
    try:
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(known["MemAvailable"].split()[0]) * 1024 // max(1, ranks)
    except (OSError, ValueError, KeyError):
        return 0
