"""One parallel model: from a call to the executable that runs it on this rank."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.calls.executable import Executable
from autoshard.calls.global_call import GlobalCall, global_call
from autoshard.calls.outputs import output_layouts
from autoshard.plan.candidates import BEST, Candidate
from autoshard.plan.find_plan import canonical_capture, named_parameters
from autoshard.plan.micro_batches import cut_call
from autoshard.plan.optimizer_names import optimizer_name
from autoshard.plan.plan import Plan
from autoshard.plan.plan_fits import axes_in, runnable
from autoshard.plan.task import CallLayouts
from autoshard.plan.task_prices import prices_of
from autoshard.progress import stages_of
from autoshard.runtime.agreement import agree, collectively, everyones, from_first
from autoshard.runtime.copies import Copies, same_parameters
from autoshard.runtime.devices import check_placed, local_device, move_buffers
from autoshard.runtime.guards import Guards
from autoshard.runtime.input_side import InputSide
from autoshard.runtime.module import Built, dispatcher_of
from autoshard.runtime.nccl import in_host_order
from autoshard.runtime.observe import Observer
from autoshard.runtime.optimizers import optimizers_of
from autoshard.runtime.parameters import distribute_parameters
from autoshard.runtime.piecewise_step import PiecewiseProgram
from autoshard.runtime.planner import Planner
from autoshard.runtime.process_groups import groups_for
from autoshard.runtime.programs import AnyProgram, Programs
from autoshard.runtime.race import race
from autoshard.runtime.race_entry import RaceEntry
from autoshard.runtime.seeds import SeedStream
from autoshard.runtime.settings import Settings
from autoshard.runtime.step import Program
from autoshard.runtime.wrapping import check_unwrapped
from autoshard.version import __version__
from autoshard.watching.check_inputs import CheckInputs, checked_inputs
from autoshard.watching.kinds import kind_of, local_call, tensor_shapes, turns_of
from autoshard.watching.watches import watch_of
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.capture import Captured, flatten_call
from passes.ir.joint import JointGraph
from passes.layout.layout import Layout
from passes.layout.placements import placements_to_layout
from passes.lower.missing_tangents import usually_missing
from passes.lower.rank_program import RankProgram, rank_program
from passes.plan.describe import graph_hash
from passes.schedule.schedule import one_communicator_at_a_time, scheduled
from passes.strategies.prices import Prices

__all__ = ["Session"]

_log = logging.getLogger("autoshard")


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
        self.seeds = SeedStream()
        self._copies: Copies[Session] = Copies()
        self.watch = watch_of(mesh)

    @staticmethod
    def of(model: nn.Module) -> Session | None:
        """The session behind a model that `autoshard` made parallel."""
        dispatcher = dispatcher_of(model)
        owner = None if dispatcher is None else getattr(dispatcher.build, "__self__", None)
        return owner if isinstance(owner, Session) else None

    def _stages(self, stage: str) -> AbstractContextManager[None]:
        numbers = sum(parameter.numel() for parameter in self.model.parameters())
        return stages_of(self.mesh.get_rank(), f"{type(self.model).__name__} of {numbers} parameters")(stage)

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What of a call's arguments decides its graph."""
        return flatten_call(args, kwargs)[1]

    def build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Built:
        """The executable for calls like this one. Every rank of the mesh must get here."""
        what, detail = "planning a new kind of call", local_call(args, kwargs)
        collectively(self.mesh, self._check_model, what=what, detail=detail)
        shapes = everyones(self.mesh, tensor_shapes(args, kwargs), what="shapes of a new kind of call")
        with self._stages("tracing the model"):
            whole, captured = collectively(
                self.mesh, lambda: self._captured(args, kwargs, shapes), what="capture", detail=detail
            )
        layouts = CallLayouts(
            whole.layouts, output_layouts(captured, self.spec, self.settings.out_placements)
        )
        agree(self.mesh, self._fingerprint(captured.joint, whole))
        with self._stages("finding a plan"):
            plans = self._planned(captured, layouts)
        kind = kind_of(self.model, captured.joint)
        captured = collectively(
            self.mesh, lambda: cut_call(captured, plans[0].plan.micro_batches), what="cutting a batch"
        )
        tensors, key = flatten_call(args, kwargs)
        made = lambda plan: self._made(captured, plan, kind)
        entered = partial(RaceEntry, self.model, captured.joint, self.mesh, tensors)
        plan, made = race(self.mesh, plans, made, entered, self.settings, self.observers)
        programs = Programs(made, self.settings.backend, at_once=self.plan is None)
        self._settle(plan)
        call = replace(captured.call, key=key)
        inputs = checked_inputs(captured.joint, whole.layouts, self.spec, self.mesh.get_rank())
        return Executable(
            self,
            replace(captured, call=call),
            plan,
            layouts,
            programs,
            Guards(self.model, captured.reads),
            CheckInputs(self.mesh, self.watch, inputs),
        )

    def _check_model(self) -> None:
        check_placed(self.model, self.mesh)
        check_unwrapped(self.model)

    def _captured(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: list[list[tuple[int, ...]]]
    ) -> tuple[GlobalCall, Captured]:
        whole = global_call(args, kwargs, self.spec, self.settings.in_placements, lambda _: shapes)
        dispatcher = dispatcher_of(self.model)
        forward = self.model.forward if dispatcher is None else dispatcher.original
        device = local_device(self.mesh)
        return whole, canonical_capture(self.model, whole.args, whole.kwargs, device=device, forward=forward)

    def _fingerprint(self, joint: JointGraph, whole: GlobalCall) -> dict[str, str]:
        return {
            "torch": torch.__version__,
            "autoshard": __version__,
            "inputs": str(whole.shapes),
            "model and its code (canonical graph)": graph_hash(joint),
            **self.settings.described(),
        }

    def _planned(self, captured: Captured, layouts: CallLayouts) -> list[Candidate]:
        """Rank 0's plan, on all ranks; several of them where they are to race."""
        mine: list[Candidate] = []
        planner, first = Planner(self.mesh, self.spec, self._with_optimizer()), self.plan
        refined = planner.refined(captured, layouts) if first is None else None

        def find() -> tuple[list[Any], int]:
            if first is None:
                mine.extend(planner.first(captured, layouts, refined))
            else:
                mine.append(Candidate(BEST, planner.carried(captured, layouts, first, self._held())))
            return [one.to_json() for one in mine], torch.initial_seed()

        data, seed = from_first(self.mesh, find, what="the plan")
        if self.plan is None:
            self.seeds.start(seed)
        plans = collectively(
            self.mesh, lambda: mine or list(map(Candidate.from_json, data)), what="the plan read"
        )
        if plans[0].plan.fallbacks:
            found = ", ".join(plans[0].plan.fallbacks)
            _log.warning("ops without a rule run replicated, with their inputs gathered: %s", found)
        return plans

    def _with_optimizer(self) -> Settings:
        """The optimizer counts that is there, if the user named none."""
        if self.settings.optimizer is not None:
            return self.settings
        live = next(optimizers_of(self.model), None)
        return self.settings if live is None else replace(self.settings, optimizer=optimizer_name(live))

    def _held(self) -> dict[str, Layout]:
        """The layouts that parameters have: of those that are still the model's. A new layer's are free."""
        return {
            name: placements_to_layout(parameter.placements, tuple(parameter.shape), self.spec, what=name)
            for name, parameter in named_parameters(self.model).items()
            if isinstance(parameter, DTensor)
        }

    def _made(self, captured: Captured, plan: Plan, kind: str) -> Callable[[str], AnyProgram]:
        """What compiles this rank's program by a backend, on all ranks together."""
        groups_for(self.mesh, axes_in(plan))
        ours = collectively(self.mesh, lambda: self._lowered(captured, plan), what="lowering a plan")
        sides = self._sides(captured.joint, plan)
        turn = turns_of(self.watch, kind)

        def compiled(backend: str) -> AnyProgram:
            rank = self.mesh.get_rank()
            if len(ours) > 1:
                return PiecewiseProgram(ours, sides, self.spec, rank, backend, turn)
            backward = ours[0].phases.backward
            program = Program(ours[0], sides, self.spec, rank, backend, self.observers, turn)
            if backward is not None:
                program.compile_backward(usually_missing(backward))
            return program

        def together(backend: str) -> AnyProgram:
            with self._stages("compiling the plan"):
                return collectively(self.mesh, lambda: compiled(backend), what="compiling a plan")

        return together

    def _lowered(self, captured: Captured, plan: Plan) -> list[RankProgram]:
        """This rank's program; where a batch is run in pieces, of each."""
        joint = captured.joint
        groups = groups_for(self.mesh, axes_in(plan))
        schedule = one_communicator_at_a_time if self._separately(plan) else scheduled
        with runnable(plan):
            programs = [
                rank_program(graph, layouts, lowering, self.spec, dist.get_rank(), groups, schedule=schedule)
                for graph, layouts, lowering in plan.of_pieces(joint)
            ]
            if len(programs) == 1:
                if self.settings.backend == "eager":  # not what runs op by op twice, until it is compiled
                    programs = [programs[0].joined()]
                _ = programs[0].phases
        return programs

    def _sides(self, joint: JointGraph, plan: Plan) -> list[InputSide]:
        shapes = {node.name: tuple(node.meta["val"].shape) for node in joint.placeholders}
        return [
            InputSide(shapes[node.name], plan.assignment[node.name].results[0])
            for node, spec in zip(joint.placeholders, joint.inputs, strict=True)
            if spec.kind != "tangent"
        ]

    def _separately(self, plan: Plan) -> bool:
        """Whether collectives on different communicators must not be in flight together."""
        if len(plan.communicators) < 2 or in_host_order():
            return False
        if len(axes_in(plan)) > 1 and dist.get_rank() == 0:
            _log.warning(
                "collectives over different mesh axes will not overlap: set NCCL_LAUNCH_ORDER_IMPLICIT=1 on all "
                "ranks before init_process_group (NCCL 2.26), see docs/cuda.md"
            )
        return True

    def prices(self, profile: Profile | None = None) -> Prices:
        """What the program's kernels and collectives cost under `profile`, or the session's own."""
        return prices_of(profile or self.profile, self.spec, self.settings.backend)

    @property
    def profile(self) -> Profile:
        """What it plans with."""
        assert self.settings.profile is not None
        return self.settings.profile

    def _settle(self, plan: Plan) -> None:
        """The first plan's layouts become the parameters'; later plans hold them, and place what is new."""
        if self.plan is None:
            copies = [c for c in self._copies.everywhere(self.mesh) if c.plan is None]
            for session in copies:
                if same_parameters(session.model, self.model):
                    session._take(plan)
        self._take(plan)

    def _take(self, plan: Plan) -> None:
        move_buffers(self.model, local_device(self.mesh))
        if any(not isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            distribute_parameters(self.model, self.mesh, plan.parameters)
        if self.plan is None:
            self.plan = plan
            self.model.autoshard_plan = plan  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """The session of a copied model: parameters and stream of seeds of its own, the plan of this one.

        While there is no plan, a copy gets the one that this model finds, so that both can be averaged.
        """
        twin = Session(copy.deepcopy(self.model, memo), self.mesh, self.spec, self.settings)
        memo[id(self)] = twin
        twin.plan, twin.seeds = self.plan, self.seeds.copied()
        if self.plan is None:
            self._copies.add(twin)
        return twin
