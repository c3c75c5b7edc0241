"""One parallel model: from a call to the executable that runs it on this rank."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.arguments import check_unwrapped, optimizer_name
from autoshard.global_call import GlobalCall, global_call, output_layouts
from autoshard.plan.find_plan import canonical_capture, named_parameters
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_cache import Candidate
from autoshard.plan.plan_prices import prices_of
from autoshard.plan.plan_words import fallback_lines
from autoshard.plan.task import CallLayouts
from autoshard.progress import stages_of
from autoshard.refine.refine import Refined
from autoshard.runtime.executable import Executable, MadeAhead, SeedStream
from autoshard.runtime.guards import Guards
from autoshard.runtime.making import Call, places_of
from autoshard.runtime.module import Built, Copies, dispatcher_of, same_parameters
from autoshard.runtime.observe import Observer, StageClock
from autoshard.runtime.optimizers import optimizers_of
from autoshard.runtime.parameters import place_parameters
from autoshard.runtime.planner import Found, Planner, Settings
from autoshard.runtime.process_groups import local_device
from autoshard.runtime.race import is_to_rehearse, race, rehearsed
from autoshard.runtime.searching import search_beside
from autoshard.runtime.sharding import check_placed, move_buffers
from autoshard.runtime.tuning import Tuning, was_compiled
from autoshard.version import __version__
from autoshard.watching.agreement import agree, collectively, everyones, from_first
from autoshard.watching.check_calls import CheckCalls, Replicas, checked_inputs, local_call, tensor_shapes
from autoshard.watching.watch import watch_of
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.capture import Captured, flatten_call
from passes.ir.joint import JointGraph
from passes.layout.layout import Layout
from passes.layout.placements import placements_to_layout
from passes.plan.describe import graph_hash
from passes.rules.core.rule_registry import users_rules
from passes.strategies.prices import Prices

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
        self.stage_clocks: list[StageClock] = []
        self.seeds = SeedStream()
        self._copies: Copies[Session] = Copies()
        self.copied = False  # copies are averaged with the model, and have its layouts
        self.tunings: list[Tuning] = []
        self.watch = watch_of(mesh)

    @staticmethod
    def of(model: nn.Module) -> Session | None:
        """The session behind a model that `autoshard` made parallel."""
        dispatcher = dispatcher_of(model)
        owner = None if dispatcher is None else getattr(dispatcher.build, "__self__", None)
        return owner if isinstance(owner, Session) else None

    def stages(self, stage: str, call: object) -> AbstractContextManager[None]:
        """call: what tells its kind, shapes included, from others."""
        numbers = sum(parameter.numel() for parameter in self.model.parameters())
        # A stage takes as long again only where all is the same: the backend, the mesh and the shapes above all.
        given = sorted(self.settings.described().items())
        how = hashlib.sha256(f"{self.spec} {given} {call}".encode()).hexdigest()[:8]
        subject = f"{type(self.model).__name__} of {numbers} parameters, {self.settings.backend}, {how}"
        return stages_of(self.mesh.get_rank(), subject)(stage)

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The part of a call's arguments that decides its graph."""
        return flatten_call(args, kwargs)[1]

    def build(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], answers: Sequence[torch.Tensor] = ()
    ) -> Built:
        """The executable for calls like this one. Every rank of the mesh must get here.

        answers: to the first questions that the forward asks of values."""
        what, detail = "planning a new kind of call", local_call(args, kwargs)
        collectively(self.mesh, self._check_model, what=what, detail=detail)
        shapes = everyones(self.mesh, tensor_shapes(args, kwargs), what="shapes of a new kind of call")
        with self.stages("tracing the model", detail):
            whole, captured = collectively(
                self.mesh,
                lambda: self._captured(args, kwargs, shapes, answers),
                what="capture",
                detail=detail,
            )
        layouts = CallLayouts(
            whole.layouts, output_layouts(captured, self.spec, self.settings.out_placements)
        )
        fingerprint = self._fingerprint(captured.joint, whole)
        agree(self.mesh, fingerprint)
        tensors, key = flatten_call(args, kwargs)
        making = Call(self, captured, layouts, tensors)
        at_once = self.settings.starts_at_once and (self.plan is None or self.settings.tune != "off")
        programs = (self._at_once if at_once else self._ahead)(self._planner, making, fingerprint)
        captured = programs.running.captured
        inputs = checked_inputs(captured.joint, whole.layouts, self.spec, self.mesh.get_rank())
        # With stages a buffer follows on the ranks whose stage changes it.
        staged = isinstance(programs.running.plan, PipelinePlan)
        buffers = [] if staged else [i.name for i in captured.joint.inputs if i.kind == "buffer"]
        return Executable(
            self,
            replace(captured.call, key=key),
            programs,
            Guards(self.model, captured.reads),
            CheckCalls(self.mesh, self.watch, inputs, Replicas(self.model, buffers)),
        )

    def _ahead(self, planner: Planner, making: Call, fingerprint: object) -> MadeAhead:
        """All of it before the first step."""
        backend, first = self.settings.backend, self.plan is None
        with self.stages("finding a plan", fingerprint):
            refined = planner.refined(making.whole, making.layouts) if first else None
            found = self._planned(planner, making.whole, making.layouts, refined)
        plan, made = race(making, found)
        if first and planner.may_rehearse and is_to_rehearse(plan, self.settings.time_limit):
            with self.stages("rehearsing the plan", fingerprint):
                plan, made = rehearsed(making, plan, made)
            if refined is not None and plan.rehearsed is not None:
                refined.keep(plan)  # for the next start
        program = made(backend if first else "eager")
        self._settle(plan)
        later = None if first or backend == "eager" else lambda: made(backend)
        return MadeAhead(making.running(plan, program), later)

    def _at_once(self, planner: Planner, making: Call, fingerprint: object) -> Tuning:
        """A plan that is found soon, op by op; what is better is made beside the steps, unless that is off."""
        backend, first, work = self.settings.backend, self.plan is None, None
        store = planner.store() if first else None
        with self.stages("finding a plan", fingerprint):
            if first:
                plan, tuned, seed = planner.quick(making.whole, making.layouts, store)
                self.seeds.start(seed)
                self._told(plan)
            else:
                plan, tuned = self.replanned(making), False
        made = making.made(plan)
        compiled = first and (self.settings.tune == "off" or was_compiled(self, plan, making.kind))
        program = made(backend if compiled else "eager")
        self._settle(plan)
        if first and not tuned and self.settings.tune == "background":
            work = search_beside(planner, making, plan, store)
        to_compile = None if compiled or backend == "eager" else made
        begin = 2 if first else 3  # a last, smaller batch comes once an epoch
        tuning = Tuning(self, making, making.running(plan, program), to_compile, begin=begin, search=work)
        self.tunings.append(tuning)
        return tuning

    def _check_model(self) -> None:
        check_placed(self.model, self.mesh)
        check_unwrapped(self.model)

    def _captured(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shapes: list[list[tuple[int, ...]]],
        answers: Sequence[torch.Tensor],
    ) -> tuple[GlobalCall, Captured]:
        whole = global_call(args, kwargs, self.spec, self.settings.in_placements, lambda _: shapes)
        dispatcher = dispatcher_of(self.model)
        forward = self.model.forward if dispatcher is None else dispatcher.original
        device = local_device(self.mesh)
        captured = canonical_capture(
            self.model, whole.args, whole.kwargs, device=device, forward=forward, answers=answers
        )
        return whole, captured

    def _fingerprint(self, joint: JointGraph, whole: GlobalCall) -> dict[str, str]:
        return {
            "torch": torch.__version__,
            "autoshard": __version__,
            "inputs": str(whole.shapes),
            "model and its code (canonical graph)": graph_hash(joint),
            "rules (register_rule)": hashlib.sha256(str(users_rules(joint.graph)).encode()).hexdigest()[:8],
            **self.settings.described(),
        }

    def _planned(
        self, planner: Planner, captured: Captured, layouts: CallLayouts, refined: Refined | None
    ) -> Found:
        """Rank 0's plan, on all ranks; several of them where they are to race."""
        mine: list[Found] = []
        first = self.plan
        held = {} if isinstance(first, PipelinePlan) else self._held()

        def find() -> tuple[Any, int]:
            if first is None:
                mine.append(planner.first(captured, layouts, refined))
            else:
                mine.append(planner.carried(captured, layouts, first, held))
            return [one.to_json() for one in mine[0]], torch.initial_seed()

        data, seed = from_first(self.mesh, find, what="the plan")
        if self.plan is None:
            self.seeds.start(seed)
        read = lambda: mine[0] if mine else list(map(Candidate.from_json, data))
        found = collectively(self.mesh, read, what="the plan read")
        self._told(found[0].plan)
        return found

    def _told(self, plan: Plan) -> None:
        if replicated := fallback_lines(plan.stages):
            _log.warning("%s", "\n".join(replicated))

    def replanned(self, call: Call) -> Plan:
        return self._planned(self._planner, call.whole, call.layouts, None)[0].plan

    def exchanged(self, plan: Plan) -> None:
        self._adopt(plan)
        for tuning in self.tunings:
            tuning.stale = tuning.running.plan is not plan

    @property
    def _planner(self) -> Planner:
        """The optimizer counts that is there, if the user named none."""
        settings, live = self.settings, next(optimizers_of(self.model), None)
        if settings.optimizer is None and live is not None:
            settings = replace(settings, optimizer=optimizer_name(live))
        return Planner(self.mesh, self.spec, settings)

    def _held(self) -> dict[str, Layout]:
        """The layouts that parameters have: of those that are still the model's. A new layer's are free."""
        return {
            name: placements_to_layout(parameter.placements, tuple(parameter.shape), self.spec, what=name)
            for name, parameter in named_parameters(self.model).items()
            if isinstance(parameter, DTensor)
        }

    def prices(self, profile: Profile | None = None) -> Prices:
        """The prices of the program's kernels and collectives under `profile`, or the session's own."""
        return prices_of(profile or self.profile, self.spec, self.settings.backend)

    @property
    def profile(self) -> Profile:
        """The profile that it plans with."""
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
            place_parameters(self.model, self.mesh, places_of(self.mesh, plan))
        if self.plan is None:
            self._adopt(plan)

    def _adopt(self, plan: Plan) -> None:
        self.plan = plan
        self.model.autoshard_plan = plan  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """The session of a copied model: parameters and stream of seeds of its own, the plan of this one.

        While there is no plan, a copy gets the one that this model finds, so that both can be averaged.
        """
        twin = Session(copy.deepcopy(self.model, memo), self.mesh, self.spec, self.settings)
        memo[id(self)] = twin
        twin.plan, twin.seeds = self.plan, self.seeds.copied()
        self.copied = twin.copied = True
        if self.plan is None:
            self._copies.add(twin)
        return twin
