"""One parallel model: from a call to the executable that runs it on this rank."""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, Generic

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.arguments import optimizer_name
from autoshard.call_ends import capture_as_now
from autoshard.global_call import GlobalCall, axes_of_batch, counts_as_in_order, global_call
from autoshard.plan.judged import prices_of
from autoshard.plan.other_sizes import OtherSizes
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_words import fallback_lines
from autoshard.plan.task import CallLayouts
from autoshard.planning import canonical_capture
from autoshard.progress import Say, stages_of
from autoshard.refine.refine import Refined
from autoshard.runtime.executable import Executable, MadeAhead, Programs, SeedStream
from autoshard.runtime.guards import Guards
from autoshard.runtime.making import Call, places_of
from autoshard.runtime.module import Built, T, dispatcher_of
from autoshard.runtime.observe import Observer, StageRecorder
from autoshard.runtime.optimizers import torch_optimizers_of
from autoshard.runtime.parameters import place_parameters
from autoshard.runtime.planner import Found, Planner, Settings, shared_plans
from autoshard.runtime.process_groups import local_device
from autoshard.runtime.sharding import held_layouts, make_ready, move_buffers
from autoshard.runtime.sized_calls import AtSizes, SizedAt, SizedCalls
from autoshard.runtime.starting import (
    FarSizes,
    StartingHome,
    is_to_rehearse,
    keep_tuned,
    race,
    rehearsed,
    search_beside,
)
from autoshard.runtime.tuning import Tuning, was_compiled
from autoshard.version import __version__
from autoshard.watching.agreement import agree, collectively, everyones
from autoshard.watching.check_calls import CheckCalls, Replicas, checked_inputs, local_call, tensor_shapes
from autoshard.watching.watch import watch_of
from cost_model.errors import ShardingError, log
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.canonicalize.mark_rows import experts_of
from passes.capture import Captured, flatten_call
from passes.capture.call import CallKey
from passes.capture.questions import NO_ANSWERS, Answers
from passes.ir.joint import JointGraph
from passes.ir.routing import check_experts
from passes.ir.size_names import dynamic_dims
from passes.ir.torch_inductor import warm_inductor
from passes.ir.torch_sizes import marked_dims
from passes.plan.describe import graph_hash
from passes.rules.core.rule_registry import users_rules
from passes.strategies.prices import Prices


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
        self.stage_clocks: list[StageRecorder] = []
        self.seeds = SeedStream()
        self._copies: _Copies[Session] = _Copies()
        self.copied = False  # copies are averaged with the model, and have its layouts
        self.tunings: list[Tuning] = []
        self._far = FarSizes(self)
        self._sized = SizedCalls()
        self._asked: list[list[tuple[int, ...]]] | None = None
        """Shapes of all ranks' inputs, where they are asked for at every call, of the last."""
        self.watch = watch_of(mesh)

    @staticmethod
    def of(model: nn.Module) -> Session | None:
        """The session behind a model that `autoshard` made parallel."""
        dispatcher = dispatcher_of(model)
        owner = None if dispatcher is None else getattr(dispatcher.build, "__self__", None)
        return owner if isinstance(owner, Session) else None

    def stages(self, stage: str, call: object) -> AbstractContextManager[Say]:
        """call: what tells its kind, shapes included, from others."""
        numbers = sum(parameter.numel() for parameter in self.model.parameters())
        # A stage takes as long again only where all is the same: the backend, the mesh and the shapes above all.
        given = sorted(self.settings.described().items())
        how = hashlib.sha256(f"{self.spec} {given} {call}".encode()).hexdigest()[:8]
        subject = f"{type(self.model).__name__} of {numbers} parameters, {self.settings.backend}, {how}"
        return stages_of(self.mesh.get_rank(), subject)(stage)

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The part of a call's arguments that decides its graph. Where each rank passes its part of the batch, the
        sizes of all of them: every rank must get here."""
        key, s = flatten_call(args, kwargs)[1], self.settings
        if counts_as_in_order(key, s.in_placements, axes_of_batch(s.batch, self.spec, s.stages)):
            key = key.in_order
        if s.batch != "per_rank":
            return key
        self._asked = self._shapes(args, kwargs)
        return key, str(self._asked)

    def _global_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: list[list[tuple[int, ...]]]
    ) -> GlobalCall:
        s = self.settings
        axes = axes_of_batch(s.batch, self.spec, s.stages)
        return global_call(args, kwargs, self.spec, s.in_placements, lambda _: shapes, axes)

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[tuple[int, ...]]]:
        return everyones(self.mesh, tensor_shapes(args, kwargs), what="shapes of a call's inputs")

    def build(self, args: tuple[Any, ...], kwargs: dict[str, Any], answers: Answers = NO_ANSWERS) -> Built:
        """The executable for calls like this one. Every rank of the mesh must get here.

        answers: to questions that the forward asks of values."""
        what, detail = "planning a new kind of call", local_call(args, kwargs)
        shapes = self._asked or self._shapes(args, kwargs)
        whole = cache(lambda: self._global_call(args, kwargs, shapes))
        if not answers and (ready := self._ready(args, kwargs, whole)) is not None:
            return ready
        collectively(self.mesh, lambda: make_ready(self.model, self.mesh), what=what, detail=detail)
        with self.stages("tracing the model", detail):
            capture = lambda: self._captured(whole(), flatten_call(args, kwargs)[0], answers)
            captured, sized = collectively(self.mesh, capture, what="capture", detail=detail)
        ends = self.settings.ends(self.spec, whole())
        layouts = ends(captured, whole().layouts)
        fingerprint = _fingerprint_of(self.settings, captured.joint, whole())
        tensors, key = flatten_call(args, kwargs)
        agree(self.mesh, {**fingerprint, "mark_dynamic": str([sorted(marked_dims(t)) for t in tensors])})
        making = Call(self, captured, layouts, tensors)
        is_first = self.plan is None
        if not is_first:
            with self.stages("making a program for all sizes", fingerprint):
                ready = self._sized.added(making, whole(), sized, lambda: self.replanned(making))
            if ready is not None:
                return self._ready_for(whole(), ready, key)
        capture_there = capture_as_now(partial(canonical_capture, **self._captured_as), self.spec)
        given = self.model, self.spec, whole(), captured, capture_there, ends
        sizes = OtherSizes.of(*given, self.settings.sizes if is_first else {})
        programs = started(self, replace(self._planner, sizes=sizes), making, fingerprint)
        plan, captured = programs.running.plan, programs.running.captured
        guards = Guards(self.model, captured.reads)  # of the parameters as they were placed
        if sized is not None:
            sized.call.guards = guards
        ready = self._sized.added(making, whole(), sized, lambda: plan) if is_first else None
        if is_first and ready is None and sized is not None and self.settings.dynamic:
            log.warning(
                "every size has a program of its own: the plan has a head in pieces, or parts of given sizes"
            )
        return self._executable(whole(), programs, key, guards)

    def _executable(self, whole: GlobalCall, programs: Programs, key: CallKey, guards: Guards) -> Executable:
        plan, captured = programs.running.plan, programs.running.captured
        self._far.seen(whole.shapes)
        inputs = checked_inputs(captured.joint, whole.layouts, self.spec, self.mesh.get_rank())
        # With stages a buffer follows on the ranks whose stage changes it.
        staged = isinstance(plan, PipelinePlan)
        buffers = [] if staged else [i.name for i in captured.joint.inputs if i.kind == "buffer"]
        check = CheckCalls(self.mesh, self.watch, inputs, Replicas(self.model, buffers))
        return Executable(self, replace(captured.call, key=key), programs, guards, check)

    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Callable[[], GlobalCall]
    ) -> Executable | None:
        """What runs a call by a program for all sizes that there is; None where some rank has none."""
        if not self._sized.has_programs:
            return None
        found = None
        with suppress(ShardingError):  # which a program of its own says on all ranks
            found = whole()
        ready = self._sized.ready(self, found)
        if ready is None or found is None:
            return None
        return self._ready_for(found, ready, flatten_call(args, kwargs)[1])

    def _ready_for(self, whole: GlobalCall, ready: AtSizes, key: CallKey) -> Executable:
        self.settle(ready.running.plan)
        return self._executable(whole, ready, key, ready.guards)

    def _captured(
        self, whole: GlobalCall, tensors: Sequence[torch.Tensor], answers: Answers
    ) -> tuple[Captured, SizedAt | None]:
        capture = partial(canonical_capture, self.model, whole.args, whole.kwargs, **self._captured_as)
        if answers:
            return capture(answers=answers), None
        dynamic = dynamic_dims(self.settings.dynamic, tensors, whole.shapes, self.plan is None)
        return self._sized.captured(self.model, whole, capture, dynamic)

    @property
    def _captured_as(self) -> dict[str, Any]:
        dispatcher = dispatcher_of(self.model)
        forward = self.model.forward if dispatcher is None else dispatcher.original
        return {"device": local_device(self.mesh), "forward": forward, "routing": self.settings.routing}

    def planned(
        self, planner: Planner, captured: Captured, layouts: CallLayouts, refined: Refined | None
    ) -> Found:
        """Rank 0's plan, on all ranks; several of them where they are to race."""
        first = self.plan
        held = {} if isinstance(first, PipelinePlan) else held_layouts(self.model, self.spec)

        def find() -> tuple[Found, None]:
            if first is None:
                return planner.first(captured, layouts, refined), None
            return planner.carried(captured, layouts, first, held), None

        found, _, seed = shared_plans(self.mesh, find)
        if first is None:
            self.seeds.start(seed)
        self.tell_fallbacks(found[0].plan)
        return found

    def tell_fallbacks(self, plan: Plan) -> None:
        if replicated := fallback_lines(plan.stages):
            log.warning("%s", "\n".join(replicated))

    def replanned(self, call: Call) -> Plan:
        return self.planned(self._planner, call.whole, call.layouts, None)[0].plan

    def exchanged(self, plan: Plan) -> None:
        self._adopt(plan)
        for tuning in self.tunings:
            tuning.stale = tuning.running.plan is not plan
        self._sized.forget_programs()  # which are for the layouts before
        dispatcher = dispatcher_of(self.model)
        if dispatcher is not None:
            dispatcher.keep_only(lambda one: isinstance(one, Executable) and one.moves)

    @property
    def _planner(self) -> Planner:
        """The optimizer counts that is there, if the user named none."""
        settings, live = self.settings, next(torch_optimizers_of(self.model), None)
        if settings.optimizer is None and live is not None:
            settings = replace(settings, optimizer=optimizer_name(live))
        return Planner(self.mesh, self.spec, settings)

    def prices(self, profile: Profile | None = None) -> Prices:
        """The prices of the program's kernels and collectives under `profile`, or the session's own."""
        return prices_of(profile or self.profile, self.spec, self.settings.backend)

    @property
    def profile(self) -> Profile:
        """The profile that it plans with."""
        assert self.settings.profile is not None
        return self.settings.profile

    def settle(self, plan: Plan) -> None:
        """The first plan's layouts become the parameters'; later plans hold them, and place what is new."""
        if self.plan is None:
            copies = [c for c in self._copies.everywhere(self.mesh) if c.plan is None]
            for session in copies:
                if _same_parameters(session.model, self.model):
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


class _Copies(Generic[T]):
    """The copies that wait for a plan. They are not kept alive."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[T]] = []

    def add(self, copy: T) -> None:
        self._made.append(weakref.ref(copy))

    def everywhere(self, mesh: DeviceMesh) -> Iterator[T]:
        """Those that every rank still has. Collective: the collector of one rank may be ahead of another's."""
        alive = {number: found for number, ref in enumerate(self._made) if (found := ref()) is not None}
        common = set.intersection(*everyones(mesh, set(alive)))
        return (alive[number] for number in sorted(common))


def _same_parameters(model: nn.Module, other: nn.Module) -> bool:
    """Whether both have the same names and shapes, so that the layouts of one fit the other."""
    shapes = [[(n, p.shape) for n, p in m.named_parameters(remove_duplicate=False)] for m in (model, other)]
    return shapes[0] == shapes[1]


def _fingerprint_of(settings: Settings, joint: JointGraph, whole: GlobalCall) -> dict[str, str]:
    """What all ranks must have alike before they plan a call."""
    return {
        "torch": torch.__version__,
        "autoshard": __version__,
        "inputs": str(whole.shapes),
        "model and its code (canonical graph)": graph_hash(joint),
        "rules (register_rule)": hashlib.sha256(str(users_rules(joint.graph)).encode()).hexdigest()[:8],
        **settings.described(),
    }


def started(home: StartingHome, planner: Planner, call: Call, fingerprint: object) -> Programs:
    """All ranks together."""
    settings = home.settings
    if home.plan is None:
        check_experts(settings.routing, experts_of(call.whole.joint.graph))
    if settings.starts_at_once and (home.plan is None or settings.tune != "off"):
        return _at_once(home, planner, call, fingerprint)
    return _ahead(home, planner, call, fingerprint)


def _ahead(home: StartingHome, planner: Planner, call: Call, fingerprint: object) -> MadeAhead:
    backend, first = home.settings.backend, home.plan is None
    with home.stages("finding a plan", fingerprint) as say:
        planner = replace(planner, say=say)
        refined = planner.refined(call.whole, call.layouts) if first else None
        found = home.planned(planner, call.whole, call.layouts, refined)
    plan, made = race(call, found)
    if first and planner.may_rehearse and is_to_rehearse(plan, home.settings.time_limit):
        with home.stages("rehearsing the plan", fingerprint):
            plan, made = rehearsed(call, plan, made)
        if refined is not None and plan.rehearsed is not None:
            refined.keep(plan)  # for the next start
    program = made(backend if first else "eager")
    home.settle(plan)
    later = None if first or backend == "eager" else lambda: made(backend)
    return MadeAhead(call.running(plan, program), later)


def _at_once(home: StartingHome, planner: Planner, call: Call, fingerprint: object) -> Tuning:
    """A plan that is found soon, op by op; what is better is made beside the steps, unless that is off."""
    backend, first, work = home.settings.backend, home.plan is None, None
    store = planner.store() if first else None
    with home.stages("finding a plan", fingerprint) as say:
        if first:
            planner = replace(planner, say=say)
            plan, tuned, seed = planner.quick(call.whole, call.layouts, store)
            home.seeds.start(seed)
            home.tell_fallbacks(plan)
        else:
            plan, tuned = home.replanned(call), False
    made = call.made(plan)
    compiled = first and (home.settings.tune == "off" or was_compiled(home, plan, call.kind))
    program = made(backend if compiled else "eager")
    home.settle(plan)
    if first and not tuned and home.settings.tune == "background":
        work = search_beside(planner, call, plan, store)
        if (
            work is None and home.mesh.get_rank() == 0
        ):  # nothing better is looked for at the next start either
            keep_tuned(planner.task(call.whole, call.layouts, home.settings.pins), planner.division, plan)
    to_compile = None if compiled or backend == "eager" else made
    if to_compile is not None and backend == "inductor":
        warm_inductor()
    begin = 2 if first else 3  # a last, smaller batch comes once an epoch
    tuning = Tuning(home, call, call.running(plan, program), to_compile, begin=begin, search=work)
    home.tunings.append(tuning)
    return tuning
