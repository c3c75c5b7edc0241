"""What runs one kind of call on this rank: the leaves of the graph in, the user's outputs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.plan.plan import Plan
from autoshard.plan.task import CallLayouts
from autoshard.runtime.devices import arrived, local_device, seed_on
from autoshard.runtime.guards import Guards
from autoshard.runtime.input_side import InputSide, OutputSide, plain_input, wrapped_output
from autoshard.runtime.programs import Programs
from autoshard.runtime.seeds import SeedStream
from autoshard.watching.check_inputs import CheckInputs
from cost_model.mesh import MeshSpec
from passes.capture import Captured, flatten_call
from passes.ir.joint import JointGraph
from passes.layout.layout import Layout

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
        plan: Plan,
        layouts: CallLayouts,
        programs: Programs,
        guards: Guards,
        check_inputs: CheckInputs,
    ) -> None:
        self.guards = guards
        self._home = home
        self._check_inputs = check_inputs
        self._spec = captured.call
        self._programs = programs
        joint = captured.joint
        self._leaves = [
            leaf for leaf in (_leaf(home, joint, plan, i) for i in range(len(joint.inputs))) if leaf
        ]
        self._outputs = _output_sides(joint, plan, layouts.outputs)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, _ = flatten_call(args, kwargs)
        self._check_inputs(tensors)
        leaves = [leaf(tensors) for leaf in self._leaves]
        outputs = self._programs.next()(leaves)
        home = self._home
        wrapped = [
            wrapped_output(value, side, home.mesh, home.spec)
            for value, side in zip(outputs, self._outputs, strict=True)
        ]
        return self._spec.unflatten(wrapped, args, kwargs)


Leaf = Callable[[Sequence[Tensor]], Tensor]


def _leaf(home: Home, joint: JointGraph, plan: Plan, position: int) -> Leaf | None:
    """How to get the tensor of one placeholder in a call; None for tangents."""
    spec, node = joint.inputs[position], joint.placeholders[position]
    if spec.kind == "tangent":
        return None
    device = local_device(home.mesh)
    if spec.kind == "seed":
        return lambda tensors: seed_on(home.seeds.next(), device)
    if spec.kind == "constant":
        constant = joint.constants[spec.name].to(device)
        return lambda tensors: constant
    if spec.kind == "input":
        side = InputSide(tuple(node.meta["val"].shape), plan.assignment[node.name].results[0])
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


def _output_sides(joint: JointGraph, plan: Plan, asked: Mapping[int, Layout | None]) -> list[OutputSide]:
    """One per tensor output of a call, in the order of their index. asked: as in `CallLayouts`."""
    shapes = {
        spec.index: tuple(result.meta["val"].shape)
        for spec, result in zip(joint.outputs, joint.results, strict=True)
        if spec.kind == "output" and result is not None
    }
    sides: list[OutputSide] = []
    for index in sorted(shapes):
        layout = plan.outputs[index]
        assert layout is not None
        kind = "global" if index not in asked else "dtensor" if asked[index] is None else "local"
        sides.append(OutputSide(shapes[index], layout, kind))
    return sides
