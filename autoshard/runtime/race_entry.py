"""A plan in a race: its program, on copies of all that a training step reads and writes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.plan.plan import Plan
from autoshard.runtime.devices import arrived, local_device
from autoshard.runtime.dtensor_ops import complete_dtensor_ops
from autoshard.runtime.input_side import InputSide, plain_input
from autoshard.runtime.optimizers import optimizers_of
from autoshard.runtime.programs import AnyProgram
from autoshard.runtime.sharding import shard_of
from autoshard.runtime.step import Program
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.layout.layout import Layout
from passes.layout.placements import layout_to_placements
from passes.lower.missing_tangents import usually_missing

__all__ = ["RaceEntry", "update_like"]

_SPREAD = 0.02
"""Standard deviation of what stands for values that a rank does not have."""


class RaceEntry:
    """Runs training steps of a program; nothing of the model, its gradients or its buffers is written.

    copies() before the first step: this rank's part of the parameters, laid out as `plan` has it, and the buffers. The
    call's tensors are read as they are. tensors: of the call, flat. free() when it has run.
    """

    def __init__(
        self,
        model: nn.Module,
        joint: JointGraph,
        mesh: DeviceMesh,
        tensors: Sequence[Tensor],
        plan: Plan,
        program: AnyProgram,
    ) -> None:
        assert isinstance(program, Program), "plans in pieces do not race"
        self.plan, self.program = plan, program
        self._model, self._joint, self._mesh, self._tensors = model, joint, mesh, tensors
        self._spec = MeshSpec.of(mesh)
        self._held: dict[int, Tensor] = {}
        self._leaves: list[Tensor] = []
        self._update: torch.optim.Optimizer | None = None
        self._wanted = _differentiated(program)

    def copies(self) -> None:
        """Make the copies, without other ranks."""
        device = local_device(self._mesh)
        complete_dtensor_ops(device)
        with torch.no_grad():
            self._held = dict(self._made(device))
        trained = [t for t in self._held.values() if t.requires_grad]
        if self.program.phases.backward is not None and trained:
            self._update = update_like(self._model, trained)

    def begin(self) -> None:
        """The call's tensors as the plan reads them; all ranks together, since it may move shards of them."""
        device = local_device(self._mesh)
        self._leaves = [
            self._held[i] if i in self._held else self._input(i, device)
            for i, spec in enumerate(self._joint.inputs)
            if spec.kind != "tangent"
        ]

    def step(self) -> None:
        """Forward, backward, update."""
        if self.program.phases.backward is None:
            self.program(self._leaves)
            return
        with torch.enable_grad():
            outputs = self.program(self._leaves)
            wanted = [outputs[i] for i in self._wanted if outputs[i].requires_grad]
            if wanted:
                torch.autograd.backward(wanted, [torch.ones_like(output) for output in wanted])
        if self._update is not None:
            self._update.step()
        for leaf in self._leaves:
            leaf.grad = None

    def free(self) -> None:
        """Drop the copies."""
        self._held, self._leaves, self._update = {}, [], None

    def _made(self, device: torch.device) -> Any:
        joint = self._joint
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        for i, (spec, node) in enumerate(zip(joint.inputs, joint.placeholders, strict=True)):
            if spec.kind == "param":
                layout = self.plan.assignment[node.name].results[0]
                yield i, _parameter(parameters[spec.name], layout, self._mesh, self._spec, device)
            elif spec.kind == "buffer":
                yield i, _whole(buffers[spec.name], spec.name, device)
            elif spec.kind == "constant":
                yield i, joint.constants[spec.name].to(device)
            elif spec.kind == "seed":
                yield i, torch.zeros((), dtype=torch.int64, device=device)

    def _input(self, position: int, device: torch.device) -> Tensor:
        spec, node = self._joint.inputs[position], self._joint.placeholders[position]
        layout = self.plan.assignment[node.name].results[0]
        given = self._tensors[spec.index]
        value = given.detach()
        if value.is_meta:
            value = torch.zeros(value.shape, dtype=value.dtype, device=device)
        side = InputSide(tuple(node.meta["val"].shape), layout)
        with torch.no_grad():
            local = plain_input(arrived(value, spec.name, device), side, self._mesh, self._spec)
        return local.detach().requires_grad_(given.requires_grad)


def _differentiated(program: Program) -> list[int]:
    """Positions, among the call's outputs, of those that a usual step differentiates."""
    backward = program.phases.backward
    if backward is None:
        return []
    indices = [o.index for o in program.phases.outputs if o.kind == "output"]
    wanted = {t.index for t in backward.tangents} - usually_missing(backward)
    return [position for position, index in enumerate(indices) if index in wanted]


def _parameter(old: Tensor, layout: Layout, mesh: DeviceMesh, spec: MeshSpec, device: torch.device) -> Tensor:
    """This rank's part, a DTensor as the real one will be. Values that the rank lacks are random."""
    shape = tuple(old.shape)
    local = torch.empty(layout.local_shape(shape, spec, mesh.get_rank()), dtype=old.dtype, device=device)
    if old.is_meta or isinstance(old, DTensor):
        local = _filled(local)
    else:
        local.copy_(shard_of(old.detach(), layout, spec, mesh.get_rank()))
    placed = layout_to_placements(layout, spec)
    stride = torch.empty(shape, device="meta").stride()
    value = DTensor.from_local(local, mesh, placed, run_check=False, shape=old.shape, stride=stride)
    return nn.Parameter(value, requires_grad=old.requires_grad)


def _whole(buffer: Tensor, name: str, device: torch.device) -> Tensor:
    if buffer.is_meta:
        return _filled(torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    return arrived(buffer.detach(), name, device).clone()


def _filled(tensor: Tensor) -> Tensor:
    return tensor.normal_(0.0, _SPREAD) if tensor.is_floating_point() else tensor.zero_()


def update_like(model: nn.Module, copies: Sequence[Tensor]) -> torch.optim.Optimizer:
    """The optimizer that has the model's parameters, if there is one of torch's, for `copies`; else AdamW. It moves
    nothing: its learning rate is 0."""
    for optimizer in optimizers_of(model):
        kind = type(optimizer)
        if kind is not torch.optim.LBFGS:
            return kind(list(copies), **_options(kind, optimizer.defaults))
    return torch.optim.AdamW(list(copies), lr=0.0)


def _options(kind: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(kind).parameters
    return {name: value for name, value in defaults.items() if name in known} | {"lr": 0.0}
