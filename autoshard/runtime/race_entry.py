"""A plan in a race: its program, on copies of all that a training step reads and writes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard.runtime.devices import arrived, local_device
from autoshard.runtime.dtensor_ops import complete_dtensor_ops
from autoshard.runtime.input_side import InputSide, plain_input
from autoshard.runtime.optimizers import optimizers_of
from autoshard.runtime.parameters import Place
from autoshard.runtime.programs import AnyProgram
from autoshard.runtime.sharding import distributed
from autoshard.runtime.stage_mesh import spec_of
from cost_model.mesh import MeshSpec
from passes.ir.joint import GraphInput, JointGraph
from passes.ir.torch_dtensor import local_of
from passes.layout.placements import placements_to_layout

__all__ = ["RaceEntry", "update_like"]

_SPREAD = 0.02
"""Standard deviation of what stands for values that a rank does not have."""


class RaceEntry:
    """Runs training steps of a program; nothing of the model, its gradients or its buffers is written.

    copies() before the first step: this rank's part of the parameters, laid out as `places` has them, and the buffers.
    The call's tensors are read as they are. joint: as the program runs it. tensors: of the call, flat. sides: of the
    program's inputs, tangents excepted. places: by parameter; whole on all ranks where there is none. free() when it
    has run. updating: seconds of the last step's update, as the host has it.
    """

    def __init__(
        self,
        model: nn.Module,
        joint: JointGraph,
        mesh: DeviceMesh,
        tensors: Sequence[Tensor],
        program: AnyProgram,
        sides: Sequence[InputSide],
        places: Mapping[str, Place],
    ) -> None:
        self.program, self._differentiated = program, program.differentiated
        self._model, self._constants, self._mesh, self._tensors = model, joint.constants, mesh, tensors
        given = [spec for spec in joint.inputs if spec.kind != "tangent"]
        self._given = list(zip(given, sides, strict=True))
        self._places, self._everywhere = places, Place(mesh, (Replicate(),) * mesh.ndim)
        self._held: dict[int, Tensor] = {}
        self._leaves: list[Tensor] = []
        self._update: torch.optim.Optimizer | None = None
        self.updating = 0.0

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
        if self._update is not None:
            begin = time.perf_counter()
            self._update.step()
            self.updating = time.perf_counter() - begin
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
                yield i, self._constants[spec.name].to(device)
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
    spec = spec_of(place.mesh)
    layout = placements_to_layout(place.placements, tuple(old.shape), spec, what=name)
    lacks = old.is_meta or isinstance(old, DTensor)
    whole = torch.zeros((), dtype=old.dtype, device=device).expand(old.shape) if lacks else old.detach()
    value = distributed(whole, place.mesh, place.placements, layout, spec, from_first=False)
    if lacks:
        _filled(local_of(value))
    return nn.Parameter(value, requires_grad=old.requires_grad)


def _whole(buffer: Tensor, name: str, device: torch.device) -> Tensor:
    if buffer.is_meta:
        return _filled(torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    return arrived(buffer.detach(), name, device).clone()


def _filled(tensor: Tensor) -> Tensor:
    return tensor.normal_(0.0, _SPREAD) if tensor.is_floating_point() else tensor.zero_()


def update_like(model: nn.Module, copies: Sequence[Tensor]) -> torch.optim.Optimizer:
    """The optimizer that has the model's parameters, if there is one of torch's, for `copies`; else the fused AdamW,
    by which profiles measure updates. It moves nothing: its learning rate is 0."""
    for optimizer in optimizers_of(model):
        kind = type(optimizer)
        if kind is not torch.optim.LBFGS:
            return kind(list(copies), **_options(kind, optimizer.defaults))
    return torch.optim.AdamW(list(copies), lr=0.0, fused=_may_fuse(copies))


def _may_fuse(copies: Sequence[Tensor]) -> bool:
    """Of floating point numbers there is a kernel, on CPUs and on GPUs."""
    return all(copy.is_floating_point() for copy in copies)


def _options(kind: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(kind).parameters
    return {name: value for name, value in defaults.items() if name in known} | {"lr": 0.0}
