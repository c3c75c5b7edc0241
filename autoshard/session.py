"""One parallel model: from a call to the executable that runs it on this rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.inputs import GlobalCall, global_call
from autoshard.plan import Plan
from autoshard.planning import CallLayouts, canonical_capture, output_layouts, prices_of, search_plan
from autoshard.runtime.agreement import agree, collectively, everyones, from_first
from autoshard.runtime.boundary import InputSide, OutputSide, plain_input, wrapped_output
from autoshard.runtime.devices import arrived, check_placed, local_device, move_buffers, seed_on
from autoshard.runtime.module import Call, dispatcher_of
from autoshard.runtime.nccl import in_host_order
from autoshard.runtime.observe import Observer
from autoshard.runtime.parameters import distribute_parameters
from autoshard.runtime.process_groups import groups_for
from autoshard.runtime.step import Program
from autoshard.version import __version__
from autoshard.watching.inputs import CheckInputs, checked_inputs
from autoshard.watching.kinds import kind_of, local_call, tensor_shapes, turns_of
from autoshard.watching.registry import watch_of
from cost_model.errors import PlanError
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.bucket_plan import bucketed_turns
from passes.capture import CallSpec, Captured, flatten_call
from passes.describe import graph_hash
from passes.joint import JointGraph
from passes.layout import Layout
from passes.lower_rank import lower_rank
from passes.missing_tangents import usually_missing
from passes.phases import split_phases
from passes.search.space import Prices

__all__ = ["Session", "Settings"]

_log = logging.getLogger("autoshard")


@dataclass(frozen=True)
class Settings:
    """What the user asked `autoshard` for; see its docstring."""

    profile: Profile
    memory_limit: int | None
    in_placements: Any
    out_placements: Any
    pins: Mapping[str, Layout]
    plan: Plan | None
    backend: str
    time_limit: float


class Session:
    """Plans, compiles and runs the calls of one model on one mesh.

    The first call (or the example) decides the parameters' layouts; later kinds of call (other
    shapes, eval, no_grad) are planned with those held fixed. Every step that may fail is done on all
    ranks together before anything changes, so either all ranks go on or all raise.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, spec: MeshSpec, settings: Settings) -> None:
        self.model = model
        self.mesh = mesh
        self.spec = spec
        self.settings = settings
        self.plan: Plan | None = None
        self.observers: list[Observer] = []
        self._first: CallSpec | None = None
        self._generator = torch.Generator()
        self.watch = watch_of(mesh)

    @staticmethod
    def of(model: nn.Module) -> Session | None:
        """The session behind a model that `autoshard` made parallel."""
        dispatcher = dispatcher_of(model)
        owner = None if dispatcher is None else getattr(dispatcher.build, "__self__", None)
        return owner if isinstance(owner, Session) else None

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What of a call's arguments decides its graph; ShardingError if it is no call of this model."""
        _, key = flatten_call(args, kwargs)
        if self._first is not None:
            self._first.check(key)
        return key

    def build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The executable for calls like this one. Every rank of the mesh must get here."""
        what, detail = "planning a new kind of call", local_call(args, kwargs)
        collectively(self.mesh, lambda: check_placed(self.model, self.mesh), what=what, detail=detail)
        shapes = everyones(self.mesh, tensor_shapes(args, kwargs), what="shapes of a new kind of call")
        whole, captured = collectively(
            self.mesh, lambda: self._captured(args, kwargs, shapes), what="capture", detail=detail
        )
        layouts = CallLayouts(
            whole.layouts, output_layouts(captured, self.spec, self.settings.out_placements)
        )
        agree(self.mesh, self._fingerprint(captured.joint, whole))
        plan = self._planned(captured, layouts)
        groups_for(self.mesh, _axes_in(plan, self.spec))
        kind = kind_of(self.model, captured.joint)
        program = collectively(
            self.mesh, lambda: self._program(captured, plan, kind), what="compiling a plan"
        )
        self._settle(replace(captured.call, key=flatten_call(args, kwargs)[1]), plan)
        inputs = checked_inputs(captured.joint, whole.layouts, self.spec, self.mesh.get_rank())
        return _Executable(self, captured, plan, program, CheckInputs(self.mesh, self.watch, inputs)).call

    def _captured(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: list[list[tuple[int, ...]]]
    ) -> tuple[GlobalCall, Captured]:
        whole = global_call(args, kwargs, self.spec, self.settings.in_placements, lambda _: shapes)
        dispatcher = dispatcher_of(self.model)
        forward = self.model.forward if dispatcher is None else dispatcher.original
        device = local_device(self.mesh)
        return whole, canonical_capture(self.model, whole.args, whole.kwargs, device=device, forward=forward)

    def _fingerprint(self, joint: JointGraph, whole: GlobalCall) -> dict[str, str]:
        given = self.settings.plan
        return {
            "torch": torch.__version__,
            "autoshard": __version__,
            "inputs": str(whole.shapes),
            "model and its code (canonical graph)": graph_hash(joint),
            "in_placements": str(self.settings.in_placements),
            "out_placements": str(self.settings.out_placements),
            "profile": self.settings.profile.hash(),
            "plan": "searched" if given is None else given.fingerprint,
            "pins": str(sorted(self.settings.pins.items())),
            "memory_limit": str(self.settings.memory_limit),
            "backend": self.settings.backend,
        }

    def _planned(self, captured: Captured, layouts: CallLayouts) -> Plan:
        """Rank 0's plan, on all ranks."""
        mine: list[Plan] = []

        def find() -> tuple[dict[str, Any], int]:
            mine.append(self._plan(captured, layouts))
            return mine[0].to_json(), torch.initial_seed()

        data, seed = from_first(self.mesh, find, what="the plan")
        if self.plan is None:
            self._generator.manual_seed(seed)
        plan = mine[0] if mine else Plan.from_json(data)
        if plan.fallbacks:
            found = ", ".join(plan.fallbacks)
            _log.warning("ops without a rule run replicated, with their inputs gathered: %s", found)
        return plan

    def _plan(self, captured: Captured, layouts: CallLayouts) -> Plan:
        settings = self.settings
        if self.plan is None and settings.plan is not None:
            _check_mesh(settings.plan, self.spec)
            settings.plan.check_graph(captured.joint)
            return settings.plan
        pins = settings.pins if self.plan is None else self.plan.parameter_layouts
        return search_plan(
            captured,
            settings.profile,
            self.spec,
            layouts,
            pins,
            settings.memory_limit,
            settings.backend,
            settings.time_limit,
        )

    def _program(self, captured: Captured, plan: Plan, kind: str) -> Program:
        joint, rank = captured.joint, dist.get_rank()
        prices = self.prices()
        groups = groups_for(self.mesh, _axes_in(plan, self.spec))
        turns = bucketed_turns(joint, plan.assignment, prices)
        ours = lower_rank(joint, plan.assignment, prices, rank, groups, turns)
        phases = split_phases(ours.module, joint.inputs, joint.outputs)
        shapes = {node.name: tuple(node.meta["val"].shape) for node in joint.placeholders}
        sides = [
            InputSide(shapes[node.name], plan.assignment[node.name].results[0])
            for node, spec in zip(joint.placeholders, joint.inputs, strict=True)
            if spec.kind != "tangent"
        ]
        separately = self._separately(plan)
        backend, turn = self.settings.backend, turns_of(self.watch, kind)
        program = Program(phases, sides, self.spec, rank, backend, self.observers, separately, turn)
        if phases.backward is not None:
            program.compile_backward(usually_missing(phases.backward))
        return program

    def _separately(self, plan: Plan) -> bool:
        """Whether collectives on different communicators must not be in flight together."""
        if len(plan.communicators) < 2 or in_host_order():
            return False
        if len(_axes_in(plan, self.spec)) > 1 and dist.get_rank() == 0:
            _log.warning(
                "collectives over different mesh axes will not overlap: set NCCL_LAUNCH_ORDER_IMPLICIT=1 on all "
                "ranks before init_process_group (NCCL 2.26), see docs/cuda.md"
            )
        return True

    def prices(self, profile: Profile | None = None) -> Prices:
        """What the program's kernels and collectives cost under `profile`, or the session's own."""
        return prices_of(profile or self.settings.profile, self.spec, self.settings.backend)

    def _settle(self, call: CallSpec, plan: Plan) -> None:
        """The first plan's layouts become the parameters', and `call` what later calls must look like."""
        if self.plan is not None:
            return
        move_buffers(self.model, local_device(self.mesh))
        distribute_parameters(self.model, self.mesh, plan.parameters)
        self.plan = plan
        self._first = call
        self.model.autoshard_plan = plan  # type: ignore[assignment]

    def next_seed(self) -> Tensor:
        """The seed of one step's random ops, on the CPU: the same on every rank, another every call."""
        return torch.randint(0, 2**62, (), generator=self._generator, dtype=torch.int64)


class _Executable:
    """Runs one kind of call: gathers the leaves, runs the program, rebuilds the user's outputs."""

    def __init__(
        self, session: Session, captured: Captured, plan: Plan, program: Program, check_inputs: CheckInputs
    ) -> None:
        self._session = session
        self._check_inputs = check_inputs
        self._spec = captured.call
        self._program = program
        joint = captured.joint
        self._leaves = [
            leaf for leaf in (_leaf(session, joint, plan, i) for i in range(len(joint.inputs))) if leaf
        ]
        self._outputs = _output_sides(session, joint, plan)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, _ = self._spec.flatten(args, kwargs)
        self._check_inputs(tensors)
        leaves = [leaf(tensors) for leaf in self._leaves]
        outputs = self._program(leaves)
        session = self._session
        wrapped = [
            wrapped_output(value, side, session.mesh, session.spec)
            for value, side in zip(outputs, self._outputs, strict=True)
        ]
        return self._spec.unflatten(wrapped)


Leaf = Callable[[Sequence[Tensor]], Tensor]


def _leaf(session: Session, joint: JointGraph, plan: Plan, position: int) -> Leaf | None:
    """How to get the tensor of one placeholder in a call; None for tangents."""
    spec, node = joint.inputs[position], joint.placeholders[position]
    if spec.kind == "tangent":
        return None
    device = local_device(session.mesh)
    if spec.kind == "seed":
        return lambda tensors: seed_on(session.next_seed(), device)
    if spec.kind == "constant":
        constant = joint.constants[spec.name].to(device)
        return lambda tensors: constant
    if spec.kind == "input":
        side = InputSide(tuple(node.meta["val"].shape), plan.assignment[node.name].results[0])
        return lambda tensors: plain_input(
            arrived(tensors[spec.index], spec.name, device), side, session.mesh, session.spec
        )
    owner, name = _owner(session.model, spec.name)
    return lambda tensors: getattr(owner, name)


def _owner(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    module, _, name = path.rpartition(".")
    return model.get_submodule(module), name


def _output_sides(session: Session, joint: JointGraph, plan: Plan) -> list[OutputSide]:
    """One per tensor output of a call, in the order of their index."""
    asked = session.settings.out_placements
    shapes = {
        spec.index: tuple(result.meta["val"].shape)
        for spec, result in zip(joint.outputs, joint.results, strict=True)
        if spec.kind == "output" and result is not None
    }
    kind = "dtensor" if asked == "keep" else "local"
    sides: list[OutputSide] = []
    for index in sorted(shapes):
        layout = plan.outputs[index]
        assert layout is not None
        sides.append(OutputSide(shapes[index], layout, kind if asked is not None else "global"))
    return sides


def _axes_in(plan: Plan, spec: MeshSpec) -> list[tuple[str, ...]]:
    """The groups that the plan's collectives need, axes in mesh order; the same list on every rank."""
    return sorted({tuple(sorted(c.axes, key=spec.index)) for c in plan.collectives})


def _check_mesh(plan: Plan, spec: MeshSpec) -> None:
    if (plan.mesh.names, plan.mesh.sizes) != (spec.names, spec.sizes):
        raise PlanError(
            f"the plan was made for {plan.mesh}, and this is {spec}\n  try: find_plan(...) for this mesh"
        )
