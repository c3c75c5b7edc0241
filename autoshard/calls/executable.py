"""What runs one kind of call on this rank: the leaves of the graph in, the user's outputs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.calls.call_ends import CallEnds
from autoshard.runtime.devices import arrived, local_device, seed_on
from autoshard.runtime.guards import Guards
from autoshard.runtime.input_side import InputSide, plain_input, wrapped_output
from autoshard.runtime.programs import Programs
from autoshard.runtime.seeds import SeedStream
from autoshard.watching.check_calls import CheckCalls
from cost_model.mesh import MeshSpec
from passes.capture import Captured, flatten_call
from passes.ir.joint import GraphInput, JointGraph

__all__ = ["Executable", "Home"]


class Home(Protocol):
    """Where a call's tensors come from: a session."""

    model: nn.Module
    mesh: DeviceMesh
    spec: MeshSpec
    seeds: SeedStream


class Executable:
    """Runs one kind of call: gathers the leaves, runs the program, rebuilds the user's outputs."""

    def __init__(
        self,
        home: Home,
        captured: Captured,
        ends: CallEnds,
        programs: Programs,
        guards: Guards,
        check_call: CheckCalls,
    ) -> None:
        self.guards = guards
        self.answers = tuple(check.answer for _, check in captured.call.checks)
        self._home = home
        self._check_call = check_call
        self._spec = captured.call
        self._programs = programs
        joint = captured.joint
        self._given = [spec for spec in joint.inputs if spec.kind != "tangent"]
        self._leaves = [
            _leaf(home, joint, spec, side) for spec, side in zip(self._given, ends.inputs, strict=True)
        ]
        self._has_run = False
        self._outputs = ends.outputs

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, _ = flatten_call(args, kwargs)
        self._check_call(tensors)
        leaves = [leaf(tensors) for leaf in self._leaves]
        home = self._home
        if not self._has_run:
            for spec, leaf in zip(self._given, leaves, strict=True):
                arrived(leaf, spec.name, local_device(home.mesh))  # an error for a parameter on meta
            self._has_run = True
        outputs = self._programs.next()(leaves)
        wrapped = [
            wrapped_output(value, side, home.mesh, home.spec)
            for value, side in zip(outputs, self._outputs, strict=True)
        ]
        return self._spec.unflatten(wrapped, args, kwargs)


Leaf = Callable[[Sequence[Tensor]], Tensor]


def _leaf(home: Home, joint: JointGraph, spec: GraphInput, side: InputSide) -> Leaf:
    """How to get the tensor of one placeholder in a call."""
    device = local_device(home.mesh)
    if spec.kind == "seed":
        return lambda tensors: seed_on(home.seeds.next(), device)
    if spec.kind == "constant":
        constant = joint.constants[spec.name].to(device)
        return lambda tensors: constant
    if spec.kind == "input":
        return lambda tensors: plain_input(
            arrived(tensors[spec.index], spec.name, device), side, home.mesh, home.spec
        )
    owner, name = _owner(home.model, spec.name)
    if spec.kind == "param":
        parameters = owner._parameters  # a module's `__getattr__` is Python, and takes four times as long
        return lambda tensors: parameters[name]  # type: ignore[return-value]
    return lambda tensors: arrived(getattr(owner, name), spec.name, device)


def _owner(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    module, _, name = path.rpartition(".")
    return model.get_submodule(module), name
